"""Lightning's Trainer and Fabric with the strategy "ppe_ddp": as one process, and as few messages as needed."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ppe_ddp import weigh
from rank_tests import on_two_ranks
from routed import Counter, assert_trained, indices, items_of, made, sgd, started_by_torchrun, trained_alone
from subprocesses import MPIRUN, needs_mpirun, run

# Not imported here: that takes seconds, and every worker collects every file.
pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning: the extra [dev]")


def lightning_module(*, by_hand=False, weighs=False):
    """The module with Lightning's methods, of which no class can be made before Lightning is imported."""
    from lightning.pytorch import LightningModule

    class Trained(LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = not by_hand
            self.net = made()

        def training_step(self, batch, _):
            if weighs:
                return weigh(self.net.loss(batch) * self.trainer.accumulate_grad_batches, items_of(batch))
            if not by_hand:
                return self.net.loss(batch)
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.net.loss(batch) / 2)
            self.manual_backward(self.net.loss(batch) / 2)
            optimizer.step()
            return None

        def configure_optimizers(self):
            return sgd(self)

    return Trained()


def trainer(**options):
    from lightning.pytorch import Trainer

    import ppe_ddp.integrations.lightning  # noqa: F401  # the line of its user

    return Trainer(
        **{"strategy": "ppe_ddp", "accelerator": "cpu", "devices": 2, "use_distributed_sampler": False}
        | {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "max_epochs": 1}
        | {"enable_checkpointing": False}
        | options
    )


AUTOMATIC = {
    "every batch": ({}, {}, 6),
    "accumulated": ({"accumulate_grad_batches": 3}, {"accumulated": 3}, 2),
    "clipped": ({"gradient_clip_val": 0.05}, {"clip": 0.05}, 6),
    "weighed": ({"accumulate_grad_batches": 3}, {"accumulated": 3, "items": items_of}, 2),
}


@pytest.mark.parametrize("case", AUTOMATIC)
@on_two_ranks
def test_the_trainer(case):
    options, alone, synchronized = AUTOMATIC[case]
    from ppe_ddp.integrations.lightning import TrainerStrategy

    module, counter = lightning_module(weighs=case == "weighed"), Counter()
    with started_by_torchrun():
        strategy = TrainerStrategy(ddp_comm_hook=counter)
        trainer(strategy=strategy, **options).fit(module, DataLoader(indices(6), batch_size=None))
    assert_trained(module.net, trained_alone(6, **alone))
    assert counter.steps == synchronized


@on_two_ranks
def test_the_trainer_with_backwards_by_hand():
    module = lightning_module(by_hand=True)
    with started_by_torchrun():
        trainer().fit(module, DataLoader(indices(6), batch_size=None))
    assert_trained(module.net, trained_alone(6))


@pytest.mark.parametrize("leaves", [False, True], ids=["unfrozen", "without parameters"])
@on_two_ranks
def test_a_backward_by_hand_of_what_was_unfrozen_for_it_or_of_no_parameter(leaves):
    """As a discriminator is frozen for the generator's loss, and unfrozen for its own in the next step."""
    module, rank = lightning_module(by_hand=True), dist.get_rank()
    plain = module.training_step

    def training_step(batch, batch_idx):
        module.net.requires_grad_(True)
        if leaves and leaves_out(batch_idx, rank):
            module.optimizers().zero_grad()
            module.manual_backward(torch.ones(1, requires_grad=True).sum())
            module.manual_backward(torch.zeros((), requires_grad=True))
            module.optimizers().step()
        else:
            plain(batch, batch_idx)
        module.net.requires_grad_(False)

    module.training_step = training_step
    with started_by_torchrun():
        trainer().fit(module, DataLoader(indices(6), batch_size=None))
    assert_trained(module.net, trained_without_losses(6) if leaves else trained_alone(6))


def leaves_out(step, rank):
    """Whether a rank has no loss: never, alone, or as all have none."""
    return (step, rank) in {(1, 0), (2, 1), (3, 0), (3, 1)}


def trained_without_losses(count, accumulated=1):
    """`trained_alone` without the losses that :func:`leaves_out`."""
    alone = made()
    optimizer = sgd(alone)
    for step in range(count):
        for other in range(dist.get_world_size()):
            if not leaves_out(step, other):
                (alone.loss(2 * step + other) / 2 / accumulated).backward()
        if (step + 1) % accumulated == 0:
            optimizer.step()
            optimizer.zero_grad()
    return alone.state_dict()


@pytest.mark.parametrize("accumulated", [1, 2])
@on_two_ranks
def test_a_rank_without_a_loss_takes_the_averages_of_the_others(accumulated):
    module, rank = lightning_module(), dist.get_rank()
    inner = module.training_step
    module.training_step = lambda batch, batch_idx: None if leaves_out(batch_idx, rank) else inner(batch, batch_idx)
    loader = DataLoader(indices(6), batch_size=None)
    with started_by_torchrun():
        trainer(accumulate_grad_batches=accumulated).fit(module, loader)
    assert_trained(module.net, trained_without_losses(6, accumulated))


