"""Saves and loads the state of a distributed optimizer, as a checkpoint for any number of ranks.

    state           layer.weight    exp_avg       1-D DTensor of the flattened parameter, a shard on each rank
                                    step          the same on every rank
    exists          layer.weight    1             0: never updated, so the entries in ``state`` are not loaded
    master          layer.weight    1-D DTensor   if the parameter itself is less precise
    param_groups    hyper-parameters, with names in place of parameters
    layout          layer.weight    the order of its elements, and of a split model which part it is

Every parameter has all entries before its first step, since torch.distributed.checkpoint loads into existing entries.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ppe_ddp.backends.json_collectives import all_gather_json
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.plan import fingerprint
from ppe_ddp.engine.zero.shard_collectives import all_gather
from ppe_ddp.engine.zero.shards import ShardedModel, bounds_of, chunk_of
from ppe_ddp.optim.master_weights import MasterWeight

logger = logging.getLogger("ppe_ddp")
_SCALARS = ("step", "eta", "mu", "mu_product")  # state of torch's optimizers that is not sharded, even for a scalar
_PROBE = 3  # elements of a trial parameter, and so of each state entry that is cut like its parameter


def described(optimizer: Optimizer, masters: Sequence[MasterWeight], dtype: torch.dtype) -> list[str]:
    """What must be the same on all ranks, as each trains its own shards by it: class, groups and hyper-parameters."""
    names = {id(master.weight): master.shard.name for master in masters}
    lines = [f"{type(optimizer).__name__} with master weights of {dtype}"]
    for number, group in enumerate(optimizer.param_groups):
        lines.extend(f"group {number} with {line}" for line in hyper_parameters(group))
        lines.extend(f"{names[id(weight)]!r} in group {number}" for weight in group["params"])
    return lines


def hyper_parameters(group: Mapping[str, Any]) -> list[str]:
    """Those of one group of an optimizer that are numbers, one line each."""
    options = {key: _plain(value) for key, value in sorted(group.items())}
    return [f"{key}={value}" for key, value in options.items() if isinstance(value, bool | int | float | tuple)]


def _plain(value: Any) -> Any:
    """The numbers of tensors, whose text would name this rank's device."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.tolist() if isinstance(value, Tensor) else value


def shard_of(state: Mapping[str, Any], master: MasterWeight) -> dict[str, Any]:
    """This rank's part of a parameter's state, of steps before (Adagrad always has some), in the master's precision."""
    cut: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == master.shard.parameter.shape and key not in _SCALARS:
            value = master.shard.cut(value).to(_dtype_of(value, master), copy=True)
        cut[key] = value
    return cut


def collect(optimizer: Optimizer, masters: Sequence[MasterWeight], model: ShardedModel) -> dict[str, Any]:
    """The checkpoint of an optimizer that updates ``masters`` of ``model``. See the top of this file."""
    masters = in_groups(masters, optimizer)
    meshes: dict[str, DeviceMesh] = {}
    by_weight = {id(master.weight): master for master in masters}
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for options in optimizer.param_groups:
        members = [by_weight[id(weight)] for weight in options["params"]]
        # Copies: if the learning rate is a tensor, torch gives the same tensor to all groups.
        own = {key: copy.deepcopy(value) for key, value in options.items() if key != "params"}
        groups.append({"params": [member.shard.name for member in members], **own})
        templates: dict[Any, dict[str, Any]] = {}
        for member in members:
            held = optimizer.state.get(member.weight)
            if not held:
                kind = member.weight.dtype, member.weight.device
                if kind not in templates:
                    templates[kind] = _template(optimizer, options, member.weight)
                template = templates[kind]
                cut = {key for key, value in template.items() if isinstance(value, torch.Tensor) and value.dim()}
                numel = member.shard.numel
                held = {k: v.new_zeros(numel) if k in cut else copy.deepcopy(v) for k, v in template.items()}
            state[member.shard.name] = {key: _saved(value, member, model, meshes) for key, value in held.items()}
    return {
        "state": state,
        "exists": {m.shard.name: torch.tensor(int(bool(optimizer.state.get(m.weight))), device="cpu") for m in masters},
        "master": {m.shard.name: _saved(_master(m), m, model, meshes) for m in masters if not m.is_alias},
        "param_groups": groups,
        "layout": {m.shard.name: _described(m, model) for m in masters},
    }


