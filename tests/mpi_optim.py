"""Run under mpirun by test_mpi_laws.py: the distributed optimizer over mpi4py. Prints one line on rank 0."""

import torch
import torch.distributed as dist

import ppe_ddp
from optimizing import OPTIMIZERS, hold_to_one_process


def main():
    torch.set_num_threads(1)
    ppe_ddp.init_process_group("mpi4py", init_method="mpi://", quiet=True)
    for name in ("sgd", "adamw"):
        hold_to_one_process(OPTIMIZERS[name], steps=5)
    if dist.get_rank() == 0:
        print("as one process does, over", dist.get_backend())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
