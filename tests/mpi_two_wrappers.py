"""The cases of test_two_wrappers.py over mpi4py, as far as no call waits there; run under mpirun by that file.

What blocks is whatever does not lie in the memory that the ranks share: gradients that are reduced where they lie,
sparse ones, broadcasts. Prints on rank 0 how many have passed.
"""

import torch
import torch.distributed as dist

import test_two_wrappers as tests
from ppe_ddp.backends.mpi import MpiOptions


def main():
    torch.set_num_threads(1)
    options = MpiOptions(shared_bytes=16, shared_piece_bytes=4096)  # what else goes by calls that block
    dist.init_process_group("mpi4py", init_method="mpi://", pg_options=options)
    count = 0
    for options in tests.NOT_ADOPTED:
        for test in (tests.test_another_order_on_each_rank, tests.test_one_rank_uses_only_one_of_them):
            test.__wrapped__(options)
            count += 1
    tests.test_started_by_hand_in_another_order.__wrapped__()
    count += 1
    for overlap in (True, False):
        tests.test_megatron_wrappers.__wrapped__(overlap)
        count += 1
    for seed in range(2):
        tests.hold_random_models(seed, blocks=False)
        count += 1
    if dist.get_rank() == 0:
        print(count)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
