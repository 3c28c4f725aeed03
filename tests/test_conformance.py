"""The conformance kit accepts what is right, and says what is wrong with what is not."""

import contextlib
import functools
import io

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import ppe_ddp
from one_process import in_place_mean
from ppe_ddp.testing import (
    ConformanceError,
    World,
    check_backend,
    check_broadcast_function,
    check_comm_hook,
    check_reduce_function,
)
from ppe_ddp.testing.probes import probe_backend
from rank_tests import on_two_ranks
from test_bad_functions import future_of


@pytest.fixture
def two(two_ranks):
    return World(ranks=(two_ranks,))


@pytest.fixture
def three(three_ranks):
    return World(ranks=(three_ranks,))


@pytest.fixture
def both(two_ranks, three_ranks):
    return World(ranks=(two_ranks, three_ranks))


# ---------------------------------------------------------------- reduce functions


def in_flight(gradients, group):
    gradients.buffer().div_(dist.get_world_size(group))
    return dist.all_reduce(gradients.buffer(), group=group, async_op=True)


def test_our_own_reduce_function(both, capsys):
    check_reduce_function(ppe_ddp.average, world=both)
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in told] == [f"reduce function average on {n} ranks" for n in (2, 3)]


def test_good_reduce_functions(two, three):
    check_reduce_function(in_place_mean, world=three)
    check_reduce_function(in_flight, world=two)
    check_reduce_function(ppe_ddp.overlapped(in_place_mean), world=two)


def test_a_check_starts_ranks_by_itself():
    check_reduce_function(ppe_ddp.average, world=World(sizes=(2,), timeout=30))


def test_a_rounding_function_needs_a_tolerance(two):
    with pytest.raises(ConformanceError, match="off the mean"):
        check_reduce_function(by_bfloat16, world=two)
    check_reduce_function(by_bfloat16, tolerance=0.02, world=two)


def by_bfloat16(gradients, group):
    small = gradients.buffer().bfloat16()
    dist.all_reduce(small.div_(dist.get_world_size(group)), group=group)
    gradients.buffer().copy_(small)


def nothing(gradients, group):
    pass


def only_the_sum(gradients, group):
    return dist.all_reduce(gradients.buffer(), group=group, async_op=True)


def without_the_last(gradients, group):
    for gradient in gradients[:-1]:
        dist.all_reduce(gradient.div_(dist.get_world_size(group)), group=group)


def only_for_rank_0(gradients, group):
    mine = gradients.buffer().clone()
    in_place_mean(gradients, group)
    if dist.get_rank(group) != 0:
        gradients.buffer().copy_(mine)


def wrong_type(gradients, group):
    in_place_mean(gradients, group)
    return list(gradients)


def too_far(gradients, group):
    in_place_mean(gradients, group)
    flat = gradients.buffer()
    torch.as_strided(flat, (flat.numel() + 1,), (1,), flat.storage_offset()).add_(0).select(0, -1).fill_(0)


def parameters_instead(gradients, group):
    in_place_mean(gradients, group)
    with torch.no_grad():
        gradients.parameters()[0].zero_()


def raises(gradients, group):
    raise ZeroDivisionError("no good")


def shrinks(gradients, group):
    in_place_mean(gradients, group)
    gradients[0].resize_(0)


def as_rows(gradients, group):
    for gradient in gradients:
        row = gradient.reshape(-1)  # a copy of a gradient with the strides of torch.channels_last
        dist.all_reduce(row, group=group)
        row.div_(dist.get_world_size(group))


def without_nan(gradients, group):
    gradients.buffer().nan_to_num_(0, 0, 0)
    in_place_mean(gradients, group)


def limited(gradients, group):
    in_place_mean(gradients, group)
    gradients.buffer().clamp_(-100, 100)


