"""What all ranks must have in common is compared, and an error on all of them says what one has otherwise."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

from one_process import assert_gradients, data, mean_gradients, mlp, seeded
from ppe_ddp import DisagreementError, DistributedDataParallel, average, overlapped
from ppe_ddp.backends.shm import ShmOptions
from ppe_ddp.compression import BF16, FP16
from ppe_ddp.megatron import DistributedDataParallel as MegatronDDP
from ppe_ddp.megatron import DistributedDataParallelConfig
from rank_tests import on_three_ranks, on_two_ranks


def square(model, rank=0):
    model(data(5, 4, rank=rank)).pow(2).sum().backward()


PLUGS = {
    "a hook": ((), (None, allreduce_hook), "gradients averaged by communication hook allreduce_hook"),
    "no hook": (
        (None, allreduce_hook),
        (),
        "rank 1 lacks gradients averaged by communication hook allreduce_hook, which rank 0 has",
    ),
    "another hook": (
        (None, fp16_compress_hook),
        (None, allreduce_hook),
        "communication hook allreduce_hook .*rank 0 has .*fp16_compress_hook",
    ),
    "a compressor": (
        (),
        (BF16(),),
        r"rank 1 is at a comparison.*Register a compressor, or|gradients averaged by compressor BF16\(\)",
    ),
    "another compressor": ((FP16(),), (BF16(),), r"compressor BF16\(\) where rank 0 has .*FP16\(\)"),
}


@pytest.mark.parametrize("kind", PLUGS)
@on_two_ranks
def test_one_rank_averages_by_something_else(kind):
    ours, theirs, text = PLUGS[kind]
    wrapper = DistributedDataParallel(seeded(mlp, 4, 2))

    def step():
        if one := theirs if dist.get_rank() else ours:
            wrapper.register_comm_hook(*one)
        square(wrapper)

    with pytest.raises(DisagreementError, match=text):
        step()
    square(DistributedDataParallel(seeded(mlp, 4, 2)))


def logged(gradients, group):
    return average(gradients, group)


@on_two_ranks
def test_one_rank_has_a_reduce_function():
    """Where the wrapper may average by something else, the others would send other messages."""
    plugs = {"reduce_function": logged} if dist.get_rank() else {}
    with pytest.raises(DisagreementError, match=r"rank 1 .*reduce_function of the user's own"):
        DistributedDataParallel(seeded(mlp, 4, 2), bucket_cap_mb=4, **plugs)
    with pytest.raises(DisagreementError, match=r"rank 1 .*reduce_function of the user's own"):
        MegatronDDP(None, DistributedDataParallelConfig(), seeded(mlp, 4, 2), **plugs)
    square(DistributedDataParallel(seeded(mlp, 4, 2)))


@on_two_ranks
def test_functions_and_hooks_of_ppe_may_differ():
    module = seeded(mlp, 4, 2)
    mean = mean_gradients(module, square)
    other = overlapped(logged) if dist.get_rank() else logged
    wrapper = DistributedDataParallel(module, reduce_function=other)
    seen = []
    if dist.get_rank():
        wrapper.register_comm_hook(seen.append)
    square(wrapper, dist.get_rank())
    assert_gradients(module, mean)
    assert len(seen) == dist.get_rank()


@pytest.mark.parametrize("option", ["init_sync", "shared_memory"])
@on_three_ranks
def test_one_rank_wraps_otherwise(option):
    text = f"rank {dist.get_rank()}: {option} is not the same on all ranks: True on rank 0, False on rank 1, True on"
    with pytest.raises(DisagreementError, match=text):
        DistributedDataParallel(seeded(mlp, 4, 2), **{option: dist.get_rank() != 1})
    square(DistributedDataParallel(seeded(mlp, 4, 2)))


@pytest.mark.parametrize("wrappers", [1, 2])
@on_two_ranks
def test_copies_of_wrappers_come_to_their_first_forward_in_one_order(wrappers):
    """Two copies: of one wrapper, or of two."""
    originals = [DistributedDataParallel(seeded(mlp, 4, 2)) for _ in range(wrappers)]
    copies = [copy.deepcopy(originals[-k]) for k in range(2)]
    order = copies if dist.get_rank() == 0 else copies[::-1]
    text = r"the wrapper in its first forward is not the same on all ranks: copy 1 of wrapper 1 on rank 0, copy \d of"
    with pytest.raises(DisagreementError, match=text):
        order[0](torch.ones(3, 4))
    for model in copies:
        square(model)


@on_three_ranks
def test_one_rank_makes_a_group_with_other_options():
    options = ShmOptions(shared_piece_bytes=1 << (20 + (dist.get_rank() == 1)))
    with pytest.raises(DisagreementError, match=r"rank 1 .*piece_bytes=2097152.*Give the same on every rank"):
        dist.new_group(backend="shm", pg_options=options)
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group(backend="shm", pg_options=ShmOptions()))
    assert total.item() == 3


@pytest.mark.parametrize("options", [{}, {"shared_memory": False}], ids=["shared", "gloo"])
@on_two_ranks
def test_one_rank_has_a_broadcast_function(options):
    """It may send other messages than the library's own."""

    def each_alone(tensors, group):
        for tensor in tensors:
            dist.broadcast(tensor, group=group, group_src=0)

    plugs = {"broadcast_function": each_alone} if dist.get_rank() else {}
    with pytest.raises(DisagreementError, match=r"rank 1 .*broadcast_function of the user's own"):
        DistributedDataParallel(seeded(mlp, 4, 4, 2), **options, **plugs)
    square(DistributedDataParallel(seeded(mlp, 4, 2)))
