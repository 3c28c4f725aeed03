"""Ranks that disagree, wrong arguments, a wrapper used where it cannot work: clear errors, and no hang."""

import copy
import os
import re
import time
from warnings import catch_warnings, simplefilter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from one_process import assert_gradients, data, gradients, mean_gradients, mlp, of_all_ranks, seeded, square
from ppe_ddp import (
    CommunicationError,
    DisagreementError,
    DistributedDataParallel,
    DistributedOptimizer,
    Options,
    UnusableError,
    average,
)
from ppe_ddp.testing import Outcome, RankError, Ranks
from rank_tests import long, on_three_ranks, on_two_ranks


@pytest.fixture(scope="module")
def impatient_ranks():
    """Two ranks with a short timeout, for what leaves their group broken."""
    with Ranks(2, timeout=40, group_timeout=4) as ranks:
        yield ranks


def raised_everywhere(error):
    """`error`'s text, after a look that it is the same on every rank."""
    texts = of_all_ranks((type(error).__name__, str(error)))
    assert len(set(texts)) == 1, texts
    return str(error)


class Pieces(nn.Module):
    """Parameters by name, in the order given, and a buffer."""

    def __init__(self, parameters, buffer=2):
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, nn.Parameter(parameter))
        self.register_buffer("count", None if buffer is None else torch.zeros(buffer))

    def forward(self, x):
        return sum((x.mean() * parameter).sum() for parameter in self.parameters())


COMMON = {"a": torch.ones(2, 3, 4, 5), "b": torch.ones(3), "c": torch.ones(2)}
DIFFERENT = {
    "more": (COMMON | {"d": torch.ones(1)}, {}, "'d' torch.float32"),
    "fewer": ({"a": COMMON["a"], "b": COMMON["b"]}, {}, "'c' torch.float32"),
    "names": ({"a": COMMON["a"], "other": COMMON["b"], "c": COMMON["c"]}, {}, "'other'.* where .*'b'"),
    "order": ({"b": COMMON["b"], "a": COMMON["a"], "c": COMMON["c"]}, {}, "'b'.* where .*'a'"),
    "shape": (COMMON | {"b": torch.ones(4)}, {}, r"'b' torch.float32 \(4,\).* where .*'b' torch.float32 \(3,\)"),
    "dtype": (COMMON | {"c": torch.ones(2).half()}, {}, "'c' torch.float16.* where .*'c' torch.float32"),
    "format": (
        COMMON | {"a": COMMON["a"].to(memory_format=torch.channels_last)},
        {},
        r"'a'.* strides \(60, 1, 15, 3\).* where .*'a'.* strides \(60, 20, 5, 1\)",
    ),
    "buffer": (COMMON, {"buffer": 3}, r"buffer 'count' torch.float32 \(3,\).* where .*\(2,\)"),
    "no buffer": (COMMON, {"buffer": None}, r"buffer 'count' torch.float32 \(2,\), which rank 0 has"),
}


@pytest.mark.parametrize("kind", DIFFERENT)
@on_three_ranks
def test_different_modules_at_wrap(kind):
    odd = dist.get_rank() == 2
    parameters, arguments, text = DIFFERENT[kind]
    pieces = Pieces(parameters if odd else COMMON, **(arguments if odd else {}))
    with torch.no_grad():
        for parameter in pieces.parameters():
            parameter.fill_(dist.get_rank() + 1)
    with pytest.raises(DisagreementError, match=f"rank 2 differs from rank 0: rank 2 (has|lacks) .*{text}") as caught:
        DistributedDataParallel(pieces)
    raised_everywhere(caught.value)
    assert all((parameter == dist.get_rank() + 1).all() for parameter in pieces.parameters())
    # All of them can go on with a module that is the same.
    square(DistributedDataParallel(seeded(mlp, 4, 2)), dist.get_rank())


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        ({"bucket_cap_mb": 1}, {"bucket_cap_mb": 2}, "bucket_cap_mb 2.0 .* where rank 0 has bucket_cap_mb 1.0"),
        ({}, {"negotiate_grads": False}, "negotiate_grads False.* where .*negotiate_grads True"),
        ({}, {"broadcast_buffers": False}, "broadcast_buffers False.* where .*broadcast_buffers True"),
    ],
    ids=["bucket_cap_mb", "negotiate_grads", "broadcast_buffers"],
)
@on_two_ranks
def test_different_options_at_wrap(ours, theirs, text):
    with pytest.raises(DisagreementError, match=text) as caught:
        DistributedDataParallel(seeded(mlp, 4, 2), **(theirs if dist.get_rank() else ours))
    raised_everywhere(caught.value)


