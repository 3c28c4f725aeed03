"""Random training programs for a distributed optimizer: plans, made of a seed alone. They run in optim_runners.py.

Program.random(seed)    which optimizer, wrapper and dtypes; for each step its micro-batches, how gradients are
                        cleared, edited, clipped, scaled; after which step a checkpoint is saved and loaded
"""

import dataclasses
from random import Random

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from one_process import data

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=0.1, weight_decay=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), eps=0.1, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, eps=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=0.1, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, eps=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01, eps=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01, eps=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, eps=0.1, lr_decay=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1, eps=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=0.1, centered=True, momentum=0.5),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05, t0=2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),  # looks at signs, which rounding changes: in float64 alone
}
# How a gradient that is not averaged yet, or is, may be cleared; by name, since both sides have their own.
CLEARINGS = ("optimizer", "wrapper", "module", "loop", "another", None)


class Dynamic(nn.Module):
    """Branches of which each forward takes one or none; every kind of parameter, an LSTM and attention."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 5)
        self.read = nn.LSTM(5, 5)
        self.attend = nn.MultiheadAttention(5, 1, bias=False)
        self.branches = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.late = nn.Linear(5, 5)
        self.convolve = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.strided = nn.Parameter(torch.randn(5, 8)[:, ::2])
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.tied = self.stem

    def forward(self, x, image, branch):
        h = torch.tanh(self.stem(x))
        is_wide = h.dtype.itemsize > 2  # a deep model in halves shows too much which way one of them is rounded
        if is_wide:
            h = self.read((h + self.frozen)[None])[0][0]
            h = h + self.attend(h, h, h, need_weights=False)[0]
        if branch < 3:
            h = h + torch.tanh(self.branches[branch](h))
        elif is_wide:
            h = h + checkpoint(self.late, h, use_reentrant=True)
        if branch % 2:
            h = h * self.convolve(image).mean() + self.empty.sum()
        return (h @ self.strided + (h @ self.tied.weight if is_wide else 0)) * self.gain


def loss_of(model, batch, rank):
    """The branch differs from rank to rank and from batch to batch."""
    dtype = next(model.parameters()).dtype
    x, image = data(3, 4, rank=rank, step=batch, dtype=dtype), data(1, 2, 4, 4, rank=rank, step=batch, dtype=dtype)
    return (model(x, image, (batch // 2 + 2 * rank) % 5) + 0.3).square().mean()


@dataclasses.dataclass(frozen=True)
class OptimizerStep:
    """One step of the optimizer.

    Attributes:
        batches: For each backward, whether it is synchronized; the last is.
        clearing: How gradients are cleared before it; None: not at all.
        to_none: What is passed on to it.
        edit: None, or what the gradients in ``param_groups`` are multiplied by, and whether in place.
        max_norm: None, or what is clipped to.
        looks: Whether ``param_groups`` are looked at between the backwards.
        inf: Whether the loss is infinite on rank 0.
        skipped: Whether the optimizer does not step, as where a loss is bad.
    """

    batches: tuple[bool, ...]
    clearing: str | None = "optimizer"
    to_none: bool = True
    edit: tuple[float, bool] | None = None
    max_norm: float | None = None
    looks: bool = False
    inf: bool = False
    skipped: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
    """A training. See the attributes of OptimizerStep."""

    optimizer: str
    dtype: torch.dtype
    master_dtype: torch.dtype
    wrapper: str
    options: dict
    scaled: bool
    steps: tuple[OptimizerStep, ...]
    saved_after: int

    @classmethod
    def random(cls, seed):
        draw = Random(f"program {seed}")
        optimizer = list(OPTIMIZERS)[seed % len(OPTIMIZERS)]
        master_dtype = draw.choice([torch.float32, torch.float64])
        wrapper = draw.choice(["plain", "plain", "megatron"])
        scaled = draw.random() < 0.4
        halves = [torch.bfloat16, torch.float16 if scaled else torch.bfloat16]
        dtype = draw.choice([torch.float64, torch.float32, *halves]) if optimizer != "rprop" else torch.float64
        steps = tuple(_random_step(draw, wrapper, scaled=scaled) for _ in range(draw.randint(3, 5)))
        options = {"bucket_cap_mb": draw.choice([1e-4, 4.0]), "overlap": draw.random() < 0.8}
        if wrapper == "megatron":
            options = {
                "grad_reduce_in_fp32": draw.random() < 0.5,
                "overlap_grad_reduce": draw.random() < 0.5,
                "bucket_size": draw.choice([10, 40, None]),
            }
        saved_after = draw.randrange(len(steps) - 1)
        return cls(optimizer, dtype, master_dtype, wrapper, options, scaled, steps, saved_after)

    @classmethod
    def plain(cls, optimizer, steps=6, **options):
        """Clipping in every second step, micro-batches in one, and nothing else."""
        taken = tuple(OptimizerStep((*[False] * (k == 4), True), max_norm=0.3 if k % 2 else None) for k in range(steps))
        return cls(optimizer, torch.float64, torch.float64, "plain", options, False, taken, steps - 1)


def _random_step(draw, wrapper, *, scaled):
    is_bad = scaled and draw.random() < 0.2
    clearing = "optimizer" if is_bad else draw.choice(CLEARINGS)
    return OptimizerStep(
        batches=(*(draw.random() < 0.4 for _ in range(draw.randrange(3))), True),
        clearing=clearing,
        to_none=wrapper != "plain" or clearing == "loop" or draw.random() < 0.7,
        edit=draw.choice([None, None, (0.5, True), (2.0, False)]),
        max_norm=draw.choice([None, 0.05]),
        looks=draw.random() < 0.5,
        inf=is_bad,
        skipped=draw.random() < 0.15,
    )
