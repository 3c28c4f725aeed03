"""Ranks that train by themselves between the outer steps of LocalSGD or DiLoCo, drawn from the seed, and the run."""

import dataclasses
import functools
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import distributed as dist

from law_models import Recipe
from law_steps import StepKind, TrainingStep, Zeroing, perform
from ppe_ddp import (
    Checkpointer,
    CheckpointError,
    CommunicationError,
    DisagreementError,
    NonFiniteGradientError,
    PeerAbortedError,
)
from ppe_ddp.backends.shm import ShmOptions
from ppe_ddp.compression import DiLoCo, LocalSGD

from .faults import Change, Fault, Planned, Where, fail_in
from .program import KINDS, TIMEOUT, Program, Run, fitting, nodes_of, options_of
from .scheduler import Scheduler
from .wrappers import MOMENTUM, RATE, Wrappers, Wrapping

SCALE = 4.0
IN_INNER_STEP = (Where.LOSS, Where.EARLY, Where.BACKWARD, Where.HOOK)
_WRAPPINGS = [*[Wrapping.PLAIN] * 5, Wrapping.FUNCTION, Wrapping.HOOK, Wrapping.CHECKED, Wrapping.SKIPPING]
_WRAPPINGS += [Wrapping.TOPK, Wrapping.SIGN]
_IN_OUTER_STEP = (Where.PACKING, Where.BEGINNING, Where.TAKING, Where.INTERRUPT, Where.INTERRUPT, Where.SLOW)
_IN_USERS_GROUP = (Where.BEGINNING, Where.TAKING, Where.SLOW)  # see program.py
# A rank that is absent would end an outer step of its own.
_UNFIT = (StepKind.ABSENT, StepKind.ABSENT_WITH_MICRO_BATCH)
_RESUMING = 0.25
_UNSCALED = (StepKind.TWO_LOSSES,)  # losses that no scaler sees


@dataclass(frozen=True)
class Outer:
    """The outer steps of a program.

    Attributes:
        every: How many inner steps there are between two of them.
        lr: The learning rate of one, and
        momentum: its momentum; 1 and 0 for LocalSGD.
        scales: Whether a GradScaler takes the inner steps, and skips those of a rank whose gradients are no numbers.
        retakes: Whether a rank that fails in its inner step takes it again; else it steps without gradients.
        asked: The steps behind which all ranks ask for an outer step.
        loads: The steps before which all ranks load what the module and the optimizer have begun with.
        resumes: The step behind which all that is trained is saved, and so many ranks load it into what they make anew
            and go on; None where there is no such step.
    """

    every: int = 1
    lr: float = 1.0
    momentum: float = 0.0
    scales: bool = False
    retakes: bool = False
    asked: frozenset[int] = frozenset()
    loads: frozenset[int] = frozenset()
    resumes: tuple[int, int] | None = None

    def made(self, wrapper, optimizer):
        """LocalSGD or DiLoCo."""
        if (self.lr, self.momentum) == (1.0, 0.0):
            return LocalSGD(wrapper, optimizer, every=self.every)
        return DiLoCo(wrapper, optimizer, every=self.every, lr=self.lr, momentum=self.momentum)

    def without(self, number):
        """The same without a step."""
        left = {
            name: frozenset(k - (k > number) for k in getattr(self, name) if k != number) for name in ("asked", "loads")
        }
        if self.resumes is not None:
            step, ranks = self.resumes
            left["resumes"] = None if step == number else (step - (step > number), ranks)
        return dataclasses.replace(self, **left)

    def among(self, count):
        """The same on no more than so many ranks."""
        resumes = self.resumes and (self.resumes[0], min(self.resumes[1], count))
        return dataclasses.replace(self, resumes=resumes)

    def plainer(self):
        """The same with one thing less."""
        for name, value in dataclasses.asdict(Outer(every=self.every)).items():
            if getattr(self, name) != value:
                yield dataclasses.replace(self, **{name: value})
        if self.every > 1:
            yield dataclasses.replace(self, every=self.every - 1)


