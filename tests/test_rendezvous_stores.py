"""Ranks of one machine meet where no other machine can come in, and restarted ones find no predecessors."""

import socket

import pytest
import torch.distributed as dist

from ppe_ddp.launch import loopback_store, restarted_store
from ppe_ddp.launchers import Rendezvous, detect
from test_launch import SRUN, TORCHRUN, free_port, join, torchrun_environments

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
    return *join(environment, {"backend": "gloo", "timeout": 20}), earlier is None


def test_ranks_meet_where_torch_serves_already(two_ranks):
    results = two_ranks.run_each(join_where_torch_serves, [(each,) for each in torchrun_environments()])
    assert [(total, is_client) for *_, total, is_client in results] == [(3, False), (3, True)]


# --- ranks that torchrun has started again

AGENT = TORCHRUN | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
PLACE = Rendezvous("torchrun", 0, 2, 0, "env://")


def test_a_start_does_not_see_what_the_one_before_has_written():
    agent = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    environment = AGENT | {"MASTER_PORT": str(agent.port)}
    first, again, second = (
        restarted_store(PLACE, None, environment | {"TORCHELASTIC_RESTART_COUNT": count}) for count in "112"
    )
    first.set("address", "of the first start")
    assert again.get("address") == b"of the first start"
    assert not second.check(["address"])


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"TORCHELASTIC_RESTART_COUNT": "0"},
        {"TORCHELASTIC_RESTART_COUNT": "1", "LOCAL_WORLD_SIZE": "1"},
        {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "False"},
    ],
)
def test_restarted_ranks_may_use_torchs_store(change):
    assert restarted_store(PLACE, None, AGENT | change) is None
