"""The reducer: follows each backward by autograd's hooks, and decides when its synchronizer communicates.

    first hook, on an output or a parameter     ask autograd which parameters backward reaches; start the mask exchange
    each gradient that arrives                  once the mask is agreed: make the plan, launch buckets that are ready
    end of backward                             launch the rest; vote; wait; second round if voted; set .grad

The reducer sends nothing itself; ``synchronizer.py`` makes all calls that reach other ranks.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from time import perf_counter_ns
from typing import Any, ClassVar, Generic, NoReturn, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from ppe_ddp.contracts import SyncHook
from ppe_ddp.engine.backward import Backward, EndOfBackward, Phase, Synchronizer, call_at_end
from ppe_ddp.engine.completion import (
    Completion,
    SharedParameters,
    Steps,
    ends_soon,
    finish,
    finish_and_conclude,
    note_failure_of_open,
)
from ppe_ddp.engine.grad_hooks import ForwardCounter, GradHooks, UserGradHooks, owners_of, reached_though_replaced
from ppe_ddp.engine.gradients import copied_gradients
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.module import ModuleState
from ppe_ddp.engine.record import EventLog, Recorder, Trace, in_ranges
from ppe_ddp.engine.reduction import call_sync_hooks
from ppe_ddp.engine.replicas import DriftCheck
from ppe_ddp.errors import (
    AbortedError,
    CommunicationError,
    NonFiniteGradientError,
    PeerAbortedError,
    TorchChangedError,
    UnusableError,
)
from ppe_ddp.nested_tensors import mapped, tensors_in
from ppe_ddp.torch_internals import at_end_of_backward, is_in_backward, is_in_compiled_autograd, uncompiled_hook
from ppe_ddp.waiting import progress_engine
from ppe_ddp.weighing import Weights

C = TypeVar("C", bound=Synchronizer)

logger = logging.getLogger("ppe_ddp")

# How long at most a thread of autograd, which Python lets run soon, is waited for.
_RELEASE_SECONDS = 1.0
_RELEASE_NAP = 1e-4


class Reducer(Generic[C]):
    """Synchronizes the gradients of one module.

    With ``overlap`` it communicates while backward runs, else when backward is over. If there are ``sync_hooks``, it
    calls them with the result of ``wrapper`` when backward is over, and communicates then.
    """

    _all: ClassVar[weakref.WeakValueDictionary[int, Reducer[Any]]] = weakref.WeakValueDictionary()
    """All reducers of this process: one backward may pass several wrappers, and one error aborts all of them."""

    def __init__(
        self,
        groups: Groups,
        synchronizer: C,
        *,
        overlap: bool,
        wrapper: Callable[[], object],
        sync_hooks: Mapping[int, SyncHook],
    ) -> None:
        self.groups = groups
        for one in synchronizer.groups:
            one.user = weakref.ref(self)
        self.synchronizer, self.compare = synchronizer, partial(synchronizer.check, with_buffers=False)
        self.enabled = True
        """Whether a backward is synchronized; ``no_sync()`` clears it."""
        self.shared = SharedParameters(groups, exclusive=synchronizer.empties_grad, turns=lambda: synchronizer.turns)
        """The parameters that it shares with other wrappers."""
        self._overlap = overlap
        self._wrapper = wrapper
        self._sync_hooks = sync_hooks
        self._lock = threading.RLock()  # with CUDA, autograd calls hooks from one thread a device
        self._backward: Backward | None = None
        self._end_callback: Callable[[], EndOfBackward | None] = lambda: None
        self._started: Completion | None = None
        self._forwards = ForwardCounter()
        self._last: Recorder | None = None
        self._parameters: Sequence[nn.Parameter] = ()
        self._arrivals = GradHooks((), Reducer._on_grad_accumulated, weakref.ref(self))
        self._all[id(self)] = self

    # ------------------------------------------------------------------ what there is to synchronize

    def use_module(self, module_state: ModuleState) -> None:
        """Synchronize the parameters of ``module_state`` from now on, and no others."""
        self.remove_hooks()
        self._parameters = module_state.parameters
        self._names = tuple(module_state.names)
        self.shared.share(module_state, owners_of(self._parameters))
        takes = partial(self.shared.takes, self._parameters, self.synchronizer.takes)
        self._arrivals = GradHooks(self._parameters, Reducer._on_grad_accumulated, weakref.ref(self), takes)
        self._user_grad_hooks = UserGradHooks(self._parameters, at_once=self.synchronizer.empties_grad)
        self.synchronizer.use_module(module_state, self._arrivals.streams)
        self.shared.take_turns()

    @contextmanager
    def looking_at_module(self) -> Generator[None, None, None]:
        """Tell the other ranks, which train on, if this rank refuses its module with an error."""
        try:
            yield
        except (UnusableError, ValueError) as error:
            self.synchronizer.begin_step()
            self.abort(f"it cannot go on with its module: {error}")
            raise

    def check(self) -> None:
        """Raise :class:`UnusableError`, which says what to do, if this wrapper can no longer be used."""
        self.groups.check()
        self.shared.check()

    def __del__(self) -> None:
        self.remove_hooks()
        if self._backward is None and self.synchronizer.unfinished is None:
            self.groups.release()

    def remove_hooks(self) -> None:
        """Remove our hooks from the parameters."""
        self.shared.leave()
        self._arrivals.remove()

    def trace(self) -> Trace | None:
        """The trace of the last synchronized backward."""
        return None if self._last is None else self._last.trace()

    @property
    def connections(self) -> Sequence[Groups]:
        """The groups in which the wrapper communicates."""
        return self.synchronizer.groups

    @property
    def is_running(self) -> bool:
        """Whether a synchronization may be in flight."""
        return self._backward is not None

    @property
    def is_synchronizing(self) -> bool:
        """Whether a gradient that arrives now is this rank's own, to be averaged or of a step that has failed."""
        one = self._backward
        return self.enabled and one is not None and (one.phase is not Phase.FAILED or one.alive() is not None)

    # ------------------------------------------------------------------ what the wrapper and autograd call

    def recover(self) -> bool:
        """Finish an aborted backward; returns whether no backward is running, so that parameters may be replaced."""
        self.await_release()
        is_over = self._running() is None
        self._arrivals.stop_recording()
        return is_over

    def await_release(self) -> None:
        """Abort a backward that has raised, once a thread of autograd for a GPU lets go of its graph task.

        This puts its gradients back, so gradients are cleared only after it.
        """
        backward = self._backward
        if backward is None or backward.is_manual or is_in_backward():
            return
        if self._arrivals.streams is None and backward.thread != threading.get_ident():
            return  # on CPUs it is under way on another thread

        progress, is_gone = progress_engine(os.getpid()), lambda: backward.alive() is None
        if progress.wait_until(is_gone, seconds=_RELEASE_SECONDS, nap=_RELEASE_NAP):
            self._abort_if_unfinished(weakref.ref(self), backward.alive)

    def before_forward(self) -> None:
        """Note that this wrapper is used now, and defer hooks that the user has added since the last forward."""
        self.shared.use()
        self._user_grad_hooks.defer(is_apart=self.synchronizer.weights.is_refused)

    def watch(self, outputs: Any, *, is_training: bool) -> Any:
        """Watch the ``outputs`` of one forward of the module, so that a backward that reaches one begins here.

        Returns the outputs to return to the user in their place.
        """
        if self._parameters:
            outputs = mapped(self._with_node, outputs)
        keep = self._wrapper() if self._sync_hooks else None  # which they get, even if the user has dropped it
        on_gradient = partial(self._on_output_gradient, self._names, self._parameters, keep)
        self._forwards.watch(tensors_in(outputs, levels=2), on_gradient, counts=is_training and self.enabled)
        return outputs

    def _with_node(self, output: Tensor) -> Tensor:
        """Return ``output``, or a view of it if it is a leaf (such as an input that is passed on), which has no node.

        A parameter of the module needs no view: it has a hook of its own. A sparse tensor has no views.
        """
        is_leaf = output.requires_grad and output.grad_fn is None and output.layout in (torch.strided, torch.jagged)
        return output.view_as(output) if is_leaf and not any(output is one for one in self._parameters) else output

    def _on_output_gradient(self, names: Sequence[str], parameters: Sequence[nn.Parameter], _keep: object) -> None:
        if self.enabled:
            try:
                if parameters is not self._parameters:
                    self._refuse_replaced(dict(zip(names, parameters, strict=True)))
                has_begun = self._begin_once()
            except BaseException:
                with suppress(Exception):  # their refusals; that of this wrapper is raised
                    self._begin_others()
                raise
            self.shared.end_callback = self._end_callback
            if not has_begun:
                return
        else:
            with self._lock:
                self._arrivals.watch_thawed()
            if Weights.were_used and (self._arrivals.reached() or self._arrivals.accumulates()):
                self.synchronizer.weights.note(is_synchronized=False)
            log = EventLog.current
            record = None if log is None else partial(log.add, "backward", "in no_sync()", perf_counter_ns())
            self.shared.pass_by(record)
        if len(self._all) > 1:
            self._begin_others()

    def _begin_others(self) -> None:
        """Begin all other wrappers that this backward will reach: an error on its way ends their steps, too."""
        with ExitStack() as stack:
            for other in self._everyone():
                if other is not self and other.enabled and other._end_callback() is None and other._is_reached():
                    stack.callback(other._begin_once)

    def _begin_once(self) -> bool:
        """Begin the backward that runs on this thread; returns False if it has begun already."""
        with self._lock:
            if self._started is not None:
                self._forget_failed()
            if self._backward is not None and self._running() is not None:
                return False
            self._begin()
            return True

    @classmethod
    def _everyone(cls) -> list[Reducer[Any]]:
        # valuerefs() copies in one step: another thread may make a wrapper meanwhile.
        return [one for reference in cls._all.valuerefs() if (one := reference()) is not None]

    def _is_reached(self) -> bool:
        """Whether the backward that runs on this thread will reach this wrapper.

        Either it reaches a parameter that no other wrapper has, or it reaches an output: a graph may use no parameter.
        """
        reached = self._arrivals.reached(watches=False) if self._parameters else ()
        return self.shared.has_alone(self._parameters[i] for i in reached) or self._forwards.will_be_reached()

    @staticmethod
    @uncompiled_hook
    def _on_grad_accumulated(owner: weakref.ref[Reducer[C]], index: int, _parameter: nn.Parameter) -> None:
        """Called by autograd: the gradient of parameter ``index`` was accumulated in its ``.grad``."""
        if (self := owner()) is None:
            return
        if (streams := self._arrivals.streams) is not None:
            streams.note_stream(index)
        with self._lock:
            if not self.enabled:
                self._running()
                self._refuse_gradient(self._started, index)
                if Weights.were_used:
                    self.synchronizer.weights.note(index, is_synchronized=False)
                self.synchronizer.on_accumulated((index,))
                return
            backward = self._backward
            if backward is None or backward.alive() is None:
                backward = self._running() or self._begin(index)
            elif backward.is_empty and backward.phase is not Phase.FAILED:
                backward = self._begin(index)
            if backward is None:
                return
            if backward.phase is Phase.FAILED:
                self.synchronizer.on_accumulated((index,))
                return
            if backward.is_manual:
                self._refuse_gradient(backward, index)
                return
            self._count_arrived(backward, index)
            if backward.waiting is None:
                return  # negotiated when backward is over
            try:
                if backward.schedule is not None:
                    backward.schedule.launch_ready()
                elif backward.is_agreed:
                    with torch.no_grad():
                        self.synchronizer.make_schedule(backward).launch_ready()
            except BaseException as error:
                if self.synchronizer.postpone(backward, error):
                    return
                self._fail(backward, error, waits=True)

    def _count_arrived(self, backward: Backward, *indices: int) -> None:
        """Count the recorded gradients, and then those of ``indices``, as arrived."""
        arrived = [*self._arrivals.take_recorded(), *indices]
        backward.arrivals += arrived
        waiting = backward.waiting
        if waiting is None:
            return
        expected: list[int] = []
        for i in arrived:
            if waiting[i]:
                waiting[i] -= 1
                expected.append(i)
            else:
                backward.unexpected.append(i)
        if backward.schedule is not None:
            backward.schedule.mark_arrived(expected)
        if self.synchronizer.empties_grad:
            self.synchronizer.on_accumulated(expected)

    def _refuse_gradient(self, started: Backward | Completion | None, index: int) -> None:
        if started is None or (started.turn is not None and started.turn.is_held):
            return  # of another wrapper that has this parameter, too: the mask is still to be made
        raise UnusableError(
            f"rank {self.groups.rank}: a backward reached {self._names[index]!r} between start_grad_sync() and "
            "finish_grad_sync(); finish first (where another wrapper has it, too: call finish_grad_sync() after it)"
        )

    def _refuse_replaced(self, before: Mapping[str, nn.Parameter]) -> None:
        """Raise if this backward reaches parameters that ``functional_call`` has replaced in a later forward."""
        if not (reached := reached_though_replaced(before, getattr(self._wrapper(), "module", None), self._parameters)):
            return
        error = UnusableError(
            f"rank {self.groups.rank}: a backward reaches {reached[0]!r}, which functional_call() has replaced after "
            "the forward, so that it would not be averaged: call it before, in no_grad(), or with plain tensors"
        )
        self.abort(str(error))
        raise error

    def _refuse_compiled(self) -> NoReturn:
        raise UnusableError(
            f"rank {self.groups.rank}: compiled autograd has compiled this backward, and is not supported: turn it off "
            "(torch._dynamo.config.compiled_autograd = False); torch.compile of the module, of the wrapper or of the "
            "whole step works without it"
        )

    def _running(self) -> Backward | None:
        """The running backward, or None; finishes one whose graph task is gone."""
        backward = self._backward
        if backward is None or backward.alive() is not None:
            return backward
        with self._lock:
            self._recover()
        return None

    def _begin(self, arrived: int | None = None) -> Backward | None:
        """Begin the backward that runs on this thread; None if it accumulates no gradients for this wrapper."""
        if arrived is not None and self.shared.is_for_another(self._parameters[arrived]):
            return None
        try:
            if is_in_compiled_autograd():
                self._refuse_compiled()
            reached = self._arrivals.reached() if arrived is None else self._arrivals.expected(arrived, self._names)
            accumulates = bool(reached) or bool(self._parameters and self._arrivals.accumulates())
            if accumulates and Weights.were_used:
                self.synchronizer.weights.note(arrived, is_synchronized=True)
        except (TorchChangedError, UnusableError) as error:
            self.abort(str(error))
            raise
        begun = self._await_end()
        if not accumulates:
            return None
        if self._started is not None:
            self._forget_failed()
        self.groups.check_process()
        if self._arrivals.streams is not None:
            self._arrivals.check(self.groups.rank)
        # If it reaches no parameter, other ranks' may, or a reentrant checkpoint, whose first arrival begins it anew.
        turn = self.shared.turn()
        triggers: Collection[int] = ()
        is_put_off = not self._overlap or self._sync_hooks or turn is not None or self.synchronizer.sends_nothing
        expected = None if is_put_off or not reached else reached
        backward = Backward(self._names, turn=turn, is_empty=not reached, alive=self._end_callback, expected=expected)
        begun[:], self._backward = [backward], backward
        if self.synchronizer.must_renew():
            backward.waiting = None
        elif expected is not None:
            try:
                triggers = self.synchronizer.start_negotiation(backward)
            except RuntimeError as error:
                if self.synchronizer.commits is None:
                    raise
                self._fail(backward, error, waits=True)
        self._arrivals.start_recording(reached, without=triggers)
        if (hooks := self._user_grad_hooks).exist or list(map(len, hooks.tables)) != hooks.bare:  # spares most a call
            hooks.defer()  # those too that were registered since the forward
        return backward

    def _await_end(self) -> list[Backward]:
        """Let autograd call back at the end of the backward that runs; returns the list for what begins in it."""
        callback = self._end_callback()
        if callback is None or (callback.args[1] and not callback.args[1][0].is_empty):
            callback = EndOfBackward(call_at_end, self._end_of_backward, [])
            at_end_of_backward(callback)  # an interrupt's traceback may keep it alive, so it is not known before
            self._end_callback = weakref.ref(callback, partial(Reducer._abort_if_unfinished, weakref.ref(self)))
        begun: list[Backward] = callback.args[1]
        return begun

    def _end_of_backward(self, backward: Backward) -> None:
        if backward is not self._backward:
            return
        if backward.phase is Phase.FAILED:
            self._arrivals.stop_recording()
            self.synchronizer.on_accumulated(self._arrivals.take_recorded())
            self.synchronizer.weights.remember(has_failed=True)
            self._backward = None  # the error, which the user may keep, would keep it alive
            if backward.met and not (self.synchronizer.tells_later and isinstance(backward.met, PeerAbortedError)):
                raise backward.met
            return
        self._completion(backward).finish_at_end_of_backward()

    def _completion(self, backward: Backward) -> Completion:
        then, drift = None, self.synchronizer.drift
        if not backward.silent and (self._user_grad_hooks.exist or (drift is not None and drift.raises)):
            then = partial(self._conclude, backward, drift)
        return Completion(self._finish(backward), self.groups, self._lock, then, backward.turn, self.note_failure)

    def note_failure(self) -> None:
        """Note that this step has failed here, in this wrapper or another one, and that the other ranks are told."""
        self.synchronizer.knows_of_failure = True

    def _conclude(self, backward: Backward, drift: DriftCheck | None) -> None:
        if self._user_grad_hooks.exist and backward.averaged and not self.synchronizer.weights.is_refused:
            self._user_grad_hooks.run(backward.averaged, backward.turn)
        if drift is not None:
            drift.conclude()

    def _finish(self, backward: Backward) -> Steps:
        """Complete ``backward``; if that fails, put this rank's gradients back and raise the error."""
        restore: Callable[[Collection[int]], None] | None = None
        try:
            self._end_arrivals(backward)
            if backward.phase is Phase.BEGUN:
                if self._sync_hooks and not backward.silent:
                    restore = copied_gradients(self._parameters)
                    call_sync_hooks(self._sync_hooks, self._wrapper(), self.groups.rank)
                    if backward.phase is not Phase.BEGUN:  # a hook has called abort_grad_sync()
                        restore(backward.averaged_by_others(self._parameters))
                        self._end_of_backward(backward)
                        return
                yield from self._start_negotiation(backward)
            yield from self._complete(backward)
        except BaseException as error:
            try:
                yield from self._finish_failed(backward, error)
            finally:
                if restore is not None and not backward.is_handed_over:  # else the hooks would be applied once more
                    restore(backward.averaged_by_others(self._parameters))
                # Without a backward and before the mask was sent, the user may have dropped the weighed gradients.
                if not backward.silent and (backward.recorder.asked_at or not backward.is_manual):
                    self.synchronizer.weights.remember(has_failed=True)
            raise

    def _finish_failed(self, backward: Backward, error: BaseException) -> Steps:
        """End ``backward``, which has failed here with ``error``, for the other ranks; may raise another error."""
        is_own = isinstance(error, Exception) and not isinstance(error, PeerAbortedError | CommunicationError)
        if backward.phase is Phase.BEGUN and is_own and not (self.synchronizer.has_told or self.synchronizer.asking):
            self._forwards.excuse(dropped=backward.is_manual)
            yield from self._finish_aborted(backward)  # this rank has sent nothing, so it can still take part
        elif backward.phase not in (Phase.OVER, Phase.FAILED):
            self._backward = None
            self._fail(backward, error)

    def _complete(self, backward: Backward) -> Steps:
        """Complete ``backward``; with new connections, if a failure of the previous step has closed the old ones."""
        if backward.is_manual:
            self._forwards.excuse(dropped=True)
        backward.dropped = self._forwards.count_dropped()
        try:
            steps = self.synchronizer.complete(backward)
            averaged = yield from in_ranges("finish", steps) if self.synchronizer.ranges else steps
        except (PeerAbortedError, NonFiniteGradientError) as error:
            if self.synchronizer.postpone(backward, error):
                yield from self._start_negotiation(backward)
                yield from self._complete(backward)
                return
            if error.is_in_step:
                self._forwards.excuse(dropped=False)
                self.synchronizer.knows_of_failure = True
                self._close(backward)
            raise
        self._close(backward, averaged)

    def _close(self, backward: Backward, averaged: bytes = b"") -> None:
        backward.end(averaged)
        if backward.unexpected:
            self._arrivals.refresh(backward.unexpected)
        self._last, backward.recorder.wrapper = backward.recorder, id(self._wrapper() or self)
        self._backward = None

    def _end_arrivals(self, backward: Backward) -> None:
        """Count the recorded arrivals at the end of backward, and let every hook call back again."""
        backward.recorder.backward_at = perf_counter_ns()
        if not backward.is_manual:
            self._arrivals.stop_recording()
            self._count_arrived(backward)

    def _start_negotiation(self, backward: Backward) -> Steps:
        if self.synchronizer.must_renew():
            yield from self.synchronizer.renewing()
        self.synchronizer.start_negotiation(backward)

    def start(self, *, silent: bool = False) -> None:
        """Begin to synchronize the gradients in ``.grad``; other ranks take part by this call or by a backward.

        A ``silent`` rank contributes and takes nothing; it only issues the collectives that other ranks wait for.
        """
        with self._lock:
            self._forget_failed(waits=True)
            if self._running() is not None or self._started is not None:
                raise UnusableError(
                    f"rank {self.groups.rank}: a synchronization is under way already: call finish_grad_sync() first"
                )
            self.groups.check()
            turn = self.shared.turn(is_manual=True)
            self._user_grad_hooks.defer()
            self.synchronizer.begin_step()
            self._backward = backward = Backward(self._names, is_manual=True, silent=silent, turn=turn)
            started = self._completion(backward)
            if backward.turn is None:
                started.advance()
            if backward.aborted or backward.phase is Phase.FAILED:  # finish() raises the error
                started.finish()
            self._started = started
            started.keep_open()

    @property
    def is_started(self) -> bool:
        """Whether :meth:`start` was called and :meth:`finish` was not."""
        return self._started is not None

    def begin_step(self) -> None:
        """Note that a forward begins another step."""
        if self._started is not None:
            with self._lock:
                self._forget_failed(waits=True)
        self.synchronizer.begin_step()

    def _forget_failed(self, *, waits: bool = False) -> None:
        """Forget a failed synchronization that :meth:`start` began, as another step begins or this one is given up.

        A rank that fails tells of it in one wrapper after another. If this rank has heard of it in another wrapper, it
        waits a second for it with ``waits``.
        """
        started, groups = self._started, self.groups
        if started is None:
            return
        if not started.is_over:
            is_known = waits and self.synchronizer.knows_of_failure
            if groups.is_closed and not groups.is_renewing:  # since an earlier step: nothing was sent in this one
                has_failed = is_known
            else:
                has_failed = groups.has_failed or (is_known and ends_soon(lambda: groups.has_failed))
            if has_failed:
                finish([started])
        if started.has_failed:
            self._started = None

    def finish(self, *, silent: bool = False) -> None:
        """Finish the synchronization that :meth:`start` began, or begin one and finish it."""
        with self._lock:
            backward = self._running()
            if self._started is None and backward is None:
                self.start(silent=silent)
            completion, self._started = self._started, None
            if backward is not None and completion is None:  # called from inside a backward
                completion = self._completion(backward)
        assert completion is not None
        completion.finish()

    # ------------------------------------------------------------------ when something goes wrong

    def _fail(self, backward: Backward, error: BaseException, *, waits: bool = False) -> None:
        """End the synchronization on all ranks, put this rank's gradients back, and raise.

        With ``waits``, an error that :meth:`_can_wait` is raised at the end of backward instead.
        """
        self._forwards.excuse(dropped=backward.is_manual)
        instead = self.synchronizer.fail(backward, error)
        note_failure_of_open()
        told = instead or error
        if isinstance(told, PeerAbortedError | CommunicationError):
            for other in self._everyone():
                theirs = other._backward
                if theirs is None or theirs is backward or theirs.is_manual or theirs.thread != backward.thread:
                    continue
                theirs.cause = told  # which ends their graph, too
        if waits and self._can_wait(told):
            backward.met = told
        elif instead is None:
            raise error
        else:
            raise instead from error

    def _can_wait(self, error: BaseException) -> TypeGuard[Exception]:
        """Whether ``error`` is raised at the end of backward only, as layers of another rank may wait for this rank."""
        if self.synchronizer.commits is not None:
            return isinstance(error, PeerAbortedError | CommunicationError)
        return self.synchronizer.is_split and isinstance(error, Exception)

    def abort(self, reason: str) -> None:
        """Give this step up on all ranks, in whatever phase this rank is; does nothing if they know of it already."""
        with self._lock:
            self._forget_failed()
            self.synchronizer.weights.give_up()
            if self._started is not None and self._started.is_over:  # it has its averages, as all other ranks have
                self._started = None
                self.synchronizer.knows_of_failure = True  # a second call must not give up another step
                return
            running = self._running()
            if self.synchronizer.knows_of_failure if running is None else running.phase is Phase.FAILED:
                return
            backward = self._backward or self.synchronizer.unfinished or Backward(self._names, is_manual=True)
            self._forwards.excuse(dropped=True)
            if self._started is not None and self.synchronizer.is_renewing:
                self._started.advance(error=AbortedError(reason))
                is_over = True
            else:
                is_over = self.synchronizer.abort(backward, reason) or backward.phase is Phase.OVER
            self.synchronizer.knows_of_failure = True
            started, self._started, self._backward = self._started, None, None
        if started is not None:
            started.close()
        try:
            if not is_over:
                Completion(self._finish_aborted(backward), self.groups, self._lock, turn=backward.turn).finish()
        finally:
            if running is backward and not backward.is_manual:  # what is left of it must not begin another step
                if backward.phase is not Phase.FAILED:
                    backward.fail()
                self._backward = self._backward or backward

    @staticmethod
    @uncompiled_hook
    def _abort_if_unfinished(owner: weakref.ref[Reducer[C]], end_callback: object) -> None:
        """Called when a graph task is gone: if its backward has raised, tell the other ranks at once."""
        # A traceback may have kept it until Python ends. Then no thread starts that could tell the other ranks.
        if (self := owner()) is None or sys.is_finalizing():
            return
        self._arrivals.stop_recording()
        with self._lock:
            backward = self._backward
            if backward is None or backward.alive is not end_callback or backward.phase is Phase.FAILED:
                return
            self._forwards.excuse(dropped=False)
            if self.synchronizer.abort(backward):
                self._backward = None
                return
            # The communication goes on in the user's group, where the user may next issue a collective that other ranks
            # do not. So finish this step first.
            if not any((b := one._backward) and not b.is_manual and b.alive() for one in self._everyone()):
                try:
                    self._recover()
                except Exception as error:  # the user already gets the error of the backward
                    logger.warning("rank %d: the step that has raised here: %s", self.groups.rank, error)

    def _recover(self) -> None:
        """Finish, for the other ranks, all backwards of this process whose graph tasks are gone, of all wrappers."""
        dead = [(one, b) for one in self._everyone() if (b := one._backward) is not None and b.alive() is None]
        ends = [Completion(one._finish_aborted(b), one.groups, one._lock, turn=b.turn) for one, b in dead]
        finish_and_conclude(ends)

    def _finish_aborted(self, backward: Backward) -> Steps:
        """Finish a backward that raised here, for the other ranks; this rank's gradients count as zero."""
        if backward.phase is Phase.FAILED:  # the communication has ended on every rank
            self._backward = None
            return
        backward.abort()
        self.synchronizer.knows_of_failure = True
        try:
            self._end_arrivals(backward)
            if backward.phase is Phase.BEGUN:
                yield from self._start_negotiation(backward)
            yield from self._complete(backward)
        except PeerAbortedError as error:
            self.synchronizer.fail(backward, error)  # the error of this rank's backward is raised, not this one
        except BaseException as error:
            self._fail(backward, error)
        finally:
            self._backward = None
