"""Random training programs: the same run by a DistributedOptimizer on ranks, and by plain torch in one process.

Program.random(seed)    which optimizer, wrapper and dtypes; for each step its micro-batches, how gradients are
                        cleared, edited, clipped, scaled; after which step a checkpoint is saved and loaded
Trainer                 runs it on ranks
Reference               runs it in one process: for halves with master weights, as one would write it by hand
"""

import dataclasses
import warnings
from random import Random

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from one_process import data, seeded
from ppe_ddp import DistributedDataParallel, DistributedOptimizer, megatron

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
# Sums in another order: a few units of the last place in each of a few steps, of numbers of about one.
TOLERANCES = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-9},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
}


class Dynamic(nn.Module):
    """Branches of which each forward takes one or none; tied, scalar, empty, strided and channels-last parameters."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 5)
        self.branches = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.convolve = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.strided = nn.Parameter(torch.randn(5, 8)[:, ::2])
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Linear(2, 2)

    def forward(self, x, image, branch):
        h = torch.tanh(self.stem(x))
        if branch < 3:
            h = h + torch.tanh(self.branches[branch](h))
        if branch % 2:
            h = h * self.convolve(image).mean() + self.empty.sum()
        return (h @ self.strided) * self.gain


def loss_of(model, batch, rank):
    """The branch differs from rank to rank and from batch to batch."""
    dtype = next(model.parameters()).dtype
    x, image = data(3, 4, rank=rank, step=batch, dtype=dtype), data(1, 2, 4, 4, rank=rank, step=batch, dtype=dtype)
    return (model(x, image, (batch // 2 + 2 * rank) % 5) + 0.3).square().mean()


@dataclasses.dataclass(frozen=True)
class Step:
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
    clearing: str | None
    to_none: bool
    edit: tuple[float, bool] | None
    max_norm: float | None
    looks: bool
    inf: bool
    skipped: bool


@dataclasses.dataclass(frozen=True)
class Program:
    """A training. See the attributes of Step."""

    optimizer: str
    dtype: torch.dtype
    master_dtype: torch.dtype
    wrapper: str
    options: dict
    scaled: bool
    steps: tuple[Step, ...]
    saved_after: int

    @classmethod
    def random(cls, seed):
        draw = Random(f"program {seed}")
        optimizer = draw.choice(list(OPTIMIZERS))
        # In halves rounding alone leads a few steps astray; they have tests of their own, on numbers that are exact.
        dtype = draw.choice([torch.float64, torch.float32]) if optimizer != "rprop" else torch.float64
        master_dtype = draw.choice([torch.float32, torch.float64])
        wrapper = draw.choice(["plain", "plain", "megatron"])
        scaled = draw.random() < 0.4
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


def _random_step(draw, wrapper, *, scaled):
    is_bad = scaled and draw.random() < 0.2
    # Megatron's buffers add up without what an optimizer has made of its own copies, so each step begins by clearing.
    is_cleared = is_bad or wrapper == "megatron"
    return Step(
        batches=(*(draw.random() < 0.4 for _ in range(draw.randrange(3))), True),
        clearing="optimizer" if is_cleared else draw.choice(CLEARINGS),
        to_none=wrapper != "plain" or draw.random() < 0.7,
        edit=draw.choice([None, None, (0.5, True), (2.0, False)]),
        max_norm=draw.choice([None, 0.05]),
        looks=draw.random() < 0.5,
        inf=is_bad,
        skipped=draw.random() < 0.15,
    )


def make_model(dtype):
    """The same on every rank and in one process."""
    return seeded(Dynamic).to(dtype)


def make_optimizer(name, model):
    """Of all parameters, in two groups."""
    parameters = list(model.parameters())
    return OPTIMIZERS[name]([{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.02}])


def edit(weights, factor, in_place):
    """Change gradients, as a user may between backward and step."""
    for weight in weights:
        if weight.grad is None:
            continue
        if in_place:
            weight.grad.mul_(factor)
        else:
            weight.grad = weight.grad * factor


def weights_of(optimizer):
    """All that it updates."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


