"""Gathers updated parameters to all ranks, unit by unit; with overlap, each is waited for where it is first used.

    step        start the all-gathers of units 0 1 2 3
    forward     layer A uses unit 0: wait for it; A computes, while 1 2 3 are in flight; layer B uses unit 1 ...

A parameter whose values are in flight is a :class:`PendingParameter` until its first use in Python, by a module,
a hook, a copy, a loop over ``parameters()``. The use waits and starts no collective, so one rank may do it alone.

Compiled code and extensions read parameters in C++: modules can be watched, so that their forwards wait before they
begin. Other reads cannot be noticed (``DistributedOptimizer`` names them). Hence parameters are in flight after a step
only if the user has asked for it (``overlap=True``).

The message of a unit is packed, or in place:

    packed     own chunks -> own row -> all-gather of rows -> parameters
    in place   the memory of a large parameter has the layout of the rows already
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils.hooks import RemovableHandle

from ppe_ddp.backends.memory_pool import MemoryPool
from ppe_ddp.contracts import Waitable
from ppe_ddp.engine.failures import UPDATE, relayed
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.record import EventLog
from ppe_ddp.engine.zero.shard_collectives import all_gather
from ppe_ddp.engine.zero.shards import Rows, Shard, ShardedModel, flattened, is_dense
from ppe_ddp.errors import CommunicationError, PeerAbortedError, PpeDdpError, UnusableError
from ppe_ddp.nested_tensors import tensors_in
from ppe_ddp.torch_internals import is_compiled, uncompiled, without_torch_function

Unit = tuple[int, int]  # the number of the model, and the number of the unit in it

logger = logging.getLogger("ppe_ddp")
_OWNER = "_parameter_gather"  # the attribute of a pending parameter that names its ParameterGather
_ATTRIBUTES: Any = torch.Tensor
# Used by zero_grad(), by reads of gradients, and as inputs are moved; none of these depends on a parameter's values.
_USES_NO_VALUES = frozenset(
    [
        _ATTRIBUTES.grad.__get__,
        _ATTRIBUTES.grad.__set__,
        _ATTRIBUTES.grad.__delete__,
        _ATTRIBUTES.requires_grad.__get__,
        _ATTRIBUTES.is_leaf.__get__,
        _ATTRIBUTES.device.__get__,
    ]
)


class PendingParameter(nn.Parameter):
    """The ``__class__`` of a parameter while its values are in flight. Its first use waits, and restores its own."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Wait for the parameters among the arguments, unless ``function`` needs no values; then call it."""
        kwargs = kwargs or {}
        if function in _USES_NO_VALUES:
            with without_torch_function():
                return function(*args, **kwargs)
        parameters = [tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, nn.Parameter)]
        if not parameters:
            raise UnusableError(
                f"{getattr(function, '__name__', function)} uses a parameter that is still being gathered, in an "
                "argument of an unknown kind; call synchronize() of the DistributedOptimizer before (or finish with "
                "start_param_sync(force_sync=True)), or do not let the gather overlap"
            )
        for parameter in parameters:
            wait_for(parameter)
        return function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Wait, then copy an ordinary parameter."""
        wait_for(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Wait, then pickle an ordinary parameter."""
        wait_for(self)
        return self.__reduce_ex__(protocol)


@uncompiled
def wait_for(parameter: nn.Parameter) -> None:
    """Wait for the values of ``parameter``, if they are in flight."""
    gather: ParameterGather | None = vars(parameter).get(_OWNER)
    if gather is not None:
        gather.finish([gather.unit_of[id(parameter)]])


