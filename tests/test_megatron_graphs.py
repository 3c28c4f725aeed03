"""Graphs that change, over Megatron's buffers: where Megatron asserts, the gradients are those of one process."""

import contextlib
import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import ppe_ddp as plain
from one_process import data, seeded
from ppe_ddp import NonFiniteGradientError, PeerAbortedError, UnusableError, average
from ppe_ddp.engine.failures import LostRanks
from ppe_ddp.megatron import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from rank_tests import on_three_ranks, on_two_ranks

VARIANTS = [
    {"overlap_grad_reduce": True, "bucket_size": 1},
    {"overlap_grad_reduce": True, "bucket_size": 60},
    {"overlap_grad_reduce": True, "bucket_size": 60, "use_distributed_optimizer": True},
    {},
    {"use_distributed_optimizer": True},
]
NAMES = ["small", "overlap", "overlap scatter", "after", "after scatter"]
each_variant = pytest.mark.parametrize("options", VARIANTS, ids=NAMES)


class Branches(nn.Module):
    """Takes the branches that it is told to; the last parameter is used by nobody."""

    def __init__(self, count=4, width=6):
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.branches = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.head = nn.Linear(width, 3)
        self.unused = nn.Parameter(torch.ones(70))
        self.double()

    def forward(self, x, taken, how="plain"):
        x = torch.tanh(self.stem(x))
        for k in taken:
            if how == "plain":
                x = x + torch.tanh(self.branches[k](x))
            else:
                x = x + checkpoint(lambda x, k=k: torch.tanh(self.branches[k](x)), x, use_reentrant=how == "reentrant")
        return self.head(x)


def loss(model, rank, step, **kwargs):
    return model(data(5, 6, rank=rank, step=step, dtype=torch.float64), **kwargs).pow(2).sum()


def wrap(module=None, **options):
    module = seeded(Branches) if module is None else module
    return DistributedDataParallel(None, DistributedDataParallelConfig(**options), module)


def mean_of(module, *passes):
    """The mean over ranks of the gradients of `passes`, each `(rank, step, keywords)`."""
    twin = copy.deepcopy(module)
    for rank, step, keywords in passes:
        (loss(twin, rank, step, **keywords) / dist.get_world_size()).backward()
    return {name: parameter.grad for name, parameter in twin.named_parameters()}


def hold(model, expected):
    """`main_grad`, or this rank's shards of it, is `expected`; zero where that is None."""
    assert all(parameter.grad is None for parameter in model.module.parameters())
    if model.ddp_config.use_distributed_optimizer:
        part = model.sharded()
        for shard, gradient in zip(part.shards, part.gradients(), strict=True):
            want = expected[shard.name]
            assert (want is None) == (gradient is None), shard.name
            if want is not None:
                torch.testing.assert_close(gradient, want.flatten()[shard.start : shard.stop], msg=shard.name)
        return
    for name, parameter in model.module.named_parameters():
        want = torch.zeros_like(parameter) if expected[name] is None else expected[name]
        torch.testing.assert_close(parameter.main_grad, want, msg=lambda text, name=name: f"{name}: {text}")


def main_gradients(model):
    return {name: parameter.main_grad.clone() for name, parameter in model.module.named_parameters()}


def routes(rank, step, micro=0):
    """Another path on each rank, in each step and micro-batch."""
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
    return [k for k in range(4) if torch.rand((), generator=generator) < 0.4]


@each_variant
@on_three_ranks
def test_another_path_on_each_rank_and_in_each_micro_batch(options):
    model, rank, ranks = wrap(**options), dist.get_rank(), dist.get_world_size()
    for step in range(4):
        model.zero_grad_buffer()
        with model.no_sync():
            for micro in range(2):
                loss(model, rank, step, taken=routes(rank, step, micro)).backward()
        loss(model, rank, step, taken=routes(rank, step, 2)).backward()
        model.finish_grad_sync()
        passes = [(r, step, {"taken": routes(r, step, micro)}) for r in range(ranks) for micro in range(3)]
        hold(model, mean_of(model.module, *passes))


