"""Checks of a process group over NCCL, for every rank: over the stand-in on CPUs, and over CuPy on GPUs.

Every rank computes the results of all from seeds, in a wider dtype.
"""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from mpi_check_kit import DTYPES, OPS, assert_same, data, expected, op_named, options
from nccl_contract import CallRecorder

SHAPES = ((), (5,), (3, 4), (0,), (4_007,))
BOOL_OPS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR")

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def is_float8(dtype):
    return dtype.itemsize == 1 and dtype.is_floating_point


def ops_for(dtype, *, float8):
    """What NCCL can reduce; the rest has to be refused."""
    if dtype in (torch.int16, torch.uint16) or (is_float8(dtype) and not float8):
        return ()
    if dtype is torch.bool:
        return BOOL_OPS
    if dtype.is_complex:
        return ("SUM", "AVG")
    return ("SUM", "AVG", "PRODUCT", "MIN", "MAX")


def wanted(tensors, name):
    if name == "AVG" and tensors[0].dtype in (torch.uint32, torch.uint64):
        total = sum(tensor.to(torch.int64) for tensor in tensors)
        return total.div(len(tensors), rounding_mode="trunc").to(tensors[0].dtype)
    return expected(tensors, name)


def reductions(name, device="cpu", *, float8=True):
    """All-reduce, reduce and reduce-scatter in all their forms, of one dtype; what NCCL has not is refused."""
    dtype = DTYPES[name]
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    possible = ops_for(dtype, float8=float8)
    for op in OPS:
        if op not in possible:
            # NCCL itself refuses float8 on GPUs that cannot reduce it, in its own words.
            if float8 or not is_float8(dtype):
                refused(op, dtype, device)
            continue
        exact = op not in ("AVG", "PRODUCT")
        for shape in SHAPES:
            tensors = [data(dtype, shape, op, other) for other in range(size)]
            result, what = wanted(tensors, op), f"{op} of {dtype}, shape {shape}"
            mine = tensors[rank].to(device, copy=True)
            group.allreduce([mine], options(dist.AllreduceOptions(), op_named(op, rank))).wait()
            assert_same(mine.cpu(), result, f"all-reduce {what}", exact=exact)
            mine, made = tensors[rank].to(device, copy=True), options(dist.ReduceOptions(), op_named(op, rank))
            made.rootRank = size - 1
            group.reduce([mine], made).wait()
            is_root = rank == size - 1
            assert_same(mine.cpu(), result if is_root else tensors[rank], f"reduce {what}", exact=exact)
        parts = [[data(dtype, (3, 4), (op, part), sender) for part in range(size)] for sender in range(size)]
        result = wanted([parts[sender][rank] for sender in range(size)], op)
        made = options(dist.ReduceScatterOptions(), op_named(op, rank))
        out = torch.empty(3, 4, dtype=dtype, device=device)
        mine = [part.to(device) for part in parts[rank]]
        group.reduce_scatter([out], [mine], made).wait()
        assert_same(out.cpu(), result, f"reduce-scatter {op} of {dtype}", exact=exact)
        strided = torch.empty(4, 3, dtype=dtype, device=device).t()
        before = torch.stack(parts[rank]).to(device)
        source = before.clone()
        group.reduce_scatter_single(strided, source, made).wait()
        assert_same(strided.cpu(), result, f"reduce-scatter {op} of {dtype}, tensor form", exact=exact)
        assert_same(source.cpu(), before.cpu(), "the input of a reduce-scatter changed")


def refused(op, dtype, device):
    tensor = data(dtype, (3,), op, 0).to(device)
    kept = tensor.clone()
    try:
        dist.group.WORLD.allreduce([tensor], options(dist.AllreduceOptions(), op_named(op, 0)))
    except TypeError as error:
        assert str(dtype) in str(error), error  # noqa: PT017 - not every rank runs pytest
        assert_same(tensor.cpu(), kept.cpu(), "what was refused changed")
    else:
        raise AssertionError(f"{op} of {dtype} was not refused")