def seeds(gradients, group):
    torch.manual_seed(0)
    in_place_mean(gradients, group)


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (nothing, r"ranks \[0, 1\]: a bucket of torch\.float32 over ranks \[0, 1\]: bucket0\.0 is off the mean by"),
        (only_the_sum, r"bucket0\.0 is off the mean by"),
        (without_the_last, r"bucket1\.3 is off the mean by"),
        (only_for_rank_0, r"ranks \[1\]: a bucket of torch\.float32 over ranks \[0, 1\]: bucket0\.0 is off the mean"),
        (wrong_type, r"FunctionError: reduce_function wrong_type returned list"),
        (too_far, r"memory outside of bucket 0 was written to"),
        (parameters_instead, r"parameters of bucket 0 were changed"),
        (raises, r"ZeroDivisionError: no good"),
        (as_rows, r"bucket1\.0 is off the mean by"),
        (without_nan, r"bucket3\.0 has \[.*\], where the mean is \[nan, inf\]"),
        (limited, r"bucket3\.0 has \["),
        (seeds, r"the random state of the program has been seeded"),
        (shrinks, r"FunctionError: reduce_function shrinks changed the shape of"),
    ],
)
def test_bad_reduce_functions(two, function, complaint):
    with pytest.raises(ConformanceError, match=complaint):
        check_reduce_function(function, world=two)


def all_ranks_instead_of_the_group(gradients, group):
    gradients.buffer().div_(dist.get_world_size())
    return dist.all_reduce(gradients.buffer(), async_op=True)


def test_a_function_that_ignores_its_group_shows_with_three_ranks(two, three):
    check_reduce_function(all_ranks_instead_of_the_group, world=two)
    with pytest.raises(ConformanceError, match=r"over ranks \[0\] \(does it use the group that it is given\?\)"):
        check_reduce_function(all_ranks_instead_of_the_group, world=three)


def forgets_heads(gradients, group):
    # Right in every question that is asked directly, wrong in a model.
    if not any(name.startswith("heads.0") for name in gradients.names()):
        in_place_mean(gradients, group)


def test_models_find_what_questions_do_not(two):
    with pytest.raises(ConformanceError) as caught:
        check_reduce_function(forgets_heads, world=two)
    told = str(caught.value)
    assert "training (default options), step 0 (one_backward), synchronization 0: the gradient of heads.0" in told
    assert " more" in told.splitlines()[-1]


def waits_for_nobody(gradients, group):
    if dist.get_rank(group) == 0:
        in_place_mean(gradients, group)


def test_a_function_that_hangs_is_given_up():
    with pytest.raises(ConformanceError, match="rank 0 raised"):
        check_reduce_function(waits_for_nobody, world=World(sizes=(2,), timeout=6))


def test_what_cannot_be_sent_to_the_ranks_is_a_type_error(two):
    with pytest.raises(TypeError, match="cannot be sent to the ranks"):
        check_reduce_function(lambda gradients, group: None, world=two)


# ---------------------------------------------------------------- hooks


def mean_with_a_count(counts, bucket):
    # State by index, as PowerSGD keeps it: a bucket of one index always has the same parameters.
    assert counts.setdefault(bucket.index(), bucket.names()) == bucket.names()
    return default_hooks.allreduce_hook(None, bucket)


def test_good_hooks(two):
    check_comm_hook({}, mean_with_a_count, world=two)
    check_comm_hook(None, default_hooks.allreduce_hook, world=two)


def test_compression_needs_a_tolerance(two):
    with pytest.raises(ConformanceError, match="off the mean"):
        check_comm_hook(None, default_hooks.fp16_compress_hook, world=two)
    check_comm_hook(None, default_hooks.fp16_compress_hook, tolerance=2e-3, world=two)


def too_short(state, bucket):
    return future_of(bucket.buffer()[:-1])


def no_future(state, bucket):
    return bucket.buffer()


def no_tensor(state, bucket):
    return future_of(None)


def not_reduced(state, bucket):
    return future_of(bucket.buffer())


@pytest.mark.parametrize(
    ("hook", "complaint"),
    [
        (too_short, r"FunctionError: the Future of communication hook too_short holds 4 elements, the bucket has 5"),
        (no_future, r"FunctionError: communication hook no_future returned Tensor"),
        (no_tensor, r"FunctionError: the Future of communication hook no_tensor holds NoneType"),
        (not_reduced, r"bucket0\.0 is off the mean by"),
    ],
)
def test_bad_hooks(two, hook, complaint):
    with pytest.raises(ConformanceError, match=complaint):
        check_comm_hook(None, hook, tolerance=1e-3, world=two)


