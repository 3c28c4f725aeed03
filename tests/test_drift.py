"""Parameters that come to differ between the ranks are named, by a digest in the vote of each step."""

import copy
import threading
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from library_warnings import library_warnings
from one_process import data, mlp, seeded
from ppe_ddp import DisagreementError, DistributedDataParallel, DistributedOptimizer, PeerAbortedError
from ppe_ddp.engine import replicas
from ppe_ddp.engine.mask_exchange import is_same
from ppe_ddp.engine.module import ModuleState
from ppe_ddp.engine.replicas import DriftCheck
from rank_tests import each_variant, on_three_ranks, on_two_ranks

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128, torch.int8)


class Steps:
    """Stands for the groups of a wrapper: which step it is."""

    def __init__(self):
        self.step = self.generation = 0
        self.gathers = ()


def fields_of(module, steps=None):
    groups = Steps()
    check = DriftCheck(groups, ModuleState(module), raises=False)
    for number in range(1, 1 + (steps or check._parts + 1)):
        groups.step = number * check.every
        yield check.field(takes_part=True)
        check.look()


def differs(field):
    return DriftCheck(Steps(), ModuleState(nn.Module()), raises=False).differs(field)


def maxima(first, second):
    return bytes(map(max, first, second))


class Tensors(nn.Module):
    def __init__(self, shapes, dtype):
        super().__init__()
        for k, shape in enumerate(shapes):
            values = torch.randint(0, 100, shape).to(dtype)
            self.register_parameter(f"p{k}", nn.Parameter(values, requires_grad=dtype.is_floating_point))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=5),
    st.sampled_from([dtype for dtype in DTYPES if dtype.is_floating_point]),
    st.integers(0, 2**31),
    st.sampled_from([8, 64, 1 << 14]),
)
def test_every_flipped_bit_is_seen_within_one_round(shapes, dtype, place, least_bytes):
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(replicas, "_LEAST_BYTES", least_bytes)
        module = Tensors(shapes, dtype)
        other = copy.deepcopy(module)
        check = DriftCheck(Steps(), ModuleState(module), raises=False)
        assert (check._parts + 1) * check.every <= 100
        assert not any(map(differs, map(maxima, fields_of(module), fields_of(other))))
        memory = [parameter.detach().reshape(-1).view(torch.uint8) for parameter in other.parameters()]
        place %= 8 * sum(map(len, memory))
        bits = [(values, k) for values in memory for k in range(8 * len(values))]
        values, bit = bits[place]
        values[bit // 8] ^= 1 << bit % 8
        found = [differs(maxima(*pair)) for pair in zip(fields_of(module), fields_of(other), strict=True)]
        assert sum(found) == 1


def test_a_new_listing_with_equal_parameters_forgets_no_sums():
    groups, module = Steps(), nn.Linear(64, 64)
    check, fields = DriftCheck(groups, ModuleState(module), raises=False), []
    for value in (0.0, 1.0):
        groups.step = check.every
        check.field(takes_part=True)
        with torch.no_grad():
            module.weight.fill_(value)
            check.look()
        assert check.goes_on(ModuleState(module.requires_grad_(value == 0)))
        groups.step += check.every
        fields.append(check.field(takes_part=True))
    assert differs(maxima(*fields))
    assert not check.goes_on(ModuleState(nn.Linear(64, 65)))


def test_ranks_that_speak_of_other_steps_are_not_compared():
    module = mlp(4, 5, 2)
    first, second = list(fields_of(module, 3)), list(fields_of(mlp(4, 5, 2), 3))
    assert differs(maxima(first[1], second[1]))
    assert not differs(maxima(first[1], second[2]))
    assert not differs(bytes(len(first[1])))  # nobody takes part
    assert is_same(maxima(first[1], bytes(len(first[1])))[:8])


def step(wrapper, optimizer, rank):
    optimizer.zero_grad()
    wrapper(data(4, 4, rank=rank)).pow(2).mean().backward()
    optimizer.step()


def warnings_of(steps):
    """What the library warns of while `steps()` runs."""
    with library_warnings() as texts:
        steps()
    return [text for text in texts if "come to differ" in text]


@each_variant
@on_three_ranks
def test_the_rank_and_the_parameter_are_named(options):
    module = seeded(mlp, 4, 5, 2)
    wrapper = DistributedDataParallel(module, **options)
    rank, optimizer = dist.get_rank(), torch.optim.SGD(module.parameters(), lr=0.1)

    def steps(count=4):
        for _ in range(count):
            step(wrapper, optimizer, rank)

    assert warnings_of(steps) == []
    if rank == 2:
        with torch.no_grad():
            next(module.parameters())[0, 0] += 1
    found = warnings_of(steps)
    if rank not in (0, 2):
        assert found == []
        return
    (text,) = found  # once
    assert text.startswith(f"rank {rank}: parameters have come to differ between the ranks: rank 2 in '0.weight' (seen")


@pytest.mark.parametrize("shared_memory", [True, False])
@on_two_ranks
def test_of_two_ranks_both_are_named_by_an_error_if_that_is_wanted(shared_memory):
    module = seeded(mlp, 4, 5, 2)
    wrapper = DistributedDataParallel(module, check_drift="raise", shared_memory=shared_memory)
    rank, optimizer = dist.get_rank(), torch.optim.AdamW(module.parameters())
    step(wrapper, optimizer, rank)
    if rank:
        optimizer.step()
    step(wrapper, optimizer, rank)
    optimizer.zero_grad()
    with pytest.raises(DisagreementError, match=r"ranks 0, 1 in '0\.weight', '0\.bias', '2\.weight', '2\.bias' \("):
        wrapper(data(4, 4, rank=rank)).pow(2).mean().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    for _ in range(2):  # mended, and it happens once more
        with torch.no_grad():
            for parameter in module.parameters():
                dist.broadcast(parameter, 0)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(4):
            step(wrapper, optimizer, rank)
        if rank:
            with torch.no_grad():
                module[0].bias += 1
        step(wrapper, optimizer, rank)
        with pytest.raises(DisagreementError, match=r"ranks 0, 1 in '0\.bias' \("):
            step(wrapper, optimizer, rank)


@on_three_ranks
def test_two_ranks_come_to_differ_when_the_third_has_joined():
    """It takes no part in the comparison, and all the same in the message that names the others."""
    module, rank = seeded(mlp, 4, 5, 2), dist.get_rank()
    wrapper = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def steps():
        with wrapper.join():
            for number in range(2 + 5 * (rank > 0)):
                step(wrapper, optimizer, rank)
                if number == 4 and rank == 2:
                    with torch.no_grad():
                        module[2].bias += 1

    found = warnings_of(steps)
    assert [text.split("the ranks: ")[1].split(" (")[0] for text in found] == ["ranks 1, 2 in '2.bias'"]


@on_three_ranks
def test_a_rank_without_inputs_does_not_raise_later_what_the_others_have_raised():
    module, rank = seeded(mlp, 4, 5, 2), dist.get_rank()
    wrapper = DistributedDataParallel(module, check_drift="raise")
    optimizer, raised = torch.optim.SGD(module.parameters(), lr=0.1), 0
    with wrapper.join():
        for number in range(2 if rank == 2 else 7):
            try:
                step(wrapper, optimizer, rank)
            except DisagreementError:
                raised += 1
            if number == 4 and rank == 1:
                with torch.no_grad():
                    module[2].bias += 1
    step(wrapper, optimizer, rank)
    assert raised == (rank < 2)


@on_two_ranks
def test_nothing_is_compared_where_that_is_not_wanted():
    module = seeded(mlp, 4, 5, 2)
    wrapper = DistributedDataParallel(module, check_drift=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1 * (1 + dist.get_rank()))
    assert warnings_of(lambda: [step(wrapper, optimizer, dist.get_rank()) for _ in range(4)]) == []
    with pytest.raises(ValueError, match="check_drift is True, False"):
        DistributedDataParallel(module, check_drift="warn")


class Changing(nn.Module):
    """BatchNorm, tied weights, a part in another memory format, a part that is frozen later, and one that grows."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(3)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.more = nn.ModuleList()

    def forward(self, x):
        x = self.norm(self.convolution(x)).mean((2, 3))
        x = self.second(self.first(x).relu())
        for layer in self.more:
            x = layer(x)
        return x


@pytest.mark.parametrize("sharded", [None, False, True], ids=["plain", "sharded", "overlapped"])
@on_two_ranks
def test_no_false_alarm(sharded):
    """With modules that change, steps that fail, ranks that join, and parameters that are gathered meanwhile."""
    module, rank = seeded(Changing), dist.get_rank()
    wrapper = DistributedDataParallel(module, check_drift="raise")

    def make():
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)  # others keep states, which join() leaves as they are
        return optimizer if sharded is None else DistributedOptimizer(optimizer, wrapper, overlap=sharded)

    optimizer = make()

    def one(seed, fails=False, absent=False):
        optimizer.zero_grad()
        if absent and rank:
            wrapper.finish_grad_sync()  # this rank has no use for parameters that are still being gathered
            optimizer.step()
            return
        output = wrapper(torch.randn(4, 2, 5, 5, generator=torch.Generator().manual_seed(2 * seed + rank)))
        if fails and rank:
            output.register_hook(lambda _: 1 / 0)
        output.pow(2).mean().backward()
        optimizer.step()

    for seed in range(3):
        one(seed)
    for seed in range(3):
        one(seed, absent=True)
    if sharded is not None:
        handle = optimizer._inner.register_step_pre_hook(lambda *_: 1 / 0 if rank else None)
        with pytest.raises(ZeroDivisionError) if rank else suppress(PeerAbortedError):
            one(3)
        handle.remove()
        wrapper.finish_grad_sync()  # parameters were updated in part, and stay so until a step succeeds
    else:
        with pytest.raises((ZeroDivisionError, RuntimeError)):
            one(3, fails=True)
    for seed in range(3):
        one(seed)
    if sharded is None:
        module.convolution.requires_grad_(requires_grad=False)
        module.more.append(seeded(nn.Linear, 3, 3))
        optimizer = make()
        for seed in range(3):
            one(seed)
        with wrapper.join():
            for seed in range(2 + 3 * rank):
                one(seed)
    one(9)
    wrapper.check_in_sync()


def step_in_the_hook(state, bucket):
    """As torch's hooks of optimizers that overlap with backward: one rank is done at once, the other a moment later."""
    dist.all_reduce(bucket.buffer().div_(2))
    done = torch.futures.Future()

    def end():
        with torch.no_grad():
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                parameter.sub_(gradient, alpha=0.1)
        done.set_result(bucket.buffer())

    threading.Timer(0.05 * dist.get_rank(), end).start()
    return done


@on_two_ranks
def test_no_false_alarm_of_a_hook_that_writes_parameters():
    module = seeded(mlp, 4, 8, 2)
    wrapper = DistributedDataParallel(module, check_drift="raise")
    wrapper.register_comm_hook(None, step_in_the_hook)

    def train(steps):
        for step in range(steps):
            wrapper.zero_grad()
            wrapper(data(3, 4, rank=dist.get_rank(), step=step)).pow(2).sum().backward()

    train(4)
    wrapper.check_in_sync()
    with torch.no_grad():
        next(module.parameters()).add_(dist.get_rank())
    with pytest.raises(DisagreementError):
        train(2)


@on_two_ranks
def test_a_parameter_with_gaps_in_memory_on_one_rank_alone():
    module, rank = seeded(mlp, 4, 5, 2), dist.get_rank()
    if rank:
        module[0].weight = nn.Parameter(torch.zeros(5, 7)[:, :4].copy_(module[0].weight.detach()))
    wrapper = DistributedDataParallel(module, check_drift="raise")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        step(wrapper, optimizer, rank)
    if rank == 0:
        module[2].weight.data = torch.zeros(2, 9)[:, :5].copy_(module[2].weight.detach())
    for _ in range(3):
        step(wrapper, optimizer, rank)


@on_two_ranks
def test_no_message_is_added():
    counts, rank, all_reduce = {}, dist.get_rank(), dist.all_reduce
    for check_drift in (True, False):
        module = seeded(mlp, 4, 5, 2)
        wrapper = DistributedDataParallel(module, check_drift=check_drift, bucket_cap_mb=1)
        optimizer, sent = torch.optim.SGD(module.parameters(), lr=0.1), []

        def counting(tensor, *arguments, sent=sent, **options):
            sent.append(tensor.nbytes)
            return all_reduce(tensor, *arguments, **options)

        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(dist, "all_reduce", counting)
            for _ in range(8):
                step(wrapper, optimizer, rank)
        counts[check_drift] = len(sent)
    assert counts[True] == counts[False] >= 8 * 3
