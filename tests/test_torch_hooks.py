"""torch's communication hooks, unchanged: the gradients are those of torch's wrapper with the same hook."""

import contextlib
import copy
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as default
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as quantization
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from library_warnings import library_warnings
from one_process import Routes, assert_gradients, assert_same_on_all_ranks, data, gradients, mean_gradients, seeded
from ppe_ddp import DistributedDataParallel, PeerAbortedError
from ppe_ddp.compression import LocalSGD
from rank_tests import on_three_ranks, on_two_ranks

VARIANTS = [{"gradient_as_bucket_view": False}, {}, {"overlap": False}]
each_variant = pytest.mark.parametrize("options", VARIANTS, ids=["copied", "views", "after"])


class Layers(nn.Module):
    """A static model whose backward gets to its layers in one order only."""

    def __init__(self, *, bias=True, width=12):
        super().__init__()
        sizes = [6, width, width + 4, 3]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=bias) for a, b in itertools.pairwise(sizes))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def square(model, rank, step=0):
    model(data(5, 6, rank=rank, step=step)).pow(2).sum().backward()


def hold_to_torch(module, state_and_hook, *, steps=6, rtol=1e-5, atol=1e-6, equal=True, apart=range(0), **options):
    """Train with torch's wrapper and with ours, a hook and state made for each, and compare the gradients.

    In the steps `apart` ranks train by themselves; torch's averager averages their parameters in every second of them.
    """
    twin = copy.deepcopy(module)
    ours, theirs = DistributedDataParallel(module, **options), TorchDDP(twin)
    for wrapper in (ours, theirs):
        wrapper.register_comm_hook(*(made := state_and_hook()))
    unsynchronized = range(0) if made[1] is post_localSGD_hook else apart
    optimizers = [torch.optim.SGD(wrapper.parameters(), lr=0.05) for wrapper in (ours, theirs)]
    if apart:
        # Here, as it warns of its own use of torch.jit when it is imported.
        from torch.distributed.optim import PostLocalSGDOptimizer

        averagers = [PeriodicModelAverager(2, warmup_steps=apart.start) for _ in optimizers]
        optimizers = list(map(PostLocalSGDOptimizer, optimizers, averagers))
    for step in range(steps):
        for wrapper, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            with wrapper.no_sync() if step in unsynchronized else contextlib.nullcontext():
                square(wrapper, dist.get_rank(), step)
        assert_gradients(module, gradients(twin), rtol=rtol, atol=atol)
        if equal:
            assert_same_on_all_ranks(module)
        for optimizer in optimizers:
            optimizer.step()
    return ours


HOOKS = {
    "allreduce": default.allreduce_hook,
    "fp16": default.fp16_compress_hook,
    "fp16 wrapper": default.fp16_compress_wrapper(default.allreduce_hook),
    "bf16": default.bf16_compress_hook,
    "bf16 wrapper": default.bf16_compress_wrapper(default.allreduce_hook),
}


@pytest.mark.parametrize("name", ["allreduce", "fp16", "fp16 wrapper"])
@each_variant
@on_three_ranks
def test_stateless_hooks(name, options):
    # Rounded before they are added up.
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if name == "allreduce" else {"rtol": 5e-3, "atol": 1e-3}
    hold_to_torch(seeded(Layers), lambda: (None, HOOKS[name]), **tolerance, **options)
    hold_to_torch(seeded(Layers), lambda: (dist.group.WORLD, HOOKS[name]), steps=2, **tolerance, **options)


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp16 wrapper", "bf16 wrapper"])
@each_variant
@on_two_ranks
def test_halves_are_sent_and_the_mean_comes_out(name, options):
    # torch's own wrapper refuses the bfloat16 hooks outside of NCCL, so here one process is the reference.
    kind = torch.bfloat16 if "bf16" in name else torch.float16
    module = seeded(Layers)
    wrapper = DistributedDataParallel(module, **options)
    wrapper.register_comm_hook(None, HOOKS[name])
    expected = mean_gradients(module, square)
    for _ in range(3):
        wrapper.zero_grad()
        square(wrapper, dist.get_rank())
        assert_gradients(module, expected, rtol=2e-2, atol=2e-2)
        assert_same_on_all_ranks(module)
    for parameter in module.parameters():
        assert torch.equal(parameter.grad, parameter.grad.to(kind).float())


def round_hook(state, bucket):
    state.append(bucket.index())
    future = default.allreduce_hook(None, bucket)
    return future.then(lambda done: torch.round(done.value() * 2) / 2)


@each_variant
@on_two_ranks
def test_the_hook_is_what_reduces(options):
    calls = []
    wrapper = DistributedDataParallel(seeded(Layers), **options)
    assert wrapper.register_comm_hook(calls, round_hook) is None
    expected = mean_gradients(wrapper.module, square)
    square(wrapper, dist.get_rank())
    assert calls
    assert_gradients(wrapper.module, {name: torch.round(g * 2) / 2 for name, g in expected.items()})


