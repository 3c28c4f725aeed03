"""Examines a backend on every rank, for `doctor`: collectives with known results, and training steps.

Run as a module under mpirun it examines mpi4py, and every rank prints its findings as one line of JSON.
"""

from __future__ import annotations

import copy
import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import ppe_ddp

__all__ = ["ANSWER", "EXAMINED", "examine"]

ANSWER = "ppe_ddp doctor: "
"""What the lines of ranks under mpirun begin with."""

EXAMINED = "all-reduce, broadcast, 3 training steps"
"""What is asked, for people."""

_ELEMENTS = 10_007
_STEPS = 3
_TOLERANCE = 1e-4


def examine(device: str) -> list[str]:
    """Ask the default process group; all ranks must call this together.

    Args:
        device: Of the tensors: "cpu", or "cuda" for the current device.

    Returns:
        What is wrong, one sentence each, as this rank sees it; empty where everything is as it should be.
    """
    return [*_collectives(device), *_training(device)]


def _collectives(device: str) -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    problems = []
    numbers = torch.arange(_ELEMENTS, device=device)
    total = numbers + rank
    dist.all_reduce(total)
    wrong = int((total != size * numbers + size * (size - 1) // 2).sum())
    if wrong:
        problems.append(f"all-reduce: {wrong} of {_ELEMENTS} sums are wrong")
    sent = numbers * (rank + 1)
    dist.broadcast(sent, size - 1)
    wrong = int((sent != numbers * size).sum())
    if wrong:
        problems.append(f"broadcast: {wrong} of {_ELEMENTS} elements are not those of the sender")
    return problems


def _training(device: str) -> list[str]:
    """Steps with another batch, and another unused layer, on every rank; one process does the same with the mean."""
    torch.manual_seed(0)
    alone = nn.ModuleList([nn.Linear(8, 32), nn.Linear(32, 4), nn.Linear(32, 4)]).to(device)
    together = ppe_ddp.DistributedDataParallel(_Routed(copy.deepcopy(alone)))
    reference = _Routed(alone)
    size = dist.get_world_size()
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (together, reference)]
    for step in range(_STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        _loss(together, step, dist.get_rank(), device).backward()
        sum(_loss(reference, step, rank, device) / size for rank in range(size)).backward()  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
    problems = []
    for (name, ours), theirs in zip(together.module.named_parameters(), reference.parameters(), strict=True):
        difference = float((ours - theirs).detach().abs().max())
        if not difference <= _TOLERANCE:
            problems.append(f"training: after {_STEPS} steps {name} is {difference:.2g} off what one process computes")
    return problems


class _Routed(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, batch: torch.Tensor, route: int) -> torch.Tensor:
        return self.layers[1 + route](torch.tanh(self.layers[0](batch)))  # type: ignore[no-any-return]


def _loss(module: nn.Module, step: int, rank: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    batch = torch.randn(16, 8, generator=generator).to(device)
    return module(batch, (step + rank) % 2).square().mean()  # type: ignore[no-any-return]


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