class Casting(nn.Module):
    """Layers under any names, in any dtype."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)

    def forward(self, x):
        for part in self.children():
            x = torch.tanh(part(x.to(part.weight.dtype)))
        return x.float() * getattr(self, "extra", 1)


def add(module):
    module.extra = nn.Parameter(torch.ones(4))


def cast(module):
    module.two.double()


def turn(module):
    module.one.weight.data = module.one.weight.data.t().contiguous().t()


def remove(module):
    del module.two


def assert_nothing_lost(module, own):
    """What has arrived is still there as it was; an error in the middle of backward keeps the rest away."""
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, own[name])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (add, "has .*'extra'"),
        (cast, "has .*'two.weight' torch.float64"),
        (turn, r"has .*strides \(1, 4\)"),
        (remove, "lacks parameter 'two.weight'"),
    ],
)
@pytest.mark.parametrize("overlap", [True, False])
@on_two_ranks
def test_different_modules_after_wrapping(change, text, overlap):
    rank = dist.get_rank()
    module = seeded(Casting)
    wrapper = DistributedDataParallel(module, overlap=overlap)
    if rank == 1:
        change(module)
    own = mean_gradients(module, lambda m, _: square(m, rank), world_size=1)
    for _ in range(2):
        wrapper.zero_grad()
        with pytest.raises(DisagreementError, match=f"rank 1 {text}") as caught:
            square(wrapper, rank)
        raised_everywhere(caught.value)
        assert_nothing_lost(module, own)
        if not overlap:
            assert_gradients(module, own)
    if rank == 0:
        change(module)
    wrapper.zero_grad()
    square(wrapper, rank)
    assert_gradients(module, mean_gradients(module, square))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x, way):
        return self.parts[way](x) + self.parts[2](x)


@pytest.mark.parametrize("overlap", [True, False])
@on_two_ranks
def test_different_gradients_without_negotiation(overlap):
    rank = dist.get_rank()
    module = seeded(Branches)

    def step(model, rank, way=0):
        model(data(5, 4, rank=rank), way).pow(2).sum().backward()

    wrapper = DistributedDataParallel(module, negotiate_grads=False, overlap=overlap)
    expected = mean_gradients(module, step)
    for _ in range(2):
        wrapper.zero_grad()
        with pytest.raises(DisagreementError, match=r"'parts\.0\..*negotiate_grads=False") as caught:
            step(wrapper, rank, way=rank)
        raised_everywhere(caught.value)
        assert overlap or module.parts[rank].weight.grad is not None
        assert module.parts[1 - rank].weight.grad is None
        wrapper.zero_grad()
        step(wrapper, rank)
        assert_gradients(module, expected)


@on_two_ranks
def test_lazy_parameters_and_gradients_of_another_dtype_are_refused_by_name():
    module = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"'1\.(weight|bias)' is lazy.*run one forward"):
        DistributedDataParallel(module)
    module(data(5, 4))
    for dtype in (None, torch.float64):
        module[0].bias.grad_dtype = dtype
        with pytest.raises(ValueError, match=rf"'0\.bias' of torch.float32 has grad_dtype={dtype}"):
            DistributedDataParallel(module)
    module[0].bias.grad_dtype = torch.float32
    square(DistributedDataParallel(module), dist.get_rank())


@pytest.mark.parametrize(
    ("what", "odd", "text"),
    [
        ("parameter", torch.ones(1, 3).expand(3, 3), "has several elements in one place"),
        ("buffer", torch.ones(1, 3).expand(3, 3), "has several elements in one place"),
        ("buffer", torch.ones(3, 3).to_sparse(), "is torch.sparse_coo"),
    ],
    ids=["parameter", "buffer", "sparse"],
)
@pytest.mark.parametrize("odd_ranks", [[1], [0, 1]], ids=["one rank", "all"])
@on_two_ranks
def test_tensors_that_cannot_be_written_are_refused_by_name(what, odd, text, odd_ranks):
    rank = dist.get_rank()
    module = seeded(mlp, 4, 3, 2)
    own = odd if rank in odd_ranks else torch.ones(3, 3)
    if what == "parameter":
        module[2].odd = nn.Parameter(own, requires_grad=False)
    else:
        module[2].register_buffer("odd", own)
    with pytest.raises(ValueError, match=rf"rank {odd_ranks[0]}: the values .* {what} '2.odd' {text}") as caught:
        DistributedDataParallel(module)
    raised_everywhere(caught.value)
    if what == "buffer":  # where nothing is written into it
        alone = dist.new_subgroups(1)[0]
        square(DistributedDataParallel(module, process_group=alone, reduce_function=lambda *_: None), rank)
        keeping = DistributedDataParallel(module, init_sync=False, broadcast_buffers=False)
        DistributedOptimizer(torch.optim.SGD(keeping.parameters(), lr=0.1), keeping)
        square(keeping, rank)
    # A dimension of one element has no second one in its place.
    fitting = seeded(mlp, 4, 2)
    fitting.register_buffer("positions", torch.arange(3).expand(1, -1))
    square(DistributedDataParallel(fitting), rank)


@on_two_ranks
def test_wrong_arguments():
    module = seeded(mlp, 4, 2)
    with pytest.raises(TypeError, match=r"wraps an nn\.Module, not str"):
        DistributedDataParallel("module")
    with catch_warnings():
        simplefilter("ignore", DeprecationWarning)  # torch's own
        scripted = torch.jit.script(module)
    for made, name in [(scripted, "the module"), (nn.Sequential(nn.Linear(4, 4), scripted), "submodule '1'")]:
        with pytest.raises(TypeError, match=rf"{name} was made by torch\.jit.* wrap the module as it was"):
            DistributedDataParallel(made)
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match="process_group or device_mesh, not both"):
        DistributedDataParallel(module, process_group=dist.group.WORLD, device_mesh=mesh)
    with pytest.raises(ValueError, match="device_mesh must have one dimension, not 2"):
        DistributedDataParallel(module, device_mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")))
    with pytest.raises(ValueError, match="one process a device"):
        DistributedDataParallel(module, device_ids=[0, 1])
    here = torch.device("cuda", 0)
    for named in (0, "cuda:0", "cuda", torch.device("cuda")):
        Options(device_ids=[named]).check_device(here)
    with pytest.raises(ValueError, match="device_ids names cuda:1, but the module is on cuda:0"):
        Options(device_ids=[1]).check_device(here)
    wrapper = DistributedDataParallel(module)
    for arguments in [(), (1,), (None, 1)]:
        with pytest.raises(TypeError, match=r"hook"):
            wrapper.register_comm_hook(*arguments)
    wrapper.register_comm_hook(None, average)
    with pytest.raises(RuntimeError, match="has a hook already"):
        wrapper.register_comm_hook(None, average)


@on_two_ranks
def test_use_after_the_group_was_destroyed():
    wrapper = DistributedDataParallel(seeded(mlp, 4, 2))
    square(wrapper, dist.get_rank())
    x = data(5, 4)
    loss = wrapper(x).sum()
    dist.barrier()
    dist.destroy_process_group()
    uses = [lambda: wrapper(x), loss.backward, wrapper.start_grad_sync, wrapper.finish_grad_sync]
    for use in uses:
        with pytest.raises(UnusableError, match="was destroyed; wrap the module again"):
            use()
    wrapper.module(x)
    with torch.no_grad():
        wrapper(x)


@on_two_ranks
def test_a_module_without_values_is_refused():
    with pytest.raises(ValueError, match="on the meta device, so that its parameters have no values"):
        DistributedDataParallel(nn.Linear(4, 2, device="meta"))


@on_two_ranks
def test_use_in_a_forked_child():
    wrapper = DistributedDataParallel(seeded(mlp, 4, 2))
    square(wrapper, dist.get_rank())
    loss = wrapper(data(5, 4)).sum()
    before = gradients(wrapper.module)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(UnusableError, match="forked"):
                wrapper(data(5, 4))
            with pytest.raises(UnusableError, match="forked"):
                loss.backward()
            wrapper.module.zero_grad()
            with pytest.raises(UnusableError, match=r"a backward needs a copy of it, copy.deepcopy\(ddp.module\)"):
                wrapper.module(data(5, 4)).sum().backward()
            copied = copy.deepcopy(wrapper.module)
            copied(data(5, 4)).sum().backward()
            assert all(parameter.grad is not None for parameter in copied.parameters())
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert_gradients(wrapper.module, before)
    wrapper.zero_grad()
    square(wrapper, dist.get_rank())
    assert_gradients(wrapper.module, mean_gradients(wrapper.module, square))


def start_on_rank_0_only(way):
    wrapper = DistributedDataParallel(seeded(mlp, 4, 2))
    square(wrapper, dist.get_rank())
    if dist.get_rank() == 0:
        if way == "backward":
            square(wrapper, 0)
        else:
            wrapper.finish_grad_sync()
    elif way == "exit":
        os._exit(3)


@pytest.mark.parametrize("way", ["backward", *long("finish_grad_sync")])
def test_a_rank_that_never_starts_is_waited_for_no_longer_than_the_timeout(impatient_ranks, way):
    with pytest.raises(RankError) as caught:
        impatient_ranks.run(start_on_rank_0_only, way, timeout=90, grace=10)
    assert caught.value.ranks == {0: Outcome.RAISED}
    error = caught.value.exceptions[0]
    assert isinstance(error, CommunicationError)
    assert str(error).startswith(
        "rank 0: the communication of this step failed, as it needs rank 1, which has not come (it had completed step "
        "1 and begun no other). Every rank must run the same number of synchronized backwards"
    )
    assert (error.ranks, error.step, error.phase) == ((1,), 1, "done")


def wait_in_a_cycle(before_backward):
    """Each rank's backward uses other wrappers than the other's; what comes of a step, and after how many seconds."""
    rank, size = dist.get_rank(), dist.get_world_size()
    wrappers = [DistributedDataParallel(seeded(mlp, 4, 2)) for _ in range(8)]
    others = [one for k, one in enumerate(wrappers) if k % size != rank]
    for one in others if before_backward else ():
        one.start_grad_sync()
    text, begin = "", time.monotonic()
    try:
        sum(one(torch.ones(1, 4)).sum() for one in wrappers[rank::size]).backward()
        for one in others:
            one.finish_grad_sync()
    except CommunicationError as error:
        text = str(error)
    return text, time.monotonic() - begin, [one.module[0].weight.grad is None for one in wrappers]


def test_backwards_that_wait_for_one_another_end_after_one_timeout_and_the_error_names_the_cure(impatient_ranks):
    for text, seconds, _ in impatient_ranks.run(wait_in_a_cycle, False, timeout=90):
        assert "model.start_grad_sync() before that backward" in text
        assert seconds < 4 * 4  # of four waits each would take 4
    for text, _, is_missing in impatient_ranks.run(wait_in_a_cycle, True, timeout=90):
        assert not text
        assert not any(is_missing)


def rank_1_exits():
    wrapper = DistributedDataParallel(seeded(mlp, 4, 2))
    square(wrapper, dist.get_rank())
    if dist.get_rank() == 1:
        os._exit(3)
    square(wrapper, 0)


def test_a_rank_that_dies_ends_the_wait_of_the_others(impatient_ranks):
    with pytest.raises(RankError) as caught:
        impatient_ranks.run(rank_1_exits, timeout=90, grace=10)
    assert caught.value.ranks[1] is Outcome.DIED
    error = caught.value.exceptions[0]
    assert isinstance(error, CommunicationError)
    # Counted by the connections, which wrappers of earlier tests may have used.
    assert re.search(r"as it needs rank 1, which has died \(it had completed step \d+ and begun no other\)", str(error))
    assert error.ranks == (1,)


@on_two_ranks
def test_a_group_that_a_rank_is_not_in():
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        square(DistributedDataParallel(seeded(mlp, 4, 2), process_group=group), 0)
        return
    with pytest.raises(ValueError, match=r"rank 1 is not in this process_group .*NON_GROUP_MEMBER"):
        DistributedDataParallel(seeded(mlp, 4, 2), process_group=group)
