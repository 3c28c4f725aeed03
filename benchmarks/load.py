"""Measures time and memory of loading rank 0's checkpoint into an FSDP2 model.

Contestants take turns in one run: from tensors in memory, ppe_ddp's DistModule
and torch's set_model_state_dict; from safetensors files, DistModule and
accelerate, with rank 0 broadcasting and with all ranks reading. MB is what
resident memory grew by at most, on rank 0 and on the worst of the others; pages
of mapped files count.

  python -m benchmarks load
  mpirun -n 4 python -m benchmarks load --size 256M --json result.json
"""

import argparse
import ctypes
import gc
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from accelerate import load_checkpoint_in_model
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ppe_ddp.backends.group_internals import default_group
from ppe_ddp.backends.json_collectives import all_gather_json
from ppe_ddp.cli import benchmarking
from ppe_ddp.cli.benchmarking import Platform, Spread, on_ranks, print_table, slowest
from ppe_ddp.cli.command_line import size_of, write_report
from ppe_ddp.sharding import DistModule

_FILES = 4
Tensors = dict[str, Any]


def _torch(model: nn.Module, tensors: Tensors, _folder: Path) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(tensors), options=options)


def _accelerate(model: nn.Module, folder: Path, *, broadcast: bool) -> None:
    load_checkpoint_in_model(model, str(folder), broadcast_from_rank0=broadcast)


# By name: how it loads, from tensors that are on rank 0 only or from a folder, and whom it is compared with.
CONTESTANTS: dict[str, tuple[Callable[[nn.Module, Tensors, Path], object], str]] = {
    "torch": (_torch, "torch"),
    "ppe_ddp": (lambda model, tensors, _: DistModule(model).load_state_dict(tensors, assign=True), "torch"),
    "accelerate": (lambda model, _, folder: _accelerate(model, folder, broadcast=True), "accelerate"),
    "accelerate, all read": (lambda model, _, folder: _accelerate(model, folder, broadcast=False), "accelerate"),
    "ppe_ddp, files": (lambda model, _, folder: DistModule(model).load_checkpoint(folder, assign=True), "accelerate"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to ``parser``."""
    parser.add_argument("--size", type=size_of, default=1 << 30, metavar="BYTES", help="of the model (default: 1G)")
    benchmarking.add_arguments(parser, repeats=5)


def run(arguments: argparse.Namespace) -> int:
    """Measures, and prints what came out on rank 0.

    Returns:
        0, or 1 if a load gave wrong values or a rank failed; 2 if the ranks that there are cannot be used.
    """

    def publish(lines: list[dict[str, Any]], ranks: int) -> int:
        caption = f"{arguments.size / 1e6:.0f} MB, {ranks} ranks"
        title = "One load: medians (middle half), and peaks of memory in MB"
        print_table(arguments, title, caption, ["", "seconds", "ratio", "rank 0", "others", "wrong"], _rows(lines))
        write_report(arguments, "load", lines=lines)
        return int(any(line["wrong"] for line in lines))

    return on_ranks(measure, (arguments.size, arguments.repeats), publish, ranks=arguments.ranks)


def _rows(lines: Sequence[dict[str, Any]]) -> Iterator[Sequence[str]]:
    for one in lines:
        peaks = [nbytes / 1e6 for nbytes in one["peak_nbytes"]]
        ratio = "" if one["name"] in ("torch", "accelerate") else one["ratio"].text(2)
        others = f"{max(peaks[1:]):.0f}" if peaks[1:] else "-"
        yield one["name"], one["seconds"].text(2), ratio, f"{peaks[0]:.0f}", others, str(one["wrong"])


def measure(nbytes: int, repeats: int) -> list[dict[str, Any]]:
    """Measure a model of about ``nbytes`` in the default process group; all ranks call this together.

    Returns:
        A line for each contestant, the same on every rank, as the report has it.
    """
    Platform().enter()
    torch.manual_seed(0)
    is_first = dist.get_rank() == 0
    tensors = _model(nbytes).state_dict() if is_first else {}
    folder = _written(tensors)
    loads: dict[str, list[tuple[float, int, int]]] = {name: [] for name in CONTESTANTS}
    try:
        for _ in range(repeats + 1):  # the first is for warming up
            for name, (load, _) in CONTESTANTS.items():
                loads[name].append(_load(load, nbytes, tensors, folder))
        dist.barrier()
    finally:
        if is_first:
            shutil.rmtree(folder)
    everyone: list[dict[str, list[tuple[float, int, int]]]] = all_gather_json(loads, default_group())
    seconds = slowest({name: [one[0] for one in found[1:]] for name, found in loads.items()})
    return [
        {
            "name": name,
            "seconds": Spread.of(seconds[name]),
            "ratio": Spread.of(seconds[name], seconds[reference]),
            "peak_nbytes": [max(one[1] for one in rank[name][1:]) for rank in everyone],
            "wrong": sum(a[2] != b[2] for rank in everyone for a, b in zip(rank[name], rank["torch"], strict=True)),
        }
        for name, (_, reference) in CONTESTANTS.items()
    ]


def _load(
    load: Callable[[nn.Module, Tensors, Path], object], nbytes: int, tensors: Tensors, folder: Path
) -> tuple[float, int, int]:
    """One load on this rank: seconds, bytes that memory grew by at most, and a number that the shards' values make."""
    with torch.device("meta"):
        model = _model(nbytes)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    gc.collect()  # models hold themselves in circles
    # Give free memory back, and look for a new peak from here on.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    dist.barrier()
    start = perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about itself
        load(model, tensors, folder)
    seconds, mark = perf_counter() - start, 0
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        mark = hash((mark, int(local.detach().view(torch.int32).sum())))
    return seconds, _memory("VmHWM") - before, mark


def _model(nbytes: int) -> nn.Sequential:
    """Blocks in the shapes of a transformer's."""
    width = 1024 if nbytes >= 64 << 20 else 256 if nbytes >= 4 << 20 else 64

    def block() -> nn.Sequential:
        attention = [nn.Linear(width, width) for _ in range(4)]
        inner = [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)]
        return nn.Sequential(nn.LayerNorm(width), *attention, *inner)

    return nn.Sequential(*(block() for _ in range(max(1, nbytes // (4 * 12 * width**2)))))


def _written(tensors: Tensors) -> Path:
    """The folder of files that rank 0 has written, on every rank."""
    where: list[Any] = [None]
    if tensors:
        where[0] = Path(tempfile.mkdtemp(prefix="ppe_ddp_bench_"))
        parts = {f"model-{part}.safetensors": list(tensors)[part::_FILES] for part in range(_FILES)}
        for file, keys in parts.items():
            save_file({key: tensors[key] for key in keys}, where[0] / file, metadata={"format": "pt"})
        index = {"weight_map": {key: file for file, keys in parts.items() for key in keys}}
        (where[0] / "model.safetensors.index.json").write_text(json.dumps(index))
    dist.broadcast_object_list(where, 0)
    return Path(where[0])


def _memory(field: str) -> int:
    """Bytes, from this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
