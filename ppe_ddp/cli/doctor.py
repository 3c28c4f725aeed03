"""Starts ranks over each backend that can be made here, and tells which work.

First it tries what this library uses of torch and torch does not promise.
The ranks then make collectives whose results are known, and train a model
whose graph differs from rank to rank beside one process that does the same.
Two ranks, or one for CUDA where they would have to share a device (two all
the same, over an NCCL that can do it, if NCCL_MULTI_RANK_GPU_ENABLE=1 is
set). A rank that hangs is killed and reported.

Under mpirun, torchrun or srun it examines the ranks of that job instead:
which share a node, and for the groups of all ranks, of a node, and of one
rank of each node, what goes through memory and what over the network. It
also says how long some gradients take there, and forecasts what they would
with compression.

  python -m ppe_ddp doctor
  mpirun -hosts n0:2,n1:2 -n 4 python -m ppe_ddp doctor
  python -m ppe_ddp doctor --backend mine --setup my_module:register
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TextIO

import torch.distributed as dist

from ppe_ddp.cli.arguments import output, seconds
from ppe_ddp.cli.backend_candidates import Candidate, candidates
from ppe_ddp.cli.backend_diagnosis import Diagnosis, diagnose
from ppe_ddp.cli.job_examination import examine_job, lines_of
from ppe_ddp.cli.libraries import cupy_library, mpi_library
from ppe_ddp.cli.machine import write_report
from ppe_ddp.cli.torch_check import changes_of_torch, text_of_changes
from ppe_ddp.launch import check_backend, init_process_group
from ppe_ddp.launchers import detect

__all__ = ["add_arguments", "run"]

_SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to ``parser``."""
    parser.add_argument(
        "--backend", action="append", metavar="NAME", help="only this one, of ours or your own; may be repeated"
    )
    parser.add_argument(
        "--setup",
        type=function_named,
        metavar="MODULE:FUNCTION",
        help="called without arguments in each rank before it joins: registers a backend of your own",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="what your own backend is for")
    parser.add_argument(
        "--timeout", type=seconds, default=_SECONDS, metavar="S", help=f"for each backend (default: {_SECONDS:g})"
    )
    parser.add_argument("--json", type=output, metavar="FILE", help="write the findings there; - for stdout")


def function_named(text: str) -> Callable[[], object]:
    """The function that ``module:function`` names."""
    module, _, name = text.partition(":")
    try:
        function: Callable[[], object] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} names no function that can be imported ({error})") from error
    return function


def run(arguments: argparse.Namespace) -> int:
    """Examines one backend after the other, and prints what it finds as it goes.

    Returns:
        0 if nothing failed; 1 if something did, a backend that was asked for by name cannot be made here, or torch
        has changed; 2 if a name is no backend's.
    """
    file = sys.stderr if arguments.json == "-" else sys.stdout
    try:
        place = detect(os.environ)
    except (ValueError, RuntimeError) as error:
        print(f"ppe_ddp: {error}", file=sys.stderr)
        return 1
    if place.world_size > 1:
        return _in_job(arguments, place.rank, file)
    changes = changes_of_torch()
    print("\n  ".join(f"torch internals: {text_of_changes(changes)}".splitlines()), file=file, flush=True)
    asked = arguments.backend or []
    if arguments.setup is None and not _are_known(asked):
        return 2
    diagnoses = []
    for candidate in _chosen(asked, arguments.device):
        if not candidate.missing:
            print(f"{candidate.name}: ranks are starting ...", file=sys.stderr, flush=True)
        own = arguments.setup if candidate.name in asked else None
        diagnosis = diagnose(candidate, arguments.timeout, own)
        diagnoses.append(diagnosis)
        print("\n".join(_lines(diagnosis)), file=file, flush=True)
    if arguments.json is not None:
        write_report(
            arguments.json, "doctor", torch_internals=changes, diagnoses=[asdict(diagnosis) for diagnosis in diagnoses]
        )
    unwell = [one for one in diagnoses if one.outcome == "failed" or (asked and one.outcome == "skipped")]
    return int(bool(unwell or changes))


def _in_job(arguments: argparse.Namespace, rank: int, file: TextIO) -> int:
    """Examine the job whose rank this process is, together with the others; rank 0 tells."""
    asked = arguments.backend or [None]
    if len(asked) > 1:
        print(
            f"ppe_ddp: the ranks of a job have one backend: not --backend {' --backend '.join(asked)}", file=sys.stderr
        )
        return 2
    changes = changes_of_torch() if rank == 0 else ()
    if arguments.setup is not None:
        arguments.setup()
    try:
        job = init_process_group(asked[0], timeout=arguments.timeout, quiet=True)
    except (ValueError, RuntimeError) as error:
        print(f"ppe_ddp: {error}", file=sys.stderr)
        return 1
    findings = examine_job(job)
    dist.destroy_process_group()
    if rank == 0:
        print("\n  ".join(f"torch internals: {text_of_changes(changes)}".splitlines()), file=file)
        print("\n".join(lines_of(findings)), file=file, flush=True)
        if arguments.json is not None:
            write_report(arguments.json, "doctor", torch_internals=changes, job=asdict(findings))
    return int(bool(findings.problems or changes))


def _are_known(names: list[str]) -> bool:
    """Whether all of these are backends that a process has without a setup of its own; says which is not."""
    for name in names:
        try:
            check_backend(name)
        except ValueError as error:
            print(f"{error}: --setup MODULE:FUNCTION names a function that does", file=sys.stderr)
            return False
    return True


def _chosen(asked: list[str], device: str) -> Iterator[Candidate]:
    ours = {candidate.name: candidate for candidate in candidates(mpi_library(), cupy_library())}
    for name in asked or ours:
        yield ours.get(name) or Candidate(name, device)


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    first, *more = diagnosis.reason.splitlines() or [""]
    ranks = f"{diagnosis.ranks} rank{'s' if diagnosis.ranks != 1 else ''}, {diagnosis.seconds:.1f} s: "
    yield f"{diagnosis.backend:<12}{diagnosis.outcome:<9}{ranks if diagnosis.ranks else ''}{first}"
    margin = " " * 21
    for line in [*more, *diagnosis.details.splitlines()]:
        yield margin + line
    if diagnosis.remedy:
        yield f"{margin}remedy: {diagnosis.remedy}"
