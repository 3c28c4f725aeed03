"""Patches accelerate to load checkpoints by ``load_state_dict`` of this package, within a ``with`` block."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_state_dict

from ppe_ddp.errors import CheckpointError
from ppe_ddp.sharding.checkpoint_reader import DeviceMap, load_state_dict
from ppe_ddp.sharding.dist_module import DistModule
from ppe_ddp.sharding.load_group import LoadGroup

if TYPE_CHECKING:
    import os
    from types import ModuleType

_PACKAGES = ("accelerate", "transformers")


@contextmanager
def patch_accelerate() -> Iterator[None]:
    """Let accelerate load checkpoints by :func:`load_state_dict`, and give each rank its shards of what rank 0 reads.

    Inside the block ``accelerate.load_checkpoint_in_model(model, folder)``, called on every rank, reads each file
    on rank 0 alone and loads it as ``DistModule(model).load_state_dict`` does; the model may be a DistModule, or have
    DTensors, or be on the meta device. It goes for whatever else calls accelerate's ``load_state_dict``
    under that name, in transformers too. With a ``device_map`` accelerate puts tensors into the model itself: then only
    rank 0 gets any.

    Raises:
        ImportError: accelerate is not installed.
        CheckpointError: From what is called inside, as from ``DistModule.load_state_dict``. A file that cannot be
            read is an error on every rank.
    """
    try:
        from accelerate.utils import modeling
    except ImportError:
        raise ImportError("patch_accelerate needs accelerate: pip install 'ppe_ddp[checkpoints]'") from None
    theirs = modeling.load_state_dict
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in _PACKAGES and getattr(module, "__dict__", {}).get("load_state_dict") is theirs:
                stack.enter_context(_replaced(module, "load_state_dict", _load_state_dict))
        original = torch_state_dict.set_model_state_dict
        stack.enter_context(_replaced(torch_state_dict, "set_model_state_dict", _setter(original)))
        yield


@contextmanager
def _replaced(module: ModuleType, name: str, function: Any) -> Iterator[None]:
    """Have ``module.name`` be ``function`` inside the block."""
    original = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, original)


class _Unreadable(dict[str, Any]):
    """Stands for a file that rank 0 could not read, until all ranks are there to be told."""

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


def _setter(original: Any) -> Any:
    """What stands for torch's ``set_model_state_dict``, by DistModule where it gets full tensors."""

    def set_model_state_dict(model: nn.Module, model_state_dict: dict[str, Any], *, options: Any = None) -> Any:
        if options is None or not options.full_state_dict:
            return original(model, model_state_dict, options=options)
        module = model if isinstance(model, DistModule) else DistModule(model)
        entries = module.state_dict().values()
        on_meta = any(isinstance(entry, Tensor) and entry.is_meta for entry in entries)
        return module.load_state_dict(model_state_dict, strict=options.strict, assign=on_meta)

    return set_model_state_dict
