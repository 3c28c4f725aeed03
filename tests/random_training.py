"""Random training of random dynamic models, in which users do to ``.grad`` what they like, against one process.

Every decision is drawn from the seed, so that each rank also knows what all the others do.
"""

import contextlib
from dataclasses import replace
from random import Random

import torch
import torch.distributed as dist
from torch import nn

from law_models import Recipe
from law_steps import Reference, StepKind, TrainingStep, Zeroing, perform
from ppe_ddp import DistributedDataParallel


class Normed(nn.Module):
    """A random dynamic model behind a batch norm."""

    def __init__(self, recipe):
        super().__init__()
        self.norm = nn.BatchNorm1d(recipe.width)
        self.inner = recipe.build()

    def forward(self, batch, path):
        return self.inner(self.norm(batch), path)


# ---------------------------------------------------------------- ways to clear


def clear_nothing(module, optimizer):
    pass


def clear_by_module(module, optimizer):
    module.zero_grad()


def clear_by_loop(module, optimizer):
    for parameter in module.parameters():
        parameter.grad = None


def clear_in_place(module, optimizer):
    module.zero_grad(set_to_none=False)


def clear_by_optimizer(module, optimizer):
    (optimizer or module).zero_grad()


def clear_by_optimizer_in_place(module, optimizer):
    (optimizer or module).zero_grad(set_to_none=False)


def clear_every_other(module, optimizer):
    for parameter in list(module.parameters())[::2]:
        parameter.grad = None


CLEARINGS = [
    clear_nothing,
    clear_by_module,
    clear_by_loop,
    clear_in_place,
    clear_in_place,
    clear_by_optimizer,
    clear_by_optimizer_in_place,
    clear_every_other,
]


# ---------------------------------------------------------------- ways to change, of parameters with gradients


def new_data(parameters, draw):
    for parameter in parameters:
        parameter.grad.data = parameter.grad.data.clone()


def new_tensors(parameters, draw):
    for parameter in parameters:
        parameter.grad = parameter.grad.detach().clone()


def other_tensors_of_the_same_memory(parameters, draw):
    for parameter in parameters:
        parameter.grad = parameter.grad.detach()


def set_memory(parameters, draw):
    for parameter in parameters:
        parameter.grad.set_(parameter.grad.clone())


def resize(parameters, draw):
    for parameter in parameters:
        values = parameter.grad.clone()
        parameter.grad.resize_(0).resize_(parameter.shape).copy_(values)


def another_format(parameters, draw):
    for parameter in parameters:
        if parameter.dim() == 2:
            parameter.grad = parameter.grad.t().contiguous().t()


def edit(parameters, draw):
    for parameter in parameters:
        parameter.grad.mul_(2).add_(0.5)


def own_buffer(parameters, draw):
    for dtype in {parameter.dtype for parameter in parameters}:
        chosen = [parameter for parameter in parameters if parameter.dtype is dtype]
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in chosen])
        for parameter, part in zip(chosen, flat.split([p.numel() for p in chosen]), strict=True):
            parameter.grad = part.view_as(parameter)


def pairs(parameters):
    for k, first in enumerate(parameters):
        for second in parameters[k + 1 :]:
            if first.shape == second.shape and first.dtype is second.dtype:
                yield first, second


def exchange(parameters, draw):
    for first, second in pairs(parameters):
        first.grad, second.grad = second.grad, first.grad


def exchange_data(parameters, draw):
    for first, second in pairs(parameters):
        if first.grad is not second.grad:
            first.grad.data, second.grad.data = second.grad.data, first.grad.data


def share(parameters, draw):
    for first, second in pairs(parameters):
        first.grad = second.grad


def share_memory(parameters, draw):
    for first, second in pairs(parameters):
        first.grad = second.grad.view(second.shape)


def turn(parameters, draw):
    for parameter in parameters:
        if parameter.dim() == 2 and parameter.shape[0] == parameter.shape[1]:
            parameter.grad = parameter.grad.t()


def turn_data(parameters, draw):
    for parameter in parameters:
        if parameter.dim() == 2 and parameter.shape[0] == parameter.shape[1]:
            parameter.grad.data = parameter.grad.data.t()


def require_grad(parameters, draw):
    for parameter in parameters:
        parameter.grad.requires_grad_()


def make_sparse(parameters, draw):
    for parameter in parameters:
        if parameter.dim() == 2 and parameter.numel():
            parameter.grad = parameter.grad.to_sparse(1)


def swap(parameters, draw):
    for parameter in parameters:
        gradient = parameter.grad
        parameter.grad = None
        with contextlib.suppress(RuntimeError):  # torch refuses what something else holds
            torch.utils.swap_tensors(gradient, gradient.clone())
        parameter.grad = gradient


CHANGES = [
    new_data,
    new_tensors,
    other_tensors_of_the_same_memory,
    set_memory,
    resize,
    another_format,
    edit,
    own_buffer,
    exchange,
    exchange_data,
    share,
    share_memory,
    turn,
    turn_data,
    require_grad,
    make_sparse,
    swap,
]


def change_some(module, change, draw):
    """Change the dense gradients of some of the parameters."""
    chosen = [parameter for parameter in module.parameters() if draw.random() < 0.7]
    change([p for p in chosen if p.grad is not None and not p.grad.is_sparse], draw)


# ---------------------------------------------------------------- the training