@each_variant
@on_three_ranks
def test_frozen_for_a_second_forward_alone(options):
    model, rank, ranks = wrap(**options), dist.get_rank(), dist.get_world_size()

    def step(module, other):
        branch = getattr(module, "module", module).branches[0]
        first = loss(module, other, 0, taken=[0, 1])
        branch.requires_grad_(False)
        second = loss(module, other, 1, taken=[0, 2])
        branch.requires_grad_(True)
        return first + second

    for _ in range(2):
        twin = copy.deepcopy(model.module)
        model.zero_grad_buffer()
        for micro in range(2):
            with model.no_sync() if micro == 0 else contextlib.nullcontext():
                step(model, rank).backward()
            for other in range(ranks):
                (step(twin, other) / ranks).backward()
        model.finish_grad_sync()
        hold(model, {name: parameter.grad for name, parameter in twin.named_parameters()})


class Checkpointed(nn.Module):
    """Layers that backward reaches in a graph of its own each."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def backward_of(model, inputs):
    model(inputs[dist.get_rank()].clone().requires_grad_()).pow(2).sum().backward()


@pytest.mark.parametrize("bucket_size", [1, None])
@pytest.mark.parametrize("sharded", [False, True])
@on_two_ranks
def test_what_nobody_foresaw_is_repaired(bucket_size, sharded):
    # Backward begins in the last checkpoint, and nobody knows then that there is another one.
    module = seeded(Checkpointed).double()
    model = wrap(module, overlap_grad_reduce=True, bucket_size=bucket_size, use_distributed_optimizer=sharded)
    inputs = [data(3, 4, rank=rank, dtype=torch.float64) for rank in range(2)]
    for _ in range(2):
        model.zero_grad_buffer()
        backward_of(model, inputs)
        model.finish_grad_sync()
        assert model.trace().repaired == ("layers.0.weight", "layers.0.bias")
        twin = copy.deepcopy(module)
        for x in inputs:
            (twin(x.clone().requires_grad_()).pow(2).sum() / 2).backward()
        hold(model, {name: parameter.grad for name, parameter in twin.named_parameters()})


@on_two_ranks
def test_gradients_that_were_late_in_a_failed_step_are_not_added_to_averages():
    module, rank = seeded(Checkpointed).double(), dist.get_rank()
    model = wrap(module, overlap_grad_reduce=True, bucket_size=1, use_distributed_optimizer=True)
    inputs = [data(3, 4, rank=rank, dtype=torch.float64) for rank in range(2)]
    has_sent = dist.distributed_c10d._get_default_store()

    def fail(_):
        has_sent.wait(["sent"])
        raise ArithmeticError

    backward_of(model, inputs)
    model.finish_grad_sync()
    x = inputs[rank].clone().requires_grad_()
    if rank == 1:
        x.register_hook(fail)
    with pytest.raises(ArithmeticError) if rank == 1 else contextlib.nullcontext():
        model(x).pow(2).sum().backward()
    has_sent.set("sent", "")
    with pytest.raises(PeerAbortedError):
        model.finish_grad_sync()
    model.finish_grad_sync()  # takes the step again
    twin = copy.deepcopy(module)
    for x in inputs * 2:
        (twin(x.clone().requires_grad_()).pow(2).sum() / 2).backward()
    hold(model, {name: parameter.grad for name, parameter in twin.named_parameters()})


@on_two_ranks
def test_what_only_a_failed_step_would_have_averaged_has_no_gradient_in_the_next_one():
    model, rank = wrap(overlap_grad_reduce=True, bucket_size=1, use_distributed_optimizer=True), dist.get_rank()
    has_agreed = dist.distributed_c10d._get_default_store()

    def fail(_):
        has_agreed.wait(["all have agreed on branch 0"])
        raise ArithmeticError

    out = model(data(5, 6, rank=rank, dtype=torch.float64), taken=[0] * rank)
    if rank == 1:
        out.register_hook(fail)
    with pytest.raises(ArithmeticError) if rank == 1 else contextlib.nullcontext():
        out.pow(2).sum().backward()
    has_agreed.set("all have agreed on branch 0", "")
    with pytest.raises(PeerAbortedError):
        model.finish_grad_sync()
    model.finish_grad_sync()  # takes the step again, without the data of rank 1
    hold(model, mean_of(model.module, (0, 0, {"taken": []})))


@on_two_ranks
def test_what_is_cleared_before_a_failed_step_puts_gradients_back_stays_cleared():
    """As by an optimizer's `zero_grad()` while a thread of autograd for a GPU holds a backward that has raised."""
    rank, fails = dist.get_rank(), False

    def failing(bucket, group):
        if fails:
            raise ArithmeticError
        return average(bucket, group)

    config = DistributedDataParallelConfig(overlap_grad_reduce=True)
    model = DistributedDataParallel(None, config, seeded(Branches), reduce_function=failing)
    state = model.gradient_buffers
    loss(model, rank, 0, taken=[0]).backward()
    model.finish_grad_sync()
    fails = rank == 1
    with pytest.MonkeyPatch.context() as patches:
        every = range(len(state.module_state.parameters))
        patches.setattr(LostRanks, "await_completion", lambda _: state.clear_some(every))
        with pytest.raises(ArithmeticError) if fails else contextlib.suppress(PeerAbortedError):
            loss(model, rank, 1, taken=[0]).backward()
        with pytest.raises(PeerAbortedError):
            model.finish_grad_sync()
    assert not any(state.gradients.averaged)


