"""Matches the keys of a checkpoint with those of every rank's module: sources, missing and unexpected keys. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ppe_ddp.errors import CheckpointError

if TYPE_CHECKING:
    from ppe_ddp.sharding.checkpoint_entries import ExpectedEntry, SourceEntry

# Wrappers put these into names; a checkpoint made without the wrapper, or with another one, lacks them.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


@dataclass(frozen=True)
class Match:
    """The keys of a checkpoint, matched with the module's.

    Attributes:
        sources: For each key of the module that is loaded, the key of the checkpoint it is loaded from. Of keys that
            are one tensor, each has the source of the last that the checkpoint has, which is what would stay there if
            they were loaded one after another.
        missing: Keys of the module that nothing is loaded into.
        unexpected: Keys of the checkpoint that no rank has a place for.
    """

    sources: dict[str, str]
    missing: list[str]
    unexpected: list[str]


def match(found: Sequence[SourceEntry], expectations: Sequence[Sequence[ExpectedEntry]]) -> Match:
    """Match the keys of a checkpoint with those of the modules of all ranks.

    Args:
        found: What the checkpoint has.
        expectations: What each rank's module has. Ranks may have different parts of a model.
    """
    ours: dict[str, None] = {}
    ties: dict[str, list[str]] = {}
    # Most ranks share one list: each is looked at once.
    for expected in {id(entries): entries for entries in expectations}.values():
        ours.update(dict.fromkeys(entry.key for entry in expected))
        for entry in expected:
            tied = ties.setdefault(entry.tie, [])
            if entry.key not in tied:
                tied.append(entry.key)
    named = _names([entry.key for entry in found], list(ours))
    direct = {name: key for key, name in named.items()}
    sources = {}
    for tied in ties.values():
        source = next((direct[key] for key in reversed(tied) if key in direct), None)
        if source is not None:
            sources.update(dict.fromkeys(tied, source))
    return Match(
        sources={key: sources[key] for key in ours if key in sources},
        missing=[key for key in ours if key not in sources],
        unexpected=[entry.key for entry in found if entry.key not in named],
    )


def check(
    found: Sequence[SourceEntry],
    expectations: Sequence[Sequence[ExpectedEntry]],
    matched: Match,
    *,
    strict: bool,
    what: str,
) -> None:
    """Check the checkpoint against the expectations, and raise where it does not fit.

    Args:
        found: What the checkpoint has.
        expectations: What each rank's module has.
        matched: What ``match`` made of them.
        strict: Whether all keys must match. Shapes must, in any case.
        what: What is loaded: the name of a module's class.

    Raises:
        CheckpointError: With the words of ``torch.nn.Module.load_state_dict``.
    """
    problems = []
    if strict and matched.missing:
        problems.append(f"Missing key(s) in state_dict: {_quoted(matched.missing)}.")
    if strict and matched.unexpected:
        problems.append(f"Unexpected key(s) in state_dict: {_quoted(matched.unexpected)}.")
    by_key = {entry.key: entry for entry in found}
    for rank, expected in enumerate(expectations):
        if any(expected is earlier for earlier in expectations[:rank]):
            continue
        for entry in expected:
            source = by_key.get(matched.sources.get(entry.key, ""))
            if source is not None and (problem := _misfit(source, entry)):
                problems.append(problem if rank == 0 else f"on rank {rank}: {problem}")
    if problems:
        raise CheckpointError("\n\t".join([f"Error(s) in loading state_dict for {what}:", *problems]))


def _misfit(source: SourceEntry, entry: ExpectedEntry) -> str:
    if entry.shape is None:
        return ""
    if source.shape is None:
        return f"expected a tensor for {entry.key}, and the checkpoint has a {source.kind}."
    if source.shape != entry.shape:
        return (
            f"size mismatch for {entry.key}: copying a param with shape torch.Size({list(source.shape)}) from "
            f"checkpoint, the shape in current model is torch.Size({list(entry.shape)})."
        )
    return ""


def _quoted(keys: Sequence[str]) -> str:
    return ", ".join(f'"{key}"' for key in keys)


def _names(theirs: Sequence[str], ours: Sequence[str]) -> dict[str, str]:
    """For each key of the checkpoint, the module's name of it, where it has one."""
    own = set(ours)
    named = {key: key for key in theirs if key in own}
    taken = set(named.values())
    bare: dict[str, list[str]] = {}
    for key in ours:
        if key not in taken:
            bare.setdefault(_bare(key), []).append(key)
    for key in theirs:
        alike = bare.get(_bare(key), [])
        if key not in named and len(alike) == 1:
            named[key] = alike.pop()
    return named


def _bare(key: str) -> str:
    """A key without the names of wrappers: torch.compile's anywhere, and DistributedDataParallel's in front."""
    parts = [part for part in key.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:] if parts[0] == "module" and len(parts) > 1 else parts)
