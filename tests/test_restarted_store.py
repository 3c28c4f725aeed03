"""Ranks that torchrun starts again find one another, and not those that were there before."""

import pytest
import torch.distributed as dist

from ppe_ddp.launchers import Rendezvous
from ppe_ddp.restarted_store import restarted_store
from test_launch import TORCHRUN

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
def test_otherwise_torchs_store_will_do(change):
    assert restarted_store(PLACE, None, AGENT | change) is None
