"""Measures time and memory of loading rank 0's checkpoint into an FSDP2 model.

Contestants take turns in one run: from tensors in memory, ppe_ddp's DistModule
and torch's set_model_state_dict; from safetensors files, DistModule and
accelerate, with rank 0 broadcasting and with all ranks reading. MB is what
resident memory grew by at most, on rank 0 and on the worst of the others; pages
of mapped files count.

  python -m ppe_ddp bench load
  mpirun -n 4 python -m ppe_ddp bench load --size 256M --json result.json
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ppe_ddp import init_process_group
from ppe_ddp.benchmarks.bench_result import Spread
from ppe_ddp.benchmarks.bench_table import print_table, spread_text, table_of
from ppe_ddp.cli.arguments import count, output, size_of
from ppe_ddp.cli.machine import machine_facts, versions, write_report
from ppe_ddp.launchers import detect
from ppe_ddp.sharding import DistModule
from ppe_ddp.testing import Ranks

if TYPE_CHECKING:
    import argparse

__all__ = ["CONTESTANTS", "LoadResult", "add_arguments", "run"]

_RANKS = 4
_SECONDS = 1800.0
_GROUP_SECONDS = 300.0
_FILES = 4


@dataclass(frozen=True)
class LoadResult:
    """One contestant.

    Attributes:
        name: Who.
        source: Where rank 0 has the checkpoint: in memory or in files.
        seconds: Of a load, of the slowest rank.
        ratio: To the reference of the same source, within one repetition.
        peak_nbytes: By rank, the most that resident memory grew in any repetition.
        wrong: Loads that gave some rank other values than the first contestant did.
    """

    name: str
    source: str
    seconds: Spread
    ratio: Spread
    peak_nbytes: list[int]
    wrong: int


@dataclass(frozen=True)
class _Sources:
    """The checkpoint: tensors, on rank 0 only, and a folder of files, or None where they cannot be written."""

    tensors: dict[str, Any]
    folder: Path | None


def _ours(model: nn.Module, sources: _Sources) -> None:
    DistModule(model).load_state_dict(sources.tensors, assign=True)


def _torch(model: nn.Module, sources: _Sources) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(sources.tensors), options=options)


def _our_files(model: nn.Module, sources: _Sources) -> None:
    assert sources.folder is not None
    DistModule(model).load_checkpoint(sources.folder, assign=True)


def _accelerate(model: nn.Module, sources: _Sources, *, broadcast: bool = True) -> None:
    from accelerate import load_checkpoint_in_model

    load_checkpoint_in_model(model, str(sources.folder), broadcast_from_rank0=broadcast)


def _accelerate_all(model: nn.Module, sources: _Sources) -> None:
    _accelerate(model, sources, broadcast=False)


CONTESTANTS: dict[str, tuple[str, str, Callable[[nn.Module, _Sources], None]]] = {
    "torch": ("memory", "torch", _torch),
    "ppe_ddp": ("memory", "torch", _ours),
    "accelerate": ("files", "accelerate", _accelerate),
    "accelerate, all read": ("files", "accelerate", _accelerate_all),
    "ppe_ddp, files": ("files", "accelerate", _our_files),
}
"""By name: where the checkpoint is, whom it is compared with, and how it loads."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to ``parser``."""
    parser.add_argument("--ranks", type=count, default=_RANKS, metavar="N", help=f"ranks to start (default: {_RANKS})")
    parser.add_argument("--size", type=size_of, default=1 << 30, metavar="BYTES", help="of the model (default: 1G)")
    parser.add_argument("--repeats", type=count, default=5, metavar="N", help="repetitions (default: 5)")
    parser.add_argument("--json", type=output, metavar="FILE", help="write all numbers there; - for stdout")


def run(arguments: argparse.Namespace) -> int:
    """Measures, and prints what came out on rank 0.

    Returns:
        0, or 1 if a load gave wrong values.
    """
    words = (arguments.size, arguments.repeats)
    if detect(os.environ).launcher == "alone":
        with Ranks(arguments.ranks, timeout=_SECONDS, group_timeout=_GROUP_SECONDS) as ranks:
            lines = ranks.run(measure, *words)[0]
        backend, size = "gloo", arguments.ranks
    else:
        init_process_group(quiet=True)
        lines = measure(*words)
        backend, size = str(dist.get_backend()), dist.get_world_size()
        last = dist.get_rank() != 0
        dist.destroy_process_group()
        if last:
            return 0
    _publish(arguments, lines, {"ranks": size, "backend": backend, "size": words[0], "repeats": words[1]})
    return int(any(line.wrong for line in lines))


