"""What the ranks of one history do, drawn from its seed, and the run of it."""

import dataclasses
from contextlib import nullcontext
from datetime import timedelta
from itertools import compress
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from torch import distributed as dist
from torch.distributed.algorithms.join import Join

from law_models import Kind, Recipe
from law_steps import StepKind, TrainingStep, Zeroing, perform
from ppe_ddp import Checkpointer, CommunicationError, NonFiniteGradientError, PeerAbortedError, weigh
from ppe_ddp.backends.shm import ShmOptions

from . import processes
from .faults import Change, Fault, Faults, Planned, Where
from .oracle import SCALED_FIRST, SEVERAL, hold
from .scheduler import Scheduler
from .split import SplitProgram
from .store import SimulatedStore
from .wrappers import MOMENTUM, Models, Wrappers, Wrapping

KINDS = tuple(kind for kind in Kind if kind is not Kind.EMBEDDING)
_ONE_SYNCHRONIZATION = [
    kind for kind in StepKind if kind is StepKind.MICRO_BATCHES or not any(word in kind.name for word in SEVERAL)
]
# A DistributedOptimizer keeps averages apart from what comes after them, and one process does not.
_WHERE_USED = (*SCALED_FIRST, Wrapping.HOOK)
_IN_JOIN = [kind for kind in StepKind if kind is not StepKind.LOOK and "ABSENT" not in kind.name]  # forwards of all
# Known: torch's Join counts forwards in the user's group, so those of a step that fails must be as many on each rank.
_FAILING_IN_JOIN = [kind for kind in _IN_JOIN if "FORWARDS" not in kind.name and kind is not StepKind.MICRO_BATCHES]
_TWO_SYNCHRONIZATIONS = [kind for kind in StepKind if kind.name.endswith(("BACKWARDS", "LOSSES", "GRAPH"))]
# A hook of torch's kind that raises has the others wait in the user's group; those that it does not come to go on.
_IN_USERS_GROUP = (Where.SLOW, Where.LOSS, Where.EARLY, Where.BACKWARD, Where.HOOK)
# Else few histories come to such a hook that raises, or to a backward that raises while buckets are under way.
_IN_SYNC_HOOK = {Where.PACKING: Where.FUNCTION, Where.FUNCTION_LATE: Where.FUNCTION}
_IN_BACKWARD = {Where.EARLY: Where.BACKWARD}
_LATER = (Where.PACKING, Where.FUNCTION, Where.FUNCTION_LATE, Where.HOOK)  # which come late in some programs
TIMEOUT = timedelta(seconds=300)
_LINGER_SECONDS = 250.0  # less than that
_SPLIT = 0.08  # of the seeds
_OUTER = 0.06
_HOOK = 0.1  # of those that would have no function of the user's
_WEIGHING = 0.25  # of those that can
_WEIGHING_WITH_HOOK = 0.5  # ... with a hook of torch's kind
_SAVING = 0.03
_HOOKING = 0.3
_COUNTS = (0, 0, 1, 2, 3, 0.5, 7, 100)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """What the ranks do.

    Attributes:
        seed: Decides everything, also the order of events.
        world_size: How many ranks there are.
        recipes: Of the modules, each with a wrapper of its own; all are in every backward.
        options: Of the wrappers.
        wrapping: What they are wrapped in.
        steps: In order.
        nodes: By rank, the node that it is on; empty where the system does not show the processes of others.
        faults: What befalls the ranks.
        shares: What the modules have in common: ``"heads"``, ``"all"``, or nothing.
        changes: What single ranks do to their parameters.
        counts: By rank, for how many steps it has inputs; the first steps are in join(), up to the highest of these.
            Empty where there is no join().
        divides_by_all: Whether averages in join() are over all ranks, and not over those that have inputs.
        ties: Whether layers in checkpoints are the first head once more, whose gradient then comes in two parts.
        weighs: Whether losses have weights, which :meth:`count` gives.
        hooks: Whether parameters have hooks of the user's for accumulated gradients.
        saves: Whether a checkpoint is saved after each step, and the last one is loaded at the end.
        apart: ``(rank, step, module)`` where a rank does not use a module: it ends that wrapper's step by itself.
        momentum: Of the optimizers.
        following: What other processes do that go on from the last checkpoint, on as many ranks or not.
        outer: The outer steps of ranks that train by themselves; None where each backward is synchronized. In a step
            without an update all ranks leave the optimizer's step out.
    """

    seed: int
    world_size: int
    recipes: tuple[Recipe, ...]
    options: dict[str, Any]
    wrapping: Wrapping
    steps: tuple[TrainingStep, ...]
    nodes: tuple[str, ...]
    faults: tuple[Fault, ...]
    shares: str = ""
    changes: tuple[Change, ...] = ()
    counts: tuple[int, ...] = ()
    divides_by_all: bool = True
    ties: bool = False
    weighs: bool = False
    hooks: bool = False
    saves: bool = False
    apart: frozenset[tuple[int, int, int]] = frozenset()
    momentum: float = 0.0
    following: Any = None
    outer: Any = None

    @classmethod
    def of(cls, seed, saving=_SAVING):
        """The program of ``seed``; some are a :class:`SplitProgram`, and some have outer steps."""
        if Random(f"split or not {seed}").random() < _SPLIT:
            return SplitProgram.of(seed)
        if Random(f"outer or not {seed}").random() < _OUTER:
            return cls.with_outer_steps(seed)
        draw = Random(f"program {seed}")
        options = options_of(draw)
        is_large = draw.random() < 0.03  # many small histories find more than a few long ones
        wrapping = draw.choice([*Wrapping, *[Wrapping.PLAIN] * 6])
        if wrapping is Wrapping.PLAIN and Random(f"hook {seed}").random() < _HOOK:
            wrapping = Wrapping.HOOK
        count = draw.choice([1, 2, 3]) if is_large else draw.choice([1, 1, 1, 1, 1, 2])
        count = 1 if wrapping is Wrapping.HOOK else count  # it communicates in one group of the user's
        most_layers = 5 if is_large else draw.choice([1, 1, 2, 3])
        with_sparse = draw.random() < 0.1 and wrapping in (Wrapping.PLAIN, Wrapping.FUNCTION, Wrapping.CHECKED)
        recipes = [Recipe.random(seed + k, kinds=tuple(Kind) if with_sparse else KINDS) for k in range(count)]
        heads = recipes[0].heads if is_large else draw.choice([1, 1, 2])
        recipes = [dataclasses.replace(one, layers=one.layers[:most_layers], width=3, heads=heads) for one in recipes]
        shares = draw.choice(["", "", "heads", "all"]) if count > 1 and not wrapping.is_megatron else ""
        steps = [
            TrainingStep(draw.choice(fitting(recipes, wrapping)), draw.choice(list(Zeroing)), draw.random() < 0.7)
            for _ in range(draw.randint(2, 4) if is_large else draw.choice([1, 2, 2, 3]))
        ]
        if wrapping.compressor is not None:  # whose gradients are not what one process has
            steps = [dataclasses.replace(one, zeroing=Zeroing.TO_NONE, updates=False) for one in steps]
        world_size = draw.choice([3, 4]) if is_large else draw.choice([2, 2, 2, 2, 3])
        faults = (
            Fault.some(draw, world_size, len(steps), with_nan=wrapping.looks_for_nan) if draw.random() < 0.6 else ()
        )
        faults = tuple(
            fault for fault in faults if _is_fitting(fault, steps[fault.step], wrapping, shares, is_several=count > 1)
        )
        instead = {Wrapping.SYNC_HOOK: _IN_SYNC_HOOK, Wrapping.HOOK: _IN_BACKWARD}.get(wrapping, {})
        faults = tuple(dataclasses.replace(one, where=instead.get(one.where, one.where)) for one in faults)
        nodes = nodes_of(draw, world_size)
        changes = ()
        if draw.random() < 0.15:
            steps = [dataclasses.replace(one, zeroing=Zeroing.TO_NONE) for one in steps]
            rank, number = draw.randrange(world_size), draw.randrange(20)
            changes = tuple(Change(rank, k, number, draw.random() < 0.5) for k in range(len(steps)))
        if wrapping in _WHERE_USED and not shares:
            options["average_where_used"] = draw.random() < 0.3
        one = cls(seed, world_size, tuple(recipes), options, wrapping, tuple(steps), nodes, faults, shares, changes)
        kinds = {layer.kind for recipe in recipes for layer in recipe.layers}
        ties = bool(kinds & {Kind.CHECKPOINTED, Kind.REENTRANT}) and draw.random() < 0.5
        # The parameters of the heads are not the last ones then, so there may be nothing to reach.
        ties &= all(step.kind is not StepKind.SOME_INPUTS for step in steps)
        one = dataclasses.replace(one, ties=ties, faults=one.later_faults())
        if not (faults or changes):
            one = dataclasses.replace(one, apart=one.drawn_apart())
        # A save calls collectives in the user's group: where no connection tells of a death, that takes its timeout.
        saves = Random(f"saves {seed}").random() < saving and not one.dying
        # A rank that ends wrappers one by one calls the hooks of what they share in each.
        can_hook = not (wrapping.is_megatron or (shares and (one.apart or wrapping is Wrapping.OPTIMIZER)))
        hooks = can_hook and Random(f"hooks {seed}").random() < _HOOKING
        one = dataclasses.replace(one.weighing(), saves=saves, hooks=hooks)
        can_join = not any(fault.where in (Where.DIES, Where.INTERRUPT) for fault in faults)
        can_join &= wrapping in (Wrapping.PLAIN, Wrapping.FUNCTION, Wrapping.CHECKED, Wrapping.SKIPPING)
        can_join &= not (one.apart or one.saves)
        one = one.joining(draw) if can_join and draw.random() < 0.15 else one
        return one.continued() if one.saves else one

    @classmethod
    def saving(cls, seed):
        """The program of ``seed`` with checkpoints, if it can have some and is of the usual kind."""
        return cls.of(seed, 1.0)

    @staticmethod
    def with_outer_steps(seed):
        """The program of ``seed``, of ranks that train by themselves between outer steps."""
        from .outer import outer_program

        return outer_program(seed)

    def new_run(self):
        """A run of it."""
        from .outer import OuterRun

        return OuterRun(self) if self.outer else Run(self)

    def joining(self, draw):
        """The same in join(), with other numbers of steps for each rank."""
        count, fit = draw.randint(1, len(self.steps)), _FAILING_IN_JOIN if self.faults else _IN_JOIN
        steps = [
            step if step.kind in fit or number >= count else dataclasses.replace(step, kind=StepKind.ONE_BACKWARD)
            for number, step in enumerate(self.steps)
        ]
        if count < len(steps) and steps[count].zeroing is Zeroing.TO_ZERO:  # only who has run out has older gradients
            steps[count] = dataclasses.replace(steps[count], zeroing=Zeroing.TO_NONE)
        counts = [draw.randint(0, count) for _ in range(self.world_size)]
        counts[draw.randrange(self.world_size)] = count
        by_all = draw.random() < 0.5
        return dataclasses.replace(self, steps=tuple(steps), counts=tuple(counts), divides_by_all=by_all)

    def weighing(self):
        """The same, in some of the programs with weights; these begin a step without gradients, as they must."""
        draw = Random(f"weighs {self.seed}")
        most = _WEIGHING_WITH_HOOK if self.wrapping is Wrapping.HOOK else _WEIGHING
        # A rank whose loss does not come to a wrapper has no samples there, though one process has.
        if self.apart or self.shares or self.wrapping.is_megatron or draw.random() > most:
            return self
        change, cleared = dataclasses.replace, [Zeroing.TO_NONE, Zeroing.TO_ZERO]
        if self.wrapping is Wrapping.OPTIMIZER:
            cleared.pop()  # Known: where all ranks weigh nothing, shards of zeros stay, and a plain .grad becomes None.
        steps = [
            change(
                step,
                kind=StepKind.MICRO_BATCHES if step.kind in _TWO_SYNCHRONIZATIONS else step.kind,
                zeroing=step.zeroing if step.zeroing in cleared else draw.choice(cleared),
            )
            for step in self.steps
        ]
        return change(self, steps=tuple(steps), weighs=True)

    def continued(self):
        """The same, in some programs with other processes that go on from the last checkpoint; drawn apart."""
        draw, change, wrapping = Random(f"continued {self.seed}"), dataclasses.replace, self.wrapping
        if draw.random() < 0.25:
            return self
        size, is_several = self.world_size, len(self.recipes) > 1
        size = size if draw.random() < 0.5 else draw.choice([1, 2, 3, 4])
        kinds = [kind for kind in fitting(self.recipes, wrapping) if not self.ties or kind is not StepKind.SOME_INPUTS]
        steps = [TrainingStep(draw.choice(kinds), draw.choice(list(Zeroing))) for _ in range(draw.choice([1, 2, 3]))]
        if wrapping.compressor is not None:
            steps = [change(one, zeroing=Zeroing.TO_NONE, updates=False) for one in steps]
        can_fail = size > 1 and wrapping not in (Wrapping.HOOK, Wrapping.SYNC_HOOK) and draw.random() < 0.4
        faults = Fault.some(draw, size, len(steps), with_nan=wrapping.looks_for_nan) if can_fail else ()
        faults = [one for one in faults if one.where is not Where.DIES]  # others may still load
        fits = [_is_fitting(one, steps[one.step], wrapping, self.shares, is_several=is_several) for one in faults]
        nodes = tuple(self.nodes[rank % len(self.nodes)] for rank in range(size))
        nothing = {"changes": (), "apart": frozenset(), "weighs": False, "saves": False}
        momentum = MOMENTUM if wrapping is Wrapping.OPTIMIZER else 0.0
        one = change(self, steps=tuple(steps), faults=tuple(compress(faults, fits)), nodes=nodes, **nothing)
        return change(self, momentum=momentum, following=change(one, world_size=size, momentum=momentum))

    def count(self, rank, number, forward):
        """The count of a loss, where losses have weights."""
        return Random(f"count {self.seed} {rank} {number} {forward}").choice(_COUNTS)

    def drawn_apart(self):
        """Where ranks use one of several modules less, in steps of one backward. With a fault it is not modelled."""
        draw = Random(f"apart {self.seed}")
        if len(self.recipes) == 1 or self.wrapping not in _WHERE_USED or draw.random() < 0.5:
            return frozenset()
        single = [k for k, step in enumerate(self.steps) if step.kind in (StepKind.ONE_BACKWARD, StepKind.TWO_FORWARDS)]
        return frozenset((draw.randrange(self.world_size), k, draw.randrange(len(self.recipes))) for k in single)

    def later_faults(self):
        """The faults, some of them after a compressor has ended with a bucket; drawn apart from all else."""
        draw, change = Random(f"later {self.seed}"), dataclasses.replace
        if self.wrapping.compressor is None or draw.random() < 0.3:
            return self.faults
        passes = draw.choice([1, 2, 3, 3, 4])
        return tuple(
            change(one, where=Where.PACKING, passes=passes) if one.where in _LATER else one for one in self.faults
        )

    @property
    def most_ranks(self):
        """How many ranks there are at most: training may go on with more."""
        return max(self.world_size, self.outer.resumes[1] if self.outer and self.outer.resumes else 0)

    def left_out(self, rank, number):
        """The modules that ``rank`` does not use in a step."""
        return {module for one, step, module in self.apart if (one, step) == (rank, number)}

    def has_inputs(self, rank, number):
        """Whether ``rank`` takes a step: it has inputs, or all have left join()."""
        return not self.counts or number < self.counts[rank] or number >= max(self.counts)

    @property
    def is_sparse(self):
        """Whether there are sparse gradients, which are no sums."""
        return any(layer.kind is Kind.EMBEDDING for one in self.recipes for layer in one.layers)

    @property
    def adds_parts(self):
        """Whether a gradient may come in two parts, each from a backward inside: a rank may fail between them."""
        return self.ties or (self.shares == "all" and any(one.is_reentrant for one in self.recipes))

    @property
    def lingers(self):
        """Whether a rank that has raised begins nothing before all others have ended the step."""
        return not (self.counts or self.dying) and Random(f"lingers {self.seed}").random() < 0.5

    def settles_late(self, step):
        """Whether the second backward of a step begins while the first one's results may be on their way."""
        return self.wrapping is Wrapping.MEGATRON_OVERLAP and not self.faults and step.kind in _TWO_SYNCHRONIZATIONS

    @property
    def dying(self):
        """The ranks that die."""
        return {fault.rank for fault in self.faults if fault.where is Where.DIES}


