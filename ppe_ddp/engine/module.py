"""The parameters and buffers of a module by name, and whether the module has changed since they were listed.

The check runs before every forward. So it compares identities and addresses, and reads more only if one differs. For a
parameter that is a DTensor, the local tensor is averaged.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from itertools import chain, pairwise
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import ProcessGroup
from torch.nn.parameter import is_lazy

from ppe_ddp.engine.plan import ParameterSpec, is_non_overlapping_and_dense
from ppe_ddp.torch_internals import (
    buffer_table,
    child_table,
    is_ignored,
    parameter_table,
    without_torch_function,
)

CAST_OF = "_ppe_ddp_cast_of"
"""The attribute of a copy in another dtype, which is in the place of a parameter while a module runs: the parameter."""


class ModuleState:
    """The parameters and buffers of a module at one moment, without those whose qualified names are in ``ignored``.

    Buffers that a submodule has got since the listing ``before`` are left out, as ranks may differ in them; not
    ``with_later_buffers``, before the ranks have met.
    Raises a ValueError that names the parameter if one is lazy (has no shape yet).
    """

    def __init__(
        self,
        module: nn.Module,
        ignored: Collection[str] = (),
        before: ModuleState | None = None,
        *,
        with_later_buffers: bool = False,
    ) -> None:
        self._module = module
        self._ignored = frozenset(ignored)
        self._tables: list[dict[str, Any]] = []  # of parameters and submodules, of every submodule
        self.parameters: list[nn.Parameter] = []  # each once
        self.specs: list[ParameterSpec] = []  # of each parameter; of a DTensor, of its local tensor
        self.buffer_slots: list[tuple[str, nn.Module, str]] = []  # the name, the module, its name for the buffer
        self._slots: dict[tuple[int, str], nn.Parameter] = {}  # by the identity of the module, and its name for it
        self._walk({} if before is None else before._slots)
        if before is not None and not with_later_buffers:
            self._leave_out_later(before)
        self.has_buffers = bool(self.buffer_slots)  # also true if all of them are None now
        self._empty_tables = [table for table in self._tables if not table]
        self._tables = [table for table in self._tables if table]
        self._keys = list(chain.from_iterable(self._tables))
        self._entries = list(chain.from_iterable(map(dict.values, self._tables)))
        self._trainable = [parameter.requires_grad for parameter in self.parameters]
        # The parameters that are DTensors, by index.
        self.distributed: dict[int, nn.Parameter] = {i: p for i, p in enumerate(self.parameters) if is_distributed(p)}
        self._addresses = self._addresses_now()
        self._dtypes = [parameter.dtype for parameter in self.parameters]

    def _walk(self, known: Mapping[tuple[int, str], nn.Parameter]) -> None:
        modules = list(self._module.named_modules())
        self._submodules = [owner for _, owner in modules]
        sparse = {
            id(submodule.weight)
            for _, submodule in modules
            if isinstance(submodule, nn.Embedding | nn.EmbeddingBag) and submodule.sparse
        }
        seen: set[int] = set()
        for prefix, owner in modules:
            self._tables += parameter_table(owner), child_table(owner)
            dot = prefix + "." if prefix else ""
            for name, entry in parameter_table(owner).items():
                parameter = getattr(entry, CAST_OF, entry)
                if isinstance(parameter, Tensor) and not isinstance(parameter, nn.Parameter):  # functional_call()
                    parameter = known.get((id(owner), name), parameter)
                if isinstance(parameter, nn.Parameter):
                    self._slots[id(owner), name] = parameter
                if not isinstance(parameter, nn.Parameter) or id(parameter) in seen:
                    continue
                if is_ignored(dot + name, self._ignored):
                    continue
                seen.add(id(parameter))
                self.parameters.append(parameter)
                self.specs.append(_spec(dot + name, parameter, id(parameter) in sparse))
            self.buffer_slots.extend(
                (dot + name, owner, name) for name in buffer_table(owner) if not is_ignored(dot + name, self._ignored)
            )

    def _leave_out_later(self, before: ModuleState) -> None:
        listed = set(map(id, before._submodules))
        there = {(id(owner), key) for _, owner, key in before.buffer_slots}
        slots = self.buffer_slots
        self.buffer_slots = [one for one in slots if id(one[1]) not in listed or (id(one[1]), one[2]) in there]

    @property
    def names(self) -> list[str]:
        """The names of the parameters."""
        return [spec.name for spec in self.specs]

    def by_name(self, among: Container[nn.Parameter] | None = None) -> dict[str, nn.Parameter]:
        """The parameters by name; only those ``among`` others, if given."""
        named = zip(self.names, self.parameters, strict=True)
        return {name: one for name, one in named if among is None or one in among}

    def renamed_from(self, before: Mapping[str, nn.Parameter]) -> dict[str, str | None]:
        """The parameters of which an earlier :meth:`by_name` has other names: the new by the old; None if not here."""
        now = dict(zip(map(id, self.parameters), self.names, strict=True))
        names = {name: now.get(id(one)) for name, one in before.items()}
        return {name: new for name, new in names.items() if new != name}

    def local_parameters(self) -> list[nn.Parameter]:
        """The parameters, with the local tensor in place of each DTensor."""
        return [*map(local_tensor, self.parameters)] if self.distributed else self.parameters  # type: ignore[list-item]

    def copied_parameters(self) -> list[nn.Parameter]:
        """Those of which other ranks of tensor parallelism have copies; none without DTensors over several ranks."""
        if all(parameter.device_mesh.size() == 1 for parameter in self.distributed.values()):  # type: ignore[attr-defined]
            return []
        return [one for i, one in enumerate(self.parameters) if i not in self.distributed or _is_replicated(one)]

    def distributed_tensors(self) -> dict[str, Tensor]:
        """The parameters and buffers that are DTensors, by their names in messages."""
        parameters = {f"parameter {self.names[i]!r}": p for i, p in self.distributed.items()}
        return parameters | {f"buffer {name!r}": b for name, b in self.buffers().items() if is_distributed(b)}

    def buffers(self) -> dict[str, Tensor]:
        """The current buffers by name, each tensor once, without those that are None or on the meta device."""
        found: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, owner, key in self.buffer_slots:
            buffer = buffer_table(owner).get(key)
            if buffer is not None and id(buffer) not in seen and not buffer.is_meta:
                seen.add(id(buffer))
                found[name] = buffer
        return found

    def unwritable(self, *, with_buffers: bool = True) -> list[str]:
        """What keeps the values of another rank from being written into parameters and buffers: a clause for each."""
        parameters = zip((f"parameter {name!r}" for name in self.names), self.parameters, strict=True)
        written = self.buffers() if with_buffers else {}
        buffers = ((f"buffer {name!r}", buffer) for name, buffer in written.items())
        found = ((name, _obstacle(local_tensor(tensor))) for name, tensor in chain(parameters, buffers))
        return [f"{name} {obstacle}" for name, obstacle in found if obstacle]

    def places_of(self, buffer: Tensor) -> list[tuple[nn.Module, str]]:
        """The modules that have ``buffer``, each with the name under which it has it."""
        return [(owner, key) for _, owner, key in self.buffer_slots if buffer_table(owner).get(key) is buffer]

    def has_grown(self) -> bool:
        """Whether parameters or submodules were added or removed, but not all at once in equal numbers: in 10 µs."""
        return sum(map(len, self._tables)) != len(self._entries) or any(self._empty_tables)

    def is_current(self, module: nn.Module) -> bool:
        """Whether ``module`` is the listed one, with the same parameters, unchanged, in the same submodules.

        Plain tensors that ``torch.func.functional_call`` has put in place of parameters do not count as a change.
        """
        entries = list(chain.from_iterable(map(dict.values, self._tables)))
        if module is not self._module or len(entries) != len(self._entries) or any(self._empty_tables):
            return False
        if list(chain.from_iterable(self._tables)) != self._keys:  # a parameter may have got another name (``prune``)
            return False
        if not all(map(is_, entries, self._entries)) and any(map(_is_other, entries, self._entries)):
            return False
        with without_torch_function():  # so that parameters that are being gathered are not waited for
            return self._holds_the_same()

    def _holds_the_same(self) -> bool:
        current = self.parameters
        if [parameter.requires_grad for parameter in current] != self._trainable:
            return False
        if [parameter.dtype for parameter in current] != self._dtypes:
            return False
        addresses = self._addresses_now()
        if addresses != self._addresses:
            if any(addresses[i] != self._addresses[i] for i in self.distributed):
                return False
            for spec, parameter in zip(self.specs, current, strict=True):
                if _spec(spec.name, parameter, spec.sparse) != spec:
                    return False
            self._addresses = addresses
        return True

    def _addresses_now(self) -> list[int]:
        addresses = list(map(torch.Tensor.data_ptr, self.parameters))
        for i, parameter in self.distributed.items():  # a DTensor has no memory of its own
            addresses[i] = local_tensor(parameter).data_ptr()
        return addresses


def _is_other(now: object, then: object) -> bool:
    return now is not then and (now is None or isinstance(now, nn.Parameter | nn.Module))


def _spec(name: str, parameter: nn.Parameter, sparse: bool) -> ParameterSpec:
    if is_lazy(parameter):
        raise ValueError(
            f"parameter {name!r} is lazy and has no shape yet: run one forward with the plain module before wrapping it"
        )
    local = local_tensor(parameter)
    shape = tuple(local.shape)
    dense = local.is_contiguous() or is_non_overlapping_and_dense(local)
    stride = tuple(local.stride()) if dense else tuple(torch.empty(shape, device="meta").stride())
    return ParameterSpec(name, shape, stride, local.dtype, local.device, sparse, placements_of(parameter))


def _obstacle(tensor: Tensor) -> str:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
        return f"is {kind}: keep it dense, or name it in _set_params_and_buffers_to_ignore_for_model()"
    if tensor.is_conj() or tensor.is_neg():
        return "is a conjugate that is not computed yet: call .resolve_conj().resolve_neg()"
    if is_expanded(tensor):
        return "has several elements in one place in memory (stride 0): give it its own, as .clone() of .expand() does"
    return ""


def is_expanded(tensor: Tensor) -> bool:
    """Whether several elements of a strided tensor are one place in memory."""
    if tensor.numel() == 0:
        return False
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def is_distributed(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor. It looks at attributes, since importing the class takes a while."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def local_tensor(tensor: Any) -> Tensor:
    """The local tensor of a DTensor; any other tensor itself."""
    if not is_distributed(tensor):
        return tensor  # type: ignore[no-any-return]
    with torch.no_grad():
        local: Any = tensor.to_local()
    wait = getattr(local, "wait", None)  # exists if a collective is still writing the tensor
    return local if wait is None else wait()  # type: ignore[no-any-return]


def placements_of(tensor: Any) -> str:
    """The placements of a DTensor and the shape of its mesh, as text; empty for any other tensor."""
    if not is_distributed(tensor):
        return ""
    return f"{tensor.placements} on {tuple(tensor.device_mesh.shape)} of {tuple(tensor.shape)}"


def _is_replicated(parameter: Any) -> bool:
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return any(size > 1 and placement.is_replicate() for size, placement in sizes)


def check_meshes(module: nn.Module, distributed: Mapping[str, Any], group: ProcessGroup, *, drops_steps: bool) -> None:
    """Raise ValueError for a DTensor that is distributed over ranks of ``group``, or belongs to FSDP2.

    ``distributed`` has the DTensors of ``module`` by their names in messages. With ``drops_steps`` the ranks of
    ``group`` drop a step in which one has NaN. Then a DTensor over several ranks is refused as well, since its other
    ranks would take that step.
    """
    if not distributed:
        return
    rank, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
    from torch.distributed.fsdp import FSDPModule

    if any(isinstance(module, FSDPModule) for module in module.modules()):
        raise ValueError(
            f"rank {rank}: the module was sharded by fully_shard(), which keeps gradients from autograd's hooks and "
            "averages them itself: use it without this wrapper, over replicas too (mesh=mesh['replicate', 'shard'])"
        )
    for name, tensor in distributed.items():
        mesh = sorted(tensor.device_mesh.mesh.flatten().tolist())
        if drops_steps and len(mesh) > 1:
            raise ValueError(
                f"rank {rank}: check_for_nan_in_grad drops a step on ranks {ranks}, which average with one another; "
                f"{name} is a DTensor over ranks {mesh}, of which the others would take it: check for NaN yourself, "
                "over all ranks"
            )
        both = [other for other in mesh if other in ranks and other != rank]
        if both:
            raise ValueError(
                f"rank {rank}: {name} is a DTensor over ranks {mesh}, and would be averaged with ranks {both}, which "
                "have other parts of it: pass the data-parallel part of the mesh, as device_mesh=mesh['dp']"
            )


def check_gradient_dtypes(module_state: ModuleState) -> None:
    """Raise ValueError for a parameter whose gradients may have another dtype (``grad_dtype``), and be rounded."""
    for name, parameter in zip(module_state.names, module_state.parameters, strict=True):
        if parameter.requires_grad and getattr(parameter, "grad_dtype", parameter.dtype) is not parameter.dtype:
            raise ValueError(
                f"rank {dist.get_rank()}: parameter {name!r} of {parameter.dtype} has grad_dtype={parameter.grad_dtype}"
                ", and gradients are averaged in the parameter's own dtype: do not set grad_dtype"
            )


def refuse_distributed(distributed: Iterable[str], who: str, remedy: str) -> None:
    """Raise a ValueError that names the first of these DTensors, if there is one: ``who`` cannot take it."""
    for name in distributed:
        raise ValueError(f"{name} is a DTensor, which {who} does not take: {remedy}")


def check_apart(module_state: ModuleState) -> None:
    """Raise ValueError if trainable parameters share memory, of which ranks would own and update other parts each."""
    places = [
        (str(one.device), start, start + one.nbytes, name)
        for name, one in zip(module_state.names, module_state.parameters, strict=True)
        if one.requires_grad and is_non_overlapping_and_dense(one) and one.numel() and (start := one.data_ptr())
    ]
    for (device, _, stop, name), (other, start, _, second) in pairwise(sorted(places)):
        if device == other and start < stop:
            raise ValueError(
                f"parameters {name!r} and {second!r} share memory, so that shards of one would overwrite those of the "
                "other: make them one parameter (tied weights), or give each its own memory (.clone())"
            )
