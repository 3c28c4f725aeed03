"""What one rank has recorded, and its file: JSON, so that the files of several machines can be brought together."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ppe_ddp.engine.event_log import Span
from ppe_ddp.tracing.clock_offset import ClockOffset
from ppe_ddp.tracing.spans import spans_of_backward

if TYPE_CHECKING:
    from pathlib import Path

    from ppe_ddp.engine.event_log import EventLog

_FORMAT = "ppe_ddp timeline, version 1"


@dataclass(frozen=True)
class Presence:
    """Which gradients there were in the backwards of one module.

    Attributes:
        names: Of its parameters.
        local: One text a backward, one character a parameter: "1" where this rank had the gradient.
        agreed: The same for any rank.
    """

    names: tuple[str, ...]
    local: list[str] = field(default_factory=list)
    agreed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RankRecord:
    """What one rank has recorded.

    Attributes:
        clock: Its rank, and how its clock compares with that of rank 0.
        host: The name of its machine.
        spans: By this rank's clock.
        backwards: Begin and end of each synchronized backward, by this rank's clock.
        presence: One for each module.
    """

    clock: ClockOffset
    host: str
    spans: list[Span]
    backwards: list[tuple[int, int]]
    presence: list[Presence]

    @classmethod
    def of(cls, log: EventLog, clock: ClockOffset) -> RankRecord:
        """What ``log`` has."""
        spans, backwards = list(log.spans), []
        modules: dict[tuple[str, ...], Presence] = {}
        for recorder in log.backwards:
            spans += spans_of_backward(recorder)
            backwards.append((recorder.begin, recorder.done_at))
            presence = modules.setdefault(recorder.names, Presence(recorder.names))
            presence.local.append(_bits(recorder.local))
            presence.agreed.append(_bits(recorder.agreed))
        spans.sort(key=lambda span: (span.begin, -span.end))
        return cls(clock, socket.gethostname(), spans, backwards, list(modules.values()))

    def on_one_clock(self) -> RankRecord:
        """The same by the clock of rank 0."""
        offset = self.clock.offset_ns
        spans = [span._replace(begin=span.begin - offset, end=span.end - offset) for span in self.spans]
        backwards = [(begin - offset, end - offset) for begin, end in self.backwards]
        return RankRecord(self.clock, self.host, spans, backwards, self.presence)

    def write(self, path: Path) -> None:
        """Write it to ``path``, whole or not at all."""
        content = {
            "format": _FORMAT,
            "clock": vars(self.clock),
            "host": self.host,
            "spans": self.spans,
            "backwards": self.backwards,
            "presence": [vars(presence) for presence in self.presence],
        }
        temporary = path.with_suffix(".part")
        temporary.write_text(json.dumps(content, separators=(",", ":")))
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path) -> RankRecord:
        """Read what :meth:`write` has written.

        Raises:
            ValueError: The file is something else.
        """
        try:
            content = json.loads(path.read_text())
            if content["format"] != _FORMAT:
                raise ValueError(f"it is of the format {content['format']!r}, not {_FORMAT!r}")
            return cls(
                ClockOffset(**content["clock"]),
                content["host"],
                [Span(*span) for span in content["spans"]],
                [(begin, end) for begin, end in content["backwards"]],
                [Presence(tuple(one["names"]), one["local"], one["agreed"]) for one in content["presence"]],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no record of a timeline: {error}") from error


def _bits(mask: bytes) -> str:
    return "".join("1" if here else "0" for here in mask)
