"""Runs the checks of the backend `mpi4py` under mpirun, for test_mpi_backend.py: one JSON line a check on rank 0.

All checks for so many ranks, or those that are named on the command line.
"""

import gc
import json
import sys
import traceback
from datetime import timedelta

import torch.distributed as dist

import mpi_check_collectives  # noqa: F401  # these register their checks
import mpi_check_communicators  # noqa: F401
import mpi_check_compression  # noqa: F401
import mpi_check_debug  # noqa: F401
import mpi_check_failures  # noqa: F401
import mpi_check_messages  # noqa: F401
import mpi_check_races  # noqa: F401
import mpi_check_shared  # noqa: F401
import mpi_check_thread  # noqa: F401
import mpi_check_torch  # noqa: F401
import mpi_check_waits  # noqa: F401
from failing import SECONDS
from mpi_check_kit import CHECKS, ignore_warnings_of_torch
from mpi_check_kit import names_for as all_names_for


def names_for(size):
    """Those for so many ranks; shared memory is the same over shm, which sums there with every dtype."""
    return all_names_for(size, few=("shared_", "moving", "reduce-"))


def main():
    from mpi4py import MPI

    from ppe_ddp.backends.mpi import MpiOptions

    gc.freeze()  # what was imported, as in other ranks: checks look for garbage again and again
    options = MpiOptions(piece_bytes=1 << 16, shared_memory=False)  # mpi_check_shared.py has groups of its own
    dist.init_process_group("mpi4py", init_method="mpi://", timeout=timedelta(seconds=SECONDS), pg_options=options)
    ignore_warnings_of_torch()
    own = MPI.COMM_WORLD.Dup()
    for name in sys.argv[1:] or names_for(dist.get_world_size()):
        error = None
        try:
            CHECKS[name][0]()
        except Exception:
            error = f"rank {dist.get_rank()}:\n{traceback.format_exc()}"
            print(name, error, file=sys.stderr, flush=True)  # the other ranks may hang in this check
        errors = [text for text in own.allgather(error) if text]
        if dist.get_rank() == 0:
            print(json.dumps({"name": name, "errors": errors}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