@on_two_ranks
def test_registration_by_keyword_and_by_torchs_own_function():
    for register in (
        lambda wrapper: wrapper.register_comm_hook(state=None, hook=default.fp16_compress_hook),
        lambda wrapper: register_ddp_comm_hook(DDPCommHookType.FP16_COMPRESS, wrapper, None),
    ):
        wrapper = DistributedDataParallel(seeded(Layers))
        register(wrapper)
        square(wrapper, dist.get_rank())
        assert_gradients(wrapper.module, mean_gradients(wrapper.module, square), rtol=2e-2, atol=2e-3)
        exact = mean_gradients(wrapper.module, square)
        assert any(not torch.equal(p.grad, exact[name]) for name, p in wrapper.module.named_parameters())


@contextlib.contextmanager
def gathers_for_quantization():
    """Let `all_gather` give Futures of the kind that torch's quantization hooks expect, and gloo's are not."""
    gather = dist.all_gather

    def all_gather(outputs, tensor, group=None, async_op=False):
        work = gather(outputs, tensor, group=group, async_op=True)
        twin = mock.Mock()
        twin.get_future = lambda: work.get_future().then(lambda _: [torch.stack(outputs)])
        return twin

    with mock.patch.object(dist, "all_gather", all_gather):
        yield


@pytest.mark.parametrize("kind", ["tensor", "channel"])
@each_variant
@on_two_ranks
def test_quantization_hooks(kind, options):
    hook = getattr(quantization, f"quantization_per{kind}_hook")
    with gathers_for_quantization():
        # One bucket with both wrappers, so that the same numbers share a scale.
        hold_to_torch(seeded(Layers), lambda: (dist.group.WORLD, hook), steps=4, rtol=1e-3, atol=2e-2, **options)
        wrapper = DistributedDataParallel(seeded(Layers), **options)
        wrapper.register_comm_hook(dist.group.WORLD, hook)
        square(wrapper, dist.get_rank())
    assert_gradients(wrapper.module, mean_gradients(wrapper.module, square), rtol=1e-2, atol=0.1)


class PowerState(power.PowerSGDState):
    __slots__ = ()
    rank = 0  # not a process group, which has this attribute, too


def power_state(hook, **settings):
    # From the third step on: until then both wrappers learn in which order gradients come.
    settings = {"start_powerSGD_iter": 4, "min_compression_rate": 0.1, "random_seed": 3, **settings}
    return lambda: (PowerState(None, **settings), hook)


@pytest.mark.parametrize("settings", [{}, {"use_error_feedback": False, "warm_start": False}], ids=["kept", "bare"])
@pytest.mark.parametrize("rank", [1, 2])
@each_variant
@on_two_ranks
def test_power_sgd_as_torch_does_it(settings, rank, options):
    make = power_state(power.powerSGD_hook, matrix_approximation_rank=rank, **settings)
    wrapper = hold_to_torch(seeded(Layers), make, steps=10, rtol=1e-3, atol=1e-4, **options)
    # It is an approximation, so a step that was not compressed would show.
    exact = mean_gradients(wrapper.module, square)
    wrapper.zero_grad()
    square(wrapper, dist.get_rank())
    worst = max((p.grad - exact[name]).abs().max() for name, p in wrapper.module.named_parameters())
    assert worst > 1e-3


@on_two_ranks
def test_nan_of_a_step_that_is_skipped_does_not_stay_in_a_hook():
    module = seeded(Layers)
    wrapper = DistributedDataParallel(module, check_for_nan_in_grad="skip")
    wrapper.register_comm_hook(*power_state(power.powerSGD_hook, matrix_approximation_rank=1, start_powerSGD_iter=2)())
    for number in range(6):
        wrapper.zero_grad()
        is_wrong = number == 3 and dist.get_rank() == 1
        (wrapper(data(5, 6, step=number)).sum() * (float("nan") if is_wrong else 1.0)).backward()
        found = [parameter.grad for parameter in module.parameters()]
        assert [one is None for one in found] == [number == 3] * len(found)
        assert number == 3 or all(bool(one.isfinite().all()) for one in found), number


@pytest.mark.parametrize("loads", [False, True])
@on_two_ranks
def test_a_hook_with_a_state_gets_the_same_parameters_after_a_step_that_failed(loads):
    """Also if it is registered, or the order of buckets is loaded, when gradients were seen in another order."""
    module, rank, names = seeded(Routes, 8, 4), dist.get_rank(), []

    def keep(state, bucket):
        state.append((bucket.index(), bucket.names()))
        return default.allreduce_hook(None, bucket)

    def step():
        wrapper.zero_grad()
        wrapper(data(5, 8), [0, 2, 1, 3]).pow(2).sum().backward()

    wrapper = DistributedDataParallel(module)
    for _ in range(3):
        step()
    if loads:
        learned, wrapper = wrapper.comm_state_dict(), DistributedDataParallel(module)
    wrapper.register_comm_hook(names, keep)
    if loads:
        wrapper.load_comm_state_dict(learned)
    step()
    interrupt = mock.patch.object(wrapper._reducer.synchronizer.negotiation, "start", side_effect=KeyboardInterrupt)
    with interrupt if rank else contextlib.nullcontext(), pytest.raises((KeyboardInterrupt, PeerAbortedError)):
        step()
    step()
    assert len(names) == 2
    assert len(set(names)) == 1


