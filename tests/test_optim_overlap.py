"""Gathers that overlap with the next forward or not: every read gives the values of one process."""

import contextlib
import copy
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

from one_process import mlp, seeded
from ppe_ddp import DistributedDataParallel, DistributedOptimizer, PeerAbortedError
from ppe_ddp.engine.zero.parameter_gather import ParameterGather
from ppe_ddp.megatron import DistributedDataParallel as MegatronDDP
from ppe_ddp.megatron import DistributedDataParallelConfig, sharded_buffers
from rank_tests import on_two_ranks

X = torch.ones(2, 4)


class ReadsItsChild(nn.Module):
    def __init__(self):
        super().__init__()
        self.child = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return F.linear(x, self.child.weight)


class Attention(nn.MultiheadAttention):
    def __init__(self):
        super().__init__(4, 2)

    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


def pruned():
    with torch.no_grad():
        return prune.l1_unstructured(nn.Linear(4, 4), "weight", amount=0.5)


def normed(norm, **options):
    def make():
        with torch.no_grad():
            return norm(nn.Linear(4, 4), **options)

    return make


MODULES = {
    "prune": pruned,
    "weight norm": normed(torch.nn.utils.weight_norm),
    "spectral norm": normed(torch.nn.utils.spectral_norm),
    "parametrized": normed(parametrizations.weight_norm),
    "child": ReadsItsChild,
    "attention": Attention,
}
FORWARDS = {
    "called": lambda wrapper: wrapper,
    "functional": lambda wrapper: lambda x: torch.func.functional_call(wrapper, dict(wrapper.named_parameters()), (x,)),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("overlap", [False, True])
@on_two_ranks
def test_every_forward_has_the_new_weights(overlap):
    for name, make in MODULES.items():
        for forward in FORWARDS.values():
            model, theirs = DistributedDataParallel(seeded(make)), seeded(make)
            one = torch.optim.SGD(theirs.parameters(), lr=0.1)
            optimizer = DistributedOptimizer(torch.optim.SGD, model, lr=0.1, overlap=overlap)
            for _ in range(4):
                optimizer.zero_grad()
                one.zero_grad()
                ours, expected = forward(model)(X).square().sum(), theirs(X).square().sum()
                torch.testing.assert_close(ours, expected, msg=lambda text, name=name: f"{name}: {text}")
                ours.backward()
                expected.backward()
                optimizer.step()
                one.step()


def stepped(overlap, make=lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), **options):
    """A model right after a step by which every weight has moved by -1, what its weights were, and the optimizer."""
    model = DistributedDataParallel(seeded(make))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, model, lr=1.0, overlap=overlap, **options)
    sum(parameter.sum() for parameter in model.parameters()).backward()
    model.finish_grad_sync()
    optimizer.step()
    return model, before, optimizer


def shadow_of(model):
    shadow = [torch.zeros_like(parameter.data) for parameter in model.parameters()]
    torch._foreach_lerp_(shadow, [parameter.data for parameter in model.parameters()], 1.0)
    return shadow


READS = {
    "deepcopy": lambda model: copy.deepcopy(model.module).parameters(),
    "data": lambda model: [parameter.data for parameter in model.parameters()],
    "moving average": shadow_of,
    "state of submodules": lambda model: [t for part in model.module for t in part.state_dict().values()],
    "state": lambda model: model.state_dict().values(),
    "vector": lambda model: [nn.utils.parameters_to_vector([p]).view_as(p) for p in model.parameters()],
}


@pytest.mark.parametrize("overlap", [False, True])
@on_two_ranks
def test_every_read_after_a_step_has_the_new_weights_even_on_one_rank_alone(overlap):
    for name, read in READS.items():
        model, before, _ = stepped(overlap)
        if dist.get_rank() == 1:  # the other rank reads nothing, and is in its next step
            for now, was in zip(read(model), before, strict=True):
                torch.testing.assert_close(now.detach(), was - 1, msg=lambda text, name=name: f"{name}: {text}")
        model(X).sum().backward()


@on_two_ranks
def test_by_default_even_what_was_taken_before_the_step_is_new():
    model = DistributedDataParallel(nn.Linear(3, 5))
    optimizer = DistributedOptimizer(torch.optim.SGD, model, lr=1.0)
    before = copy.deepcopy(model.module)
    kept, state = [p.data for p in model.parameters()], model.state_dict()
    sum(parameter.sum() for parameter in model.parameters()).backward()
    model.finish_grad_sync()
    optimizer.step()
    for now, saved, was in zip(kept, state.values(), before.parameters(), strict=True):
        assert torch.equal(now, saved)
        torch.testing.assert_close(now, was.detach() - 1)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


