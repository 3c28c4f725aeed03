"""Handwritten digits by a network that is another one in every step and on every rank.

    python examples/digits.py
    python -m torch.distributed.run --standalone --nproc_per_node=2 examples/digits.py

Six stages of four branches each. In a step, a rank sends its batch through one branch of a stage (routing),
jumps over some stages (stochastic depth) and may leave early (exit heads): it uses a small part of the
parameters, and the other ranks use another part. The data are the 1797 images of 8 x 8 pixels that come with
scikit-learn.

For such a model torch's DistributedDataParallel needs `find_unused_parameters=True`, and averages zeros for
all that was not used. ppe_ddp is told nothing, and sends the gradients that exist on some rank.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

import ppe_ddp
from command_line import parser_for, positive

WIDTH, STAGES, BRANCHES, EXIT_EVERY, SURVIVAL = 256, 6, 4, 2, 0.8


class Path(NamedTuple):
    """The way of one batch: a branch for each stage (None jumps over it), and the head where it leaves."""

    branches: list[int | None]
    head: int


def draw_path(random: torch.Generator) -> Path:
    head = int(torch.randint(STAGES // EXIT_EVERY, (), generator=random))
    depth = EXIT_EVERY * (head + 1)
    branches = torch.randint(BRANCHES, (depth,), generator=random).tolist()
    kept = (torch.rand(depth, generator=random) < SURVIVAL).tolist()
    return Path([branch if keep else None for branch, keep in zip(branches, kept, strict=True)], head)


class RoutedNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, WIDTH)
        self.stages = nn.ModuleList(nn.ModuleList(make_branch() for _ in range(BRANCHES)) for _ in range(STAGES))
        self.heads = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)) for _ in range(STAGES // EXIT_EVERY)
        )

    def forward(self, images: Tensor, path: Path | None = None) -> Tensor:
        """Logits by one path; without a path, by the average of the branches at the full depth."""
        x = self.stem(images)
        if path is None:
            for stage in self.stages:
                x = x + SURVIVAL * torch.stack([branch(x) for branch in stage]).mean(0)
            return self.heads[-1](x)
        for stage, branch in zip(self.stages, path.branches, strict=False):
            if branch is not None:
                x = x + stage[branch](x)
        return self.heads[path.head](x)


def make_branch() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (N, 64) from -1 to 1 and labels (N,), for training and for the test."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 8 - 1, labels, test_size=0.2, stratify=labels, random_state=0)
    train_images, test_images, train_labels, test_labels = map(torch.as_tensor, split)
    return train_images.float(), train_labels, test_images.float(), test_labels


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor, job: ppe_ddp.Job) -> float:
    """Each rank classifies its share of the images, and the counts are summed."""
    share = slice(job.rank, None, job.world_size)
    right = (model(images[share]).argmax(1) == labels[share]).sum()
    dist.all_reduce(right)
    return right.item() / len(labels)


def parse_arguments() -> argparse.Namespace:
    parser = parser_for(__doc__)
    parser.add_argument("--epochs", type=positive, default=30, help="how often to go through the data")
    parser.add_argument("--batch", type=positive, default=32, help="images of a rank in a step")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order")
    return parser.parse_args()


class Figures(NamedTuple):
    """What was measured in each step, and the accuracy at the end."""

    milliseconds: list[float]
    used_nbytes: list[int]
    sent_nbytes: list[int]
    accuracy: float


def train(options: argparse.Namespace, job: ppe_ddp.Job, model: nn.Module, console: Console) -> Figures:
    images, labels, test_images, test_labels = (tensor.to(job.device) for tensor in load())
    steps = len(images) // (options.batch * job.world_size)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=options.epochs * steps)

    # The ranks share the order of the images, to divide them; the paths are each rank's own.
    order = torch.Generator().manual_seed(options.seed)
    random = torch.Generator().manual_seed(1000 * (options.seed + 1) + job.rank)

    milliseconds, used, sent = [], [], []
    bar = {"console": console, "transient": True, "disable": not console.is_terminal}
    for epoch in track(range(1, options.epochs + 1), "training", **bar):
        mine = torch.randperm(len(images), generator=order)[job.rank :: job.world_size]
        for batch in mine.split(options.batch)[:steps]:
            begin = time.perf_counter()
            loss = F.cross_entropy(model(images[batch], draw_path(random)), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            # Now `.grad` is the mean over the ranks, in which a rank that has none counts as zero. Where no
            # rank came by, it stays None: the optimizer leaves that branch and its momentum alone.
            optimizer.step()
            schedule.step()
            milliseconds.append(1e3 * (time.perf_counter() - begin))
            used.append(sum(p.nbytes for p in model.parameters() if p.grad is not None))
            trace = model.trace()
            sent.append(trace.gradient_nbytes + trace.control_nbytes)
        if epoch % 5 == 0 or epoch == options.epochs:
            right = accuracy(model, test_images, test_labels, job)
            console.print(f"epoch {epoch:3}   loss {loss.item():.3f}   test accuracy {right:6.1%}")
    return Figures(milliseconds, used, sent, right)


def report(figures: Figures, job: ppe_ddp.Job, model: nn.Module, console: Console) -> None:
    everything = sum(p.nbytes for p in model.parameters())
    table = Table(title=f"Digits, ranks: {job.world_size}", title_justify="left")
    for heading in ("", "ppe_ddp"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("test accuracy", f"{figures.accuracy:.1%}")
    table.add_row("median step", f"{statistics.median(figures.milliseconds):.1f} ms")
    if job.world_size > 1:
        sent = statistics.fmean(figures.sent_nbytes)
        table.add_row("sent in a step", f"{sent / 2**20:.2f} MiB")
        table.add_row("all gradients, which torch DDP sends", f"{everything / 2**20:.2f} MiB")
        table.add_row("ratio", f"{sent / everything:.2f}")
    console.print(table)
    used = statistics.fmean(figures.used_nbytes) / everything
    console.print(f"A step used {used:.0%} of the parameters, on one rank or another.")
    if job.world_size > 1:
        console.print("Only their gradients were sent; torch DDP would have sent all of them.")


def main() -> None:
    options = parse_arguments()
    job = ppe_ddp.init_process_group()
    console = Console(quiet=job.rank != 0, highlight=False)
    torch.manual_seed(options.seed)
    # This is all there is to do: no flag for paths that change, none for branches that are left unused.
    model = ppe_ddp.DistributedDataParallel(RoutedNetwork().to(job.device))
    report(train(options, job, model, console), job, model, console)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
