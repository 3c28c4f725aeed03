"""Programs that have failed once, with a bug of the library's or a planted one, each in several orders of events."""

import dataclasses
import math

import torch

from law_models import Kind, LayerRecipe, Recipe
from law_steps import StepKind, TrainingStep, Zeroing

from .faults import Fault, Where
from .outer import Outer
from .program import Program
from .split import SplitProgram
from .wrappers import Wrapping

_RECIPE = Recipe(1, (LayerRecipe(Kind.LINEAR), LayerRecipe(Kind.SKIPPED)))
_STEP = TrainingStep(StepKind.ONE_BACKWARD)
_ABSENT = TrainingStep(StepKind.ABSENT)
_TORN = Fault(0, 1, Where.LOSS, 0)


def _program(seed, nodes, faults, *, count=1, wrapping=Wrapping.PLAIN, step=_STEP, **options):
    options = {"forward_sync_buffers": True, "overlap": True, "bucket_cap_mb": 25.0, **options}
    return Program(seed, len(nodes), (_RECIPE,) * count, options, wrapping, (step, step), nodes, faults)


def _split(seed, shape, fault, *, chunks=1, nodes=None, **options):
    names = ("overlap", "is_sharded", "gathers_late", "clips", "scales", "counts_tokens", "looks_for_nan")
    names += ("has_small_buckets",)
    shape = (*shape, 1, 1)[:4]
    size = math.prod(shape)
    return SplitProgram(
        seed, shape, chunks, {**dict.fromkeys(names, False), **options}, 3, nodes or ("here",) * size, (fault,)
    )