def measure(nbytes: int, repeats: int) -> list[LoadResult]:
    """Measure on the ranks of the default process group, which all call this; every one gets the lines.

    Args:
        nbytes: About how large the model is.
        repeats: How often each contestant loads it.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    first = dist.get_rank() == 0
    tensors = _model(nbytes).state_dict() if first else {}
    folder = _written(tensors)
    names = [name for name, (source, *_) in CONTESTANTS.items() if source == "memory" or folder]
    results: dict[str, list[tuple[float, int, int]]] = {name: [] for name in names}
    try:
        for _ in range(repeats + 1):  # the first is for warming up
            for name in names:
                results[name].append(_load(name, nbytes, _Sources(tensors, folder)))
    finally:
        if first and folder:
            shutil.rmtree(folder)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: found[1:] for name, found in results.items()})
    return [_line(name, everyone) for name in names]


def _load(name: str, nbytes: int, sources: _Sources) -> tuple[float, int, int]:
    """Seconds, peak growth of memory, and a number that the values of this rank's shards make."""
    with torch.device("meta"):
        model = _model(nbytes)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    gc.collect()  # models region_memory themselves in circles
    _forget_peak()
    before = _memory("VmRSS")
    dist.barrier()
    start = perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about itself
        CONTESTANTS[name][2](model, sources)
    seconds = perf_counter() - start
    return seconds, _memory("VmHWM") - before, _mark(model)


def _mark(model: nn.Module) -> int:
    mark = 0
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        mark = hash((mark, int(local.detach().view(torch.int32).sum())))
    return mark


def _model(nbytes: int) -> nn.Sequential:
    """Blocks in the shapes of a transformer's."""
    width = 1024 if nbytes >= 64 << 20 else 256 if nbytes >= 4 << 20 else 64
    blocks = max(1, nbytes // (4 * 12 * width**2))
    return nn.Sequential(*(_block(width) for _ in range(blocks)))


def _block(width: int) -> nn.Sequential:
    attention = [nn.Linear(width, width) for _ in range(4)]
    return nn.Sequential(
        nn.LayerNorm(width), *attention, nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    )


def _written(tensors: dict[str, Any]) -> Path | None:
    """The folder of files that rank 0 has written, on every rank."""
    where: list[Path | None] = [None]
    if find_spec("accelerate") is None or find_spec("safetensors") is None:
        return None
    if tensors:
        from safetensors.torch import save_file

        folder = where[0] = Path(tempfile.mkdtemp(prefix="ppe_ddp_bench_"))
        keys = list(tensors)
        parts = {f"model-{part}.safetensors": keys[part::_FILES] for part in range(_FILES)}
        for file, part in parts.items():
            save_file({key: tensors[key] for key in part}, folder / file, metadata={"format": "pt"})
        pairs = (f'"{key}": "{file}"' for file, part in parts.items() for key in part)
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {' + ", ".join(pairs) + "}}")
    dist.broadcast_object_list(where, 0)
    return where[0]


def _forget_peak() -> None:
    """Give free memory back and start to look for a new peak; Linux only."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def _memory(field: str) -> int:
    """Bytes, from this process's status; 0 where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)


def _line(name: str, everyone: list[dict[str, list[tuple[float, int, int]]]]) -> LoadResult:
    source, reference, _ = CONTESTANTS[name]
    seconds, base = _slowest(name, everyone), _slowest(reference, everyone)
    first = next(iter(everyone[0]))
    wrong = sum(
        any(rank[name][repeat][2] != rank[first][repeat][2] for rank in everyone) for repeat in range(len(seconds))
    )
    return LoadResult(
        name=name,
        source=source,
        seconds=Spread.of(seconds),
        ratio=Spread.of([one / other for one, other in zip(seconds, base, strict=True)]),
        peak_nbytes=[max(peak for _, peak, _ in rank[name]) for rank in everyone],
        wrong=wrong,
    )


def _slowest(name: str, everyone: list[dict[str, list[tuple[float, int, int]]]]) -> list[float]:
    return [max(times) for times in zip(*([found[0] for found in rank[name]] for rank in everyone), strict=True)]


def _print_table(lines: list[LoadResult], caption: str, file: TextIO) -> None:
    headings = ["", "seconds", "ratio", "rank 0", "others", "wrong"]
    table = table_of("One load: medians (middle half), and peaks of memory in MB", caption, headings)
    for source in dict.fromkeys(line.source for line in lines):
        table.add_row(f"[bold]from {source}[/bold]")
        for line in lines:
            if line.source == source:
                compared = line.name != CONTESTANTS[line.name][1]
                table.add_row(
                    line.name,
                    spread_text(line.seconds, 2),
                    spread_text(line.ratio, 2) if compared else "",
                    f"{line.peak_nbytes[0] / 1e6:.0f}",
                    f"{max(line.peak_nbytes[1:]) / 1e6:.0f}" if line.peak_nbytes[1:] else "-",
                    str(line.wrong),
                )
        table.add_section()
    print_table(table, file)


def _publish(arguments: argparse.Namespace, lines: list[LoadResult], settings: dict[str, Any]) -> None:
    facts = machine_facts()
    caption = (
        f"{settings['size'] / 1e6:.0f} MB, {settings['ranks']} ranks over {settings['backend']}; {facts['cpu']}, "
        f"{facts['cores']} cores; torch {versions()['torch']}"
    )
    _print_table(lines, caption, sys.stderr if arguments.json == "-" else sys.stdout)
    if arguments.json is not None:
        write_report(arguments.json, "bench load", settings=settings, lines=[asdict(line) for line in lines])
