"""The exceptions of ppe_ddp: one tree, by what a caller can do about them.

A mistake in a call is a plain ``ValueError`` or ``TypeError``. An error between ranks, or in a function that a user has
plugged in, is one of these.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable


class PpeDdpError(RuntimeError):
    """Base of every error that this library defines."""


class DisagreementError(PpeDdpError):
    """The ranks do not train the same model: they differ in a parameter, a buffer or an option.

    Raised with the same text on every rank, before any gradient or parameter has moved.

    Attributes:
        is_of_places: True if the ranks have run different numbers of synchronized backwards.
    """

    is_of_places: bool = False


class CheckpointError(PpeDdpError):
    """A checkpoint cannot be read, or does not fit the module: keys, shapes or kinds differ.

    Raised with the same text on every rank that loads it.
    """


class FunctionError(PpeDdpError):
    """A reduce function, broadcast function or hook has broken its contract, such as by a result of a wrong type."""


class CommunicationError(PpeDdpError):
    """A collective failed or timed out. The process group can usually not be used any more.

    Attributes:
        ranks: The ranks that have died, have left, are stopped or have not come; None if nobody has looked for them.
        step: The step in which the first of them was seen last, by the engine's count; None if it is not known.
        phase: The last that this rank did in the step, or what others have given up if ``is_late``; empty if it is not
            known.
        reason: The error with which it has left, in one line; empty if it has none or it is not known.
        job_ranks: Their ranks in the job, None for one that is not known.
        job_rank: One of these, of a rank that does not come any more if there is one.
        is_final: True if one of them does not come any more, so that the job cannot go on.
        is_late: True if this rank came too late, when others had waited for it until the timeout.
    """

    ranks: tuple[int, ...] | None = None
    step: int | None = None
    phase: str = ""
    reason: str = ""
    job_ranks: tuple[int | None, ...] = ()
    job_rank: int | None = None
    is_final: bool = False
    is_late: bool = False


class PeerAbortedError(PpeDdpError):
    """Another rank's backward or communication raised an error, so this step's gradients lack its share.

    The ranks are in step again: the next forward and backward work.

    Attributes:
        rank: The rank in the wrapper's group; the first, if several have failed.
        step: The step in which it failed, by the engine's count; None if it is not known.
        phase: The phase of the backward in which it failed.
        reason: Its error, in one line.
        job_rank: The rank of the job that has failed; None if it is not known. In a split model ``rank`` may be one
            that has only told this rank of it.
        is_final: True if that rank of the job does not come any more, so that the job cannot go on.
        is_in_step: True if communication went on, so that the step is complete except for that rank's share.
    """

    rank: int | None = None
    step: int | None = None
    phase: str = ""
    reason: str = ""
    job_rank: int | None = None
    is_final: bool = False
    told_in = ""  # the connections whose ranks all have the report
    is_in_step: bool = False


class AbortedError(PpeDdpError):
    """This rank has given a step up; named in reports to other ranks, and never raised."""

    job_rank: int | None = None  # the rank of the job that has failed, if this one has heard of it in another group
    is_final: bool = False  # whether that rank does not come any more


class NonFiniteGradientError(PpeDdpError):
    """A rank has found NaN or infinity in its gradients before averaging; raised on every rank.

    The ranks are in step: the next forward and backward work.

    Attributes:
        job_rank: The rank of the job that has found them; the first, if several have. None if it is not known.
    """

    job_rank: int | None = None
    is_in_step = True


class UnusableError(PpeDdpError):
    """A call cannot work here or now, such as on a process group that was destroyed, or in a forked child."""


class TorchChangedError(PpeDdpError):
    """A private part of this version of torch does not behave as this library needs it.

    The message names it; ``python -m ppe_ddp doctor`` tells whether this version was tried.
    """


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word, such as "; did you mean 'gloo'?"; empty if no known one is near."""
    near = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def clear_frames(error: BaseException) -> None:
    """Clear the local variables in the tracebacks of ``error``, as they may keep a group and its connections alive."""
    seen: set[int] = set()
    errors: list[BaseException | None] = [error]
    while errors:
        one = errors.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            errors += [one.__cause__, one.__context__]
