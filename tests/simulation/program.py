"""What the ranks of one history do, drawn from its seed, and the run of it."""

import dataclasses
from datetime import timedelta
from random import Random
from typing import Any

import torch
from torch import distributed as dist

from law_models import Kind, Recipe
from law_steps import StepKind, TrainingStep, Zeroing, perform
from ppe_ddp import DistributedDataParallel
from ppe_ddp.backends.shm import ShmOptions

from . import store as processes
from .group import Network
from .oracle import ExactReference, differences, table_of, update
from .scheduler import Scheduler, Unsound

_KINDS = tuple(kind for kind in Kind if kind is not Kind.EMBEDDING)  # sparse gradients are no sums
_TIMEOUT = timedelta(seconds=300)
_RATE = 0.05


@dataclasses.dataclass(frozen=True)
class Program:
    """What the ranks do.

    Attributes:
        seed: Decides everything, also the order of events.
        world_size: How many ranks there are.
        recipe: Of the module.
        options: Of the wrapper.
        steps: In order.
    """

    seed: int
    world_size: int
    recipe: Recipe
    options: dict[str, Any]
    steps: tuple[TrainingStep, ...]

    @classmethod
    def of(cls, seed):
        """The program of ``seed``."""
        draw = Random(f"program {seed}")
        options = {
            "overlap": draw.random() < 0.8,
            "gradient_as_bucket_view": draw.random() < 0.7,
            "bucket_cap_mb": draw.choice([0.00001, 0.0002, 25.0]),
            "forward_sync_buffers": draw.random() < 0.7,
        }
        kinds = list(StepKind)
        steps = [
            TrainingStep(draw.choice(kinds), draw.choice(list(Zeroing)), draw.random() < 0.7)
            for _ in range(draw.randint(2, 5))
        ]
        recipe = Recipe.random(seed, kinds=_KINDS)
        if recipe.is_reentrant:
            unfit = (StepKind.LOOK, StepKind.SOME_INPUTS)
            steps = [dataclasses.replace(one, kind=StepKind.ONE_BACKWARD) if one.kind in unfit else one for one in steps]
        return cls(seed, draw.choice([2, 2, 3, 4]), recipe, options, tuple(steps))


class Run:
    """One run of a program.

    Args:
        program: What to do.

    Attributes:
        scheduler: With the log.
        results: By rank, step by step, what each synchronized backward has given: gradients, buffers, whether they are exact.
    """

    def __init__(self, program):
        self.program = program
        count = program.world_size
        draw = Random(f"order {program.seed}")
        self.scheduler = Scheduler(draw, processes.new_worlds(count), processes.use_world)
        self.store = processes.SimulatedStore()
        self.results = [[[] for _ in program.steps] for _ in range(count)]

    def run(self):
        """Run it, and hold it to the oracle.

        Raises:
            Unsound: It does not do what it should.
        """
        Network.current = Network()
        program = self.program
        self.scheduler.run([lambda rank=rank: self._train(rank) for rank in range(program.world_size)])
        self._check()

    def _train(self, rank):
        program = self.program
        size = program.world_size
        dist.init_process_group(
            "shm",
            store=self.store,
            rank=rank,
            world_size=size,
            timeout=_TIMEOUT,
            pg_options=ShmOptions(shared_memory=False),
        )
        wrapper = DistributedDataParallel(program.recipe.build(), **program.options)
        for number, step in enumerate(program.steps):
            self.scheduler.note("step", number, step.kind.name, step.zeroing.name)
            for _ in perform(step, wrapper, program.recipe, number, rank=rank, world_size=size):
                module = wrapper.module
                buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
                trace = wrapper.trace()
                is_exact = trace is None or not trace.repaired
                self.results[rank][number].append((table_of(module), buffers, is_exact))
            if step.updates:
                update(wrapper.module, _RATE)
        dist.barrier()
        dist.destroy_process_group()

    def _check(self):
        program = self.program
        oracle = ExactReference(program.recipe.build(), program.world_size)
        for number, step in enumerate(program.steps):
            expected = oracle.expectations(step, program.recipe, number)
            for k, expectation in enumerate(expected):
                for rank, steps in enumerate(self.results):
                    self._compare(steps[number][k], expectation, f"rank {rank}, step {number}.{k} {step.kind.name}")
            if step.updates:
                oracle.update(_RATE)

    def _compare(self, result, expectation, place):
        table, buffers, is_exact = result
        wrong = differences(table, expectation.means, exact=is_exact, scales=expectation.scales)
        if self.program.options["forward_sync_buffers"]:
            wrong += differences(buffers, expectation.buffers)
        if wrong:
            raise Unsound(f"{place}: {'; '.join(wrong[:3])}")
