"""Runs the checks of process groups over the backend `shm`, for test_shm_backend.py."""

import traceback
import warnings
from datetime import timedelta

import torch.distributed as dist

import mpi_check_collectives  # noqa: F401  # these register their checks
import mpi_check_compression  # noqa: F401
import mpi_check_failures  # noqa: F401
import mpi_check_messages  # noqa: F401
import mpi_check_races  # noqa: F401
import mpi_check_shared  # noqa: F401
import mpi_check_torch  # noqa: F401
import mpi_check_waits  # noqa: F401
from failing import SECONDS
from mpi_check_kit import CHECKS, ignore_warnings_of_torch
from mpi_check_kit import names_for as all_names_for
from mpi_wrappers import on_two_ranks
from ppe_ddp.backends.shm import ShmOptions

OF_MPI = {"mpi_check_thread", "mpi_check_communicators", "mpi_check_debug"}  # the last: see test_debug_mode.py
# What cannot be said of this backend, and why.
LEFT_OUT = {
    "many_groups",  # gloo's connections are not few, but slow to make
    "shared_stages_are_left_alone_until_all_have_read_them",  # the background thread does the ranks' parts
}
# What tests of wrappers, which share memory by default, have with the same buckets: beginnings of their names.
ELSEWHERE = (
    "a_rank_that_waits_long",  # test_lost_ranks.py
    "compressors_lose_nothing",  # test_compression.py
    "one_of_",  # test_one_rank_fails.py
    "one_rank_",
    "parameters_that_come_to_differ",  # test_drift.py
    "ranks_join_with_no_sync",  # test_torch_join.py
    "the_ranks_come_to_two_wrappers_in_different_orders",  # test_one_rank_fails.py
    "training_with_batches",  # test_weighing.py
    "weighted_means",
    "what_megatron_has_accumulated",  # test_failed_steps.py
)
# With some dtypes: `reduce` and what is shared are summed as all-reduces are. A reduce-scatter by messages is summed in
# the same way over each wire, and over MPI with every dtype; what only moves is packed alike, and here has every dtype.
FEW = ("reduce-", "reduce_scatter-", "shared_reduce_scatter", "shared_all_gather")


def names_for(size):
    names = [name for name in all_names_for(size, few=FEW) if not name.startswith(ELSEWHERE)]
    return [name for name in names if name not in LEFT_OUT and module_of(name) not in OF_MPI]


def module_of(name):
    body = CHECKS[name][0]
    return getattr(body, "func", body).__module__


def run_checks(rank, size, meeting, names):
    """These checks, each in its turn: by name, what went wrong on each rank."""
    options = ShmOptions(shared_memory=False)  # mpi_check_shared.py has groups of its own
    timeout = timedelta(seconds=SECONDS)
    dist.init_process_group("shm", init_method=meeting, rank=rank, world_size=size, timeout=timeout, pg_options=options)
    warnings.simplefilter("error")
    ignore_warnings_of_torch()
    apart = dist.new_group(backend="gloo", timeout=3 * timeout)  # whoever waits in a check is through with it first
    found = {}
    for name in names:
        error = None
        try:
            CHECKS[name][0]()
        except Exception:
            error = f"rank {rank}:\n{traceback.format_exc()}"
        errors = [None] * size
        dist.all_gather_object(errors, error, group=apart)
        found[name] = [text for text in errors if text]
    dist.destroy_process_group()
    return found


def run_wrappers():
    """The cases of several wrappers, and of models that communicate by themselves, over the default group."""
    cases = [*on_two_ranks()][::3]  # all are in tests of wrappers that share memory beside a group over gloo
    for case in cases:
        case()
    return len(cases)
