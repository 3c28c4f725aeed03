"""Nodes made on this machine: nothing on one reaches another, launchers start jobs on them, and nothing is left."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ppe_ddp.testing import JobStarter, Nodes, NodesError, Outcome, RankError, Ranks, nodes_missing
from ppe_ddp.testing import nodes as nodes_module
from ppe_ddp.testing.nodes import LAUNCHERS
from subprocesses import all_end, needs_mpirun

pytestmark = pytest.mark.nodes
long_on_nodes = pytest.mark.nodes(long=True)
launchers = pytest.mark.parametrize(
    "launcher", [pytest.param(name, marks=needs_mpirun if name == "mpirun" else long_on_nodes) for name in LAUNCHERS]
)


@pytest.fixture(scope="module")
def nodes():
    with Nodes(2, mbit=100) as made:
        yield made


def shell(nodes, node, script):
    done = nodes.run(node, ["sh", "-c", script], timeout=60)
    assert (done.code, done.errors) == (0, ""), done
    return done.output.strip()


def test_each_node_has_a_name_processes_and_memory_of_its_own(nodes):
    assert [shell(nodes, node, "hostname") for node in (0, 1)] == list(nodes.names)
    assert shell(nodes, 0, "touch /dev/shm/mine; ls /dev/shm") == "mine"
    assert shell(nodes, 1, "ls /dev/shm") == ""
    assert "mine" not in os.listdir("/dev/shm")
    # The two that keep the node and this command.
    assert len(shell(nodes, 1, "echo /proc/[0-9]*").split()) == 2
    kinds = {kind: os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "mnt", "pid", "ipc", "uts")}
    for kind, own in kinds.items():
        numbers = {own, *(int(shell(nodes, node, f"stat -Lc %i /proc/self/ns/{kind}")) for node in (0, 1))}
        assert len(numbers) == 3, kind


def test_commands_run_in_the_current_folder_with_an_environment(nodes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = nodes.run(1, ["sh", "-c", "pwd; echo $MORE; exit 7"], timeout=60, environment={"MORE": "of it"})
    assert (done.code, done.output) == (7, f"{tmp_path}\nof it\n")


def test_nodes_know_each_other_by_name_and_share_no_port(nodes):
    assert shell(nodes, 0, "getent hosts n1").split()[0] == nodes.addresses[1]
    script = f"import socket; socket.create_server(('', {SENT}))"
    for node in (0, 1):  # a port that this process has, too
        with socket.create_server(("", 0)) as taken:
            assert (
                shell(nodes, node, f'{sys.executable} -c "{script.replace(SENT, str(taken.getsockname()[1]))}"') == ""
            )


SENT = "PORT"


def exchanged_bits(count):
    """Each rank sends so many bytes to the next; the bits a second that it got."""
    sent, received = torch.zeros(count, dtype=torch.uint8), torch.zeros(count, dtype=torch.uint8)
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    start = time.monotonic()
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, (rank + 1) % size), dist.P2POp(dist.irecv, received, (rank - 1) % size)]
    )
    for work in works:
        work.wait()
    return 8 * count / (time.monotonic() - start)


def where():
    total = torch.ones(2)
    dist.all_reduce(total)
    return dist.get_rank(), socket.gethostname(), total.tolist()


def leave_on(rank):
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


@launchers
def test_ranks_on_nodes_are_used_like_those_on_this_machine(nodes, launcher):
    with Ranks(3, starter=JobStarter(nodes, launcher, (2, 1))) as ranks:
        assert ranks.run(where) == [(0, "n0", [3.0, 3.0]), (1, "n0", [3.0, 3.0]), (2, "n1", [3.0, 3.0])]
        assert len({*ranks.pids, os.getpid()}) == 4
        bits = ranks.run(exchanged_bits, 1 << 20)
        assert min(bits[0], bits[2]) < 110e6  # what crosses the link; some of it waits in buffers
        before = [os.pidfd_open(pid) for pid in ranks.pids]
        with pytest.raises(RankError) as caught:
            ranks.run(leave_on, 2)
        assert caught.value.ranks[2] is Outcome.DIED
        assert all_end(before, seconds=30)


@launchers
def test_a_job_on_nodes_has_its_ranks_output_and_exit_code(nodes, launcher, tmp_path):
    # The launcher ends all ranks when the first one fails, so each waits until all have written.
    wait = f"touch {tmp_path}/$rank; until [ $(ls {tmp_path} | wc -l) = 3 ]; do sleep 0.01; done"
    script = f"rank=${{RANK:-$PMI_RANK}}; echo $(hostname) $rank; echo sent >&2; {wait}; exit 5"
    done = nodes.launch(launcher, ["/bin/sh", "-c", script], ranks=(2, 1), timeout=90)
    assert sorted(done.output.split("\n")) == ["", "n0 0", "n0 1", "n1 2"]
    assert done.code not in (0, 124)
    assert done.errors.count("sent") == 3


@pytest.mark.parametrize(
    ("seconds", "script", "output", "errors"),
    [(60.0, "sleep 0.1; echo well", "well\n", ""), (0.2, "exec sleep 1000", "", r"killed after [\d.]+ s")],
    ids=["who ends by then is left alone", "who does not is killed"],
)
def test_the_others_get_a_little_time_when_one_has_failed(nodes, monkeypatch, seconds, script, output, errors):
    monkeypatch.setattr(nodes_module, "_GRACE_SECONDS", seconds)
    done = nodes.launch("ranks", ["/bin/sh", "-c", f"[ $RANK = 0 ] || exit 6; {script}"], ranks=(1, 1), timeout=90)
    assert (done.code, done.output) == (6, output)
    assert re.fullmatch(errors, done.errors)


@launchers
def test_what_runs_too_long_is_ended_with_all_that_it_has_started(nodes, launcher, tmp_path):
    script = f"setsid sleep 1000 & echo $! > {tmp_path}/$(hostname); exec sleep 1000"
    job = nodes.start(launcher, ["/bin/sh", "-c", script], ranks=(1, 1))
    wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
    done = job.wait(0.1)
    assert (done.code, done.errors.strip().splitlines()[-1]) == (124, "killed after 0.1 s")
    wait_for(lambda: not {*processes(nodes)} - {"cat", "sh"})  # to end, who was killed needs a core


def processes(nodes):
    script = "for p in /proc/[0-9]*; do grep -q '^State:.Z' $p/status || cat $p/comm; done 2>/dev/null; :"
    return [name for node in (0, 1) for name in shell(nodes, node, script).split()]


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)  # what is waited for needs the core


ENDED = """
import signal, sys, time
from ppe_ddp.testing.nodes import Nodes
nodes = Nodes(2)
script = "echo here > " + sys.argv[2] + "/$(hostname); exec sleep 1000"
job = nodes.start(sys.argv[1], ["/bin/sh", "-c", script], ranks=(1, 1))
print(*(node.pid for node in [*nodes._nodes, nodes._hub]), *(process.pid for process in job._processes), flush=True)
signal.pause()
"""


@pytest.mark.parametrize(
    ("launcher", "signal_number"),
    [
        pytest.param("mpirun", signal.SIGKILL, marks=needs_mpirun),
        pytest.param("mpirun", signal.SIGTERM, marks=[needs_mpirun, long_on_nodes]),
        pytest.param("mpirun", signal.SIGINT, marks=[needs_mpirun, long_on_nodes]),
        pytest.param("torchrun", signal.SIGKILL, marks=long_on_nodes),
        pytest.param("ranks", signal.SIGINT, marks=long_on_nodes),
    ],
)
def test_nothing_is_left_however_the_process_ends(launcher, signal_number, tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", ENDED, launcher, tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        try:
            pids = [int(word) for word in process.stdout.readline().split()]
            descriptors = [os.pidfd_open(pid) for pid in pids]
            spaces = {os.stat(f"/proc/{pid}/ns/net").st_ino for pid in pids[:3]}
            wait_for(lambda: {"n0", "n1"} <= {path.name for path in tmp_path.iterdir()})
        finally:
            process.send_signal(signal_number)
    assert process.returncode != 0
    assert all_end(descriptors, seconds=20)
    wait_for(lambda: not spaces & set(network_namespaces().values()))
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith("torchelastic_")} == {"n0", "n1"}


def network_namespaces():
    """Those of all processes, by pid."""
    spaces = {}
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):
            spaces[int(path.parts[2])] = path.stat().st_ino
    return spaces


def own_network_namespaces():
    """Those of this process and of what it has started: other tests may make nodes at the same time."""
    spaces, own = network_namespaces(), set()
    for pid, space in spaces.items():
        ancestor = pid
        while ancestor not in (0, os.getpid()):
            ancestor = parent_of(ancestor)
        own |= {space} if ancestor else set()
    return own


def parent_of(pid):
    """Of a process; 0 where there is none any more."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def test_several_programs_may_make_nodes_at_a_time(nodes):
    with Nodes(3) as others:
        assert others.addresses[:2] == nodes.addresses
        assert shell(others, 2, "hostname") == "n2"
        assert shell(nodes, 1, "getent hosts n2 || echo none") == "none"
    assert shell(nodes, 0, "hostname") == "n0"


