"""A reduce function of one's own: one bit for each gradient, and nothing is lost.

    python examples/custom_reduce.py
    python -m torch.distributed.run --standalone --nproc_per_node=2 examples/custom_reduce.py

Of a parameter's gradient a rank sends the signs, and one number: the mean size. What that leaves out is kept, and
added to this rank's next gradient of the same parameter: it comes late, but it comes (1-bit SGD, Seide et al.
2014; error feedback, Karimireddy et al. 2019). A network with stochastic depth learns scikit-learn's digits, once
with the default reduce function and once with this one.
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


class OneBit:
    """A reduce function for float32: averages a bucket over the ranks, in place, by the signs of its gradients.

    Attributes:
        residuals: What this rank has not sent yet, by the name of the parameter.
        sent_nbytes: Bytes that this rank has sent, all in all.
    """

    def __init__(self) -> None:
        self.residuals: dict[str, Tensor] = {}
        self.sent_nbytes = 0

    def __call__(self, gradients: ppe_ddp.GradBucket, group: dist.ProcessGroup | None) -> None:
        # In each step there are other parameters in a bucket, so its index says nothing: state belongs to names. A
        # gradient that only another rank has is here as zeros, and lets this rank send some of its residual.
        wanted = [g + self.residuals.get(name, 0) for name, g in zip(gradients.names(), gradients, strict=True)]
        scales = torch.stack([tensor.abs().mean() for tensor in wanted])
        message = torch.cat([scales.view(torch.uint8), pack(torch.cat([t.flatten() for t in wanted]) >= 0)])

        # Every rank has the same buckets in the same order, so that messages have the same size everywhere.
        messages = [torch.empty_like(message) for _ in range(dist.get_world_size(group))]
        dist.all_gather(messages, message, group=group)
        self.sent_nbytes += message.nbytes

        # All ranks add the same numbers in the same order: the results are the same to the last bit.
        sizes = torch.tensor([gradient.numel() for gradient in gradients], device=scales.device)
        decoded = [decode(received, sizes) for received in messages]
        gradients.buffer().copy_(torch.stack(decoded).mean(0))
        own = decoded[dist.get_rank(group)].split(sizes.tolist())
        for name, tensor, sent in zip(gradients.names(), wanted, own, strict=True):
            self.residuals[name] = tensor - sent.view_as(tensor)


def pack(bits: Tensor) -> Tensor:
    """Eight bits (N,) in a byte."""
    padded = F.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def decode(message: Tensor, sizes: Tensor) -> Tensor:
    """The flat gradients that a message stands for: a scale for each tensor, and then a sign for each element."""
    scales, packed = message.split([4 * len(sizes), len(message) - 4 * len(sizes)])
    bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    signs = 2.0 * bits.flatten()[: int(sizes.sum())] - 1
    return signs * scales.view(torch.float32).repeat_interleave(sizes)


class StochasticDepth(nn.Module):
    def __init__(self, width: int = 256, depth: int = 8) -> None:
        super().__init__()
        self.stem = nn.Linear(64, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for layer in self.layers:
            if not self.training:
                x = x + layer(x) / 2
            elif torch.rand(()) < 0.5:
                x = x + layer(x)
        return self.head(x)


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 8 - 1, labels, test_size=0.2, stratify=labels, random_state=0)
    train_images, test_images, train_labels, test_labels = map(torch.as_tensor, split)
    return train_images.float(), train_labels, test_images.float(), test_labels


class Result(NamedTuple):
    accuracy: float
    median_ms: float
    nbytes: float


def train(
    data: tuple[Tensor, ...], function: ppe_ddp.ReduceFunction | None, options: argparse.Namespace, title: str
) -> Result:
    """The accuracy, the time of a step, and the bytes of gradients that were there to be sent in a step."""
    images, labels, test_images, test_labels = data
    rank, world_size = dist.get_rank(), dist.get_world_size()
    console = Console(quiet=rank != 0, highlight=False)
    torch.manual_seed(options.seed)
    model = ppe_ddp.DistributedDataParallel(StochasticDepth().to(images.device), reduce_function=function)
    steps = len(images) // (options.batch * world_size)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=options.epochs * steps)
    torch.manual_seed(1000 * (options.seed + 1) + rank)  # from here on, each rank drops other layers
    order = torch.Generator().manual_seed(options.seed)
    milliseconds, nbytes = [], []
    bar = {"console": console, "transient": True, "disable": not console.is_terminal}
    for epoch in track(range(1, options.epochs + 1), title, **bar):
        mine = torch.randperm(len(images), generator=order)[rank::world_size]
        for batch in mine.split(options.batch)[:steps]:
            begin = time.perf_counter()
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            milliseconds.append(1e3 * (time.perf_counter() - begin))
            nbytes.append(model.trace().gradient_nbytes)
        if epoch % 5 == 0 or epoch == options.epochs:
            console.print(f"{title:8} epoch {epoch:3}   loss {loss.item():.3f}")
    model.eval()
    with torch.no_grad():
        right = (model(test_images).argmax(1) == test_labels).float().mean()
    return Result(right.item(), statistics.median(milliseconds), statistics.fmean(nbytes))


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--epochs", type=positive, default=15, help="how often to go through the data")
    parser.add_argument("--batch", type=positive, default=32, help="images of a rank in a step")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order")
    options = parser.parse_args()
    job = ppe_ddp.init_process_group()
    data = tuple(tensor.to(job.device) for tensor in load())

    default = train(data, None, options, "default")
    one_bit = OneBit()
    # `one_bit` returns when it is done. On a thread of its own it runs while backward goes on.
    compressed = train(data, ppe_ddp.overlapped(one_bit), options, "one bit")

    if job.rank == 0:
        steps = options.epochs * (len(data[0]) // (options.batch * job.world_size))
        # The trace knows what a function was given; what it has made of that, it knows itself.
        sent = one_bit.sent_nbytes / steps if job.world_size > 1 else 0
        table = Table(title=f"Digits, ranks: {job.world_size}", title_justify="left")
        for heading in ("", "default", "one bit"):
            table.add_column(heading, justify="right" if heading else "left")
        table.add_row("test accuracy", f"{default.accuracy:.1%}", f"{compressed.accuracy:.1%}")
        table.add_row("median step", f"{default.median_ms:.1f} ms", f"{compressed.median_ms:.1f} ms")
        table.add_row("sent in a step", f"{default.nbytes / 1024:.0f} KiB", f"{sent / 1024:.0f} KiB")
        Console().print(table)
        print(f"{default.nbytes / sent:.0f} times less was sent." if sent else "A lone process has nothing to send.")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
