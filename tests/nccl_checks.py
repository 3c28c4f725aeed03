"""Checks of a process group over NCCL, for every rank: over the stand-in on CPUs, and over CuPy on GPUs.

Every rank computes the results of all from seeds, in a wider dtype.
"""

import torch
import torch.distributed as dist

import mpi_check_collectives as collectives
from mpi_check_kit import DTYPES, OPS, assert_same, data, options
from nccl_contract import CallRecorder

BOOL_OPS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR")

SHARED = (
    collectives.all_gather_of_different_sizes,
    collectives.reduce_scatter_of_different_sizes,
    collectives.all_to_all_of_different_sizes,
    collectives.coalesced,
    collectives.conjugate_views,
)


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


def reductions(name, device="cpu", *, float8=True):
    """All-reduce, reduce and reduce-scatter in all their forms, of one dtype; what NCCL has not is refused."""
    dtype = DTYPES[name]
    possible = ops_for(dtype, float8=float8)
    # NCCL itself refuses float8 on GPUs that cannot reduce it, in its own words.
    for op in set(OPS) - set(possible) if float8 or not is_float8(dtype) else ():
        refused(op, dtype, device)
    with torch.device(device):
        for check in (collectives.all_reduce, collectives.reduce, collectives.reduce_scatter):
            check(name, possible)


def refused(op, dtype, device):
    tensor = data(dtype, (3,), op, 0).to(device)
    kept = tensor.clone()
    try:
        dist.group.WORLD.allreduce([tensor], options(dist.AllreduceOptions(), op))
    except TypeError as error:
        assert str(dtype) in str(error), error  # noqa: PT017 - not every rank runs pytest
        assert_same(tensor.cpu(), kept.cpu(), "what was refused changed")
    else:
        raise AssertionError(f"{op} of {dtype} was not refused")


def moving(name, device="cpu"):
    """Broadcast, all-gather, gather, scatter and all-to-all, of one dtype."""
    with torch.device(device):
        collectives.moving(name)


def strided(device="cpu"):
    """Tensors that are not contiguous."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [data(torch.float32, (4, 6), "strided", other) for other in range(size)]
    view = tensors[rank].to(device, copy=True).t()
    dist.all_reduce(view)
    assert_same(view.cpu(), sum(tensors).t(), "all_reduce of a transposed tensor")
    columns = torch.zeros(4, 2 * size, device=device)
    dist.all_gather([columns[:, 2 * other : 2 * other + 2] for other in range(size)], tensors[rank][:, :2].to(device))
    assert_same(columns.cpu(), torch.cat([tensor[:, :2] for tensor in tensors], 1), "all_gather into columns")


def coalesced_in_the_old_style(device="cpu"):
    """Which torch uses for what has no coalesced form of its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    first, second = torch.full((3,), rank + 1.0, device=device), torch.full((4,), float(rank), device=device).t()
    with dist._coalescing_manager(device=torch.device(device)):
        dist.broadcast(first, size - 1)
        dist.reduce(second, 0)
    assert first.tolist() == [float(size)] * 3
    assert rank != 0 or second.tolist() == [size * (size - 1) / 2] * 4


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


def future_and_object(device="cpu"):
    size = dist.get_world_size()
    work = dist.all_reduce(torch.full((3,), dist.get_rank() + 1.0, device=device), async_op=True)
    doubled = work.get_future().then(lambda done: done.value()[0] * 2)
    assert doubled.wait().tolist() == [size * (size + 1.0)] * 3
    found = [None] * size
    dist.all_gather_object(found, {"rank": dist.get_rank()})
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
    with torch.device(device):
        for check in SHARED:
            check()
    for check in (strided, coalesced_in_the_old_style, mistakes):
        check(device)
    calls = list(recorder.calls)
    for check in (messages, future_and_object):
        check(device)
    with torch.device(device):
        collectives.functional_collectives()
    return calls
