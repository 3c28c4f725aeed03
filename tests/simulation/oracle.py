"""One process that does what the ranks did, and what a history is held to."""

import dataclasses
from itertools import compress

import torch

from law_models import Kind
from law_steps import Expectation, Reference, StepKind, Zeroing
from ppe_ddp import CommunicationError, NonFiniteGradientError

from .faults import RAISING, Where, has_one_node
from .scheduler import Unsound
from .wrappers import SHARD, Wrapping

SEVERAL = ("MICRO", "TWO_", "RETAINED")  # steps of several backwards: a rank may have done some of them

_SINGLE = (" ONE_BACKWARD", " LOOK", " SOME_INPUTS", " ABSENT")  # steps of one backward
SCALED_FIRST = (Wrapping.PLAIN, Wrapping.FUNCTION, Wrapping.SYNC_HOOK, Wrapping.CHECKED, Wrapping.SKIPPING)
_MOST_SECONDS = 200.0  # less than a program's timeout
TOLERANCE = 1e-5  # where a gradient came in two rounds, whose sums are made in another order


class ExactReference(Reference):
    """All ranks in one process, averaged in the order in which the simulated wire sums.

    Args:
        modules: The module of each rank.
        where_used: Whether a gradient is averaged over the ranks that have it.
        by_active: Whether all are averaged over the ranks that have inputs.
        count_of: The count of a loss by rank, step and forward; None where losses have no weights.

    Attributes:
        local: By rank, the gradients by name that it had before they were averaged; its own, as no step changes them.
        given: By rank, what these bring into the mean.
    """

    def __init__(self, modules, *, where_used=False, by_active=False, count_of=None):
        self._copies = modules
        self._where_used, self._by_active, self._count_of = where_used, by_active, count_of
        self._totals = {}  # by rank that has weighed a loss, the sum of its counts
        self._parameters = [module.table for module in modules]
        self._give_buffers(dict(modules[0].named_buffers()))

    @property
    def present(self):
        """The copies of the ranks that have inputs."""
        return [copy for rank, copy in enumerate(self._copies) if rank not in self.absent]

    def _weigher(self, step, number, rank):
        if self._count_of is None:
            return super()._weigher(step, number, rank)

        def weigh(loss, forward):
            count = self._count_of(rank, number, forward)
            if step.kind is not StepKind.LOOK or not forward:  # who looks alone trains on its first forward
                self._totals[rank] = self._totals.get(rank, 0.0) + count
            return loss * count

        return weigh

    def _weighed(self, rank, gradient):
        """What a gradient of a rank brings into the mean."""
        if gradient is None or rank not in self._totals:
            return gradient
        factor = len(self._copies) / (sum(self._totals.values()) or 1.0)
        return gradient * factor if self._totals[rank] else None

    def _average(self):
        nothing = dict.fromkeys(self._parameters[0])
        copies = enumerate(self._copies)
        self.local = [nothing if rank in self.absent else copy.gradients() for rank, copy in copies]
        self.given = self.local
        if self._totals:
            self.given = [
                {name: self._weighed(rank, one) for name, one in own.items()} for rank, own in enumerate(self.local)
            ]
        means, share = {}, 1.0 / len(self.local)
        for name, own in self._parameters[0].items():
            given = [table[name] for table in self.given]
            present = [table[name] for rank, table in enumerate(self._parameters) if rank not in self.absent]
            if all(gradient is None for gradient in given):
                means[name] = None
                for parameter in present:
                    parameter.grad = None  # of losses that weigh nothing
                continue
            total = None
            for gradient in given:
                part = torch.zeros_like(own) if gradient is None else torch.mul(gradient, share)
                total = part if total is None else total + part
            weights = [1.0] * len(given)
            if self._totals:
                weights = [self._totals.get(rank, 0.0) for rank in range(len(given))]
            divisor = sum(weights) - (len(self.absent) if self._by_active and not self._totals else 0)
            if self._where_used:
                divisor = sum(weight for weight, one in zip(weights, given, strict=True) if one is not None)
            means[name] = total.detach() * (sum(weights) / divisor if divisor else 1.0)
            is_sparse = any(parameter.grad is not None and parameter.grad.is_sparse for parameter in present)
            for parameter in present:
                parameter.grad = means[name].to_sparse(1) if is_sparse else means[name].clone()
        self._give_buffers(self._written_buffers())
        self._totals = {}
        return Expectation(means, {}, (), self._buffers)

    def _sources(self):
        takes_part = [rank not in self.absent and self._totals.get(rank, 1) != 0 for rank in range(len(self._copies))]
        return [*compress(self._copies, takes_part)] or self.present[:1]

    def scale(self, name):
        """The largest magnitude in a gradient on any rank."""
        given = [table[name] for table in self.given]
        return max((float(one.abs().max()) for one in given if one is not None and one.numel()), default=0.0)