@on_two_ranks
def test_a_hook_that_has_kept_something_of_gradients_is_named_where_ranks_begin_to_train_apart():
    for has_kept in (False, True):
        module = seeded(Layers)
        wrapper = DistributedDataParallel(module)
        wrapper.register_comm_hook([], round_hook)
        if has_kept:
            square(wrapper, dist.get_rank())
        with library_warnings() as texts:
            LocalSGD(wrapper, torch.optim.SGD(module.parameters(), lr=0.1), every=1)
        assert [f"rank {dist.get_rank()}: what communication hook round_hook has kept" in one for one in texts] == (
            [True] if has_kept else []
        )


@contextlib.contextmanager
def batched_hook_mended():
    """torch's batched hook passes a matrix where its own function wants a batch of them, since torch 2.0."""
    orthogonalize = power._orthogonalize

    def mended(matrices, epsilon=0):
        orthogonalize(matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon)

    with mock.patch.object(power, "_orthogonalize", mended):
        yield


@each_variant
@on_two_ranks
def test_batched_power_sgd_as_torch_does_it(options):
    make = power_state(power.batched_powerSGD_hook, matrix_approximation_rank=2)
    with batched_hook_mended():
        hold_to_torch(seeded(Layers, bias=False), make, steps=10, rtol=1e-3, atol=1e-4, **options)


WAYS = [(0, 1), (2, 3), (0, 5), (4,), (1, 2, 3), (5, 0, 4), (2,), (3, 4)]


each_cap = pytest.mark.parametrize("cap", [None, 4e-4], ids=["one bucket", "several buckets"])


@each_cap
@each_variant
@on_two_ranks
def test_power_sgd_of_full_rank_is_exact_whatever_the_mask(cap, options):
    # At full rank nothing is approximated, so the mean has to come out however the gradients are packed.
    module = seeded(Routes, 8, 6)
    wrapper = DistributedDataParallel(module, bucket_cap_mb=cap, **options)
    # A layer that no rank has used is all zeros: the hook would divide by its length, and start from it again.
    unused = {"orthogonalization_epsilon": 1e-8, "warm_start": False}
    make = power_state(power.powerSGD_hook, matrix_approximation_rank=8, min_compression_rate=0, **unused)
    state, hook = make()
    wrapper.register_comm_hook(state, hook)
    for turn in range(14):

        def step(model, rank, turn=turn):
            way = WAYS[(turn + 3 * rank) % len(WAYS)]
            model(data(5, 8, rank=rank, step=turn), way).pow(2).sum().backward()

        expected = mean_gradients(module, step)
        wrapper.zero_grad()
        step(wrapper, dist.get_rank())
        assert_gradients(module, expected, rtol=1e-3, atol=1e-3)
        assert_same_on_all_ranks(module)
    assert len(state.error_dict) == (1 if cap is None else 3)


@each_variant
@on_two_ranks
def test_torchs_averager_of_parameters_in_no_sync(options):
    hold_to_torch(
        seeded(Layers), lambda: (None, default.allreduce_hook), equal=False, apart=range(3, 6), steps=8, **options
    )


@pytest.mark.parametrize("subgroups", ["alone", "all"])
@each_variant
@on_two_ranks
def test_post_local_sgd(subgroups, options):
    alone, _ = dist.new_subgroups(group_size=1)
    subgroup = alone if subgroups == "alone" else dist.group.WORLD

    def make():
        return PostLocalSGDState(None, subgroup, start_localSGD_iter=3), post_localSGD_hook

    wrapper = hold_to_torch(seeded(Layers), make, equal=False, apart=range(3, 6), steps=8, **options)
    if subgroups == "alone":
        wrapper.zero_grad()
        square(wrapper, dist.get_rank())
        own = mean_gradients(wrapper.module, lambda m, _: square(m, dist.get_rank()), world_size=1)
        assert_gradients(wrapper.module, own)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(6, 5, dtype=torch.complex64)), nn.Linear(5, 3)

    def forward(self, x):
        return torch.tanh(self.last(torch.tanh((x.to(torch.complex64) @ self.weight).abs())))


def own_hook(state, bucket):
    average = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(average, group=state, async_op=True).get_future().then(lambda done: done.value()[0])


@pytest.mark.parametrize("name", ["allreduce", "fp16", "own"])
@each_variant
@on_two_ranks
def test_complex_numbers_are_pairs_of_real_ones(name, options):
    tolerance = {"rtol": 5e-3, "atol": 1e-3} if name == "fp16" else {}
    made = dist.new_group() if name == "own" else None, HOOKS.get(name, own_hook)
    hold_to_torch(seeded(Complex), lambda: made, steps=3, **tolerance, **options)
