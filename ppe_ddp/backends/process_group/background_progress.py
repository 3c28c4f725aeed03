"""Background progress: a thread that advances what is under way where this process calls no backend of ours.

A rank may sit in a blocking call of another library (the user's own collective by gloo, a file that is read) while
others wait for its part in shared memory, before they come to that call. The thread does that part. It naps: whoever
waits in our own loop is quicker, and is left alone. The naps are long as long as this process comes by itself, since
each end of one takes the interpreter from it.
"""

from __future__ import annotations

import atexit
import functools
import threading
import time

from ppe_ddp.backends.process_group.progress_engine import progress_engine

_LONG_NAP_SECONDS = 0.01
_SHORT_NAP_SECONDS = 0.002  # while nobody else advances what is under way
_QUIET_NAPS = 10  # long ones, before it sleeps until it is woken, which costs the main thread more than a nap does


class BackgroundProgress:
    """One for each process."""

    def __init__(self, pid: int) -> None:
        self._progress = progress_engine(pid)
        self._work = threading.Event()
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="ppe_ddp-background", daemon=True)
        self._progress.at_begin = self._wake
        self._thread.start()
        atexit.register(self._end)

    def _wake(self) -> None:
        if not self._work.is_set():
            self._work.set()

    def _run(self) -> None:
        while not self._is_ending:
            self._work.wait()
            quiet, nap = 0, _LONG_NAP_SECONDS
            while quiet < _QUIET_NAPS and not self._is_ending:
                turns = self._progress.turns
                time.sleep(nap)
                is_idle = self._progress.is_idle
                quiet = quiet + 1 if is_idle else 0
                is_left = self._progress.turns == turns and not is_idle
                nap = _SHORT_NAP_SECONDS if is_left else _LONG_NAP_SECONDS
                if is_left:
                    self._progress.progress()
            self._work.clear()
            if not self._progress.is_idle:  # begun before that
                self._work.set()

    def _end(self) -> None:
        """Be out of torch before Python ends: a thread that comes back from it then ends the process."""
        self._is_ending = True
        self._work.set()
        self._thread.join()


@functools.cache
def background_progress(pid: int) -> BackgroundProgress:
    """The one of this process."""
    return BackgroundProgress(pid)
