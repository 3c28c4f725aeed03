"""Checks of compressors over `mpi4py` and `shm`: laws of test_compression.py, in private and in shared memory."""

import torch.distributed as dist

from mpi_check_kit import check, group_options
from ppe_ddp.compression import Int8
from test_compression import check_one_rank_alone, check_that_nothing_is_lost


@check("int8", "topk", "powersgd", ranks=2, most=2)  # by all-to-all, all-gather and all-reduce
def compressors_lose_nothing(name):
    check_that_nothing_is_lost(name, bucket_cap_mb=2e-3)


@check(ranks=2, most=2)
def compressors_over_shared_memory_lose_nothing():
    group = dist.new_group(pg_options=group_options())
    for name in ("int8", "topk", "powersgd"):
        check_that_nothing_is_lost(name, bucket_cap_mb=2e-3, process_group=group)
    dist.destroy_process_group(group)


@check(ranks=2, most=2)
def a_rank_without_a_backward_gets_compressed_averages():
    check_one_rank_alone(Int8(block=8), rtol=2e-2, atol=2e-2)
