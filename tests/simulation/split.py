"""A model that is split over the ranks: what each rank does with its part, drawn from the seed, and the run of it.

            stage 0                  stage 1
data 0      rank 0 ── rank 1         rank 2 ── rank 3          ── one tensor-parallel group
data 1      rank 4 ── rank 5         rank 6 ── rank 7          of two: 2 x 2 x 2, of which most programs have two

Where there are experts, ranks with other experts are data-parallel ones to all else.

Layers send nothing to one another: what is simulated is what the library does behind a backward.
"""

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ppe_ddp import (
    CommunicationError,
    DisagreementError,
    DistributedOptimizer,
    NonFiniteGradientError,
    PeerAbortedError,
    megatron,
)
from ppe_ddp.backends.shm import ShmOptions
from ppe_ddp.optim import clip_grad_norm_

from . import processes
from .faults import BEHIND_BACKWARD, Fault, Faults, Planned, Where, fail_in
from .scheduler import Scheduler
from .store import SimulatedStore

RATE = 0.05
MOST_NORM = 0.7
DATA = ("data", "expert")
_WIDTH = 3
_SHAPES = [(2, 2, 1, 1)] * 6 + [(2, 1, 2, 1)] * 3 + [(1, 2, 1, 1), (1, 2, 2, 1), (1, 1, 2, 1), (2, 2, 2, 1)]
_SHAPES += [(2, 1, 1, 2)] * 6 + [(1, 1, 1, 2), (2, 2, 1, 2), (1, 2, 1, 2)]
_TIMEOUT = timedelta(seconds=300)
_PLACES = (Where.LOSS, Where.EARLY, Where.BACKWARD, Where.HOOK, Where.PACKING, Where.SLOW, *BEHIND_BACKWARD)
_CLEAN = 2  # steps at the end in which nothing happens
_PAUSES = 0.2


@dataclass(frozen=True)
class Place:
    """The coordinates of a rank, as those of a mesh: data, expert, pipeline, tensor."""

    data: int
    expert: int
    stage: int
    tensor: int


