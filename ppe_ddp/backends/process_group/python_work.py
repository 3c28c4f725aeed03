"""Base class of a Work written in Python: waiting under torch's other names."""

from __future__ import annotations

from typing import Any

from torch import distributed as dist

__all__ = ["PythonWork"]


class PythonWork(dist.Work):
    """A Work of which a subclass defines ``wait()`` and the questions about its state.

    Args:
        outputs: The output tensors, or None.

    Attributes:
        outputs: What ``result()`` gives.
    """

    def __init__(self, outputs: Any = None) -> None:
        super().__init__()
        self.outputs = outputs

    def synchronize(self) -> None:
        """Wait, as ``wait()`` does."""
        self.wait()

    def block_current_stream(self) -> None:
        """Wait, as ``wait()`` does."""
        self.wait()

    def result(self) -> Any:
        """The output tensors, to be read after ``wait()``."""
        return self.outputs
