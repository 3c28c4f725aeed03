"""The process groups of one training job, one for each dimension of parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import distributed as dist

from ppe_ddp.backends.group_internals import flattened_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_DATA = ("dp", "cp", "ep")


@dataclass(frozen=True)
class ParallelGroups:
    """The groups that this rank belongs to; None where there is no such parallelism.

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

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> ParallelGroups:
        """The groups of a mesh whose dimensions are named ``dp``, ``cp``, ``ep``, ``tp`` and ``pp``.

        Every dimension is optional. Dense parameters are averaged over ``dp``, ``cp`` and ``ep``, experts over
        ``dp`` and ``cp``. Groups are made where the mesh has none, so all ranks of the mesh must call this together.

        Args:
            mesh: Over all ranks that train the model.

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
            data=_of(mesh, [name for name in _DATA if name in names]) or _alone(),
            tensor=_of(mesh, ["tp"] if "tp" in names else []),
            pipeline=_of(mesh, ["pp"] if "pp" in names else []),
            embedding=_ends_of_pipelines(mesh),
            expert=(_of(mesh, [name for name in ("dp", "cp") if name in names]) or _alone()) if "ep" in names else None,
        )


def _of(mesh: DeviceMesh, names: list[str]) -> ProcessGroup | None:
    """This rank's group over some dimensions of the mesh together."""
    if not names:
        return None
    if len(names) == 1:
        return mesh.get_group(names[0])
    part = mesh if tuple(names) == mesh.mesh_dim_names else mesh[tuple(names)]
    return flattened_group(part)


def _alone() -> ProcessGroup:
    """A group of this rank only, where there is no other to average with."""
    group: ProcessGroup = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return group


def _ends_of_pipelines(mesh: DeviceMesh) -> ProcessGroup | None:
    """A group of the first and the last stage of each pipeline; this rank's, or None in between."""
    names = mesh.mesh_dim_names or ()
    if "pp" not in names or mesh.size(names.index("pp")) < 2:
        return None
    own: ProcessGroup | None = None
    pipelines = mesh.mesh.movedim(names.index("pp"), -1).reshape(-1, mesh.size(names.index("pp")))
    for stages in pipelines.tolist():
        ends = [stages[0], stages[-1]]
        group = dist.new_group(ends)
        if dist.get_rank() in ends:
            own = group
    return own
