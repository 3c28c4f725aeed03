"""Checks of ranks that fail alone, over the backend `mpi4py`; run by mpi_checks.py."""

import failing
from mpi_check_kit import check


@check(*failing.WAYS, ranks=2)
def one_rank_fails(way):
    failing.hold(way, turns=3)
