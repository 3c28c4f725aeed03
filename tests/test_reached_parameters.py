"""Reached parameters: exactly those that a backward accumulates into, seen from inside that backward."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from one_process import assert_gradients, data, mean_gradients, mlp, seeded, square
from ppe_ddp import DistributedDataParallel, PeerAbortedError
from ppe_ddp.errors import TorchChangedError
from rank_tests import each_variant, on_two_ranks


@pytest.mark.parametrize("options", [{}, {"overlap": False}], ids=str)
@on_two_ranks
def test_a_torch_that_does_not_answer_is_named(options):
    rank, answers, broken = dist.get_rank(), torch._C._will_engine_execute_node, []

    def changed(node):
        if rank in broken:
            raise RuntimeError("get_current_graph_task is gone")
        return answers(node)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(torch._C, "_will_engine_execute_node", changed)
        model = DistributedDataParallel(seeded(mlp, 4, 4, 2), **options)
    expected = mean_gradients(model.module, square)
    for culprits in [[1], [0], [0, 1]]:
        broken[:] = culprits
        error = TorchChangedError if rank in culprits else PeerAbortedError
        model.zero_grad()
        with pytest.raises(error, match=r"node_is_executed: this version of torch .*get_current_graph_task is gone"):
            square(model, rank)
        broken.clear()
        model.zero_grad()
        square(model, rank)
        assert_gradients(model.module, expected)


@each_variant
@on_two_ranks
def test_a_graph_that_is_older_than_a_cast(options):
    # Its nodes are not those that autograd now has for the parameters, which the new parameter makes us look up.
    rank = dist.get_rank()
    model = DistributedDataParallel(seeded(mlp, 4, 4, 2), **options)
    for culprits in [[0], [1], [0, 1]]:
        expected = mean_gradients(model.module, square)
        model.zero_grad()
        graph = model(data(5, 4)).pow(2).sum()
        if rank in culprits:
            model.double().float()
        model.module.register_parameter(f"new{len(expected)}", nn.Parameter(torch.ones(1)))
        model(data(5, 4))
        graph.backward()
        assert_gradients(model.module, {**expected, f"new{len(expected)}": None})


class Product(nn.Module):
    """Its parameter times the input, or the other way around."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x, is_first):
        return self.weight * x if is_first else x * self.weight


@each_variant
@on_two_ranks
def test_a_backward_for_other_inputs_is_none_of_a_wrapper(options):
    rank, x = dist.get_rank(), torch.ones(2, requires_grad=True)
    wrapper = DistributedDataParallel(module := Product(), **options)
    for step in (1, 2):
        wrapper(x, rank == 0).sum().backward(inputs=[x])
        assert x.grad.tolist() == [step] * 2
        wrapper.zero_grad()
        (wrapper(x.detach(), True).sum() * step * (1 + rank)).backward()
        assert module.weight.grad.tolist() == [1.5 * step] * 2
