"""How each launcher starts ranks on several nodes: the commands, and where each has to run. Pure."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ppe_ddp.testing.namespaces import NodesError

__all__ = ["LAUNCHERS", "Place", "Start", "commands"]

LAUNCHERS = ("mpirun", "torchrun", "ranks")
"""MPICH's mpirun; torchrun on each node; every rank by itself, with torchrun's variables."""


@dataclass(frozen=True)
class Place:
    """What launchers have to know of the nodes.

    Attributes:
        names: Of the nodes.
        first_address: The first node's.
        interface: By which the machine that mpirun runs on reaches the nodes.
        remote_shell: A program on that machine which is called as ssh is.
        port: One that is free on the first node.
    """

    names: Sequence[str]
    first_address: str
    interface: str
    remote_shell: str
    port: int


@dataclass(frozen=True)
class Start:
    """One command to run.

    Attributes:
        node: The number of the node; None for the machine that reaches them all.
        words: The command.
        environment: What it has besides this process's own.
    """

    node: int | None
    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


def commands(launcher: str, words: Sequence[str], ranks: Sequence[int], place: Place) -> list[Start]:
    """What has to run, all at the same time, for ``words`` to become a job.

    Args:
        launcher: One of :data:`LAUNCHERS`.
        words: The command of each rank, with absolute paths.
        ranks: How many of them on each node.
        place: The nodes.

    Raises:
        NodesError: There is no mpirun, or not MPICH's.
        ValueError: The launcher is unknown, or these are not ranks for every node.
    """
    if len(ranks) != len(place.names) or min(ranks) < 1:
        raise ValueError(f"{len(place.names)} nodes need as many positive numbers of ranks, but these are {ranks}")
    if launcher == "mpirun":
        return [_mpirun(words, ranks, place)]
    if launcher == "torchrun":
        return [_torchrun(words, node, ranks, place) for node in range(len(ranks))]
    if launcher == "ranks":
        return list(_each(words, ranks, place))
    raise ValueError(f"launcher should be one of {', '.join(LAUNCHERS)}, but it is {launcher!r}")


def _mpirun(words: Sequence[str], ranks: Sequence[int], place: Place) -> Start:
    mpirun = shutil.which("mpirun", path=Path(sys.executable).parent) or shutil.which("mpirun")
    if mpirun is None:
        raise NodesError("there is no mpirun: pip install 'ppe_ddp[mpi]'")
    told = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    if "HYDRA" not in told.upper():
        raise NodesError(f"{mpirun} is not MPICH's, whose options are used here")
    hosts = ",".join(f"{name}:{count}" for name, count in zip(place.names, ranks, strict=True))
    options = ["-launcher", "ssh", "-launcher-exec", place.remote_shell, "-iface", place.interface]
    return Start(None, [str(Path(mpirun).absolute()), *options, "-hosts", hosts, "-n", str(sum(ranks)), *words])


def _torchrun(words: Sequence[str], node: int, ranks: Sequence[int], place: Place) -> Start:
    options = {
        "nnodes": len(ranks),
        "node_rank": node,
        "nproc_per_node": ranks[node],
        "master_addr": place.first_address,
        "master_port": place.port,
    }
    texts = [f"--{name}={value}" for name, value in options.items()]
    return Start(node, [sys.executable, "-m", "torch.distributed.run", *texts, "--no-python", *words])


def _each(words: Sequence[str], ranks: Sequence[int], place: Place) -> list[Start]:
    where = [(node, local) for node, count in enumerate(ranks) for local in range(count)]
    common = {"WORLD_SIZE": sum(ranks), "MASTER_ADDR": place.first_address, "MASTER_PORT": place.port}
    return [
        Start(
            node,
            words,
            {name: str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": local}.items()},
        )
        for rank, (node, local) in enumerate(where)
    ]
