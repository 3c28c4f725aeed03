"""The folder of a job's checkpoints: what is in it is whole, whenever the machine stops. Files only, no ranks.

    000007-step-400/             complete: it got this name by a rename, after everything in it was on the disk
        __0_0.distcp ...         the files
        manifest.json            their sizes and checksums, and a checksum of itself
    .000008-step-500.1f3a.partial/   being written, or left by a job that was killed

The first number counts the checkpoints of the folder. It tells which is the newest: steps do not, after training went
back to an earlier one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger("ppe_ddp")

MANIFEST = "manifest.json"
_COMPLETE = re.compile(r"(\d+)-step-(\d+)")
_PARTIAL = re.compile(r"\.\d+-step-\d+\.[0-9a-f]+\.partial")
_PIECE = 1 << 20

Digest = Sequence[object]
"""The size of a file in bytes and its SHA-256 in hexadecimal, as JSON has them: a list of two."""


class CheckpointName(NamedTuple):
    """The name of a complete checkpoint, and what it says: its place in the folder, from 1, and the training's step."""

    text: str
    number: int
    step: int


class CheckpointFolder:
    """The checkpoints in a folder, which belongs to one job at a time.

    Args:
        path: The folder; made with the first checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def complete(self) -> list[CheckpointName]:
        """The complete checkpoints, the newest last."""
        found = []
        for name in os.listdir(self.path) if self.path.is_dir() else ():
            match = _COMPLETE.fullmatch(name)
            if match:
                found.append(CheckpointName(name, int(match[1]), int(match[2])))
        return sorted(found, key=lambda name: name.number)

    def begin(self, step: int) -> str:
        """Make an empty partial checkpoint, and remove those that were left behind. Returns its name."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._remove(name for name in os.listdir(self.path) if _PARTIAL.fullmatch(name))
        number = max((name.number for name in self.complete()), default=0) + 1
        partial = f".{number:06}-step-{step}.{secrets.token_hex(4)}.partial"
        (self.path / partial).mkdir()
        return partial

    def publish(self, partial: str, files: Mapping[str, Digest]) -> Path:
        """Make a partial checkpoint complete, whose files are on the disk.

        Args:
            partial: What :meth:`begin` has returned.
            files: By name, what :func:`sync` has returned.

        Raises:
            OSError: The disk has failed; nothing is complete then.
            ValueError: The folder has other files.
        """
        folder = self.path / partial
        there = set(os.listdir(folder))
        if there != set(files):
            lacking, more = sorted(set(files) - there)[:3], sorted(there - set(files))[:3]
            raise ValueError(
                f"{folder} lacks {lacking} that ranks have written, and has {more} that none has: all ranks must have "
                "the folder in common"
            )
        content = json.dumps({"files": dict(files)}, sort_keys=True)
        manifest = {"content": content, "sha256": hashlib.sha256(content.encode()).hexdigest()}
        (folder / MANIFEST).write_text(json.dumps(manifest))
        sync(folder / MANIFEST)
        _sync_folder(folder)
        final = self.path / partial[1:].split(".", 1)[0]
        os.rename(folder, final)
        try:
            _sync_folder(self.path)
        except OSError:
            os.rename(final, folder)  # nobody takes for saved what may not be there after a power cut
            raise
        return final

    def discard(self, partial: str) -> None:
        """Remove a checkpoint that will not become complete, as far as that goes."""
        self._remove([partial])

    def prune(self, keep: int, damaged: Collection[str]) -> None:
        """Remove all but the newest ``keep`` complete checkpoints; damaged ones first of all."""
        try:
            names = [name.text for name in self.complete()]
        except OSError as error:
            logger.warning("old checkpoints in %s cannot be removed: %s", self.path, error)
            return
        good = [name for name in names if name not in damaged]
        for name in [*(name for name in names if name in damaged), *good[:-keep]]:
            # Not complete from here on, so that nobody meets half a one.
            aside = f".{name}.{secrets.token_hex(4)}.partial"
            try:
                os.rename(self.path / name, self.path / aside)
            except OSError as error:
                logger.warning("the checkpoint %s cannot be removed: %s", self.path / name, error)
            else:
                self._remove([aside])

    def damage(self, name: str, part: int, parts: int) -> str:
        """What is wrong with a complete checkpoint; empty where nothing is.

        Args:
            name: The name of the checkpoint.
            part: The share of its files to look at, from 0.
            parts: How many shares there are.
        """
        manifest = self.path / name / MANIFEST
        try:
            try:
                files = _files_of(manifest.read_text())
            except (ValueError, TypeError, KeyError) as error:
                return f"{manifest} is damaged: {error}"
            for file, digest in sorted(files.items())[part::parts]:
                if list(_digest(self.path / name / file)) != list(digest):
                    return f"{self.path / name / file} is damaged: it is not what was written"
        except OSError as error:
            return str(error)
        return ""

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            shutil.rmtree(self.path / name, ignore_errors=True)


def sync(file: Path) -> Digest:
    """Wait until a file is on the disk; returns its size and checksum."""
    digest = _digest(file)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return digest


def _files_of(manifest: str) -> dict[str, Digest]:
    parts = json.loads(manifest)
    if hashlib.sha256(parts["content"].encode()).hexdigest() != parts["sha256"]:
        raise ValueError("its checksum is wrong")
    files: dict[str, Digest] = json.loads(parts["content"])["files"]
    return files


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(file: Path) -> Digest:
    digest, nbytes = hashlib.sha256(), 0
    with file.open("rb") as stream:
        while piece := stream.read(_PIECE):
            digest.update(piece)
            nbytes += len(piece)
    return [nbytes, digest.hexdigest()]
