"""Compatibility with pytorch-pfn-extras' wrapper: each test runs with that class as well as with ours."""

import copy
import inspect
import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn

from one_process import assert_gradients, gradients, mean_gradients, mlp, seeded, square
from ppe_ddp import DistributedDataParallel
from rank_tests import on_two_ranks


def wrapper_class(library):
    """The class of this name in `library`."""
    if library == "ppe_ddp":
        return DistributedDataParallel
    from pytorch_pfn_extras.nn.parallel import DistributedDataParallel as Theirs

    return Theirs


both = pytest.mark.parametrize("library", ["ppe_ddp", "pytorch_pfn_extras"])


class BySign(nn.Module):
    """Uses one parameter for a positive input and the other for a negative one, and makes its buffer anew."""

    def __init__(self, up=3.0, down=5.0):
        super().__init__()
        self.up = nn.Parameter(torch.tensor(up))
        self.down = nn.Parameter(torch.tensor(down))
        self.register_buffer("total", torch.zeros(1))

    def forward(self, x):
        value = x.sum()
        self.total = self.total + value
        return (self.up if value > 0 else self.down) * value.abs()


def signed(*values):
    """The value of this rank."""
    return torch.tensor([float(values[dist.get_rank()])])


def train(wrapper, x):
    output = wrapper(x)
    output.backward()
    return output.detach()


def logged():
    """A list that the warnings of both libraries go to from now on."""
    texts = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())
    for name in ("ppe_ddp", "pytorch_pfn_extras"):
        logging.getLogger(name).addHandler(handler)
    return texts


@both
@on_two_ranks
def test_parameters_and_buffers_start_as_those_of_rank_0(library):
    module = BySign(up=2.0 + dist.get_rank(), down=7.0 - dist.get_rank())
    module.total += 4 + dist.get_rank()
    wrapper = wrapper_class(library)(module)
    assert (module.up, module.down, module.total) == (2, 7, 4)
    assert train(wrapper, signed(1, 3)) == 2 * signed(1, 3)


@both
@on_two_ranks
def test_graphs_that_differ(library):
    wrapper = wrapper_class(library)(BySign())
    assert train(wrapper, signed(2, -6)) == (6 if dist.get_rank() == 0 else 30)
    assert wrapper.module.up.grad == 1
    assert wrapper.module.down.grad == 3
    names = [name for name, _ in wrapper.named_parameters()]
    assert names == ["module.up", "module.down"]


@pytest.mark.parametrize("broadcasts", [True, False])
@both
@on_two_ranks
def test_buffers_after_backward(library, broadcasts):
    wrapper = wrapper_class(library)(BySign(), broadcast_buffers=broadcasts)
    for step in (1, 2):
        output = wrapper(signed(1, 4))
        assert wrapper.module.total == signed(1, 4) + ((step - 1) * (1 if broadcasts else signed(1, 4)))
        output.backward()
        assert wrapper.module.total == step * (1 if broadcasts else signed(1, 4))


def clear(tensors, group):
    assert group is not None
    for tensor in tensors:
        tensor.zero_()


@both
@on_two_ranks
def test_a_reduce_function(library):
    wrapper = wrapper_class(library)(BySign(), reduce_function=clear)
    train(wrapper, signed(1, 4))
    assert wrapper.module.up.grad == 0
    assert wrapper.module.down.grad is None


@both
@on_two_ranks
def test_a_broadcast_function(library):
    wrapper = wrapper_class(library)(BySign(), broadcast_function=clear)
    train(wrapper, signed(1, 4))
    assert wrapper.module.total == 0


