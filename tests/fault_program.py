"""What each rank of the fault suite runs: training steps, in one of which one rank commits a fault.

    python fault_program.py FAULT PHASE RANK STEP FOLDER

Every rank writes what it has seen to FOLDER/rank.json, before it goes on or ends: which error, how long after the
fault, and whether the next step was right. The rank at fault writes when it committed it: clocks of one machine agree.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ppe_ddp
from one_process import assert_gradients, data, mean_gradients, seeded
from ppe_ddp.checkpoints import checkpoint_files
from ppe_ddp.engine import bucket, negotiation
from ppe_ddp.engine.zero import parameter_gather

IMPORTED_FOR_OPTIMIZERS = ["torch._dynamo"]
"""What torch.optim imports when it is first used, for a second or two, which none of the ranks is to wait for then."""
TIMEOUT = 3.0
"""The groups' timeout in seconds."""
LAYERS = 3
"""A bucket each."""
STEPS = 4
SLOW = TIMEOUT + 1.5  # seconds that a slow rank takes


class Committed(Exception):
    """The error of a rank at fault that goes on."""


@dataclass
class Fault:
    """A fault that this rank commits once, when it comes to a phase of a step."""

    kind: str
    phase: str
    step: int
    folder: Path
    is_own: bool
    now: int = -1

    def reach(self, phase: str) -> None:
        if self.is_own and (self.now, self.phase) == (self.step, phase):
            self.is_own = False
            self.commit()

    def commit(self) -> None:
        (self.folder / "fault").write_text(str(time.monotonic()))
        if self.kind in COMMITTED:  # others are steps of another kind
            COMMITTED[self.kind]()


def _raise() -> None:
    raise Committed("not today")


def _raise_for_memory() -> None:
    raise torch.OutOfMemoryError("no memory is left")


def _cut_network() -> None:
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)


def _fill_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _end() -> None:
    raise SystemExit(0)  # caught by nobody, as at the end of a program


COMMITTED = {
    "raise": _raise,
    "crash": _raise,
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "os._exit": lambda: os._exit(7),
    "sys.exit": lambda: sys.exit(3),
    "normal end": _end,
    "slow": lambda: time.sleep(SLOW),
    "cut network": _cut_network,
    "full disk": _fill_disk,
}
ENDS = ("SIGKILL", "SIGSTOP", "os._exit", "sys.exit", "normal end", "crash", "cut network")
"""Faults after which the rank is no more."""


class Passing(torch.autograd.Function):
    """Passes through; in backward it comes to a phase."""

    @staticmethod
    def forward(ctx, x, fault, phase):
        ctx.fault, ctx.phase = fault, phase
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.fault.reach(ctx.phase)
        return gradient, None, None


class FaultyNet(nn.Module):
    """Maps of a bucket each, one more of each rank's own, and a buffer that is broadcast at the end of a step."""

    def __init__(self, fault, size):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(LAYERS))
        self.own = nn.ModuleList(nn.Linear(8, 8) for _ in range(size))  # over gloo each is sent by its rank alone
        self.register_buffer("count", torch.zeros(3))
        self.fault = fault

    def forward(self, x, rank):
        self.fault.reach("forward")
        for place, layer in enumerate(self.layers):
            if place == 1:
                x = torch.relu(self.own[rank](x))
            # Backward comes to the last layer first, right after it has begun and has sent its mask.
            phase = f"bucket {LAYERS - 2 - place}" if place < LAYERS - 1 else "negotiate"
            x = Passing.apply(torch.tanh(layer(x)), self.fault, phase)
        return x


class NoOptimizer:
    """As SGD whose learning rate is 0, without what torch.optim imports."""

    def __init__(self, model):
        self.zero_grad = model.zero_grad

    def step(self):
        pass


def loss_of(model, rank, step=0):
    return model(data(5, 8, rank=rank, step=step), rank).pow(2).sum()