class Training:
    """One model in training on this rank, and all ranks in one process.

    Args:
        seed: Decides everything.
        group: The ranks; None for all.
    """

    def __init__(self, seed, group=None):
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.draw = draw = Random(f"training {seed}")
        self.seed = seed
        self.recipe = replace(Recipe.random(seed), needs_buffer=draw.random() < 0.5)
        with torch.random.fork_rng():
            self.module = Normed(self.recipe)
        self.options = {
            "overlap": draw.random() < 0.8,
            "gradient_as_bucket_view": draw.random() < 0.7,
            "bucket_cap_mb": draw.choice([0.00001, 0.0002, 25.0]),
        }
        self.wrapper = DistributedDataParallel(self.module, process_group=group, **self.options)
        self.optimizer = torch.optim.SGD(self.module.parameters(), 0.05, foreach=False)
        self.reference = Reference(self.module, self.world_size)
        self.kept = []
        self.problems = []
        self.results = []

    def step(self, number):
        """One step; what is wrong comes into `problems`, what is to be the same on all ranks into `results`."""
        draw, everyone = self.draw, range(self.world_size)
        kind, clear = draw.choice(list(StepKind)), draw.choice(CLEARINGS)
        change = draw.choice([None, *CHANGES])
        if self.world_size == 1 and change in (share, share_memory):
            change = None  # what is not averaged stays shared, which the reference does not do
        alone = [draw.randrange(self.world_size)]
        clears, changes, trains = (draw.choice([everyone, everyone, alone]) for _ in range(3))
        title = f"seed {self.seed} {self.options} step {number}: {kind.name} {clear.__name__} by {list(clears)}, "
        title += f"{change and change.__name__} by {list(changes)}, training {list(trains)}"
        self.detach()
        self.keep()
        self.reference.copy_state(self.module)
        for rank, module in [*enumerate(self.reference.copies), (self.rank, self.module)]:
            if rank in clears:
                clear(module, self.optimizer if module is self.module else None)
            if change is not None and rank in changes:
                change_some(module, change, Random(f"change {self.seed} {number}"))
            module.train(rank in trains)
        step = TrainingStep(kind, Zeroing.NOTHING)
        expected = list(self.reference.expectations(step, self.recipe, number))
        run = perform(step, self.wrapper, self.recipe, number, rank=self.rank, world_size=self.world_size)
        first = len(self.problems)
        self.forget_those_in_use()
        for expectation, _ in zip(expected, run, strict=True):
            self.check(expectation)
        self.problems[first:] = [f"{title}: {problem}" for problem in self.problems[first:]]
        if draw.random() < 0.5:
            self.update()

    def detach(self):
        """Let go of graphs that gradients of one rank may have and those of another have not."""
        for parameter in self.module.parameters():
            if parameter.grad is not None and parameter.grad.requires_grad:
                parameter.grad = parameter.grad.detach()

    def keep(self):
        """Keep references to the dense gradients, as they are now."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None and not p.grad.is_sparse]
        self.kept = [(gradient, gradient.detach().clone()) for gradient in gradients]

    def forget_those_in_use(self):
        """Gradients that are still there, or were changed in place, may become something else."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None and not p.grad.is_sparse]
        used = {gradient.data_ptr() for gradient in gradients}
        self.kept = [(kept, copy) for kept, copy in self.kept if kept.data_ptr() not in used and same(kept, copy)]

    def check(self, expectation):
        tables = {}
        for name, parameter in self.module.named_parameters():
            mean, gradient = expectation.means[name], parameter.grad
            tables[name] = None if gradient is None else gradient.detach().to_dense().clone()
            if mean is None or gradient is None:
                if mean is not gradient:
                    self.problems.append(f"{name} is {gradient}, and should be {mean}")
                continue
            distance = float((tables[name].to(mean.dtype) - mean).abs().max()) if mean.numel() else 0.0
            if not distance <= 1e-5 * (1 + expectation.scales[name]):
                self.problems.append(f"{name} is off by {distance:.3g} of {expectation.scales[name]:.3g}")
        for name, buffer in self.module.named_buffers():
            tables[name] = buffer.clone()
            if not torch.equal(buffer, expectation.buffers[name]):
                self.problems.append(f"buffer {name} is {buffer}, and should be {expectation.buffers[name]}")
        self.problems += ["a gradient that was kept has changed" for kept, copy in self.kept if not same(kept, copy)]
        self.results.append(tables)

    def update(self):
        """Plain gradient descent; gradients that the changes have left as no optimizer takes them are put right."""
        with torch.no_grad():
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.detach().to_dense(), alpha=0.05)


def same(first, second):
    return torch.equal(first.detach().to_dense(), second.to_dense())


def train(seeds, steps=6, single=False):
    """Train with each of `seeds`, on all ranks together or each rank by itself.

    Returns:
        What is wrong, as texts, and what is to be the same on all ranks.
    """
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())] if single else [None]
    group = groups[dist.get_rank()] if single else None
    problems, results = [], []
    for seed in seeds:
        training = Training(seed, group)
        for number in range(steps):
            training.step(number)
        problems += training.problems
        results += training.results
    return problems, results


def differences(results):
    """Where the ranks' results are not the same bits."""
    found = []
    for number, tables in enumerate(zip(*results, strict=True)):
        for name, first in tables[0].items():
            for other in tables[1:]:
                equal = first is other[name] if first is None or other[name] is None else same(first, other[name])
                if not equal:
                    found.append(f"result {number}: {name} differs between ranks")
    return found
