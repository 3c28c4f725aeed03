"""pytorch-pfn-extras' Trainer, snapshots and distributed evaluator around this wrapper: as one process."""

from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from ppe_ddp import DistributedDataParallel
from rank_tests import on_two_ranks
from routed import assert_trained, indices, made, sgd, trained_alone

# Not imported here: that takes seconds, and every worker collects every file.
pytestmark = pytest.mark.skipif(
    find_spec("pytorch_pfn_extras") is None, reason="needs pytorch_pfn_extras: the extra [dev]"
)


class Reporting(nn.Module):
    """What ppe's Trainer works with: returns a loss by name, and reports what it has seen in evaluation."""

    def __init__(self):
        super().__init__()
        self.net = made()

    def forward(self, index):
        import pytorch_pfn_extras as ppe

        ppe.reporting.report({"index": float(index)}, self)
        if not self.training:
            ppe.reporting.report({"seen": float(index)})
        return {"loss": self.net.loss(index)}


def trained(folder, epochs):
    import pytorch_pfn_extras as ppe
    from pytorch_pfn_extras.training import extensions

    model = DistributedDataParallel(Reporting())
    ppe.to(model, "cpu")
    trainer = ppe.engine.create_trainer(
        model,
        sgd(model),
        epochs,
        evaluator=ppe.engine.create_evaluator(model, distributed=True, device="cpu", progress_bar=False),
        device="cpu",
        out_dir=str(folder),
    )
    trainer.extend(extensions.snapshot(saver_rank=0, autoload=True))
    if dist.get_rank() == 0:  # it writes a file
        trainer.extend(extensions.LogReport())

    class OfThisEpoch:
        def __len__(self):
            return 3

        def __iter__(self):
            first = 3 * trainer.epoch
            return iter([torch.tensor(index) for index in indices(first + 3)[first:]])

    seen = [torch.tensor(10.0 * (dist.get_rank() + 1))]
    trainer.run(OfThisEpoch(), DataLoader(seen, batch_size=None))
    return trainer, model.module.net


@on_two_ranks
def test_trained_evaluated_and_resumed(tmp_path):
    trained(tmp_path, 1)
    dist.barrier()
    trainer, net = trained(tmp_path, 2)
    assert trainer.iteration == 6
    assert_trained(net, trained_alone(6))
    if dist.get_rank() == 0:
        report = trainer.manager.get_extension("LogReport").log[-1]
        assert report["seen"] == 15  # the mean over the ranks
        assert report["main/index"] == 8, "the names are as with ppe's wrapper"
