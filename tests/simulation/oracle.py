"""One process that does what the ranks did, and what a history is held to."""

import torch

from law_steps import Expectation, Reference, Zeroing
from ppe_ddp import CommunicationError, PeerAbortedError

from .faults import RAISING, Where
from .scheduler import Unsound

RATE = 0.05
_SEVERAL = ("MICRO", "TWO_", "RETAINED")  # steps of several backwards: a rank may have done some of them

TOLERANCE = 1e-5  # where a gradient came in two rounds, whose sums are made in another order


class ExactReference(Reference):
    """All ranks in one process, averaged in the order in which the simulated wire sums.

    Args:
        modules: The module of each rank.

    Attributes:
        local: By rank, the gradients by name that it had before they were averaged; its own, as no step changes them.
    """

    def __init__(self, modules):
        self._copies = modules
        self._parameters = [dict(module.named_parameters()) for module in modules]
        self._give_buffers(dict(modules[0].named_buffers()))

    def _average(self):
        tables = [{name: parameter.grad for name, parameter in table.items()} for table in self._parameters]
        self.local = [{name: _copy(gradient) for name, gradient in table.items()} for table in tables]
        means, scales, share = {}, {}, 1.0 / len(tables)
        for name, own in self._parameters[0].items():
            given = [table[name] for table in tables]
            if all(gradient is None for gradient in given):
                means[name] = None
                continue
            total = None
            for gradient in given:
                part = torch.zeros_like(own) if gradient is None else torch.mul(gradient, share)
                total = part if total is None else total + part
            means[name] = total.detach()
            scales[name] = max(float(g.abs().max()) for g in given if g is not None) if own.numel() else 0.0
            for table in self._parameters:
                table[name].grad = means[name].clone()
        self._give_buffers({name: self._written_buffer(name) for name in self._buffers})
        return Expectation(means, scales, (), self._buffers)


def update(module, rate):
    """Take a step of plain gradient descent."""
    with torch.no_grad():
        for parameter in module.table.values():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=rate)


def table_of(module):
    """Copies of the gradients by name."""
    return {name: _copy(parameter.grad) for name, parameter in module.table.items()}


def _copy(gradient):
    return None if gradient is None else gradient.detach().clone()


def differences(found, expected, *, exact=True, scales=None):
    """Where gradients are not what they should be, as texts."""
    texts = []
    for name, want in expected.items():
        got = found[name]
        if want is None or got is None:
            if want is not got:
                texts.append(f"{name} is {got}, and should be {want}")
        elif torch.equal(got, want):
            pass
        elif exact:
            texts.append(f"{name} is {got.tolist()}, and should be exactly {want.tolist()}")
        elif not torch.allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE * (1 + (scales or {}).get(name, 0.0))):
            texts.append(f"{name} is {got.tolist()}, and should be {want.tolist()}")
    return texts


def hold(run):
    """Hold what a run has given to one process that does the same.

    Raises:
        Unsound: It is not that.
    """
    Oracle(run).check()