@on_two_ranks
def test_with_overlap_a_forward_starts_before_everything_is_there():
    # more than a unit of 4 MiB each
    model, before, optimizer = stepped(True, lambda: nn.Sequential(nn.Linear(4, 1 << 20), nn.Linear(1 << 20, 4)))
    seen = []

    def look(*_):
        seen.append((type(model.module[0].weight), type(model.module[1].weight)))

    model.module[0].register_forward_hook(look)
    model(X).sum().backward()
    assert seen[0][0] is nn.Parameter
    assert seen[0][1] is not nn.Parameter
    del optimizer
    torch.testing.assert_close(model.module[1].weight.detach(), before[2] - 1)


@on_two_ranks
def test_two_optimizers_of_one_model():
    model = DistributedDataParallel(seeded(nn.Linear, 4, 4))
    weight, bias = (p.detach().clone() for p in model.parameters())
    optimizers = [
        DistributedOptimizer(torch.optim.SGD([p], lr=rate), model, overlap=True)
        for p, rate in zip(model.parameters(), (1.0, 2.0), strict=True)
    ]
    for step in range(1, 4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(parameter.sum() for parameter in model.parameters()).backward()
        model.finish_grad_sync()
        for optimizer in optimizers:
            optimizer.step()
        if step != 2:  # and once unread
            torch.testing.assert_close(model.module.weight.data, weight - step)
            torch.testing.assert_close(model.module.bias.data, bias - 2 * step)


class ComesLate:
    """An all-gather into memory that holds no numbers until it is waited for."""

    def __init__(self, flat, share, group, pool):
        self._flat, self._whole = flat, torch.empty_like(flat)
        dist.all_gather_into_tensor(self._whole, share.clone(), group=group)
        flat.fill_(float("nan"))

    def wait(self):
        self._flat.copy_(self._whole)


@on_two_ranks
def test_megatrons_param_sync_brings_what_attention_reads_of_its_child():
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=8
    )
    module = seeded(Attention)
    twin = copy.deepcopy(module)
    model = MegatronDDP(None, config, module)
    all_gather, sharded_buffers.all_gather = sharded_buffers.all_gather, ComesLate
    try:
        for is_watched in (True, False):
            model.start_param_sync()
            torch.testing.assert_close(model(X), twin(X))
            model.start_param_sync()
            torch.testing.assert_close(copy.deepcopy(model.module)(X), twin(X))
            if is_watched:
                model.disable_forward_pre_hook()
        model.start_param_sync(force_sync=True)
        torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))
    finally:
        sharded_buffers.all_gather = all_gather


@on_two_ranks
def test_compiled_forwards_have_the_new_weights():
    for is_outside in (True, False):
        model, twin = DistributedDataParallel(seeded(net)), seeded(net)
        optimizer = DistributedOptimizer(torch.optim.SGD, model, lr=0.1, overlap=True)
        one = torch.optim.SGD(twin.parameters(), lr=0.1)
        called = model
        if is_outside:
            called = torch.compile(model, backend="eager")
        else:
            model.module[1].compile(backend="eager")
        for _ in range(3):
            ours, expected = called(X).square().sum(), twin(X).square().sum()
            torch.testing.assert_close(ours, expected)
            ours.backward()
            expected.backward()
            optimizer.step()
            one.step()
            optimizer.zero_grad()
            one.zero_grad()


def net():
    return nn.Sequential(nn.Linear(4, 4), ReadsItsChild(), nn.Linear(4, 4))


def fail(*_):
    raise ArithmeticError("planned")


def interrupt(*_):
    raise KeyboardInterrupt


@contextlib.contextmanager
def failing_first(inner):
    handle = inner.register_step_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def interrupted(place, _inner):
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(ParameterGather, place, interrupt)
        yield


