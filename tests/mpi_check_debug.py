"""Checks of PPE_DDP_DEBUG=1 over the backend `mpi4py`; run by mpi_checks.py."""

import pytest
import torch
import torch.distributed as dist

import failing
from mpi_check_kit import check
from ppe_ddp import DisagreementError
from test_debug_mode import ODD, debug


@check(*ODD, ranks=2, most=2)
def one_rank_calls_something_else(kind):
    rank, size = dist.get_rank(), dist.get_world_size()
    odd, text = ODD[kind]
    with pytest.MonkeyPatch.context() as patch:
        debug(patch)
        group = dist.new_group()
        one = torch.ones(6)
        with pytest.raises(DisagreementError, match=rf"rank {rank} of {size}, .*number 1 .*rank 1 has called {text}"):
            odd(one, group) if rank == 1 else dist.all_reduce(one, group=group)
        assert set(one.tolist()) == {1.0}  # nothing was sent
        dist.destroy_process_group(group)


@check(ranks=2, most=2)
def one_rank_that_fails_while_calls_are_compared():
    with pytest.MonkeyPatch.context() as patch:
        debug(patch)
        failing.hold("in_the_middle", turns=2)