def restore(
    optimizer: Optimizer, masters: Sequence[MasterWeight], model: ShardedModel, checkpoint: Mapping[str, Any]
) -> list[MasterWeight]:
    """Give ``optimizer`` the state in ``checkpoint``, on all ranks or on none. Returns the masters with new weights.

    It communicates in the groups of ``model``, where a rank that fails tells the others.
    """
    masters = in_groups(masters, optimizer)
    found: _CheckpointPart | None = None
    error: Exception | None = None
    try:  # no collective in this block: if this rank fails, the other ranks would wait in it
        found = _CheckpointPart(optimizer, masters, model, checkpoint)
    except Exception as failure:
        error = failure
    _raise_together(error, found, model.groups)
    assert found is not None
    found.complete(model.groups)
    for options, saved in zip(optimizer.param_groups, checkpoint["param_groups"], strict=True):
        options.update({key: copy.deepcopy(value) for key, value in saved.items() if key != "params"})
    for master in masters:
        optimizer.state.pop(master.weight, None)
        if master.index in found.state:
            optimizer.state[master.weight] = found.state[master.index]
        if master.index in found.weights:
            master.weight.copy_(found.weights[master.index])
    return [master for master in masters if master.index in found.weights]


def in_groups(masters: Sequence[MasterWeight], optimizer: Optimizer) -> list[MasterWeight]:
    """Those that the optimizer still updates: a user may have removed a group from ``param_groups``."""
    updated = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    return [master for master in masters if id(master.weight) in updated]


def _raise_together(error: Exception | None, found: _CheckpointPart | None, groups: Groups) -> None:
    """Raise the errors of all ranks on every rank, or an error if what they have ``found`` differs. Collective."""
    world_size, group = groups.world_size, groups.control
    own = f"{'' if isinstance(error, ValueError) else type(error).__name__ + ': '}{error}"
    lines, last = ([], 0.0) if found is None else (found.lines, found.last_step)
    told = all_gather_json([None if error is None else own, fingerprint(lines).hex(), last], group)
    texts = [text for text, *_ in told]
    if any(texts):
        ranks: dict[str, list[int]] = {}
        for rank, text in enumerate(texts):
            if text is not None:
                ranks.setdefault(text, []).append(rank)
        errors = "; ".join(
            f"rank {', '.join(map(str, which))} of {world_size}: {text}" for text, which in ranks.items()
        )
        raise ValueError(f"the checkpoint does not fit, and nothing was loaded on any rank: {errors}") from error
    advice = "save and load by torch.distributed.checkpoint, or load the files of one step"
    if len({digest for _, digest, _ in told}) > 1:
        tables = all_gather_json(lines, group)
        rank, others = next((rank, table) for rank, table in enumerate(tables) if table != tables[0])
        which = sorted(set(others) ^ set(tables[0]))[:3] or "their order"
        raise ValueError(
            f"rank 0 and rank {rank} have different checkpoints, and nothing was loaded on any: they differ in "
            f"{which}; {advice}"
        )
    last_steps = [step for *_, step in told]
    if len({*last_steps}) > 1 and groups.rank == 0:
        logger.warning(
            "the ranks load shards of different steps, by rank: %s. Unless some ranks' parameters had fewer steps, %s",
            *(last_steps, advice),
        )


