"""Accelerate's methods on a model that is wrapped in this library's class: as one process."""

import os
import signal
import sys
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from one_process import data, of_all_ranks, seeded
from ppe_ddp import Checkpointer, DistributedDataParallel
from ppe_ddp.compression import ErrorFeedback, LocalSGD, TopK
from rank_tests import on_two_ranks
from routed import Counter, RoutedNet, assert_trained, indices, items_of, made, sgd, started_by_torchrun, trained_alone
from subprocesses import MPIRUN, needs_mpirun, run, warm_python

# Not imported here: that takes seconds, and every worker collects every file.
pytestmark = pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate: the extra [dev]")


@contextmanager
def accelerator(**options):
    """One as torchrun's ranks make it; Accelerate keeps the first one's state for the process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from ppe_ddp.integrations.accelerate import Accelerator

    with started_by_torchrun():
        try:
            yield Accelerator(cpu=True, **options)
        finally:
            for state in (AcceleratorState, GradientState, PartialState):
                state._reset_state()


def steps(made_by, model, optimizer, loader, *, clip=None, items=None):
    for index in loader:
        with made_by.accumulate(model):
            counted = {} if items is None else {"count": items(index)}
            made_by.backward(model(index).pow(2).mean(), **counted)
            if clip is not None and made_by.sync_gradients:
                made_by.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()


@on_two_ranks
def test_accumulated_and_clipped():
    counter = Counter()
    with accelerator(gradient_accumulation_steps=3) as own:
        # Accelerate deals the batches of one loader out to the ranks in turn.
        loader = DataLoader(range(12), batch_size=1)
        net = made()
        model, optimizer, loader = own.prepare(net, sgd(net), loader)
        assert isinstance(model, DistributedDataParallel)
        assert own.unwrap_model(model) is model.module
        assert own.unwrap_model(torch.compile(model, backend="eager")) is model.module
        assert own.prepare(model) is model
        model.register_comm_hook(None, counter)
        steps(own, model, optimizer, loader, clip=0.05)
        assert_trained(own.unwrap_model(model), trained_alone(6, accumulated=3, clip=0.05))
    assert counter.steps == 2


@pytest.mark.parametrize("count", [12, 9, 7], ids=["even", "one batch less on rank 1", "one step less on rank 1"])
@on_two_ranks
def test_losses_of_several_items(count):
    with accelerator(gradient_accumulation_steps=3) as own:
        net = made()
        model, optimizer, loader = own.prepare(net, sgd(net), DataLoader(range(count), batch_size=1))
        with nullcontext() if count == 12 else own.join_uneven_inputs([model], even_batches=False):
            steps(own, model, optimizer, loader, items=items_of)
        assert_trained(net, trained_alone(6, accumulated=3, items=lambda i: items_of(i) if i < count else 0))


@pytest.mark.parametrize("even", [True, False])
@on_two_ranks
def test_a_last_step_of_fewer_micro_batches(even):
    with accelerator(gradient_accumulation_steps=3) as own:
        net, alone = made(), made()
        model, optimizer, loader = own.prepare(net, sgd(net), DataLoader(range(7), batch_size=1))
        with nullcontext() if even else own.join_uneven_inputs([model], even_batches=False):
            steps(own, model, optimizer, loader)
    reference = sgd(alone)
    for step in (range(6), [6, 0] if even else [6]):  # Accelerate repeats the first batch on the other rank
        for index in step:
            (alone.loss(index) / 6).backward()
        reference.step()
        reference.zero_grad()
    assert_trained(net, alone.state_dict())


@on_two_ranks
def test_synchronized_in_the_last_backward_of_several_forwards():
    with accelerator() as own:
        net = made()
        model, optimizer = own.prepare(net, sgd(net))
        model.register_comm_hook(None, counter := Counter())
        with own.no_sync(model):
            first, last = (model(index).pow(2).mean() / 2 for index in indices(2))
            own.backward(first)
            assert counter.steps == 0
            with own.trigger_sync_in_backward(model):
                own.backward(last)
            assert counter.steps == 1
            assert not model.require_backward_grad_sync
        optimizer.step()
        optimizer.zero_grad()
        assert_trained(net, trained_alone(2, accumulated=2))


@on_two_ranks
def test_saved_and_loaded(tmp_path):
    for part in (indices(3), indices(6)[3:]):
        with accelerator() as own:
            net = made()
            model, optimizer = own.prepare(net, sgd(net))
            if part[0] >= 3:
                own.load_state(tmp_path)
            steps(own, model, optimizer, part)
            own.save_state(tmp_path)
            assert list(own.get_state_dict(model)) == list(net.state_dict())
    assert_trained(net, trained_alone(6))


class Memory:
    """What a compressor remembers, for ``register_for_checkpointing()``."""

    def __init__(self, wrapper):
        self.wrapper = wrapper

    def state_dict(self):
        return {"ranks": of_all_ranks(self.wrapper.comm_state_dict())}

    def load_state_dict(self, state):
        self.wrapper.load_comm_state_dict(state["ranks"][dist.get_rank()])


@pytest.mark.parametrize(("is_saved", "is_compiled"), [(False, False), (True, False), (False, True)])
@on_two_ranks
def test_compressors_begin_anew_where_a_training_loads_its_state(is_saved, is_compiled, tmp_path):
    with accelerator(dynamo_backend="eager" if is_compiled else None) as own:
        net = made()
        model, optimizer = own.prepare(net, sgd(net))
        model.register_comm_hook(ErrorFeedback(TopK(0.1, min_numel=4)))
        if is_saved:
            own.register_for_checkpointing(Memory(model))
        steps(own, model, optimizer, indices(1))
        assert model.comm_state_dict()["parameters"]
        own.save_state(tmp_path)
        own.wait_for_everyone()
        own.load_state(tmp_path)
        assert bool(model.comm_state_dict()["parameters"]) == is_saved


@on_two_ranks
def test_options_of_the_wrapper_and_models_that_are_not_trained():
    from accelerate import DistributedDataParallelKwargs

    calls = []

    def average(bucket, group):
        calls.append(bucket.index())
        dist.all_reduce(bucket.buffer().div_(2), group=group)

    handler = DistributedDataParallelKwargs(bucket_cap_mb=1, find_unused_parameters=True)
    with accelerator(kwargs_handlers=[handler], wrapper_options={"reduce_function": average}) as own:
        model = own.prepare(made())
        own.backward(model(indices(1)[0]).sum())
        assert calls == [0]
        assert own.prepare_model(evaluated := made(), evaluation_mode=True) is evaluated
        assert own.prepare(frozen := made().requires_grad_(False)) is frozen
        assert own.unwrap_model(frozen) is frozen


@on_two_ranks
def test_mixed_precision():
    with accelerator(mixed_precision="bf16") as own:
        model = own.prepare(made())
        output = model(indices(1)[0])
        assert output.dtype is torch.float32
        own.backward(output.sum())
        assert isinstance(own.unwrap_model(model, keep_fp32_wrapper=False), RoutedNet)
        model.check_in_sync()


@pytest.mark.parametrize("overflow", [None, 2])
@on_two_ranks
def test_outer_steps_of_an_optimizer_with_a_scaler(overflow):
    from accelerate.optimizer import AcceleratedOptimizer

    def run(scaler):
        model = DistributedDataParallel(seeded(torch.nn.Linear, 4, 3))
        plain = torch.optim.Adamax(model.parameters(), lr=0.01)  # which looks at nothing that a scaler gives it
        optimizer = AcceleratedOptimizer(plain, device_placement=False, scaler=scaler)
        LocalSGD(model, optimizer, every=3)
        for step in range(6):
            optimizer.zero_grad()
            is_wrong = step == overflow and dist.get_rank() == 1
            loss = model(data(5, 4, step=step)).square().mean() * (float("inf") if is_wrong else 1.0)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None or not is_wrong:
                optimizer.step()
                assert optimizer.step_was_skipped is is_wrong
            else:
                plain.zero_grad()
                plain.step()  # counts
        return list(model.parameters())

    with accelerator():
        scaled, unscaled = run(torch.amp.GradScaler("cpu", init_scale=1024.0)), run(None)
    for one, other in zip(scaled, unscaled, strict=True):
        torch.testing.assert_close(one, other)


def train_in_a_cell(folder, interrupted):
    """What a rank of a notebook runs; if it is to be `interrupted`, one waits there and the other in its backward."""
    from ppe_ddp.integrations.accelerate import Accelerator

    own = Accelerator(cpu=True)
    net = made()
    model, optimizer = own.prepare(net, sgd(net))
    checkpointer = Checkpointer(folder, {"model": model, "optimizer": optimizer.optimizer})
    restored = checkpointer.load()
    for step in range(0 if restored is None else restored.step, 6):
        if interrupted and step == 4 and own.process_index == 0:
            os.kill(os.getppid(), signal.SIGINT)
            signal.pause()
        steps(own, model, optimizer, indices(6)[step : step + 1])
        if step == 2:
            checkpointer.save(step + 1)
    assert_trained(net, trained_alone(6))


def run_cells(folder):
    """The second of two cells goes on where the first was interrupted."""
    from accelerate import notebook_launcher
    from torch.distributed.elastic.multiprocessing.api import SignalException

    for cell, ends in enumerate((pytest.raises(SignalException), nullcontext())):
        meeting = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "rdzv_id": str(cell)}
        with ends:
            notebook_launcher(train_in_a_cell, (folder, cell == 0), num_processes=2, **meeting)
    print("trained")


@pytest.mark.long
def test_a_notebook_is_interrupted_and_goes_on(tmp_path):
    folder = Path(__file__).parent
    words = ["-c", f"import test_accelerate; test_accelerate.run_cells({str(tmp_path)!r})"]
    code, output, errors = run(
        [*warm_python(), *words], timeout=90, environment={"PYTHONPATH": f"{folder.parent}:{folder}"}
    )
    assert (code, "trained" in output) == (0, True), errors


def train_under_mpirun():
    """The body of a rank that mpirun has started."""
    from ppe_ddp.integrations.accelerate import Accelerator

    own = Accelerator(cpu=True)
    net = made()
    model, optimizer = own.prepare(net, sgd(net))
    steps(own, model, optimizer, indices(4))
    assert_trained(net, trained_alone(4))
    print(dist.get_backend())


@pytest.mark.long
@needs_mpirun
def test_under_mpirun_the_group_is_over_mpi4py():
    folder = Path(__file__).parent
    command = [MPIRUN, "-n", 2, sys.executable, "-c", "import test_accelerate; test_accelerate.train_under_mpirun()"]
    code, output, errors = run(command, timeout=60, environment={"PYTHONPATH": f"{folder.parent}:{folder}"})
    assert (code, output.count("mpi4py")) == (0, 2), errors
