"""Checks of ranks that fail alone, over the backend `mpi4py`; run by mpi_checks.py.

In the ways in which a backend has a part: test_one_rank_fails.py has all of them, over gloo and in shared memory.
"""

import failing
import failing_shards
import test_failed_steps as failed_steps
import test_torch_join as torch_join
from mpi_check_kit import check


@check(
    "in_the_middle",
    "by_messages",
    "on_a_thread",
    "in_the_wait",
    "in_the_broadcast",
    "interrupted",
    "in_backward",
    ranks=2,
    most=2,
)
def one_rank_fails(way):
    failing.hold(way, turns=2)


@check("in_the_middle", "in_backward", ranks=3)
def one_rank_of_three_fails(way):
    failing.hold(way, turns=2)


@check(ranks=2)
def a_rank_that_waits_long_says_for_whom():
    failing.hold_told_wait()


@check(ranks=2, most=2)
def one_rank_fails_in_a_synchronization_by_hand():
    failing.hold("in_a_sync_hook", turns=2, step=failing.by_hand)


@check(*[one for one in list(failing.Interrupted.MOMENTS)[3:] if one != "before_gloo_connects"], ranks=2, most=2)
def one_of_two_ranks_is_interrupted_while_they_connect_again(moment):
    failing.hold_interrupted(moment)


@check("while_it_gives_back", ranks=3)
def one_of_three_ranks_is_interrupted_while_they_connect_again(moment):
    failing.hold_interrupted(moment, times=1)


@check("started_before_the_other", "one_after_the_other", ranks=2, most=2)  # of three: test_one_rank_fails.py
def the_ranks_come_to_two_wrappers_in_different_orders(order):
    failing.hold_order(order)


@check(ranks=2, most=2)  # of three: test_one_rank_fails.py
def one_rank_fails_beside_a_hook_in_the_default_group():
    failing.hold("in_backward", hook=failing.hook_in_a_users_group)


@check(ranks=2, most=2)
def one_rank_fails_beside_a_hook_of_torchs_own():
    failing.hold("in_backward", hook=failing.allreduce_hook)


@check(ranks=2, most=2)
def one_rank_fails_in_a_hook():
    failing.hold_hooks("stateful")


@check("before_the_scatter", "in_the_wait", "in_the_update", ranks=2, most=2)
def one_rank_fails_beside_the_distributed_optimizer(way):
    failing_shards.hold_optimizer(way, overlap=way == "in_the_wait")


@check(ranks=2, most=2)
def one_rank_fails_beside_megatrons_buffers():
    failing_shards.hold_megatron("on_a_thread", overlap_grad_reduce=True)


@check("in_the_wait", "in_backward", ranks=2, most=2)
def one_rank_fails_beside_megatrons_shards(way):
    failing_shards.hold_megatron(way, sharded=True, overlap_grad_reduce=True)


@check("in_backward", ranks=3)
def what_megatron_has_accumulated_is_as_it_was(way):
    failed_steps.test_what_was_accumulated_is_as_it_was.__wrapped__(way, overlap=True)


@check(ranks=2, most=2)
def ranks_join_with_no_sync_around_backward_alone():
    torch_join.test_no_sync_around_backward_alone.__wrapped__((7, 4, 6), {})
