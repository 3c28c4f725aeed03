"""transformers' Trainer with this library's wrapper: as one process, and its checkpoints load without it."""

from importlib.util import find_spec

import pytest
import torch
from torch.utils.data import SequentialSampler

from ppe_ddp import DistributedDataParallel
from rank_tests import on_two_ranks
from routed import assert_trained, made, sgd, started_by_torchrun, trained_alone

# Not imported here: that takes seconds, and every worker collects every file.
pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers: the extra [dev]")


def model_class():
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

    return Model


def trained(folder, count, *, resume=None, **options):
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import PretrainedConfig, TrainingArguments

    from ppe_ddp.integrations.transformers import Trainer

    class InOrder(Trainer):
        def _get_train_sampler(self, dataset=None):
            return SequentialSampler(dataset or self.train_dataset)

    with started_by_torchrun():
        try:
            model = model_class()(PretrainedConfig())
            given = {"max_grad_norm": 0.0, "save_strategy": "no", "report_to": [], "disable_tqdm": True} | options
            trainer = InOrder(
                model,
                TrainingArguments(folder, use_cpu=True, per_device_train_batch_size=1, max_steps=count, **given),
                train_dataset=[{"index": k} for k in range(12)],
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


@on_two_ranks
def test_saved_resumed_and_loaded_without_a_wrapper(tmp_path):
    trained(tmp_path, 3, save_strategy="steps", save_steps=3)
    trainer = trained(tmp_path, 6, resume=str(tmp_path / "checkpoint-3"))
    assert_trained(trainer.model.net, trained_alone(6))
    torch.distributed.barrier()  # rank 0 alone has written
    loaded = model_class().from_pretrained(tmp_path / "end")
    assert_trained(loaded.net, trained_alone(6))
