"""Measures how long it takes to load rank 0's checkpoint into an FSDP2 model.

ppe_ddp's DistModule and torch's set_model_state_dict take turns in one run.
"ratio" is to torch's time, and "values" says whether the loaded ones are right.

  python -m benchmarks load --ranks 4
  mpirun -n 4 python -m benchmarks load --size 256M --json result.json
"""

import argparse
import gc
import warnings
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ppe_ddp.cli import benchmarking
from ppe_ddp.cli.benchmarking import Platform, Spread, largest, on_ranks, print_table
from ppe_ddp.cli.command_line import size_of, write_report
from ppe_ddp.sharding import DistModule


def _torch(model: nn.Module, tensors: dict[str, Any]) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(tensors), options=options)


CONTESTANTS: dict[str, Callable[[nn.Module, dict[str, Any]], object]] = {
    "torch": _torch,
    "ppe_ddp": lambda model, tensors: DistModule(model).load_state_dict(tensors, assign=True),
}
"""By name, a function that loads tensors of rank 0 into the model of each rank."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to ``parser``."""
    parser.add_argument("--size", type=size_of, default=1 << 30, metavar="BYTES", help="of the model (default: 1G)")
    benchmarking.add_arguments(parser, repeats=5)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; 1 if loaded values were wrong or a rank failed, 2 if ranks cannot be used."""

    def publish(lines: list[dict[str, Any]], ranks: int) -> int:
        words = {True: "wrong", False: "right"}
        rows = [(o["name"], o["seconds"].text(2), o["ratio"].text(2), words[o["is_wrong"]]) for o in lines]
        caption = f"{arguments.size / 1e6:.0f} MB, {ranks} ranks"
        print_table(arguments, "One load: medians (middle half)", caption, ["", "seconds", "ratio", "values"], rows)
        write_report(arguments, "load", lines=lines)
        return int(any(line["is_wrong"] for line in lines))

    return on_ranks(measure, (arguments.size, arguments.repeats), publish, ranks=arguments.ranks)


def measure(nbytes: int, repeats: int) -> list[dict[str, Any]]:
    """Measure a model of about ``nbytes`` in the default process group, on all ranks together: a line for each."""
    Platform().enter()
    torch.manual_seed(0)
    tensors = _model(nbytes).state_dict() if dist.get_rank() == 0 else {}
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    sums: dict[str, list[list[int]]] = {name: [] for name in CONTESTANTS}
    for _ in range(repeats + 1):  # the first is for warming up
        for name, load in CONTESTANTS.items():
            gc.collect()  # models are in reference cycles
            model = _sharded(nbytes)
            dist.barrier()
            start = perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns about itself
                load(model, tensors)
            seconds[name].append(perf_counter() - start)
            shards = [one.to_local() if isinstance(one, DTensor) else one for one in model.parameters()]
            sums[name].append([int(shard.detach().view(torch.int32).sum()) for shard in shards])
    times = largest([own[1:] for own in seconds.values()])
    wrong = largest([own != sums["torch"] for own in sums.values()])
    found = zip(CONTESTANTS, times, map(bool, wrong), strict=True)
    return [
        {"name": name, "seconds": Spread.of(own), "ratio": Spread.of(own, times[0]), "is_wrong": is_wrong}
        for name, own, is_wrong in found
    ]


def _model(nbytes: int) -> nn.Sequential:
    width = 1024 if nbytes >= 64 << 20 else 256 if nbytes >= 4 << 20 else 64

    def block() -> nn.Sequential:
        attention = [nn.Linear(width, width) for _ in range(4)]
        inner = [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)]
        return nn.Sequential(nn.LayerNorm(width), *attention, *inner)

    return nn.Sequential(*(block() for _ in range(max(1, nbytes // (4 * 12 * width**2)))))


def _sharded(nbytes: int) -> nn.Sequential:
    with torch.device("meta"):
        model = _model(nbytes)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    return model
