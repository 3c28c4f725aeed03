"""The ranks, device and backend that a benchmark runs on: refused early with a reason, made, and told in results."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ppe_ddp.backends.cupy_nccl.nccl_library import SHARE_DEVICES, load_nccl, torch_nccl_text
from ppe_ddp.backends.group_internals import default_group
from ppe_ddp.backends.json_collectives import all_gather_json
from ppe_ddp.cli.command_line import count, fail
from ppe_ddp.cli.doctor import many_ranks_a_device
from ppe_ddp.launch import init_process_group
from ppe_ddp.launchers import detect
from ppe_ddp.testing import RankError, Ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["BACKENDS", "DEFAULT_RANKS", "Platform", "add_platform_arguments", "measure_on_ranks", "over_mpi"]

DEFAULT_RANKS = 2
_RUN_SECONDS, _COLLECTIVE_SECONDS = 3600.0, 300.0

BACKENDS: dict[str, tuple[str, ...]] = {
    "cpu": ("gloo",),
    "cuda": ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:cupy_nccl", "nccl", "cupy_nccl", "gloo"),
}
"""By kind of device the backends that can be measured on it, the default first."""


def add_platform_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds ``--ranks``, ``--device`` and ``--backend`` to ``parser``."""
    parser.add_argument("--ranks", type=count, metavar="N", help=f"ranks to start (default: {DEFAULT_RANKS})")
    parser.add_argument("--device", choices=list(BACKENDS), default="cpu", help="to run on (default: cpu)")
    names = list(dict.fromkeys(backend for fitting in BACKENDS.values() for backend in fitting))
    defaults = f"{BACKENDS['cpu'][0]}, on cuda {BACKENDS['cuda'][0]}"
    parser.add_argument("--backend", choices=names, metavar="NAME", help=f"{', '.join(names)} (default: {defaults})")


def over_mpi() -> bool:
    """Whether the default process group is mpi4py's."""
    return dist.is_initialized() and "mpi4py" in str(dist.get_backend_config())


def measure_on_ranks(
    measure: Callable[..., Any],
    words: tuple[Any, ...],
    publish: Callable[[list[Any]], int],
    *,
    ranks: int | None,
    platform: Platform | None = None,
) -> int:
    """Measure on the ranks that a launcher has started, or on new ones.

    Args:
        measure: A function of a module, called as ``measure(*words)`` on every rank in a process group. What it returns
            is sent as JSON.
        words: The same on every rank.
        publish: Prints the results of all ranks, on rank 0, and returns the exit code.
        ranks: How many to start, None for two; where a launcher has started some, as many or None.
        platform: Where; by default the CPU.

    Returns:
        The exit code: that of ``publish``; 1 if a rank that was started here failed; 2 if the ranks that there are
        cannot be used.
    """
    platform = platform or Platform()
    try:
        if detect(os.environ).launcher == "alone":
            with platform.start(ranks or DEFAULT_RANKS) as started:
                return publish(started.run(measure, *words))
        platform.join(ranks)
    except RankError as error:
        return fail(error, 1)
    except (ImportError, RuntimeError, ValueError) as error:
        return fail(error, 2)
    control = platform.control() or default_group()
    results = all_gather_json(measure(*words), control)
    code = publish(results) if dist.get_rank() == 0 else 0
    (code, *_) = all_gather_json(code, control)
    dist.destroy_process_group()
    return int(code)


