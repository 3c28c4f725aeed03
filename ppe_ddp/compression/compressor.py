"""The contract of a compressor, and how several go on side by side."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from ppe_ddp.compression.all_pending import AllPending

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ppe_ddp.compression.flat_gradients import FlatGradients
    from ppe_ddp.compression.link import Exchange, Link


class Compressor(ABC):
    """Averages gradients over the ranks of a link, and sends less than all of them.

    It is a value: its fields say how, and never change. What it remembers is in the ``state`` of each parameter, so
    that buckets may be made of other parameters in every step. Its ``repr`` must tell it from any other, since ranks
    compare it. Derive from :class:`~ppe_ddp.compression.block_codec.BlockCodec` for a method that encodes and decodes
    and leaves the exchange as it is.
    """

    @abstractmethod
    def average(self, gradients: FlatGradients, link: Link) -> Exchange:
        """Average ``gradients`` over the ranks of ``link``, in place; a generator that yields before it waits.

        It is started when the bucket is complete here, while backward is still running, and resumed when what it has
        yielded has been waited for, in an order that is the same on every rank. Other buckets are under way meanwhile.

        What it must see to:

        - every rank gets the same ``gradients.average``, bit by bit;
        - what is not finite on any rank is not finite in the average, so that a ``GradScaler`` notices;
        - ``gradients.keeps``: what was not sent is in ``gradients.given`` in the end;
        - ``state`` gets new values; a tensor that is in it is never written to. What was there is put back where the
          step is dropped: it has failed on some rank, or an average is not finite.
        """
        ...

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({fields})"


def together(exchanges: Iterable[Exchange]) -> Exchange:
    """Let several exchanges go on side by side, in their order."""
    running = list(exchanges)
    while running:
        started = [(exchange, pending) for exchange in running if (pending := next(exchange, None)) is not None]
        if started:
            yield AllPending([pending for _, pending in started])
        running = [exchange for exchange, _ in started]