@dataclasses.dataclass
class Result:
    """What a synchronized backward has given on a rank.

    Attributes:
        gradients: By name.
        buffers: By name.
        residuals: By name, what a compressor has kept.
        computed: The names of the gradients that had come by then.
        is_exact: Whether it went in one round.
        called: By name, the gradients that hooks of the user's were called with.
        error: What it has raised.
    """

    gradients: dict[str, Any]
    buffers: dict[str, Any]
    residuals: dict[str, Any]
    computed: set[str]
    is_exact: bool
    called: dict[str, list[Any]]
    error: Exception | None


class Run:
    """One run of a program.

    Args:
        program: What to do.
        before: A run that ended with a checkpoint, from which this one goes on in other processes.

    Attributes:
        scheduler: With the log.
        schedulers: That of each run, one after the other.
        faults: What has happened.
        results: By rank, step by step, what each synchronized backward has given.
        parameters: By rank, those after each step that has updated them.
        joined: By rank, parameters and buffers after join().
    """

    def __init__(self, program, before=None):
        self.program, self.before, self.oracle = program, before, None
        count = program.most_ranks
        draw = Random(f"order {program.seed}")
        self.scheduler = Scheduler(draw, processes.new_worlds(count), processes.use_world)
        self.schedulers = [] if before is None else before.schedulers
        self.schedulers.append(self.scheduler)
        self.store = SimulatedStore()
        self.faults = Faults(program.faults, program.changes, count)
        self.results = [[[] for _ in program.steps] for _ in range(count)]
        self.parameters = [[None for _ in program.steps] for _ in range(count)]
        self.joined = [({}, {})] * count
        self.loaded = [None] * count
        self._ended = [0] * count  # how many steps each has ended

    def run(self):
        """Run it, and hold it to the oracle.

        Raises:
            Unsound: It does not do what it should.
        """
        has_folder = self.program.saves or (self.program.outer and self.program.outer.resumes)
        with TemporaryDirectory() if has_folder else nullcontext(self.before and self.before.folder) as self.folder:
            processes.run_ranks(self.program, self.scheduler, self.faults, self._train)
            self.oracle = self._hold()
            following = self.program.following if self.oracle.is_over else None
            # Of what differs between ranks another number has no more than some rank's.
            if following and (not self.oracle.is_torn or following.world_size == self.program.world_size):
                type(self)(following, self).run()

    def _hold(self):
        return hold(self)

    def _meet(self, rank):
        dist.init_process_group(
            "shm",
            store=self.store,
            rank=rank,
            world_size=self.program.most_ranks,
            timeout=TIMEOUT,
            pg_options=ShmOptions(shared_memory=False),
        )

    def _wrap(self, rank, kind=Wrappers, **further):
        """Wrap the modules; the wrappers."""
        program = self.program
        order = Random(f"forwards {program.seed} {rank}").sample(range(len(program.recipes)), len(program.recipes))
        options = program.options | further
        return kind(
            modules_of(program), order, options, program.wrapping, hooks=program.hooks, momentum=program.momentum
        )

    def _train(self, rank):
        program = self.program
        try:
            self._meet(rank)
            models = self._wrap(rank)
        except CommunicationError as error:  # a rank that has begun is dead already
            self.results[rank][0].append(Result({}, {}, {}, set(), True, {}, error.with_traceback(None)))
            return
        checkpointer = Checkpointer(self.folder, models.saved()) if self.folder else None
        if self.before is not None:
            checkpointer.load()
        joined = max(program.counts, default=0)
        if joined:
            with Join(list(models.parts), divide_by_initial_world_size=program.divides_by_all):
                for number in range(program.counts[rank]):
                    self._step(rank, number, program.steps[number], models)
                self.faults.steps[rank] = -1
            self.joined[rank] = (models.parameter_values(), models.buffer_values())
        for number in range(joined, len(program.steps)):
            if not self._step(rank, number, program.steps[number], models):
                return
            if program.saves and not self._save(rank, number, models, checkpointer):
                return
        if not program.faults:
            dist.barrier()
            dist.destroy_process_group()

    def _step(self, rank, number, step, models):
        """Take a step; whether this rank goes on with the next one."""
        program, error = self.program, None
        self.scheduler.note("step", number, step.kind.name, step.zeroing.name)
        handles = self.faults.begin_step(number, models)
        models.left_out = program.left_out(rank, number)
        try:
            taken = perform(
                step,
                models,
                program.recipes[0],
                number,
                rank=rank,
                world_size=program.world_size,
                weigh=lambda loss, forward: (
                    weigh(loss, program.count(rank, number, forward)) if program.weighs else loss
                ),
            )
            for k, _ in enumerate(taken):
                if program.settles_late(step) and not k:
                    continue
                models.settle()
                self._note(rank, number, models)
        except (Planned, MemoryError) as raised:
            error = raised
            self.faults.end_step()
            models.abort(raised.args[0])
        except KeyboardInterrupt as raised:
            error = raised
            self.faults.interrupted(number)
            models.abort(Where.INTERRUPT)
        except (PeerAbortedError, CommunicationError, NonFiniteGradientError) as raised:
            error = raised
        self.faults.end_step()
        for handle in handles:
            handle.remove()
        models.is_quiet = False
        if error is not None:
            self._note(rank, number, models, error.with_traceback(None))
        self._ended[rank] = number + 1
        if isinstance(error, (Planned, MemoryError)) and program.lingers:
            self._linger(rank, number)
        try:
            if error is not None:
                models.zero_grad()  # in Megatron's wrapper it waits for what another chunk has sent
            elif step.updates:
                models.update()
                self.parameters[rank][number] = models.parameter_values()
        except CommunicationError as raised:  # another rank has died
            error = raised
            self._note(rank, number, models, error.with_traceback(None))
        return not isinstance(error, CommunicationError)

    def _save(self, rank, number, models, checkpointer):
        """Save a checkpoint, and load it after the last step; whether this rank goes on."""
        self.scheduler.note("saves", number)
        values = models.parameter_values()
        try:
            checkpointer.save(number)
            if number == len(self.program.steps) - 1:
                checkpointer.load()
                self.loaded[rank] = values, models.parameter_values()
        except CommunicationError as error:  # another rank has died
            self._note(rank, number, models, error.with_traceback(None))
            return False
        return True

    def _linger(self, rank, number):
        """A rank that has raised in a step waits for the others, which must not wait for it."""
        if not self.scheduler.wait(lambda: min(self._ended) > number, _LINGER_SECONDS):
            self.scheduler.fail(f"rank {rank} has failed in step {number}, and others wait: {self._ended} have ended")

    def _note(self, rank, number, models, error=None):
        self.scheduler.note("ends", number, "well" if error is None else f"{type(error).__name__}: {error}")
        result = Result(
            models.gradients(),
            models.buffer_values(),
            models.residuals(),
            models.computed.copy(),
            models.is_exact,
            models.take_called(),
            error,
        )
        self.results[rank][number].append(result)


