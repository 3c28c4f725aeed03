"""A progress bar on rank 0's terminal during a long load."""

from __future__ import annotations

import sys
from time import monotonic
from typing import Any

_SECONDS = 2.0  # shorter loads show nothing


class ProgressBar:
    """Counts bytes. Shown on a terminal, once the load has taken some seconds; needs tqdm, and is silent without.

    Args:
        total: Bytes in all.
        shown: None for a terminal only; True also where stderr is a file; False for never.
    """

    def __init__(self, total: int, shown: bool | None) -> None:
        self._total = total
        self._wanted = sys.stderr.isatty() if shown is None else shown
        self._start = monotonic()
        self._done = 0
        self._bar: Any = None

    def advance(self, nbytes: int) -> None:
        """Count ``nbytes`` more."""
        self._done += nbytes
        if not self._wanted:
            return
        if self._bar is None and monotonic() - self._start >= _SECONDS:
            self._open()
        elif self._bar is not None:
            self._bar.update(nbytes)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.close()

    def _open(self) -> None:
        try:
            from tqdm import tqdm
        except ImportError:
            self._wanted = False
            return
        self._bar = tqdm(
            total=self._total,
            initial=self._done,
            desc="loading",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            leave=False,
            file=sys.stderr,
        )
        self._bar.start_t -= monotonic() - self._start  # the rate is over all that was done
