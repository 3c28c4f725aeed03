"""One process that trains as each rank does, and takes the outer steps; what such a history is held to."""

from copy import deepcopy

import torch

from law_steps import LocalSubject, perform
from ppe_ddp import DisagreementError, NonFiniteGradientError

from .faults import Planned, Where, has_one_node
from .oracle import SCALED_FIRST, TOLERANCE, ExactReference, are_same, differences, mean_of, raise_where
from .outer import SCALE, inner_step, outer_steps_of
from .program import plain_models
from .scheduler import Unsound
from .wrappers import RATE, Wrapping

_MOST_SECONDS = 200.0  # less than a program's timeout


class _Copy:
    """What one rank trains, in one process."""

    def __init__(self, program):
        self.models = plain_models(program)
        self.parameters = list(self.models.table.values())
        self.models.trained = self.parameters
        self.inner = torch.optim.SGD(self.parameters, RATE, momentum=program.momentum)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE) if program.outer.scales else None
        self.inner.register_step_pre_hook(self._begin)
        self.begun = None
        self.later = {}  # by wrapper, the parameters of an outer step that has arrived and has yet to be completed
        self.residuals = {}

    def _begin(self, *_):
        for wrapper in [*self.later]:
            self.complete(wrapper)
        self.begun = self.models.parameter_values()

    def complete(self, wrapper):
        """Complete the outer step whose averages have arrived."""
        self.models.give(self.models.parameter_values() | self.later.pop(wrapper, {}))


