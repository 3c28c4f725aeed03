"""The backend ``cupy_nccl``: a process group over CuPy's NCCL. Importing this package loads neither CuPy nor NCCL."""