@pytest.mark.parametrize("fewer", [1, 0])
@on_two_ranks
def test_one_rank_validates_longer_than_the_other(fewer):
    module, rank, seen = lightning_module(), dist.get_rank(), []
    module.allow_zero_length_dataloader_with_multiple_devices = True
    module.validation_step = lambda batch, batch_idx: seen.append(module.net.loss(batch).item())
    with started_by_torchrun():
        given = [DataLoader(indices(count), batch_size=None) for count in (6, 3 if rank else fewer)]
        trainer(val_check_interval=2, num_sanity_val_steps=0).fit(module, *given)
    assert len(seen) == 3 * (3 if rank else fewer)
    assert_trained(module.net, trained_alone(6))


@on_two_ranks
def test_the_trainer_goes_on_where_it_was(tmp_path):
    with started_by_torchrun():
        first = trainer(enable_checkpointing=True, default_root_dir=tmp_path)
        first.fit(lightning_module(), DataLoader(indices(3), batch_size=None))
        first.save_checkpoint(tmp_path / "checkpoint")
        module = lightning_module()
        later = DataLoader(indices(6)[3:], batch_size=None)
        trainer(max_epochs=2).fit(module, later, ckpt_path=tmp_path / "checkpoint", weights_only=False)
    assert_trained(module.net, trained_alone(6))


@on_two_ranks
def test_compressors_begin_anew_where_a_training_loads_its_model():
    from lightning.pytorch.callbacks import Callback

    from ppe_ddp.compression import ErrorFeedback, TopK
    from ppe_ddp.integrations.lightning import TrainerStrategy

    kept = []

    class RollsBack(Callback):  # as LearningRateFinder does
        def on_train_batch_end(self, trainer, module, *_):
            kept.append(len(trainer.strategy.model.comm_state_dict()["parameters"]))
            trainer.strategy.load_model_state_dict({"state_dict": module.state_dict()})
            kept.append(len(trainer.strategy.model.comm_state_dict()["parameters"]))

    with started_by_torchrun():
        strategy = TrainerStrategy(ddp_comm_hook=ErrorFeedback(TopK(0.1, min_numel=4)))
        trainer(strategy=strategy, callbacks=[RollsBack()]).fit(
            lightning_module(), DataLoader(indices(1), batch_size=None)
        )
    assert kept[0] > 0
    assert kept[1] == 0
    strategy = TrainerStrategy(ddp_comm_hook=ErrorFeedback(TopK(0.1)), ddp_comm_state=object())
    with started_by_torchrun(), pytest.raises(ValueError, match="a compressor takes no ddp_comm_state"):
        trainer(strategy=strategy).fit(lightning_module(), DataLoader(indices(1), batch_size=None))


@on_two_ranks
def test_compressors_begin_anew_where_fabric_loads_a_module(tmp_path):
    from lightning.fabric import Fabric

    import ppe_ddp.integrations.lightning  # noqa: F401  # the line of its user
    from ppe_ddp.compression import ErrorFeedback, TopK

    with started_by_torchrun():
        fabric = Fabric(strategy="ppe_ddp", accelerator="cpu", devices=2)
        fabric.launch()
        model = fabric.setup(made())
        wrapper = model._forward_module
        wrapper.register_comm_hook(ErrorFeedback(TopK(0.1, min_numel=4)))
        fabric.backward(model(indices(1)[0]).pow(2).mean())
        assert wrapper.comm_state_dict()["parameters"]
        fabric.save(tmp_path / "checkpoint", {"model": model})
        fabric.load(tmp_path / "checkpoint", {"model": model})
        assert not wrapper.comm_state_dict()["parameters"]


@on_two_ranks
def test_fabric():
    from lightning.fabric import Fabric

    import ppe_ddp.integrations.lightning  # noqa: F401  # the line of its user
    from ppe_ddp import DistributedDataParallel

    with started_by_torchrun():
        fabric = Fabric(strategy="ppe_ddp", accelerator="cpu", devices=2)
        fabric.launch()
        net = made()
        model, optimizer = fabric.setup(net, sgd(net))
        wrapper = model._forward_module
        assert isinstance(wrapper, DistributedDataParallel)
        counter = Counter()
        wrapper.register_comm_hook(None, counter)
        for k, index in enumerate(indices(6)):
            with fabric.no_backward_sync(model, enabled=k % 2 == 0):
                fabric.backward(model(index).pow(2).mean() / 2)
            if k % 2 == 1:
                fabric.clip_gradients(model, optimizer, max_norm=0.05)
                optimizer.step()
                optimizer.zero_grad()
        assert_trained(net, trained_alone(6, accumulated=2, clip=0.05))
        assert counter.steps == 3
        with pytest.raises(TypeError, match=r"what fabric\.setup"):
            fabric.strategy._backward_sync_control.no_backward_sync(net, enabled=True)


def train_under_mpirun():
    """The body of a rank that mpirun has started."""

    class Later(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(indices(4))  # when there is a process group

    module = lightning_module()
    trainer().fit(module, DataLoader(Later(), batch_size=None))
    assert_trained(module.net, trained_alone(4))
    print(dist.get_backend())


@pytest.mark.long
@needs_mpirun
def test_under_mpirun_the_group_is_over_mpi4py():
    program = "import test_lightning; test_lightning.train_under_mpirun()"
    folder = Path(__file__).parent
    command = [MPIRUN, "-n", 2, sys.executable, "-c", program]
    code, output, errors = run(command, timeout=60, environment={"PYTHONPATH": f"{folder.parent}:{folder}"})
    assert (code, output.count("mpi4py")) == (0, 2), errors
