"""Reached parameters: exactly those that a backward accumulates into, seen from inside that backward."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from one_process import assert_gradients, data, mean_gradients, mlp, seeded, square
from ppe_ddp import DistributedDataParallel, PeerAbortedError
from ppe_ddp.engine.grad_hooks import ReachedParameters
from ppe_ddp.errors import TorchChangedError
from rank_tests import each_variant, on_two_ranks


def seen_while(reach, start, *tensors):
    """What `reach` says inside the backward that `start` runs: as the gradient of each of these tensors comes."""
    seen = []
    for tensor in tensors:
        tensor.register_hook(lambda _: seen.append(reach.indices()))
    start()
    return seen


@pytest.fixture
def three():
    return [nn.Parameter(torch.ones(2)) for _ in range(3)]


def test_what_a_graph_leads_to_is_reached(three):
    reach = ReachedParameters(three)
    hidden = three[0] * 2
    assert seen_while(reach, (hidden + three[2]).sum().backward, hidden) == [[0, 2]]
    other = three[1] * 2
    assert seen_while(reach, other.sum().backward, other) == [[1]]


def test_nothing_is_reached_outside_of_a_backward_and_by_autograd_grad(three):
    reach = ReachedParameters(three)
    assert reach.indices() == []
    hidden = three[0] * 2
    assert seen_while(reach, lambda: torch.autograd.grad(hidden.sum(), three[0]), hidden) == [[]]


def test_backward_with_inputs_reaches_those_alone(three):
    reach = ReachedParameters(three)
    hidden = three[0] * three[1]
    assert seen_while(reach, lambda: hidden.sum().backward(inputs=[three[1]]), hidden) == [[1]]


def test_what_needs_no_gradient_is_not_reached(three):
    three[1].requires_grad_(False)
    reach = ReachedParameters(three)
    hidden = three[0] * three[1]
    assert seen_while(reach, hidden.sum().backward, hidden) == [[0]]


class Reentrant(torch.autograd.Function):
    """A reentrant checkpoint: a backward of its own within the backward."""

    @staticmethod
    def forward(ctx, x, body):
        ctx.x, ctx.body = x.detach().requires_grad_(), body
        return body(x).detach()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            torch.autograd.backward(ctx.body(ctx.x), gradient)
        return ctx.x.grad, None


def test_a_reentrant_checkpoint_reaches_what_only_it_knows(three):
    reach = ReachedParameters(three)
    inside = []

    def body(x):
        y = x * three[1]
        if y.requires_grad:
            y.register_hook(lambda _: inside.append(reach.indices()))
        return y

    hidden = three[0] * 2
    output = Reentrant.apply(hidden, body)
    assert seen_while(reach, output.sum().backward, output) == [[0]]
    assert inside == [[1]]


def test_a_parameter_that_was_cast_is_looked_up_again(three):
    reach = ReachedParameters(three)
    three[0].data = three[0].data.double()
    reach.refresh([0])
    hidden = three[0] * 2
    assert seen_while(reach, hidden.sum().backward, hidden) == [[0]]


def test_parameters_are_looked_up_under_no_grad_too(three):
    with torch.no_grad():
        reach = ReachedParameters(three)
    hidden = three[2] * 2
    assert seen_while(reach, hidden.sum().backward, hidden) == [[2]]


@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"shared_memory": False}], ids=str)
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
