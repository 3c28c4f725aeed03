"""Launchers: each on plain dicts, then real processes that join a group through them; the stores where ranks meet."""

import contextlib
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ppe_ddp import CommunicationError, DisagreementError, PeerAbortedError, UnusableError, launch
from ppe_ddp.launch import Job, init_process_group, loopback_store, restarted_store
from ppe_ddp.launchers import Rendezvous, detect, first_host
from ppe_ddp.testing import RankError
from subprocesses import warm_python

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "node[03-04]",
    "SLURM_JOB_NODELIST": "node[01-04]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}
SBATCH = {
    "SLURM_JOB_ID": "123456",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_JOB_NODELIST": "node[01-04]",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "9", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MVAPICH = {"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "1"}
CRAY = {"PALS_RANKID": "3", "PALS_SIZE": "4", "PALS_LOCAL_RANKID": "1", "PMI_RANK": "3", "PMI_SIZE": "4"}


def without(environment, *names):
    return {name: value for name, value in environment.items() if name not in names}


def where(environment):
    place = detect(environment)
    return place.launcher, place.rank, place.world_size, place.local_rank


# --- which launcher


PLACES = {
    "alone": ({}, ("alone", 0, 1, 0)),
    "torchrun": (TORCHRUN, ("torchrun", 3, 4, 1)),
    "torchrun under srun": (SRUN | TORCHRUN, ("torchrun", 3, 4, 1)),
    "torchrun under sbatch": (SBATCH | TORCHRUN, ("torchrun", 3, 4, 1)),
    "torchrun under hydra": (HYDRA | TORCHRUN, ("torchrun", 3, 4, 1)),
    "torchrun under open mpi": (OPEN_MPI | TORCHRUN, ("torchrun", 3, 4, 1)),
    "a pod without a local rank is the first of its machine": (without(TORCHRUN, "LOCAL_RANK"), ("torchrun", 3, 4, 0)),
    "a script that sets them by slurm's": (
        SRUN | {"SLURM_LOCALID": "1"} | without(TORCHRUN, "LOCAL_RANK"),
        ("torchrun", 3, 4, 1),
    ),
    "... by open mpi's": (OPEN_MPI | without(TORCHRUN, "LOCAL_RANK"), ("torchrun", 3, 4, 1)),
    "... in another job than slurm's": (
        SRUN | {"SLURM_LOCALID": "1", "WORLD_SIZE": "8"} | without(TORCHRUN, "LOCAL_RANK", "WORLD_SIZE"),
        ("torchrun", 3, 8, 0),
    ),
    "srun": (SRUN, ("slurm", 2, 4, 0)),
    "srun whose script exports a world size": (SRUN | {"WORLD_SIZE": "4", "MASTER_ADDR": "n"}, ("slurm", 2, 4, 0)),
    "srun that speaks PMI": (SRUN | {"PMI_RANK": "2", "PMI_SIZE": "4"}, ("slurm", 2, 4, 0)),
    "a shell of slurm": (SBATCH, ("alone", 0, 1, 0)),
    "a batch script": (SBATCH | {"SLURM_STEP_ID": "4294967291"}, ("alone", 0, 1, 0)),
    "an interactive step": (SBATCH | {"SLURM_STEP_ID": "4294967290"}, ("alone", 0, 1, 0)),
    "hydra": (HYDRA, ("mpirun", 3, 4, 1)),
    "open mpi": (OPEN_MPI, ("mpirun", 3, 4, 1)),
    "mvapich": (MVAPICH, ("mpirun", 3, 4, 1)),
    "cray": (CRAY, ("mpirun", 3, 4, 1)),
    "hydra in a batch script": (SBATCH | HYDRA, ("mpirun", 3, 4, 1)),
    "open mpi under srun": (SRUN | OPEN_MPI, ("mpirun", 3, 4, 1)),
    "mpirun that tells no local rank": (without(HYDRA, "MPI_LOCALRANKID"), ("mpirun", 3, 4, 3)),
    "... where slurm does": (SRUN | without(OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK"), ("mpirun", 3, 4, 0)),
    "mpirun of one rank": ({"PMI_RANK": "0", "PMI_SIZE": "1"}, ("alone", 0, 1, 0)),
}


@pytest.mark.parametrize("kind", PLACES)
def test_each_launcher_is_known(kind):
    environment, place = PLACES[kind]
    assert where(environment) == place
    if place[0] == "mpirun":
        assert detect(environment).init_method == "mpi://"
        assert detect(environment, "file:///tmp/meet").init_method == "file:///tmp/meet"


def test_a_slurm_shell_without_srun_is_told():
    assert "SLURM_NTASKS is 8" in detect(SBATCH).note
    assert detect(SBATCH | {"SLURM_NTASKS": "1"}).note == ""


@pytest.mark.parametrize("environment", [HYDRA, OPEN_MPI])
def test_mpirun_without_mpi4py_is_refused_rather_than_starting_lone_worlds(environment, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnusableError, match=r"3 of 4 was started by mpirun \((PMI|OMPI).*ppe_ddp\[mpi\].*torchrun"):
        detect(environment)
    assert detect(environment, "tcp://there:29500").init_method == "tcp://there:29500"


@pytest.mark.skipif(not shutil.which("mpiexec", path=Path(sys.executable).parent), reason="needs the extra mpi")
def test_a_real_mpirun_is_known():
    mpiexec = Path(sys.executable).parent / "mpiexec"
    # Where ranks end at once, MPICH's mpiexec dies of SIGPIPE in 1 of 500 runs, as it passes its stdin on to them.
    program = [mpiexec, "-n", "2", "sh", "-c", "env; sleep 0.5"]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=90)
    variables = [line.partition("=") for line in done.stdout.splitlines()]
    environment = {name: value for name, _, value in variables if name.startswith(("PMI", "OMPI", "MPI_LOCAL"))}
    assert where(environment)[0::2] == ("mpirun", 2)


# --- environments that make no sense


@pytest.mark.parametrize(
    ("environment", "missing"),
    [*((TORCHRUN, name) for name in TORCHRUN if name != "LOCAL_RANK"), (SRUN, "SLURM_PROCID"), (SRUN, "SLURM_LOCALID")],
)
def test_half_of_a_launcher_is_refused_by_name(environment, missing):
    with pytest.raises(ValueError, match=f"^{missing} is not set"):
        detect(without(environment, missing))


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"])
@pytest.mark.parametrize("text", ["two", "-1", "1.0", " 1", "²"])
def test_what_is_no_number_is_refused_by_name(name, text):
    with pytest.raises(ValueError, match=rf"^{name} should be a whole number from 0, but it is '{text}'"):
        detect(TORCHRUN | {name: text})


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (TORCHRUN | {"RANK": "4"}, "RANK is 4, but WORLD_SIZE is 4"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "RANK is 3, but WORLD_SIZE is 0"),
        (TORCHRUN | {"MASTER_PORT": "65536"}, "MASTER_PORT should be from 1 to 65535"),
        (SRUN | {"SLURM_PROCID": "9"}, "SLURM_PROCID is 9, but SLURM_STEP_NUM_TASKS is 4"),
        (SRUN | {"SLURM_STEP_NODELIST": "node[03"}, "SLURM_STEP_NODELIST: 'node\\[03' is not a list"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(environment, message):
    with pytest.raises(ValueError, match=message):
        detect(environment)


# --- where the ranks meet


def test_a_lone_process_meets_nobody():
    assert detect({}).init_method is None
    assert detect(SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}).init_method is None


def test_slurm_ranks_meet_on_the_first_node_of_their_step():
    def address(environment):
        return detect(environment).init_method.removeprefix("tcp://").rpartition(":")[0]

    addressless = without(SRUN, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    assert address(SRUN) == "node03"
    assert address(without(SRUN, "SLURM_STEP_NODELIST")) == "node01"
    assert address(addressless) == "10.0.0.1"
    assert address(addressless | {"SLURM_LAUNCH_NODE_IPADDR": "fd00::1"}) == "[fd00::1]"
    assert address(SRUN | {"MASTER_ADDR": "10.9.8.7"}) == "10.9.8.7"
    with pytest.raises(ValueError, match="SLURM_STEP_NODELIST is not set"):
        detect(without(addressless, "SLURM_LAUNCH_NODE_IPADDR"))


@given(job=st.integers(1, 2**31), step=st.integers(0, 1000))
def test_slurm_port_is_legal_common_and_differs_by_step(job, step):
    def port(step, rank):
        ids = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step), "SLURM_PROCID": str(rank)}
        return int(detect(SRUN | ids).init_method.rpartition(":")[2])

    assert 61000 <= port(step, 0) < 65536
    assert port(step, 0) == port(step, 3)
    assert port(step, 0) != port(step + 1, 0)