class FaultyTraining:
    """The steps of one rank."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.seen: dict[str, object] = {"seconds": None, "error": "", "text": "", "next": ""}
        module = seeded(FaultyNet, fault, self.size)
        self.expected = mean_gradients(module, lambda twin, rank: loss_of(twin, rank).backward(), self.size)
        options = {"check_for_nan_in_grad": True} if fault.kind == "NaN" else {}
        self.model = ppe_ddp.DistributedDataParallel(
            module, bucket_cap_mb=1e-4, broadcast_function=self.broadcast, **options
        )
        if fault.phase == "gather":
            self.optimizer = ppe_ddp.DistributedOptimizer(torch.optim.SGD, self.model, lr=0.0)
            self.come_to(parameter_gather.UnitGather, "start", "gather")
        elif fault.phase == "checkpoint":
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        else:
            self.optimizer = NoOptimizer(self.model)
        self.come_to(negotiation.Negotiation, "start", "vote", lambda *_, is_vote=False, **__: is_vote)
        self.checkpointer = None
        if fault.phase == "checkpoint":
            parts = {"model": self.model, "optimizer": self.optimizer}
            self.checkpointer = ppe_ddp.Checkpointer(fault.folder / "checkpoints", parts)
            self.come_to(checkpoint_files, "sync", "checkpoint", lambda file: file.name != checkpoint_files.MANIFEST)

    def come_to(self, owner, name, phase, is_phase=lambda *_, **__: True):
        """Let the calls of a function be a phase."""
        call = getattr(owner, name)

        @functools.wraps(call)
        def come(*arguments, **keywords):
            if is_phase(*arguments, **keywords):
                self.fault.reach(phase)
            return call(*arguments, **keywords)

        setattr(owner, name, come)

    def broadcast(self, tensors, group):
        self.fault.reach("finish")
        return ppe_ddp.broadcast(tensors, group)

    def run(self) -> None:
        dist.barrier()
        for step in range(STEPS):
            self.fault.now = step
            try:
                self.step()
                if step >= self.fault.step and self.seen["error"] and not self.seen["next"]:
                    assert_gradients(self.model.module, self.expected)
                    self.seen["next"] = "right"
                    self.write()
            except Exception as error:
                self.note(error)
                if isinstance(error, Committed) and self.fault.phase == "forward":
                    self.model.abort_grad_sync(f"{type(error).__name__}: {error}")
                if self.fault.kind == "crash" and isinstance(error, Committed):
                    raise
                if self.fault.kind in ENDS:
                    break
        self.write()

    def step(self) -> None:
        self.optimizer.zero_grad()
        spoil = SPOILED.get(self.fault.kind)
        is_now = self.fault.is_own and self.fault.now == self.fault.step
        loss = loss_of(self.model, self.rank)
        if is_now and spoil is not None:
            self.fault.is_own = False
            with contextlib.ExitStack() as restored:
                self.fault.commit()
                spoil(self, loss, restored)
        else:
            loss.backward()
        self.fault.reach("optimizer")
        self.optimizer.step()
        if self.checkpointer is not None:
            self.checkpointer.save(self.fault.now)

    def note(self, error: Exception) -> None:
        now = time.monotonic()
        if self.seen["error"]:
            self.seen["next"] = self.seen["next"] or f"{type(error).__name__}: {error}"
        else:
            place = self.fault.folder / "fault"
            committed = float(place.read_text()) if place.exists() else now
            self.seen |= {"seconds": now - committed, "error": type(error).__name__, "text": str(error)}
            self.seen["trace"] = "".join(traceback.format_exception(error))
        self.write()

    def write(self) -> None:
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        self.seen["digest"] = digest.hexdigest()
        temporary = self.fault.folder / f".{self.rank}"
        temporary.write_text(json.dumps(self.seen))
        temporary.rename(self.fault.folder / f"{self.rank}.json")


def _extra_backward(training, loss, _restored):
    loss.backward()
    loss_of(training.model, training.rank).backward()


def _missing_backward(_training, loss, _restored):
    del loss


def _not_a_number(training, loss, _restored):
    (loss * float("nan")).backward()


def _in_packing(training, loss, restored):
    fill = bucket.fill

    def refuse(*_arguments):
        bucket.fill = fill
        _raise_for_memory()

    bucket.fill = refuse
    restored.callback(setattr, bucket, "fill", fill)
    loss.backward()


def _of_another_shape(training, _loss, restored):
    layer = training.model.module.layers[0]
    weight = layer.weight
    layer.weight = nn.Parameter(torch.zeros(weight.shape[0], weight.shape[1] + 1))
    restored.callback(setattr, layer, "weight", weight)
    training.optimizer.zero_grad()
    training.model(data(5, layer.weight.shape[1], rank=training.rank), training.rank).sum().backward()


def _of_another_dtype(training, _loss, restored):
    module = training.model.module.double()
    restored.callback(module.float)
    training.optimizer.zero_grad()
    training.model(data(5, 8, rank=training.rank).double(), training.rank).sum().backward()


SPOILED = {
    "extra backward": _extra_backward,
    "missing backward": _missing_backward,
    "NaN": _not_a_number,
    "out of memory": _in_packing,
    "wrong shape": _of_another_shape,
    "wrong dtype": _of_another_dtype,
}
"""Faults that are a step of another kind."""


def main(kind: str, phase: str, culprit: str, step: str, folder: str) -> None:
    if phase in ("gather", "checkpoint"):
        for name in IMPORTED_FOR_OPTIMIZERS:
            importlib.import_module(name)
    job = ppe_ddp.init_process_group(timeout=TIMEOUT, quiet=True)
    fault = Fault(kind, phase, int(step), Path(folder), is_own=job.rank == int(culprit))
    FaultyTraining(fault).run()
    if kind not in ENDS:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
