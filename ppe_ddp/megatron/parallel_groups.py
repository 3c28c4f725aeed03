"""The process groups of one job: those that average gradients, and those that split one model.

data        rank 0 ── rank 2        the wrapper averages here; NaN on one rank raises on both
tensor      rank 0 ── rank 1        rank 0 reports it here, and rank 1 leaves its wait at once

This file also finds the parameters that ranks of one model share: weights of two pipeline stages, and copies that a
norm counts once.
"""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ppe_ddp.backends.group_internals import default_group, flattened_group, kept_with, new_group_named
from ppe_ddp.backends.json_collectives import all_gather_json
from ppe_ddp.contracts import Waitable
from ppe_ddp.engine.completion import Completion
from ppe_ddp.engine.failures import CLIP, FINALIZE, UPDATE, relayed
from ppe_ddp.engine.groups import Groups, renewing_all
from ppe_ddp.engine.negotiation import await_all
from ppe_ddp.engine.peer_processes import Activity
from ppe_ddp.engine.replicas import ranks_of
from ppe_ddp.engine.zero.shards import Copies, FailedUpdate, Shard
from ppe_ddp.errors import CommunicationError, DisagreementError, PeerAbortedError, PpeDdpError, UnusableError

_DATA = ("dp", "cp", "ep")
SPLITS = ("tensor", "pipeline", "embedding", "position_embedding")
logger = logging.getLogger("ppe_ddp")


@dataclass(frozen=True)
class ParallelGroups:
    """The groups that this rank belongs to; None for a parallelism that is not used.

    Attributes:
        data: Ranks that hold the same dense parameters and get different data (context parallelism included).
            None: all ranks.
        tensor: Ranks that split the tensors of one layer, and the sequence under sequence parallelism.
        pipeline: The stages of one pipeline, in order.
        embedding: The first and the last stage of one pipeline, which share the word embedding; None on ranks in
            between.
        position_embedding: The stages of one pipeline that share position embeddings; None on others.
        expert: Ranks that hold the same experts: the data-parallel group of parameters with ``allreduce = False``.
        expert_tensor: Ranks that split the tensors of one expert. None: those of ``tensor``.
    """

    data: ProcessGroup | None = None
    tensor: ProcessGroup | None = None
    pipeline: ProcessGroup | None = None
    embedding: ProcessGroup | None = None
    position_embedding: ProcessGroup | None = None
    expert: ProcessGroup | None = None
    expert_tensor: ProcessGroup | None = None

    @property
    def split_model(self) -> bool:
        """Whether ranks of these groups have different parts of the model."""
        parents = [getattr(self, name) for name in (*SPLITS, "expert_tensor")]
        return self.expert is not None or any(one is not None and dist.get_world_size(one) > 1 for one in parents)

    def check(self, default_group: ProcessGroup) -> None:
        """Raise ValueError if a rank that averages gradients with this one has another part of the model."""
        given = {name: one for name, one in vars(self).items() if one is not None}
        ranks = {name: ranks_of(one) for name, one in {"data": default_group, **given}.items()}
        own, of_experts = dist.get_rank(), "tensor" if self.expert_tensor is None else "expert_tensor"
        for one, other in (("data", "tensor"), ("data", "pipeline"), ("expert", of_experts), ("expert", "pipeline")):
            if both := sorted(ranks.get(one, set()) & ranks.get(other, set()) - {own}):
                raise ValueError(
                    f"rank {own}: ranks {both} are in groups.{one} (data=None: all ranks), which averages gradients, "
                    f"and in groups.{other}, whose ranks have different parts of the model: give groups.{one} of ranks "
                    "that have the same part (see from_mesh()), and expert_tensor for experts that are not split"
                )

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> ParallelGroups:
        """The groups of a mesh whose dimensions are named ``dp``, ``cp``, ``ep``, ``tp`` and ``pp``.

        Every dimension is optional. Dense parameters are averaged over ``dp``, ``cp`` and ``ep``, experts over
        ``dp`` and ``cp``. It may have to make groups, so all ranks of the mesh must call this together.

        Args:
            mesh: A mesh over all ranks that train the model.

        Raises:
            ValueError: A dimension has another name, or none.
        """
        names = mesh.mesh_dim_names or ()
        unknown = [name for name in names if name not in (*_DATA, "tp", "pp")]
        if unknown or not names:
            raise ValueError(
                f"the dimensions of the mesh must be named, as some of {(*_DATA, 'tp', 'pp')}, not {names or 'unnamed'}"
            )
        return cls(
            data=_over(mesh, *_DATA) or _group_of(dist.get_rank()),
            tensor=_over(mesh, "tp"),
            pipeline=_over(mesh, "pp"),
            embedding=_ends_of_pipelines(mesh),
            expert=(_over(mesh, "dp", "cp") or _group_of(dist.get_rank())) if "ep" in names else None,
        )


