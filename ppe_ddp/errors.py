"""The exceptions of ppe_ddp: one tree, by what a caller can do about them.

A mistake in a call is a plain ``ValueError`` or ``TypeError``; what goes wrong between ranks, or in a
function that a user plugged in, is one of these.
"""

from __future__ import annotations

import traceback


class PpeDdpError(RuntimeError):
    """Base of every error that this library defines."""


class DisagreementError(PpeDdpError):
    """The ranks do not train the same model: they differ in a parameter, a buffer or an option.

    Raised with the same text on every rank, before any gradient or parameter has moved.

    Attributes:
        is_of_places: Whether it is that the ranks have run different numbers of synchronized backwards.
    """

    is_of_places: bool = False


class CheckpointError(PpeDdpError):
    """A checkpoint cannot be read, or does not fit the module: keys, shapes or kinds differ.

    Raised with the same text on every rank that loads it.
    """


class FunctionError(PpeDdpError):
    """A reduce function, broadcast function or hook broke its contract (wrong type, wrong size)."""


class CommunicationError(PpeDdpError):
    """A collective failed or timed out. The process group can usually not be used any more.

    Attributes:
        ranks: Those that have died, have left, are stopped or have not come; None where nobody has looked for them.
        step: The step in which the first of them was seen last, by the engine's count; None where it is not known.
        phase: What that one had done last in it; empty where it is not known.
        reason: The error by which the rank has left, in one line; empty where it is none of its own, or not known.
    """

    ranks: tuple[int, ...] | None = None
    step: int | None = None
    phase: str = ""
    reason: str = ""


class PeerAbortedError(PpeDdpError):
    """The backward of another rank raised, or its part in the communication, so this step's gradients lack its share.

    The ranks are in step again: the next forward and backward work.

    Attributes:
        rank: The rank; the first, where several have failed.
        step: The step in which it failed, by the engine's count; None where it is not known.
        phase: The phase of the backward in which it failed.
        reason: Its error, in one line.
        job_rank: The rank of the job that has failed; None where it is not known. If a model is split, ``rank`` may be
            one that has only told this rank of it.
        is_in_step: Whether the communication of the step did not end: the step is complete but for that rank's share.
    """

    rank: int | None = None
    step: int | None = None
    phase: str = ""
    reason: str = ""
    job_rank: int | None = None
    told_in = ""  # the connections whose ranks all have the report
    is_in_step: bool = False


class AbortedError(PpeDdpError):
    """This rank has given a step up; in the reports to the other ranks, and never raised."""

    job_rank: int | None = None  # the rank of the job that has failed, if this one has heard of it in another group


class NonFiniteGradientError(PpeDdpError):
    """A rank has found NaN or infinity in its gradients before they were averaged; raised on every rank.

    The ranks are in step: the next forward and backward work.
    """

    is_in_step = True


class UnusableError(PpeDdpError):
    """What was called cannot work here, or not now: its process group was destroyed, or this is a forked child."""


class TorchChangedError(PpeDdpError):
    """This version of torch does not behave as this library needs it, where torch promises nothing.

    The message names what has found it; ``python -m ppe_ddp doctor`` tells whether this version was tried.
    """


def clear_frames(error: BaseException) -> None:
    """Clear the local variables of what has raised ``error``: they may hold a group, and so its connections."""
    seen: set[int] = set()
    errors: list[BaseException | None] = [error]
    while errors:
        one = errors.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            errors += [one.__cause__, one.__context__]
