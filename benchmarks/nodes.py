"""Measures `bench step` on nodes that it makes, under each launcher.

The nodes are on this machine: each has a network, processes and memory of its
own, and a link of --mbit to the others (as root, of Linux namespaces; see
`ppe_ddp.testing.Nodes`). Under mpirun ppe_ddp takes part over gloo and over
mpi4py, under torchrun over gloo; torch DDP over gloo, under both. What comes
after --, is for `bench step`.

  python -m benchmarks nodes -- --quick --model mlp --model supernet-own
  python -m benchmarks nodes --nodes 4 --ranks 1 --mbit 10000
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ppe_ddp.cli.command_line import count, fail
from ppe_ddp.testing import JobStarter, Nodes, NodesError, Ranks

LAUNCHERS = ("mpirun", "torchrun")
SECONDS = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to ``parser``."""
    add_node_arguments(parser, nodes=2)
    parser.add_argument("--launcher", action="append", choices=LAUNCHERS, help="only this one (default: both)")
    parser.add_argument("words", nargs="*", metavar="-- ...", help="for `bench step`")


def add_node_arguments(parser: argparse.ArgumentParser, *, nodes: int | None = None) -> None:
    """Adds ``--nodes``, ``--ranks`` and ``--mbit`` to ``parser``."""
    parser.add_argument("--nodes", type=count, default=nodes, metavar="N", help=f"make so many (default: {nodes})")
    parser.add_argument("--ranks", type=count, metavar="N", help="in all (default: 2, or one on each node)")
    parser.add_argument("--mbit", type=count, default=1000, metavar="N", help="of a node's link (default: 1000)")


@contextmanager
def started_ranks(arguments: argparse.Namespace) -> Iterator[Ranks]:
    """Ranks over gloo, on this machine or on nodes that are made of it.

    Raises:
        NodesError: Nodes cannot be made here.
    """
    if arguments.nodes is None:
        with Ranks(arguments.ranks or 2, timeout=SECONDS, group_timeout=300) as ranks:
            yield ranks
        return
    each = (-(-(arguments.ranks or arguments.nodes) // arguments.nodes),) * arguments.nodes
    with (
        Nodes(arguments.nodes, mbit=arguments.mbit) as nodes,
        Ranks(sum(each), starter=JobStarter(nodes, "torchrun", each), timeout=SECONDS) as ranks,
    ):
        yield ranks


def run(arguments: argparse.Namespace) -> int:
    """Makes the nodes, measures, and prints what came out.

    Returns:
        0 if all was measured; 1 if a job failed; 2 if nodes cannot be made here.
    """
    each = -(-(arguments.ranks or 2 * arguments.nodes) // arguments.nodes)
    layout = f"{arguments.nodes} nodes x {each} ranks, {arguments.mbit} Mbit/s"
    command = [sys.executable, "-m", "ppe_ddp", "bench", "step", *arguments.words]
    try:
        with Nodes(arguments.nodes, mbit=arguments.mbit) as nodes:
            for launcher in arguments.launcher or LAUNCHERS:
                print(f"{launcher}: measuring on {layout} ...", file=sys.stderr, flush=True)
                done = nodes.launch(launcher, command, ranks=(each,) * arguments.nodes, timeout=SECONDS)
                if done.code:
                    return fail(f"{launcher} ended with exit code {done.code}:\n{done.errors[-4000:]}", 1)
                print(f"{launcher}, {layout}\n{done.output}", flush=True)
    except NodesError as error:
        return fail(f"nodes cannot be made here: {error}", 2)
    return 0