def outer_program(seed):
    """The program of ``seed``, of ranks that train by themselves."""
    draw = Random(f"outer {seed}")
    every, wrapping, world_size = draw.choice([1, 2, 2, 3]), draw.choice(_WRAPPINGS), draw.choice([2, 2, 2, 3, 3, 4])
    count = 1 if wrapping is Wrapping.HOOK else draw.choice([1, 1, 1, 2])
    recipes = [Recipe.random(seed + k, kinds=KINDS) for k in range(count)]
    recipes = tuple(
        dataclasses.replace(one, layers=one.layers[: draw.choice([1, 2, 3])], width=3, heads=1) for one in recipes
    )
    lr, momentum = draw.choice([(1.0, 0.0), (1.0, 0.0), (0.7, 0.9), (0.5, 0.0)])
    scales = draw.random() < 0.2
    unfit = (*_UNFIT, *_UNSCALED) if scales else _UNFIT
    kinds = [kind for kind in fitting(recipes, Wrapping.PLAIN) if kind not in unfit]
    steps = tuple(
        TrainingStep(draw.choice(kinds), draw.choice(list(Zeroing)), draw.random() < 0.9)
        for _ in range(draw.choice([1, 2, 3]) * every + draw.randint(0, 2))
    )
    outer = Outer(
        *(every, lr, momentum, scales, draw.random() < 0.5),
        asked=frozenset(k for k in range(len(steps)) if draw.random() < 0.1),
        loads=frozenset(k for k in range(len(steps)) if draw.random() < 0.05),
    )
    changes = ()
    if draw.random() < 0.2:
        rank, number = draw.randrange(world_size), draw.randrange(20)
        changes = tuple(Change(rank, k, number, draw.random() < 0.5) for k in range(len(steps)))
    faults = tuple(_faults(draw, world_size, steps, outer, wrapping)) if draw.random() < 0.75 else ()
    if count > 1 and len(faults) > 1:
        # Known: who is interrupted while ranks connect again goes on to the next wrapper's outer step, and waits there
        # for the others, which wait for it (docs/promises.md).
        faults = tuple(fault for fault in faults if fault.where is not Where.INTERRUPT)
    nodes, options = nodes_of(draw, world_size), options_of(draw)
    one = Program(
        seed,
        world_size,
        recipes,
        options,
        wrapping,
        steps,
        nodes,
        faults,
        changes=changes,
        outer=outer,
        momentum=MOMENTUM,
    )
    return resuming(one)


def resuming(program):
    """The same, in some of the programs continued from a checkpoint, on as many ranks or not; drawn apart."""
    draw = Random(f"resumes {program.seed}")
    if program.dying or len(program.steps) == 1 or draw.random() > _RESUMING:
        return program
    ranks = program.world_size
    if not (program.changes or program.wrapping is Wrapping.HOOK or draw.random() < 0.6):  # all of one group
        ranks = draw.choice([count for count in (1, 2, 3, 4) if count != ranks])
    step = draw.randrange(len(program.steps) - 1)
    outer = dataclasses.replace(program.outer, resumes=(step, ranks))
    nodes = tuple(program.nodes[rank % len(program.nodes)] for rank in range(max(ranks, program.world_size)))
    return dataclasses.replace(program, outer=outer, nodes=nodes)


def size_of(program, number):
    """How many ranks train in a step."""
    resumes = program.outer.resumes
    return program.world_size if resumes is None or number <= resumes[0] else resumes[1]


def outer_steps_of(steps, outer):
    """By step, how many outer steps each wrapper takes in it."""
    counts = [sum(step.updates for step in steps[: number + 1]) for number in range(len(steps))]
    return [
        (step.updates and count % outer.every == 0) + (number in outer.asked)
        for number, (step, count) in enumerate(zip(steps, counts, strict=True))
    ]


def _faults(draw, world_size, steps, outer, wrapping):
    places = [number for number, count in enumerate(outer_steps_of(steps, outer)) if count]
    kinds = _IN_OUTER_STEP if wrapping is not Wrapping.HOOK else _IN_USERS_GROUP
    if wrapping is Wrapping.FUNCTION:
        kinds = (*kinds, Where.FUNCTION, Where.FUNCTION_LATE)
    dies = draw.random() < 0.15 and wrapping is not Wrapping.HOOK
    kinds = [one for one in kinds if one is not Where.SLOW or not dies]  # who is slow would be taken for another one
    inner = [*IN_INNER_STEP, *[Where.NAN_GRADIENT] * 2 * (outer.scales or wrapping.looks_for_nan)]
    for _ in range(draw.choice([1, 1, 2, 3]) - dies):
        is_outer = draw.random() < 0.65
        where, rank = draw.choice(kinds if is_outer else inner), draw.randrange(world_size)
        step = draw.choice(places) if is_outer and places else draw.randrange(len(steps))
        yield Fault(rank, step, where, draw.randrange(200), draw.choice([0, 0, 1, 2, 3]) if is_outer else 0)
        if where is Where.TAKING:  # once: a rank that fails again as it completes that one has no inner step then
            kinds.remove(where)
    if dies:
        yield Fault(draw.randrange(world_size), draw.randrange(len(steps)), Where.DIES, draw.randrange(40))