def differences(found, expected, *, exact=True, scale=lambda name: 0.0):
    """Where gradients are not what they should be, as texts; ``scale`` of one is the measure for rounding."""
    texts = []
    for name, want in expected.items():
        got = found[name]
        if want is None or got is None:
            if want is not got:
                texts.append(f"{name} is {got}, and should be {want}")
        elif _same(got, want):
            pass
        elif exact:
            texts.append(f"{name} is {got.tolist()}, and should be exactly {want.tolist()}")
        elif not torch.allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE * (1 + scale(name))):
            texts.append(f"{name} is {got.tolist()}, and should be {want.tolist()}")
    return texts


def hold(run):
    """Hold what a run has given to one process that does the same, which is returned.

    Raises:
        Unsound: It is not that.
    """
    oracle = Oracle(run)
    oracle.check()
    return oracle


class Oracle:
    """One process that does what the ranks of a run did, and drops the steps that they have dropped."""

    def __init__(self, run):
        from .program import plain_models

        self.run, self.program = run, run.program
        copies = [plain_models(self.program) for _ in range(self.program.world_size)]
        where_used = self.program.options.get("average_where_used", False)
        self.reference = ExactReference(
            copies,
            where_used=where_used,
            by_active=not self.program.divides_by_all,
            count_of=self.program.count if self.program.weighs else None,
        )
        self.has_failed = False
        self.is_torn = self.is_over = False
        self._handles = []  # of hooks in one step
        self.ahead = set()  # ranks that have raised in the step after this one
        self.residuals = [{} for _ in range(self.program.world_size)]
        # Two halves are exact in any way; else some divide by three, and others multiply by a third.
        count, wrapping = self.program.world_size, self.program.wrapping
        self.is_exact = count in (2, 4) or wrapping in SCALED_FIRST
        # Whose gradients autograd adds up in the order of the forwards, or of the checkpoints that are run again.
        self.is_exact &= not (self.program.shares or self.program.ties or self.program.weighs)
        self.is_exact &= not self.program.is_sparse and wrapping is not Wrapping.OPTIMIZER
        # Megatron's wrapper tells of the last of a step's synchronizations, and an earlier one may go in two rounds.
        kinds = {layer.kind for recipe in self.program.recipes for layer in recipe.layers}
        self.is_exact &= not (wrapping.is_megatron and Kind.REENTRANT in kinds)

        if run.before is not None:
            self._go_on(run.before)

    def _go_on(self, before):
        """Begin with what the checkpoint of a run ``before`` has."""
        is_same = before.program.world_size == self.program.world_size
        for rank, copy in enumerate(self.reference.copies):
            copy.give(before.loaded[rank if is_same else 0][0])
            copy.velocity = dict(before.oracle.reference.copies[0].velocity)
        self.has_failed = True  # what buffers begin with is not modelled
        self.is_torn = before.oracle.is_torn
        if is_same:
            self.residuals = before.oracle.residuals

    def check(self):
        """Compare, step by step."""
        for number, step in enumerate(self.program.steps):
            if not self._check_step(number, step):
                self._check_time()
                return
            if number + 1 == max(self.program.counts, default=0):
                self._check_join()
        for rank, loaded in enumerate(self.run.loaded):
            if None not in (loaded, self.run.loaded[0]):
                saved, _ = loaded if self.is_torn else self.run.loaded[0]  # what differs is saved by each rank
                raise_where(f"rank {rank}, a checkpoint that was loaded", differences(loaded[1], saved))
        for fault in self.run.faults.fired:
            if fault.where is Where.DIES and fault.rank in self.run.scheduler.dead:
                self._check_death(fault)
        self._check_time()
        self.is_over = None not in self.run.loaded

    def _check_step(self, number, step):
        """Compare one; whether the ranks go on."""
        program, faults = self.program, self.run.faults
        results = [steps[number] for steps in self.run.results]
        raising = {f.rank for f in faults.fired if f.step == number and f.where in RAISING}
        hooked = {f.rank for f in faults.fired if f.step == number and f.where is Where.HOOK}
        self.ahead = {f.rank for f in faults.fired if f.step == number + 1 and f.where in RAISING}
        interrupted = {f.rank for f in faults.fired if f.step == number and f.where is Where.INTERRUPT}
        dying = {f.rank: f.step for f in faults.fired if f.where is Where.DIES}
        died = [dying[rank] for rank in self.run.scheduler.dead]
        while self._handles:
            self._handles.pop().remove()
        copies = self.reference.copies
        is_failing = bool(died) or any(one.error is not None for of_rank in results for one in of_rank)
        before = [copy.gradients() for copy in copies] if is_failing else []
        self.reference.absent = {rank for rank in range(len(copies)) if not program.has_inputs(rank, number)}
        for rank, copy in enumerate(copies):
            copy.left_out = program.left_out(rank, number)
            for change in program.changes if rank not in self.reference.absent else ():
                change.apply(rank, number, copy)
            self._handles += faults.poison(rank, number, copy)
        expected = self.reference.expectations(step, program.recipes[0], number)
        for k, expectation in enumerate(expected, start=-program.settles_late(step)):
            if k < 0:
                continue
            zeroing = step.zeroing if not k else Zeroing.NOTHING
            place = f"step {number}.{k} {step.kind.name}"
            there = {rank: one[k] for rank, one in enumerate(results) if len(one) > k}
            errors = {rank: one.error for rank, one in there.items() if one.error is not None}
            # Who dies may be a step ahead, and what it has sent before may not have arrived.
            is_fatal = any(step <= number + bool(errors) for step in died)
            is_bad = program.wrapping.looks_for_nan and self._is_bad()
            if interrupted:
                # The others may have their averages already.
                self.is_torn |= any(one.error is None for one in there.values())
                raising |= interrupted
            if errors or is_fatal:
                self.has_failed = True
                self.is_torn |= is_fatal and 0 < len(errors) < len(there)  # some have had the last word of who died
                self._check_failed(place, there, raising, hooked, expectation, before, zeroing, is_fatal=is_fatal)
                self.reference_zero()
                return not any(step <= number for step in died)
            if len(there) < len(self.reference.present):
                raise Unsound(f"{place}: only ranks {sorted(there)} have come")
            if is_bad:
                self.has_failed = True
                self.reference_zero()
                expectation = dataclasses.replace(expectation, means=dict.fromkeys(expectation.means))
            for rank, result in there.items():
                self._check_good(f"rank {rank}, {place}", rank, result, expectation, there, is_dropped=is_bad)
        if raising:
            raise Unsound(f"step {number}: rank {raising} has failed, and nobody was told")
        if step.updates:
            self._check_update(number)
        return True

    def _check_join(self):
        """All ranks have left join(): each has what those had that went on to the end."""
        first, values = self.run.joined[0], self.reference.present[0].parameter_values()
        for copy in self.reference.copies:
            copy.give(values)
        for rank, (parameters, buffers) in enumerate(self.run.joined):
            wrong = differences(parameters, first[0]) + differences(buffers, first[1])
            wrong += differences(parameters, values, exact=self.is_exact)
            raise_where(f"rank {rank}, after join()", wrong)

    def _is_bad(self):
        """Whether a rank has a gradient that is no number."""
        return any(g is not None and not bool(g.isfinite().all()) for own in self.reference.given for g in own.values())

    def _check_update(self, number):
        """Take a step of plain gradient descent in every copy, and compare."""
        for copy in self.reference.present:
            copy.update()
        if self.is_torn:
            return
        expected, first = self.reference.present[0].parameter_values(), None
        for rank, steps in enumerate(self.run.parameters):
            if steps[number] is not None:
                wrong = differences(steps[number], expected, exact=self.is_exact)
                wrong += differences(steps[number], first or steps[number])
                first = steps[number]
                raise_where(f"rank {rank}, parameters after step {number}", wrong)

    def _check_good(self, place, rank, result, expectation, there, *, is_dropped):
        wrapping, first = self.program.wrapping, next(iter(there.values()))
        if self.is_torn:  # some have taken a step that others have not
            if wrapping is not Wrapping.OPTIMIZER:
                raise_where(place, differences(result.gradients, first.gradients))
            return
        means = self._of_wrapping(expectation.means, result.gradients)
        self.is_exact &= result.is_exact
        if wrapping is Wrapping.OPTIMIZER:  # each rank has its shards
            wrong = [name for name, mean in means.items() if (mean is None) != (result.gradients[name] is None)]
        elif wrapping.compressor is not None:
            wrong = differences(result.gradients, first.gradients)
            if rank == 0:
                wrong += self._lost(expectation, there)
        else:
            wrong = differences(result.gradients, means, exact=self.is_exact, scale=self.reference.scale)
        if self.program.options["forward_sync_buffers"] and not (is_dropped or wrapping.is_megatron):
            buffers = first.buffers if self.has_failed else expectation.buffers
            wrong += differences(result.buffers, buffers)
        raise_where(place, wrong + self._wrongly_called(result, {} if is_dropped else result.gradients))

    def _wrongly_called(self, result, averages):
        """Where hooks of the user's were not called once with the average that is in ``.grad``."""
        wrong = []
        for name, given in result.called.items() if self.program.hooks else ():
            if averages.get(name) is None or not (given[-1] is SHARD or _same(given[-1], averages[name])):
                wrong.append(f"a hook of {name} was called with {given}, and the average is {averages.get(name)}")
            elif given[1:]:
                wrong.append(f"a hook of {name} was called {len(given)} times")
        if self.program.hooks and self.program.wrapping is not Wrapping.OPTIMIZER:  # which keeps earlier averages
            missing = [name for name, one in averages.items() if one is not None and name not in result.called]
            wrong += [f"a hook of {name} was not called" for name in missing]
        return wrong

    def _of_wrapping(self, expected, got):
        """What is expected, with zeros for what is not there where it has memory of its own."""
        if not self.program.wrapping.is_megatron:
            return expected
        return {
            name: torch.zeros_like(got[name]) if one is None and got.get(name) is not None else one
            for name, one in expected.items()
        }

    def _lost(self, expectation, there):
        """Where what was sent and what is kept are not what was given and what was kept."""
        after = [there[rank].residuals for rank in range(self.program.world_size)]
        wrong = []
        for name, mean in expectation.means.items():
            got = there[0].gradients[name]
            if mean is not None and got is not None:
                sides = [part + mean_of(tables, name, mean) for part, tables in ((mean, self.residuals), (got, after))]
                if not torch.allclose(*sides, rtol=1e-4, atol=1e-4):
                    wrong.append(
                        f"{name}: given and kept before {sides[0].tolist()}, sent and kept {sides[1].tolist()}"
                    )
        self.residuals = after
        return wrong

    def _check_failed(self, place, there, raising, hooked, expectation, before, zeroing, *, is_fatal):
        """Some rank has failed: all the others are told by name, and each has what it had computed."""
        program = self.program
        several = len(program.recipes) > 1
        # Where a gradient comes in two parts, a rank that is told between them has one of them.
        is_clear = not (self.is_torn or program.adds_parts or any(word in place for word in SEVERAL))
        is_single = any(place.endswith(kind) for kind in _SINGLE)
        gone_on = {rank for rank, result in there.items() if result.error is None}
        for rank, result in there.items():
            here, error = f"rank {rank}, {place}", result.error
            self._check_error(here, rank, error, raising, gone_on, is_fatal=is_fatal)
            if result.called and error is not None and not several and is_single:
                raise Unsound(f"{here}: hooks of {list(result.called)} were called in a step that has failed")
            own = self._of_wrapping(self.reference.local[rank], result.gradients)
            earlier = self._of_wrapping(before[rank], result.gradients)
            means = self._of_wrapping(expectation.means, result.gradients)
            for name, got in result.gradients.items():
                if got is SHARD:
                    continue
                cleared = None if got is None else torch.zeros_like(got)
                there_before = cleared if program.wrapping.is_megatron else None
                fitting = [own[name]]
                if rank in hooked or not (is_single and name in result.computed):  # which may not have come by then
                    fitting.append(
                        {Zeroing.NOTHING: earlier[name], Zeroing.TO_NONE: there_before}.get(zeroing, cleared)
                    )
                if error is None or several:
                    fitting.append(got if program.wrapping.compressor is not None else means[name])
                if is_clear and result.is_exact and not any(_same(got, one, exact=self.is_exact) for one in fitting):
                    texts = [None if one is None else one.tolist() for one in (got, own[name])]
                    raise Unsound(f"{here}: {name} is {texts[0]}, and the rank had computed {texts[1]}")
            if several or error is None:  # one wrapper, or rank, may have taken the step, and another not
                self.residuals[rank] = result.residuals
            is_whole = is_clear or (program.adds_parts and not self.is_torn)  # what is kept does not come in parts
            if is_whole and error is not None and not are_same(result.residuals, self.residuals[rank]):
                raise Unsound(f"{here}: a compressor has kept {result.residuals}, and before {self.residuals[rank]}")

    def _check_error(self, here, rank, error, raising, gone_on, *, is_fatal):
        """Hold what a rank has been told of a failure to what has happened; some ranks have ``gone_on``."""
        program, dead = self.program, self.run.scheduler.dead
        if is_fatal:
            named, raising = _named(error), raising | self.ahead  # of which one hears that has lost a dead rank
            is_seen_in_part = len(set(program.nodes)) > 1 or "" in program.nodes
            is_right = bool(named & (dead | raising))
            if len(program.recipes) == 1:  # else a rank that looks for others in one wrapper does not answer in another
                # Who has its averages and looks for nobody does not answer a rank of another node.
                is_right &= named <= dead | raising | (gone_on if is_seen_in_part else set())
            # Who was told of it gives up other wrappers, or leaves: its own error says of whom it has heard.
            may_be_second = len(program.recipes) > 1 or "has left" in str(error)
            is_right |= may_be_second and any(self._names(one, dead | raising) for one in named)
            # Who dies between its word and its count is known to nobody.
            is_right |= "rank that came too late" in str(error)
            if not (error is None or rank in raising or is_right):
                raise Unsound(f"{here}: names {named}, where {dead | raising} have failed: {error}")
        elif error is None:
            if not self.is_torn:
                raise Unsound(f"{here}: has its averages, while others have failed")
        elif program.wrapping is Wrapping.CHECKED and self._is_bad() and isinstance(error, NonFiniteGradientError):
            pass
        elif rank not in raising and not _named(error) & raising:
            # Who is told of it in one wrapper while its backward runs gives up the other ones, and says who has failed.
            if len(program.recipes) > 1 and getattr(error, "job_rank", None) in raising:
                return
            raise Unsound(f"{here}: {raising} have failed, and this is {type(error).__name__}: {error}")

    def _names(self, rank, culprits):
        """Whether an error of ``rank`` names one of these."""
        results = self.run.results[rank] if rank is not None else []
        return any(_named(one.error) & culprits for step in results for one in step if one.error is not None)

    def reference_zero(self):
        """Forget the gradients of a step that has failed."""
        for copy in self.reference.present:
            for parameter in copy.table.values():
                parameter.grad = None

    def _check_time(self):
        """Nobody has waited for a dead rank until the timeout; no rank is slow where one dies."""
        seconds = self.run.scheduler.now
        if self.run.scheduler.dead and has_one_node(self.program) and seconds > _MOST_SECONDS:
            raise Unsound(f"rank {self.run.scheduler.dead} is dead, and others have waited for {seconds:.0f} s")

    def _check_death(self, fault):
        """Every rank that had to go on was told, or all was over."""
        for rank, steps in enumerate(self.run.results):
            is_told = False
            for number, step in enumerate(steps):
                gone_on = {
                    other for other, own in enumerate(self.run.results) if own[number] and not own[number][-1].error
                }
                for one in step:
                    if isinstance(one.error, CommunicationError):
                        is_told = True
                        self._check_error(f"rank {rank}", rank, one.error, set(), gone_on, is_fatal=True)
            if rank != fault.rank and not is_told and not steps[-1]:
                raise Unsound(f"rank {rank} has neither ended nor been told that rank {fault.rank} is dead")


def _named(error):
    return set(getattr(error, "ranks", None) or ()) or {getattr(error, "rank", None)}


def _same(first, second, *, exact=True):
    if first is None or second is None:
        return first is second
    tolerance = 0 if exact else TOLERANCE
    return torch.equal(first, second) or torch.allclose(first, second, rtol=tolerance, atol=tolerance, equal_nan=True)


def are_same(first, second):
    """Whether what is kept by name is the same."""
    return all(_same(first.get(name), second.get(name)) for name in first.keys() | second.keys())


def mean_of(tables, name, like):
    """The mean over the ranks of what is kept for one parameter."""
    kept = [table[name].reshape(like.shape) for table in tables if name in table]
    return sum(kept, torch.zeros_like(like)) / len(tables)


def raise_where(place, wrong):
    """Raise where something is wrong."""
    if wrong:
        raise Unsound(f"{place}: {'; '.join(wrong[:3])}")