class _CheckpointPart:
    """This rank's part of a checkpoint; the constructor does all checks."""

    def __init__(
        self, optimizer: Optimizer, masters: Sequence[MasterWeight], model: ShardedModel, checkpoint: Mapping[str, Any]
    ) -> None:
        _check_groups(optimizer, masters, checkpoint)
        groups = enumerate(checkpoint["param_groups"])
        self.lines = [f"group {number} with {line}" for number, group in groups for line in hyper_parameters(group)]
        """What must be the same on all ranks: hyper-parameters, and which entries are fetched."""
        self.last_step = 0.0
        self._rank, self._world_size = dist.get_rank(model.group), dist.get_world_size(model.group)
        self._even = model.has_even_shards
        self.state: dict[int, dict[str, Any]] = {}  # this rank's state, by the index of the master weight
        self.weights: dict[int, Tensor] = {}  # new values, by the index of the master weight
        self._others: list[tuple[dict[Any, Any], Any, Any, MasterWeight]] = []
        moving = (
            options for options in checkpoint["param_groups"] if options.get("fused") or options.get("capturable")
        )
        self._moves_steps = {name for options in moving for name in options["params"]}
        for master in masters:
            name = master.shard.name
            expected, (saved, _, part) = _layout(master), checkpoint["layout"][name].partition(_IN_PART)
            if saved.endswith(_WITH_MASTER) and name not in checkpoint["master"]:
                raise ValueError(
                    f"the master weight of {name!r} was saved and not read, as this optimizer has none, so that "
                    "torch.distributed.checkpoint does not ask for it: give the model the dtype with which it was "
                    f"saved. (To go on with rounded weights, remove {_WITH_MASTER!r} in state['layout'].)"
                )
            if saved.removesuffix(_WITH_MASTER) != expected:
                raise ValueError(
                    f"the state of {name!r} is of elements in the order {saved}, and the parameter has {expected}: "
                    "give it the shape and memory format with which it was saved"
                )
            _check_part(name, part, _part(master, model))
            if int(checkpoint["exists"][name]):
                self.state[master.index] = {}
                for key, value in checkpoint["state"][name].items():
                    self._take(master, self.state[master.index], key, value)
            if not master.is_alias or name in checkpoint["master"]:
                value = checkpoint["master"].get(name, master.weight.detach())
                self._take(master, self.weights, master.index, value)

    def _take(self, master: MasterWeight, table: dict[Any, Any], key: Any, value: Any) -> None:
        table[key] = own = self._own(master, key, value)
        is_sharded = hasattr(value, "placements")
        if key == "step":  # some ranks' shards may have had fewer updates
            self.last_step = max(self.last_step, float(own))
        if not self._even and is_sharded:  # this rank's shard is not its chunk of the value
            self.lines.append(f"{master.shard.name} {'master weight' if table is self.weights else key}")
            self._others.append((table, key, value, master))

    def _own(self, master: MasterWeight, key: Any, value: Any) -> Any:
        """Copy this rank's part of ``value``; raises if it is another rank's."""
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        if not hasattr(value, "placements"):  # as torch, which counts steps on CPUs, or where the kernels read them
            stays = key == "step" and master.shard.name not in self._moves_steps
            return value.detach().to(value.device if stays else master.weight.device, copy=True)
        ranks = value.device_mesh.size()  # type: ignore[attr-defined]
        own: Tensor = value.to_local()  # type: ignore[attr-defined]
        place = value.device_mesh.get_coordinate()[0]  # type: ignore[attr-defined]  # pickled: of the rank that saved
        start, stop = bounds_of(master.shard.spec.numel, self._rank, self._world_size)
        if ranks != self._world_size or own.numel() != stop - start or place != self._rank:
            raise ValueError(
                f"the state of {master.shard.name!r} was saved by rank {place} of {ranks}: torch.save keeps one rank's "
                "shards, which fit that rank only. Let each rank save and load a file of its own, or save by a "
                "Checkpointer or torch.distributed.checkpoint, whose files any number of ranks can load"
            )
        return own.to(master.weight.device, _dtype_of(own, master), copy=True)

    def complete(self, groups: Groups) -> None:
        """Fetch the parts of this rank that other ranks hold; every rank must call this."""
        for table, key, value, master in self._others:
            whole = _whole(value.to_local().to(master.weight.device), master.shard.spec.numel, groups)
            own = whole[master.shard.start : master.shard.stop]
            table[key] = own.to(_dtype_of(own, master), copy=True)


def _whole(chunk: Tensor, numel: int, groups: Groups) -> Tensor:
    """A tensor of ``numel`` elements, of which each rank has its even ``chunk``. Collective."""
    size = chunk_of(numel, groups.world_size)
    own, whole = chunk.new_zeros(size), chunk.new_empty(size * groups.world_size)
    own[: chunk.numel()] = chunk
    if numel and groups.world_size > 1:
        groups.failures.wait(all_gather(whole, own, groups.buckets), own.device)
    return whole[:numel] if groups.world_size > 1 else chunk