def test_what_cannot_be_made_is_said_before_anything_is(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert nodes_missing() == "nodes are made of namespaces, which only root may make"
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no ip (of iproute2) and no unshare (of util-linux)" in nodes_missing()
    assert "no tc (of iproute2)" in nodes_missing(mbit=10)
    with pytest.raises(NodesError, match="no ip"):
        Nodes(2)


@pytest.mark.parametrize("program", ["unshare", "ip", "tc"])
def test_a_program_that_fails_is_a_reason(program, monkeypatch, tmp_path):
    before = own_network_namespaces()
    fake = tmp_path / program
    fake.write_text("#!/bin/sh\necho it is not to be >&2\nexit 1\n")
    fake.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert nodes_missing(mbit=10).endswith("it is not to be")
    wait_for(lambda: own_network_namespaces() <= before)


def test_latency_is_there_or_its_absence_is_said():
    missing = nodes_missing(latency_ms=20)
    if missing:
        assert re.search("netem", missing)
        return
    with Nodes(2, latency_ms=20) as nodes, Ranks(2, starter=JobStarter(nodes, "ranks", (1, 1))) as ranks:
        assert max(ranks.run(exchanged_bits, 1)) < 8 / 0.02


@pytest.mark.parametrize("numbers", [{"count": 0}, {"count": 999}, {"mbit": -1}, {"latency_ms": -1}], ids=str)
def test_impossible_numbers_are_refused(numbers):
    with pytest.raises(ValueError, match="positive"):
        Nodes(**numbers)


def test_jobs_that_make_no_sense_are_refused(nodes):
    for launcher, ranks, message in (
        ("torchrun", (1,), "2 nodes need as many positive numbers"),
        ("torchrun", (1, 0), r"2 nodes need .* \(1, 0\)"),
        ("srun", (1, 1), "mpirun, torchrun, ranks, but it is 'srun'"),
    ):
        with pytest.raises(ValueError, match=message):
            nodes.start(launcher, ["true"], ranks=ranks)
