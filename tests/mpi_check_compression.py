"""Checks of compressors over the backend `mpi4py`: laws of test_compression.py, in private and in shared memory."""

import torch.distributed as dist

from mpi_check_kit import check
from one_process import assert_gradients, data, mean_gradients, seeded
from ppe_ddp import DistributedDataParallel
from ppe_ddp.backends.mpi import MpiOptions
from ppe_ddp.compression import Int8
from test_compression import METHODS, Routes, check_that_nothing_is_lost, walk


@check(*METHODS, ranks=2)
def compressors_lose_nothing(name):
    check_that_nothing_is_lost(name, bucket_cap_mb=2e-3)


@check(ranks=2)
def compressors_over_shared_memory_lose_nothing():
    group = dist.new_group(backend="mpi4py", pg_options=MpiOptions())
    for name in ("int8", "topk", "powersgd"):
        check_that_nothing_is_lost(name, bucket_cap_mb=2e-3, process_group=group)
    dist.destroy_process_group(group)


@check(ranks=2)
def a_rank_without_a_backward_gets_compressed_averages():
    module = seeded(Routes)
    wrapper = DistributedDataParallel(module)
    wrapper.register_comm_hook(Int8(block=8))

    def step(model, rank):
        if rank == 1:
            model(data(5, 16, rank=rank), [2, 4]).sum().backward()

    expected = mean_gradients(module, step)
    step(wrapper, dist.get_rank())
    if dist.get_rank() != 1:
        wrapper.finish_grad_sync()
    assert_gradients(module, expected, rtol=2e-2, atol=2e-2)
    walk(0)(wrapper, dist.get_rank())