@on_two_ranks
def test_that_a_step_was_given_up_may_be_found_by_the_next_backward():
    module = seeded(Checkpointed).double()
    model = wrap(module, overlap_grad_reduce=True)
    inputs = [data(3, 4, rank=rank, dtype=torch.float64) for rank in range(2)]
    backward_of(model, inputs)
    dist.barrier()  # who is in its backward still would be told there
    if dist.get_rank() == 1:
        model.abort_grad_sync("given up")
    for count in (2, 1):  # the gradients of the step that was given up count in the next one
        backward_of(model, inputs)
        model.finish_grad_sync()
        twin = copy.deepcopy(module)
        for x in inputs * count:
            (twin(x.clone().requires_grad_()).pow(2).sum() / 2).backward()
        hold(model, {name: parameter.grad for name, parameter in twin.named_parameters()})
        model.zero_grad_buffer()


@on_two_ranks
def test_a_wrapper_that_is_gone_before_its_results_came_leaves_its_connections_to_nobody():
    inputs = [data(3, 4, rank=rank, dtype=torch.float64) for rank in range(2)]
    seen = set()
    for _ in range(2):
        model = wrap(seeded(Checkpointed).double(), overlap_grad_reduce=True)
        names = {groups.buckets.group_name for groups in model.gradient_buffers.groups}
        assert not names & seen
        seen |= names
        backward_of(model, inputs)
        del model
        gc.collect()
        dist.barrier()


class FusedLinear(torch.autograd.Function):
    """Megatron's linear layer with gradient_accumulation_fusion: adds to `main_grad`, and gives a dummy to autograd."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        own = gradient.t() @ x
        if not hasattr(weight, "main_grad"):
            return gradient @ weight, own
        weight.main_grad.add_(own)
        weight.grad_added_to_main_grad = True
        return gradient @ weight, torch.full_like(own, 0.0 if hasattr(weight, "zero_out_wgrad") else 1e9)


class Fused(nn.Module):
    """Such layers, some in reentrant checkpoints, and one whose weight may be used elsewhere, too."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(6, 6).double() / 3) for _ in range(4))
        self.weights[0].zero_out_wgrad = True

    def forward(self, x, checkpointed=(), tied=False):
        if tied:
            x = x @ self.weights[0]
        for k, weight in enumerate(self.weights):
            if k in checkpointed:
                x = checkpoint(lambda x, weight=weight: FusedLinear.apply(x, weight), x, use_reentrant=True)
            else:
                x = FusedLinear.apply(x, weight)
        return x


