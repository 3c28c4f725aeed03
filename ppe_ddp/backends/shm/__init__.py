"""The backend ``shm``: shared memory within a node, and gloo for all else. Needs nothing but torch."""

from ppe_ddp.backends.shm.shm_options import ShmOptions

__all__ = ["ShmOptions"]