def test_a_given_port_is_taken():
    assert detect(SRUN | {"MASTER_PORT": "4567"}).init_method == "tcp://node03:4567"


@pytest.mark.parametrize(
    "environment", [{}, without(TORCHRUN, "MASTER_ADDR"), SRUN], ids=["alone", "torchrun", "slurm"]
)
def test_a_given_init_method_is_taken(environment):
    assert detect(environment, "file:///tmp/meeting").init_method == "file:///tmp/meeting"


def test_first_host_by_example():
    assert first_host("node[03-05,9],gpu1") == "node03"
    assert first_host("gpu1,node[03-05,9]") == "gpu1"
    assert first_host("rack[2-3]node[7,9]") == "rack2node7"
    assert first_host("login.example.org") == "login.example.org"


@pytest.mark.parametrize("text", ["", ",", "node[", "node]", "node[]", "node[-]", "node[1", "a[[1]]", "[,]"])
def test_what_is_no_list_of_hosts_is_refused(text):
    with pytest.raises(ValueError, match="not a list of machines"):
        first_host(text)


# --- backend and device


@pytest.fixture
def two_gpus(monkeypatch):
    """A torch that says it has CUDA, NCCL and two devices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)


def test_the_default_backend_serves_every_device(two_gpus, monkeypatch):
    assert launch._default_backend("alone") == "cpu:gloo,cuda:nccl"
    assert launch._default_backend("mpirun") == "cpu:gloo,cuda:nccl"
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert launch._default_backend("torchrun") == "gloo"
    assert launch._default_backend("mpirun") == "mpi4py"


@pytest.mark.parametrize(
    ("backend", "device"),
    [("cpu:gloo,cuda:nccl", "cuda:1"), ("nccl", "cuda:1"), ("gloo", "cuda:1"), ("cpu:gloo", "cpu"), ("other", "cpu")],
)
def test_the_device_is_one_that_the_backend_serves(two_gpus, backend, device):
    assert launch._choose_device(backend, 1) == torch.device(device)


def test_without_cuda_the_device_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert launch._choose_device("cpu:gloo,cuda:nccl", 1) == torch.device("cpu")
    assert launch._default_backend("torchrun") == "gloo"
    assert launch._default_backend("mpirun") == "mpi4py"


def test_more_ranks_than_devices_is_an_error_unless_each_rank_sees_one(two_gpus, monkeypatch):
    with pytest.raises(ValueError, match=r"LOCAL_RANK.* is 2, but this process sees 2 CUDA devices"):
        launch._choose_device("nccl", 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert launch._choose_device("nccl", 2) == torch.device("cuda:0")


# --- real processes


def free_port():
    """A port at which ranks may meet; it stays bound here, so that the system gives it to no other connection."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the store may listen there all the same
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    held.detach()
    return str(port)


