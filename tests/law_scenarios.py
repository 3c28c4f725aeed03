"""Random models with two training steps and something plugged in each, which the laws have to hold for on any ranks."""

import itertools

import torch.distributed as dist

import ppe_ddp
from law_models import Recipe
from law_steps import StepKind, TrainingStep, Zeroing
from laws import Case, Variant, breaches, observe
from one_process import in_place_mean
from ppe_ddp.testing import ConformanceError
from ppe_ddp.testing.probes import Plugs

KINDS = list(StepKind)
ZEROINGS = list(Zeroing)


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


def check_case(case, variant=None, plugs=None, *, device="cpu"):
    """Hold one case to laws 1 to 3, from inside a rank; raises the same ConformanceError on every rank."""
    seen = observe(case, variant or Variant(), plugs, device=device)
    seen.gradients = {}
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, seen)
    found = breaches(everyone)
    if found:
        raise ConformanceError("\n".join([seen.title, *found]))


def every_variant(*, common_path=False):
    """All combinations of options; without negotiation only for models with a common path."""
    sizes = (0.00001, 0.0002, 25.0)  # all but the smallest where they lie, several buckets, one bucket
    negotiations = (True, False) if common_path else (True,)
    return [Variant(*options) for options in itertools.product((True, False), (False, True), sizes, negotiations)]