# ---------------------------------------------------------------- broadcast functions


def one_by_one(tensors, group):
    for tensor in tensors:
        copy = tensor.contiguous()
        dist.broadcast(copy, group=group, group_src=0)
        tensor.copy_(copy)


def test_good_broadcast_functions(two, three):
    check_broadcast_function(ppe_ddp.broadcast, world=three)
    check_broadcast_function(one_by_one, world=two)


def leaves_all_alone(tensors, group):
    pass


def only_the_first(tensors, group):
    one_by_one(tensors[:1], group)


def tells_how_many(tensors, group):
    one_by_one(tensors, group)
    return len(tensors)


def from_the_last_rank(tensors, group):
    for tensor in tensors:
        copy = tensor.contiguous()
        dist.broadcast(copy, group=group, group_src=dist.get_world_size(group) - 1)
        tensor.copy_(copy)


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (leaves_all_alone, r"ranks \[1\]: tensors of torch\.float32 over ranks \[0, 1\]: those of shape \(3, 4\)"),
        (only_the_first, r"those of shape \(\) \(strides \(\)\), \(7,\)"),
        (from_the_last_rank, r"ranks \[0, 1\]: tensors"),
        (tells_how_many, r"it returned int, not None, a Work or a Future"),
    ],
)
def test_bad_broadcast_functions(two, function, complaint):
    with pytest.raises(ConformanceError, match=complaint):
        check_broadcast_function(function, world=two)


# ---------------------------------------------------------------- backends


def test_gloo_conforms(three):
    check_backend("gloo", world=three)


def with_a_wrong_all_reduce(is_wrong, spoil):
    """Let the all-reduces that `is_wrong` picks return other numbers: what a bad transport would do."""
    real = dist.all_reduce

    @functools.wraps(real)
    def all_reduce(tensor, op=dist.ReduceOp.SUM, *args, **kwargs):
        if not is_wrong(tensor, op):
            return real(tensor, op, *args, **kwargs)
        real(tensor, op, *args, **{**kwargs, "async_op": False})
        spoil(tensor)
        return future_of([tensor]) if kwargs.get("async_op") else None

    dist.all_reduce = all_reduce


def no_bfloat16():
    with_a_wrong_all_reduce(lambda tensor, op: tensor.dtype == torch.bfloat16, lambda tensor: tensor.mul_(1.5))


def no_maximum_of_bytes():
    with_a_wrong_all_reduce(lambda tensor, op: tensor.dtype == torch.uint8, lambda tensor: tensor.zero_())


@pytest.mark.parametrize(
    ("setup", "complaint"),
    [
        (no_bfloat16, r"all_reduce\(SUM\) of 1 torch\.bfloat16, async_op=False, is wrong"),
        (no_maximum_of_bytes, r"all_reduce\(MAX\) of 1 torch\.uint8, async_op=False, is wrong"),
    ],
)
def test_bad_backends(setup, complaint):
    with pytest.raises(ConformanceError, match=complaint):
        check_backend("gloo", setup, world=World(sizes=(2,), timeout=30))


@on_two_ranks
def test_calls_of_sharded_optimizers_and_compressors_may_be_lacking_but_not_wrong():
    names = [name for name in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, name)]
    told = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(told):
        for name in names:
            patch.setattr(dist, name, functools.partial(with_one_more, getattr(dist, name)))
        patch.setattr(dist, "all_to_all_single", lack)
        problems = probe_backend("cpu")
    assert "reduce_scatter_tensor of 2 torch.float32 is wrong, for DistributedOptimizer" in problems
    lines = ["the backend has no all_to_all_single, needed for DistributedOptimizer and compressors: none"]
    said = [line for line in told.getvalue().splitlines() if "backend" in line]
    assert said == (lines if dist.get_rank() == 0 else []), told.getvalue()


def with_one_more(reduce_scatter, received, sent, **options):
    return reduce_scatter(received, sent + 1, **options)


def lack(*_, **__):
    raise NotImplementedError("none")


def test_a_backend_that_does_not_start():
    with pytest.raises(ConformanceError, match="backend no_such_backend: starting 2 ranks"):
        check_backend("no_such_backend", world=World(sizes=(2,), timeout=30))
