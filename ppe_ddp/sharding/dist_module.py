"""DistModule: loads rank 0's checkpoint into the shards of all ranks. patch_accelerate: lets accelerate do the same."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict as torch_state_dict

from ppe_ddp.errors import CheckpointError
from ppe_ddp.sharding.checkpoint_reader import Checkpoint, DeviceMap, load_state_dict
from ppe_ddp.sharding.distribution import Load, LoadOptions
from ppe_ddp.sharding.load_group import LoadGroup
from ppe_ddp.torch_internals import IncompatibleKeys

_PATCHED_PACKAGES = ("accelerate", "transformers")


class DistModule(nn.Module):
    """Wraps a module, whose ``load_state_dict`` then gives each rank its shards of rank 0's tensors.

    Parameters and buffers may be DTensors (FSDP2's ``fully_shard``, tensor parallelism), plain tensors that every
    rank has whole, or a mix. All attributes are those of the wrapped module, to read and to set::

        with torch.device("meta"):
            model = Net()
        fully_shard(model)
        DistModule(model).load_state_dict(torch.load(file) if rank == 0 else {}, assign=True)

    Args:
        module: The module. It is not copied; loading changes it.
        process_group: The ranks that load together; its rank 0 has the checkpoint. None for the default group. If only
            some ranks load, as in a smaller mesh, pass theirs: ``mesh.get_group()``.
        dtype: The dtypes of the loaded parameters: those of the ``"module"`` or of the ``"checkpoint"``. None for what
            torch does: the checkpoint's with ``assign=True``, else the module's.
        piece_nbytes: The memory in bytes that a rank may use beyond what it loads.
        device: The device of tensors that the module has on the meta device; by default that of its DTensors.
        progress: Show a progress bar on rank 0. None: on a terminal, in loads of over two seconds.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: ProcessGroup | None = None,
        dtype: Literal["module", "checkpoint"] | None = None,
        piece_nbytes: int = 64 << 20,
        device: torch.device | str | None = None,
        progress: bool | None = None,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"DistModule wraps a torch.nn.Module, not a {type(module).__name__}")
        options = LoadOptions(process_group, dtype, piece_nbytes, device, progress)
        # Without nn.Module.__init__(), which would make parameters, hooks and submodules of its own.
        self.__dict__.update(_wrapped=module, _options=options)

    def __setstate__(self, state: dict[str, Any]) -> None:  # nn.Module's would clear hooks of the wrapped module
        self.__dict__.update(state)

    def __getattr__(self, name: str) -> Any:
        if name in ("_wrapped", "_options"):  # while this is unpickled, there is no wrapped module yet
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._wrapped, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapped(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's ``forward``."""
        return self._wrapped.forward(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The state_dict of the wrapped module: this rank's shards, not communicated."""
        result: dict[str, Any] = self._wrapped.state_dict(*args, **kwargs)
        return result

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> IncompatibleKeys:
        """Load rank 0's state_dict into the modules of all ranks, which must call this together.

        Each rank receives only its shards. Entries that are not tensors are sent if ``torch.load(weights_only=True)``
        would read them, so nothing that is sent can run code. Buffers that are not persistent are in no checkpoint and
        do not change, also on the meta device. Keys are compared before the module's ``load_state_dict`` pre-hooks and
        conversions of older versions are called, which so cannot rename or add any.

        Args:
            state_dict: Full tensors, on rank 0 of the process group; ignored on other ranks. A mapping that reads a
                tensor on each access saves memory.
            strict: Raise if keys are missing or unexpected. Shapes must match in any case.
            assign: Replace the module's tensors, which may be on the meta device, by the loaded ones. Rank 0 does not
                copy tensors that it needs whole. If False, overwrite the module's tensors in place.

        Returns:
            The missing and the unexpected keys, the same on every rank. A key that is tied to a loaded one is not
            missing.

        Raises:
            CheckpointError: On every rank, with the same text: keys (if ``strict``) or shapes do not match, or a rank
                failed. If one failed midway, some parameters may have been overwritten.
            CommunicationError: The process group failed.
        """
        return self._load(lambda: state_dict, strict, assign, lends=True)

    def load_checkpoint(
        self, path: str | os.PathLike[str], strict: bool = True, assign: bool = False
    ) -> IncompatibleKeys:
        """Load files that rank 0 reads, piece by piece; all ranks must call this together.

        ``path`` is what :class:`Checkpoint` takes: a safetensors or torch file, an index of several, or a folder. Only
        rank 0 reads it, and copies the tensors. Arguments, result and errors are those of :meth:`load_state_dict`; a
        file that cannot be read is an error on every rank.
        """
        return self._load(lambda: Checkpoint(path), strict, assign, lends=False)

    def _load(
        self, checkpoint_of: Callable[[], Mapping[str, Any]], strict: bool, assign: bool, *, lends: bool
    ) -> IncompatibleKeys:
        if self._options.dtype == "checkpoint" and not assign:
            raise ValueError("dtype='checkpoint' needs assign=True: without it the module keeps its tensors")
        module = self._wrapped
        what = type(module).__name__
        options = replace(self._options, assign=assign, strict=strict, what=what, lends=lends)
        load = Load(options)
        keys = load.run(checkpoint_of, lambda: module.state_dict(keep_vars=True))

        def take() -> None:
            # The keys of all ranks have been checked.
            module.load_state_dict(load.state_dict, strict=False, assign=assign)

        load.load_group.from_each(take)
        return keys


@contextmanager
def patch_accelerate() -> Iterator[None]:
    """Let accelerate read checkpoints on rank 0 alone, and give each rank its shards.

    Inside the block ``accelerate.load_checkpoint_in_model(model, folder)``, called on every rank, reads each file on
    rank 0 and loads it as ``DistModule(model).load_state_dict`` does. So does all else in accelerate and transformers
    that calls accelerate's ``load_state_dict``. With a ``device_map`` accelerate puts tensors into the model itself,
    and only rank 0 gets any.

    Raises:
        ImportError: accelerate is not installed.
        CheckpointError: Inside the block, as from ``DistModule.load_state_dict``; on every rank if a file cannot be
            read.
    """
    try:
        from accelerate.utils import modeling
    except ImportError:
        raise ImportError("patch_accelerate needs accelerate: pip install 'ppe_ddp[checkpoints]'") from None
    theirs = modeling.load_state_dict
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if (
                name.partition(".")[0] in _PATCHED_PACKAGES
                and getattr(module, "__dict__", {}).get("load_state_dict") is theirs
            ):
                stack.callback(setattr, module, "load_state_dict", theirs)
                setattr(module, "load_state_dict", _load_state_dict)  # noqa: B010  # a module has no such attribute
        original = torch_state_dict.set_model_state_dict
        stack.callback(setattr, torch_state_dict, "set_model_state_dict", original)
        torch_state_dict.set_model_state_dict = partial(_set_model_state_dict, original)
        yield


class _Unreadable(dict[str, Any]):
    """A file that rank 0 could not read: raises the error once all ranks load it together, so that all are told."""

    def __init__(self, error: CheckpointError) -> None:
        self._error = error

    def _raise(self, *_: object) -> NoReturn:
        raise self._error

    items = keys = values = get = pop = __iter__ = __len__ = __getitem__ = __contains__ = _raise


def _load_state_dict(checkpoint_file: str | os.PathLike[str], device_map: DeviceMap = None) -> dict[str, Any]:
    try:
        return load_state_dict(checkpoint_file, device_map)
    except CheckpointError as error:
        if LoadGroup().size == 1:
            raise
        return _Unreadable(error)


def _set_model_state_dict(
    original: Any, model: nn.Module, model_state_dict: dict[str, Any], *, options: Any = None
) -> Any:
    """A stand-in for torch's ``set_model_state_dict`` that loads full tensors through DistModule."""
    if options is None or not options.full_state_dict:
        return original(model, model_state_dict, options=options)
    module = model if isinstance(model, DistModule) else DistModule(model)
    entries = module.state_dict().values()
    on_meta = any(isinstance(entry, Tensor) and entry.is_meta for entry in entries)
    return module.load_state_dict(model_state_dict, strict=options.strict, assign=on_meta)