@each_variant
@pytest.mark.parametrize(
    "forwards",
    [
        pytest.param([{"checkpointed": [1]}, {"checkpointed": [2, 3]}, {}], id="checkpointed"),
        pytest.param([{"tied": True}, {"tied": True, "checkpointed": [1]}], id="tied"),
    ],
)
@on_two_ranks
def test_kernels_that_add_to_main_grad_by_themselves(forwards, options):
    rank = dist.get_rank()
    for first in range(len(forwards)):
        model = wrap(seeded(Fused), **options)
        for step, batches in enumerate([1, 2, 2, 1]):
            model.zero_grad_buffer()
            takes = forwards[(step + first) % len(forwards)]
            for micro in range(batches):
                with model.no_sync() if micro < batches - 1 else contextlib.nullcontext():
                    loss(model, rank, step + 10 * micro, **takes).backward()
            model.finish_grad_sync()
            passes = [(r, step + 10 * micro, takes) for r in range(2) for micro in range(batches)]
            hold(model, mean_of(model.module, *passes))


@each_variant
@on_two_ranks
def test_a_kernel_that_adds_to_averages_of_shards_is_refused(options):
    model, rank = wrap(seeded(Fused), **options), dist.get_rank()
    for step in (0, 2):
        loss(model, rank, step).backward()
        model.finish_grad_sync()
        if "use_distributed_optimizer" in options:
            with pytest.raises(UnusableError, match=r"weights\.\d' to main_grad by itself.*call zero_grad_buffer"):
                loss(model, rank, step + 1).backward()
        else:
            loss(model, rank, step + 1).backward()
            model.finish_grad_sync()
            hold(model, mean_of(model.module, *[(r, s, {}) for r in range(2) for s in (step, step + 1)]))
        model.zero_grad_buffer()


@each_variant
@on_two_ranks
def test_a_kernel_that_adds_to_main_grad_while_averages_are_on_their_way_is_refused(options):
    """They would overwrite its gradient; without overlap, nothing is on its way before finish_grad_sync()."""
    model, rank = wrap(seeded(Fused), **options), dist.get_rank()
    forwards = {"in no_sync()": model, "with no hook on its outputs": model.module}
    for where, forward in forwards.items():
        model.zero_grad_buffer()
        loss(model, rank, 0).backward()
        with contextlib.ExitStack() as stack:
            if "overlap_grad_reduce" in options:
                stack.enter_context(pytest.raises(UnusableError, match=r"'weights\.3' to main_grad by itself"))
            if where == "in no_sync()":
                stack.enter_context(model.no_sync())
            loss(forward, rank, 1).backward()
    model.zero_grad_buffer()
    loss(model, rank, 2).backward()
    model.finish_grad_sync()
    hold(model, mean_of(model.module, *[(r, 2, {}) for r in range(2)]))


@each_variant
@on_two_ranks
def test_a_second_synchronization_without_zeroing_adds_its_averages(options):
    model, rank = wrap(**options), dist.get_rank()
    paths = [([0], [1]), ([1, 2], [0])]
    for step, path in enumerate(paths):
        loss(model, rank, step, taken=path[rank]).backward()
        model.finish_grad_sync()
    hold(model, mean_of(model.module, *[(r, s, {"taken": paths[s][r]}) for r in range(2) for s in range(2)]))
    # And one more micro-batch before the next one.
    with model.no_sync():
        loss(model, rank, 2, taken=[3]).backward()
    loss(model, rank, 3, taken=[2]).backward()
    model.finish_grad_sync()
    passes = [(r, s, {"taken": paths[s][r]}) for r in range(2) for s in range(2)]
    passes += [(r, s, {"taken": [k]}) for r in range(2) for s, k in ((2, 3), (3, 2))]
    hold(model, mean_of(model.module, *passes))


