"""DistributedOptimizer: shards the state of any element-wise torch optimizer over the ranks (ZeRO stage 1).

All ranks agree on the norm of all gradients, and on whether one is inf (:mod:`ppe_ddp.optim.scale_check`).
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from itertools import chain
from typing import Any, ClassVar, NoReturn, SupportsIndex

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ppe_ddp.engine.failures import LOAD, SAVE
from ppe_ddp.engine.peer_processes import Activity
from ppe_ddp.engine.zero.parameter_gather import ParameterGather
from ppe_ddp.engine.zero.shards import Copies, FailedUpdate, ShardedModel
from ppe_ddp.errors import DisagreementError, NonFiniteGradientError, PeerAbortedError, UnusableError
from ppe_ddp.optim import optimizer_state
from ppe_ddp.optim.master_weights import FlatStep, MasterWeight, MasterWeights, parameter_of
from ppe_ddp.optim.scale_check import ScaleCheck, SharedScaleCheck
from ppe_ddp.torch_internals import leave_out_of_graphs, state_hooks, uncompiled, uncompiled_hook

logger = logging.getLogger("ppe_ddp")

# Optimizers whose step depends on a whole parameter, or on all parameters, so that shards would give other results.
_NOT_ELEMENTWISE = {
    "LBFGS": "takes inner products over all parameters and calls the closure as often as it likes",
    "Adafactor": "keeps statistics of rows and columns",
    "Muon": "works on whole matrices",
    "SparseAdam": "wants sparse gradients",
    # Of other libraries.
    **dict.fromkeys(
        ("LAMB", "Lamb", "FusedLAMB", "LARS", "Lars", "NovoGrad", "NvNovoGrad", "FusedNovoGrad"),
        "scales updates by norms of whole parameters",
    ),
    **dict.fromkeys(("Shampoo", "SOAP"), "works on whole matrices"),
    **dict.fromkeys(("Prodigy", "DAdaptAdam", "DAdaptSGD"), "estimates its step size over all parameters"),
}


class DistributedOptimizer(Optimizer):
    """ZeRO-1: each rank keeps master weights and optimizer state of its shards only.

    Backward reduce-scatters the gradients. A step updates this rank's shard of each parameter with its shard of the
    averaged gradient, and gathers the parameters. With ``overlap`` the gather goes on during the next forward.

    After a synchronized backward ``.grad`` of a parameter is None if no rank has a gradient, else a
    :class:`ppe_ddp.optim.ShardedGradient`: a tensor without elements. This rank's shard of the average is in ``.grad``
    of the master weight. As with torch, gradients add up, over backwards and over steps, until they are cleared by
    any ``zero_grad()`` or by ``parameter.grad = None``, which all ranks must do alike. (``zero_grad()`` of the wrapped
    optimizer itself does not clear gradients that have accumulated in ``no_sync()`` since.) A Megatron wrapper leaves
    ``.grad`` None, and gradients add up in ``main_grad`` until ``zero_grad_buffer()`` clears that, too. There, if the
    master weights have another dtype, their ``.grad`` is a copy: the next synchronization replaces it, and so drops
    what was unscaled, clipped or edited in it.

    It is an ``Optimizer`` for learning-rate schedulers, ``torch.amp.GradScaler``, hooks and closures. Its
    ``param_groups`` are those of the wrapped optimizer, with 1-D master weights in place of the parameters. Changes of
    their ``.grad`` count in the step; write values into the model's parameters instead, on all ranks. Use
    :meth:`clip_grad_norm_` in place of ``torch.nn.utils.clip_grad_norm_``, which raises
    :class:`ppe_ddp.errors.UnusableError`, or finds no gradients under a Megatron wrapper and returns 0.

    All ranks of the model's group must construct it together, of the same class, with the same groups and
    hyper-parameters (else the next synchronization is a ``DisagreementError``). A parameter is in one
    ``DistributedOptimizer``: ``step()`` of an earlier one that has it raises. All ranks must call :meth:`step`,
    :meth:`clip_grad_norm_`, :meth:`state_dict` and :meth:`load_state_dict` together.

    Method: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.

    Args:
        optimizer: An optimizer of the model's parameters, which this one takes over. Or an optimizer class, for all
            trainable parameters and with ``defaults``.
        model: A :class:`ppe_ddp.DistributedDataParallel`, or another wrapper that is a ``ShardedModel``, or returns one
            by ``sharded()``.
        master_dtype: The dtype of the master weights; a wider parameter has a master weight of its own dtype. The
            master weight of a parameter with this dtype is a view of the parameter's memory.
        overlap: Gather during the next forward. Without it, a step ends when all parameters have arrived. With it, the
            first use of a parameter in Python waits for it, in a module or anywhere else. Two uses are not noticed, and
            read old values unless :meth:`synchronize` is called before: views that were kept since before the step
            (``p.data``, a ``state_dict``), and parameters passed to a C++ extension or to ``torch.func.grad`` outside
            of the model's modules. Values come on the CUDA stream of :meth:`step`; of several streams that read, all
            but the first wait for that one after the first read, or :meth:`synchronize` is called before.
        **defaults: Keywords for an optimizer class.

    Raises:
        ValueError: The optimizer is not element-wise, has parameters that the model does not have, or hooks for its
            state dict. Or the model has another wrapper inside.
        TypeError: ``optimizer`` is no optimizer, there is no ``model``, or it cannot shard.
        UnusableError: The wrapper trains apart.
    """

    _everyone: ClassVar[weakref.WeakSet[DistributedOptimizer]] = weakref.WeakSet()

    @uncompiled_hook
    def __init__(
        self,
        optimizer: Optimizer | type[Optimizer],
        model: Any = None,
        *,
        master_dtype: torch.dtype = torch.float32,
        overlap: bool = False,
        **defaults: Any,
    ) -> None:
        _check_call(optimizer, model)
        self._model = _sharded(model)
        if isinstance(optimizer, type):
            parameters = [shard.parameter for shard in self._model.shards]
            optimizer = optimizer(parameters or [{"params": []}], **defaults)  # none: where nothing is trained
        elif defaults:
            raise TypeError(f"{', '.join(defaults)}: only for an optimizer that is given as a class")
        _check_elementwise(optimizer)
        if any(chain(*state_hooks(optimizer, loads=False), *state_hooks(optimizer, loads=True))):
            raise ValueError(
                f"this {type(optimizer).__name__} has hooks for its state_dict, which has another form now: register "
                "them on the DistributedOptimizer"
            )
        self._inner = optimizer
        self._dtype = master_dtype
        self._masters = MasterWeights()
        self._checked: list[MasterWeight] = []  # masters whose gradient is a SharedScaleCheck
        self._unscaled_in: int | None = None  # the synchronization whose averages a GradScaler has unscaled
        self._stays_unscaled = False  # it unscales no others, as the step behind that has raised
        self._is_stepping, self._last_step, self._has_begun, self._has_ended = False, -1, False, False
        self._has_forgotten = False  # whether a later one has taken over groups that had been removed
        self._lost: str | None = None  # the name of a parameter that a later DistributedOptimizer has taken over
        self._flat_step = FlatStep(optimizer, hooks=1)
        optimizer.register_step_pre_hook(partial(_refuse_other_steps, weakref.ref(self)))
        modules = model if isinstance(model, nn.Module) else None
        # None: of a ShardedModel, which does not tell its frozen parameters
        self._frozen = None if modules is None else {id(p) for p in modules.parameters() if not p.requires_grad}
        self._index = {id(shard.parameter): k for k, shard in enumerate(self._model.shards)}
        for group in optimizer.param_groups:
            self._check_known(group["params"])
        self._take_over(optimizer.param_groups)
        self._gather = ParameterGather([self._model])
        self._overlaps = overlap
        self._everyone.add(self)
        if overlap and modules is not None:
            self._gather.watch(modules)
        # Initializes the base class without groups of its own, as unpickling an optimizer does.
        self.__setstate__({"defaults": optimizer.defaults})
        self._warn_of_left_out()

    # ------------------------------------------------------------------ parameters, groups and state

    def _check_known(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            is_frozen = not parameter.requires_grad if self._frozen is None else id(parameter) in self._frozen
            if id(parameter) in self._index or is_frozen:
                continue
            what = f"the optimizer has a parameter of shape {tuple(parameter.shape)} that"
            if not getattr(parameter, "allreduce", True):
                raise ValueError(
                    f"{what} is an expert's (allreduce = False): leave the experts to an optimizer of their own, "
                    "DistributedOptimizer(..., model.sharded(experts=True))"
                )
            raise ValueError(
                f"{what} is none of the model's trainable ones, or that the wrapper ignores: construct it after "
                "wrapping and unfreezing, on those of model.parameters() that the wrapper averages"
            )

    def _take_over(self, groups: Sequence[dict[str, Any]]) -> None:
        """Put master weights in the place of the parameters in ``groups``, without those that are frozen."""
        given = {id(parameter) for group in groups for parameter in group["params"]} & self._index.keys()
        others: list[str] = []  # the names of parameters whose optimizers go on
        for other in set(self._everyone) - {self}:
            taken = [master for master in other._masters if id(master.shard.parameter) in given]
            if lost := optimizer_state.in_groups(taken, other._inner):
                other._lost = lost[-1].shard.name
            other._forget([master for master in taken if master not in lost])  # of groups that were removed
            if other._lost is None and other._model is self._model:
                others += [master.shard.name for master in other._masters]
        watched: dict[str, Callable[[], list[str]]] = {}
        kept = {master.index: master for master in self._masters}  # of groups that were removed, which go on
        for group in groups:
            masters: list[MasterWeight] = []
            for parameter in group["params"]:
                state = self._inner.state.pop(parameter, None)
                if (index := self._index.get(id(parameter))) is None:
                    continue
                master = kept.get(index) or MasterWeight(index, self._model.shards[index], self._dtype)
                masters.append(master)
                self._model.attach(index, master.weight)
                if state is not None:
                    self._inner.state[master.weight] = optimizer_state.shard_of(state, master)
            group["params"] = [master.weight for master in masters]
            numbers = partial(optimizer_state.hyper_parameters, group)  # it may outlive the optimizer on some ranks
            watched |= {f"the optimizer of {master.shard.name!r}, ...": numbers for master in masters}
            self._masters.extend(master for master in masters if master.index not in kept)
        self._model.copies.note_optimizer([master.shard.name for master in self._masters], others)
        first = self._masters[0].shard.name if self._masters else "nothing"
        titles = optimizer_state.described(self._inner, self._masters, self._dtype)
        self._model.require_same(f"the DistributedOptimizer of {first!r}, ...:", *titles, watched=watched)

    def _forget(self, masters: Sequence[MasterWeight]) -> None:
        if masters:
            self._has_forgotten = True
            self._flat_step.separate()
        self._masters.forget(masters)
        for master in masters:
            self._inner.state.pop(master.weight, None)
            master.weight.grad = None

    def _check_groups(self) -> None:
        """Refuse a removed group that was put back by hand when another DistributedOptimizer had taken it over."""
        if not self._has_forgotten:  # a step looks at no weight then
            return
        known = {id(master.weight) for master in self._masters}
        if any(id(weight) not in known for group in self._inner.param_groups for weight in group["params"]):
            raise UnusableError(
                f"rank {dist.get_rank()}: param_groups has a group that was removed, and whose parameters another "
                "DistributedOptimizer has taken over since: remove it there, and give it back by add_param_group()"
            )

    def _warn_of_left_out(self) -> None:
        taken = {master.index for master in self._masters}
        if left := [shard.name for k, shard in enumerate(self._model.shards) if k not in taken]:
            logger.warning(
                "%d trainable parameters (%s ...) are not in this DistributedOptimizer; their gradients are sharded "
                "too, so another DistributedOptimizer has to update them",
                len(left),
                left[0],
            )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's groups: hyper-parameters, and master weights with the averaged ``.grad``."""
        if self._model.is_synchronized:  # between micro-batches there are no averages
            self._model.assign_gradients()
            self._share_inf_checks()
        return self._inner.param_groups

    @property
    def group(self) -> ProcessGroup:
        """The ranks that share the parameters."""
        return self._model.group

    @property
    def model_parameters(self) -> list[nn.Parameter]:
        """The parameters of the model that it updates."""
        return [master.shard.parameter for master in optimizer_state.in_groups(self._masters, self._inner)]

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state of this rank's shards, by master weight."""
        self._flat_step.separate()
        return self._inner.state

    @property
    def master_nbytes(self) -> int:
        """Bytes of this rank's master weights, without those that are views of parameters."""
        return sum(master.weight.nbytes for master in self._masters if not master.is_alias)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters that the model had when this optimizer was made, and that are in no group now.

        A group that was removed from ``param_groups``, also from another one's, will do: its master weights stand for
        their parameters.
        """
        given = [given] if isinstance(given := param_group["params"], torch.Tensor) else list(given)
        names = [one[:1] if isinstance(one, tuple) else () for one in given]  # pairs have names, as in torch
        weights = [one[1] if isinstance(one, tuple) else one for one in given]
        parameters = [parameter_of(one) for one in weights]
        self._check_known(parameters)
        taken = {master.index for master in optimizer_state.in_groups(self._masters, self._inner)}
        again = [self._model.shards[k].name for p in parameters if (k := self._index.get(id(p), -1)) in taken]
        if again:
            raise ValueError(f"parameters that are in another group already: {', '.join(again)}")
        self._flat_step.separate()
        given = [(*name, one) if name else one for name, one in zip(names, parameters, strict=True)]
        self._inner.add_param_group({**param_group, "params": given})
        self._take_over(self._inner.param_groups[-1:])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "a DistributedOptimizer cannot be copied or pickled, as it belongs to a model and its ranks: keep its "
            "state_dict(), and load it into one that is made for the other model"
        )

    # ------------------------------------------------------------------ a step

    @uncompiled
    def _share_inf_checks(self) -> None:
        """Make one gradient of each device and dtype a SharedScaleCheck; the scaler makes one call for each kind."""
        leave_out_of_graphs(SharedScaleCheck)
        kinds: dict[tuple[torch.device, torch.dtype], MasterWeight] = {}
        updated = optimizer_state.in_groups(self._masters, self._inner)  # the scaler looks at no others
        for master in updated:
            if (gradient := master.weight.grad) is not None:
                kinds.setdefault((gradient.device, gradient.dtype), master)
        if not kinds and updated and self._model.copies.are_of_parts:
            # This rank's experts have seen no token, but the other ranks wait for its check. So give the scaler a
            # gradient of zeros, which lasts until gradients are assigned again.
            master = min(updated, key=lambda one: one.weight.numel())
            master.weight.grad = torch.zeros_like(master.weight)
            kinds[master.weight.device, master.weight.dtype] = master
        check = ScaleCheck(len(kinds), self._model.copies, partial(_note_unscaled, weakref.ref(self)))
        for master in kinds.values():
            assert master.weight.grad is not None
            master.weight.grad = shared = master.weight.grad.as_subclass(SharedScaleCheck)
            shared.check = check
            self._checked.append(master)

    def _end_inf_checks(self) -> None:
        for master in self._checked:
            if isinstance(gradient := master.weight.grad, SharedScaleCheck):
                master.weight.grad = gradient.as_subclass(torch.Tensor)
        self._checked.clear()

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Torch's, which puts hooks around :meth:`step`; the other ranks are told if one of these raises here."""
        hooked = Optimizer.profile_hook_step(func)

        @wraps(hooked)
        def step(self: DistributedOptimizer, *args: Any, **kwargs: Any) -> Any:
            self._has_begun = self._has_ended = self._gather.is_sent = False
            try:
                return hooked(self, *args, **kwargs)
            except BaseException as error:
                self._stays_unscaled |= self._unscaled_in == self._model.groups.step
                if self._has_ended or not self._has_begun:
                    self._fail(error, is_awaited=not self._has_ended and self._may_gather())
                raise

        return step

    @uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the shards of this rank, and gather the parameters to all ranks.

        Args:
            closure: Runs forward and backward. Called once before the step, with gradients enabled; its result is
                returned.

        Raises:
            PeerAbortedError: Another rank has raised in its step. With ``overlap`` it is a warning in the next step.
                Some parameters have old values until the next step, which gathers all of them.
            CommunicationError: A rank is lost.
        """
        self._has_begun = True
        if self._lost is not None:
            raise UnusableError(
                f"the parameter {self._lost!r} is also in a DistributedOptimizer that was made later, and has all "
                "averaged gradients since: step that one, or make each of an optimizer of parameters of its own"
            )
        self._check_groups()
        loss = None if closure is None else self._loss_of(closure)
        is_awaited = True
        try:
            self._gather.finish()
            exists = self._model.assign_gradients()
            is_awaited = self._gathers(exists)
            self._check_unscaled()
            self._end_inf_checks()
            self._masters.refresh()
            self._is_stepping = True
            try:
                self._flat_step.step()
            finally:  # also after an error, or the next refresh() would take the old values for new ones
                # ``exists`` is the same on all ranks; the user may have changed gradients of this rank since
                units = self._write(exists)
            if self._model.groups.is_closed:  # this step has failed, and the next one gathers everything
                self._model.abandon()
            else:
                self._gather.start(units, overlap=self._overlaps)
        except BaseException as error:
            self._fail(error, is_awaited=is_awaited)
            raise
        finally:
            self._is_stepping, self._last_step = False, self._model.groups.step
        self._has_ended = True
        return loss

    def _check_unscaled(self) -> None:
        """Refuse averages that a GradScaler takes for unscaled, as it has unscaled those of a step that has raised."""
        if self._stays_unscaled and self._unscaled_in != self._model.groups.step:
            error = UnusableError(
                f"rank {dist.get_rank()}: the GradScaler takes these gradients for unscaled, since the step() "
                "behind its last check has raised: after such an error call its update() as after any step, and go on "
                "with the next one"
            )
            self._model.copies.leave(error)  # other ranks, whose scaler checks for inf, wait there
            raise error

    def _loss_of(self, closure: Callable[[], Any]) -> Any:
        """Call ``closure``. If it raises after its backward, tell the other ranks, which wait for this one."""
        before = self._model.groups.step
        try:
            with torch.enable_grad():
                return closure()
        except BaseException as error:
            groups = self._model.groups
            if groups.step != before and not groups.is_closed:  # else the backward, if any, has told them
                self._fail(error, is_awaited=True)
            raise

    def _fail(self, error: BaseException, *, is_awaited: bool) -> None:
        """Tell the other ranks of ``error``; raises another rank's error if that has failed first.

        Otherwise ranks with nothing to gather here would hear of it in the next step only, and lose that step.
        """
        peer_error = self._gather.fail(error) if is_awaited else None
        told, is_own = peer_error or error, not isinstance(peer_error or error, PeerAbortedError)
        parent, has_told = self._model.groups.parent, is_awaited
        # Who has received all of this rank, or has other parameters, goes on with the next one. With overlap all do.
        is_over = not is_awaited or self._overlaps or (self._gather.is_sent and is_own)
        failed = [] if self._has_ended else [self]
        for other in set(self._everyone) - {self}:
            if other._lost is None and other._last_step != other._model.groups.step:
                other._model.copies.leave(told)
                if other._may_gather():
                    failed.append(other)
                    if is_over or other._model.groups.parent is not parent:
                        other._gather.fail(told)
                        has_told = True
        # Else the rank that failed tells it, or no rank takes the step, as all raise or wait for this one's inf check.
        if has_told and is_own and not isinstance(error, DisagreementError | UnusableError):
            told_together: dict[Sequence[ProcessGroup], FailedUpdate] = {}
            for copies in (one._model.copies for one in failed):
                copies.note_failed_update(told_together.setdefault(tuple(copies.parents), FailedUpdate()))
        if peer_error is not None:
            raise peer_error from error

    def _may_gather(self) -> bool:
        """Whether a step at this point may gather anything; the same on every rank."""
        try:
            return self._gathers(self._model.assign_gradients())
        except RuntimeError:  # some gradients are not averaged, so it may
            return True

    def _gathers(self, exists: Sequence[bool]) -> bool:
        """Whether a step with these gradients gathers anything; the same on every rank."""
        return self._gather.is_behind or any(exists[master.index] for master in self._masters)

    def _write(self, updated: Sequence[bool]) -> Sequence[int]:
        """Write these shards to the model, or all of them if a failure may have lost some; returns units to gather."""
        return self._masters.write(self._model, [True] * len(updated) if self._gather.is_behind else updated)

    @uncompiled
    def synchronize(self) -> None:
        """Wait until all parameters have arrived; see ``overlap`` for code that must call it."""
        self._gather.finish()

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, or set them to zero: the shards, and gradients accumulated in ``no_sync()``."""
        self._model.zero_grad([master.index for master in self._masters], set_to_none=set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale the gradients so that their total norm is at most ``max_norm``; returns the norm before.

        See :func:`ppe_ddp.optim.clip_grad_norm_` for the arguments; it takes several optimizers.
        """
        return clip_grad_norm_([self], max_norm, norm_type, error_if_nonfinite)

    def _gradients(self, names: set[str]) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients of this rank's shards: all of them, and those that count in the norm."""
        self._model.assign_gradients()
        self._end_inf_checks()
        updated = optimizer_state.in_groups(self._masters, self._inner)
        there = [(master.shard, g) for master in updated if (g := master.weight.grad) is not None]
        return [g for _, g in there], [g for shard, g in there if self._model.copies.counts(shard, names)]

    # ------------------------------------------------------------------ checkpoints

    @uncompiled
    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """State, master weights and groups by parameter names, for ``torch.distributed.checkpoint`` or ``torch.save``.

        Tensors that are cut like their parameter are 1-D DTensors of the flattened parameter, with one shard a rank. If
        ``torch.distributed.checkpoint`` saves them, any number of ranks can load them. A file of ``torch.save`` fits
        only the same rank of the same number of ranks. Master weights that are views of parameters are not included:
        they are in the model's state.

        All ranks call it together. With a Megatron wrapper they send one another parts of their shards. If the model is
        split, the state tells which part it is, and other parts refuse it.
        """
        before, after = state_hooks(self, loads=False)
        communicates = not self._model.has_even_shards and self._model.groups.world_size > 1
        self.synchronize()  # before anything can fail that is told to the other ranks
        with self._telling(SAVE, but=DisagreementError) if communicates else nullcontext():
            self._check_groups()
            if communicates:
                self._connect()
            for hook in before:
                hook(self)
            self._masters.follow()
            self._flat_step.separate()
            state = optimizer_state.collect(self._inner, self._masters, self._model)
        for hook in after:
            state = state if (another := hook(self, state)) is None else another
        return state

    @uncompiled
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a :meth:`state_dict`, on all ranks together; parameters get the values of their master weights.

        Raises:
            ValueError: Parameters, groups, memory formats or the number of ranks differ, or hyper-parameters between
                ranks; names the first difference and says what to do. Nothing is changed then.
            PeerAbortedError: Another rank has failed or was interrupted as it loaded; load again, on all ranks.
            CommunicationError: A rank is lost.
        """
        before, after = state_hooks(self, loads=True)
        state_dict = dict(state_dict)  # which a hook may change
        with self._telling(LOAD, but=DisagreementError):
            self._check_groups()
            self._connect()
            for hook in before:
                state_dict = state_dict if (another := hook(self, state_dict)) is None else another
            self._gather.finish()
            self._masters.refresh()  # else what the checkpoint lacks would get back the values of before the model's
            self._flat_step.separate()
        with self._telling(LOAD, but=ValueError):  # of all ranks, none of which has loaded anything
            moved = {one.index for one in optimizer_state.restore(self._inner, self._masters, self._model, state_dict)}
            self._model.groups.note(Activity.DONE)  # all ranks have what the last step has gathered
            self._gather.start(self._write([index in moved for index in range(len(self._model.shards))]))
        self._model.copies.note_load(is_of_all=False)
        for hook in after:
            hook(self)

    def _connect(self) -> None:
        """Connect again if a failure has closed connections, of which one rank may have heard and others not."""
        if (user := self._model.groups.user()) is not None:
            user.compare(self._model.groups)

    @contextmanager
    def _telling(self, phase: str, *, but: type[Exception]) -> Generator[None, None, None]:
        """A context of saving or loading; it tells the ranks, which wait for this one, of an error ``but`` these."""
        try:
            yield
        except but:
            raise
        except BaseException as error:
            if (instead := self._gather.fail(error, phase)) is not None:
                raise instead from error
            raise


@uncompiled
def clip_grad_norm_(
    optimizers: Sequence[DistributedOptimizer],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients of several optimizers so that their total norm is at most ``max_norm``.

    Use it if a model's parameters are in several optimizers: experts and the rest, or the chunks of a virtual pipeline.
    Every element counts once in the norm, on whichever ranks it is. With a Megatron wrapper the norm is that of the
    whole model, including the tensor-parallel and pipeline-parallel ranks. Parameters without the mark
    ``tensor_model_parallel = True`` then count as copies on tensor-parallel ranks. If no parameter of some rank has the
    attribute, all ranks raise.

    All ranks of the model must call this together.

    Args:
        optimizers: The optimizers of this rank's parameters, over the same groups.
        max_norm: The largest norm.
        norm_type: The p of the p-norm, which is positive; may be ``inf``.
        error_if_nonfinite: Raise a RuntimeError on all ranks if the norm is inf or NaN.

    Returns:
        The norm before clipping, 0-dimensional, the same on every rank. If it is not finite, finite gradients of
        several optimizers become zero: a ``GradScaler`` skips only the steps of those whose own are not finite.
    """
    if not (norm_type := float(norm_type)) > 0:
        raise ValueError(f"norm_type is {norm_type}, and must be positive; inf is the norm of the largest element")
    if not optimizers:
        raise ValueError(
            "clip_grad_norm_ takes at least one optimizer, by which a rank takes part: where nothing is trained, make "
            "one of no parameters, DistributedOptimizer(torch.optim.SGD, model, lr=0.1)"
        )
    models = [optimizer._model for optimizer in optimizers]
    copies = models[0].copies
    if any(list(model.copies.parents) != list(copies.parents) for model in models):
        raise ValueError("clip_grad_norm_ takes optimizers whose models are split over the same process groups")
    names: set[str] = set()
    weights = [master.weight for optimizer in optimizers for master in optimizer._masters]
    device = weights[0].device if weights else torch.device("cpu")
    is_unknown = not all(model.copies.are_splits_marked for model in models)
    with torch.no_grad():
        with copies.agreeing():
            parts = [optimizer._gradients(names) for optimizer in optimizers]
            counted = [gradient for _, of_one in parts for gradient in of_one]
            norm, is_unknown = total_norm(counted, norm_type, device, copies, is_unknown=is_unknown)
        if is_unknown:
            raise ValueError(
                "tensor-parallel ranks clip by the norm of the whole model, for which it must be known which "
                "parameters are split: set parameter.tensor_model_parallel, True for these and False for copies, as "
                "Megatron does"
            )
        if error_if_nonfinite and not norm.isfinite():
            raise NonFiniteGradientError(
                f"the norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be clipped; pass "
                "error_if_nonfinite=False to clip by it all the same"
            )
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        if len(optimizers) > 1:  # a GradScaler skips the step of that one alone whose gradients are not finite
            factor = factor.nan_to_num(0.0)
        gradients = [gradient for own, _ in parts for gradient in own]
        for place in {gradient.device for gradient in gradients}:
            torch._foreach_mul_([one for one in gradients if one.device == place], factor.to(place))
    return norm


def _check_call(optimizer: object, model: object) -> None:
    """Refuse parameters in place of the optimizer, which torch's ZeroRedundancyOptimizer takes, and a missing model."""
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if not issubclass(kind, Optimizer):
        problem = f"takes an optimizer or its class, not {kind.__name__}"
    elif model is None:
        problem = "needs the wrapper of the model, which shards the gradients"
    else:
        return
    raise TypeError(
        f"DistributedOptimizer {problem}: call it as DistributedOptimizer(torch.optim.AdamW, model, lr=1e-3) or "
        "DistributedOptimizer(torch.optim.AdamW(model.parameters()), model), where model is the wrapped one"
    )


def _sharded(model: Any) -> ShardedModel:
    if isinstance(model, ShardedModel):
        return model
    offer = getattr(model, "sharded", None)
    sharded = offer() if callable(offer) else None
    if not isinstance(sharded, ShardedModel):
        raise TypeError(
            f"{type(model).__name__} cannot shard its gradients: wrap the module in ppe_ddp.DistributedDataParallel"
        )
    return sharded


def _check_elementwise(optimizer: Optimizer) -> None:
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _NOT_ELEMENTWISE:
            raise ValueError(
                f"{kind.__name__} {_NOT_ELEMENTWISE[kind.__name__]}, so it cannot update shards by themselves: use it "
                "without DistributedOptimizer, or choose one that works element by element (SGD, AdamW, Adagrad, ...)"
            )


def _note_unscaled(owner: weakref.ref[DistributedOptimizer]) -> None:
    if (self := owner()) is not None:
        self._unscaled_in, self._stays_unscaled = self._model.groups.step, False


def _refuse_other_steps(owner: weakref.ref[DistributedOptimizer], optimizer: Optimizer, *_: object) -> None:
    """A hook that refuses a direct step of the wrapped optimizer, which would update this rank's shards here only."""
    self = owner()
    if self is not None and not self._is_stepping:
        raise UnusableError(
            f"this {type(optimizer).__name__} is wrapped by a DistributedOptimizer, and its own step() would leave "
            "other parameters on each rank: call the DistributedOptimizer's step(), also by way of a gradient scaler"
        )


def total_norm(
    shards: Sequence[Tensor], norm_type: float, device: torch.device, copies: Copies, *, is_unknown: bool
) -> tuple[Tensor, bool]:
    """The norm of the gradients of a model (0-dimensional), and whether it is unknown; the same on every rank.

    ``shards`` are this rank's gradients, without copies of another rank's. ``is_unknown`` says that this rank does not
    know which ones are copies; the second result says whether that holds for any rank.
    """
    present = [shard.abs() if shard.is_complex() else shard for shard in shards if shard.numel()]
    is_wide = any(shard.dtype in (torch.float64, torch.complex128) for shard in shards)
    dtype = torch.float64 if is_wide else torch.float32
    is_max = math.isinf(norm_type)
    value = torch.zeros((), dtype=torch.float64, device=device)
    if present:
        norms = torch._foreach_norm(present, norm_type, dtype=dtype)
        stacked = torch.stack([norm.to(device, torch.float64) for norm in norms])
        value = stacked.max() if is_max else stacked.pow(norm_type).sum()
    said = [value.isnan().to(value), *(torch.full_like(value, float(one)) for one in (is_wide, is_unknown))]
    total = torch.stack([value, *said])  # transports differ in the maximum with NaN
    copies.all_reduce(total, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM)
    norm = total[0] if is_max else total[0].pow(1.0 / norm_type)
    norm = torch.where(total[1] > 0, math.nan, norm)
    if not copies.is_split:  # all ranks have all dtypes, and the host need not wait for a GPU
        return norm.to(dtype), False
    return norm.to(torch.float64 if total[2] > 0 else torch.float32), bool(total[3] > 0)