def moving(name, device="cpu"):
    """Broadcast, all-gather, gather, scatter, all-to-all and messages, of one dtype."""
    dtype = DTYPES[name]
    rank, size = dist.get_rank(), dist.get_world_size()
    root = size - 1
    for shape in SHAPES:
        tensors = [data(dtype, shape, "moving", other) for other in range(size)]
        mine, everyone = tensors[rank].to(device), range(size)
        moved = mine.clone()
        dist.broadcast(moved, root)
        assert_same(moved.cpu(), tensors[root], f"broadcast {shape}")

        def check_all(parts, what, tensors=tensors):
            for part, right in zip(parts, tensors, strict=True):
                assert_same(part.cpu(), right, what)

        into = [torch.empty_like(mine) for _ in everyone]
        dist.all_gather(into, mine)
        check_all(into, f"all_gather {shape}")
        into = [torch.empty_like(mine) for _ in everyone]
        dist.gather(mine, into if rank == root else None, dst=root)
        if rank == root:
            check_all(into, f"gather {shape}")
        own = torch.empty_like(mine)
        dist.scatter(own, [tensor.to(device) for tensor in tensors] if rank == root else None, src=root)
        assert_same(own.cpu(), tensors[rank], f"scatter {shape}")
        into = [torch.empty_like(mine) for _ in everyone]
        dist.all_to_all(into, [mine] * size)
        check_all(into, f"all_to_all {shape}")
        whole = torch.empty((size, *mine.shape), dtype=dtype, device=device)
        all_gather_single(whole, mine)
        check_all(whole, f"all_gather_single {shape}")


def strided(device="cpu"):
    """Tensors that are not contiguous, and conjugate views."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [data(torch.float32, (4, 6), "strided", other) for other in range(size)]
    view = tensors[rank].to(device, copy=True).t()
    dist.all_reduce(view)
    assert_same(view.cpu(), sum(tensors).t(), "all_reduce of a transposed tensor")
    columns = torch.zeros(4, 2 * size, device=device)
    dist.all_gather([columns[:, 2 * other : 2 * other + 2] for other in range(size)], tensors[rank][:, :2].to(device))
    assert_same(columns.cpu(), torch.cat([tensor[:, :2] for tensor in tensors], 1), "all_gather into columns")
    view = torch.tensor([rank + 1j, 2.0], device=device).conj()
    out = [torch.empty(2, dtype=torch.complex64, device=device) for _ in range(size)]
    dist.group.WORLD.allgather([out], [view]).wait()
    assert [one[0].item() for one in out] == [other - 1j for other in range(size)]
    made = dist.BroadcastOptions()
    made.rootRank = size - 1
    dist.group.WORLD.broadcast([view], made).wait()
    assert view[0].item() == size - 1 - 1j


def of_different_sizes(device="cpu"):
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered = [torch.empty(2 * other, device=device) for other in range(size)]
    dist.all_gather(gathered, torch.full((2 * rank,), float(rank), device=device))
    assert [one.tolist() for one in gathered] == [[float(other)] * (2 * other) for other in range(size)]
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        out = torch.empty(rank + 1, dtype=dtype, device=device)
        parts = [torch.full((other + 1,), float(other + 1), dtype=dtype, device=device) for other in range(size)]
        dist.reduce_scatter(out, parts)
        assert out.tolist() == [float(size * (rank + 1))] * (rank + 1)
    send = torch.cat([torch.full((receiver + 1, 2), 10.0 * rank + receiver) for receiver in range(size)]).to(device)
    out = torch.empty((rank + 1) * size, 2, device=device)
    dist.all_to_all_single(out, send, [rank + 1] * size, [receiver + 1 for receiver in range(size)])
    right = torch.cat([torch.full((rank + 1, 2), 10.0 * sender + rank) for sender in range(size)])
    assert_same(out.cpu(), right, "uneven all_to_all_single")
    even = torch.empty(size, device=device)
    dist.all_to_all_single(even, torch.arange(size, device=device) + 100.0 * rank)
    assert even.tolist() == [100.0 * sender + rank for sender in range(size)]


def coalesced(device="cpu"):
    rank, size = dist.get_rank(), dist.get_world_size()
    group, place = dist.group.WORLD, torch.device(device)
    total = size * (size + 1) / 2
    tensors = [torch.full((3,), rank + 1.0, device=device), torch.full((2, 2), 2.0 * (rank + 1), device=device)]
    group.allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions()).wait()
    assert [tensor.flatten()[0].item() for tensor in tensors] == [total, 2 * total]
    outputs = [torch.empty(size * 2, device=device), torch.empty(size, device=device)]
    inputs = [torch.full((2,), float(rank), device=device), torch.tensor([rank + 0.5], device=device)]
    group.all_gather_single_coalesced(outputs, inputs).wait()
    assert outputs[0].tolist() == torch.arange(float(size)).repeat_interleave(2).tolist()
    assert outputs[1].tolist() == (torch.arange(size) + 0.5).tolist()
    # The old style, which torch uses for what has no coalesced form of its own.
    first, second = torch.full((3,), rank + 1.0, device=device), torch.full((4,), float(rank), device=device).t()
    with dist._coalescing_manager(device=place):
        dist.broadcast(first, size - 1)
        dist.reduce(second, 0)
    assert first.tolist() == [float(size)] * 3
    assert rank != 0 or second.tolist() == [total - size] * 4


def messages(device="cpu"):
    """In a ring, both ways at once, and again; with and without a batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    if size == 1:
        return
    for turn in range(2):
        sent = torch.full((1000,), 10.0 * turn + rank, device=device)
        from_left, from_right = torch.empty(1000, device=device), torch.empty(1000, device=device)
        if size > 2:
            ways = [(dist.isend, sent, right), (dist.irecv, from_left, left)]
            ways += [(dist.isend, sent, left), (dist.irecv, from_right, right)]
        else:
            ways = [(dist.isend, sent, right), (dist.irecv, from_left, left)]
        if turn:
            works = dist.batch_isend_irecv([dist.P2POp(*way) for way in ways])
        else:
            works = [call(tensor, peer) for call, tensor, peer in ways]
        for work in works:
            work.wait()
        assert from_left.tolist() == [10.0 * turn + left] * 1000
        assert size == 2 or from_right.tolist() == [10.0 * turn + right] * 1000
    # One that is not waited for leaves with the next collective.
    strided = torch.zeros(6, 2, device=device)[:, 0]
    if rank == 0:
        dist.isend(torch.arange(6.0, device=device), size - 1)
    elif rank == size - 1:
        dist.recv(strided, 0)
        assert strided.tolist() == list(range(6))
    dist.barrier()