@dataclass(frozen=True, eq=False)
class SplitProgram:
    """What the ranks of one model do.

    Attributes:
        seed: Decides everything, also the order of events.
        shape: The number of data-parallel replicas, of tensor-parallel ranks, of pipeline stages, and of experts.
        chunks: How many wrappers each rank has.
        options: ``overlap`` of gradients, ``is_sharded`` for a distributed optimizer, ``gathers_late`` for its overlap,
            ``clips``, ``scales`` by a GradScaler, ``counts_tokens`` to divide by them, ``looks_for_nan``,
            ``has_small_buckets``.
        steps: How many.
        nodes: By rank, the node that it is on.
        faults: What befalls the ranks.
        is_twice: Whether each step has two backwards, each with its averages.
    """

    seed: int
    shape: tuple[int, int, int, int]
    chunks: int
    options: dict[str, bool]
    steps: int
    nodes: tuple[str, ...]
    faults: tuple[Fault, ...]
    is_twice: bool = False

    @classmethod
    def of(cls, seed):
        """The program of ``seed``."""
        draw = Random(f"split {seed}")
        shape = draw.choice(_SHAPES)
        options = {
            "overlap": draw.random() < 0.6,
            "is_sharded": draw.random() < 0.6,
            "gathers_late": draw.random() < 0.3,
            "clips": draw.random() < 0.5,
            "counts_tokens": draw.random() < 0.5,
            "looks_for_nan": draw.random() < 0.2,
            "has_small_buckets": draw.random() < 0.6,
        }
        options["scales"] = options["is_sharded"] and draw.random() < 0.4
        steps, size = draw.choice([1, 2, 3]), math.prod(shape)
        dies = draw.random() < 0.1
        kinds = [*_PLACES, *[Where.NAN] * 3 * options["looks_for_nan"]]
        if dies:  # a slow rank would be taken for another dead one
            kinds.remove(Where.SLOW)
        # Known: others take the optimizer's step, and wait there.
        if options["is_sharded"] and not (options["clips"] or options["scales"]):
            kinds.remove(Where.LATE)
        faults = [
            Fault(draw.randrange(size), draw.randrange(steps), draw.choice(kinds), draw.randrange(200))
            for _ in range(draw.choice([0, 1, 1, 2, 3]))
        ]
        if dies:
            faults.append(Fault(draw.randrange(size), draw.randrange(steps), Where.DIES, draw.randrange(60)))
        elif size > 1 and draw.random() < 0.1:
            faults += Fault.close(draw, size, steps + 1)
        nodes = draw.choice([["here"], ["here", "there"], [""]])
        nodes = tuple(nodes[rank % len(nodes)] for rank in range(size))
        one = cls(seed, shape, draw.choice([1, 1, 2]), options, steps + _CLEAN, nodes, tuple(faults))
        return one if faults else one.without_faults()

    def without_faults(self):
        """The same with what was drawn last, and apart from all else, as other seeds shall stay what they are.

        Steps of two backwards, of which the first one's averages are there; or one fault, of the last optimizer, which
        often has nothing to gather.
        """
        draw, change = Random(f"without faults {self.seed}"), dataclasses.replace
        if draw.random() < 0.5:
            return change(self, is_twice=True)
        if self.shape[3] == 1 or not self.options["is_sharded"]:
            return self
        number = 2 * self.chunks - 1 + draw.choice([0, 100])
        step = draw.randrange(self.steps - _CLEAN)
        return change(self, faults=(Fault(draw.randrange(self.world_size), step, Where.UPDATE, number),))

    @property
    def world_size(self):
        """How many ranks there are."""
        return len(self.places)

    @property
    def agrees_in_update(self):
        """Whether the ranks agree between the steps of the optimizers: each is unscaled where it is taken."""
        return self.options["scales"] and not self.options["clips"]

    @functools.cached_property
    def places(self):
        """By rank, where it is."""
        data, tensor, stages, experts = self.shape
        return [Place(*one) for one in itertools.product(*map(range, (data, experts, stages, tensor)))]

    def ranks(self, *names):
        """The groups of ranks that differ in these coordinates alone."""
        groups = {}
        for rank, place in enumerate(self.places):
            groups.setdefault(dataclasses.replace(place, **dict.fromkeys(names, 0)), []).append(rank)
        return list(groups.values())

    def peers(self, rank, *names):
        """The ranks of the group along these coordinates that ``rank`` is in: along those of data, if none is named."""
        return next(ranks for ranks in self.ranks(*(names or DATA)) if rank in ranks)

    def before(self, number):
        """The numbers of the inputs of further backwards of a step, which come before its own."""
        return [number + self.steps] * self.is_twice

    def hidden(self, number, rank, chunk, names):
        """The parameter of a chunk that a backward of this rank does not show before it comes to it, if any."""
        draw = Random(f"hidden {self.seed} {number} {rank} {chunk}")
        return draw.choice(names) if self.is_twice and draw.random() < 0.5 else ""

    def new_run(self):
        """A run of it."""
        return SplitRun(self)

    def told(self):
        """The program in words, a line each."""
        data, tensor, stages, experts = self.shape
        yield f"{data} replicas of {experts} experts, {stages} stages with {tensor} tensor-parallel ranks"
        yield f"on nodes: {self.nodes}"
        yield f"{self.chunks} chunks a rank, {self.steps} steps; options {self.options}"
        if self.is_twice:
            yield "  steps have two backwards each"
        for fault in self.faults:
            yield f"  fault: {fault.where.name} on rank {fault.rank} in step {fault.step} ({fault.number})"

    def smaller(self):
        """Programs with one thing less, those that leave out most first."""
        change = dataclasses.replace
        for k in range(self.steps) if self.steps > 1 + _CLEAN else ():
            kept = (change(one, step=one.step - (one.step > k)) for one in self.faults if one.step != k)
            yield change(self, steps=self.steps - 1, faults=tuple(kept))
        for k in range(len(self.faults)):
            yield change(self, faults=(*self.faults[:k], *self.faults[k + 1 :]))
        if self.chunks > 1:
            yield change(self, chunks=1)
        if self.is_twice:
            yield change(self, is_twice=False)
        for k in range(4) if self.world_size > 2 else ():
            if self.shape[k] > 1:
                shape = (*self.shape[:k], 1, *self.shape[k + 1 :])
                count = self.world_size // 2
                kept = tuple(one for one in self.faults if one.rank < count)
                yield change(self, shape=shape, nodes=self.nodes[:count], faults=kept)
        if set(self.nodes) != {"here"}:
            yield change(self, nodes=("here",) * self.world_size)
        for name, value in self.options.items():
            is_needed = name in ("clips", "scales") and any(one.where is Where.LATE for one in self.faults)
            if value and not is_needed:
                kept = tuple(one for one in self.faults if one.where is not Where.NAN or name != "looks_for_nan")
                yield change(self, options={**self.options, name: False}, faults=kept)


# ---------------------------------------------------------------------- the model


