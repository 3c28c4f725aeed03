"""One process that does what the ranks of a split model did, and what such a history is held to."""

import re

import torch

from ppe_ddp import CommunicationError, DisagreementError, NonFiniteGradientError

from .faults import Where
from .scheduler import Unsound
from .split import MOST_NORM, RATE, input_of, names_of, part_of, start_of, tokens_of

_TOLERANCE = 1e-4
_DROPPING = (Where.LOSS, Where.EARLY, Where.BACKWARD, Where.HOOK, Where.PACKING, Where.NAN, Where.FINALIZE, Where.CLIP)


class WholeModel:
    """The model in one process, each part once."""

    def __init__(self, program):
        self.program = program
        self._owners = {}  # by part, the places and chunks that have it
        for place in program.places:
            for chunk in range(program.chunks):
                for name in names_of(program, place, chunk):
                    self._owners.setdefault(part_of(place, chunk, name), []).append((place, chunk, name))
        self.load_checkpoint()

    def load_checkpoint(self):
        """Begin again."""
        self.values = {part: start_of(part) for part in self._owners}

    def gradients(self, number):
        """By part, what every rank that has it must have of it in a step."""
        program = self.program
        data, tensor, _, experts = program.shape
        totals = {}
        for part, owners in self._owners.items():
            total = torch.zeros_like(self.values[part])
            for place, chunk, name in owners:
                # Summed over the ranks that see different inputs; of the others, the first tensor-parallel rank's.
                is_counted = place.tensor == 0 or name in ("split", "norm", "averaged", "expert")
                for backward in (*program.before(number), number) if is_counted else ():
                    given = input_of(program, backward, place, chunk, name)
                    if given is not None:
                        total += 2 * self.values[part] * given.square()
            totals[part] = total / tensor if part[0] == "averaged" else total
        if program.options["counts_tokens"]:
            replicas = {(place.data, place.expert): tokens_of(program, number, place) for place in program.places}
            divisor = sum(replicas.values())
        else:
            divisor = data * experts
        return {part: total / divisor for part, total in totals.items()}

    def clip(self, gradients):
        """Clip as all ranks together; the norm before."""
        norm = torch.cat([*gradients.values()]).norm()
        factor = min(1.0, MOST_NORM / (norm + 1e-6))
        return {part: gradient * factor for part, gradient in gradients.items()}, norm

    def update(self, gradients):
        """Take a step of plain gradient descent."""
        for part, gradient in gradients.items():
            self.values[part] = self.values[part] - RATE * gradient


