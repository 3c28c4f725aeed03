"""Megatron's wrapper over mpi4py, on two ranks: a part of what mpi_laws.py does."""

import itertools

import torch
import torch.distributed as dist

import test_megatron_failures as failing
import test_megatron_graphs as graphs
import test_megatron_optim as optimizing
import test_megatron_parallel as parallel
import test_optim_overlap as overlapping
from ppe_ddp.backends.mpi import MpiOptions


def dynamic_graphs():
    """Another path on each rank, in each step and in each micro-batch."""
    for options in graphs.VARIANTS:
        graphs.test_another_path_on_each_rank_and_in_each_micro_batch.__wrapped__(options)
    return len(graphs.VARIANTS)


def splits():
    """Beside tensor and expert parallelism, whose own collectives come between the buckets."""
    count = 0
    for kind, overlap, sharded in itertools.product(("sequence", "pipeline", "expert"), (False, True), (False, True)):
        if (kind == "expert" and overlap) or (kind != "expert" and (overlap == sharded) == (kind == "pipeline")):
            continue  # experts' own collectives come at other places on each rank: not for inline calls
        parallel.compare(kind, [(overlap, sharded)])
        count += 1
    return count


def gathers():
    """Parameters that are read in every way, while they are being gathered or after."""
    overlapping.test_every_read_after_a_step_has_the_new_weights_even_on_one_rank_alone.__wrapped__(True)
    overlapping.test_with_overlap_a_forward_starts_before_everything_is_there.__wrapped__()
    overlapping.test_megatrons_param_sync_brings_what_attention_reads_of_its_child.__wrapped__()
    return 3


def failures():
    """Sums and votes over the groups that split one model, and a rank that raises there."""
    for sharded in (False, True):
        for row in parallel.MARKS:
            parallel.test_marks_of_megatrons.__wrapped__(*row, sharded)
    failing.test_who_is_interrupted_when_all_have_come_is_told_of_at_the_next_sum.__wrapped__()
    parallel.test_what_the_ranks_sum_must_be_the_same.__wrapped__()
    optimizing.test_ranks_agree_on_inf_though_their_gradients_have_other_dtypes.__wrapped__()
    return 2 * len(parallel.MARKS) + 3


def report():
    """How many passed, on which backend."""
    options = MpiOptions(shared_bytes=16, shared_piece_bytes=4096)  # all of it through shared memory
    dist.init_process_group("mpi4py", init_method="mpi://", pg_options=options)
    torch.manual_seed(dist.get_rank())
    made = {"passed": dynamic_graphs() + splits() + gathers() + failures(), "backend": dist.get_backend()}
    dist.destroy_process_group()
    return made