def _over(mesh: DeviceMesh, *dimensions: str) -> ProcessGroup | None:
    """This rank's group over those of ``dimensions`` that the mesh has; None if it has none of them."""
    names = tuple(name for name in dimensions if name in (mesh.mesh_dim_names or ()))
    if not names:
        return None
    if len(names) == 1:
        return mesh.get_group(names[0])
    names = tuple(name for name in mesh.mesh_dim_names or () if name in names)  # torch slices a mesh in its own order
    return flattened_group(mesh if names == mesh.mesh_dim_names else mesh[names])


class _Made(Counter[tuple[int, ...]]):
    """How many groups of which ranks :func:`_group_of` has made."""


def _group_of(*ranks: int) -> ProcessGroup:
    """Make a group of these ranks, which call this together: a rank without others, or two ends of a pipeline."""
    # new_group() would change the names of later groups on these ranks alone. And of a mesh that is a slice of another
    # one, ranks of other slices would make groups of the same name, and get the messages of these.
    made = kept_with(default_group(), _Made)
    name = f"ppe_ddp/mesh/{'-'.join(map(str, ranks))}/{made[ranks]}"
    group = new_group_named(name, [*ranks], None, None, None)
    made[ranks] += 1  # behind it: a rank that has raised tries the same name again
    return group


def _ends_of_pipelines(mesh: DeviceMesh) -> ProcessGroup | None:
    """Make a group of the first and the last stage of each pipeline; returns this rank's, or None in between."""
    names = mesh.mesh_dim_names or ()
    if "pp" not in names or mesh.size(names.index("pp")) < 2:
        return None
    stages = dist.get_process_group_ranks(mesh.get_group("pp"))
    ends = stages[0], stages[-1]
    return _group_of(*ends) if dist.get_rank() in ends else None


# ---------------------------------------------------------------------- parameters that ranks of one model share


def word_embedding(module: nn.Module, config: object) -> Tensor | None:
    """The weight that the embedding of the first pipeline stage and the output layer of the last stage share.

    None for a model without ``shared_embedding_or_output_weight()``. Also None if
    ``share_embeddings_and_output_weights`` is False, unless ``config.mtp_num_layers`` is positive: layers that predict
    further tokens have the embedding on the last stage.
    """
    model = _owner(module, "shared_embedding_or_output_weight")
    if model is None:
        return None
    is_shared = getattr(model, "share_embeddings_and_output_weights", True)
    if not (is_shared or getattr(config, "mtp_num_layers", 0)):
        return None
    weight: Callable[[], Tensor | None] = model.shared_embedding_or_output_weight  # type: ignore[assignment]
    return weight()


def position_embedding(module: nn.Module, _config: object) -> Tensor | None:
    """The weight of the module ``position_embeddings``; None for a model without it."""
    model = _owner(module, "position_embeddings")
    embeddings: Any = None if model is None else model.position_embeddings
    return getattr(embeddings, "weight", None)


def needs_own_bucket(module: nn.Module, config: object) -> set[int]:
    """The ids of parameters that other pipeline stages have as well and must shard in the same way."""
    shared = (word_embedding(module, config), position_embedding(module, config))
    found = {id(weight) for weight in shared if weight is not None}
    marks = ("shared_embedding", "pipeline_parallel")
    return found | {id(p) for p in module.parameters() if any(getattr(p, mark, False) for mark in marks)}


def _owner(module: nn.Module, attribute: str) -> nn.Module | None:
    inner: Any = module
    while isinstance(inner, nn.Module):
        if hasattr(inner, attribute):
            return inner
        inner = getattr(inner, "module", None)
    return None