def futures_and_functional_collectives(device="cpu"):
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    tensor = torch.full((3,), rank + 1.0, device=device)
    work = dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda done: done.value()[0] * 2)
    assert doubled.wait().tolist() == [size * (size + 1.0)] * 3
    total = functional.all_reduce(torch.tensor([rank + 1.0], device=device), "sum", group)
    assert total.tolist() == [size * (size + 1) / 2]
    swapped = functional.all_to_all_single(torch.arange(size, device=device) + 10 * rank, None, None, group)
    assert swapped.tolist() == [10 * other + rank for other in range(size)]
    found = [None] * size
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": other} for other in range(size)]


def mistakes(device="cpu"):
    """Told before anything is sent, so that the next collective is right."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    three = torch.ones(3, device=device)

    def told(error, words, call):
        try:
            call()
        except error as caught:
            assert words in str(caught), caught  # noqa: PT017 - not every rank runs pytest
        else:
            raise AssertionError(f"{words!r} was not told")

    told(ValueError, "all-gather of 3 elements", lambda: group.all_gather_single(torch.ones(7, device=device), three))
    told(ValueError, "one for each of", lambda: group.allgather([[three] * (size + 1)], [three]))
    told(TypeError, "different dtypes", lambda: group.all_gather_single(three, torch.ones(3, device=device).int()))
    told(ValueError, "splits", lambda: group.all_to_all_single(three, three, [9] * size, [3], None))
    told(ValueError, "is itself", lambda: group.send([three], rank))
    told(ValueError, "name the sender", lambda: group.recv_anysource([three]))
    told(ValueError, "no tensors", lambda: group.allreduce([]))
    total = torch.ones(2, device=device)
    dist.all_reduce(total)
    assert total.tolist() == [size] * 2


def everything(device="cpu", *, float8=True, without=()):
    """All of the above, but for some dtypes.

    Returns:
        The calls that NCCL got, but for those that another group gets where tensors on the CPU have one.
    """
    communicators = dist.group.WORLD._group(device)._communicators
    communicators._library = recorder = CallRecorder(communicators._library)
    for name in sorted(DTYPES.keys() - set(without)):
        reductions(name, device, float8=float8)
        moving(name, device)
    for check in (strided, of_different_sizes, coalesced, mistakes):
        check(device)
    calls = list(recorder.calls)
    for check in (messages, futures_and_functional_collectives):
        check(device)
    return calls
