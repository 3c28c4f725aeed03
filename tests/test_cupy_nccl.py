"""The backend `cupy_nccl` over a stand-in for CuPy's NCCL and for CUDA: results, streams, groups of calls, failures."""

import pytest

import nccl_checks
import nccl_stand_in
from ppe_ddp.testing import Ranks


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda size: f"{size} ranks")
def ranks(request):
    with Ranks(request.param, backend="cupy_stand_in", prepare=nccl_stand_in.register, group_timeout=20) as started:
        yield started


def test_all_collectives_of_all_dtypes(ranks):
    ranks.run(everything, timeout=50)


def everything():
    # int8 is in the place of what goes to gloo.
    nccl_checks.everything(without=["int8"])