class CopiesOfParameters(Copies):
    """Tells which parameters of a module are copies of another rank's, so that a norm counts each element once."""

    def __init__(
        self, module: nn.Module, config: object, own: Groups, groups: ParallelGroups, parallel: ModelParallel
    ) -> None:
        splits = [one for one in (groups.tensor, groups.pipeline) if one is not None and dist.get_world_size(one) > 1]
        super().__init__(own, own.parent, *splits)
        self._parallel = parallel
        self.are_of_parts = groups.split_model
        self._tensor_rank = _rank(groups.tensor)
        self._expert_rank = self._tensor_rank if groups.expert_tensor is None else _rank(groups.expert_tensor)
        self._stage = _rank(groups.pipeline)
        self._copied: set[int] = set()
        if _rank(groups.embedding) > 0:
            self._copied.add(id(word_embedding(module, config)))
        if _rank(groups.position_embedding) > 0:
            self._copied.add(id(position_embedding(module, config)))
        self._model_groups = groups
        self._of_stages = needs_own_bucket(module, config)
        alone = {id(position_embedding(module, config))} if groups.position_embedding is None else set()
        self._has_copies_of_stages = not self._of_stages <= alone
        mark = "tensor_model_parallel"
        marks = [getattr(parameter, mark) for parameter in module.parameters() if hasattr(parameter, mark)]
        self.are_splits_marked = bool(marks) or groups.tensor not in splits
        if any(marks) and not groups.split_model and own.rank == 0 and own.world_size < dist.get_world_size():
            logger.warning(
                "parameters are marked tensor_model_parallel, and the wrapper of ranks %s knows of no other group. If "
                "the model is split over ranks, norms for clipping, inf and finalize_model_grads() leave out its other "
                "parts: pass groups=ParallelGroups(data=..., tensor=..., pipeline=...) instead of data_parallel_group",
                list(ranks_of(own.parent)),
            )

    @contextmanager
    def agreeing(self) -> Generator[None, None, None]:
        """See :meth:`Copies.agreeing`; over data-, tensor- and pipeline-parallel ranks."""
        with self._parallel.step(CLIP) if self._parallel.tells_all else super().agreeing():
            yield

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        if not self._parallel.tells_all:
            super().all_reduce(tensor, op)
            return
        self._parallel.renew()
        for name in ("data", "tensor", "pipeline"):
            groups = self._parallel.group(name)
            if groups is not None:
                self._parallel.all_reduce(groups, tensor, op)

    def note_optimizer(self, names: Collection[str], others: Collection[str]) -> None:
        kept, own = self._parallel.optimizer_of, set(names)
        replaced = {kept[name] for name in own & kept.keys()}  # they cannot step any more, but for ``others``
        go_on = {name: number for name, number in kept.items() if number not in replaced or name in {*others} - own}
        self._parallel.optimizer_of = {**go_on, **dict.fromkeys(own, 1 + max(kept.values(), default=0))}

    def check_scaling(self) -> None:
        fewest, most = self._parallel.optimizers_of_ranks
        if fewest != most:
            raise UnusableError(
                f"rank {dist.get_rank()}: stages have from {fewest} to {most} distributed optimizers. "
                "A GradScaler looks for inf in one after another, on all ranks, and would wait for those "
                "that a stage lacks. Give each stage as many, or train without a GradScaler (in bfloat16)"
            )

    def has_inf(self) -> bool:
        return self._parallel.has_inf()

    def leave(self, error: BaseException) -> None:
        self._parallel.leave(error)

    def note_failed_update(self, failure: FailedUpdate) -> None:
        if self.is_split:  # else the next step gathers all parameters
            self._parallel.failed_update = failure
            of_stages = self._has_copies_of_stages and self._parallel.group("pipeline") is not None
            self._parallel.is_behind = of_stages or self._parallel.group("tensor") is not None

    def note_load(self, *, is_of_all: bool) -> None:
        self._parallel.is_behind = False
        if is_of_all:
            self._parallel.failed_update = FailedUpdate(is_told=True)

    def check_updates(self) -> None:
        if self._parallel.is_behind:
            raise UnusableError(
                f"rank {dist.get_rank()}: {UPDATE} has failed here, and other ranks of the model may have taken that "
                "step: load a checkpoint on all of them before you save another one"
            )

    def counts(self, shard: Shard, names: set[str]) -> bool:
        """Whether the parameter of ``shard`` counts in the norm on this rank.

        Parameters marked ``tensor_model_parallel`` are split over the tensor-parallel ranks, and count on all of them.
        Other parameters are copies on these ranks, and count on the first one. Parameters that pipeline stages share
        count on the first stage; ``pipeline_parallel`` ones of one name count in its first chunk. Parameters marked
        ``shared`` never count.
        """
        name, parameter = shard.name, shard.parameter
        if getattr(parameter, "shared", False) or id(parameter) in self._copied:
            return False
        if getattr(parameter, "pipeline_parallel", False) and self._parallel.group("pipeline") is not None:
            if self._stage > 0 or name in names:
                return False
            names.add(name)
        rank = self._tensor_rank if getattr(parameter, "allreduce", True) else self._expert_rank
        return rank == 0 or bool(getattr(parameter, "tensor_model_parallel", False))

    def part_of(self, shard: Shard) -> str:
        parameter, groups = shard.parameter, self._model_groups
        is_expert = not getattr(parameter, "allreduce", True)
        tensor = groups.expert_tensor if is_expert and groups.expert_tensor is not None else groups.tensor
        split = [(tensor, "tensor-parallel ranks")] if getattr(parameter, "tensor_model_parallel", False) else []
        if id(parameter) not in self._of_stages:
            split.append((groups.pipeline, "pipeline stages"))
        places = [(_rank(one), dist.get_world_size(one), what) for one, what in split if one is not None]
        if is_expert and groups.expert is not None:
            same = ranks_of(groups.expert)
            places.append((min(same), dist.get_world_size(), f"ranks, of which {len(same)} have the same experts"))
        return "; ".join(f"{place} of {count} {what}" for place, count, what in places if count > 1)