def inner_step(parameters, optimizer, scaler):
    """Take an inner step, with the scaler if there is one and it has seen gradients."""
    if scaler is None or all(parameter.grad is None for parameter in parameters):
        optimizer.step()
        return
    try:
        scaler.step(optimizer)
    finally:
        scaler.update()


@dataclass
class OuterStep:
    """One outer step of one wrapper on a rank.

    Attributes:
        wrapper: The number of the wrapper.
        is_taken: Whether averages have arrived.
        error: What it has raised.
        has_voted: Whether the vote of all ranks has come.
        values: All parameters behind it, by name.
        residuals: By name, what a compressor has kept.
    """

    wrapper: int
    is_taken: bool
    error: BaseException | None
    has_voted: bool
    values: dict[str, Any]
    residuals: dict[str, Any]


@dataclass
class Trained:
    """What a step has given on a rank.

    Attributes:
        failed: How often the inner step has failed by plan.
        begun: The parameters with which the optimizer has begun its step; None where it has not.
        outer_steps: In order.
        values: The parameters at the end.
        has_gradients: Whether there are any at the end.
        buffers: By name.
    """

    failed: int = 0
    begun: dict[str, Any] | None = None
    outer_steps: list[OuterStep] = dataclasses.field(default_factory=list)
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    has_gradients: bool = False
    buffers: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def errors(self):
        """Of outer steps."""
        return [one.error for one in self.outer_steps if one.error is not None]


class OuterModels(Wrappers):
    """The wrappers on a rank, with an optimizer of its own and outer steps.

    Attributes:
        trained: All parameters, also those that are frozen at first.
        step: What the step under way gives.
    """

    def __init__(self, modules, order, options, wrapping, *, outer, hooks, momentum):
        super().__init__(modules, order, options, wrapping, hooks=hooks)
        self.trained = list(self.table.values())
        self.start = self.parameter_values()
        self.inner = torch.optim.SGD(self.trained, RATE, momentum=momentum)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE) if outer.scales else None
        self.outer_steps = [outer.made(part, self.inner) for part in self.parts]
        for k, one in enumerate(self.outer_steps):
            fail_in(one, "_change", Where.BEGINNING)
            fail_in(one, "_outcome", Where.TAKING)
            one.synchronize = functools.partial(self._synchronize, k, one, one.synchronize)
            times = self.parts[k]._reducer.synchronizer.times  # noted right behind the vote
            times.note = functools.partial(self._vote, times.note)
        self.inner.register_step_pre_hook(self._begin)
        self.result = Trained()

    def _begin(self, *_):
        self.result.begun = self.parameter_values()

    def _vote(self, usual, given):
        self.has_voted = True
        usual(given)

    def _synchronize(self, k, outer, usual):
        before, error, self.has_voted = outer._taken, None, False
        Scheduler.current.note("outer step", k)
        try:
            usual()
        except BaseException as raised:
            error = raised
            raise
        finally:
            text = "" if error is None else f"{type(error).__name__}: {error}"
            Scheduler.current.note("outer step", k, "taken" if outer._taken > before else "not taken", text)
            given = self.has_voted, self.parameter_values(), self.residuals()
            self.result.outer_steps.append(OuterStep(k, outer._taken > before, error, *given))

    def saved(self):
        scaler = {} if self.scaler is None else {"scaler": self.scaler}
        return {
            **{str(k): part for k, part in enumerate(self.parts)},
            **{f"outer {k}": one for k, one in enumerate(self.outer_steps)},
            **{"inner": self.inner, **scaler},
        }

    def load_start(self):
        """Load what the module and the optimizer have begun with."""
        for k, part in enumerate(self.parts):
            prefix = f"parts.{k}."
            own = {name.removeprefix(prefix): one for name, one in self.start.items() if name.startswith(prefix)}
            part.load_state_dict(own, strict=False)
        self.inner.state.clear()


