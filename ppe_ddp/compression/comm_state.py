"""The state of compressors, by the names of parameters, and the number of the step. It outlives groups and buckets.

Like ``.grad`` it belongs to the step. When all ranks take the step, the new state is committed. When they drop it, the
old state is put back, since the sent values are dropped as well.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ppe_ddp.backends.group_internals import backend_for, device_types
from ppe_ddp.backends.shared_memory.shared_group import SharedMemoryGroup
from ppe_ddp.compression.compressor import Compressor
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.plan import ParameterSpec
from ppe_ddp.torch_internals import is_trial_step, uncompiled_hook

logger = logging.getLogger("ppe_ddp")

RESIDUAL = "residual"
"""The key of a parameter's residual: the part of its gradients that this rank has not sent."""
# A parameter below this fraction of the mean size goes to the slice of the one before it: each range costs some calls.
_SMALL = 1 / 8


class CommState:
    """The state of one wrapper's compressor; with ``can_revoke`` a step can be revoked until :meth:`settle`."""

    def __init__(self, *, can_revoke: bool = False) -> None:
        self.owners = SliceOwners()  # the slices of the state, if ranks share memory on several nodes
        self._of: dict[str, dict[str, Any]] = {}
        self._before: dict[str, dict[str, Any]] = {}
        self._taken: dict[str, dict[str, Any]] = {}  # the state before the last committed step
        self._is_counted = False  # whether that step is counted
        self._can_revoke = can_revoke
        # After put_back_unless_stepped(): parameters that an optimizer may update, by name; the ids of parameters that
        # one has updated; and a function that ends the notes of these.
        self._undecided: tuple[Mapping[str, nn.Parameter], set[int], Callable[[], object]] | None = None
        self.noted = 0
        """The number of completed steps with which new groups begin."""

    def of(self, name: str) -> dict[str, Any]:
        """The state of the parameter ``name``: always the same dict, to be changed in place."""
        return self._of.setdefault(name, {})

    @property
    def is_empty(self) -> bool:
        return not any(self._of.values())

    def keep(self, names: Iterable[str]) -> None:
        """Keep a copy of the state of the parameters ``names``, which the current step may replace."""
        self.decide()
        self.settle()
        for name in names:
            if name not in self._before:
                self._before[name] = dict(self.of(name))

    def count(self, groups: Groups) -> None:
        """Count a step in ``groups``, whether its averages are finite or not."""
        groups.taken += 1
        self._is_counted = self._can_revoke

    def commit(self) -> None:
        """Commit the state of the step: drop the copies of :meth:`keep`."""
        self.decide()  # an earlier step may be undecided, if this one has sent nothing
        self._taken = dict(self._before) if self._can_revoke else {}
        self._before.clear()

    def settle(self) -> None:
        """Drop the state before the last step, which can no longer be revoked."""
        self._taken.clear()
        self._is_counted = False

    def revoke(self, groups: Groups) -> None:
        """Restore the state before the last step in ``groups``, which is dropped after it was complete there."""
        groups.taken -= self._is_counted
        self._is_counted = False
        self.decide()  # an earlier step may be undecided; of the last one no optimizer has updated anything
        self._before = self._before or self._taken
        self._taken = {}
        self.put_back()

    def follow(self, renamed: Mapping[str, str | None]) -> Mapping[str, int]:
        """Keep residuals, and where they are, under the new names of parameters; drop those that have None.

        The rest of the state stays with the name: it is the same on all ranks, and a rank may have replaced what
        another one has renamed. Returns the slice of each parameter if there are slices, which all ranks must agree on.
        """
        if renamed:
            self.decide()  # an earlier step may be undecided, and has the names of before
        found = {new: (self.of(old).pop(RESIDUAL, None), self.owners.of(old)) for old, new in renamed.items()}
        followed = {name: one for name, one in found.items() if name is not None}
        self.owners.of_names |= {name: index for name, (_, index) in followed.items() if self.owners.of_names}
        for name, (residual, _) in followed.items():
            if residual is not None:
                self.of(name)[RESIDUAL] = residual
        return self.owners.of_names if followed else {}

    def clear(self) -> None:
        """Drop the state of all parameters, as another kind of values is sent from now on."""
        self._end_notes()
        self._before.clear()
        self.settle()
        for own in self._of.values():
            own.clear()

    def begin_anew(self, groups: Groups | None) -> None:
        """Drop the state of all parameters, and the count of steps in ``groups``."""
        self.clear()
        self.noted = 0
        if groups is not None:
            groups.taken = 0

    def put_back_unless_stepped(self, finite: Mapping[str, nn.Parameter], counted: Iterable[nn.Parameter] = ()) -> None:
        """Restore the copies of :meth:`keep` at the next step, except for ``finite`` parameters updated until then.

        A ``GradScaler`` skips only the steps of those optimizers whose own gradients are not finite. Those that are
        ``counted`` count as updated.
        """
        self.decide()  # an earlier step may be undecided, if this one has sent sparse gradients alone
        updated = set(map(id, counted))
        begun: set[int] = set()  # parameters with gradients when their step has begun, which may clear these itself
        hooks = [
            register_optimizer_step_pre_hook(partial(_note_gradients, begun)),
            register_optimizer_step_post_hook(partial(_note_step, updated, begun)),
        ]
        self._undecided = finite, updated, weakref.finalize(self, _remove, hooks)

    @property
    def is_undecided(self) -> bool:
        """Whether the last step had an average that is not finite, and may be taken or left out yet."""
        return self._undecided is not None

    def doubt(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Restore the state before the last step for those ``parameters`` that no optimizer updates until the next one.

        All was finite here, but not on other ranks of the model. Called before :meth:`settle`.
        """
        if self._undecided is None and self._taken:
            self._before, self._taken = self._taken, {}
            self.put_back_unless_stepped(parameters)

    def note_outer_step(self) -> None:
        """Note after :meth:`put_back_unless_stepped` that an outer step updates all parameters; no optimizer does."""
        if self._undecided is not None:
            finite, updated, _ = self._undecided
            updated.update(map(id, finite.values()))

    def decide(self) -> None:
        """Complete :meth:`put_back_unless_stepped`; called when no optimizer will step any more."""
        if self._undecided is not None:
            self._before = self._to_put_back
            self._end_notes()
            self.put_back()

    @property
    def _to_put_back(self) -> dict[str, dict[str, Any]]:
        """The copies of :meth:`keep` that :meth:`decide` would restore now."""
        if self._undecided is None:
            return {}
        finite, updated, _ = self._undecided
        return {n: entries for n, entries in self._before.items() if n not in finite or id(finite[n]) not in updated}

    @property
    def _settled(self) -> dict[str, dict[str, Any]]:
        """The state by parameter as :meth:`decide` would leave it now; decides nothing, as optimizers may yet step."""
        return self._of | self._to_put_back

    def _end_notes(self) -> None:
        if self._undecided is not None:
            self._undecided[2]()
        self._undecided = None

    def put_back(self) -> None:
        """Drop the step: restore the copies of :meth:`keep`."""
        self.decide()  # an earlier step may be undecided, if this one has sent nothing
        for name, entries in self._before.items():
            own = self.of(name)
            own.clear()
            own.update(entries)
        self._before.clear()

    def begin(self, groups: Groups, specs: Sequence[ParameterSpec]) -> None:
        """Assign slices, if ranks share memory on several nodes; a copy keeps its own. All ranks call this together."""
        if (nodes := _sharing(groups)) and not self.owners.of_names:
            self.owners.add(specs, max(map(len, nodes)))

    def move(self, steps: int) -> None:
        """Continue in groups of other ranks, after ``steps`` steps; slices are assigned anew.

        Residuals stay in the memory of the rank that had the slice, which sends them when it has it again.
        """
        self.decide()
        self.owners, self.noted = SliceOwners(), steps

    def rescale(self, before: Groups, now: Groups) -> None:
        """Let residuals of steps in the groups ``before`` count there as much as they would have: averages are means.

        What is added to another step is divided by the number of ranks that average that one.
        """
        factor = _averaging(now) / _averaging(before)
        for own in self._of.values():
            if factor != 1.0 and RESIDUAL in own:
                own[RESIDUAL] = own[RESIDUAL] * factor

    def common(self) -> dict[str, dict[str, Any]]:
        """A copy of the state that is the same on all ranks: all but residuals (``ErrorFeedback``)."""
        everything = self._settled.items()
        return {name: {key: _copy(one) for key, one in own.items() if key != RESIDUAL} for name, own in everything}

    def take(self, common: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the result of :meth:`common` of another rank, in place of this rank's own state."""
        self.clear()
        for name, entries in common.items():
            self.of(name).update(entries)

    def state_dict(self, compressor: Compressor, groups: Groups, specs: Sequence[ParameterSpec]) -> dict[str, Any]:
        """A copy of the state, of tensors and plain values; without that of parameters that are no longer there."""
        settled = self._settled
        states = {spec.name: settled.get(spec.name) for spec in specs}
        parameters = {name: {key: _copy(value) for key, value in own.items()} for name, own in states.items() if own}
        return {
            **self._identity(compressor, groups),
            "steps": groups.taken,
            "slices": dict(self.owners.of_names),
            "parameters": parameters,
        }

    def load_state_dict(
        self, state: Mapping[str, Any], compressor: Compressor, groups: Groups, specs: Sequence[ParameterSpec]
    ) -> None:
        """Load a :meth:`state_dict`, or an empty one; raises for that of another compressor, rank, job or module."""
        if not state or ("buckets" in state and "compressor" not in state):  # saved without a compressor
            self.begin_anew(groups)
            return
        for key, here in self._identity(compressor, groups).items():
            if state.get(key, []) != here:
                raise ValueError(
                    f"rank {groups.rank}: the state of communication is of {key} {state.get(key)!r}, and here it is "
                    f"{here!r}: each rank loads its own, with the same compressor and as many ranks on each node. "
                    "Without it training goes on, less what had not been sent yet"
                )
        devices = {spec.name: spec.device for spec in specs}
        parameters = state.get("parameters", {})  # torch.distributed.checkpoint leaves out what is empty
        unknown = sorted(set(parameters) - set(devices))
        if unknown:
            raise ValueError(
                f"rank {groups.rank}: the state of communication has parameter {unknown[0]!r}, which the module does "
                "not have: load the state of the same module"
            )
        self.owners.of_names = dict(state.get("slices", {}))
        groups.taken = int(state["steps"])
        self.clear()
        for name, entries in parameters.items():
            self.of(name).update({key: _own(value, devices[name]) for key, value in entries.items()})

    def _identity(self, compressor: Compressor, groups: Groups) -> dict[str, Any]:
        nodes = [list(node) for node in _sharing(groups)]
        job = {"rank": groups.rank, "world_size": groups.world_size, "nodes": nodes}
        return {**job, "compressor": repr(compressor)}

    def __getstate__(self) -> dict[str, Any]:
        if self._undecided is None:
            return self.__dict__
        return self.__dict__ | {"_of": self._settled, "_before": {}, "_undecided": None}


@uncompiled_hook
def _note_gradients(begun: set[int], optimizer: Optimizer, *_: object) -> None:
    """A hook before a step, which notes parameters with gradients. Megatron's wrapper leaves ``.grad`` None."""
    if not is_trial_step():
        own = parameters_of(optimizer)
        begun.update(id(one) for one in own if one.grad is not None or hasattr(one, "main_grad"))


@uncompiled_hook
def _note_step(updated: set[int], begun: set[int], optimizer: Optimizer, *_: object) -> None:
    """A hook after a step, which notes updated parameters, so none without a gradient, as if the user has cleared it.

    A fused optimizer with ``found_inf`` skips its step.
    """
    if not (getattr(optimizer, "found_inf", None) or is_trial_step()):
        _note_gradients(begun, optimizer)  # those that the step's closure has computed
        updated.update(begun.intersection(map(id, parameters_of(optimizer))))


def _remove(hooks: Iterable[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def parameters_of(optimizer: Optimizer) -> Sequence[Tensor]:
    """The parameters that ``optimizer`` updates; the groups of a DistributedOptimizer have master weights instead."""
    parameters: Sequence[Tensor] | None = getattr(optimizer, "model_parameters", None)
    return [one for group in optimizer.param_groups for one in group["params"]] if parameters is None else parameters


def _sharing(groups: Groups) -> tuple[tuple[int, ...], ...]:
    """The ranks of each node, if there are several nodes and ranks share memory on one; else none."""
    return groups.nodes if any(len(node) > 1 for node in groups.nodes) else ()


def _averaging(groups: Groups) -> int:
    """How many gradients a compressor averages: one of each rank, or of each node if the ranks of it share memory."""
    return len(_sharing(groups)) or groups.world_size


def fitting_state(saved: Mapping[str, Any], here: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``saved``, a ``comm_state_dict()`` of this rank, for the compressor and nodes of ``here``, another one.

    If these differ, it has no state of a compressor, and a ``WarmUp`` begins anew: that of another one means nothing to
    this one, and on other nodes other ranks would have that state now.
    """
    if not saved:  # Megatron's wrapper has none without a compressor
        return saved
    is_same = all(saved.get(key) == here.get(key) for key in ("compressor", "nodes"))
    if "compressor" not in saved or is_same:
        return saved
    if saved["rank"] == 0:
        logger.warning(
            "this was saved with %s, which is not the compressor here, or the ranks were on other nodes, or shared "
            "memory in another way: what the compressor had not sent then is not loaded",
            saved["compressor"],
        )
    if not here:
        return here
    of_compressor = ("compressor", "nodes", "slices", "parameters", "steps")
    kept = {key: value for key, value in saved.items() if key not in of_compressor}
    if "compressor" not in here:
        return kept
    own = {key: here[key] for key in ("compressor", "nodes", "slices")}
    return {**kept, **own, "parameters": {}, "steps": 0}  # it has kept nothing, and a ``WarmUp`` warms up


def has_no_engine(wrapper: Any) -> bool:
    """Whether a wrapper has sent nothing yet, as a copy in an ``AveragedModel``; its state would make the engine."""
    return getattr(wrapper, "_reducer", wrapper) is None


def forget_unsent(wrappers: Iterable[Any]) -> None:
    """Let the compressors of ``wrappers`` begin anew: what they have not sent is of another training."""
    for wrapper in wrappers:
        if not hasattr(wrapper, "_hooks"):  # Megatron's
            wrapper.load_comm_state_dict({})
        elif not has_no_engine(wrapper):
            wrapper._hooks.comm_state.begin_anew(wrapper._reducer.groups)


def hierarchy_of(group: ProcessGroup) -> SharedMemoryGroup | None:
    """The shared memory of ``group``, if its ranks share some on several nodes; else None. The same on all ranks."""
    cpu = torch.device("cpu")
    if cpu.type not in device_types(group):
        return None
    hierarchy: SharedMemoryGroup | None = getattr(backend_for(group, cpu), "hierarchy", None)
    return hierarchy


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _own(value: Any, device: torch.device) -> Any:
    return value.detach().to(device, copy=True) if isinstance(value, Tensor) else value


class SliceOwners:
    """Assigns each parameter to a slice; the owner of a slice on each node compresses it for its node.

    The assignment is the same on all ranks, as long as they see the same modules in the same order. A parameter stays
    in its slice when other parameters change, since its state is there. It is not cut: for PowerSGD a part of a matrix
    would be another matrix, with more to send. The work is balanced over the module, not over each bucket.
    """

    def __init__(self) -> None:
        self.of_names: dict[str, int] = {}
        self._numels: dict[str, int] = {}

    def add(self, specs: Sequence[ParameterSpec], slices: int) -> None:
        """Assign each new parameter to the one of ``slices`` slices with the fewest elements."""
        loads = [0] * slices
        for name, index in self.of_names.items():
            if index < slices:
                loads[index] += self._numels.get(name, 0)
        small = _SMALL * sum(spec.numel for spec in specs) / max(1, len(specs))
        before = 0
        for spec in specs:
            known = self.of_names.get(spec.name)
            if known is None or known >= slices:
                known = before if spec.numel < small else loads.index(min(loads))
                self.of_names[spec.name] = known
                loads[known] += spec.numel
            self._numels[spec.name] = spec.numel
            before = known

    def of(self, name: str) -> int:
        """The slice of a parameter."""
        return self.of_names.get(name, 0)
