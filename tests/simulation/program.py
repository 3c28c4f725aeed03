"""What the ranks of one history do, drawn from its seed, and the run of it."""

import contextlib
import dataclasses
from datetime import timedelta
from random import Random
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from law_models import Kind, Recipe, Record
from law_steps import StepKind, TrainingStep, Zeroing, perform
from ppe_ddp import CommunicationError, DistributedDataParallel, PeerAbortedError
from ppe_ddp.backends.shm import ShmOptions

from . import processes
from .faults import Fault, Faults, Planned, Where, reduce_function
from .group import Network
from .oracle import RATE, hold, table_of, update
from .scheduler import Scheduler
from .store import SimulatedStore

_KINDS = tuple(kind for kind in Kind if kind is not Kind.EMBEDDING)  # sparse gradients are no sums
_TIMEOUT = timedelta(seconds=300)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """What the ranks do.

    Attributes:
        seed: Decides everything, also the order of events.
        world_size: How many ranks there are.
        recipes: Of the modules, each with a wrapper of its own; all are in every backward.
        options: Of the wrappers.
        own_function: Whether they have a reduce function of the user's own.
        steps: In order.
        nodes: By rank, the node that it is on; empty where the system does not show the processes of others.
        faults: What befalls the ranks.
    """

    seed: int
    world_size: int
    recipes: tuple[Recipe, ...]
    options: dict[str, Any]
    own_function: bool
    steps: tuple[TrainingStep, ...]
    nodes: tuple[str, ...]
    faults: tuple[Fault, ...]

    @classmethod
    def of(cls, seed):
        """The program of ``seed``."""
        draw = Random(f"program {seed}")
        options = {
            "overlap": draw.random() < 0.8,
            "gradient_as_bucket_view": draw.random() < 0.7,
            "bucket_cap_mb": draw.choice([0.00001, 0.0001, 25.0]),
            "forward_sync_buffers": draw.random() < 0.7,
        }
        is_large = draw.random() < 0.03  # many small histories find more than a few long ones
        count = draw.choice([1, 2, 3]) if is_large else draw.choice([1, 1, 1, 1, 1, 2])
        most_layers = 5 if is_large else draw.choice([1, 1, 2, 3])
        recipes = [Recipe.random(seed + k, kinds=_KINDS) for k in range(count)]
        heads = recipes[0].heads if is_large else draw.choice([1, 1, 2])
        recipes = [dataclasses.replace(one, layers=one.layers[:most_layers], width=3, heads=heads) for one in recipes]
        unfit = set()
        if any(one.is_reentrant for one in recipes):
            unfit |= {StepKind.LOOK, StepKind.SOME_INPUTS}
        if recipes[1:]:
            unfit |= {StepKind.SOME_INPUTS, StepKind.TWO_LOSSES}  # some wrappers get another number of backwards
            # After a failure the ranks connect again in one wrapper after another, and wait there for those without.
            unfit |= {StepKind.ABSENT, StepKind.ABSENT_WITH_MICRO_BATCH}
        kinds = [kind for kind in StepKind if kind not in unfit]
        steps = [
            TrainingStep(draw.choice(kinds), draw.choice(list(Zeroing)), draw.random() < 0.7)
            for _ in range(draw.randint(2, 4) if is_large else draw.choice([1, 2, 2, 3]))
        ]
        world_size = draw.choice([3, 4]) if is_large else draw.choice([2, 2, 2, 2, 3])
        own_function = draw.random() < 0.3
        faults = Fault.some(draw, world_size, len(steps)) if draw.random() < 0.6 else ()
        unseen = (Where.BACKWARD, Where.EARLY)  # where a rank that looks alone has another backward
        faults = tuple(f for f in faults if steps[f.step].kind is not StepKind.LOOK or f.where not in unseen)
        nodes = draw.choice([["here"], ["here", "there"], [f"node {k}" for k in range(world_size)], [""]])
        nodes = tuple(nodes[rank % len(nodes)] for rank in range(world_size))
        return cls(seed, world_size, tuple(recipes), options, own_function, tuple(steps), nodes, faults)

    @property
    def dying(self):
        """The ranks that die."""
        return {fault.rank for fault in self.faults if fault.where is Where.DIES}


class Models(nn.Module):
    """Several modules beside each other, or their wrappers; the interface that a step uses.

    Args:
        parts: The modules, or the wrappers.
        order: In which their forwards are called.
    """

    def __init__(self, parts, order):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self._order = order
        self.is_quiet = False  # whether the last backward was, or is, not synchronized
        self.table = {_plain(name): parameter for name, parameter in self.named_parameters()}
        self._owners = [
            (_plain(f"{prefix}.{name}"), owner, name)
            for prefix, owner in self.named_modules()
            for name, _ in owner.named_buffers(recurse=False)
        ]

    def forward(self, batch, path):
        outputs = {}
        for k in self._order:
            outputs[k] = self.parts[k](batch, path)
        return tuple(one for k in sorted(outputs) for one in _listed(outputs[k]))

    def zero_grad(self, set_to_none=True):
        for parameter in self.table.values():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def buffer_values(self):
        """Copies of the buffers by name."""
        return {name: getattr(owner, key).clone() for name, owner, key in self._owners}

    @contextlib.contextmanager
    def no_sync(self):
        with contextlib.ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.no_sync())
            self.is_quiet = True
            yield
            self.is_quiet = False

    def start_grad_sync(self):
        for part in self.parts:
            part.start_grad_sync()

    def finish_grad_sync(self):
        for part in self.parts:
            part.finish_grad_sync()