def check_two_optimizers(apart, kind, overlap, failing):
    """The first fails on one rank; the next step works, and brings everything."""
    module = seeded(mlp, 4, 4, 2)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=20)
    wrap = partial(MegatronDDP, None, config) if kind is MegatronDDP else DistributedDataParallel
    layers = [layer for layer in module if isinstance(layer, nn.Linear)]
    models = [wrap(part) for part in (layers if apart else [module])]
    inner = [torch.optim.SGD(layer.parameters(), 0.1) for layer in layers]
    optimizers = [DistributedOptimizer(one, models[k * apart], overlap=overlap) for k, one in enumerate(inner)]
    for step in range(4):
        for model in models:
            model.zero_grad_buffer() if kind is MegatronDDP else model.zero_grad()
        try:
            out = X * (1 + dist.get_rank())
            for model in models:
                out = model(out)
            out.sum().backward()
            if kind is MegatronDDP:
                for model in models:
                    model.finish_grad_sync()
            with failing(inner[0]) if step == 1 and dist.get_rank() == 0 else contextlib.nullcontext():
                for optimizer in optimizers:
                    optimizer.step()
        except (ArithmeticError, KeyboardInterrupt, PeerAbortedError):
            assert step == 1
    for optimizer in optimizers:
        optimizer.synchronize()
    for parameter in module.parameters():
        everyone = [torch.empty_like(parameter) for _ in range(2)]
        dist.all_gather(everyone, parameter.detach())
        assert torch.equal(*everyone)


each_kind = pytest.mark.parametrize("kind", [DistributedDataParallel, MegatronDDP])
each_apart = pytest.mark.parametrize("apart", [True, False], ids=["two wrappers", "one wrapper"])


@each_kind
@pytest.mark.parametrize("overlap", [True, False])
@each_apart
@on_two_ranks
def test_of_two_optimizers_the_first_fails_on_one_rank(apart, kind, overlap):
    """It leaves the second out, whose gather the other rank has begun."""
    check_two_optimizers(apart, kind, overlap, failing_first)


@each_kind
@pytest.mark.parametrize("place", ["_finish", "_install"])
@each_apart
@on_two_ranks
def test_of_two_optimizers_the_first_is_interrupted_behind_its_last_message(apart, kind, place):
    """The other rank has everything of the first, and waits in the second."""
    check_two_optimizers(apart, kind, False, partial(interrupted, place))


@on_two_ranks
def test_a_collective_of_the_users_is_under_way_while_gradients_are_clipped():
    model = DistributedDataParallel(seeded(mlp, 4, 2))
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    for _ in range(3):
        optimizer.zero_grad()
        model(X).sum().backward()
        total = torch.full((3,), 1.0 + dist.get_rank(), dtype=torch.float64)
        if dist.get_rank() == 0:
            work = dist.all_reduce(total, async_op=True)
        norm = optimizer.clip_grad_norm_(1e9)
        if dist.get_rank() == 1:
            work = dist.all_reduce(total, async_op=True)
        work.wait()
        assert total.tolist() == [3.0] * 3
        assert norm.isfinite()


@on_two_ranks
def test_a_rank_that_hears_of_a_failed_update_in_its_next_forward_can_give_that_step_up():
    model = DistributedDataParallel(seeded(mlp, 4, 2))
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = DistributedOptimizer(inner, model, overlap=True)
    rank, seen, store = dist.get_rank(), [], dist.distributed_c10d._get_default_store()

    def fail(*_):
        store.wait([has_updated])  # or rank 0 hears of it while it takes its step
        raise ArithmeticError("planned")

    for step in range(4):
        has_updated = f"has updated {step}"
        handle = inner.register_step_pre_hook(fail) if step == 1 and rank == 1 else None
        optimizer.zero_grad()
        try:
            loss = model(X).sum()
            if step == 2 and rank == 0:
                model.abort_grad_sync("its loss has raised")
                raise ArithmeticError
            loss.backward()
            optimizer.step()
            store.set(has_updated, "")
        except (ArithmeticError, PeerAbortedError) as error:
            seen.append((step, getattr(error, "reason", "")))
        if handle is not None:
            handle.remove()
    assert seen == ([(2, "")] if rank == 0 else [(1, ""), (2, "AbortedError: its loss has raised")])


@pytest.mark.parametrize("is_first", [False, True])
@on_two_ranks
def test_who_is_interrupted_where_a_step_waits_for_the_one_before_tells_the_others(is_first):
    """The other rank hears of it in that step if it comes later, and else in its next forward."""
    (model, _, optimizer), rank = stepped(True), dist.get_rank()
    for step in range(3):
        optimizer.zero_grad()
        model(X).sum().backward()
        with pytest.MonkeyPatch.context() as patches, contextlib.ExitStack() as stack:
            if step == 0 and rank == 1:
                patches.setattr(ParameterGather, "finish", interrupt)
                stack.enter_context(pytest.raises(KeyboardInterrupt))
            elif step == 0 and is_first:
                stack.enter_context(pytest.raises(PeerAbortedError, match="rank 1 failed in DistributedOptimizer"))
            time.sleep(0.5 * (step == 0 and is_first is (rank == 0)))
            optimizer.step()
    own = nn.utils.parameters_to_vector(model.parameters()).detach()
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    assert torch.equal(*everyone)
