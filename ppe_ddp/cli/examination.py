"""The part of `doctor` that runs on every rank: examines a backend, and the job that a launcher has started.

Run as a module under mpirun it examines mpi4py, and every rank prints its findings as one line of JSON.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

import ppe_ddp
from ppe_ddp.backends.group_internals import default_group
from ppe_ddp.backends.json_collectives import all_gather_json
from ppe_ddp.engine.group_duplicates import backends_of
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.memory import offers_memory

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ppe_ddp.launch import Job

__all__ = ["ANSWER", "EXAMINED", "examine", "examine_job", "lines_of"]

ANSWER = "ppe_ddp doctor: "
"""What the lines of ranks under mpirun begin with."""

EXAMINED = "all-reduce, broadcast, 3 training steps"
"""What is asked, for people."""

_ELEMENTS = 10_007
_STEPS = 3
_TOLERANCE = 1e-4
_NBYTES, _SMALL_NBYTES = 4 << 20, 64  # as a bucket, and as a mask
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def examine(device: str) -> list[str]:
    """Ask the default process group; all ranks must call this together.

    Args:
        device: Of the tensors: "cpu", or "cuda" for the current device.

    Returns:
        What is wrong, one sentence each, as this rank sees it; empty where everything is as it should be.
    """
    return [*_collectives(device), *_training(device)]


def _collectives(device: str) -> list[str]:
    """Whole numbers, whose sums are exact on any number of ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    numbers = torch.arange(_ELEMENTS, device=device)
    total, sent = numbers + rank, numbers * (rank + 1)
    dist.all_reduce(total)
    dist.broadcast(sent, size - 1)
    wrong = {
        "all-reduce": int((total != size * numbers + size * (size - 1) // 2).sum()),
        "broadcast": int((sent != numbers * size).sum()),
    }
    return [f"{name}: {count} of {_ELEMENTS} elements are wrong" for name, count in wrong.items() if count]


def _training(device: str) -> list[str]:
    """Steps with another batch, and another unused layer, on every rank; one process does the same with the mean."""
    torch.manual_seed(0)
    reference = _TwoHeads().to(device)
    together = ppe_ddp.DistributedDataParallel(copy.deepcopy(reference))
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(_STEPS):
        losses = [(together, [rank]), (reference, range(size))]
        for module, ranks in losses:
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            optimizer.zero_grad()
            torch.stack([_loss(module, step, one, device) for one in ranks]).mean().backward()
            optimizer.step()
    problems = []
    for (name, ours), theirs in zip(together.module.named_parameters(), reference.parameters(), strict=True):
        difference = float((ours - theirs).detach().abs().max())
        if not difference <= _TOLERANCE:
            problems.append(f"training: after {_STEPS} steps {name} is {difference:.2g} off what one process computes")
    return problems


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 32)
        self.heads = nn.ModuleList([nn.Linear(32, 4), nn.Linear(32, 4)])

    def forward(self, batch: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](torch.tanh(self.trunk(batch)))  # type: ignore[no-any-return]


def _loss(module: nn.Module, step: int, rank: int, device: str) -> torch.Tensor:
    batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + rank)).to(device)
    return module(batch, (step + rank) % 2).square().mean()  # type: ignore[no-any-return]


# ---------------------------------------------------------------------- a job