@on_two_ranks
def test_functions_get_lists_of_tensors_of_one_dtype_and_the_group():
    calls = []

    def reduce(gradients, group):
        calls.append(({g.dtype for g in gradients}, len(gradients), [g.shape for g in gradients], group))
        flat = torch._utils._flatten_dense_tensors(gradients)
        dist.all_reduce(flat, group=group)
        views = torch._utils._unflatten_dense_tensors(flat / dist.get_world_size(group), gradients)
        for gradient, view in zip(gradients, views, strict=True):
            gradient.copy_(view)

    module = seeded(mlp, 4, 4, 2)
    module[2].double()
    module[1] = Double()
    expected = mean_gradients(module, square)
    wrapper = DistributedDataParallel(module, reduce_function=reduce)
    for _ in range(2):
        wrapper.zero_grad()
        square(wrapper, dist.get_rank())
        assert_gradients(module, expected)
    assert [len(kinds) for kinds, *_ in calls] == [1] * len(calls)
    assert {kind for kinds, *_ in calls for kind in kinds} == {torch.float32, torch.float64}
    assert sum(count for _, count, *_ in calls) == 8
    assert all(dist.get_world_size(group) == 2 for *_, group in calls)


class Double(nn.Module):
    def forward(self, x):
        return torch.tanh(x).double()


@both
@on_two_ranks
def test_no_sync(library):
    wrapper = wrapper_class(library)(BySign())
    with wrapper.no_sync():
        train(wrapper, signed(1, 4))
        assert wrapper.module.up.grad == signed(1, 4)
        assert wrapper.module.total == signed(1, 4)
        with wrapper.no_sync():
            train(wrapper, signed(1, 4))
        train(wrapper, signed(-1, -1))
    assert wrapper.module.up.grad == 2 * signed(1, 4)
    assert wrapper.module.down.grad == 1
    train(wrapper, signed(1, 4))
    assert wrapper.module.up.grad == 7.5


def make_zeros(wrapper):
    for parameter in wrapper.parameters():
        parameter.grad = torch.zeros_like(parameter)


@both
@on_two_ranks
def test_a_hook_before_synchronization(library):
    wrapper = wrapper_class(library)(BySign())
    seen = []
    first = wrapper.register_comm_hook(lambda model: seen.append((model is wrapper, gradients(model.module)["up"])))
    second = wrapper.register_comm_hook(make_zeros)
    train(wrapper, signed(1, 4))
    assert seen == [(True, signed(1, 4))]
    assert wrapper.module.up.grad == wrapper.module.down.grad == 0
    second.remove()
    wrapper.zero_grad()
    train(wrapper, signed(1, 4))
    assert seen == [(True, signed(1, 4))] * 2
    assert wrapper.module.up.grad == 2.5
    first.remove()
    wrapper.zero_grad()
    train(wrapper, signed(1, 4))
    assert len(seen) == 2
    assert wrapper.module.up.grad == 2.5


@both
@on_two_ranks
def test_hooks_that_change_and_remove_gradients(library):
    wrapper = wrapper_class(library)(BySign())

    def change(model):
        model.module.up.grad *= 10
        model.module.down.grad = torch.tensor(signed(0, 8).item()) if dist.get_rank() else None

    handle = wrapper.register_comm_hook(change)
    train(wrapper, signed(1, 4))
    assert wrapper.module.up.grad == 25
    assert wrapper.module.down.grad == 4
    handle.remove()
    wrapper.register_comm_hook(lambda model: model.zero_grad())
    train(wrapper, signed(1, 4))
    assert wrapper.module.up.grad is None
    # Not in no_sync(): nothing is synchronized there.
    with wrapper.no_sync():
        train(wrapper, signed(1, 4))
    assert wrapper.module.up.grad == signed(1, 4)


@both
@on_two_ranks
def test_state_without_a_prefix(library):
    wrapper = wrapper_class(library)(BySign(1.5, 2.5))
    state = wrapper.state_dict()
    assert list(state) == ["up", "down", "total"]
    other = wrapper_class(library)(BySign())
    other.load_state_dict(copy.deepcopy(state))
    assert (other.module.up, other.module.down) == (1.5, 2.5)
    bare = BySign()
    bare.load_state_dict(state)
    assert bare.up == 1.5
    with pytest.raises(RuntimeError, match="Unexpected key"):
        wrapper.load_state_dict({**state, "more": torch.zeros(1)})
    wrapper.load_state_dict({**state, "more": torch.zeros(1)}, strict=False)


