"""A training that is killed in the middle, and goes on bit by bit as if it had not been.

    python examples/survive_kill.py
    mpirun -n 2 python examples/survive_kill.py --folder out
    torchrun --standalone --nproc_per_node=2 --max-restarts=2 examples/survive_kill.py --folder out

The last rank kills itself by SIGKILL, twice: between two steps, and while a checkpoint is being written. torchrun
starts the ranks again; mpirun does not, so the command is to be given again, as a batch system does it; without a
launcher the example starts mpirun, or torchrun, and does that itself. In the end the same ranks train once more,
without an interruption, and compare: the parameters have the same bits.

Random are the paths through the network, dropout and the order of the data, each rank's own; the order of summation
too depends on what came before. `ppe_ddp.Checkpointer` keeps all of it.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ppe_ddp
from command_line import parser_for, positive
from ppe_ddp.launchers import detect


class RoutedNetwork(nn.Module):
    """A path of random branches, another one in each step and on each rank, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(16, 64), nn.Linear(64, 1)
        self.stages = nn.ModuleList(nn.ModuleList(nn.Linear(64, 64) for _ in range(3)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = nn.functional.dropout(x + random.choice(stage)(x).tanh(), 0.1, self.training)
        return self.head(x)


class Training:
    """Everything that a step changes, made from the same seeds whenever a job starts."""

    def __init__(self, job: ppe_ddp.Job, batch: int) -> None:
        torch.manual_seed(0)
        self.model = ppe_ddp.DistributedDataParallel(RoutedNetwork().to(job.device))
        self.optimizer = ppe_ddp.DistributedOptimizer(torch.optim.AdamW, self.model, lr=3e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 100)
        self.parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        self.device, self.batch = job.device, batch
        self.teacher = torch.randn(16, generator=torch.Generator().manual_seed(1)).to(job.device)
        random.seed(job.rank)
        torch.manual_seed(job.rank)

    def step(self) -> float:
        x = torch.randn(self.batch, 16, device=self.device)
        loss = (self.model(x).squeeze(1) - (x @ self.teacher).sin()).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.item()


class KilledInTheMiddle:
    """Kills this process once it has come to a step; what has happened is noted in files, as processes forget it."""

    def __init__(self, folder: Path, job: ppe_ddp.Job) -> None:
        self.folder, self.rank = folder, job.rank
        self.is_meant = job.rank == job.world_size - 1

    def between_steps(self, step: int, at: int) -> None:
        if step == at and self.is_first("between"):
            print(f"rank {self.rank} kills itself after step {step + 1}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    def while_saving(self, step: int, at: int) -> None:
        if step >= at and self.is_first("saving"):
            print(f"rank {self.rank} kills itself while it saves step {step + 1}", flush=True)
            os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # half of the checkpoint is there by then

    def is_first(self, name: str) -> bool:
        note = self.folder / f"killed-{name}"
        if not self.is_meant or note.exists():
            return False
        note.touch()
        return True


def train_and_survive(options: argparse.Namespace, job: ppe_ddp.Job) -> Training:
    training, kill = Training(job, options.batch), KilledInTheMiddle(options.folder, job)
    checkpointer = ppe_ddp.Checkpointer(options.folder / "checkpoints", training.parts, keep=2)
    restored = checkpointer.load()
    start = 0 if restored is None else restored.step
    if job.rank == 0:
        print(f"start at step {start}", flush=True)
    for step in range(start, options.steps):
        training.step()
        kill.between_steps(step, options.steps // 2)
        if (step + 1) % options.every == 0:
            kill.while_saving(step, 2 * options.steps // 3)
            checkpointer.save(step + 1, position={"step": step + 1})
    return training


def train_in_one_go(options: argparse.Namespace, job: ppe_ddp.Job) -> Training:
    training = Training(job, options.batch)
    for _ in range(options.steps):
        training.step()
    return training


def same_bits(one: Training, other: Training) -> bool:
    """Whether two trainings have come to the same on every rank."""
    pairs = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    same = torch.tensor(int(all(torch.equal(a, b) for a, b in pairs)))
    dist.all_reduce(same, dist.ReduceOp.MIN)
    return bool(same)


def parse_arguments() -> argparse.Namespace:
    parser = parser_for(__doc__)
    parser.add_argument("--steps", type=positive, default=60, help="how many steps to train")
    parser.add_argument("--every", type=positive, default=7, help="after how many steps to save")
    parser.add_argument("--batch", type=positive, default=32, help="examples of a rank in a step")
    parser.add_argument("--folder", type=Path, default=None, help="for checkpoints; the same when it is started again")
    return parser.parse_args()


def start_until_it_ends(folder: Path) -> None:
    """Start ranks again and again, as a batch system would, until they end well."""
    mpirun = shutil.which("mpirun", path=Path(sys.executable).parent) or shutil.which("mpirun")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--no-python"]
    launcher = [mpirun, "-n", "2"] if mpirun else torchrun
    for _ in range(4):
        code = subprocess.run([*launcher, sys.executable, *sys.argv, "--folder", str(folder)], check=False).returncode
        if code == 0:
            return
        print(f"the job has ended with code {code}: start it again", flush=True)
    sys.exit("the job has never come to its end")


def main() -> None:
    options = parse_arguments()
    if detect(os.environ).launcher == "alone" and not dist.is_initialized():
        with tempfile.TemporaryDirectory(prefix="survive_kill_") as folder:
            start_until_it_ends(options.folder or Path(folder))
        return
    if options.folder is None:
        sys.exit("--folder is needed under a launcher: it is where the next start finds the checkpoints")
    job = ppe_ddp.init_process_group(timeout=60)
    options.folder.mkdir(parents=True, exist_ok=True)
    survived, whole = train_and_survive(options, job), train_in_one_go(options, job)
    is_same = same_bits(survived, whole)
    if job.rank == 0:
        kills = len(list(options.folder.glob("killed-*")))
        verb = "the same bits as" if is_same else "OTHER BITS than"
        print(f"killed {kills} times, and in the end {verb} without an interruption")
    dist.destroy_process_group()
    sys.exit(0 if is_same else 1)


if __name__ == "__main__":
    main()