class SplitOracle:
    """What a history of a split model is held to."""

    def __init__(self, run):
        self.run, self.program = run, run.program
        self.model = WholeModel(self.program)
        self.untold = set()  # ranks whose optimizer's step has failed, of which not all ranks have been told
        self.is_told_perhaps = False
        self.is_torn = False
        self.are_copies_equal = True  # although the step was torn

    def check(self):
        """Compare, step by step."""
        deaths = [self.run.faults.steps[rank] for rank in self.run.scheduler.dead]
        for number in range(self.program.steps):
            if any(step <= number + 1 for step in deaths):  # others may be a step behind
                self._check_death(deaths)
                return
            self._check_step(number)
        self._check_counters()

    def _check_step(self, number):
        fired = [fault for fault in self.run.faults.fired if fault.step == number]
        outcomes = [of_rank[number] for of_rank in self.run.outcomes]
        errors = {rank: one.error for rank, one in enumerate(outcomes) if one.error is not None}
        dropping = {fault.rank for fault in fired if fault.where in _DROPPING}
        dropping |= {rank for rank in range(len(outcomes)) if self._poisons(rank, number)}
        late = {fault.rank for fault in fired if fault.where is Where.LATE}
        updates = [fault for fault in fired if fault.where is Where.UPDATE]
        place = f"step {number}"
        options = self.program.options
        if dropping or (late and options["is_sharded"] and (options["clips"] or options["scales"])):
            self._check_all_failed(place, errors, dropping | late)
        elif self.untold and (errors or not self.is_told_perhaps):
            self._check_told(place, errors)
        elif late:
            self._check_named(place, errors, late)
            self.is_torn, self.are_copies_equal = True, False
        elif updates and not self._check_update_failed(place, errors, updates):
            pass
        else:
            self._check_good(place, number, outcomes, errors)
        self._check_values(place, outcomes)

    def _poisons(self, rank, number):
        program, place = self.program, self.program.places[rank]
        uses = (
            input_of(program, number, place, chunk, name) is not None
            for chunk in range(program.chunks)
            for name in names_of(program, place, chunk)
        )
        return program.options["looks_for_nan"] and self.run.faults.poisons(rank, number) and any(uses)

    def _check_all_failed(self, place, errors, culprits):
        missing = set(range(self.program.world_size)) - errors.keys()
        if missing:
            raise Unsound(f"{place}: {culprits} have failed, and {missing} have completed it")
        self._check_named(place, errors, culprits)

    def _check_named(self, place, errors, culprits):
        """Whoever is named has failed."""
        for rank, error in errors.items():
            here = f"rank {rank}, {place}"
            if isinstance(error, CommunicationError):
                raise Unsound(f"{here}: {culprits} have failed, and this is {error}")
            if isinstance(error, DisagreementError):
                raise Unsound(f"{here}: nobody's update has failed, and this is {error}")
            if isinstance(error, NonFiniteGradientError) or rank in culprits:
                continue
            named = _ranks_named(str(error))
            if not named:
                named = {self.program.peers(rank)[error.rank] if error.job_rank is None else error.job_rank}
            if not named <= culprits:
                raise Unsound(f"{here}: names {named}, where {culprits} have failed: {error}")

    def _check_told(self, place, errors):
        """An optimizer's step has failed before: all are told."""
        text = f"DistributedOptimizer.step() has failed on rank {max(self.untold)} since"
        for rank in range(self.program.world_size):
            error = errors.get(rank)
            if not (isinstance(error, DisagreementError) and text in str(error)):
                raise Unsound(f"rank {rank}, {place}: {self.untold} have failed to update, and this is {error!r}")
        self.untold.clear()
        self.model.load_checkpoint()
        self.is_torn, self.are_copies_equal = False, True

    def _check_update_failed(self, place, errors, updates):
        """Whether the step is good nevertheless, as there was nothing left to gather, and nobody waited."""
        updating = {fault.rank for fault in updates}
        everyone = [range(self.program.world_size)] * self.program.agrees_in_update
        peers = set().union(*everyone, *(self.program.peers(rank) for rank in updating))
        if not updating <= errors.keys() <= peers:
            raise Unsound(f"{place}: {updating} have failed to update, and {set(errors)} have errors: {errors}")
        self._check_named(place, errors, updating)
        waits = {self._waits(fault) for fault in updates}
        if waits == {False} and not (self.program.agrees_in_update and errors.keys() != updating):
            if errors.keys() != updating:
                raise Unsound(f"{place}: nobody has waited for {updating}, and these have errors: {errors}")
            errors.clear()
            return True
        self.is_told_perhaps = True not in waits
        _, tensor, stages, _ = self.program.shape
        if tensor * stages > 1:  # else all that wait have been told, and the next step gathers the rest
            self.untold |= updating
        self.is_torn, self.are_copies_equal = True, False
        return False

    def _waits(self, fault):
        """Whether ranks wait for the optimizers from that on which has failed; None where it cannot be known."""
        program = self.program
        has_experts = program.shape[3] > 1
        optimizers = [(chunk, of) for chunk in range(program.chunks) for of in (False, True)[: 1 + has_experts]]
        found = set()
        for chunk, is_expert in optimizers[fault.number % len(optimizers) :]:
            group = program.peers(fault.rank, "data") if is_expert else range(program.world_size)
            found.add(
                any(
                    input_of(program, fault.step, program.places[rank], chunk, name) is not None
                    for rank in group
                    for name in names_of(program, program.places[rank], chunk)
                    if (name == "expert") == is_expert
                )
            )
        # After a failure the next step gathers everything.
        return True in found or (None if any(one.step < fault.step for one in self.run.faults.fired) else False)

    def _check_good(self, place, number, outcomes, errors):
        if errors:
            raise Unsound(f"{place}: nobody has failed, and there are errors: {errors}")
        self.untold.clear()
        self.are_copies_equal |= self.program.options["is_sharded"]
        if self.is_torn:
            return
        gradients = self.model.gradients(number)
        for rank, one in enumerate(outcomes):
            self._compare(f"rank {rank}, {place}, gradients", rank, one.gradients, gradients)
        if self.program.options["clips"] and self.program.options["is_sharded"]:
            gradients, norm = self.model.clip(gradients)
            for rank, one in enumerate(outcomes):
                if one.norm is not None and not torch.allclose(one.norm, norm, rtol=_TOLERANCE):
                    raise Unsound(f"rank {rank}, {place}: the norm is {one.norm}, and should be {norm}")
        self.model.update(gradients)

    def _check_values(self, place, outcomes):
        """Parameters are those of one process, and copies are equal to the bit."""
        if not self.are_copies_equal:
            return
        first = {}
        for rank, one in enumerate(outcomes):
            if one.values is None:
                continue
            if not self.is_torn:
                self._compare(f"rank {rank}, {place}, parameters", rank, one.values, self.model.values)
            for (chunk, name), got in one.values.items():
                place_of_rank = self.program.places[rank]
                part = part_of(place_of_rank, chunk, name)
                # Known: a late gradient is averaged by itself and then added. With averages that are there already,
                # this rounds otherwise than one sum; and it may be late in one group, and not in another.
                group = place_of_rank.tensor, place_of_rank.stage
                copy = (part, group) if self.program.is_twice else part
                if not torch.equal(got, first.setdefault(copy, got)):
                    raise Unsound(f"rank {rank}, {place}: copies of {part} differ: {got} and {first[copy]}")

    def _compare(self, here, rank, found, expected):
        for (chunk, name), got in found.items():
            want = expected[part_of(self.program.places[rank], chunk, name)]
            if not torch.allclose(got, want, rtol=_TOLERANCE, atol=_TOLERANCE):
                raise Unsound(f"{here}: {chunk}.{name} is {got.tolist()}, and should be {want.tolist()}")

    def _check_death(self, steps):
        """Every rank that had to go on was told, at the latest in the step after."""
        ended = [len(self.run.outcomes[rank]) for rank in self.run.scheduler.dead]  # it may have gone on for a while
        if any(step + 2 > self.program.steps for step in (*steps, *(one + 1 for one in ended))):
            return
        for rank, outcomes in enumerate(self.run.outcomes):
            errors = [one.error for one in outcomes]
            if rank not in self.run.scheduler.dead and not any(isinstance(e, CommunicationError) for e in errors):
                raise Unsound(f"rank {rank} was not told that {self.run.scheduler.dead} are dead: {errors}")

    def _check_counters(self):
        """All ranks of a group have had as many steps, and connected as often."""
        first = {}
        for rank, counters in enumerate(self.run.counters):
            for key, values in counters.items():
                if first.setdefault(key, values) != values:
                    raise Unsound(f"rank {rank}: step, generation, closed of {key}: {values}, not {first[key]}")
        steps = {values for (name, _), values in first.items() if not name.startswith("wrapper")}
        if any(is_closed for *_, is_closed in steps):
            raise Unsound(f"groups are closed after steps in which nothing has failed: {first}")


def _ranks_named(text):
    """The ranks of the job that an error names."""
    return {int(number) for number in re.findall(r"\(rank (\d+) of the job\)", text)}