def options_of(draw):
    """Options of wrappers."""
    return {
        "overlap": draw.random() < 0.8,
        "gradient_as_bucket_view": draw.random() < 0.7,
        "bucket_cap_mb": draw.choice([0.00001, 0.0001, 25.0]),
        "forward_sync_buffers": draw.random() < 0.7,
    }


def nodes_of(draw, world_size):
    """By rank, the node that it is on."""
    nodes = draw.choice([["here"], ["here", "there"], [f"node {k}" for k in range(world_size)], [""]])
    return tuple(nodes[rank % len(nodes)] for rank in range(world_size))


def fitting(recipes, wrapping):
    """The kinds of steps that these models can take."""
    unfit = set()
    if any(one.is_reentrant for one in recipes):
        unfit |= {StepKind.LOOK, StepKind.SOME_INPUTS}
    if recipes[1:]:
        unfit |= {StepKind.SOME_INPUTS, StepKind.TWO_LOSSES}  # some wrappers get another number of backwards
        # Which of them is complete where one has failed depends on the order; what is expected then is not modelled.
        unfit |= {StepKind.ABSENT, StepKind.ABSENT_WITH_MICRO_BATCH}
    if wrapping.compressor is not None:
        unfit |= {kind for kind in StepKind if any(word in kind.name for word in SEVERAL)} - {StepKind.MICRO_BATCHES}
    return [kind for kind in StepKind if kind not in unfit]


