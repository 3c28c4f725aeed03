"""Random trainings with a distributed optimizer, held to one process; saved by some ranks and loaded by others."""

import pytest

from optim_runners import first_half, second_half
from rank_tests import long

# More of them by hand: a program is made of its seed alone. These have each optimizer once.
SEEDS = range(14)


@pytest.mark.parametrize("seed", [*SEEDS[::2], *long(*SEEDS[1::2])])
def test_a_random_program_trains_like_one_process(seed, tmp_path, two_ranks, three_ranks):
    sizes = (2, 3) if seed % 2 else (3, 2)
    ranks = {2: two_ranks, 3: three_ranks}
    scaler = ranks[sizes[0]].run(first_half, seed, str(tmp_path), timeout=150)[0]
    ranks[sizes[1]].run(second_half, seed, str(tmp_path), scaler, sizes[0], timeout=150)
