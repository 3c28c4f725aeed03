"""Runs trials: whether what torch does not promise still behaves as this library needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def problems_of(trials: Iterable[tuple[Callable[..., Any], Callable[[], bool]]]) -> list[str]:
    """Run each trial: a function that relies on torch, and whether torch behaves as it needs it.

    Returns:
        What does not, a line each that begins with the name of the function; a trial that raises counts too.
    """
    problems = []
    for function, trial in trials:
        try:
            if not trial():
                problems.append(f"{function.__name__}: torch {torch.__version__} behaves in another way than expected")
        except Exception as error:
            problems.append(f"{function.__name__}: torch {torch.__version__}: {type(error).__name__}: {error}")
    return problems