@dataclass(frozen=True)
class Platform:
    """One kind of device and one backend; the same on every rank.

    Attributes:
        device: "cpu" or "cuda".
        backend: As ``init_process_group`` takes it.
    """

    device: str = "cpu"
    backend: str = BACKENDS["cpu"][0]

    @classmethod
    def of(cls, device: str, backend: str | None = None) -> Platform:
        """The platform of a command line.

        Args:
            device: "cpu" or "cuda".
            backend: One of :data:`BACKENDS`; None for the device's default.

        Raises:
            ValueError: The backend is not for the device, or what they need is not here.
            ImportError: CuPy is not installed or finds no NCCL.
        """
        known = BACKENDS[device]
        backend = backend or known[0]
        if backend not in known:
            raise ValueError(f"--backend {backend} is not for --device {device}, which has {' or '.join(known)}")
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"--device cuda: torch {torch.__version__} sees no GPU; `python -m ppe_ddp env` tells what is here"
            )
        if "cupy" in backend:
            load_nccl()
        elif "nccl" in backend and not dist.is_nccl_available():
            raise ValueError(f"--backend {backend}: this torch is built without NCCL; take --backend gloo")
        return cls(device, backend)

    def start(self, ranks: int) -> Ranks:
        """Ranks of our own, which start when they are first used.

        Raises:
            ValueError: They would have to share devices, and NCCL is too old for that.
        """
        if self.device == "cuda":
            self._check_sharing(-(-ranks // torch.cuda.device_count()))
        return Ranks(ranks, backend=self.backend, timeout=_RUN_SECONDS, group_timeout=_COLLECTIVE_SECONDS)

    def join(self, wanted: int | None = None) -> None:
        """Join the ranks that a launcher has started; all call this together. Under mpirun the CPU's are mpi4py's.

        Raises:
            ValueError: The launcher's variables are wrong, these are not as many ranks as are wanted, or NCCL does not
                let ranks share a device.
            RuntimeError: The ranks could not meet.
        """
        self._check_sharing(1)  # NCCL reads the variable once
        is_over_mpi = self == Platform() and detect(os.environ).launcher == "mpirun"
        job = init_process_group("mpi4py" if is_over_mpi else self.backend, quiet=True)
        try:
            if wanted not in (None, job.world_size):
                raise ValueError(f"--ranks is {wanted}, but {job.launcher} has started {job.world_size}; leave it out")
            if self.device == "cuda":
                self.enter()
                own = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
                devices = Counter(all_gather_json(own, self.control() or default_group()))
                self._check_sharing(max(devices.values()))
        except ValueError:
            dist.destroy_process_group()
            raise

    def enter(self) -> None:
        """Use one thread, and the device of this rank's number on this machine, in turn."""
        torch.set_num_threads(1)
        if self.device == "cuda":
            job = init_process_group(quiet=True)  # which has been called before, and tells what there is
            torch.cuda.set_device(job.local_rank % torch.cuda.device_count())

    def control(self) -> ProcessGroup | None:
        """A group in which ranks meet without the device: a new one, or the default group on the CPU."""
        return dist.new_group(backend="gloo") if self.device == "cuda" else None

    def _check_sharing(self, ranks_a_device: int) -> None:
        if "nccl" not in self.backend:
            return
        if many_ranks_a_device():
            os.environ.setdefault(SHARE_DEVICES, "1")
        elif ranks_a_device > 1:
            raise ValueError(
                f"{ranks_a_device} ranks would share a GPU, which NCCL {torch_nccl_text()} does not allow (2.30 does): "
                "take --backend gloo, or no more ranks than GPUs"
            )

    def clock(self) -> float:
        """Seconds, read when the device has done what it was given."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return perf_counter()

    def facts(self) -> dict[str, str | int | None]:
        """The facts for a report: device, the GPUs' name and number, backend and NCCL's version."""
        has_gpu = self.device == "cuda"
        return {
            "device": self.device,
            "device_name": torch.cuda.get_device_name() if has_gpu else None,
            "devices": torch.cuda.device_count() if has_gpu else 0,
            "backend": self.backend,
            "nccl": torch_nccl_text() if "nccl" in self.backend else None,
        }

    def __str__(self) -> str:
        """All of it in a few words, for a caption."""
        facts = self.facts()
        nccl = f", NCCL {facts['nccl']}" if facts["nccl"] else ""
        name = f"{self.device} ({facts['devices']} x {facts['device_name']}{nccl})" if facts["devices"] else self.device
        return f"{name} over {self.backend}"