class Runner:
    """What both sides do in the same way."""

    def __init__(self, program):
        self.program = program
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=program.scaled)
        self.norms = []

    def run(self, steps):
        for number in steps:
            step = self.program.steps[number]
            self.clear(step)
            for k, synchronized in enumerate(step.batches):
                self.backward(number * 10 + k, step, synchronized=synchronized)
                if step.looks and synchronized:
                    self.gradients_arrive()
            self.gradients_arrive()
            if step.max_norm is not None or step.edit is not None:
                self.scaler.unscale_(self.optimizer)
            if step.edit is not None and not step.inf:
                edit(weights_of(self.optimizer), *step.edit)
            if step.max_norm is not None:
                self.norms.append(self.clip(step.max_norm).double())
            if not step.skipped:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            elif self.program.scaled:
                self.scaler.update(self.scaler.get_scale())
            self.stepped()

    def gradients_arrive(self):
        """Look at the groups, as schedulers do."""
        assert all(group["lr"] > 0 for group in self.optimizer.param_groups)

    def stepped(self):
        """After each step."""


class Trainer(Runner):
    """Runs a program on the ranks of a group."""

    def __init__(self, program, group=None):
        super().__init__(program)
        self.rank = dist.get_rank(group)
        module = make_model(program.dtype)
        if program.wrapper == "plain":
            self.wrapper = DistributedDataParallel(module, process_group=group, **program.options)
        else:
            config = megatron.DistributedDataParallelConfig(use_distributed_optimizer=True, **program.options)
            self.wrapper = megatron.DistributedDataParallel(None, config, module, data_parallel_group=group)
        self.module = module
        self.inner = make_optimizer(program.optimizer, module)
        self.optimizer = DistributedOptimizer(self.inner, self.wrapper, master_dtype=program.master_dtype)
        self.another = torch.optim.SGD(module.parameters(), lr=0.0)

    def clear(self, step):
        if self.program.wrapper == "megatron":
            if step.clearing is not None:
                self.wrapper.zero_grad_buffer()
                self.optimizer.zero_grad()
        elif step.clearing == "loop":
            for parameter in self.module.parameters():
                parameter.grad = None
        elif step.clearing is not None:
            getattr(self, step.clearing).zero_grad(set_to_none=step.to_none)

    def backward(self, batch, step, *, synchronized):
        is_inf = step.inf and self.rank == 0
        if synchronized:
            loss = loss_of(self.wrapper, batch, self.rank)
            self.scaler.scale(loss * float("inf") if is_inf else loss).backward()
            if self.program.wrapper == "megatron":
                self.wrapper.finish_grad_sync()
            return
        with self.wrapper.no_sync():
            self.scaler.scale(loss_of(self.wrapper, batch, self.rank)).backward()

    def clip(self, max_norm):
        return self.optimizer.clip_grad_norm_(max_norm)

    def state(self):
        """Parameters, and the state of the optimizer: whole, flattened, by name."""
        self.optimizer.synchronize()
        saved = self.optimizer.state_dict()
        found = {name: parameter.detach().clone() for name, parameter in self.module.named_parameters()}
        for name, entries in saved["state"].items():
            if saved["exists"][name]:
                found |= {f"{name}/{key}": _whole(value) for key, value in entries.items()}
        return found

    def save(self, path):
        _quietly(dcp.save, {"model": self.wrapper.state_dict(), "optimizer": self.optimizer}, checkpoint_id=path)
        return self.scaler.state_dict()

    def load(self, path, scaler):
        model = self.wrapper.state_dict()
        _quietly(dcp.load, {"model": model, "optimizer": self.optimizer}, checkpoint_id=path)
        self.wrapper.load_state_dict(model)
        self.scaler.load_state_dict(scaler)


