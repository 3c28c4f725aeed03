"""The cases of test_two_wrappers.py, test_own_communication.py and test_shared_wrappers.py over mpi4py.

Run under mpirun by mpi_laws.py.
"""

from datetime import timedelta

import torch.distributed as dist

import test_graphs_buffers as buffers
import test_one_rank_changes as one_rank
import test_own_communication as own
import test_shared_wrappers as shared
import test_two_wrappers as tests
from ppe_ddp.backends.mpi import MpiOptions

OPTIONS = (
    MpiOptions(),  # by messages but for what is large, and nothing here is
    MpiOptions(shared_bytes=16, shared_piece_bytes=4096),
    MpiOptions(thread=True),
)


def on_two_ranks():
    for options in tests.VARIANTS:
        yield lambda options=options: own.test_a_collective_in_a_hook_of_one_parameter.__wrapped__(options)
        yield lambda options=options: own.test_a_flag_is_reduced_after_an_error_that_was_caught.__wrapped__(options)
    for make in shared.KINDS[::2]:  # all are in tests/simulation
        yield lambda make=make: shared.test_each_rank_ends_its_backwards_in_its_own_order.__wrapped__(make, {})
    yield lambda: shared.test_hooks_in_one_group_of_the_users.__wrapped__(shared.hook_in_the_default_group)
    yield one_rank.hold_each_wrapper
    for kind in [*one_rank.REFUSALS][::3]:  # which masks tell, whatever carries them
        yield lambda kind=kind: one_rank.test_where_it_cannot_go_on_every_rank_has_an_error.__wrapped__(kind)
    yield lambda: tests.hold_random_models(5, hooked=True)
    yield lambda: shared.test_started_by_hand_and_ended_in_another_order.__wrapped__(shared.nothing_in_common)
    for slow in (0, 1):
        yield lambda slow=slow: own.test_a_rank_communicates_while_the_other_is_in_backward.__wrapped__(slow)


def on_three_ranks():
    yield lambda: buffers.test_statistics_of_a_tower_are_those_of_a_rank_that_has_used_it.__wrapped__({})
    yield lambda: shared.hold_random_programs(0, shared.tied_weights)
    for options in tests.VARIANTS:
        yield lambda options=options: own.test_all_to_all_in_backward.__wrapped__(options)


def report():
    """How many have passed, each once; and each way has some of each kind."""
    count = 0
    for place, options in enumerate(OPTIONS):
        dist.init_process_group("mpi4py", init_method="mpi://", timeout=timedelta(seconds=60), pg_options=options)
        cases = [*on_two_ranks()] if dist.get_world_size() == 2 else [*on_three_ranks()]
        cases += [lambda seed=seed: tests.hold_random_models(seed) for seed in range(3)]
        for case in cases[place :: len(OPTIONS)]:
            case()
            count += 1
        dist.destroy_process_group()
    return count