def found(orders=5):
    """Each in so many orders of events."""
    kept = TrainingStep(StepKind.ONE_BACKWARD, Zeroing.TO_NONE, updates=False)
    programs = []
    for seed in range(orders):
        dies = (Fault(0, 0, Where.LOSS, 0), Fault(1, 1, Where.DIES, 1 + 5 * seed))
        interrupted = (Fault(0, 0, Where.INTERRUPT, 21), Fault(0, 1, Where.LOSS, 0))
        packing_interrupted = (Fault(0, 0, Where.PACKING, 0), Fault(1, 0, Where.INTERRUPT, 72 + 5 * seed))
        programs += [
            # A rank, interrupted in a step that another one had completed, failed in the next: it was waited for.
            _program(seed, ("here", "there"), interrupted),
            # A step was complete on one rank only, where no rank sees the processes of others.
            _program(seed, ("",) * 3, (_TORN,)),
            # A rank has died while the ranks connected again: the others waited for the timeout, and named one another.
            _program(seed, ("here",) * 3, dies),
            # An error that a probe had met was lost: the wait for a compressor's bucket had no end.
            _program(seed, ("here",) * 3, (Fault(1, 0, Where.PACKING, 0),), count=2, wrapping=Wrapping.TOPK, step=kept),
            # A rank that saw another one dead did not tell other nodes that it lives itself: they named both.
            _program(seed, ("here", "there", "here"), (Fault(0, 0, Where.DIES, 6 - 4 * (seed % 2)),)),
            # A rank's first step failed while another one still compared what the optimizer is made for.
            _program(seed, ("here",) * 3, (Fault(0, 0, Where.LOSS, 0),), wrapping=Wrapping.OPTIMIZER),
            # ... for which compressor.
            _program(seed, ("here",) * 3, (Fault(0, 0, Where.LOSS, 0),), wrapping=Wrapping.SIGN, step=kept),
            # A rank was interrupted while it ended a step that had failed: a compressor raised that in the next step.
            _program(seed, ("",) * 2, packing_interrupted, wrapping=Wrapping.SIGN, step=kept),
            # A rank has died while the updated parameters were gathered: the others had an error that named nobody.
            _program(seed, ("here",) * 3, (Fault(2, 0, Where.DIES, 4 + 2 * seed),), wrapping=Wrapping.OPTIMIZER),
            # Two chunks of Megatron's: in the one that did not tell of the failure it ended the next step.
            _program(seed, ("here",) * 2, (Fault(0, 0, Where.HOOK, 0),), count=2, wrapping=Wrapping.MEGATRON),
            # A rank failed behind the sum of the tokens: others, still at that sum, dropped the step before.
            _program(seed, ("here",) * 3, (Fault(0, 1, Where.LOSS, 0),), wrapping=Wrapping.MEGATRON),
            # A rank was interrupted before it had its averages: another one, at the sum of the tokens, kept its own.
            _program(seed, ("",) * 2, (Fault(1, 0, Where.INTERRUPT, 8),), wrapping=Wrapping.MEGATRON_OVERLAP),
            # ... at that sum: it gave the next step up, or the others waited for it where a checkpoint came between.
            dataclasses.replace(
                _program(seed, ("",) * 2, (Fault(1, 0, Where.INTERRUPT, 12),), wrapping=Wrapping.MEGATRON_OVERLAP),
                saves=True,
            ),
        ]
        programs += [
            # Who had heard of a failure from its data-parallel peers named itself to the others of its model.
            _split(seed, (2, 2, 1), Fault(3, 0, Where.LOSS, 0)),
            # A rank failed behind the last sum: clipping had been counted as a step, and the next one failed, too.
            _split(seed, (1, 1, 2), Fault(0, 0, Where.LATE, 0), is_sharded=True, clips=True, counts_tokens=True),
            # Two chunks found NaN, and each waited for the names in another order.
            _split(seed, (2, 2, 1), Fault(2, 0, Where.NAN, 0), chunks=2, looks_for_nan=True),
            # An expert's optimizer failed where no rank had a token: its ranks waited for one another in the next step.
            _split(seed, (2, 1, 1, 2), Fault(3, 1, Where.UPDATE, 1), is_sharded=True),
            # Who used no expert in the next step had not been told of that in one whose parameters were in flight.
            _split(seed, (2, 1, 1, 2), Fault(2, 1, Where.UPDATE, 1), is_sharded=True, gathers_late=True),
            # Experts were clipped apart from finalizing: who failed there was waited for.
            _split(seed, (2, 1, 1, 2), Fault(1, 0, Where.LATE, 0), is_sharded=True, clips=True, counts_tokens=True),
            # Where an optimizer's step had failed, a rank was told that another one had raised in the next step.
            _split(seed, (2, 2, 1), Fault(0, 0, Where.UPDATE, 0), is_sharded=True),
        ]
        programs += [
            # A forward after join() still told of itself in the user's group, which a rank without one never answers.
            dataclasses.replace(_program(seed, ("here",) * 2, ()), steps=(_STEP, _ABSENT), counts=(1, 1)),
            # A rank failed in its first step after join(), while others still received its parameters.
            dataclasses.replace(_program(seed, ("here",) * 2, (Fault(1, 1, Where.LOSS, 0),)), counts=(1, 1)),
            # A rank that had run out took part in no step after one with a gradient that is no number.
            dataclasses.replace(
                _program(seed, ("here",) * 2, (Fault(1, 1, Where.NAN, 0),), wrapping=Wrapping.CHECKED),
                steps=(_STEP,) * 3,
                counts=(1, 3),
            ),
            # After a failure in one of two wrappers the other averaged what they share once more: with zeros in join().
            dataclasses.replace(
                _program(seed, ("here",) * 2, (Fault(0, 0, Where.PACKING, 0),), count=2), shares="heads", counts=(2, 1)
            ),
        ]
    # A rank that failed behind the last sum told two groups of the same ranks one after the other: who had heard in the
    # first one alone went on there, while the rank that had failed connected again in the second.
    late = {"nodes": ("",) * 8, "has_small_buckets": True, "counts_tokens": True}
    programs += [_split(seed, (2, 2, 2), Fault(2, 1, Where.LATE, 0), chunks=2, **late) for seed in (5, 26, 39)]
    # A rank was interrupted while the ranks connected again: the others took it for one that does not come any more.
    interrupted = (Fault(0, 0, Where.EARLY, 0), Fault(1, 1, Where.INTERRUPT, 56))
    programs += [dataclasses.replace(_program(0, ("",) * 3, interrupted), steps=(_STEP,) * 3)]
    # A rank that had failed died while the ranks connected again: an error named the rank that had seen it.
    for seed, number in ((4, 36), (11, 44), (14, 44)):
        faults = (Fault(0, 0, Where.LOSS, 0), Fault(0, 1, Where.DIES, number))
        programs += [_program(seed, ("here", "there", "here"), faults, overlap=False)]
    # A rank that failed in its backward cut off what it still received of an expert, after the step before.
    late = {"is_sharded": True, "gathers_late": True, "counts_tokens": True}
    faults = (Fault(2, 1, Where.BACKWARD, 0), Fault(3, 0, Where.SLOW, 79), Fault(0, 1, Where.EARLY, 0))
    programs += [dataclasses.replace(_split(961083, (2, 1, 1, 2), faults[0], **late), faults=faults)]
    # A rank that had run out of inputs waited for a transport to tell that another one had failed.
    failed = [_program(seed, ("here",) * 2, (Fault(0, 0, Where.LOSS, 0),)) for seed in (10, 12, 21)]
    programs += [dataclasses.replace(one, steps=(_STEP,), counts=(1, 0)) for one in failed]
    # A rank that was told of a failure in one wrapper, while its backward ran, was blamed in the other one.
    far, packing = ("one", "two", "three"), (Fault(0, 0, Where.PACKING, 0),)
    two = {"count": 2, "wrapping": Wrapping.CHECKED, "forward_sync_buffers": False}
    programs += [_program(seed, far, packing, **two) for seed in (7, 52, 54, 55)]
    # Two threads of a rank that had run out asked whether a message had arrived: both sent what follows it, or neither
    # waited for that.
    kinds = (Kind.LINEAR, Kind.SKIPPED, Kind.TRANSPOSED, Kind.BRANCHES)
    three = {"shares": "heads", "recipes": (Recipe(1, tuple(map(LayerRecipe, kinds))),) * 3, "steps": (_STEP,)}
    failed = [_program(seed, ("one", "two", "three"), (), count=3) for seed in (2, 20)]
    programs += [dataclasses.replace(one, counts=(0, 1, 0), **three) for one in failed]
    # Autograd's function gave None as a gradient on all ranks, and it became zeros.
    for seed in (0, 3, 5):
        withheld = Recipe(seed, (LayerRecipe(Kind.WITHHELD), LayerRecipe(Kind.LINEAR)))
        programs += [dataclasses.replace(_program(seed, ("here",) * 2, ()), recipes=(withheld,))]
    # A rank fails in its backward while others receive what it has sent in the step before (planted: it does not wait).
    programs += [_program(7, ("",) * 3, (Fault(0, 1, Where.BACKWARD, 0),))]
    # ... where a hook of torch's kind has begun to send: the rank gets its gradients back (planted: it does not) ...
    hooked = {"wrapping": Wrapping.HOOK, "step": kept, "bucket_cap_mb": 0.0001, "gradient_as_bucket_view": True}
    failing = [_program(seed, ("here",) * 2, (Fault(0, 0, Where.BACKWARD, 0),), **hooked) for seed in (2, 5)]
    # ... those too that weigh nothing.
    programs += [*failing, dataclasses.replace(failing[1], weighs=True)]
    # A rank could not begin an outer step right behind one that had failed: nobody was told of the second error.
    beginning, outer = (Fault(0, 0, Where.BEGINNING, 0), Fault(0, 0, Where.BEGINNING, 1)), Outer(asked=frozenset({0}))
    programs += [dataclasses.replace(_program(0, ("here",) * 2, beginning), outer=outer)]
    # What was loaded right behind a checkpoint was taken for a part of it, from whose values the outer step began.
    outer = Outer(lr=0.7, momentum=0.9, loads=frozenset({1}), resumes=(0, 2))
    programs += [dataclasses.replace(_program(0, ("here",) * 2, ()), outer=outer)]
    # A rank failed in its first step before it had sent its mask: loading took it for one without the others' buffers.
    failed = _program(0, ("here",) * 2, (Fault(1, 0, Where.LOSS, 0),), wrapping=Wrapping.OPTIMIZER)
    programs += [dataclasses.replace(failed, steps=(_STEP,), saves=True)]
    # Where all parameters of one dtype are empty, there is nothing to gather of them.
    empty = Recipe(1, (LayerRecipe(Kind.EMPTY, torch.float64), LayerRecipe(Kind.LINEAR)))
    return [*programs, dataclasses.replace(_program(0, ("",) * 2, (), wrapping=Wrapping.OPTIMIZER), recipes=(empty,))]