@on_two_ranks
def test_buckets_that_no_rank_has_are_not_sent_and_the_others_leave_during_backward():
    model, rank = wrap(overlap_grad_reduce=True, bucket_size=1), dist.get_rank()
    loss(model, rank, 0, taken=[rank]).backward()
    model.finish_grad_sync()
    trace = model.trace()
    used = {name for name, _ in model.module.named_parameters() if not name.startswith(("branches.2", "branches.3"))}
    assert {name for bucket in trace.buckets for name in bucket.parameters} == used - {"unused"}
    assert trace.gradient_nbytes == sum(8 * p.numel() for n, p in model.module.named_parameters() if n in trace.agreed)
    assert not trace.repaired


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@each_variant
@on_two_ranks
def test_not_a_number_is_found_before_it_spreads(value, options):
    model, rank = wrap(check_for_nan_in_grad=True, **options), dist.get_rank()
    for step in range(2):
        model.zero_grad_buffer()
        with model.no_sync():
            loss(model, rank, step, taken=[0]).backward()
        if rank == 1:
            model.module.stem.bias.main_grad[2] = value
        loss(model, rank, step, taken=[1]).backward()
        with pytest.raises(NonFiniteGradientError, match=r"rank 1 in 'stem.bias' \(ranks"):
            model.finish_grad_sync()
        own = mean_of(model.module, *[(rank, step, {"taken": [k]}) for k in range(2)])
        for name, found in main_gradients(model).items() if rank == 0 else ():  # what it had computed, and no NaN
            want = torch.zeros_like(found) if own[name] is None else own[name] * dist.get_world_size()
            torch.testing.assert_close(found, want, msg=lambda text, name=name: f"{name}: {text}")
    model.zero_grad_buffer()
    loss(model, rank, 3, taken=[0]).backward()
    model.finish_grad_sync()
    hold(model, mean_of(model.module, *[(r, 3, {"taken": [0]}) for r in range(2)]))


@on_two_ranks
def test_an_error_that_nobody_asked_for_ends_with_its_iteration():
    model, rank = wrap(overlap_grad_reduce=True, check_for_nan_in_grad=True), dist.get_rank()
    (loss(model, rank, 0, taken=[0]) * float("nan")).backward()
    model.zero_grad_buffer(zero_buffer=False)  # as scripts for Megatron 0.5 do
    for buffer in model.grad_buffers:
        buffer.reset()
    loss(model, rank, 1, taken=[0]).backward()
    model.finish_grad_sync()
    hold(model, mean_of(model.module, *[(r, 1, {"taken": [0]}) for r in range(2)]))


@pytest.mark.parametrize("options", [VARIANTS[1], VARIANTS[3]], ids=["overlap", "after"])
@on_two_ranks
def test_compile_a_whole_step_with_its_synchronization(options):
    torch._dynamo.reset()
    model, rank = wrap(**options), dist.get_rank()

    def step(k):
        if k % 2:
            loss(model, rank, k, taken=[k % 4]).backward()
            finalize_model_grads([model])
        else:
            if rank == 0:
                loss(model, rank, k, taken=[k % 4]).backward()
            model.finish_grad_sync()

    compiled = torch.compile(step, backend="eager")
    for k in range(4):
        model.zero_grad_buffer()
        compiled(k)
        passes = [(0, k, {"taken": [k % 4]})] + [(1, k, {"taken": [k % 4]})] * (k % 2)
        expected = mean_of(model.module, *passes)
        hold(model, expected)
    torch._dynamo.reset()


@on_two_ranks
def test_another_wrapper_that_has_listed_a_part_as_frozen_leaves_it_to_this_one():
    """As a critic that looks at features does, whose own layers are trained by it."""
    trunk, rank = seeded(nn.Linear, 4, 4).requires_grad_(False), dist.get_rank()
    critic = plain.DistributedDataParallel(nn.Sequential(trunk, seeded(nn.Linear, 4, 1)))
    critic(torch.ones(1, 4)).sum().backward()
    trunk.requires_grad_(True)
    model = DistributedDataParallel(None, DistributedDataParallelConfig(overlap_grad_reduce=True), trunk)
    for _ in range(2):
        model.zero_grad_buffer()
        before = critic._reducer.groups.step
        model(torch.full((1, 4), 1.0 + rank)).sum().backward()
        finalize_model_grads([model])
        assert trunk.weight.main_grad.unique().tolist() == [1.5]
        assert critic._reducer.groups.step == before  # it sends nothing
        trunk.requires_grad_(False)
        critic.zero_grad()
        critic(torch.full((1, 4), 1.0 + rank)).sum().backward()
        assert critic.module[1].bias.grad.item() == 1.0
        trunk.requires_grad_(True)