class _Failing(Models):
    """The wrappers on a rank that may fail."""

    def forward(self, batch, path):
        faults = Faults.current
        batch = batch * 1.0
        batch.register_hook(faults.hook(Where.BACKWARD))
        outputs = [None if one is None else one * 1.0 for one in super().forward(batch, path)]
        for output in outputs:
            if output is not None:
                output.register_hook(faults.hook(Where.EARLY))
        faults.at(Where.LOSS)
        return tuple(outputs)


def _listed(outputs):
    if isinstance(outputs, Record):
        return outputs.heads
    return list(outputs.values()) if isinstance(outputs, dict) else outputs


@dataclasses.dataclass
class Result:
    """What a synchronized backward has given on a rank.

    Attributes:
        gradients: By name.
        buffers: By name.
        is_exact: Whether it went in one round.
        error: What it has raised.
    """

    gradients: dict[str, Any]
    buffers: dict[str, Any]
    is_exact: bool
    error: Exception | None


class Run:
    """One run of a program.

    Args:
        program: What to do.

    Attributes:
        scheduler: With the log.
        faults: What has happened.
        results: By rank, step by step, what each synchronized backward has given.
    """

    def __init__(self, program):
        self.program = program
        count = program.world_size
        draw = Random(f"order {program.seed}")
        self.scheduler = Scheduler(draw, processes.new_worlds(count), processes.use_world)
        self.store = SimulatedStore()
        self.faults = Faults(program.faults, count)
        self.results = [[[] for _ in program.steps] for _ in range(count)]

    def run(self):
        """Run it, and hold it to the oracle.

        Raises:
            Unsound: It does not do what it should.
        """
        Network.current, Faults.current = Network(), self.faults
        processes.Pages.current = processes.Pages(self.program.nodes)
        self.scheduler.at_death = Network.current.die
        self.scheduler.run([lambda rank=rank: self._train(rank) for rank in range(self.program.world_size)])
        hold(self)

    def _train(self, rank):
        program = self.program
        dist.init_process_group(
            "shm",
            store=self.store,
            rank=rank,
            world_size=program.world_size,
            timeout=_TIMEOUT,
            pg_options=ShmOptions(shared_memory=False),
        )
        options = {**program.options, **({"reduce_function": reduce_function} if program.own_function else {})}
        order = Random(f"forwards {program.seed} {rank}").sample(range(len(program.recipes)), len(program.recipes))
        models = _Failing([DistributedDataParallel(one.build(), **options) for one in program.recipes], order)
        for number, step in enumerate(program.steps):
            if not self._step(rank, number, step, models):
                return
        if not program.faults:
            dist.barrier()
            dist.destroy_process_group()

    def _step(self, rank, number, step, models):
        """Take a step; whether this rank goes on with the next one."""
        program, error = self.program, None
        self.scheduler.note("step", number, step.kind.name, step.zeroing.name)
        handles = self.faults.begin_step(number, models.table.values())
        try:
            for _ in perform(step, models, program.recipes[0], number, rank=rank, world_size=program.world_size):
                self._note(rank, number, models)
        except (Planned, MemoryError) as raised:
            error = raised
            if models.is_quiet or raised.args[0] in (Where.LOSS, Where.EARLY):  # the others cannot see that
                for part in models.parts:
                    part.abort_grad_sync("it has failed by plan")
        except (PeerAbortedError, CommunicationError) as raised:
            error = raised
        for handle in handles:
            handle.remove()
        models.is_quiet = False
        if error is not None:
            self._note(rank, number, models, error.with_traceback(None))
            models.zero_grad()
        elif step.updates:
            update(models, RATE)
        return not isinstance(error, CommunicationError)

    def _note(self, rank, number, models, error=None):
        gradients, buffers = table_of(models), models.buffer_values()
        traces = [part.trace() for part in models.parts]
        is_exact = not any(trace is not None and trace.repaired for trace in traces)
        self.scheduler.note("ends", number, "well" if error is None else f"{type(error).__name__}: {error}")
        self.results[rank][number].append(Result(gradients, buffers, is_exact, error))


def _plain(name):
    return name.replace(".module.", ".")


def plain_models(program):
    """The modules of a program without wrappers."""
    return Models([one.build() for one in program.recipes], range(len(program.recipes)))