class OuterOracle:
    """What a history of ranks that train by themselves is held to."""

    def __init__(self, run):
        self.run, self.program = run, run.program
        program = self.program
        self._use([_Copy(program) for _ in range(program.world_size)])
        self.start = self.copies[0].models.parameter_values()
        self.last, self.velocity = dict(self.start), {}
        self.is_known = True  # whether some rank has shown what a compressor has sent
        self.lost = set()  # wrappers of which some ranks have taken an outer step that others have not
        self.is_exact = program.world_size in (2, 4) or program.wrapping in SCALED_FIRST

    def _use(self, copies):
        self.copies = copies
        self.reference = ExactReference([one.models for one in copies])

    is_over = False  # no other processes go on

    def check(self):
        """Compare, step by step."""
        dying = [fault.step for fault in self.run.faults.fired if fault.where is Where.DIES]
        counts = outer_steps_of(self.program.steps, self.program.outer)
        for number in range(len(self.program.steps)):
            # Who dies may be a step ahead, and what it has sent before may not have arrived.
            if self.run.scheduler.dead and any(step <= number + 1 + self._ahead(number, counts) for step in dying):
                self._check_death()
                return
            if not self._check_step(number, counts[number]):
                return
            if self.program.outer.resumes is not None and number == self.program.outer.resumes[0]:
                if self.lost:  # of what is saved then nothing is promised
                    return
                self._resume(self.program.outer.resumes[1])
        self._check_death()

    def _ahead(self, number, counts):
        """How many steps a rank may be ahead of one that waits in a step: there is no outer step in them."""
        return next((k for k, count in enumerate(counts[number + 1 :]) if count), len(counts))

    def _check_step(self, number, count):
        """Compare one; whether the ranks go on."""
        given = self.run.trained[: len(self.copies)]
        if any(number not in steps for steps in given):
            raise Unsound(f"step {number}: nobody is dead, and a rank has not trained; errors are {self.run.lost}")
        results = [steps[number] for steps in given]
        for rank, (copy, result) in enumerate(zip(self.copies, results, strict=True)):
            self._train(number, rank, copy, result)
        wrappers = len(self.program.recipes)
        for rank, result in enumerate(results):
            if [one.wrapper for one in result.outer_steps] != [*range(wrappers)] * count:
                raise Unsound(
                    f"rank {rank}, step {number}: {count} outer steps of {wrappers}, not {result.outer_steps}"
                )
        for k in range(count * wrappers):
            self._check_outer_step(f"step {number}.{k}", k % wrappers, [one.outer_steps[k] for one in results])
            if not self.is_known:
                return False
        for rank, (copy, result) in enumerate(zip(self.copies, results, strict=True)):
            here = f"rank {rank}, step {number}"
            raise_where(
                f"{here}, at its end", differences(result.values, copy.models.parameter_values(), exact=self.is_exact)
            )
            if count and result.has_gradients:
                raise Unsound(f"{here}: there are gradients behind an outer step")
        are_clear = not any(result.errors for result in results) and not self.program.wrapping.looks_for_nan
        if count and are_clear and self.program.options["forward_sync_buffers"]:
            for rank, result in enumerate(results):
                raise_where(f"rank {rank}, step {number}, buffers", differences(result.buffers, results[0].buffers))
        return not any(isinstance(error, DisagreementError) for error in results[0].errors)

    def _resume(self, count):
        """Go on with so many ranks, from a checkpoint, which has no gradients."""
        before = self.copies
        for copy in before:
            for wrapper in [*copy.later]:
                copy.complete(wrapper)
            copy.models.zero_grad()
        if count == len(before):
            return
        values = [one.models.parameter_values() for one in before]
        for name, first in values[0].items():  # equal ones keep their bits
            if not all(torch.equal(first, own[name]) for own in values):
                values[0][name] = sum(own[name] for own in values) / len(before)
        self._use([_Copy(self.program) for _ in range(count)])
        for rank, copy in enumerate(self.copies):
            copy.models.give(values[0])
            copy.inner.load_state_dict(deepcopy(before[rank % len(before)].inner.state_dict()))
        self.is_exact = False  # from here on a mean may be rounded otherwise

    def _train(self, number, rank, copy, result):
        """Take the inner step of one rank."""
        program, step, models = self.program, self.program.steps[number], copy.models
        if number in program.outer.loads:
            copy.later.clear()
            models.give(self.start)
            copy.inner.state.clear()
            self.last = dict(self.start)
        for change in program.changes:
            change.apply(rank, number, models)
        handles = self.run.faults.poison(rank, number, models)
        copy.begun = None
        if result.failed:
            models.zero_grad()
        if not result.failed or program.outer.retakes:
            weigh = (lambda loss, _: loss) if copy.scaler is None else (lambda loss, _: copy.scaler.scale(loss))
            size = len(self.copies)
            for _ in perform(
                step, LocalSubject(models), program.recipes[0], number, rank=rank, world_size=size, weigh=weigh
            ):
                pass
        for handle in handles:
            handle.remove()
        # A scaler leaves such a step out by itself.
        has_nan = step.updates and program.wrapping.looks_for_nan and copy.scaler is None and self._leave_nan_out(copy)
        if step.updates and not (has_nan and program.wrapping is Wrapping.CHECKED):
            inner_step(copy.parameters, copy.inner, copy.scaler)
        here = f"rank {rank}, step {number}"
        if (copy.begun is None) != (result.begun is None):
            raise Unsound(f"{here}: the optimizer has begun with {result.begun}, and should with {copy.begun}")
        if copy.begun is not None:
            raise_where(f"{here}, at its begin", differences(result.begun, copy.begun, exact=self.is_exact))

    def _leave_nan_out(self, copy):
        """Clear the gradients of each wrapper in which one is not finite, or of all where that is an error; has any?"""
        trained, table, has_nan = {*copy.parameters}, copy.models.table, False
        wrappers = {name.split(".")[1] for name in table if name.startswith("parts.")}
        for wrapper in wrappers:
            own = [one for name, one in table.items() if name.startswith(f"parts.{wrapper}.") and one in trained]
            if not all(bool(one.grad.to_dense().isfinite().all()) for one in own if one.grad is not None):
                has_nan = True
                for one in trained if self.program.wrapping is Wrapping.CHECKED else own:
                    one.grad = None
        return has_nan

    def _check_outer_step(self, place, wrapper, given):
        """Compare one outer step of a wrapper."""
        names = [name for name in self.last if name.startswith(f"parts.{wrapper}.")]
        for copy in self.copies:
            copy.complete(wrapper)
            for name, parameter in copy.models.table.items():
                change = self.last[name] - parameter.detach()
                parameter.grad = change if name in names and bool(change.any()) else None
        means = self.reference._average().means
        is_bad = self.program.wrapping.looks_for_nan and any(
            change is not None and not bool(change.isfinite().all())
            for own in self.reference.given
            for change in own.values()
        )
        is_nothing = all(mean is None for mean in means.values())
        taken = {rank for rank, one in enumerate(given) if one.is_taken}
        errors = {rank: one.error for rank, one in enumerate(given) if one.error is not None}
        # Known: a rank is interrupted, and it, or one that it cuts off by that, still waits for the vote: others may
        # have what these have not.
        is_cut = any(isinstance(error, KeyboardInterrupt) for error in errors.values())
        waited = {rank for rank in errors if is_cut and not given[rank].has_voted}
        self._check_errors(place, wrapper, errors, taken, waited, is_bad=is_bad, is_nothing=is_nothing)
        if self.program.wrapping.compressor is not None:
            self._check_kept(place, names, means, given, taken)
        values = self._outcome(place, names, means, given, taken)
        if not self.is_known:
            return
        for rank, (copy, one) in enumerate(zip(self.copies, given, strict=True)):
            copy.models.zero_grad()
            if rank in taken and rank in errors:
                copy.later[wrapper] = values
                self._give_written(f"rank {rank}, {place}", copy, one.values, values)
            elif rank in taken:
                copy.models.give(copy.models.parameter_values() | values)
            wrong = differences(one.values, copy.models.parameter_values(), exact=self.is_exact)
            raise_where(f"rank {rank}, {place}, {'taken' if rank in taken else 'not taken'}", wrong)

    def _check_errors(self, place, wrapper, errors, taken, waited, *, is_bad, is_nothing):
        """Hold errors, and who has taken it, to what has happened; some ``waited`` for the vote at an interrupt."""
        everyone = set(range(len(self.copies)))
        behind = {rank for rank, error in errors.items() if error.args and error.args[0] is Where.TAKING}
        raising = {rank for rank, error in errors.items() if isinstance(error, (Planned, MemoryError))} - behind
        interrupted = {rank for rank, error in errors.items() if isinstance(error, KeyboardInterrupt)}
        told = errors.keys() - raising - interrupted - behind
        if wrapper in self.lost:
            if taken or errors.keys() != everyone:
                raise Unsound(f"{place}: an outer step was lost, and {taken} have taken the next; errors are {errors}")
            if not (raising or interrupted) and not all(isinstance(e, DisagreementError) for e in errors.values()):
                raise Unsound(f"{place}: an outer step was lost, and errors are {errors}")
            return
        if raising or is_bad:
            expected = everyone if raising or self.program.wrapping is Wrapping.CHECKED else interrupted
            if taken or (errors.keys() != expected and not interrupted):
                raise Unsound(f"{place}: {raising} have failed, {taken} have taken it, and errors are {errors}")
        elif waited and taken not in (set(), everyone):
            self.lost.add(wrapper)
        elif told and not interrupted:
            raise Unsound(f"{place}: nobody has failed, and errors are {errors}")
        elif not (is_nothing or waited or taken == everyone):
            raise Unsound(f"{place}: {taken} have taken it, and errors are {errors}")
        for rank in told:
            is_of_nan = is_bad and isinstance(errors[rank], NonFiniteGradientError)
            if not is_of_nan and getattr(errors[rank], "rank", None) not in raising | interrupted:
                raise Unsound(f"rank {rank}, {place}: {raising | interrupted} have failed, not {errors[rank]!r}")
        if not everyone - taken - errors.keys() <= (everyone if is_bad or is_nothing else set()):
            raise Unsound(f"{place}: {everyone - taken - errors.keys()} have no error, and have not taken it")

    def _outcome(self, place, names, means, given, taken):
        """What an outer step makes of the parameters that have a mean; it is noted as the last one if it was taken."""
        lr, momentum, values = self.program.outer.lr, self.program.outer.momentum, {}
        clear = [one for one in given if one.is_taken and one.error is None]
        for other in clear[1:]:
            wrong = differences(other.values, {name: clear[0].values[name] for name in names})
            raise_where(f"{place}, on two ranks", wrong)
        compressed = self.program.wrapping.compressor is not None
        self.is_known &= bool(clear) or not (taken and compressed)
        for name in names if taken else ():
            mean, velocity = means[name], self.velocity.get(name)
            if mean is None:
                continue
            if compressed and clear:
                mean = self._sent(name, clear[0].values[name])
            if momentum:
                velocity = mean.clone() if velocity is None else velocity.mul(momentum).add_(mean)
                self.velocity[name], mean = velocity, mean.add(velocity.mul(momentum))
            values[name] = self.last[name].sub(mean.mul(lr))
            if clear and (compressed or not self.is_exact):
                raise_where(place, differences({name: clear[0].values[name]}, {name: values[name]}, exact=False))
                values[name] = clear[0].values[name]  # rounding does not pile up
        self.last |= values
        return values

    def _check_kept(self, place, names, means, given, taken):
        """What was given and what was kept before are what was sent and what is kept, or nothing has changed."""
        clear = [one for one in given if one.is_taken and one.error is None]
        before, after = [one.residuals for one in self.copies], [one.residuals for one in given]
        for name in names if clear and len(taken) == len(given) else ():
            if means[name] is not None:
                sent = self._sent(name, clear[0].values[name])
                sides = [one + mean_of(kept, name, one) for one, kept in ((means[name], before), (sent, after))]
                if not torch.allclose(*sides, rtol=1e-4, atol=1e-4):
                    texts = [side.tolist() for side in sides]
                    raise Unsound(f"{place}: {name}: given and kept before {texts[0]}, sent and kept {texts[1]}")
        for rank, (copy, one) in enumerate(zip(self.copies, given, strict=True)):
            if rank not in taken and not are_same(copy.residuals, one.residuals):
                raise Unsound(f"rank {rank}, {place}: kept is {one.residuals}, and before {copy.residuals}")
            copy.residuals = one.residuals

    def _sent(self, name, value):
        """The mean that an outer step was taken with, by the value that it has given."""
        lr, momentum = self.program.outer.lr, self.program.outer.momentum
        change = (self.last[name] - value) / lr
        if momentum:
            velocity = self.velocity.get(name, torch.zeros_like(value))
            change = (change - momentum * momentum * velocity) / (1 + momentum)
        return change

    def _give_written(self, here, copy, found, values):
        """Give a copy what was written of an outer step that has yet to be completed."""
        before = copy.models.parameter_values()
        for name, value in values.items():
            got = found[name]
            if not any(torch.allclose(got, one, rtol=TOLERANCE, atol=TOLERANCE) for one in (value, before[name])):
                raise Unsound(f"{here}: {name} is {got.tolist()}, neither {value.tolist()} nor {before[name].tolist()}")
        copy.models.give(before | {name: found[name] for name in values})

    def _check_death(self):
        """Whoever waits for a rank that is dead was told so, soon."""
        dead = self.run.scheduler.dead
        for rank, error in enumerate(self.run.lost):
            has_left = len(self.program.steps) - 1 not in self.run.trained[rank]
            if rank not in dead and rank < len(self.copies) and error is None and has_left:
                raise Unsound(f"rank {rank} has neither ended nor been told that {dead} are dead")
            named = set(getattr(error, "ranks", None) or ()) or {getattr(error, "rank", None)}
            if error is not None and not named & dead:
                raise Unsound(f"rank {rank}: names {named}, where {dead} are dead: {error}")
        seconds = self.run.scheduler.now
        if dead and has_one_node(self.program) and seconds > _MOST_SECONDS:
            raise Unsound(f"rank {dead} is dead, and others have waited for {seconds:.0f} s")
