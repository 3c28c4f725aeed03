"""LoadGroup: the ranks that save or load a checkpoint together, with small messages between them.

All ranks make the same calls in the same order. What fails on one rank is raised on all, with the same text, so that no
rank waits for one that has left.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import ProcessGroup

from ppe_ddp.backends.group_internals import default_group, is_registered, kept_with, store_of
from ppe_ddp.backends.json_collectives import all_gather_json, broadcast_json
from ppe_ddp.backends.rank_store import BoundedStore
from ppe_ddp.engine.failures import LATE, Failure, Failures, LostRanks
from ppe_ddp.engine.group_duplicates import backends_of
from ppe_ddp.engine.peer_processes import PeerProcesses, own_address
from ppe_ddp.errors import CheckpointError, CommunicationError, PeerAbortedError, PpeDdpError


def device_of(kind: str) -> torch.device:
    """The CPU, or the current device of an accelerator."""
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


class LoadGroup:
    """The ranks of a process group, or this process alone if torch.distributed is not initialized."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group: ProcessGroup | None = None
        self.rank, self.size, self.ranks = 0, 1, [0]
        if dist.is_initialized():
            self.group = group or default_group()
            self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
            if self.rank < 0:
                raise ValueError(
                    f"global rank {dist.get_rank()} is not in the process group that was given; only the ranks of the "
                    "group load together"
                )
            self.ranks = dist.get_process_group_ranks(self.group)  # their global ranks
        self._has_failed = False  # in a collective
        self._processes: _Processes | None = None  # made in the first call, whose error it is if a rank is gone already

    @property
    def is_source(self) -> bool:
        """Whether this is rank 0 of the group, which has the checkpoint."""
        return self.rank == 0

    def wire_kind(self, kind: str) -> str:
        """The type of device from which to send tensors that are wanted on ``kind``.

        An accelerator only if it has a backend of its own, such as NCCL; gloo would copy to the host anyway.
        """
        if self.group is None:
            return "cpu"
        served = backends_of(self.group)
        if served.get(kind, served.get("cpu")) != served.get("cpu"):
            return kind
        return "cpu" if "cpu" in served or not served else next(iter(served))

    def from_source(self, make: Callable[[], Any]) -> Any:
        """Call ``make`` on rank 0; every rank returns its result, as JSON reads it back, or raises its error."""
        answer, failure = self._attempt(make) if self.is_source else (None, None)
        if self.group is not None and self.size > 1:
            answer = self.communicate(partial(broadcast_json, answer, self.ranks[0], self.group))
        return _values([answer], failure)[0]

    def from_each(self, make: Callable[[], Any]) -> list[Any]:
        """Call ``make`` on every rank; each returns the results of all, as JSON reads them back, or raises an error."""
        answer, failure = self._attempt(make)
        everyone = [answer]
        if self.group is not None and self.size > 1:
            everyone = self.communicate(partial(all_gather_json, answer, self.group))
        return _values(everyone, failure)

    def _attempt(self, make: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """This rank's message, a result or an error for all ranks (its text, and who is lost); and the error itself."""
        try:
            return (make(), None, None), None
        except CheckpointError as error:
            return (None, str(error), None), error
        except BaseException as error:  # an interrupt, too: the others wait for this rank
            text, lost = f"rank {self.rank}: {type(error).__name__}: {error}", None
            if isinstance(error, CommunicationError) or (isinstance(error, PeerAbortedError) and error.is_final):
                lost = [error.job_rank, error.is_final]
                of_job = "" if lost[0] is None else f" (rank {lost[0]} of the job)"
                text = text.removesuffix(of_job) + of_job
            return (None, text, lost), error

    def wait(self, pending: Any, device: torch.device) -> None:
        """Wait for a message; raises if a rank is gone, or has told that one is."""
        if self._processes is None:
            pending.wait()
        else:
            self._processes.failures.wait(pending, device)

    def communicate(self, call: Callable[[], Any]) -> Any:
        """Call a collective; if it fails, the error names the ranks that are gone."""
        try:
            if self._processes is None and self.group is not None and self.size > 1 and is_registered(self.group):
                self._processes = _Processes(self.group, self.rank)
            elif self._processes is not None and self._has_failed:
                self._processes.failures.check_lost()  # else one rank that knows it would leave the others waiting
            return call()
        except RuntimeError as error:
            advice = "Every rank must call it; look for the first traceback of all ranks."
            if self._has_failed:
                advice = "A call before has failed, which closes a process group of torch: start the job anew, or, "
                advice += "with ppe_ddp.elastic, take the next step."
            self._has_failed = True
            instead = None if self._processes is None else self._processes.explained(error)
            if instead is not None:
                raise instead from error
            raise CommunicationError(
                f"rank {self.rank} of {self.size}: the ranks of a checkpoint lost each other: {error}. {advice}"
            ) from error


def _values(answers: list[Any], failure: BaseException | None) -> list[Any]:
    """The results; raises this rank's interrupt, or the first error among them, with this rank's own as its cause.

    If a rank is lost, that is raised instead of other errors, after which training might go on.
    """
    if failure is not None and (isinstance(failure, CommunicationError) or not isinstance(failure, Exception)):
        raise failure
    errors = [(text, lost) for _, text, lost in answers if text is not None]
    if errors:
        text, lost = min(errors, key=lambda one: one[1] is None)
        raise CheckpointError(text) if lost is None else _lost_elsewhere(text, *lost) from failure
    return [value for value, *_ in answers]


def _lost_elsewhere(text: str, job_rank: int | None, is_final: bool) -> CommunicationError:
    """The error of a rank that was lost in another group, of whose ranks one has told this."""
    error = CommunicationError(text)
    error.job_rank, error.job_ranks, error.is_final = job_rank, () if job_rank is None else (job_rank,), is_final
    return error


class _Processes:
    """Finds which ranks of a load group are gone; made on all of them together."""

    def __init__(self, group: ProcessGroup, rank: int) -> None:
        made = kept_with(group, _LoadGroupCount)
        made.count += 1
        name, store, address = f"ppe_ddp/load/{made.count}", BoundedStore(store_of(group)), own_address()
        addresses = all_gather_json(None if address is None else address.packed(), group)
        self._rank = rank
        self._lost = LostRanks(store, name, rank, len(addresses), PeerProcesses(rank, address, addresses))
        self.failures = Failures(store, name, rank, self._lost, dist.get_process_group_ranks(group).__getitem__)

    def explained(self, error: Exception) -> PpeDdpError | None:
        """The error that names the ranks that are gone; None if this rank finds none.

        It tells the others what it has found, since they may look only when this rank has left, too.
        """
        failures, others = self.failures, list[Failure]()

        def is_reported() -> bool:
            with suppress(dist.DistError, CommunicationError):
                others[:] = failures.of_others()
            return bool(others)

        # What they did last in a step is not the reason.
        lost = [replace(one, step=None, phase="checkpoint", last="") for one in self._lost.find(is_reported)]
        if others:
            return failures.error(others)
        if all(one.condition == LATE for one in lost):  # or none: all may wait for one another
            return None
        with suppress(dist.DistError, CommunicationError):
            failures.report(Failure.of(self._rank, 0, "checkpoint", error, lost))
        return failures.lost_error(lost, f"the ranks of a checkpoint lost each other: {error}")


class _LoadGroupCount:
    count = 0  # of the load groups that a process group has had
