"""Measures compressors: what they send and cost, and on which links they pay.

Each compressor, and torch's hook of the same method, averages the gradients of
a model over the ranks. "sent" counts the bytes of an all-reduce; "CPU" is the
processor time of all threads of a rank for one average, with the transport;
"error" is the distance to the mean of the ranks, divided by the length of the
mean, in one step without error feedback. On links slower than "pays below" a
step with this method is shorter than one that sends everything, counting the
time of the bytes on the link and the processor time. "a step" is the ratio of
these times at the speed of --mbit.

  python -m ppe_ddp bench compression --mbit 100
  mpirun -n 2 python -m ppe_ddp bench compression --json result.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from time import process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from ppe_ddp import DistributedDataParallel
from ppe_ddp.cli import benchmarking
from ppe_ddp.cli.benchmarking import largest, on_ranks, print_table, without_warnings
from ppe_ddp.cli.command_line import count, write_report
from ppe_ddp.compression import BF16, FP16, Int8, PowerSGD, RandomK, Sign, TopK, Uncompressed

_WARM_UP = 3
_FASTEST = 1e6  # Mbit/s: above any link

METHODS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "none": lambda: (Uncompressed(),),
    "none, torch": lambda: (None, default_hooks.allreduce_hook),
    "FP16": lambda: (FP16(),),
    "FP16, torch": lambda: (None, default_hooks.fp16_compress_hook),
    "BF16": lambda: (BF16(),),
    "BF16, torch": lambda: (None, default_hooks.bf16_compress_hook),
    "Int8": lambda: (Int8(),),
    "Int8, stochastic": lambda: (Int8(stochastic=True),),
    "TopK(0.01)": lambda: (TopK(0.01),),
    "RandomK(0.01)": lambda: (RandomK(0.01),),
    "Sign": lambda: (Sign(),),
    "PowerSGD(4)": lambda: (PowerSGD(4),),
    "PowerSGD(4), torch": lambda: (PowerSGDState(None, 4, 2, use_error_feedback=False), powerSGD_hook),
}
"""By name, what makes the arguments of ``register_comm_hook``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to ``parser``."""
    parser.add_argument("--width", type=count, default=1024, metavar="N", help="of the model (default: 1024)")
    parser.add_argument("--mbit", type=count, default=100, metavar="N", help="speed of the link (default: 100)")
    benchmarking.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; 1 if a rank failed, 2 if the job has another number of ranks than was asked for."""
    asked = {name: getattr(arguments, name) for name in ("width", "mbit", "repeats")}

    def publish(lines: list[dict[str, Any]], ranks: int) -> int:
        caption = f"{ranks} ranks; a step at {arguments.mbit:g} Mbit/s, as a part of one without compression; pays "
        caption += "below so many Mbit/s"
        title = f"{lines[0]['whole_nbytes'] / 1e6:.1f} MB of gradients"
        headings = ["method", "MB sent", "of all", "CPU ms", "error", "pays below", "a step"]
        print_table(arguments, title, caption, headings, _rows(lines))
        write_report(arguments, "bench compression", settings={"ranks": ranks, **asked}, lines=lines)
        return 0

    return on_ranks(measure, tuple(asked.values()), publish, ranks=arguments.ranks)


def measure(width: int, mbit: float, repeats: int) -> list[dict[str, Any]]:
    """Measure all methods in the default process group, on all ranks together. Returns a line for each."""
    torch.set_num_threads(1)
    with without_warnings():  # as compression cannot pay on one machine
        measured = {name: _measured(arguments(), width, repeats) for name, arguments in METHODS.items()}
    lines: list[dict[str, Any]] = []
    for name, (sent, whole, seconds, error) in measured.items():
        nbytes = None if name.endswith("torch") else sent  # unknown for torch's hooks
        line = {"name": name, "nbytes": nbytes, "whole_nbytes": whole, "cpu_seconds": seconds, "error": error}
        plain = lines[0]["cpu_seconds"] if lines else seconds
        ratio = pays = None
        if nbytes is not None:
            ratio = (seconds + _link_seconds(nbytes, mbit)) / (plain + _link_seconds(whole, mbit))
            pays = _pays_below(whole - nbytes, seconds - plain)
        lines.append({**line, "pays_below": pays, "ratio": ratio})
    return lines


def _measured(arguments: tuple[Any, ...], width: int, repeats: int) -> tuple[int, int, float, float]:
    """Bytes sent, bytes of the gradients, processor seconds of one average, and its error."""
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])
    wrapper = DistributedDataParallel(module)
    wrapper.register_comm_hook(*arguments)
    own = _gradients(module, dist.get_rank())
    seconds = []
    for _ in range(_WARM_UP + repeats):
        for parameter, gradient in zip(module.parameters(), own, strict=True):
            parameter.grad = gradient.clone()
        dist.barrier()
        start = process_time()
        wrapper.finish_grad_sync()
        seconds.append(process_time() - start)
    trace = wrapper.trace()
    sent = 0 if trace is None else trace.gradient_nbytes
    everyone = [_gradients(module, rank) for rank in range(dist.get_world_size())]
    exact = [sum(parts) / len(everyone) for parts in zip(*everyone, strict=True)]
    found = [parameter.grad for parameter in module.parameters()]
    error = _length([a - b for a, b in zip(found, exact, strict=True) if a is not None]) / _length(exact)
    whole = sum(parameter.nbytes for parameter in module.parameters())
    return sent, whole, largest(median(seconds[_WARM_UP:])), error


def _gradients(module: nn.Module, rank: int) -> list[Tensor]:
    """Gradients of a rank: matrices whose singular values decay, as those of real training do, and some noise."""
    generator = torch.Generator().manual_seed(rank)
    common = torch.Generator().manual_seed(99)
    gradients = []
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 2:
            left = torch.randn(parameter.shape[0], 16, generator=common) * 0.7 ** torch.arange(16)
            noise = left @ torch.randn(16, parameter.shape[1], generator=common) + 0.3 * noise
        gradients.append(noise)
    return gradients


def _length(tensors: Sequence[Any]) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors]).norm())


def _link_seconds(nbytes: int, mbit: float) -> float:
    """The seconds that a rank's link takes for an all-reduce of ``nbytes``, one direction at a time."""
    world_size = dist.get_world_size()
    return 2 * (world_size - 1) / world_size * nbytes * 8 / (mbit * 1e6)


def _pays_below(saved_nbytes: int, lost_seconds: float) -> float | None:
    """The speed in Mbit/s at which the link would need as long for the saved bytes as the processor to save them."""
    if saved_nbytes <= 0:
        return None
    return min(_link_seconds(saved_nbytes, 1.0) / max(lost_seconds, 1e-9), _FASTEST)


def _rows(lines: Sequence[dict[str, Any]]) -> Iterator[Sequence[str]]:
    for one in lines:
        sent = ["-", "-"]
        if one["nbytes"] is not None:
            sent = [f"{one['nbytes'] / 1e6:.3f}", f"{one['nbytes'] / one['whole_nbytes']:.3f}"]
        pays = "-" if one["pays_below"] is None else f"{one['pays_below']:.0f}"
        ratio = "-" if one["ratio"] is None else f"{one['ratio']:.3f}"
        yield one["name"], *sent, f"{one['cpu_seconds'] * 1e3:.1f}", f"{one['error']:.1e}", pays, ratio