def join(environment, arguments):
    """Leaves the tests' own group, joins another, says what was seen, and leaves that one too."""
    if dist.is_initialized():
        dist.destroy_process_group()
    before = dict(os.environ)
    os.environ.update(environment)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            job = init_process_group(**arguments)
            again = init_process_group()
        total = torch.tensor(job.rank + 1)
        dist.all_reduce(total)
        return job, again, said.getvalue(), int(total)
    finally:
        os.environ.clear()
        os.environ.update(before)
        if dist.is_initialized():
            dist.destroy_process_group()


def torchrun_environments():
    port = free_port()
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    return [TORCHRUN | {"WORLD_SIZE": "2", "MASTER_PORT": port} | rank for rank in ranks]


def slurm_environments():
    step = SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": free_port()}
    return [step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]


@pytest.mark.parametrize(
    ("launcher", "environments"), [("torchrun", torchrun_environments), ("slurm", slurm_environments)]
)
def test_ranks_meet(two_ranks, launcher, environments):
    arguments = {"backend": "cpu:gloo", "timeout": 60}
    results = two_ranks.run_each(join, [(environment, arguments) for environment in environments()])
    for rank, (job, again, said, total) in enumerate(results):
        assert job == again == Job(rank, 2, rank, torch.device("cpu"), "cpu:gloo", launcher)
        assert said == (f"ppe_ddp: 2 ranks by {launcher}, backend cpu:gloo, device cpu\n" if rank == 0 else "")
        assert total == 3


def test_a_lone_process_is_a_world_of_one(two_ranks):
    for job, again, said, total in two_ranks.run(join, {}, {"backend": "cpu:gloo"}):
        assert job == again == Job(0, 1, 0, torch.device("cpu"), "cpu:gloo", "alone")
        assert said == "ppe_ddp: 1 rank, a lone process, backend cpu:gloo, device cpu\n"
        assert total == 1


