"""Whether compression would pay in the job that a launcher has started, for `doctor`.

Some gradients are averaged with no backward to hide behind: the most that a model's own step can gain. What each method
would make of it is forecast from the time that encoding takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

import ppe_ddp
from ppe_ddp.backends.group_internals import default_group
from ppe_ddp.compression import BF16, ErrorFeedback, Int8, PowerSGD, TopK, advise
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.json_collectives import all_gather_json
from ppe_ddp.engine.node_compression import hierarchy_of

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CompressionForecast", "forecast_compression", "lines_of_forecast", "of_slowest"]

_WIDTH = 1024
_STEPS = 4
_METHODS = {
    "BF16": BF16(),
    "Int8": Int8(),
    "TopK(0.01) with error feedback": ErrorFeedback(TopK(0.01)),
    "PowerSGD(4) with error feedback": ErrorFeedback(PowerSGD(rank=4)),
}
_WORTH = 0.05  # of the time, below which a gain is not worth what is lost


@dataclass(frozen=True)
class CompressionForecast:
    """What averaging some gradients takes in a job, and would take with each method; the same on every rank.

    Attributes:
        nbytes: Bytes of the gradients.
        seconds: What averaging them has taken, uncompressed: the best of some steps, on the slowest rank.
        forecasts: What it would take with each method.
        best: The method with which it would take the least; None where none pays.
    """

    nbytes: int
    seconds: float
    forecasts: dict[str, float]
    best: str | None


def forecast_compression() -> CompressionForecast:
    """Average some gradients on the CPU in the default process group; all ranks must call this together."""
    link_size = _link_size()
    module = nn.Linear(_WIDTH, _WIDTH, bias=False)
    wrapper = ppe_ddp.DistributedDataParallel(module)
    batch = torch.ones(1, _WIDTH)
    traces = []
    for _ in range(_STEPS):
        wrapper(batch).sum().backward()
        trace = wrapper.trace()
        assert trace is not None  # the ranks are several
        traces.append(trace)
    quickest = min(traces, key=lambda trace: trace.exposed_ns)
    advice = advise(quickest, link_size=link_size, candidates=list(_METHODS.values()))
    names = {compressor: name for name, compressor in _METHODS.items()}
    hidden = advice.seconds - advice.exposed_seconds
    own = [advice.exposed_seconds, {names[one.compressor]: one.seconds - hidden for one in advice.forecasts}]
    return of_slowest(module.weight.nbytes, all_gather_json(own, default_group()))


def _link_size() -> int:
    """How many take part in an exchange of compressed gradients: nodes, where ranks of a node share memory."""
    made = Groups.duplicate(default_group(), shared_memory=True)
    dist.all_reduce(torch.zeros(1), group=made.buckets)  # which tells the ranks who shares memory
    hierarchy = hierarchy_of(made.buckets)
    made.release()  # for the wrapper
    return made.world_size if hierarchy is None else len(hierarchy.layout.nodes)


def of_slowest(nbytes: int, found: Sequence[Any]) -> CompressionForecast:
    """The forecast for a job, whose step is over on the slowest rank.

    Args:
        nbytes: Bytes of the gradients.
        found: By rank, the seconds of averaging them, and what they would be by method.
    """
    seconds = max(measured for measured, _ in found)
    forecasts = {name: max(forecast[name] for _, forecast in found) for name in found[0][1]}
    best = min(forecasts, key=lambda name: forecasts[name])
    return CompressionForecast(nbytes, seconds, forecasts, best if forecasts[best] < (1 - _WORTH) * seconds else None)


def lines_of_forecast(found: CompressionForecast) -> list[str]:
    """The forecast for people, in two lines."""
    averaging = f"{found.nbytes / 1e6:.1f} MB are averaged in {found.seconds * 1e3:.1f} ms"
    if found.best is None:
        least = min(found.forecasts.values())
        return [f"  compression would not pay: {averaging}", f"    with it (forecast): {least * 1e3:.1f} ms or more"]
    least = found.forecasts[found.best]
    return [
        f"  compression pays where backward hides less: {averaging}",
        f"    {found.best} (forecast): {least * 1e3:.1f} ms",
    ]