def names_of(program, place, chunk):
    """The names of the parameters of one chunk of a rank."""
    names = ["split", "norm", "averaged", "plain"]
    _, _, stages, experts = program.shape
    if experts > 1:
        names.append("expert")
    if stages > 1:
        names.append("every_stage")
        is_first = place.stage == 0 and chunk == 0
        if is_first or (place.stage == stages - 1 and chunk == program.chunks - 1):
            names.append("word")
    return names


def part_of(place, chunk, name):
    """Of which part of the model this is: ranks for which it is the same have copies of one parameter."""
    if name in ("every_stage", "word"):
        return (name,)
    tensor = 0 if is_same_on_tensor_ranks(name) or name in ("norm", "averaged") else place.tensor
    return (name, place.stage, chunk, tensor, place.expert if name == "expert" else 0)


def is_same_on_tensor_ranks(name):
    """Whether tensor-parallel ranks compute the same gradient of it."""
    return name in ("plain", "every_stage", "word")


def start_of(part):
    """What a part begins with."""
    generator = torch.Generator().manual_seed(Random(f"start {part}").getrandbits(60))
    return torch.randn(_WIDTH, generator=generator)


@functools.lru_cache(maxsize=1000)  # of one history
def input_of(program, number, place, chunk, name):
    """What a parameter is multiplied by in a step; None where this rank does not use it."""
    seen = place.tensor if not is_same_on_tensor_ranks(name) else 0
    draw = Random(f"input {program.seed} {number} {place.data} {place.expert} {place.stage} {seen} {chunk} {name}")
    if draw.random() < (0.6 if name == "expert" else 0.25):
        return None
    return torch.randn(_WIDTH, generator=torch.Generator().manual_seed(draw.getrandbits(60)))


def tokens_of(program, number, place):
    """How many tokens a replica has had."""
    return 1 + (program.seed + 3 * number + 2 * place.data + place.expert) % 5


class Part(nn.Module):
    """One chunk of a rank, with Megatron's marks."""

    share_embeddings_and_output_weights = True

    def __init__(self, program, place, chunk):
        super().__init__()
        self.has_word = "word" in names_of(program, place, chunk)
        for name in names_of(program, place, chunk):
            parameter = nn.Parameter(start_of(part_of(place, chunk, name)))
            parameter.tensor_model_parallel = name in ("split", "expert")
            parameter.allreduce = name != "expert"
            if name == "norm":
                parameter.sequence_parallel = True
            elif name == "averaged":
                parameter.average_gradients_across_tp_domain = True
            elif name == "every_stage":
                parameter.pipeline_parallel = True
            setattr(self, name, parameter)

    def shared_embedding_or_output_weight(self):
        """As in Megatron; a rank may fail there."""
        Faults.current.at(Where.FINALIZE)
        return self.word if self.has_word else None

    def forward(self, anchor, inputs, hidden=""):
        """The loss of this chunk: of each parameter by itself, one of them ``hidden`` in a reentrant checkpoint."""
        loss = anchor.sum()
        for name, given in inputs.items():
            if given is not None and name == hidden:
                loss = loss + checkpoint(partial(self._loss_of, name, given), anchor, use_reentrant=True)
            elif given is not None:
                loss = loss + self._loss_of(name, given, anchor)
        return loss

    def _loss_of(self, name, given, _anchor):
        return (getattr(self, name) * given).square().sum()