class Oracle:
    """One process that does what the ranks of a run did, and drops the steps that they have dropped."""

    def __init__(self, run):
        from .program import plain_models

        self.run, self.program = run, run.program
        self.reference = ExactReference([plain_models(self.program) for _ in range(self.program.world_size)])
        self.has_failed = False

    def check(self):
        """Compare, step by step."""
        for number, step in enumerate(self.program.steps):
            if not self._check_step(number, step):
                break
        for fault in self.run.faults.fired:
            if fault.where is Where.DIES and fault.rank in self.run.scheduler.dead:
                self._check_death(fault)

    def _check_step(self, number, step):
        """Compare one; whether the ranks go on."""
        program = self.program
        results = [steps[number] for steps in self.run.results]
        raising = {f.rank for f in self.run.faults.fired if f.step == number and f.where in RAISING}
        dying = {f.rank: f.step for f in self.run.faults.fired if f.where is Where.DIES}
        died = [dying[rank] for rank in self.run.scheduler.dead]
        before = [table_of(copy) for copy in self.reference.copies]
        expected = self.reference.expectations(step, program.recipes[0], number)
        for k, expectation in enumerate(expected):
            zeroing = step.zeroing if not k else Zeroing.NOTHING
            place = f"step {number}.{k} {step.kind.name}"
            there = {rank: one[k] for rank, one in enumerate(results) if len(one) > k}
            errors = {rank: one.error for rank, one in there.items() if one.error is not None}
            # Who dies may be a step ahead, and what it has sent before may not have arrived.
            is_fatal = any(step <= number + bool(errors) for step in died)
            if errors or is_fatal:
                self.has_failed = True
                self._check_failed(place, there, raising, expectation, before, zeroing, is_fatal=is_fatal)
                self.reference_zero()
                return not any(step <= number for step in died)
            if len(there) < program.world_size:
                raise Unsound(f"{place}: only ranks {sorted(there)} have come")
            for rank, result in there.items():
                self._check_good(f"rank {rank}, {place}", result, expectation, there[0])
        if raising:
            raise Unsound(f"step {number}: rank {raising} has failed, and nobody was told")
        if step.updates:
            update_all(self.reference, RATE)
        return True

    def _check_good(self, place, result, expectation, first):
        wrong = differences(result.gradients, expectation.means, exact=result.is_exact, scales=expectation.scales)
        if self.program.options["forward_sync_buffers"]:
            buffers = first.buffers if self.has_failed else expectation.buffers
            wrong += differences(result.buffers, buffers)
        _raise(place, wrong)

    def _check_failed(self, place, there, raising, expectation, before, zeroing, *, is_fatal):
        """Some rank has failed: all the others are told by name, and each has what it had computed."""
        program, dead = self.program, self.run.scheduler.dead
        several = len(program.recipes) > 1
        for rank, result in there.items():
            here, error = f"rank {rank}, {place}", result.error
            if is_fatal:
                named = set(getattr(error, "ranks", None) or ()) or {getattr(error, "rank", None)}
                # With several wrappers a rank that looks for others in one of them does not answer in another.
                is_right = bool(named & (dead | raising)) if several else named <= dead | raising
                # Who dies between its word and its count is known to nobody.
                is_right |= "rank that came too late" in str(error)
                if not (error is None or rank in raising or is_right):
                    raise Unsound(f"{here}: names {named}, where {dead | raising} have failed: {error}")
            elif error is None:
                raise Unsound(f"{here}: has its averages, while others have failed")
            elif rank not in raising and not (isinstance(error, PeerAbortedError) and error.rank in raising):
                raise Unsound(f"{here}: {raising} have failed, and this is {type(error).__name__}: {error}")
            own = self.reference.local[rank]
            for name, got in result.gradients.items():
                cleared = None if got is None else torch.zeros_like(got)
                fitting = [
                    own[name],
                    {Zeroing.NOTHING: before[rank][name], Zeroing.TO_NONE: None}.get(zeroing, cleared),
                ]
                if error is None or several:
                    fitting.append(expectation.means[name])
                is_clear = result.is_exact and not any(word in place for word in _SEVERAL)
                if is_clear and not any(_same(got, one) for one in fitting):
                    texts = [None if one is None else one.tolist() for one in (got, own[name])]
                    raise Unsound(f"{here}: {name} is {texts[0]}, and the rank had computed {texts[1]}")

    def reference_zero(self):
        """Forget the gradients of a step that has failed."""
        for copy in self.reference.copies:
            for parameter in copy.table.values():
                parameter.grad = None

    def _check_death(self, fault):
        """Every rank that had to go on was told, or all was over."""
        for rank, steps in enumerate(self.run.results):
            ended = [one for step in steps for one in step]
            is_told = any(isinstance(one.error, CommunicationError) for one in ended)
            if rank != fault.rank and not is_told and not steps[-1]:
                raise Unsound(f"rank {rank} has neither ended nor been told that rank {fault.rank} is dead")


def update_all(reference, rate):
    """Take a step of plain gradient descent in every copy."""
    for copy in reference.copies:
        update(copy, rate)


def _same(first, second):
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


def _raise(place, wrong):
    if wrong:
        raise Unsound(f"{place}: {'; '.join(wrong[:3])}")