class ParameterGather:
    """Gathers the units of sharded models, one for each group of ranks that shares parameters; it is thread-safe."""

    def __init__(self, models: Sequence[ShardedModel]) -> None:
        self._models = models
        self._members = {
            (number, unit): [model.shards[index].parameter for index in indices]
            for number, model in enumerate(models)
            for unit, indices in enumerate(model.units)
        }
        self.unit_of = {id(parameter): key for key, members in self._members.items() for parameter in members}
        self._marked: set[Unit] = set()
        self._pending: dict[Unit, Waitable] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # those of the last step
        self._sent_in = self._connections
        self.is_sent = False
        """Whether all units of this step were sent: ranks that have received them go on, whatever fails here."""
        self._handles: list[RemovableHandle] = []
        self._lock = threading.RLock()
        self._process = os.getpid()
        for model in models:
            model.groups.gathers.add(self)

    def __del__(self) -> None:
        self.unwatch()

    # ------------------------------------------------------------------ gathering

    @property
    def _connections(self) -> list[tuple[int, bool]]:
        return [(model.groups.generation, model.groups.is_closed) for model in self._models]

    @property
    def is_behind(self) -> bool:
        """Whether a failure may have lost some units: connections were closed or renewed since the last gather."""
        return self._sent_in != self._connections

    @torch.no_grad()
    def start(self, units: Iterable[int] | None = None, *, overlap: bool = False) -> None:
        """Gather ``units`` of the first model, or all units of all models, in order. Every rank passes the same.

        With ``overlap`` it returns at once, and the first use of a parameter waits for it.
        """
        self.finish()
        self._sent_in = self._connections
        for model in self._models if units is None else self._models[:1]:
            model.begin_gather()
        for key in self._members if units is None else [(0, unit) for unit in units]:
            members = self._members[key]
            if PendingParameter in set(map(type, members)):  # in flight for another optimizer of the same model
                for parameter in members:
                    wait_for(parameter)
            begin = perf_counter_ns()
            if members[0].is_cuda:
                self._streams[members[0].device] = torch.cuda.current_stream(members[0].device)
            pending = self._models[key[0]].gather(key[1])
            if pending is None:
                self._install(key)
                continue
            if (log := EventLog.current) is not None:
                nbytes = sum(parameter.nbytes for parameter in members)
                log.add_message("gather", str(key[1]), begin, pending, nbytes)
            with self._lock:
                self._pending[key] = pending
                if overlap:
                    self._mark_pending(key, members)
        self.is_sent = True
        if not overlap:
            self.finish()

    def _mark_pending(self, key: Unit, members: Sequence[Any]) -> None:
        """Let the first use of these parameters wait for them."""
        if any(type(parameter) is not nn.Parameter for parameter in members):
            self.finish([key])  # a parameter of a subclass must keep its class
            return
        self._marked.add(key)
        increment_version(members)  # so that a backward of a graph from before the step raises
        for parameter in members:
            setattr(parameter, _OWNER, self)
            parameter.__class__ = PendingParameter

    @property
    def is_under_way(self) -> bool:
        return bool(self._pending)

    def finish(self, units: Iterable[Unit] | None = None) -> None:
        """Wait for ``units``, or for all that are in flight; afterwards none of these is, unless it is interrupted.

        Raises:
            PeerAbortedError: Another rank has failed in this step. With overlap the next step has begun, and works, so
                this is only logged.
            CommunicationError: A rank is lost.
        """
        if not self._pending:
            return
        if os.getpid() != self._process:
            raise UnusableError(
                f"process {os.getpid()} was forked while parameters were being gathered, and uses one that had not "
                "come; call synchronize() of the DistributedOptimizer before processes are forked (DataLoader workers)"
            )
        failure: PpeDdpError | None = None
        with self._lock:
            overlaps = bool(self._marked)
            for key in list(self._pending) if units is None else units:
                try:
                    self._finish(key)
                except (PeerAbortedError, CommunicationError) as error:
                    failure = failure or error
            if isinstance(failure, PeerAbortedError):
                self._abandon()
            if isinstance(failure, PeerAbortedError) and overlaps:
                logger.warning("%s (Here the next step has begun.)", failure)
            elif failure is not None:
                self._note_failure()
                raise failure

    def _finish(self, key: Unit) -> None:
        pending = self._pending.get(key)
        if pending is None:
            return
        begin, model = perf_counter_ns(), self._models[key[0]]
        with without_torch_function():
            device = self._members[key][0].device
        try:
            with self._on_stream(device):
                model.groups.failures.wait(pending, device)
                if (log := EventLog.current) is not None:
                    log.add("wait", f"for gather {key[1]}", begin)
                self._install(key)
        except RuntimeError as error:
            self._forget(key)
            if self._sent_in[key[0]] != self._connections[key[0]]:  # closed by a failure that this rank knows already
                logger.debug("gathering parameters was left: %s", error)
                model.abandon(key[1])  # the next step gathers all units
                return
            peer_error = self._fail_in(model.groups, error)
            if peer_error is not None:
                raise peer_error from error
            if isinstance(error, PeerAbortedError):
                raise
            first = model.shards[model.units[key[1]][0]].name
            raise CommunicationError(
                f"gathering the updated parameters failed, at {first!r} and those with it: {error}. An error or a "
                "crash on another rank ends here: look for the first traceback of all ranks."
            ) from error
        self._forget(key)  # not after an interrupt: the next use waits again

    @contextmanager
    def _on_stream(self, device: torch.device) -> Generator[None, None, None]:
        """Work on the stream of the step, for which other streams wait; the current one waits for it afterwards."""
        stream = self._streams.get(device)
        if stream is None or stream == (current := torch.cuda.current_stream(device)):
            yield
            return
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)

    def fail(self, error: BaseException, phase: str = UPDATE) -> PpeDdpError | None:
        """End the communication after an error in an optimizer's step or load: other ranks wait for this rank's shards.

        Returns the error to raise instead, if ``error`` is only the consequence of a rank that has failed or is lost.
        """
        self._note_failure()
        with self._lock:
            self._abandon()
        return self._fail_in(self._models[0].groups, error, phase)

    def _fail_in(self, groups: Groups, error: BaseException, phase: str = UPDATE) -> PpeDdpError | None:
        """End the communication in ``groups``, and in all other groups of its wrapper.

        Otherwise a rank might hear of the failure in one group only, and begin its next backward in the others. There
        it would wait for this rank, which first connects all groups again and waits for that rank.
        """
        instead = groups.fail(error, phase)
        user = groups.user()
        for other in user.connections if user is not None else ():
            other.fail(relayed(instead or error), phase)
        return instead

    def _note_failure(self) -> None:
        """Note that this step has failed, so that a call of ``abort_grad_sync()`` does not give up the next step."""
        for model in self._models:
            if (user := model.groups.user()) is not None:
                user.note_failure()

    def _abandon(self) -> None:
        """Forget all units in flight, which a failed rank may never send; the next step gathers all units."""
        for key in list(self._pending):
            self._forget(key)
        for model in self._models:
            model.abandon()

    def _forget(self, key: Unit) -> None:
        """Forget a unit in flight, so that no use of its parameters waits."""
        self._pending.pop(key, None)
        if key in self._marked:
            self._marked.remove(key)
            for parameter in self._members[key]:
                if vars(parameter).pop(_OWNER, None) is not None:
                    parameter.__class__ = nn.Parameter

    def _install(self, key: Unit) -> None:
        # The parameters stay pending for other threads meanwhile, so use them without __torch_function__.
        with torch.no_grad(), without_torch_function():
            self._models[key[0]].install(key[1])

    # ------------------------------------------------------------------ modules

    def watch(self, module: nn.Module) -> None:
        """Let forwards in ``module`` wait before they begin, for C++ code that reads parameters.

        A submodule that has parameters itself waits for these and for all parameters below it. If a part of ``module``
        is compiled, or it is called from compiled code, it waits for all units.
        """
        if self._handles:
            return
        self._handles.append(module.register_forward_pre_hook(_CompiledWaitHook(self), prepend=True))
        for part in module.modules():
            if any(id(parameter) in self.unit_of for parameter in part.parameters(recurse=False)):
                units = sorted({self.unit_of[id(p)] for p in part.parameters() if id(p) in self.unit_of})
                self._handles.append(part.register_forward_pre_hook(_WaitHook(self, units), prepend=True))

    def unwatch(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _WaitHook:
    """A module hook that waits for units. In a copied or unpickled module it waits for nothing."""

    def __init__(self, gather: ParameterGather | None = None, units: Sequence[Unit] | None = None) -> None:
        self._gather: Callable[[], ParameterGather | None] = (lambda: None) if gather is None else weakref.ref(gather)
        self._units = units

    def __call__(self, module: nn.Module, _arguments: object) -> None:
        # In compiled code the outermost module has waited already.
        if not torch.compiler.is_compiling() and (gather := self._gather()) is not None:
            gather.finish(self._units)

    def __reduce__(self) -> tuple[type[_WaitHook], tuple[()]]:
        return type(self), ()


class _CompiledWaitHook(_WaitHook):
    """Waits for all units before compiled code runs, which is specialized on the class of the parameters."""

    def __call__(self, module: nn.Module, _arguments: object) -> None:
        if torch.compiler.is_compiling():
            self._finish()
        elif (gather := self._gather()) is not None and gather.is_under_way and any(map(is_compiled, module.modules())):
            gather.finish()

    @uncompiled
    def _finish(self) -> None:
        if (gather := self._gather()) is not None:
            gather.finish()


class UnitGather:
    """Gathers some parameters of one dtype and device; reused, with its views of them, as long as it is current."""

    def __init__(self, members: Sequence[int], shards: Sequence[Shard], groups: Groups, pool: MemoryPool) -> None:
        self.members = list(members)
        self._parameters = [shard.parameter for shard in shards]
        self._specs = specs = [shard.spec for shard in shards]
        self._groups = groups
        rank, world_size = groups.rank, groups.world_size
        layout = Rows(specs, rank, world_size)
        self._addresses = self._now()
        self._loose = [k for k, shard in enumerate(shards) if not is_dense(shard.parameter, shard.spec)]
        self._flats = [flattened(shard.parameter.detach(), shard.spec) for shard in shards]
        self._own = [flat[shard.start : shard.stop] for flat, shard in zip(self._flats, shards, strict=True)]
        self._rows: Tensor | None = None
        self._pool: MemoryPool | None = pool
        if len(specs) == 1 and not self._loose and specs[0].numel % world_size == 0:
            self._message = (self._flats[0], self._own[0])
            return
        self._pool = None  # the rows are already in memory of the pool
        whole = pool.take(layout.numel, specs[0].dtype, specs[0].device)
        self._rows = whole.view(world_size, layout.width)
        self._message = (whole, self._rows[rank])
        self._parts = None if layout.is_full else layout.parts(self._rows[rank])
        self._pairs = layout.pairs(self._rows, self._flats)

    def _now(self) -> list[int]:
        return list(map(torch.Tensor.data_ptr, self._parameters))

    def is_current(self, members: Sequence[int]) -> bool:
        """Whether this is for ``members``, at their current addresses."""
        return not self._loose and self.members == members and self._now() == self._addresses

    def start(self) -> Waitable | None:
        """Start the all-gather; None where there is nothing to send."""
        whole, own = self._message
        if whole.numel() == 0:
            return None
        if self._rows is not None:
            if self._parts is None:  # one call takes a quarter of the time of the copies
                torch.cat(self._own, out=own)
            else:
                torch._foreach_copy_(self._parts, self._own)
        return all_gather(whole, own, self._groups.buckets, self._pool)

    def install(self) -> None:
        """Copy the received values into the parameters."""
        if self._rows is None:
            # The message has changed the memory without autograd. With a new version, a stale graph raises.
            increment_version(self._parameters[0])
            return
        if self._pairs[0]:  # empty if all parameters are
            torch._foreach_copy_(*self._pairs)
        for k in self._loose:
            spec = self._specs[k]
            self._parameters[k].detach().copy_(self._flats[k].as_strided(spec.shape, spec.stride))
