"""LocalSGD and DiLoCo: every rank trains by itself for some steps, then all ranks take one outer step together.

They differ only in the outer step. It is a normal synchronization, with the change of each parameter since the last
outer step in place of its gradient. So changes are negotiated, packed and compressed like gradients, and a parameter
that no rank has changed costs nothing.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ppe_ddp.compression.comm_state import parameters_of
from ppe_ddp.compression.loaded_parameters import LoadedParameters
from ppe_ddp.engine.gradients import FiniteCheck, has_nonzero
from ppe_ddp.engine.replicas import digest_of
from ppe_ddp.errors import NonFiniteGradientError, UnusableError
from ppe_ddp.torch_internals import (
    IGNORED_NAMES,
    is_ignored,
    is_trial_step,
    take_scale,
    tell_of_skipped_steps,
    uncompiled,
    version_of,
)

logger = logging.getLogger("ppe_ddp")


class Synchronizing(Protocol):
    """The part of a wrapper that outer steps use."""

    module: nn.Module
    _hooks: Any
    _module_state: Any
    _negotiate: bool
    _options: Any
    _outer_steps: list[OuterSteps]
    _reducer: Any

    def train_apart(self, apart: bool = ...) -> None: ...
    def _ready(self) -> Any: ...
    def _used(self) -> Any: ...


class OuterSteps:
    """Counts the steps of an optimizer, and takes an outer step on all ranks after each ``every`` of them.

    Backwards of ``ddp`` are not synchronized any more, and parameters are no longer compared (``check_drift``). All
    ranks must make it together, with the same arguments, and run the same number of inner steps; a step that a
    ``GradScaler`` skips counts, and so does one that a rank leaves out by ``abort_grad_sync()``, or because of NaN with
    ``check_for_nan_in_grad``, by which each rank looks at its own gradients in the step. ``.grad`` of the
    optimizer's parameters is None after an outer step. Parameters that are unfrozen, added or replaced are averaged
    from then on; new ones must be the same on all ranks. One that has always been frozen is not averaged: if the
    program changes it itself (the mean teacher of BYOL or DINO), each rank keeps its own. If ``load_state_dict()``
    loads parameters, the same on all ranks, the next outer step begins from these; it does not if it only puts back
    what this rank had, as after an evaluation of other weights.

    If a model has several optimizers, make it on the one that steps last: an outer step averages all parameters of the
    wrapper. If you make the optimizer anew, make this anew, too; else a later forward is an error. The optimizer
    updates whole parameters, so it is no ``DistributedOptimizer``. Accelerate's will do, as ``prepare()`` returns it.
    Arguments are those of :class:`DiLoCo`.
    """

    _all: ClassVar[weakref.WeakSet[OuterSteps]] = weakref.WeakSet()

    def __init__(
        self, ddp: Synchronizing, optimizer: Optimizer, *, every: int, lr: float = 1.0, momentum: float = 0.0
    ) -> None:
        self._ddp, self._optimizer = ddp, _stepping(optimizer)
        self._check(every)
        self._every = every
        self._lr = float(lr)
        self._momentum = float(momentum)
        self._steps = self._taken = 0
        self._synchronized_at: int | None = 0
        self._last: dict[str, tuple[nn.Parameter, Tensor]] = {}
        self._velocity: dict[str, Tensor] = {}
        self._averages: dict[str, Tensor] = {}
        self._next: tuple[str, Tensor, Tensor | None] | None = None
        self._loaded = LoadedParameters()
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._listed: object = None  # the wrapper's list of parameters in its last forward
        # Since the last step that was counted: forwards, and how often parameters were found changed between two.
        self._forwards = self._changes = 0
        self._version: int | None = None  # of the parameters at the last look
        self._restored: set[str] = set()  # names in a loaded state; their parameters may be loaded later
        self._is_connected = ddp._reducer is not None
        self._is_stepping = False  # whether the optimizer is in a step, which may call a closure several times
        self._has_failed = False  # whether the last call was an outer step that has failed, which was counted
        self._bad: NonFiniteGradientError | None = None  # to be raised in the next step of the optimizer
        self._is_stopped = False
        self._later: str | None = None  # the class of a later one that averages the same parameters
        self._all.add(self)
        if ddp._options.check_for_nan_in_grad:
            _look_at_all_steps()
        given, optimizer = optimizer, self._optimizer
        self._refuse_shared(outer_steps_of(optimizer))
        ddp.train_apart()
        self._replace_others(ddp)
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(lambda *_: self._begin_inner_step(of_optimizer=True)),
            optimizer.register_step_post_hook(lambda *_: self._end_inner_step(optimizer)),
        ]
        self._remember()
        self._of_optimizer = outer_steps = outer_steps_of(optimizer)
        outer_steps.append(self)
        vars(optimizer)["outer_steps"] = outer_steps
        tell_of_skipped_steps(optimizer, partial(_skip, given, outer_steps))
        if hasattr(given, _CALLED):
            given.__setstate__({})  # let Accelerate's call the step() of now, in place of the one that it was made with

    def _check(self, every: int) -> None:
        """Raise for arguments that cannot be meant."""
        title, ddp = type(self).__name__, self._ddp
        if every < 1:
            raise ValueError(f"every={every}: an outer step follows at least one inner step")
        if not hasattr(ddp, "train_apart"):
            raise TypeError(
                f"{title} averages the parameters of a ppe_ddp.DistributedDataParallel, not of a "
                f"{type(ddp).__module__}.{type(ddp).__qualname__}"
            )
        if any(one.__name__ == "ZeroRedundancyOptimizer" for one in type(self._optimizer).__mro__):
            raise TypeError(
                f"{title} lets each rank update whole parameters, and a ZeroRedundancyOptimizer updates each on one "
                "rank alone, by the gradient of that rank: give it a plain one, as torch.optim.Adam(model.parameters())"
            )
        if self._updated().isdisjoint(ddp.module.parameters()):
            raise ValueError(
                "the optimizer has no parameter of the model: construct it on model.parameters(), and not by "
                "DistributedOptimizer, which has shards of them"
            )

    @property
    def module(self) -> nn.Module:
        """The module whose parameters are averaged."""
        return self._ddp.module

    @property
    def is_between(self) -> bool:
        """Whether there were inner steps since the last outer step, so that parameters differ between ranks."""
        return self._steps != self._synchronized_at

    def is_of(self, module: nn.Module) -> bool:
        """Whether ``module`` has parameters of the module whose parameters are averaged."""
        return not set(module.parameters()).isdisjoint(self.module.parameters())

    def described(self) -> str:
        """What must be the same on all ranks: arguments, and how many were taken, as an interrupt may cost one."""
        arguments = f"{type(self).__name__}(every={self._every}, lr={self._lr}, momentum={self._momentum})"
        return f"{arguments}, of which {self._taken} were taken (if one was lost on a rank, load a checkpoint on all)"

    def _refuse_shared(self, others: Sequence[OuterSteps]) -> None:
        for other in others:
            if (shared := self._shared_with(other)) is not None:
                raise ValueError(
                    f"parameter {shared!r} would get two outer steps in place of one, as another "
                    f"{type(other).__name__} averages it: put modules that share it into one wrapper; call stop() "
                    "before you make another"
                )

    def _replace_others(self, ddp: Synchronizing) -> None:
        """Let those of other optimizers, which may not be used any more, raise in the next step of theirs.

        The wrapper holds those that are in use: nothing else might, once their optimizer is made anew.
        """
        for other in [*ddp._outer_steps]:
            if is_replaced := self._shared_with(other) is not None:
                other._later = type(self).__name__
            if is_replaced or not self._updated().isdisjoint(other._updated()):
                ddp._outer_steps.remove(other)
                other._remember()
                if other.is_between or other._forwards:  # the ranks may differ, so begin where they did not
                    self._last = {**other._last}
                other._forget_others()
        self._compare()

    def _shared_with(self, other: OuterSteps) -> str | None:
        """A parameter of which ``other``, too, would take an outer step. Averaging twice does no harm."""
        parameters = set(other._parameters().values())
        shared = (name for name, parameter in self._parameters().items() if parameter in parameters)
        averages_twice = (self._lr, other._lr, self._momentum, other._momentum) == (1, 1, 0, 0)
        return None if averages_twice else next(shared, None)

    def _updated(self) -> set[nn.Parameter]:
        """The parameters that the optimizer updates."""
        return {parameter for group in self._optimizer.param_groups for parameter in group["params"]}

    def _parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the wrapper averages, by name, each once."""
        ignored: Collection[str] = getattr(self.module, IGNORED_NAMES, ())
        names: dict[nn.Parameter, str] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if isinstance(parameter, nn.Parameter) and not is_ignored(name, ignored):  # no copy in a forward
                names.setdefault(parameter, name)
        return {name: parameter for parameter, name in names.items()}

    @uncompiled
    def _begin_inner_step(self, *, of_optimizer: bool = False) -> None:
        if of_optimizer and is_trial_step():
            self._version = None  # which that step raises
            return
        if self._later is not None:
            raise UnusableError(
                f"a {self._later} that was made later averages the parameters of this {type(self).__name__}'s wrapper, "
                "which would get two outer steps in place of one: make one for each wrapper, even if it has several "
                "optimizers, and call stop() before you make another"
            )
        self._remember()
        self._restored.clear()
        self._is_stepping = of_optimizer

    def _look(
        self, optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A hook before ``step()`` of any optimizer: leave it out if this rank's gradients are not finite.

        Gradients that a closure computes are looked at behind it.
        """
        in_use = self._ddp._outer_steps
        if self not in in_use or any(optimizer is one._optimizer for one in in_use if one is not self):
            return None  # that one looks
        updated = set(parameters_of(optimizer))
        own = {name: one for name, one in self._parameters().items() if one in updated}
        # A fused optimizer skips by itself where a GradScaler has found inf.
        if not own or is_trial_step() or hasattr(optimizer, "found_inf"):
            return None
        given = arguments[1] if arguments[1:] else keywords.get("closure")
        if not callable(given):
            self._check_finite(optimizer, own)
            return None
        calls = itertools.count()

        def closure() -> Any:
            loss = given()
            if next(calls) == 0:  # the others are of a search (LBFGS)
                self._check_finite(optimizer, own)
            return loss

        if arguments[1:]:
            return (arguments[0], closure, *arguments[2:]), keywords
        return arguments, keywords | {"closure": closure}

    def _check_finite(self, optimizer: Optimizer, own: Mapping[str, nn.Parameter]) -> None:
        """See ``check_for_nan_in_grad``. The other ranks take their steps, so that of this one counts here as well.

        The optimizer whose steps are counted raises, also for others, so that one error is one step.
        """
        is_counted = optimizer is self._optimizer
        if not FiniteCheck([*own]).is_fine_alone([*own.values()]):
            bad = [name for name, one in own.items() if not FiniteCheck([name]).is_fine_alone([one])]
            rank = dist.get_rank() if dist.is_initialized() else 0
            text = f"rank {rank}: NaN or infinity in gradients of {', '.join(bad[:5])}, in a step of this rank alone"
            if self._ddp._options.check_for_nan_in_grad == "skip":
                logger.warning("%s; it leaves that step out", text)
            else:
                self._bad = NonFiniteGradientError(f"{text}, which counts: go on with the next one")
                self._bad.job_rank = rank
        elif not is_counted or self._bad is None:
            return
        for parameter in own.values():
            parameter.grad = None
        if is_counted and (error := self._bad) is not None:
            for other in parameters_of(optimizer):  # also of another wrapper
                other.grad = None
            for one in self._of_optimizer:
                one._is_stepping = False
            _count_all(self._of_optimizer)
            for one in self._of_optimizer:
                one._has_failed = True  # abort_grad_sync() counts it no more
            raise error

    @torch.no_grad()
    def note_forward(self) -> None:
        """Note before a forward what was unfrozen, added or loaded, as another optimizer may step before this one.

        What is replaced, or has another name, may be so for this forward only (``functional_call``), and what is loaded
        in ``eval()`` for an evaluation only.
        """
        self._has_failed = False
        if not self._is_stepping:
            self._forwards += 1
            if self._forwards >= self._every:
                self._look_for_others()
        if not self._is_connected:
            self._begin_connected()
        listed, is_loaded = self._ddp._module_state, bool(self._loaded.digests) and self.module.training
        if self._averages or self._next or (listed is self._listed and not is_loaded):
            return  # what has arrived is written first, before the next step
        self._listed = listed
        self._note_new(self._parameters(), with_loaded=is_loaded)

    def _note_new(self, parameters: Mapping[str, nn.Parameter], *, with_loaded: bool) -> None:
        """Note what was unfrozen, added or loaded, but not what is in place of another parameter."""
        known = {parameter: name for name, (parameter, _) in self._last.items()}
        for name, parameter in parameters.items():
            if self._last.get(name, (parameter,))[0] is parameter and known.get(parameter, name) == name:
                self._note(name, parameter, with_loaded=with_loaded)

    def _begin_connected(self) -> None:
        """Begin anew from the parameters of rank 0, which all ranks have got as they connected."""
        self._is_connected = self._ddp._reducer is not None
        if self._is_connected:
            self._last = {name: one for name, one in self._last.items() if name in self._restored}
            self._listed = None

    def _follow(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Keep what belongs to a parameter under its new name."""
        if not (moved := [old for old, (one, _) in self._last.items() if parameters.get(old) is not one]):
            return
        names = {parameter: name for name, parameter in parameters.items()}
        renamed = {old: names[self._last[old][0]] for old in moved if self._last[old][0] in names}
        last = {new: self._last.pop(old) for old, new in renamed.items()}
        velocity = {new: one for old, new in renamed.items() if (one := self._velocity.pop(old, None)) is not None}
        self._last |= last
        self._velocity = {name: one for name, one in self._velocity.items() if name not in last} | velocity
        self._restored = {renamed.get(name, name) for name in self._restored}

    def _look_for_others(self) -> None:
        """Raise if another optimizer updates the parameters in place of the one whose steps are counted."""
        tables = (one for one in self.module.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag))
        # Without those that a forward itself scales down.
        updated = self._updated().difference(one.weight for one in tables if one.max_norm is not None)
        version = sum(version_of(one) for one, _ in self._last.values() if one in updated)
        self._changes += self._version not in (version, None)
        self._version = version
        if self._changes > 1:  # one may be that of an optimizer that steps before the one that is counted
            title = type(self).__name__
            error = UnusableError(
                f"no outer step follows any more, and each rank trains by itself: parameters change, and the optimizer "
                f"of this {title} has taken no step for {self._forwards} forwards. Make a {title} of the optimizer "
                "that you use, on all ranks, or call synchronize() and stop() of this one"
            )
            self._abort(str(error))
            raise error

    @torch.no_grad()
    def _remember(self) -> None:
        """Copy parameters that were unfrozen, replaced or loaded since the last outer step, as its values."""
        self._update()
        for module in self.module.modules():
            if module not in self._watched:
                self._watched.add(module)
                self._handles.append(module.register_load_state_dict_pre_hook(self._loaded))
        parameters = self._parameters()
        self._follow(parameters)
        for name, parameter in parameters.items():
            self._note(name, parameter)
        self._loaded.clear()

    def _note(self, name: str, parameter: nn.Parameter, *, with_loaded: bool = True) -> None:
        known = self._last.get(name)
        if known is not None and name in self._restored:
            # Another parameter is there by load_state_dict(assign=True), or else in place of the one that was saved.
            if parameter is known[0] or id(known[0]) in self._loaded.assigned or id(parameter) in self._loaded.digests:
                self._last[name] = parameter, known[1]
                return
            self._restored.discard(name)
        is_loaded = with_loaded and self._loaded.take(parameter)
        if known is not None and known[0] is not parameter:
            self._velocity.pop(name, None)
            del self._last[name]  # one that is frozen is not averaged
            known = None
        if known is not None and is_loaded:
            known[1].copy_(parameter)
        elif known is None and (parameter.requires_grad or parameter.grad is not None):
            self._last[name] = parameter, parameter.detach().clone()

    @uncompiled
    def _end_inner_step(self, optimizer: Optimizer) -> None:
        self._is_stepping = False
        if self._of_optimizer[:1] != [self] or is_trial_step():
            return  # the first OuterSteps of the optimizer counts for all
        try:
            _count_all(self._of_optimizer)
        except BaseException:
            take_scale(optimizer)
            raise

    def _compare(self) -> None:
        """Let the next exchange raise on all ranks if these have different ``LocalSGD`` or ``DiLoCo``."""
        if self not in self._ddp._outer_steps and not self._is_stopped:  # one of the same parameters was made later
            self._ddp._outer_steps.append(self)
        if (reducer := self._ddp._reducer) is not None:
            described = [one.described() for one in self._ddp._outer_steps]
            reducer.synchronizer.negotiation.use_plug("outer steps of", *described)

    def _forget_others(self) -> None:
        self._forwards, self._changes, self._version = 0, 0, None

    def leave_out(self) -> None:
        """Count an inner step that this rank leaves out; not if an outer step has just failed, which was counted."""
        has_failed, self._has_failed, self._is_stepping = self._has_failed, False, False
        if not has_failed:
            self.count()

    def count(self) -> None:
        """Count one inner step, and take the outer step that follows it."""
        if self._is_stopped:
            return
        if self._restored:  # this rank has left the step out, or a scaler has
            self._begin_inner_step()
        self._steps += 1
        self._has_failed, self._bad = False, None
        for one in self._ddp._outer_steps:
            one._forget_others()
        if self._steps % self._every == 0:
            self.synchronize()

    @uncompiled
    @torch.no_grad()
    def synchronize(self) -> None:
        """Take an outer step now; called automatically after ``every`` inner steps. All ranks must call it together.

        If it fails, the parameters do not change on any rank, and ``.grad`` of the optimizer's parameters is None. If a
        rank fails or is interrupted after the averages have arrived, it completes the outer step before its next step.
        """
        self._forget_others()
        self._note_failed(has_failed=True)
        parameters: dict[str, nn.Parameter] = {}
        of_others: dict[str, Tensor | None] = {}
        try:
            try:
                if (reducer := self._ddp._reducer) is not None:
                    reducer.begin_step()  # else an error here would be taken for one of an outer step that has failed
                self._begin_inner_step()
                self._compare()
                parameters = self._parameters()
                self._last = {name: self._last[name] for name in parameters if name in self._last}
                self._velocity = {name: self._velocity[name] for name in parameters if name in self._velocity}
                updated = self._updated()
                of_others = {name: one.grad for name, one in parameters.items() if one not in updated}
                for name, parameter in parameters.items():
                    parameter.grad = self._change(name, parameter)
                met = reducer is not None and reducer.groups.world_size > 1
                digests = {name: digest_of(one) for name, (_, one) in self._last.items()} if met else {}
            except BaseException as error:
                self._tell(error)
                raise
            self._average(parameters, digests)
        finally:
            for name, parameter in parameters.items():
                parameter.grad = of_others.get(name)  # another optimizer's, which has yet to use it
        self._update()
        self._note_failed(has_failed=False)

    def _note_failed(self, *, has_failed: bool) -> None:
        for one in {self, *self._ddp._outer_steps}:
            one._has_failed = has_failed

    def _average(self, parameters: Mapping[str, nn.Parameter], digests: Mapping[str, int]) -> None:
        """Average the changes in ``.grad``; ``digests`` are of what the ranks had in the last outer step."""
        before = self._handed_over
        try:
            if (reducer := self._ddp._used()) is not None:
                reducer.synchronizer.before_outer_step = digests
                reducer.finish()
        except UnusableError as error:
            title = type(self).__name__
            raise UnusableError(f"{error}. If you no longer use it, call stop() of its {title}") from error
        except Exception:  # the other ranks know of it
            raise
        except BaseException as error:  # an interrupt, perhaps before this rank has begun
            if self._handed_over in (before, 0):
                self._tell(error)
            raise
        finally:  # behind an error or interrupt, too: the other ranks take this outer step
            if (reducer := self._ddp._reducer) is not None:
                reducer.synchronizer.before_outer_step = {}
            if (after := self._handed_over) is None or after != (before or 0):
                self._note_averages(parameters)

    def _tell(self, error: BaseException) -> None:
        """Give the outer step up on all ranks, unless they know of ``error`` already."""
        self._abort(f"its outer step has raised {type(error).__name__}: {error}")

    def _abort(self, reason: str) -> None:
        if (reducer := self._ddp._reducer or self._ddp._ready()) is not None:
            reducer.abort(reason)

    @property
    def _handed_over(self) -> int | None:
        """How often the wrapper has taken averages; None if torch.distributed is not initialized."""
        reducer = self._ddp._reducer
        return None if reducer is None else reducer.synchronizer.handed_over

    def _note_averages(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Take the averages out of ``.grad``; none if no rank has changed anything."""
        self._averages = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        if self._averages:
            self._synchronized_at = self._steps
            self._taken += 1
            self._ddp._hooks.comm_state.note_outer_step()

    def _change(self, name: str, parameter: nn.Parameter) -> Tensor | None:
        if name not in self._last:
            return None
        change = self._last[name][1] - parameter
        # Without negotiation a rank whose steps a scaler has skipped must send something, too.
        return change if not self._ddp._negotiate or bool(change.any()) else None  # any() is also true for NaN

    @torch.no_grad()
    def _update(self) -> None:
        """Take the outer step whose averages have arrived, or the rest of it after an interrupt.

        Each new value is kept before it is written, so that an interrupt between both does no harm.
        """
        parameters = self._parameters() if self._next or self._averages else {}
        while self._next or self._averages:
            if self._next is None:
                name, change = next(iter(self._averages.items()))
                self._next = (name, *self._outcome(name, parameters[name], change))
            name, value, velocity = self._next
            self._averages.pop(name, None)
            if id(parameters[name]) not in self._loaded.digests:
                parameters[name].copy_(value)
            self._last[name] = parameters[name], value
            if velocity is not None:
                self._velocity[name] = velocity
            self._next = None

    def _outcome(self, name: str, parameter: nn.Parameter, change: Tensor) -> tuple[Tensor, Tensor | None]:
        """The parameter and its momentum after a step of torch's ``SGD`` (Nesterov) from the last outer step."""
        if change.is_sparse:
            change = change.to_dense()
        last = self._last[name][1] if name in self._last else parameter.detach()  # only other ranks have unfrozen it
        velocity: Tensor | None = None
        # Without negotiation all have sent something: what no rank has changed gets no momentum.
        if self._momentum and (self._ddp._negotiate or has_nonzero([change])):
            before = self._velocity.get(name)
            velocity = change.clone() if before is None else before.mul(self._momentum).add_(change)
            change = change.add(velocity.mul(self._momentum))
        # Products and sums apart, so that processors with and without fused ones have the same bits.
        return last.sub(change.mul(self._lr)), velocity

    def stop(self) -> None:
        """Take no more outer steps, and synchronize backwards again.

        It does not average the parameters: call :meth:`synchronize` before, and go on with a new optimizer.
        """
        self._update()
        for handle in self._handles:
            handle.remove()
        self._is_stopped = True
        self._forget_others()
        self._of_optimizer.remove(self)
        if self in self._ddp._outer_steps:
            self._ddp._outer_steps.remove(self)
        self._ddp.train_apart(bool(self._ddp._outer_steps))
        self._compare()

    def state_dict(self) -> dict[str, Any]:
        """A copy of the parameters and momenta at the last outer step, and the number of inner steps."""
        self._update()
        parameters, last, velocity = self._parameters(), {}, {}
        self._follow(parameters)
        self._note_new(parameters, with_loaded=False)
        # What was loaded, also in place of another parameter, is common to all ranks, or for an evaluation only. It is
        # returned as it is in the module that is saved beside this, and changes nothing here.
        may_be_loaded = self.module.training or not self.is_between
        for name, (known, value) in self._last.items():
            if (parameter := parameters.get(name)) is None:
                continue
            is_other = may_be_loaded and name not in self._restored and known is not parameter
            is_loaded = may_be_loaded and name not in self._restored and self._loaded.has(parameter)
            last[name] = (parameter.detach() if is_other or is_loaded else value).clone()
            if name in self._velocity and not is_other:
                velocity[name] = self._velocity[name].clone()
        return {"steps": self._steps, "last": last, "velocity": velocity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a :meth:`state_dict`; the current parameters of each rank are loaded separately."""
        parameters = self._parameters()
        unknown = sorted({*state["last"], *state["velocity"]} - parameters.keys())
        if unknown:
            raise ValueError(f"the state has parameter {unknown[0]!r}, which the module does not have")
        self._averages, self._next, self._bad = {}, None, None
        self._remember()
        self._restored, self._is_connected = {*state["last"]}, True
        self._steps, self._taken = int(state["steps"]), 0
        self._synchronized_at = None  # unknown: the parameters that are loaded separately may differ between ranks
        for name, value in state["last"].items():
            parameter = parameters[name]
            self._last[name] = parameter, value.detach().to(parameter.device, copy=True)
        self._velocity = {
            name: value.detach().to(parameters[name].device, copy=True) for name, value in state["velocity"].items()
        }

    def end_loading(self, loaded: Collection[nn.Parameter]) -> None:
        """Note that ``loaded`` are those that belong to a loaded state: what is loaded into them now is another."""
        self._restored.difference_update(name for name, one in self._parameters().items() if one in loaded)


@cache
def _look_at_all_steps() -> None:
    vars(_look)["skips_master_weights"] = True
    register_optimizer_step_pre_hook(_look)


@uncompiled
def _look(optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """A hook before the steps of all optimizers; never removed, as torch may be going through its hooks."""
    for one in list(OuterSteps._all):
        if one._ddp._options.check_for_nan_in_grad:
            arguments, keywords = one._look(optimizer, arguments, keywords) or (arguments, keywords)
    return arguments, keywords


def outer_steps_of(optimizer: object) -> list[OuterSteps]:
    """The OuterSteps that count the steps of ``optimizer``: one for each wrapper whose parameters it updates."""
    optimizer = _stepping(optimizer)
    found: list[OuterSteps] = vars(optimizer).get("outer_steps", []) if isinstance(optimizer, Optimizer) else []
    return found


def outer_steps_over(module: object) -> list[OuterSteps]:
    """The OuterSteps of a wrapper, or those in use that average some parameters of another ``module``."""
    own: list[OuterSteps] | None = getattr(module, "_outer_steps", None)
    if own is not None or not isinstance(module, nn.Module):
        return own or []
    parameters = set(module.parameters())
    in_use = [one for one in list(OuterSteps._all) if one in one._ddp._outer_steps]
    return [one for one in in_use if any(parameter in parameters for parameter, _ in one._last.values())]


def _stepping(optimizer: Any) -> Any:
    """The optimizer that takes the steps: the one in Accelerate's, which has no hooks of its own; else itself."""
    if not isinstance(optimizer, Optimizer):
        return optimizer
    inner: Any = getattr(optimizer, "optimizer", None)
    is_wrapped = isinstance(inner, Optimizer) and inner.param_groups is optimizer.param_groups
    return inner if is_wrapped else optimizer


@uncompiled
def _count_all(outer_steps: Sequence[OuterSteps]) -> None:
    """Count an inner step for each, even after an error, since other ranks go on to the next outer step."""
    with ExitStack() as stack:
        for one in reversed(outer_steps):
            stack.callback(one.count)


_CALLED = "_accelerate_step_called"
"""The attribute in which Accelerate's optimizer notes that a ``GradScaler`` has not skipped a step."""


def _skip(given: Optimizer, outer_steps: Sequence[OuterSteps]) -> None:
    if hasattr(given, _CALLED):
        setattr(given, _CALLED, False)
    _count_all(outer_steps)


class LocalSGD(OuterSteps):
    """Lets every rank train by itself, and averages the parameters after ``every`` steps of ``optimizer``.

    S. U. Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019 (https://arxiv.org/abs/1805.09767).

    Args:
        ddp: The wrapper; a compressor that is registered with it compresses the changes of the parameters.
        optimizer: Updates the parameters.
        every: The number of steps between two averages. A larger number costs less, but lets the ranks drift apart.
    """

    def __init__(self, ddp: Synchronizing, optimizer: Optimizer, *, every: int) -> None:
        super().__init__(ddp, optimizer, every=every)


class DiLoCo(OuterSteps):
    """Lets every rank train by itself, and takes an outer step with the mean change after ``every`` steps.

    A. Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023
    (https://arxiv.org/abs/2311.08105); with quantized changes: A. Douillard et al., Streaming DiLoCo with
    overlapping communication, 2025 (https://arxiv.org/abs/2501.18512).

    Args:
        ddp: The wrapper; register ``Int8()`` or another compressor with it for quantized outer gradients.
        optimizer: The inner optimizer; AdamW in the paper.
        every: The number of inner steps for one outer step; 500 in the paper.
        lr: The learning rate of the outer step; 1 without momentum is LocalSGD.
        momentum: The Nesterov momentum of the outer step.
    """

    def __init__(
        self, ddp: Synchronizing, optimizer: Optimizer, *, every: int, lr: float = 0.7, momentum: float = 0.9
    ) -> None:
        super().__init__(ddp, optimizer, every=every, lr=lr, momentum=momentum)
