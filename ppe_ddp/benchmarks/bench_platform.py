"""The platform of a benchmark: a kind of device, a backend, and a clock that fits both.

All that is different on a GPU is here: which ranks get which device, how many may share one, and that the
device has to come to rest before the host reads its clock.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ppe_ddp import init_process_group
from ppe_ddp.backends.cupy_nccl.nccl_library import load_nccl
from ppe_ddp.backends.cupy_nccl.nccl_version import SHARE_DEVICES, torch_nccl_text
from ppe_ddp.cli.backend_candidates import many_ranks_a_device
from ppe_ddp.launchers import detect
from ppe_ddp.testing import Ranks

if TYPE_CHECKING:
    import argparse

    from torch.distributed import ProcessGroup

    from ppe_ddp.launch import Job

__all__ = ["BACKENDS", "Platform", "add_platform_arguments"]

_RUN_SECONDS = 3600.0
_COLLECTIVE_SECONDS = 300.0

BACKENDS: dict[str, tuple[str, ...]] = {
    "cpu": ("gloo",),
    "cuda": ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:cupy_nccl", "nccl", "cupy_nccl", "gloo"),
}
"""By kind of device the backends that can be measured on it, the default first."""


def add_platform_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds ``--device`` and ``--backend`` to ``parser``."""
    parser.add_argument("--device", choices=list(BACKENDS), default="cpu", help="to train on (default: cpu)")
    names = list(dict.fromkeys(backend for fitting in BACKENDS.values() for backend in fitting))
    defaults = f"{BACKENDS['cpu'][0]}, on cuda {BACKENDS['cuda'][0]}"
    parser.add_argument("--backend", choices=names, metavar="NAME", help=f"{', '.join(names)} (default: {defaults})")


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
        """That of a command line.

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

    # ------------------------------------------------------------------ ranks

    def admit(self, ranks: int) -> None:
        """Let ``ranks`` processes of this machine share its devices.

        Raises:
            ValueError: NCCL is too old for that.
        """
        if self.device == "cuda":
            self._allow_sharing()
            self._crowd(-(-ranks // torch.cuda.device_count()))

    def start(self, ranks: int) -> Ranks:
        """Ranks of our own, which start when they are first used."""
        return Ranks(ranks, backend=self.backend, timeout=_RUN_SECONDS, group_timeout=_COLLECTIVE_SECONDS)

    def join(self, *, quiet: bool = False) -> Job:
        """Join the ranks that a launcher has started; all of them call this together.

        Under mpirun the CPU's default group is mpi4py's.

        Raises:
            ValueError: The launcher's variables are wrong, or NCCL does not let ranks share a device.
            RuntimeError: The ranks could not meet.
        """
        self._allow_sharing()
        is_default = (self.device, self.backend) == ("cpu", BACKENDS["cpu"][0])
        over_mpi = is_default and detect(os.environ).launcher == "mpirun"
        job = init_process_group("mpi4py" if over_mpi else self.backend, quiet=quiet)
        if self.device == "cuda":
            self.enter()
            devices: list[Any] = [None] * job.world_size
            own = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
            dist.all_gather_object(devices, own, group=self.control())
            try:
                self._crowd(max(Counter(devices).values()))
            except ValueError:
                dist.destroy_process_group()
                raise
        return job

    def enter(self) -> None:
        """Make this rank's device the current one: that of its number on this machine, in turn."""
        if self.device == "cuda":
            job = init_process_group(quiet=True)  # which has been called before, and tells what there is
            torch.cuda.set_device(job.local_rank % torch.cuda.device_count())

    def control(self) -> ProcessGroup | None:
        """A group in which ranks meet without the device: a new one, or the default group on the CPU."""
        return dist.new_group(backend="gloo") if self.device == "cuda" else None

    def _allow_sharing(self) -> None:
        if "nccl" in self.backend and many_ranks_a_device():
            os.environ.setdefault(SHARE_DEVICES, "1")

    def _crowd(self, ranks_a_device: int) -> None:
        if ranks_a_device > 1 and "nccl" in self.backend and not many_ranks_a_device():
            raise ValueError(
                f"{ranks_a_device} ranks would share a GPU, which NCCL {torch_nccl_text()} does not allow (2.30 does): "
                "take --backend gloo, or no more ranks than GPUs"
            )

    # ------------------------------------------------------------------ time

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def clock(self) -> float:
        """Seconds, read when the device has come to rest."""
        self.synchronize()
        return perf_counter()

    # ------------------------------------------------------------------ what it is

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

    @property
    def name(self) -> str:
        """The device in a few words, with NCCL's version where it takes part."""
        facts = self.facts()
        if not facts["devices"]:
            return self.device
        nccl = f", NCCL {facts['nccl']}" if facts["nccl"] else ""
        return f"{self.device} ({facts['devices']} x {facts['device_name']}{nccl})"

    def __str__(self) -> str:
        """All of it in a few words, for a caption."""
        return f"{self.name} over {self.backend}"