def test_quiet_and_a_note(two_ranks):
    for _, _, said, _ in two_ranks.run(join, SBATCH, {"quiet": True}):
        assert said == ""
    for _, _, said, _ in two_ranks.run(join, SBATCH, {}):
        assert said.endswith(" (SLURM_NTASKS is 8: start with srun to use them all)\n")


def test_a_given_init_method_is_where_ranks_meet(two_ranks, tmp_path):
    arguments = {"init_method": (tmp_path / "meeting").as_uri(), "quiet": True}
    environments = [without(each, "MASTER_ADDR") for each in torchrun_environments()]
    assert [r[3] for r in two_ranks.run_each(join, [(each, arguments) for each in environments])] == [3, 3]


def test_ranks_that_cannot_meet_say_where(two_ranks):
    nobody_there = torchrun_environments()[1]
    with pytest.raises(RankError, match=r"rank 1 of 2 \(launcher torchrun\) could not meet"):
        two_ranks.run(join, nobody_there, {"timeout": 1})


def test_a_group_that_somebody_else_made_is_described(two_ranks):
    jobs = two_ranks.run(init_process_group)
    device = jobs[0].device
    assert jobs == [Job(rank, 2, rank, device, "gloo", "caller") for rank in range(2)]


SCRIPT = """
from ppe_ddp.launch import init_process_group
import torch.distributed as dist
job = init_process_group("cpu:gloo", timeout=30)
dist.barrier()
dist.destroy_process_group()
"""


def by_torchrun(script, folder):
    (folder / "script.py").write_text(script)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--no-python"]
    command = [*warm_python(), *launcher, *warm_python(), "script.py"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=150)


def test_a_real_torchrun(tmp_path):
    done = by_torchrun(SCRIPT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ppe_ddp: 2 ranks by torchrun, backend cpu:gloo, device cpu\n" in done.stderr


FAILS_ON_RANK_1 = """
import atexit, os, time
import torch
import ppe_ddp
job = ppe_ddp.init_process_group(timeout=60)

def exit_slowly():  # a second after the other rank has its error
    end = time.monotonic() + 20
    while not os.path.exists("heard") and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(1)

model = ppe_ddp.DistributedDataParallel(torch.nn.Linear(2, 1))
if job.rank == 1:
    atexit.register(exit_slowly)
    model.module.weight.register_hook(lambda gradient: 1 / 0)
try:
    model(torch.ones(1, 2)).sum().backward()
except ppe_ddp.PeerAbortedError:
    open("heard", "w").close()
    raise
"""


def test_torchrun_blames_the_rank_that_has_failed(tmp_path):
    done = by_torchrun(FAILS_ON_RANK_1, tmp_path)
    assert (tmp_path / "heard").exists(), done.stderr
    assert re.search(r"Root Cause.*?rank +: 1 .*?exitcode +: 1 ", done.stderr, re.DOTALL), done.stderr
    assert re.search(r"rank +: 0 .*?exitcode +: -15 ", done.stderr, re.DOTALL), done.stderr


# --- stores: ranks of one machine meet where no other machine can come in, and restarted ones find no predecessors

# An address of this machine that is not the loopback interface's; Linux answers on all of 127.0.0.0/8.
OTHER = "127.0.0.2"


def place(init_method, rank=0):
    return Rendezvous("torchrun", rank, 2, rank, init_method)


def reaches(host, port):
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("scheme", ["tcp", "env"])
def test_the_server_listens_on_loopback_alone(name, scheme):
    port = free_port()
    environment = {"MASTER_ADDR": name, "MASTER_PORT": port}
    where = f"tcp://{name}:{port}" if scheme == "tcp" else "env://"
    server = loopback_store(place(where), None, environment)
    client = loopback_store(place(where, 1), None, environment)
    client.set("key", "value")
    assert server.get("key") == b"value"
    assert reaches("127.0.0.1", int(port))
    assert not reaches(OTHER, int(port))


@pytest.mark.parametrize("where", ["tcp://node03:29500", "tcp://10.0.0.1:29500", "file:///tmp/x", "mpi://", "env://"])
def test_others_are_left_to_torch(where):
    assert loopback_store(place(where), None, {"MASTER_ADDR": "node03", "MASTER_PORT": "29500"}) is None


def test_torchruns_agent_serves_by_itself():
    environment = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert loopback_store(place("env://"), None, environment) is None


def test_a_port_in_use_is_left_to_torch():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert loopback_store(place(f"tcp://127.0.0.1:{port}"), None, {}) is None


def test_a_step_of_slurm_on_one_node_meets_on_loopback():
    one_node = SRUN | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "node03"}
    assert detect(one_node).init_method.startswith("tcp://127.0.0.1:")
    assert detect(one_node | {"MASTER_ADDR": "node03"}).init_method.startswith("tcp://node03:")
    assert detect(SRUN | {"SLURM_STEP_NUM_NODES": "2"}).init_method.startswith("tcp://node03:")


