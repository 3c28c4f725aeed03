"""A small GPT that learns to write Python, with a distributed optimizer; stopped, and resumed by other ranks.

    python examples/gpt.py
    mpirun -n 2 python examples/gpt.py
    python -m torch.distributed.run --standalone --nproc_per_node=2 examples/gpt.py

The text is the source of Python's own standard library, byte by byte. The model is in bfloat16 with `--bf16`, with
master weights in float32.

Each rank keeps the optimizer's state (and master weights) of its share of the parameters only. What
`torch.distributed.checkpoint` saves does not know how many ranks there were:

    mpirun -n 4 python examples/gpt.py --out run
    mpirun -n 2 python examples/gpt.py --out run --resume --steps 200
"""

from __future__ import annotations

import argparse
import math
import statistics
import sysconfig
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import ppe_ddp
from command_line import parser_for, positive

WIDTH, HEADS, DEPTH, CONTEXT = 128, 4, 4, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attend = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.attend(self.norms[0](x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(x.shape))
        return x + self.think(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(DEPTH)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        self.apply(start_small)
        self.head.weight = self.tokens.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.places.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def start_small(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def load() -> Tensor:
    """Two million bytes of the standard library, the same on every rank."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(text[: 2 << 20]), dtype=torch.uint8).long()


def batch_of(text: Tensor, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Pieces of the text and the bytes that follow, drawn by ``seed``."""
    starts = torch.randint(len(text) - CONTEXT, (size,), generator=torch.Generator().manual_seed(seed))
    pieces = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def parse_arguments() -> argparse.Namespace:
    parser = parser_for(__doc__)
    parser.add_argument("--steps", type=positive, default=150, help="up to which step, from the very beginning")
    parser.add_argument("--batch", type=positive, default=32, help="pieces of text in a step, of all ranks together")
    parser.add_argument("--bf16", action="store_true", help="parameters and gradients in bfloat16")
    parser.add_argument("--out", type=Path, help="folder for the checkpoint")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order")
    options = parser.parse_args()
    if options.resume and options.out is None:
        parser.error("--resume needs --out, the folder of the checkpoint")
    return options


class Training:
    """Model, optimizer and schedule, and where they are saved."""

    def __init__(self, options: argparse.Namespace, job: ppe_ddp.Job) -> None:
        torch.manual_seed(options.seed)
        module = GPT().to(job.device, torch.bfloat16 if options.bf16 else torch.float32)
        self.model = ppe_ddp.DistributedDataParallel(module)
        # This is all there is to do: any optimizer of torch that works element by element.
        inner = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.01)
        self.optimizer = ppe_ddp.DistributedOptimizer(inner, self.model)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 20))
        self.step = 0

    def save(self, folder: Path) -> None:
        quietly(dcp.save, self._state(), checkpoint_id=folder)

    def resume(self, folder: Path) -> None:
        state = self._state()
        quietly(dcp.load, state, checkpoint_id=folder)  # loads into the tensors of the model and the optimizer
        self.schedule.load_state_dict(state["schedule"])
        self.step = state["step"]

    def _state(self) -> dict[str, object]:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer}
        return {**state, "schedule": self.schedule.state_dict(), "step": self.step}


def quietly(function, *args: object, **kwargs: object) -> None:  # noqa: ANN001
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own
        function(*args, **kwargs)


def train(options: argparse.Namespace, job: ppe_ddp.Job, training: Training, console: Console) -> list[float]:
    """Train to the last step; milliseconds of each."""
    text, milliseconds = load(), []
    mine = slice(job.rank, None, job.world_size)
    while training.step < options.steps:
        begin = time.perf_counter()
        x, y = (part[mine].to(job.device) for part in batch_of(text, options.batch, training.step))
        # The forward waits, module by module, for the parameters that the last step has sent around.
        loss = F.cross_entropy(training.model(x).float().flatten(0, 1), y.flatten())
        loss.backward()
        training.optimizer.clip_grad_norm_(1.0)  # by the norm over all ranks
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.schedule.step()
        milliseconds.append(1e3 * (time.perf_counter() - begin))
        if training.step % 25 == 0 or training.step == options.steps - 1:
            dist.all_reduce(loss := loss.detach().clone())
            console.print(f"step {training.step:4}   loss {loss.item() / job.world_size / math.log(2):.3f} bits a byte")
        training.step += 1
    return milliseconds


def report(milliseconds: list[float], options: argparse.Namespace, training: Training, console: Console) -> None:
    ranks = dist.get_world_size()
    optimizer = training.optimizer
    own = optimizer.master_nbytes
    own += sum(v.nbytes for state in optimizer.state.values() for v in state.values() if v.dim())
    numel = sum(parameter.numel() for parameter in training.model.parameters())
    plain = numel * 4 * (3 if options.bf16 else 2)  # two moments, and master weights where those are needed
    table = Table(title=f"GPT of {numel / 1e6:.2f} million parameters, ranks: {ranks}", title_justify="left")
    for heading in ("", "here", "plain AdamW"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("optimizer state of a rank", f"{own / 2**20:.2f} MiB", f"{plain / 2**20:.2f} MiB")
    table.add_row("ratio", f"{own / plain:.2f}", "1.00")
    console.print(table)
    if milliseconds:
        console.print(f"{options.batch * CONTEXT / statistics.median(milliseconds) * 1e3:.0f} tokens a second")


def entropy(text: Tensor) -> float:
    """Bits a byte for who knows how often each byte occurs, and nothing of their order."""
    shares = torch.bincount(text).double() / len(text)
    return -sum(share * math.log2(share) for share in shares.tolist() if share)


@torch.no_grad()
def sample(module: nn.Module, prompt: str, size: int = 160) -> str:
    """``prompt`` and what the model goes on with."""
    device = next(module.parameters()).device
    text = torch.tensor(list(prompt.encode()), device=device)
    for _ in range(size):
        chances = module(text[None, -CONTEXT:])[0, -1].float().softmax(0)
        text = torch.cat([text, torch.multinomial(chances, 1)])
    return bytes(text.tolist()).decode(errors="replace")


def main() -> None:
    options = parse_arguments()
    job = ppe_ddp.init_process_group()
    console = Console(quiet=job.rank != 0, highlight=False)
    training = Training(options, job)
    if options.resume:
        training.resume(options.out)
        console.print(f"resumed at step {training.step} on {job.world_size} ranks")
    milliseconds = train(options, job, training, console)
    report(milliseconds, options, training, console)
    console.print(f"By counting bytes alone: {entropy(load()):.3f} bits a byte. A sample:")
    if job.rank == 0:
        console.print(sample(training.model.module, "def "), markup=False)
    if options.out is not None:
        training.save(options.out)
        console.print(f"saved: python examples/gpt.py --out {options.out} --resume --steps {training.step + 50}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
