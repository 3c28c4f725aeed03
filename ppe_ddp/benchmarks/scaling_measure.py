"""What `bench scaling` measures on ranks: the constants of the model, and steps to check it by.

The model that is trained does nothing but sleep where another would compute, and then has its gradients. On emulated
nodes all ranks share the cores of one machine: what they compute makes them wait for one another, as on no cluster.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ppe_ddp.cli.machine import over_mpi
from ppe_ddp.ddp import DistributedDataParallel

__all__ = ["MeasuredStep", "SleepingModel", "all_reduce_times", "measure_step"]

_WARM_UP = 4


@dataclass(frozen=True)
class MeasuredStep:
    """In seconds, of the rank that is slowest; the lower quartile, as other programs only make a step longer.

    Attributes:
        forward: Of the bare model.
        backward: Of the bare model.
        step: With ppe_ddp.
        mask: From the begin of backward until the mask was known, with ppe_ddp.
        pack_per_byte: Of copying gradients into a bucket.
    """

    forward: float
    backward: float
    step: float
    mask: float
    pack_per_byte: float


class _Sleep(torch.autograd.Function):
    """Sleeps, and gives its weight a gradient of ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward: float, backward: float) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(ctx.seconds)
        (weight,) = ctx.saved_tensors
        return gradients[0], torch.ones_like(weight), None, None


class SleepingModel(nn.Module):
    """Layers of as many bytes each, which sleep.

    Args:
        nbytes: Of all gradients.
        layers: How many.
        forward: Seconds of all of them together.
        backward: The same.
    """

    def __init__(self, nbytes: int, layers: int, forward: float, backward: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(nbytes // 4 // layers)) for _ in range(layers))
        self._seconds = forward / layers, backward / layers

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``x``."""
        for weight in self.weights:
            x = _Sleep.apply(x, weight, *self._seconds)  # type: ignore[no-untyped-call]
        return x


def all_reduce_times(sizes: tuple[int, ...], repeats: int) -> dict[int, float]:
    """Seconds of an all-reduce of each size, of the slowest rank, as the wrapper's own groups make it; the fastest."""
    group = dist.group.WORLD if over_mpi() else dist.new_group(backend="shm")
    control = dist.new_group(backend="gloo")
    found: dict[int, list[float]] = {size: [] for size in sizes}
    tensors = {size: torch.zeros(size, dtype=torch.uint8).view(torch.float32) for size in sizes}
    for _ in range(_WARM_UP + repeats):
        for size, tensor in tensors.items():
            dist.barrier(control)
            start = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            found[size].append(time.perf_counter() - start)
    return {size: _slowest(min(times[_WARM_UP:]), control) for size, times in found.items()}


def measure_step(
    nbytes: int, layers: int, forward: float, backward: float, bucket_mb: float, repeats: int
) -> MeasuredStep:
    """Trains in turn without and with ppe_ddp; all ranks call this together."""
    control = dist.new_group(backend="gloo")
    bare = SleepingModel(nbytes, layers, forward, backward)
    model = DistributedDataParallel(SleepingModel(nbytes, layers, forward, backward), bucket_cap_mb=bucket_mb)
    found: dict[str, list[float]] = {name: [] for name in MeasuredStep.__dataclass_fields__}
    for _ in range(_WARM_UP + repeats):
        found["forward"].append((times := _clock(bare, control))[0])
        found["backward"].append(times[1])
        found["step"].append(sum(_clock(model, control)))
        trace = model.trace()
        assert trace is not None
        found["mask"].append(trace.agreed_ns / 1e9)
        packing = sum(bucket.packed_ns - bucket.launch_ns for bucket in trace.buckets)
        found["pack_per_byte"].append(packing / 1e9 / nbytes)
    return MeasuredStep(**{name: _slowest(quantiles(times[_WARM_UP:])[0], control) for name, times in found.items()})


def _clock(module: nn.Module, control: dist.ProcessGroup) -> tuple[float, float]:
    """The seconds of forward and backward."""
    module.zero_grad()
    x = torch.zeros(1, requires_grad=True)
    dist.barrier(control)
    start = time.perf_counter()
    y = module(x).sum()
    middle = time.perf_counter()
    y.backward()
    return middle - start, time.perf_counter() - middle


def _slowest(seconds: float, group: dist.ProcessGroup) -> float:
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return float(found)