def join_where_torch_serves(environment):
    earlier = None
    if environment["RANK"] == "0":
        port = int(environment["MASTER_PORT"])
        earlier = dist.TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False, multi_tenant=True)
    dist.barrier()  # in the tests' own group, which join() leaves
    return *join(environment, {"backend": "gloo", "timeout": 60}), earlier is None


def test_ranks_meet_where_torch_serves_already(two_ranks):
    results = two_ranks.run_each(join_where_torch_serves, [(each,) for each in torchrun_environments()])
    assert [(total, is_client) for *_, total, is_client in results] == [(3, False), (3, True)]


# --- ranks that torchrun has started again

AGENT = TORCHRUN | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
RESTARTED = {"TORCHELASTIC_RESTART_COUNT": "1"}
PLACE = Rendezvous("torchrun", 0, 2, 0, "env://")


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_start_does_not_see_what_the_one_before_has_written(nodes):
    agent = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    environment = AGENT | {"MASTER_PORT": str(agent.port), "LOCAL_WORLD_SIZE": str(2 // nodes)}

    def start(rank, count):  # each agent of several counts the starts of its own ranks that have failed
        given = environment | {"TORCHELASTIC_RESTART_COUNT": count if rank or nodes == 1 else "0"}
        return restarted_store(replace(PLACE, rank=rank), timedelta(seconds=30), given)

    with ThreadPoolExecutor() as ranks:
        first = list(ranks.map(start, (0, 1), "11"))
        first[0].set("address", "of the first start")
        assert first[1].get("address") == b"of the first start"
        with pytest.raises(dist.DistStoreError):  # a rank that is killed before rank 0 has come
            restarted_store(replace(PLACE, rank=1), timedelta(seconds=0.1), {**environment, **RESTARTED})
        second = list(ranks.map(start, (1, 0), "22"))
    second[0].set("mine", "of the second start")
    assert second[1].get("mine") == b"of the second start"
    assert not any(store.check(["address"]) for store in second)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"TORCHELASTIC_RESTART_COUNT": "0"},
        {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "False"},
    ],
)
def test_restarted_ranks_may_use_torchs_store(change):
    assert restarted_store(PLACE, None, AGENT | change) is None


def report_of(error, monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    launch._shorten_reports(0)

    def train():
        raise error

    with pytest.raises(type(error)) as caught:
        train()
    with mock.patch.object(sys.stderr, "write", wraps=sys.stderr.write) as write:
        sys.excepthook(type(error), error, caught.tb)
    pieces = [one for (one,), _ in write.call_args_list if one]
    assert pieces[0].startswith("Traceback") or len(pieces) == 1  # other ranks write as well
    return capsys.readouterr().err


def test_the_report_of_another_ranks_error_is_short_and_that_of_an_own_is_whole(monkeypatch, capsys):
    lost = CommunicationError("as it needs rank 1")
    whole = report_of(lost, monkeypatch, capsys)
    assert whole.startswith("Traceback (most recent call last):")
    lost.ranks = (1,)
    for error in (lost, PeerAbortedError("rank 1 failed"), DisagreementError("rank 1 differs")):
        lines = report_of(error, monkeypatch, capsys).splitlines()
        assert lines[0] == "rank 0 has ended here:"
        assert __file__ in lines[1]
        assert lines[-1] == f"ppe_ddp.errors.{type(error).__name__}: {error}"
        assert len(lines) <= 4
    assert report_of(ValueError("mine"), monkeypatch, capsys).startswith("Traceback (most recent call last):")


def test_a_second_interrupt_does_not_end_the_report_of_the_first(monkeypatch, capsys):
    class Interrupted(KeyboardInterrupt):
        def __str__(self):  # called as it is reported
            signal.raise_signal(signal.SIGINT)
            return "once"

    assert report_of(Interrupted(), monkeypatch, capsys).endswith("Interrupted: once\n")
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
