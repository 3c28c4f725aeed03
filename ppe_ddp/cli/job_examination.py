"""Examines the job that a launcher has started, for `doctor`: its nodes, and how each group's messages travel.

Every rank takes part. A group is asked as a wrapper would have it: duplicated, and after a first message.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ppe_ddp.backends.group_internals import default_group
from ppe_ddp.cli.backend_examination import examine
from ppe_ddp.cli.compression_forecast import CompressionForecast, forecast_compression, lines_of_forecast
from ppe_ddp.engine.bucket_allocator import offers_memory
from ppe_ddp.engine.group_duplicates import backends_of
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.json_collectives import all_gather_json

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ppe_ddp.launch import Job

__all__ = ["JobFindings", "Route", "examine_job", "lines_of"]

_NBYTES = 4 << 20  # as a bucket
_SMALL_NBYTES = 64  # as a mask
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Route:
    """How messages travel in a group.

    Attributes:
        group: Which one, in words.
        ranks: Its ranks; for several groups of a kind, those of each.
        buckets: How buckets of gradients travel, on every such group.
        masks: How masks travel.
    """

    group: str
    ranks: tuple[tuple[int, ...], ...]
    buckets: str
    masks: str


@dataclass(frozen=True)
class JobFindings:
    """What was found out about a job; the same on every rank.

    Attributes:
        launcher: What has started it.
        backend: Of its default group.
        nodes: The host name and the ranks of each node.
        routes: How messages travel, by group.
        problems: What is wrong, as the ranks see it; empty where all is well.
        compression: Whether compression would pay; None where collectives fail, and where gradients are not on the CPU.
    """

    launcher: str
    backend: str
    nodes: tuple[tuple[str, tuple[int, ...]], ...]
    routes: tuple[Route, ...]
    problems: tuple[str, ...]
    compression: CompressionForecast | None


def examine_job(job: Job) -> JobFindings:
    """Have all ranks examine the default process group; they must call this together."""
    names = [tuple(name) for name in _gathered([socket.gethostname(), _boot_id()])]
    nodes = [
        (name, tuple(rank for rank, other in enumerate(names) if other == (name, boot)))
        for name, boot in dict.fromkeys(names)
    ]
    by_node = [ranks for _, ranks in nodes]
    routes = [_route("all ranks", [tuple(range(job.world_size))], by_node)]
    if len(nodes) > 1:
        routes.append(_route("of a node", by_node, by_node))
        routes.append(_route("one of each node", list(itertools.zip_longest(*by_node)), by_node))
    problems = dict.fromkeys(problem for found in _gathered(examine(job.device.type)) for problem in found)
    is_forecast = job.device.type == "cpu" and not problems
    compression = forecast_compression() if is_forecast else None
    return JobFindings(job.launcher, job.backend, tuple(nodes), tuple(routes), tuple(problems), compression)


def lines_of(findings: JobFindings) -> list[str]:
    """The findings for people."""
    count = sum(len(ranks) for _, ranks in findings.nodes)
    lines = [f"job: {count} ranks by {findings.launcher}, backend {findings.backend}"]
    lines += [f"  node {name}: {_listed([ranks])}" for name, ranks in findings.nodes]
    for route in findings.routes:
        lines.append(f"  {route.group} ({_listed(route.ranks)})")
        lines.append(f"    buckets: {route.buckets}")
        lines.append(f"    masks:   {route.masks}")
    if findings.compression is not None:
        lines += lines_of_forecast(findings.compression)
    lines += [f"  failed: {problem}" for problem in findings.problems] or ["  ok: collectives and training steps"]
    return lines


def _route(name: str, groups: Sequence[Sequence[int | None]], nodes: Sequence[Sequence[int]]) -> Route:
    """Ask every group of a kind, each by its own ranks."""
    ranks_of_each = [tuple(rank for rank in ranks if rank is not None) for ranks in groups]
    mine: tuple[str, str] | None = None
    for ranks in ranks_of_each:
        # Made by all ranks: those that make groups alone would have to make equally many.
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks and len(ranks) > 1:
            mine = _asked(group, ranks, nodes)
    found = [ways for ways in _gathered(mine) if ways is not None]
    texts = (" or ".join(dict.fromkeys(ways[part] for ways in found)) for part in (0, 1))
    buckets, masks = (text or "nothing is sent" for text in texts)
    return Route(name, tuple(ranks_of_each), buckets, masks)


def _asked(group: ProcessGroup, ranks: Sequence[int], nodes: Sequence[Sequence[int]]) -> tuple[str, str]:
    made = Groups.duplicate(group, shared_memory=True)
    for own, nbytes in ((made.buckets, _NBYTES), (made.control, _SMALL_NBYTES)):
        dist.all_reduce(torch.zeros(nbytes // 4), group=own)
    spans = sum(1 for node in nodes if set(node) & set(ranks)) > 1
    return _way(made.buckets, spans=spans, is_small=False), _way(made.control, spans=spans, is_small=True)


def _way(group: ProcessGroup, *, spans: bool, is_small: bool) -> str:
    cpu = torch.device("cpu")
    backend = backends_of(group).get("cpu", "its backend")
    messages = f"messages of {'gloo' if backend == 'shm' else backend}"
    is_fit = backend == "shm" and not spans if is_small else True  # over MPI small messages are faster
    if not is_fit or not offers_memory(group, cpu):
        return f"{messages}, over the network between nodes" if spans else f"{messages}, within the node"
    return f"shared memory in a node, {messages} between nodes" if spans else "shared memory"


def _boot_id() -> str:
    """What tells apart machines of one name; empty where the system does not say."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


def _gathered(own: Any) -> list[Any]:
    return all_gather_json(own, default_group())


def _listed(groups: Sequence[Sequence[int]]) -> str:
    texts = [" ".join(map(str, ranks)) for ranks in groups]
    return f"rank{'s' if len(groups) > 1 or len(groups[0]) > 1 else ''} {' | '.join(texts)}"
