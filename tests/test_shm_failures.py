"""Ranks that are gone or stand still while others wait for them in shared memory, which closes no connection."""

import os
import re
import signal
import subprocess
import sys
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import failing
from closing import await_closing, calls_that_no_rank_ends
from ppe_ddp import CommunicationError
from ppe_ddp.backends.shm import ShmOptions, gloo_wire
from ppe_ddp.testing import Nodes
from rank_tests import on_three_ranks, on_two_ranks
from subprocesses import await_stop, warm_python, without_gloo

SCRIPT = """
import os, signal, sys
import torch, torch.distributed as dist
import ppe_ddp

folder, rank, way = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
model = ppe_ddp.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
model(torch.ones(1, 2)).sum().backward()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL) if way == "killed" else os._exit(0)
try:
    model(torch.ones(1, 2)).sum().backward()
except ppe_ddp.CommunicationError as error:
    os.write(1, f"{error} {error.__cause__}".encode())
os._exit(0)
"""


@pytest.mark.parametrize("way", ["killed", pytest.param("left", marks=pytest.mark.long)])
def test_a_rank_whose_process_has_ended_is_named_at_once(way, tmp_path):
    """Not after the timeout of half an hour."""
    command = [*warm_python(), "-c", SCRIPT, tmp_path]
    other = subprocess.Popen([*command, "1", way])
    try:
        done = subprocess.run([*command, "0", way], capture_output=True, text=True, timeout=60, check=False)
    finally:
        other.kill()
        code = other.wait()
    assert code == (-signal.SIGKILL if way == "killed" else 0)
    told = "rank 0: the communication of this step failed, as it needs rank 1, which has died"
    assert without_gloo(done.stdout).startswith(told), done
    assert "waits for rank 1, whose process has ended" in done.stdout


@on_two_ranks
def test_a_rank_that_stands_still_is_named_at_the_timeout():
    dist.barrier()
    group = dist.new_group(backend="shm", timeout=timedelta(seconds=20), pg_options=ShmOptions())
    group._waits.timeout = 0.2
    number = torch.tensor(os.getpid())
    dist.broadcast(number, 1)
    dist.barrier()
    total = torch.ones(10)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(CommunicationError, match="rank 0 has given this group up"):
            dist.all_reduce(total, group=group)
    else:
        await_stop(number.item())
        try:
            with pytest.raises(CommunicationError, match=r"timeout of 0.2 s: rank 1 did not make the call, or died"):
                dist.all_reduce(total, group=group)
        finally:
            os.kill(number.item(), signal.SIGCONT)
    dist.barrier()


@on_two_ranks
def test_a_message_may_be_outstanding_for_longer_than_gloos_timeout():
    group = dist.new_group(backend="shm", timeout=timedelta(seconds=5), pg_options=ShmOptions())
    number = torch.zeros(1)
    if dist.get_rank() == 0:
        group._waits.timeout = 60.0
        work = dist.irecv(number, 1, group=group)
        with pytest.raises(CommunicationError, match="still under way after 6 s"):
            work.wait(timedelta(seconds=6))
        dist.barrier()
        work.wait()
    else:
        dist.barrier()
        dist.send(number.fill_(5.0), 0, group=group)
    assert number.item() == 5


@pytest.mark.parametrize("way", ["before", "in_the_wait", "on_a_thread", "in_backward"])
@on_two_ranks
def test_one_rank_fails_where_the_wrapper_goes_by_gloo_alone(way):
    failing.hold(way, turns=3, shared_memory=False)


NODES_SCRIPT = """
import os, sys
import torch, torch.distributed as dist
import ppe_ddp
from ppe_ddp.backends.shm import ShmOptions
from ppe_ddp.testing import Nodes

how, culprit = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
group = dist.new_group(backend="shm", pg_options=ShmOptions(two_level_bytes=0))
total = group.allocate_tensor(100_000, dtype=torch.float32, device=torch.device("cpu")).fill_(1)
dist.all_reduce(total, group=group)
assert total.unique().tolist() == [3.0]
dist.barrier()
if rank == culprit:
    if how == "between":
        dist.all_reduce(total, group=group, async_op=True)  # is there, and gone before it is over
    os._exit(0)
try:
    dist.all_reduce(total, group=group)
    dist.all_reduce(total, group=group)
except ppe_ddp.CommunicationError as error:
    os.write(1, f"rank {rank}: {error}\\n".encode())
store = dist.distributed_c10d._get_default_store()
store.set(f"told/{rank}", "")
if rank == 0:  # which has the store, where the others look for the reason
    store.wait([f"told/{3 - culprit}"])
os._exit(0)
"""


@pytest.mark.nodes(long=True)
@pytest.mark.parametrize("how", ["before", "between"])
@pytest.mark.parametrize("culprit", [1, 2])
def test_on_two_nodes_a_rank_that_has_ended_is_named_on_all(how, culprit, tmp_path):
    """Rank 1 shares memory with rank 0; rank 2 is alone on its node, and at the other end of a link with each."""
    (tmp_path / "train.py").write_text(NODES_SCRIPT)
    with Nodes(2) as nodes:
        command = [sys.executable, str(tmp_path / "train.py"), how, str(culprit)]
        done = nodes.launch("ranks", command, ranks=(2, 1), timeout=150)
    lines = done.output.splitlines()
    assert len(lines) == 2, done
    for line in lines:
        assert f"rank {line[5]}: " in line
        assert f"rank {culprit}, whose process has ended" in line or re.search(rf"of ranks [\d, ]*{culprit}\b", line), (
            line
        )


@on_three_ranks
@mock.patch.object(gloo_wire, "_COMPLETING_SECONDS", 0.3)  # nothing under way completes
def test_what_is_under_way_by_gloo_ends_with_the_group():
    """No rank comes to what another waits for, and gloo would let each wait until its timeout."""
    options = ShmOptions(shared_memory=False)
    group = dist.new_group(backend="shm", timeout=timedelta(minutes=5), pg_options=options)
    works = calls_that_no_rank_ends(group)
    dist.barrier()
    group.abort()
    await_closing()
    for work in works:
        with pytest.raises(CommunicationError, match=r"abort"):
            work.wait()
