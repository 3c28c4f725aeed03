"""transformers' Trainer with this library's wrapper: as one process, and its checkpoints load without it."""

import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ppe_ddp import DistributedDataParallel
from ppe_ddp.compression import ErrorFeedback, TopK
from rank_tests import on_two_ranks
from routed import assert_trained, items_of, made, sgd, started_by_torchrun, trained_alone
from subprocesses import MPIRUN, needs_mpirun, run

# Not imported here: that takes seconds, and every worker collects every file.
pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers: the extra [dev]")


def model_class(*, counts_items=False):
    """The module as a model of transformers, which takes seconds to import."""
    from transformers import PretrainedConfig, PreTrainedModel

    class Model(PreTrainedModel):
        config_class = PretrainedConfig
        main_input_name = "index"

        def __init__(self, config):
            super().__init__(config)
            self.net = made()
            self.post_init()

        def _init_weights(self, module):
            pass

        def forward(self, index):
            return {"loss": self.net.loss(index)}

    class Counting(Model):
        def forward(self, index, labels=None, num_items_in_batch=None, **_):
            items = num_items_in_batch if labels is None else labels.ne(-100).sum()
            return {"loss": self.net.loss(index) * items / num_items_in_batch}

    return Counting if counts_items else Model


def mixtral():
    """A tiny mixture of experts, of which a short text reaches a few."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 8, "num_experts_per_tok": 1}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return MixtralForCausalLM(MixtralConfig(**sizes, **heads))


def switch_transformers():
    """A tiny one, whose experts are modules; without what is random or not linear in the batch."""
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    sizes = {"vocab_size": 32, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_decoder_layers": 2}
    sizes |= {"num_heads": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    experts = {"num_experts": 8, "expert_capacity": 64, "router_jitter_noise": 0.0}
    plain = {"dropout_rate": 0.0, "router_aux_loss_coef": 0.0, "router_z_loss_coef": 0.0, "decoder_start_token_id": 0}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(**sizes, **experts, **plain))


def trained(
    folder, count, *, model=None, data=None, collator=None, resume=None, counts_items=False, loss=None, **options
):
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import PretrainedConfig

    from ppe_ddp.integrations.transformers import Trainer, TrainingArguments

    with started_by_torchrun() if dist.is_initialized() else nullcontext():
        try:
            model = model or model_class(counts_items=counts_items)(PretrainedConfig())
            labels = [[1] * items_of(k) + [-100] * (4 - items_of(k)) for k in range(12)]
            given = {"max_grad_norm": 0.0, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
            given |= {"per_device_train_batch_size": 1, "train_sampling_strategy": "sequential", **options}
            trainer = Trainer(
                model,
                TrainingArguments(folder, use_cpu=True, max_steps=count, **given),
                data_collator=collator,
                compute_loss_func=loss,
                train_dataset=data
                or [{"index": k} | ({"labels": labels[k]} if counts_items else {}) for k in range(12)],
                optimizers=(optimizer := sgd(model), torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
            )
            trainer.train(resume_from_checkpoint=resume)
            trainer.save_model(folder / "end")
        finally:
            for state in (AcceleratorState, GradientState, PartialState):
                state._reset_state()
    assert isinstance(trainer.model_wrapped, DistributedDataParallel)
    return trainer


@on_two_ranks
def test_accumulated_and_clipped(tmp_path):
    trainer = trained(tmp_path, 2, gradient_accumulation_steps=3, max_grad_norm=0.05)
    assert_trained(trainer.model.net, trained_alone(6, accumulated=3, clip=0.05))


@pytest.mark.parametrize("across", [True, False])
@on_two_ranks
def test_items_of_all_ranks_are_counted_without_a_gather(across, tmp_path):
    from ppe_ddp.integrations.transformers import Accelerator

    options = {"counts_items": True, "gradient_accumulation_steps": 2, "logging_steps": 1}
    with mock.patch.object(Accelerator, "gather", None):
        trainer = trained(tmp_path, 3, average_tokens_across_devices=across, **options)
    assert trainer.args.average_tokens_across_devices is across
    if across:
        assert_trained(trainer.model.net, trained_alone(6, accumulated=2, items=items_of))
        loss = sum(made().loss(i) * items_of(i) for i in range(4)).item() / sum(map(items_of, range(4)))
        assert trainer.state.log_history[0]["loss"] == pytest.approx(loss, abs=1e-4)


@on_two_ranks
def test_a_loss_of_the_users_own_gets_the_gathered_number(tmp_path):
    from ppe_ddp.integrations.transformers import Accelerator, TrainerMixin

    given = []

    def loss(self, model, inputs, num_items_in_batch=None):
        given.append(num_items_in_batch)
        return model(**inputs, num_items_in_batch=1)["loss"]

    def of_outputs(outputs, _, num_items_in_batch=None):
        given.append(num_items_in_batch)
        return outputs["loss"]

    with mock.patch.object(Accelerator, "gather", return_value=torch.tensor([40, 2])):
        trained(tmp_path, 1, counts_items=True, loss=of_outputs)
        with mock.patch.object(TrainerMixin, "compute_loss", loss, create=True):
            trained(tmp_path, 1, counts_items=True)
    assert given == [42, 42]


def texts_and_padding(seen):
    """Texts of one to six tokens, and what makes a batch of some of them, and adds it to `seen`."""

    def padded(texts):
        length = max(len(text["input_ids"]) for text in texts)
        both = [
            [text["input_ids"] + [fill] * (length - len(text["input_ids"])) for text in texts] for fill in (0, -100)
        ]
        ids, labels = map(torch.tensor, both)
        seen.append({"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": labels})
        return seen[-1]

    return [{"input_ids": [2 + (7 * k + 3 * j) % 9 for j in range(1 + 5 * k % 6)]} for k in range(16)], padded


# A causal model's first label counts for nothing.
@pytest.mark.parametrize(
    ("make", "first", "strategy"),
    [(mixtral, 1, "group_by_length"), (mixtral, 1, "batch_rebalance"), (switch_transformers, 0, "group_by_length")],
    ids=["mixtral by length", "mixtral rebalanced", "switch by length"],
)
@on_two_ranks
def test_experts_that_are_idle_on_a_rank(make, first, strategy, tmp_path):
    data, collator = texts_and_padding(seen := [])
    options = {"per_device_train_batch_size": 2, "train_sampling_strategy": strategy}
    trainer = trained(tmp_path, 4, model=make(), data=data, collator=collator, **options)
    of_ranks = [None, None]
    dist.all_gather_object(of_ranks, seen)
    optimizer = sgd(alone := make())
    experts = {name: parameter for name, parameter in alone.named_parameters() if ".experts." in name}
    idle = False
    for batches in zip(*of_ranks, strict=True):
        reached = []
        items = [batch["labels"][:, first:].ne(-100).sum().item() for batch in batches]
        for batch, count in zip(batches, items, strict=True):
            if count:  # or its mean is 0 / 0, on a rank as well
                loss = alone(**batch).loss * count / sum(items)
                gradients = torch.autograd.grad(loss, experts.values(), retain_graph=True, allow_unused=True)
                reached.append([torch.zeros(0) if g is None else g.flatten(1).any(1) for g in gradients])
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        idle |= not all(torch.equal(*layer) for layer in zip(*reached, strict=True) if len(layer) == 2)
    assert idle
    torch.testing.assert_close(trainer.model.state_dict(), alone.state_dict(), rtol=1e-5, atol=1e-6)
    # Mixtral has the experts of a layer in one parameter.
    assert (set(experts) <= set(trainer.model_wrapped.trace().agreed)) == (make is mixtral)


@on_two_ranks
def test_saved_resumed_and_loaded_without_a_wrapper(tmp_path):
    trained(tmp_path, 3, save_strategy="steps", save_steps=3)
    trainer = trained(tmp_path, 6, resume=str(tmp_path / "checkpoint-3"))
    assert_trained(trainer.model.net, trained_alone(6))
    dist.barrier()  # rank 0 alone has written
    loaded = model_class().from_pretrained(tmp_path / "end")
    assert_trained(loaded.net, trained_alone(6))


@on_two_ranks
def test_the_compressor_of_a_trainer_that_goes_back_begins_anew(tmp_path):
    trainer = trained(tmp_path, 1, save_strategy="steps", save_steps=1)
    wrapper = trainer.model_wrapped
    wrapper.register_comm_hook(ErrorFeedback(TopK(0.1, min_numel=4)))
    wrapper(torch.tensor([0]))["loss"].backward()
    assert wrapper.comm_state_dict()["parameters"]
    dist.barrier()  # rank 0 alone has written
    trainer._load_from_checkpoint(str(tmp_path / "checkpoint-1"))
    assert not wrapper.comm_state_dict()["parameters"]


def train_alone(folder):
    """The body of the only rank of a job."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    trainer = trained(Path(folder), 3, counts_items=True, gradient_accumulation_steps=2, logging_steps=1)
    alone = made()
    optimizer = sgd(alone)
    for k in (0, 2, 4):
        loss = sum(alone.loss(i) * items_of(i) for i in (k, k + 1)) / sum(map(items_of, (k, k + 1)))
        assert trainer.state.log_history[k // 2]["loss"] == pytest.approx(loss.item(), rel=1e-3)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_trained(trainer.model.net, alone.state_dict())


def test_one_process_that_torchrun_has_started(tmp_path):
    program = f"import test_transformers; test_transformers.train_alone({str(tmp_path)!r})"
    folder = Path(__file__).parent
    command = [sys.executable, "-c", program]
    code, _, errors = run(command, timeout=90, environment={"PYTHONPATH": f"{folder.parent}:{folder}"})
    assert code == 0, errors


def train_under_mpirun(folder):
    """The body of a rank that mpirun has started."""
    trainer = trained(Path(folder), 2)
    assert_trained(trainer.model.net, trained_alone(2))
    print(dist.get_backend())


@pytest.mark.long
@needs_mpirun
def test_under_mpirun_the_group_is_over_mpi4py(tmp_path):
    program = f"import test_transformers; test_transformers.train_under_mpirun({str(tmp_path)!r})"
    folder = Path(__file__).parent
    command = [MPIRUN, "-n", 2, sys.executable, "-c", program]
    code, output, errors = run(command, timeout=90, environment={"PYTHONPATH": f"{folder.parent}:{folder}"})
    assert (code, output.count("mpi4py")) == (0, 2), errors
