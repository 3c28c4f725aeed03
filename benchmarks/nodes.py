"""The ranks of benchmarks that run on this machine, or on nodes that are made of it."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from ppe_ddp.cli.command_line import count
from ppe_ddp.testing import JobStarter, Nodes, Ranks

_SECONDS = 3600.0


def add_node_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds ``--nodes``, ``--ranks`` and ``--mbit`` to ``parser``."""
    parser.add_argument("--nodes", type=count, metavar="N", help="make so many, as root (default: none)")
    parser.add_argument("--ranks", type=count, metavar="N", help="in all (default: 2, or one on each node)")
    parser.add_argument("--mbit", type=count, default=1000, metavar="N", help="of a node's link (default: 1000)")


@contextmanager
def started_ranks(arguments: argparse.Namespace) -> Iterator[Ranks]:
    """Ranks over gloo, on this machine or on nodes that are made of it; NodesError if nodes cannot be made."""
    if arguments.nodes is None:
        with Ranks(arguments.ranks or 2, timeout=_SECONDS, group_timeout=300) as ranks:
            yield ranks
        return
    each = (-(-(arguments.ranks or arguments.nodes) // arguments.nodes),) * arguments.nodes
    with (
        Nodes(arguments.nodes, mbit=arguments.mbit) as nodes,
        Ranks(sum(each), starter=JobStarter(nodes, "torchrun", each), timeout=_SECONDS) as ranks,
    ):
        yield ranks