def examine_job(job: Job) -> dict[str, Any]:
    """Have all ranks examine the default process group; they must call this together.

    Returns:
        The same on every rank: the ``launcher``, the ``backend``, the ``nodes`` (host name and ranks of each), the
        ``routes`` (how messages travel, by group) and the ``problems``, empty where all is well.
    """
    boot_id = _BOOT_ID.read_text() if _BOOT_ID.exists() else ""  # tells apart machines of one name
    names = [tuple(name) for name in _gathered([socket.gethostname(), boot_id])]
    nodes = [(name, [rank for rank, other in enumerate(names) if other == name]) for name in dict.fromkeys(names)]
    by_node = [ranks for _, ranks in nodes]
    routes = [_route("all ranks", [list(range(job.world_size))], by_node)]
    if len(nodes) > 1:
        routes.append(_route("of a node", by_node, by_node))
        columns = [[rank for rank in ranks if rank is not None] for ranks in itertools.zip_longest(*by_node)]
        routes.append(_route("one of each node", columns, by_node))
    problems = dict.fromkeys(problem for found in _gathered(examine(job.device.type)) for problem in found)
    return {
        "launcher": job.launcher,
        "backend": job.backend,
        "nodes": [[name, ranks] for (name, _), ranks in nodes],
        "routes": routes,
        "problems": list(problems),
    }


def lines_of(findings: dict[str, Any]) -> list[str]:
    """The findings for people."""
    count = sum(len(ranks) for _, ranks in findings["nodes"])
    lines = [f"job: {count} ranks by {findings['launcher']}, backend {findings['backend']}"]
    lines += [f"  node {name}: {_listed([ranks])}" for name, ranks in findings["nodes"]]
    for route in findings["routes"]:
        lines.append(f"  {route['group']} ({_listed(route['ranks'])})")
        lines += [f"    buckets: {route['buckets']}", f"    masks:   {route['masks']}"]
    lines += [f"  failed: {problem}" for problem in findings["problems"]] or ["  ok: collectives and training steps"]
    return lines


def _route(name: str, groups: Sequence[Sequence[int]], nodes: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Ask every group of a kind, each by its own ranks, as a wrapper would have it: duplicated, and after a message."""
    own: tuple[str, str] | None = None
    for ranks in groups:
        # Made by all ranks: those that make groups alone would have to make equally many.
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks and len(ranks) > 1:
            made = Groups.duplicate(group, shared_memory=True)
            for one, nbytes in ((made.buckets, _NBYTES), (made.control, _SMALL_NBYTES)):
                dist.all_reduce(torch.zeros(nbytes // 4), group=one)
            spans = sum(1 for node in nodes if set(node) & set(ranks)) > 1
            own = _way(made.buckets, spans=spans, is_small=False), _way(made.control, spans=spans, is_small=True)
    found = [ways for ways in _gathered(own) if ways is not None]
    buckets, masks = (" or ".join(dict.fromkeys(ways[k] for ways in found)) or "nothing is sent" for k in (0, 1))
    return {"group": name, "ranks": [list(ranks) for ranks in groups], "buckets": buckets, "masks": masks}


def _way(group: ProcessGroup, *, spans: bool, is_small: bool) -> str:
    backend = backends_of(group).get("cpu", "its backend")
    messages = f"messages of {'gloo' if backend == 'shm' else backend}"
    is_fit = backend == "shm" and not spans if is_small else True  # over MPI small messages are faster
    if not is_fit or not offers_memory(group, torch.device("cpu")):
        return f"{messages}, over the network between nodes" if spans else f"{messages}, within the node"
    return f"shared memory in a node, {messages} between nodes" if spans else "shared memory"


def _gathered(own: Any) -> list[Any]:
    return all_gather_json(own, default_group())


def _listed(groups: Sequence[Sequence[int]]) -> str:
    texts = [" ".join(map(str, ranks)) for ranks in groups]
    return f"rank{'s' if len(groups) > 1 or len(groups[0]) > 1 else ''} {' | '.join(texts)}"


def _main() -> None:
    torch.set_num_threads(1)
    ppe_ddp.init_process_group("mpi4py", init_method="mpi://", timeout=float(sys.argv[1]), quiet=True)
    problems = examine("cpu")
    line = json.dumps({"rank": dist.get_rank(), "ranks": dist.get_world_size(), "problems": problems})
    # In one piece, since the ranks write side by side.
    os.write(1, f"{ANSWER}{line}\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    _main()