@both
def test_without_torch_distributed_it_is_the_module_with_one_warning(library):
    texts = logged()
    module = BySign()
    wrapper = wrapper_class(library)(module)
    assert len(texts) == 1
    assert "torch.distributed is not initialized" in texts[0]
    assert wrapper.state_dict().keys() == module.state_dict().keys()
    wrapper.load_state_dict(BySign(8.0, 9.0).state_dict())
    with torch.no_grad():
        assert wrapper(torch.ones(1)) == 8
    if library == "ppe_ddp":  # the other one asks for a group in backward
        for _ in range(2):
            with wrapper.no_sync():
                wrapper(torch.ones(1)).backward()
        wrapper(-torch.ones(1)).backward()
        wrapper.finish_grad_sync()
        assert module.up.grad == 2
        assert module.down.grad == 1
        assert wrapper.trace() is None
    assert len(texts) == 1


@both
@on_two_ranks
def test_arguments_by_position(library):
    parameters = list(inspect.signature(wrapper_class(library)).parameters)
    assert parameters[:6] == [
        "module",
        "broadcast_buffers",
        "negotiate_grads",
        "process_group",
        "reduce_function",
        "broadcast_function",
    ]
    wrapper = wrapper_class(library)(BySign(), False, False, dist.group.WORLD, clear, clear)
    train(wrapper, signed(1, 4))
    assert wrapper.module.up.grad == 0
    assert wrapper.module.total == signed(1, 4)


@both
@on_two_ranks
def test_keywords_that_it_does_not_have(library):
    # Those that it ignores with a warning mean something here, or are hints that are never needed.
    texts = logged()
    module = BySign()
    ignored = {"device_ids": None, "dim": 0, "find_unused_parameters": True, "check_reduction": False}
    train(wrapper_class(library)(module, gradient_as_bucket_view=True, **ignored), signed(1, 4))
    assert module.up.grad == 2.5
    assert bool(texts) == (library == "pytorch_pfn_extras")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("broadcast_bufers", "broadcast_buffers"),
        ("negotiate_grad", "negotiate_grads"),
        ("gradient_as_bucket_views", "gradient_as_bucket_view"),
        ("find_unused", "find_unused_parameters"),
        ("reduce_func", "reduce_function"),
        ("broadcast_func", "broadcast_function"),
    ],
)
def test_an_unknown_keyword_names_the_nearest(name, nearest):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'; did you mean '{nearest}'"):
        DistributedDataParallel(BySign(), **{name: None})


def test_an_unknown_keyword_without_a_near_one():
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'xyz'$"):
        DistributedDataParallel(BySign(), xyz=1)


@pytest.mark.parametrize("devices", [[0], [torch.device("cpu")], (1,), torch.device("cpu")], ids=str)
def test_torchs_second_argument_is_refused(devices):
    with pytest.raises(TypeError, match=r"second argument .* is broadcast_buffers .*pass device_ids="):
        DistributedDataParallel(BySign(), devices)


@on_two_ranks
def test_inputs_of_any_structure_are_moved_with_one_warning():
    # The meta device stands for another one: tensors cannot come back from it, so only the way there is seen.
    texts = logged()

    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, device="meta"))

        def forward(self, *args, **kwargs):
            return args, kwargs

    wrapper = DistributedDataParallel(Given(), init_sync=False, broadcast_buffers=False)
    here, there = torch.ones(2), torch.ones(2, device="meta")
    for _ in range(2):
        args, kwargs = wrapper(here, [here, {"a": (here, 3, None)}], "text", there, named={"b": here})
    assert args[0].is_meta
    assert args[1][0].is_meta
    assert args[1][1]["a"][0].is_meta
    assert args[1][1]["a"][1:] == (3, None)
    assert args[2] == "text"
    assert args[3] is there
    assert kwargs["named"]["b"].is_meta
    assert texts == ["inputs are moved from cpu to meta, where the module is"]
    assert here.device.type == "cpu"
