"""The arrivals of one module's gradients: which a backward will have, that one is there, and on which stream.

Apart from the reducer, which decides what an arrival means for the other ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ppe_ddp.engine.grad_hooks import GradHooks
from ppe_ddp.engine.gradients import GradientStreams
from ppe_ddp.engine.reached_parameters import ReachedParameters
from ppe_ddp.errors import UnusableError

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Collection, Sequence

    from torch import nn


class GradientArrivals:
    """Tells an owner of arrivals, by hooks on the parameters.

    Args:
        parameters: The parameters.
        on_accumulated: Called as ``on_accumulated(owner, index, parameter)``.
        owner: Held weakly.

    Attributes:
        streams: Those that gradients arrive on; None on CPUs.
        stop_recording: Tells of every arrival again.
        take_recorded: Returns what was recorded since the last call.
        remove: Takes the hooks off the parameters.
        accumulates: Tells whether the graph task that runs on this thread accumulates gradients.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], on_accumulated: Callable[..., None], owner: weakref.ref[Any]
    ) -> None:
        hooks = GradHooks(parameters, on_accumulated, owner)
        self.streams = GradientStreams.of(parameters)
        self.stop_recording, self.take_recorded, self.remove = hooks.stop_recording, hooks.take_recorded, hooks.remove
        self._start_recording = hooks.start_recording
        self._reached = ReachedParameters(parameters)
        self.accumulates = self._reached.accumulates
        self._everything = range(len(parameters))

    def expected(self, arrived: int | None) -> list[int]:
        """The parameters whose gradients the backward that runs on this thread will accumulate.

        Args:
            arrived: One whose gradient it has accumulated already.

        Raises:
            TorchChangedError: Autograd refuses to answer, although there is a gradient that has arrived.
        """
        if arrived is None:
            return self._reached.indices()
        if reached := self._reached.indices(has_accumulated=True):
            return reached
        self.refresh(self._everything)  # our nodes were not those that autograd uses
        # The graph may be older than a cast, and have other nodes: what else it brings comes late, and is repaired.
        return self._reached.indices(has_accumulated=True) or [arrived]

    def refresh(self, indices: Sequence[int]) -> None:
        """Ask autograd again for the nodes of these parameters."""
        self._reached.refresh(indices)
        if self.streams is not None:
            self.streams.forget_streams(indices)

    def note_stream(self, index: int) -> None:
        """Note on which stream the gradient of parameter ``index`` arrives; called there."""
        if self.streams is not None:
            self.streams.note_stream(index)

    def start_recording(self, indices: Sequence[int], without: Collection[int] = ()) -> None:
        """Only record the arrivals of these parameters, save those ``without`` and those of unknown streams."""
        if self.streams is not None:
            indices = [i for i in indices if self.streams.knows_stream(i)]
        self._start_recording(indices, without)

    def check(self, rank: int) -> None:
        """Raise :class:`UnusableError` where a CUDA graph is being captured."""
        if self.streams is not None and self.streams.is_capturing():
            raise UnusableError(
                f"rank {rank}: a CUDA graph is being captured, and what each backward sends is agreed on anew, which a "
                "replay leaves out; capture ddp.module, and call ddp.finish_grad_sync() after replays"
            )