def _rank(group: ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


# ---------------------------------------------------------------------- collectives of one model


class _Kept:
    """The duplicates of one process group, and counts, which all wrappers over it use."""

    groups: Groups | None = None
    clippings = 0  # since the backward
    is_finalized = False  # finalize_model_grads() counts steps, and clipping belongs to the step before it

    @classmethod
    def of(cls, parent: ProcessGroup) -> _Kept:
        """The object of ``parent``; at the first call all its ranks make a duplicate together."""
        kept = kept_with(parent, cls)
        kept.groups = kept.groups or Groups.duplicate(parent)
        return kept


class ModelParallel:
    """Collectives over the groups that split one model; all their ranks must make theirs together.

    Groups of one rank are left out. If the model is split, the data-parallel group is included. The groups, one after
    another, then reach all ranks of the job, so that all hear of a rank that drops the step.

    Attributes:
        failed_update: An optimizer's step that has failed for this wrapper; :meth:`agree` tells all ranks.
        is_behind: Whether this rank has loaded nothing since then, and others may have copies of its parameters.
        optimizer_of: By the name of each parameter of this chunk, which distributed optimizer updates it, as a number
            that counts them.
        optimizers_of_ranks: The fewest and the most distributed optimizers that a rank has, over all its chunks; set by
            :meth:`agree`.
        has_inf: Tells whether an average of some chunk of this rank is not finite, if there are several chunks in a
            pipeline; looks once after each finalization, which sets it.
    """

    def __init__(self, groups: ParallelGroups, default_group: ProcessGroup) -> None:
        parents = {name: getattr(groups, name) for name in SPLITS}
        found = {name: one for name, one in parents.items() if one is not None and dist.get_world_size(one) > 1}
        data = groups.data or default_group
        if (found or groups.expert is not None) and dist.get_world_size(data) > 1:
            found["data"] = data
        self._kept = {name: _Kept.of(parent) for name, parent in found.items()}
        self._groups = {name: kept.groups for name, kept in self._kept.items() if kept.groups is not None}
        self._distinct = [*{id(groups): groups for groups in self._groups.values()}.values()]
        self._waits_in: Groups | None = None
        self._phase = FINALIZE
        self._has_come = False  # this call has come to connect again
        self._agreed: DisagreementError | None = None  # an error that all ranks raise
        self._sums = False  # some rank sums gradients in this step
        self.failed_update = FailedUpdate(is_told=True)
        self.is_behind = False
        self.optimizer_of: dict[str, int] = {}
        self.optimizers_of_ranks = 0, 0
        self.has_inf: Callable[[], bool] = bool

    @property
    def tells_all(self) -> bool:
        """Whether an error in a step is raised on all ranks of the job, because the model is split."""
        return bool(self._distinct)

    def group(self, name: str) -> Groups | None:
        """The duplicates of a group, by its name in :class:`ParallelGroups`; None if this rank is alone in it."""
        return self._groups.get(name)

    @contextmanager
    def step(self, phase: str = FINALIZE) -> Generator[None, None, None]:
        """A context for the collectives of one step; it reports an error to the ranks of all groups."""
        self._phase, self._has_come = phase, False
        for kept in self._kept.values():
            kept.is_finalized |= phase == FINALIZE
        is_next = phase == FINALIZE or not any(kept.is_finalized for kept in self._kept.values())
        if is_next:
            self._begin_step([groups for groups in self._distinct if not groups.is_closed])
        for kept in set(self._kept.values()):
            kept.clippings = 0 if is_next else kept.clippings + 1
        self._note(Activity.MASK if is_next else Activity.GATHER)
        try:
            yield
        except BaseException as error:
            instead = self._give_up(error) if error is not self._agreed else None
            if instead is None:
                raise
            raise instead from error
        finally:
            self._waits_in = self._agreed = None
            # So that a rank that fails next waits until the other ranks have completed this step.
            self._note(Activity.DONE if is_next else Activity.GATHERED)

    def _note(self, activity: Activity) -> None:
        for kept in self._kept.values():
            if kept.groups is not None and not kept.groups.is_closed:
                kept.groups.note(activity, kept.clippings)

    def _begin_step(self, connected: Sequence[Groups]) -> None:
        for groups in connected:
            groups.step += 1

    def communicate(self, groups: Groups, start: Callable[[], Waitable], device: torch.device) -> None:
        """Wait for the collective that ``start`` begins in ``groups``, or until a rank of it reports a failure."""
        self._waits_in = groups
        groups.failures.wait(start(), device)
        self._waits_in = None

    def all_reduce(
        self, groups: Groups, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, *, is_vote: bool = False
    ) -> None:
        group = groups.control if is_vote else groups.buckets
        self.communicate(groups, partial(dist.all_reduce, tensor, op, group=group, async_op=True), tensor.device)

    def agree(
        self,
        described: Mapping[str, Sequence[str]],
        of_chunks: Sequence[ModelParallel],
        *,
        sums: bool,
        is_undecided: bool,
    ) -> bool:
        """Wait until all ranks have come here, and check that the ranks of each group are about to send the same.

        If a failure has closed the groups, it first connects again; the wrappers have done that before, in any order.
        ``described`` has by group a line for each gradient that is sent. ``sums`` tells whether anything else is
        summed. ``of_chunks`` has the ModelParallel of each chunk of the model. Returns whether any rank of the model
        ``is_undecided``.

        Raises:
            DisagreementError: What is sent differs; or, on all ranks, an optimizer's step has failed on one of them.
        """
        self.renew()
        failed = -1 if all(one.failed_update.is_told for one in of_chunks) else dist.get_rank()
        self._sums = sums or any(described.values())
        fewest = most = sum(len({*one.optimizer_of.values()}) for one in of_chunks)
        for groups in self._distinct:
            names = [name for name, one in self._groups.items() if one is groups]
            lines = [f"{name}: {line}" for name in names for line in described.get(name, ())]
            code = zlib.crc32("\n".join(lines).encode())
            extremes = torch.tensor([code, -code, failed, self._sums, -fewest, most, is_undecided], device="cpu")
            self._vote(groups, extremes)
            if extremes[0] != -extremes[1]:
                self._waits_in = groups
                tables = all_gather_json(lines, groups.control)
                await_all(groups)
                raise _disagreement(groups, tables)
            groups.note(Activity.BUCKET)  # all ranks have come
            failed = int(extremes[2])
            self._sums = bool(extremes[3])
            fewest, most, is_undecided = -int(extremes[4]), int(extremes[5]), bool(extremes[6])
        for one in of_chunks:  # all ranks have been told
            one.failed_update.is_told = True
            one.optimizers_of_ranks = fewest, most
        if failed >= 0:
            self._agreed = DisagreementError(
                f"rank {dist.get_rank()}: {UPDATE} has failed on rank {failed} since the last step, which others of "
                "its model have taken: what they have copies of (norms, embeddings) may differ. Load a checkpoint on "
                "all of them, and go on"
            )
            raise self._agreed
        return is_undecided

    def confirm(self) -> None:
        """Wait until all ranks have come here, if any has summed gradients, so that all take the step or none does."""
        for groups in self._distinct if self._sums else ():
            self.all_reduce(groups, torch.zeros(1, dtype=torch.uint8, device="cpu"), is_vote=True)

    def _vote(self, groups: Groups, extremes: Tensor) -> None:
        """Find the maxima over the ranks. If a rank had failed after the last step, renew connections and repeat."""
        mine = extremes.clone()
        try:
            self.all_reduce(groups, extremes, dist.ReduceOp.MAX, is_vote=True)
        except Exception as error:
            instead = groups.fail(error, self._phase) or error
            if not isinstance(instead, PeerAbortedError) or instead.step is None or instead.step >= groups.step:
                raise instead from error
            logger.warning("%s (This rank's gradients of that call were complete.)", instead)
            groups.step -= 1  # the step begins again
            self._begin_again_where_told(instead)
            while any(one.is_closed for one in self._distinct):
                self.renew()
                self._begin_again_where_told(instead)  # the rank that failed reports to one group after another
            extremes.copy_(mine)
            self.all_reduce(groups, extremes, dist.ReduceOp.MAX, is_vote=True)

    def _begin_again_where_told(self, error: PeerAbortedError) -> None:
        """Close the groups in which a rank has reported by now that it had failed after the last step."""
        for groups in self._distinct:
            if not groups.is_closed and any(report.step < groups.step for report in groups.failures.of_others()):
                groups.fail(error, self._phase)
                groups.step -= 1

    def renew(self) -> None:
        """Make new connections in place of those that a failure has closed."""
        self._has_come = True
        for groups in self._distinct:
            groups.check()
        closed = [groups for groups in self._distinct if groups.is_closed]
        if closed:
            try:
                Completion(renewing_all(closed), closed[0]).finish()
            finally:
                self._begin_step([groups for groups in closed if not groups.is_closed])

    def leave(self, error: BaseException) -> None:
        """Report ``error`` to ranks that may wait in a later call, such as the check for inf of another optimizer."""
        for groups in self._distinct:
            groups.fail(relayed(error), UPDATE)

    def _give_up(self, error: BaseException) -> BaseException | None:
        """Report to the ranks of all groups that this step has failed; returns the error to raise instead, or None."""
        instead: PpeDdpError | None = None
        try:
            if self._waits_in is not None:
                instead = self._waits_in.fail(error, self._phase)
            elif isinstance(error, Exception) and not isinstance(error, CommunicationError):
                for groups in self._distinct:
                    groups.failures.check_lost()  # of which this step's failure may be a consequence
        except CommunicationError as lost:
            instead = lost
        finally:  # all are told, even if an interrupt ends a wait
            aborted = relayed(instead or error)
            with ExitStack() as stack:
                for groups in reversed(self._distinct):
                    if groups.is_closed and not self._has_come:
                        stack.callback(groups.skip_step, aborted)
                    elif groups is not self._waits_in:
                        stack.callback(groups.fail, aborted, self._phase)
        return instead


def _disagreement(groups: Groups, tables: Sequence[Sequence[str]]) -> DisagreementError:
    first = tables[0]
    rank, table = next((rank, table) for rank, table in enumerate(tables) if table != first)
    missing, added = (
        [line for line in one if line not in other][:3] for one, other in ((first, table), (table, first))
    )
    return DisagreementError(
        f"rank {groups.rank} of {groups.world_size}: two ranks are about to sum different gradients, or these in "
        f"another order: rank 0 has {missing}, and rank {rank} has {added}. Parameters that the ranks share need the "
        "same marks, shapes and dtypes on all of them, and with a distributed optimizer the same place in their "
        "bucket. Either all ranks give num_tokens, or none"
    )