class OuterRun(Run):
    """One run of such a program.

    Attributes:
        trained: By rank, what each step has given, by its number.
        lost: By rank, the error by which it was told that another one is lost.
    """

    def __init__(self, program):
        super().__init__(program)
        self.trained = [{} for _ in range(program.most_ranks)]
        self.lost = [None] * program.most_ranks

    def _hold(self):
        from .outer_oracle import OuterOracle

        oracle = OuterOracle(self)
        oracle.check()
        return oracle

    def _train(self, rank):
        program, resumes = self.program, self.program.outer.resumes
        outer_models = functools.partial(OuterModels, outer=program.outer)
        try:
            self._meet(rank)
            groups = self._groups()
            is_first = rank < program.world_size
            models = self._wrap(rank, outer_models, process_group=groups[0]) if is_first else None
            for number, step in enumerate(program.steps):
                if models is not None and not self._step(rank, number, step, models):
                    return
                if resumes is not None and number == resumes[0]:
                    if models is not None:
                        Checkpointer(self.folder, models.saved(), process_group=groups[0]).save(number)
                    before, models = models, None
                    self._ended[rank] = len(program.steps)  # or nobody waits for it any more
                    if rank < resumes[1]:
                        self._ended[rank] = number + 1
                        models = self._wrap(rank, outer_models, process_group=groups[1])
                        self._load(before, models, groups[1])
        except CommunicationError as error:  # another rank has died
            self.lost[rank] = error.with_traceback(None)
            self.scheduler.note("ends", "", f"{type(error).__name__}: {error}")
            return
        except (CheckpointError, DisagreementError) as error:
            self.scheduler.note("ends", "", f"{type(error).__name__}: {error}")
            return
        if not self.program.faults:
            dist.barrier()
            dist.destroy_process_group()

    def _groups(self):
        """The ranks that train before they go on from a checkpoint, and after that; the default group if all do."""
        program = self.program
        sizes = program.world_size, size_of(program, len(program.steps))
        if sizes[0] == sizes[1]:
            return None, None
        options = ShmOptions(shared_memory=False)
        return [dist.new_group(range(size), TIMEOUT, pg_options=options) for size in sizes]

    def _load(self, before, models, group):
        """Go on with ``models``, made anew: load the checkpoint, and freeze what was frozen ``before``."""
        Checkpointer(self.folder, models.saved(), process_group=group).load()
        self.scheduler.note("has loaded")
        for name, parameter in models.table.items() if before is not None else ():
            parameter.requires_grad_(before.table[name].requires_grad)

    def _step(self, rank, number, step, models):
        """Take a step; whether this rank goes on with the next one."""
        self.scheduler.note("step", number, step.kind.name, step.zeroing.name)
        if number in self.program.outer.loads:
            models.load_start()
        handles = self.faults.begin_step(number, models)
        result = models.result = Trained()
        self._train_inside(rank, number, step, models)
        for act in self._acts(number, step, models):
            try:
                act()
            except KeyboardInterrupt:
                self.faults.interrupted(number)
            except (Planned, MemoryError, PeerAbortedError, NonFiniteGradientError, DisagreementError):
                pass
        self.faults.end_step()
        for handle in handles:
            handle.remove()
        result.values, result.buffers = models.parameter_values(), models.buffer_values()
        result.has_gradients = any(parameter.grad is not None for parameter in models.trained)
        self.trained[rank][number] = result
        for one in result.errors:
            one.with_traceback(None)
        self.scheduler.note("ends", number, "; ".join(map(str, result.errors)) or "well")
        self._ended[rank] = number + 1
        own = (Planned, MemoryError, KeyboardInterrupt)
        if self.program.lingers and any(isinstance(one, own) for one in result.errors):
            self._linger(rank, number)
        return not any(isinstance(one, DisagreementError) for one in result.errors)

    def _train_inside(self, rank, number, step, models):
        """Forward and backward of the inner step, once more where it fails and is taken again."""
        program = self.program
        weigh = (lambda loss, _: loss) if models.scaler is None else (lambda loss, _: models.scaler.scale(loss))
        size = size_of(program, number)
        while True:
            try:
                for _ in perform(step, models, program.recipes[0], number, rank=rank, world_size=size, weigh=weigh):
                    pass
            except Planned:
                models.result.failed += 1
                models.is_quiet = False
                models.zero_grad()
                if program.outer.retakes:
                    continue
            return

    def _acts(self, number, step, models):
        """What follows in a step, each of which may fail by itself."""
        if step.updates:
            yield functools.partial(inner_step, models.trained, models.inner, models.scaler)
        if number in self.program.outer.asked:
            for one in models.outer_steps:
                yield one.synchronize