def _is_fitting(fault, step, wrapping, shares, *, is_several):
    """Whether what is promised for ``fault`` is known."""
    if fault.where is Where.INTERRUPT and (is_several or step.kind not in _ONE_SYNCHRONIZATION):
        return False  # the others may be one synchronization ahead
    if fault.where is Where.INTERRUPT and wrapping is Wrapping.OPTIMIZER:
        return False  # nor may these gather what it has updated
    if fault.where in (Where.NAN, Where.NAN_GRADIENT) and is_several:
        return False  # each drops the step by itself
    if step.kind is StepKind.LOOK and fault.where in (Where.BACKWARD, Where.EARLY):
        return False  # a rank that looks alone has another backward
    return wrapping is not Wrapping.HOOK or fault.where in _IN_USERS_GROUP


def modules_of(program):
    """The modules of a program, for one rank."""
    modules = [one.build() for one in program.recipes]
    for module, recipe in zip(modules, program.recipes, strict=True) if program.ties else ():
        for layer, made in zip(module.layers, recipe.layers, strict=True):
            if made.kind in (Kind.CHECKPOINTED, Kind.REENTRANT):
                layer.maps[0] = module.heads[0]
    for other in modules[1:]:
        if program.shares == "heads":
            other.heads = modules[0].heads
    return modules[:1] * len(modules) if program.shares == "all" else modules


def plain_models(program):
    """The modules of a program without wrappers."""
    return Models(modules_of(program), range(len(program.recipes)), momentum=program.momentum)
