"""Base class of a Work written in Python: waiting under torch's other names."""

from __future__ import annotations

from typing import Any

from torch import distributed as dist

__all__ = ["PythonWork"]


class PythonWork(dist.Work):
    """A Work of which a subclass defines ``wait()`` and the questions about its state.

    Args:
        result: What ``result()`` gives: the output tensors, or None.
    """

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result

    def synchronize(self) -> None:
        """Wait, as ``wait()`` does."""
        self.wait()

    def block_current_stream(self) -> None:
        """Wait, as ``wait()`` does."""
        self.wait()

    def result(self) -> Any:
        """The output tensors, to be read after ``wait()``."""
        return self._result
