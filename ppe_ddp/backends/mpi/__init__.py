"""The backend ``mpi4py``: a process group over MPI. Importing this package loads neither mpi4py nor MPI."""

from ppe_ddp.backends.mpi.mpi_options import MpiOptions

__all__ = ["MpiOptions"]
