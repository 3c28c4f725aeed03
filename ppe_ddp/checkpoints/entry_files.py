"""Writes and reads the entries of a checkpoint by torch.distributed.checkpoint, without executing what is in a file.

torch's own reader unpickles the file ``.metadata`` and every entry that is no tensor, which runs whatever such a file
names. Here only the classes that torch writes there are made, and entries read by ``torch.load(weights_only=True)``.
The files are torch's: any tool for its checkpoints reads them.

Imported when the first checkpoint is saved or loaded, as torch.distributed.checkpoint takes a while to import.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ppe_ddp.errors import CheckpointError
from ppe_ddp.sharding.checkpoint_reader import dump_plain, load_plain

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.futures import Future

    from ppe_ddp.sharding.load_group import LoadGroup

_T = TypeVar("_T")

METADATA = ".metadata"
_OF_METADATA = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
}


def write_entries(entries: dict[str, Any], folder: Path, load_group: LoadGroup) -> None:
    """Write what each rank has of the entries into files of its own in ``folder``; all ranks call this together.

    Nothing says that the files are on the disk afterwards.

    Raises:
        CheckpointError: On every rank: one has failed.
        CommunicationError: The ranks lost each other.
    """
    planner = _PlainSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    # Files are synchronized where their checksums are made: torch does so before it has written what it still buffers.
    writer = _EntryWriter(folder, sync_files=False)
    _together(
        load_group,
        lambda alone: save(
            entries, storage_writer=writer, planner=planner, process_group=load_group.group, no_dist=alone
        ),
    )


def read_entries(targets: dict[str, Any], folder: Path, load_group: LoadGroup) -> None:
    """Read entries into ``targets``: tensors into those that are there; all ranks call this together.

    Raises:
        CheckpointError: On every rank: one has failed. Some tensors may have been read by then.
        CommunicationError: The ranks lost each other.
    """
    planner = _PlainLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader = _EntryReader(folder)
    _together(
        load_group,
        lambda alone: load(
            targets, storage_reader=reader, planner=planner, process_group=load_group.group, no_dist=alone
        ),
    )


def metadata_of(folder: Path) -> Metadata:
    """What is in the files of ``folder``.

    Raises:
        pickle.UnpicklingError: More than torch writes there; nothing was executed.
        ValueError: An entry is said to be in a file outside of the folder.
    """
    content = (folder / METADATA).read_bytes()
    metadata: Metadata = _MetadataUnpickler(io.BytesIO(content)).load()
    for info in (metadata.storage_data or {}).values():
        if Path(info.relative_path).name != info.relative_path:
            raise ValueError(f"{folder / METADATA} names {info.relative_path!r}, which is not a file beside it")
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Makes the classes that torch writes into ``.metadata``, dtypes and sizes, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _OF_METADATA.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if module.split(".")[0] == "pathlib" and name.endswith("Path"):
            return PurePosixPath  # where it was saved, which nobody looks at
        raise pickle.UnpicklingError(f"{METADATA} wants {module}.{name}, which torch does not write there: refused")


class _PlainSavePlanner(DefaultSavePlanner):
    """Refuses what could not be loaded without executing it."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """The bytes of an entry that is no tensor."""
        if write_item.type != WriteItemType.BYTE_IO:
            return super().transform_object(write_item, object)
        try:
            return io.BytesIO(dump_plain(object))
        except TypeError as error:
            raise TypeError(f"{write_item.index.fqn!r} cannot be saved: {error}") from error


class _PlainLoadPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load an entry that is no tensor."""
        self.state_dict[read_item.dest_index.fqn] = load_plain(value.getvalue())


class _EntryWriter(FileSystemWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write; what goes wrong can be told to the other ranks, which torch sends a pickle of the error."""
        return _tellable(lambda: super(_EntryWriter, self).write_data(plan, planner))


class _EntryReader(FileSystemReader):
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """What :func:`metadata_of` has read."""
        return _tellable(lambda: metadata_of(Path(self.path)))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read; errors as in :class:`_EntryWriter`."""
        return _tellable(lambda: super(_EntryReader, self).read_data(plan, planner))


def _tellable(call: Callable[[], _T]) -> _T:
    """Call, and raise nothing but CheckpointError: an error that cannot be pickled would leave the others waiting."""
    try:
        return call()
    except Exception as error:
        raise CheckpointError(f"{type(error).__name__}: {error}") from None


def _together(load_group: LoadGroup, call: Callable[[bool], object]) -> None:
    """Call torch, told whether this process is alone, and raise errors of any rank as this library's."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is ")  # disabled: there is one process
            load_group.communicate(lambda: call(load_group.group is None))
    except CheckpointException as error:
        texts = [f"rank {rank}: {_text(failure)}" for rank, (failure, _) in error.failures.items()]
        raise CheckpointError("; ".join(texts)) from None


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