def _saved(value: Any, master: MasterWeight, model: ShardedModel, meshes: dict[str, DeviceMesh]) -> Any:
    """``value``, as a DTensor if it is a shard. Uneven shards become even chunks, which is collective."""
    if not isinstance(value, torch.Tensor) or not value.dim() or value.numel() != master.shard.numel:
        return value
    # The import takes a third of a second.
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Shard as Cut

    own, group, numel, groups = value.detach(), model.group, master.shard.spec.numel, model.groups
    if own.device.type not in meshes:
        meshes[own.device.type] = DeviceMesh.from_group(group, own.device.type)
    if not model.has_even_shards and groups.world_size > 1:
        whole = own.new_zeros(numel)
        whole[master.shard.start : master.shard.stop] = own
        groups.failures.wait(dist.all_reduce(whole, group=groups.buckets, async_op=True), own.device)
        start, stop = bounds_of(numel, groups.rank, groups.world_size)
        own = whole[start:stop].clone()
    mesh, shape = meshes[own.device.type], torch.Size([numel])
    return DTensor.from_local(own, mesh, [Cut(0)], run_check=False, shape=shape, stride=(1,))


def _master(master: MasterWeight) -> Tensor:
    # The master weight itself stays: a user who has swapped in other parameters puts the rounded ones back.
    own, written = master.weight.detach(), master.written()
    return own if written is None or torch.equal(own, written) else written  # a copy would stay as long as the state


def _check_groups(optimizer: Optimizer, masters: Sequence[MasterWeight], checkpoint: Mapping[str, Any]) -> None:
    missing = {"state", "exists", "master", "param_groups", "layout"} - set(checkpoint)
    if missing:
        raise ValueError(
            f"this is no state_dict of a DistributedOptimizer: {', '.join(sorted(missing))} is missing; that of a "
            "plain optimizer is loaded into a plain optimizer before it is wrapped"
        )
    by_weight = {id(master.weight): master.shard.name for master in masters}
    names = [[by_weight[id(weight)] for weight in options["params"]] for options in optimizer.param_groups]
    saved = [list(options["params"]) for options in checkpoint["param_groups"]]
    if saved != names:
        mine, theirs = ({name for part in parts for name in part} for parts in (names, saved))
        which = sorted(mine ^ theirs)[:3] or "the same parameters in other groups"
        raise ValueError(f"the checkpoint is of other parameters or groups: they differ in {which}")


def _check_part(name: str, saved: str, own: str) -> None:
    """Refuse the state of another part of a split model; a model that was split in another way has other shapes."""
    places = {whole: place for place, _, whole in (text.partition(" of ") for text in saved.split("; "))}
    for place, _, whole in (text.partition(" of ") for text in own.split("; ")):
        if places.get(whole, place) != place:
            raise ValueError(
                f"the state of {name!r} is that of number {places[whole]} of {whole}, and this rank is number {place}, "
                "which has another parameter of that name: let each rank save and load a file of its own, or give "
                "torch.distributed.checkpoint a folder for each part of the model, and process_group=groups.data. (If "
                f"its names are unique, and it has only moved, cut off what follows {_IN_PART!r} in state['layout'].)"
            )


def _template(optimizer: Optimizer, options: Mapping[str, Any], weight: Tensor) -> dict[str, Any]:
    """The state that ``optimizer`` gives ``weight`` at its first step, found by a step of a small trial parameter."""
    trial = nn.Parameter(torch.zeros(_PROBE, dtype=weight.dtype, device=weight.device))
    trial.grad = torch.zeros_like(trial)
    twin = copy.copy(optimizer)  # without its step hooks
    twin.state = defaultdict(dict)
    twin.param_groups = [{**options, "params": [trial]}]
    with torch.no_grad():
        type(optimizer).step(twin)  # the method of the class, which a scheduler may have replaced in the object
    return dict(twin.state[trial])


def _dtype_of(state: Tensor, master: MasterWeight) -> torch.dtype:
    """The dtype of state that is cut like ``master``: that of the weight, as in torch's ``load_state_dict()``."""
    return master.weight.dtype if state.is_floating_point() else state.dtype


_IN_PART = " in part "
_WITH_MASTER = " with a master weight"


def _layout(master: MasterWeight) -> str:
    return f"{master.shard.spec.shape} strides {master.shard.spec.stride}"


def _described(master: MasterWeight, model: ShardedModel) -> str:
    is_wide = master.weight.dtype != master.shard.parameter.dtype
    layout = _layout(master) + (_WITH_MASTER if is_wide else "")
    return _IN_PART.join(filter(None, (layout, _part(master, model))))


def _part(master: MasterWeight, model: ShardedModel) -> str:
    return model.copies.part_of(master.shard)
