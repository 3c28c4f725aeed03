"""Whether this torch still behaves as the library needs it, in what torch does not promise."""

from __future__ import annotations

from ppe_ddp.backends import group_internals_check
from ppe_ddp.engine import torch_internals_check

__all__ = ["changes_of_torch", "text_of_changes"]


def changes_of_torch() -> tuple[str, ...]:
    """The changes, a line each that begins with the name of the function that relies on it; takes seconds."""
    return (*torch_internals_check.check(), *group_internals_check.check())


def text_of_changes(changes: tuple[str, ...]) -> str:
    """``changes`` for people: on the first line that all is well, or how many there are; then each."""
    if not changes:
        return "as expected"
    first = f"{len(changes)} changed, so that ppe_ddp may train wrongly; report it, and use another torch:"
    return "\n".join([first, *changes])
