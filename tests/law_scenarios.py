"""Random models with two training steps and something plugged in each, which the laws have to hold for on any ranks."""

import torch.distributed as dist

import ppe_ddp
from ppe_ddp.testing.cases import Case, Plugs
from ppe_ddp.testing.models import Recipe
from ppe_ddp.testing.steps import StepKind, TrainingStep, Zeroing

KINDS = list(StepKind)
ZEROINGS = list(Zeroing)


def in_place_mean(gradients, group):
    for gradient in gradients:
        dist.all_reduce(gradient, group=group)
        gradient.div_(dist.get_world_size(group))


PLUGS = [Plugs(), Plugs(in_place_mean), Plugs(ppe_ddp.overlapped(in_place_mean))]


def scenario(seed):
    """The case of this number, and what is plugged in."""
    steps = (
        TrainingStep(KINDS[seed % len(KINDS)], ZEROINGS[seed % len(ZEROINGS)]),
        TrainingStep(KINDS[(3 * seed + 1) % len(KINDS)]),
    )
    return Case(Recipe.random(seed), steps), PLUGS[seed % len(PLUGS)]


def scenarios(count):
    """The first so many."""
    return map(scenario, range(count))
