"""pytorch-pfn-extras' Trainer, with its extensions, around ppe_ddp: one import is another one.

    python examples/ppe_trainer.py
    python -m torch.distributed.run --standalone --nproc_per_node=2 examples/ppe_trainer.py --out result
    python -m torch.distributed.run --standalone --nproc_per_node=2 examples/ppe_trainer.py --out result \
        --resume --epochs 30

In a step, each rank drops half of the layers of the model, and each rank other ones. Rank 0 writes the log and
the snapshots and draws the progress bar; all ranks load the snapshot.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import pytorch_pfn_extras as ppe
import torch
import torch.distributed as dist
from pytorch_pfn_extras.training import extensions
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import ppe_ddp
from command_line import parser_for, positive

# This is the change. It was:
# from pytorch_pfn_extras.nn.parallel import DistributedDataParallel
from ppe_ddp import DistributedDataParallel


class StochasticDepth(nn.Module):
    """Returns what ppe's Trainer works with: a dict of the loss, and of anything to report."""

    def __init__(self, width: int = 128, depth: int = 8) -> None:
        super().__init__()
        self.stem = nn.Linear(64, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.stem(images)
        for layer in self.layers:
            if not self.training:
                x = x + layer(x) / 2
            elif torch.rand(()) < 0.5:
                x = x + layer(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits, labels)
        accuracy = (logits.argmax(1) == labels).float().mean()
        prefix = "train" if self.training else "test"
        ppe.reporting.report({f"{prefix}/loss": loss.item(), f"{prefix}/accuracy": accuracy.item()})
        return {"loss": loss}


def load() -> tuple[Dataset, Dataset]:
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 8 - 1, labels, test_size=0.2, stratify=labels, random_state=0)
    train_images, test_images, train_labels, test_labels = map(torch.as_tensor, split)
    return (
        TensorDataset(train_images.float(), train_labels),
        TensorDataset(test_images.float(), test_labels),
    )


def loaders(batch: int) -> tuple[DataLoader, DataLoader]:
    train, test = load()
    return (
        DataLoader(train, batch, sampler=DistributedSampler(train), drop_last=True),
        DataLoader(test, len(test), sampler=ppe.distributed.DistributedValidationSampler(test, shuffle=False)),
    )


class PlainText:
    """Standard output without the escape sequences that PrintReport writes, for output that is no terminal."""

    def write(self, text: str) -> None:
        sys.stdout.write(text.replace("\033[J", ""))

    def flush(self) -> None:
        sys.stdout.flush()


def parse_arguments() -> argparse.Namespace:
    parser = parser_for(__doc__)
    parser.add_argument("--epochs", type=positive, default=20, help="where to stop, counted from the first run")
    parser.add_argument("--batch", type=positive, default=32, help="images of a rank in a step")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order")
    parser.add_argument("--out", help="folder of snapshots and log; a temporary one if not given")
    parser.add_argument("--resume", action="store_true", help="go on from the newest snapshot in --out")
    options = parser.parse_args()
    if options.resume and options.out is None:
        parser.error("--resume needs --out, the folder of the run to go on with")
    return options


def output_folder(wanted: str | None, job: ppe_ddp.Job) -> str:
    """The folder wanted, or a temporary one: rank 0's choice, since it writes the snapshots that all read."""
    folder = [wanted or (tempfile.mkdtemp(prefix="ppe_trainer_") if job.rank == 0 else "")]
    dist.broadcast_object_list(folder)
    return folder[0]


def show_progress(trainer: ppe.training.Trainer, epochs: int) -> None:
    is_terminal = sys.stdout.isatty()
    trainer.extend(
        lambda manager: print(f"starts at iteration {manager.iteration}"),
        name="start",
        trigger=(epochs + 1, "epoch"),  # not again
        call_before_training=True,
    )
    trainer.extend(extensions.LogReport())
    entries = ["epoch", "iteration", "train/loss", "train/accuracy", "test/accuracy"]
    trainer.extend(extensions.PrintReport(entries, out=sys.stdout if is_terminal else PlainText()))
    if is_terminal:
        trainer.extend(extensions.ProgressBar(update_interval=5))


def main() -> None:
    options = parse_arguments()
    job = ppe_ddp.init_process_group()
    out = output_folder(options.out, job)
    torch.manual_seed(options.seed)
    model = DistributedDataParallel(StochasticDepth())
    ppe.to(model, job.device)
    torch.manual_seed(1000 * (options.seed + 1) + job.rank)  # from here on each rank drops other layers
    train_loader, test_loader = loaders(options.batch)

    trainer = ppe.engine.create_trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        options.epochs,
        evaluator=ppe.engine.create_evaluator(model, distributed=True, device=job.device),
        device=job.device,
        out_dir=out,
    )
    # Rank 0 writes, and all ranks read: the state dict has the names of the bare module, so a snapshot made with
    # ppe's own wrapper, or by one process, would do as well.
    trainer.extend(extensions.snapshot(saver_rank=0, n_retains=2, autoload=options.resume))
    if job.rank == 0:
        show_progress(trainer, options.epochs)
    trainer.run(train_loader, test_loader)
    if job.rank == 0:
        last = json.loads(Path(out, "log").read_text())[-1]
        print(f"test accuracy {last['test/accuracy']:.1%} after {last['iteration']} iterations; all in {out}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
