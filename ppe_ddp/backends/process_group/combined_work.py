"""The Work of several calls that are waited for as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ppe_ddp.backends.process_group.python_work import PythonWork

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta


class CombinedWork(PythonWork):
    """Several calls, waited for as one."""

    def __init__(self, works: Sequence[PythonWork]) -> None:
        super().__init__([work.result() for work in works])
        self._works = works

    def is_completed(self) -> bool:
        """Whether all of them are; asks each, as a message moves only while somebody asks for it."""
        return all([work.is_completed() for work in self._works])

    def is_success(self) -> bool:
        """Whether all of them are complete without an error."""
        return all([work.is_success() for work in self._works])

    def exception(self) -> BaseException | None:
        """The first error that there is."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for one after another, for each no longer than ``timeout``; raises what they raise."""
        for work in self._works:
            work.wait(*([] if timeout is None else [timeout]))
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of ``result()``."""
        futures = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures).then(self._outputs_of)

    def _outputs_of(self, collected: torch.futures.Future[Any]) -> Any:
        for future in collected.value():
            future.value()  # raises
        return self.outputs