class Reference(Runner):
    """Runs a program in one process, on the batches of all ranks."""

    def __init__(self, program, world_size):
        super().__init__(program)
        self.world_size = world_size
        self.module = make_model(program.dtype)
        self.parameters = list(self.module.parameters())
        wide = torch.promote_types(program.dtype, program.master_dtype)
        self.has_masters = wide is not program.dtype
        self.twin = self.module
        if self.has_masters:
            self.twin = make_model(program.dtype).to(wide)
        self.masters = list(self.twin.parameters())
        # torch's fused kernel for CPUs takes a strided parameter for one without holes.
        self.optimizer = make_optimizer(program.optimizer.replace("fused", "foreach"), self.twin)

    def clear(self, step):
        if step.clearing is not None:
            self.optimizer.zero_grad(set_to_none=step.to_none)

    def backward(self, batch, step, *, synchronized):
        for rank in range(self.world_size):
            loss = loss_of(self.module, batch, rank)
            is_inf = step.inf and synchronized and rank == 0
            loss = self.scaler.scale(loss * float("inf") if is_inf else loss)
            if self.has_masters:
                loss.backward()
                self._move(1 / self.world_size)
            else:
                (loss / self.world_size).backward()

    def _move(self, share):
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                gradient = gradient.to(master.dtype) * share
                master.grad = gradient if master.grad is None else master.grad + gradient

    def clip(self, max_norm):
        return nn.utils.clip_grad_norm_(self.masters, max_norm)

    def stepped(self):
        if self.has_masters:
            with torch.no_grad():
                for parameter, master in zip(self.parameters, self.masters, strict=True):
                    parameter.copy_(master)

    def state(self):
        found = {name: parameter.detach().clone() for name, parameter in self.module.named_parameters()}
        for name, master in self.twin.named_parameters():
            for key, value in self.optimizer.state.get(master, {}).items():
                is_cut = torch.is_tensor(value) and value.dim() == master.dim() and key not in ("step", "mu", "eta")
                is_cut = is_cut and key != "mu_product" and value.shape == master.shape
                found[f"{name}/{key}"] = _in_memory_order(value, master) if is_cut else value
        return found


def _in_memory_order(value, parameter):
    strides = torch.empty_like(parameter, device="meta").stride()
    laid_out = torch.empty_strided(parameter.shape, strides, dtype=value.dtype)
    return laid_out.copy_(value).as_strided((value.numel(),), (1,))


def _whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _quietly(function, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own
        function(*args, **kwargs)


def compare(ours, theirs):
    """Parameters, state and norms are the same."""
    tolerance = TOLERANCES[ours.program.dtype]
    for norm, want in zip(ours.norms, theirs.norms, strict=True):
        torch.testing.assert_close(norm, want, equal_nan=True, **tolerance)  # of a step that is skipped
    found, expected = ours.state(), theirs.state()
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        got = found[name]
        is_tensor = torch.is_tensor(want)
        if is_tensor:
            want, got = want.double(), got.double().view_as(want)
        where = f"{name} of {ours.program}"
        torch.testing.assert_close(got, want, **tolerance, msg=lambda text, where=where: f"{where}: {text}")
    assert ours.scaler.get_scale() == theirs.scaler.get_scale()


def first_half(seed, path):
    """Run the program up to where it is saved, and hold it to one process; what the scaler's state is."""
    program = Program.random(seed)
    ours, theirs = Trainer(program), Reference(program, dist.get_world_size())
    before = range(program.saved_after + 1)
    ours.run(before)
    theirs.run(before)
    compare(ours, theirs)
    return ours.save(path)


def second_half(seed, path, scaler, saved_by):
    """Load it on these ranks, which may be more or fewer, and run the rest."""
    program = Program.random(seed)
    ours, theirs = Trainer(program), Reference(program, saved_by)
    ours.load(path, scaler)
    theirs.run(range(program.saved_after + 1))
    theirs.optimizer.zero_grad()
    theirs.world_size = dist.get_world_size()
    theirs.norms.clear()
    rest = range(program.saved_after + 1, len(program.steps))
    for runner in (ours, theirs):
        runner.run(rest)
    compare(ours, theirs)
