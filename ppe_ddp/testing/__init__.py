"""Tools to test backends, functions and hooks: ranks, nodes to run them on, and conformance checks."""

from ppe_ddp.testing.conformance import (
    ConformanceError,
    World,
    check_backend,
    check_broadcast_function,
    check_comm_hook,
    check_reduce_function,
)
from ppe_ddp.testing.nodes import Finished, JobStarter, Nodes, NodesError, nodes_missing
from ppe_ddp.testing.ranks import Outcome, RankError, RankFailure, Ranks, run_ranks

__all__ = [
    "ConformanceError",
    "Finished",
    "JobStarter",
    "Nodes",
    "NodesError",
    "Outcome",
    "RankError",
    "RankFailure",
    "Ranks",
    "World",
    "check_backend",
    "check_broadcast_function",
    "check_comm_hook",
    "check_reduce_function",
    "nodes_missing",
    "run_ranks",
]