class RankOfModel:
    """What one rank has of the model, and its steps; the interface that :class:`Faults` uses."""

    def __init__(self, program, rank):
        self.program, self.rank, self.place = program, rank, program.places[rank]
        options = program.options
        config = megatron.DistributedDataParallelConfig(
            overlap_grad_reduce=options["overlap"],
            use_distributed_optimizer=options["is_sharded"],
            check_for_nan_in_grad=options["looks_for_nan"],
            bucket_size=5 if options["has_small_buckets"] else None,
        )
        model_config = SimpleNamespace(calculate_per_token_loss=options["counts_tokens"])
        groups = self._groups()
        self.chunks = [
            megatron.DistributedDataParallel(model_config, config, Part(program, self.place, chunk), groups=groups)
            for chunk in range(program.chunks)
        ]
        self.table = {
            (chunk, name): parameter
            for chunk, part in enumerate(self.chunks)
            for name, parameter in part.module.named_parameters()
        }
        self.trained = list(self.table.values())
        self.computed, self.is_poisoned = set(), False
        self.optimizers = []
        for part in self.chunks if options["is_sharded"] else ():
            self._add_optimizers(part)
        for parameter in self.trained:
            parameter.register_hook(_pause)
        fail_in(self.chunks[0], "scale_gradients", Where.LATE)
        if self.optimizers:
            fail_in(self.optimizers[0], "_gradients", Where.CLIP)
        self.norm = None

    def _add_optimizers(self, part):
        """One for the parameters of a chunk, and one for its experts, if there are any."""
        experts = [part.module.expert] if self.program.shape[3] > 1 else []
        others = [one for name, one in part.module.named_parameters() if name != "expert"]
        for parameters in filter(None, (others, experts)):
            inner, number = torch.optim.SGD(parameters, RATE), len(self.optimizers)
            for is_after, hook in enumerate((inner.register_step_pre_hook, inner.register_step_post_hook)):
                hook(functools.partial(self._fail_in_update, number, is_after))
            sharded = part.sharded(experts=parameters is experts) if experts else part
            self.optimizers.append(DistributedOptimizer(inner, sharded, overlap=self.program.options["gathers_late"]))

    def _fail_in_update(self, number, is_after, *_):
        """Raise where it has to, before an optimizer's step or after it."""
        place = (number, is_after)
        Faults.current.at(
            Where.UPDATE, lambda fault: (fault.number % len(self.optimizers), fault.number // 100) == place
        )

    def _groups(self):
        """This rank's of all groups, which all ranks make together."""
        options, found = ShmOptions(shared_memory=False), {}
        kinds = [(DATA, "data"), (["tensor"], "tensor"), (["stage"], "pipeline"), (["stage"], "embedding")]
        kinds += [(["data"], "expert")] * (self.program.shape[3] > 1)
        for names, field in kinds:
            for ranks in self.program.ranks(*names):
                group = dist.new_group(ranks, _TIMEOUT, pg_options=options)
                if self.rank in ranks:
                    found[field] = group
        return megatron.ParallelGroups(**found)

    def values(self):
        """Copies of the parameters."""
        return {key: parameter.detach().clone() for key, parameter in self.table.items()}

    def gradients(self):
        """Copies of ``main_grad``; none where each rank has its shards."""
        if self.optimizers:
            return {}
        return {key: parameter.main_grad.detach().clone() for key, parameter in self.table.items()}

    def backward(self, number):
        """Forward and backward; who fails there tells its data-parallel peers, where they cannot know."""
        faults, losses = Faults.current, []
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        try:
            for chunk, part in enumerate(self.chunks):
                anchor = torch.zeros(1, requires_grad=True) * 1.0
                anchor.register_hook(faults.hook(Where.BACKWARD))
                names = names_of(self.program, self.place, chunk)
                inputs = {name: input_of(self.program, number, self.place, chunk, name) for name in names}
                hidden = self.program.hidden(number, self.rank, chunk, names)
                loss = part(anchor, inputs, hidden) * (float("nan") if self.is_poisoned else 1.0)
                loss.register_hook(faults.hook(Where.EARLY))
                losses.append(loss)
            faults.at(Where.LOSS)
            (self.scaler.scale(sum(losses)) if self.program.options["scales"] else sum(losses)).backward()
        except (Planned, MemoryError) as error:
            if not self.program.options["overlap"] or error.args[0] in (Where.LOSS, Where.EARLY):
                for part in self.chunks:
                    part.abort_grad_sync(str(error))
            return error
        except PeerAbortedError as error:
            return error
        return None

    def finalize(self, number):
        """Make the gradients whole, on all ranks."""
        tokens = None
        if self.program.options["counts_tokens"]:
            is_last = self.place.stage == self.program.shape[2] - 1
            tokens = torch.tensor([tokens_of(self.program, number, self.place) if is_last else 0])
        megatron.finalize_model_grads(self.chunks, tokens)

    def update(self):
        """Clip, and take the optimizer's step."""
        if self.optimizers:
            scales = self.program.options["scales"]
            if self.program.options["clips"]:
                for optimizer in self.optimizers if scales else ():
                    self.scaler.unscale_(optimizer)
                self.norm = clip_grad_norm_(self.optimizers, MOST_NORM)
            for optimizer in self.optimizers:
                self.scaler.step(optimizer) if scales else optimizer.step()
            return
        with torch.no_grad():
            for parameter in self.trained:
                parameter.sub_(parameter.main_grad, alpha=RATE)

    def load_checkpoint(self):
        """Begin again: what all ranks do when they are told that copies may differ."""
        for optimizer in self.optimizers:
            optimizer.synchronize()
        with torch.no_grad():
            for (chunk, name), parameter in self.table.items():
                parameter.copy_(start_of(part_of(self.place, chunk, name)))

    def counters(self):
        """By the ranks that share them, the counters of all groups of this rank."""
        found = {}
        parallel = self.chunks[0].gradient_buffers.model_parallel
        shared = [(name, parallel.group(name)) for name in ("tensor", "pipeline", "embedding", "data")]
        for k, part in enumerate(self.chunks):
            shared += [(f"wrapper {k}, {kind}", groups) for kind, groups in enumerate(part.gradient_buffers.groups)]
        for name, groups in shared:
            if groups is not None:
                ranks = tuple(dist.get_process_group_ranks(groups.parent))
                found[name, ranks] = (groups.step, groups.generation, groups.is_closed)
        return found


def _pause(_gradient):
    """A gradient has taken its time."""
    scheduler = Scheduler.current
    if scheduler.draw.random() < _PAUSES:
        scheduler.sleep(scheduler.draw.choice([0.0, 1e-5, 0.1]))


# ---------------------------------------------------------------------- the run


@dataclass
class Outcome:
    """How a step has ended on a rank.

    Attributes:
        error: What it has raised.
        gradients: Those that are whole; empty where it was given up, or each rank has shards.
        norm: Before clipping.
        values: The parameters after it; None where they may still be on their way.
    """

    error: Exception | None = None
    gradients: dict[Any, Any] = dataclasses.field(default_factory=dict)
    norm: Any = None
    values: dict[Any, Any] | None = None


class SplitRun:
    """One run of a program.

    Args:
        program: What to do.

    Attributes:
        scheduler: With the log.
        faults: What has happened.
        outcomes: By rank, step by step; shorter where a rank was lost.
        counters: By rank, at the end.
    """

    def __init__(self, program):
        self.program = program
        count = program.world_size
        self.scheduler = Scheduler(Random(f"order {program.seed}"), processes.new_worlds(count), processes.use_world)
        self.schedulers = [self.scheduler]
        self.store = SimulatedStore()
        self.faults = Faults(program.faults, (), count)
        self.outcomes = [[] for _ in range(count)]
        self.counters = [{} for _ in range(count)]

    def run(self):
        """Run it, and hold it to the oracle.

        Raises:
            Unsound: It does not do what it should.
        """
        from .split_oracle import SplitOracle

        processes.run_ranks(self.program, self.scheduler, self.faults, self._train)
        SplitOracle(self).check()

    def _train(self, rank):
        program = self.program
        options = ShmOptions(shared_memory=False)
        dist.init_process_group(
            "shm", store=self.store, rank=rank, world_size=program.world_size, timeout=_TIMEOUT, pg_options=options
        )
        try:
            model = RankOfModel(program, rank)
        except CommunicationError as error:  # a rank that has begun is dead already
            self.outcomes[rank].append(Outcome(error.with_traceback(None)))
            return
        for number in range(program.steps):
            outcome = self._step(rank, number, model)
            self.outcomes[rank].append(outcome)
            text = "well" if outcome.error is None else f"{type(outcome.error).__name__}: {outcome.error}"
            self.scheduler.note("ends", number, text)
            if isinstance(outcome.error, CommunicationError):
                return
        self.counters[rank] = model.counters()
        if not program.faults:
            dist.barrier()
            dist.destroy_process_group()

    def _step(self, rank, number, model):
        self.scheduler.note("step", number, "of a split model", "zeroed")
        handles = self.faults.begin_step(number, model)
        outcome, model.norm = Outcome(), None
        try:
            for part in model.chunks:
                part.zero_grad_buffer()
            for before in self.program.before(number):
                model.backward(before)
                for part in model.chunks:
                    part.finish_grad_sync()
            failed = model.backward(number)
            model.finalize(number)
            if failed is not None:
                raise AssertionError(f"finalize_model_grads() has not told of {failed}")
            outcome.gradients = model.gradients()
            model.update()
            outcome.norm = model.norm
        except DisagreementError as raised:
            outcome.error = raised.with_traceback(None)
            model.load_checkpoint()
        except (Planned, MemoryError, PeerAbortedError, CommunicationError, NonFiniteGradientError) as raised:
            outcome.error = raised.with_traceback(None)
        self.faults.end_step()
        for handle in handles:
            handle.remove()
        is_late = self.program.options["gathers_late"] and self.scheduler.draw.random() < 0.5
        if not (is_late and number + 1 < self.program.steps):
            try:
                for optimizer in model.optimizers:
                    optimizer.synchronize()
                outcome.values = model.values()
            except (PeerAbortedError, CommunicationError) as raised:
                outcome.error = outcome.error or raised.with_traceback(None)
        return outcome
