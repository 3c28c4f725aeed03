"""The wrapper's connections end before Python does: else a thread of gloo may need Python when it is gone."""

import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from one_process import square
from ppe_ddp import DistributedDataParallel, PeerAbortedError
from rank_tests import on_two_ranks
from subprocesses import warm_python, without_gloo

PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
SCRIPT = """
import atexit, sys, torch, torch.distributed as dist
from pathlib import Path
from ppe_ddp import DistributedDataParallel

how, rank, meeting = sys.argv[1:]
threads_of_gloo = lambda: ["gloo" in task.read_text() for task in Path("/proc/self/task").glob("*/comm")].count(True)
# what is registered first comes last
atexit.register(lambda: print("ended" if groups.is_closed else "open", threads_of_gloo() > 0))
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=2)
model = DistributedDataParallel(torch.nn.Linear(8, 8))
groups = model._reducer.groups
model(torch.ones(2, 8)).sum().backward()
if how == "destroy":
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["leave", pytest.param("destroy", marks=pytest.mark.long)])
def test_connections_end_before_python(tmp_path, how):
    command = [*warm_python(), "-c", SCRIPT, how]
    environment = {"PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank), tmp_path / "meeting"], env=environment, **PIPES) for rank in range(2)
    ]
    named = str(how == "leave" and torch.__version__ >= (2, 11))  # the threads of gloo have no names before
    try:
        for process in ranks:
            output, errors = process.communicate(timeout=150)
            assert (process.returncode, without_gloo(output).split(), errors) == (0, ["ended", named], "")
    finally:
        for process in ranks:
            process.kill()


INTERRUPTED = """
import sys, torch, torch.distributed as dist
from ppe_ddp import DistributedDataParallel

def interrupt(gradient):
    kept = model._reducer._backward.alive()
    assert kept is not None
    raise KeyboardInterrupt

rank, meeting = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=2)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)))
if rank == "1":
    model.module[0].weight.register_hook(interrupt)
model(torch.ones(2, 8)).sum().backward()
"""


def test_a_backward_that_ends_with_python_does_not_hold_it_up(tmp_path):
    """The traceback of an error has kept it until then."""
    command = [*warm_python(), "-c", INTERRUPTED]
    environment = {"PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank), tmp_path / "meeting"], env=environment, **PIPES) for rank in range(2)
    ]
    try:
        for process, error in zip(ranks, ("CommunicationError", "KeyboardInterrupt"), strict=True):
            _, errors = process.communicate(timeout=150)
            assert process.returncode != 0
            assert error in errors
            assert "terminate called" not in errors
    finally:
        for process in ranks:
            process.kill()


class Refused(Exception):
    pass


@on_two_ranks
def test_nothing_of_ours_goes_through_the_group_of_the_user():
    """Its threads have nothing to give up then, whenever Python ends: neither after a failure."""
    rank, group = dist.get_rank(), dist.new_group()
    before = group._get_sequence_number_for_group()
    fails = [rank == 1]

    def reduce(gradients, group):
        if fails and fails.pop():
            raise Refused
        gradients.divide(2)
        return dist.all_reduce(gradients.buffer(), group=group, async_op=True)

    for _ in range(2):
        wrapper = DistributedDataParallel(nn.Linear(4, 2), process_group=group, reduce_function=reduce)
        if fails:
            with pytest.raises(Refused if rank else PeerAbortedError):
                square(wrapper, rank)
        square(wrapper, rank)
        del wrapper  # the second takes the duplicates of the first
    assert group._get_sequence_number_for_group() == before
