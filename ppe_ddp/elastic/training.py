"""The step that all who live commit, or none; after a death it is taken again from the gradients that are there.

    backward ──► averages are there ──► ══► has everyone? ──► .grad, and the step counts
                   │ a rank is gone          │ a rank is gone
                   ▼                         ▼
                 meet: "not ready"         meet: "ready"
                   └────────┬────────────────┘
            all who live are ready, or one has committed?  yes: commit with the averages that are there
                                                           no: .grad is put back; connect; finish_grad_sync()

Why that is safe: who commits has heard that everyone is ready, so that everyone else still has the averages. They are
written to ``.grad`` after that, and nobody who was ready goes back before it has met the others. So among those who
live either one has committed, then all others are ready and commit, too; or none has, and they decide together.
"""

from __future__ import annotations

import copy
import functools
import io
import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ppe_ddp.backends.group_internals import (
    Store,
    connections_awaited,
    count_groups_anew,
    default_group,
    end_wait_for_connections,
)
from ppe_ddp.backends.rank_store import Meeting, WrittenKeys
from ppe_ddp.checkpoints.checkpointer import random_states, set_random_states
from ppe_ddp.ddp import DistributedDataParallel
from ppe_ddp.elastic.memberships import Membership, Quorum, Repeated, wait_for
from ppe_ddp.engine.failures import is_of_transport
from ppe_ddp.engine.peer_processes import PeerProcesses, own_address
from ppe_ddp.errors import CommunicationError, PeerAbortedError, UnusableError
from ppe_ddp.optim.optimizer import DistributedOptimizer
from ppe_ddp.waiting import paced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ppe_ddp.engine.completion import Steps

logger = logging.getLogger("ppe_ddp")

_LOOK_SECONDS, _LONG_LOOK_SECONDS = 0.02, 0.2  # between looks for the dead of this node, and of others
_LARGE_NBYTES, _PIECE_NBYTES = 2**18, 2**23  # of a tensor that is sent by itself, and of what is sent at once
_VOID = "ppe_ddp/void"
"""The key in the store of a quorum by which a member tells that it has gone on to another."""


def is_loss(error: BaseException) -> bool:
    """Whether ``error`` may come of a rank that is gone, here or on the rank that has reported it."""
    if isinstance(error, PeerAbortedError):
        return error.reason.startswith(CommunicationError.__name__)
    return isinstance(error, CommunicationError | dist.DistError)


def steps_after(words: Sequence[Mapping[str, Any]]) -> int:
    """How many steps are committed after a meeting, on all who have met."""
    trained = [one for one in words if one["committed"] >= 0]
    most = max((int(one["committed"]) for one in trained), default=0)
    return most + bool(trained and all(one["ready"] for one in trained))


class _QuorumStore(Store):
    """The store of one quorum. While the members connect, its waits end when one is gone or has left the quorum.

    gloo waits in it, too, and calls it by these names; then it waits for those that are to connect to it, without the
    store, until :meth:`end_waits` finds that one is gone.
    """

    def __init__(self, store: Any, look: Callable[[], None], seconds: float) -> None:
        super().__init__()
        self._store, self._look, self._seconds = store, look, seconds
        self._awaits: list[bytes] = []  # what gloo has written: where it can be reached
        self.is_connecting = True

    @contextmanager
    def connecting(self) -> Generator[None, None, None]:
        """While the members connect in here, a thread looks whether one is gone."""
        looks = Repeated(self.end_waits, _LOOK_SECONDS)
        try:
            yield
            self.is_connecting = False
        finally:
            looks.end()

    def end_waits(self) -> None:
        """End what gloo waits for in other threads, if a member is gone."""
        try:
            self._look()
        except RuntimeError:
            while self._awaits:
                end_wait_for_connections(self._awaits.pop())

    def set(self, key: str, value: Any) -> None:
        if self.is_connecting and isinstance(value, bytes) and connections_awaited(value):
            self._awaits.append(value)
        self._store.set(key, value)

    def add(self, key: str, value: int) -> Any:
        return self._store.add(key, value)

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> Any:
        return self._store.compare_set(key, expected_value, desired_value)

    def delete_key(self, key: str) -> Any:
        return self._store.delete_key(key)

    def check(self, keys: list[str]) -> Any:
        if self.is_connecting:
            self._look()
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = min(self._seconds, timeout.total_seconds()) if timeout is not None else self._seconds
        if not wait_for(lambda: bool(self.check(keys)), seconds):
            raise dist.DistStoreError(f"nobody has written {', '.join(keys)} in {seconds:g} s")

    def get(self, key: str) -> Any:
        self.wait([key])
        return self._store.get(key)

    def multi_get(self, keys: list[str]) -> Any:
        self.wait(keys)
        return self._store.multi_get(keys)

    def has_extended_api(self) -> Any:
        return self._store.has_extended_api()


class ElasticTraining:
    """Training whose ranks may die, and be joined by others, at any moment.

    The module must be wrapped after ``membership`` was made, for the default group, and before this is made, where the
    processes meet: who joins gets the state of the others::

        membership = StoreMembership("tcp://head:29400", size=4)        # not init_process_group()
        model = ppe_ddp.DistributedDataParallel(net)
        training = ElasticTraining(membership, {"model": model, "optimizer": optimizer})
        for rows in training.batches(len(data), batch_size=32, steps=1000):
            optimizer.zero_grad()
            with training.step():
                loss_of(model(data[rows])).backward()
            optimizer.step()

    A step in which a rank dies is either complete on all that are left, with that rank's share, or is averaged again
    over them, from the gradients that they have: no forward or backward is repeated. Between two steps the default
    group is another one after each change: what was made of the old one (groups, samplers) has to be made anew.

    Args:
        membership: Finds out who is alive.
        parts: By name, what a process that joins is given: one wrapper at least; optimizers, schedulers, and whatever
            else has ``state_dict()`` and ``load_state_dict()``, of tensors and plain values. Beside them it gets the
            states of the random number generators, and what a compressor remembers, but for residuals.
        backend: Of the default group.
        timeout: Of its collectives, in seconds; a rank that is stopped is noticed then.

    Attributes:
        committed: How many synchronized backwards all ranks have committed.
        names: Of the ranks that take part now, by rank.

    Raises:
        TypeError: A part is a ``DistributedOptimizer``: its shards would be lost with the rank that has them.
        UnusableError: The wrapper's ranks train apart, as under ``LocalSGD`` and ``DiLoCo``.
    """

    def __init__(
        self, membership: Membership, parts: Mapping[str, Any], *, backend: str = "gloo", timeout: float = 30.0
    ) -> None:
        wrappers = [part for part in parts.values() if isinstance(part, DistributedDataParallel)]
        if len(wrappers) != 1:
            raise ValueError(
                f"one part has to be the DistributedDataParallel that is trained; there are {len(wrappers)}"
            )
        for name, part in parts.items():
            if isinstance(part, DistributedOptimizer):
                raise TypeError(
                    f"{name!r} is a DistributedOptimizer: each rank has a share that nobody else has, which would be "
                    "lost with it. Take the inner optimizer by itself: every rank keeps all of its state"
                )
        (self._model,) = wrappers
        if self._model.process_group is not default_group():
            raise ValueError(
                "the wrapper must be one of the default group (process_group=None), which follows those alive"
            )
        if self._model._is_apart:
            raise UnusableError(
                "the wrapper's backwards are not synchronized (LocalSGD, DiLoCo or train_apart()): what is taken again "
                "after a death is a synchronized backward, and an outer step would be lost"
            )
        self._memory = self._model._hooks.comm_state
        assert self._model._reducer is not None  # the membership has made a group
        self._reducer = self._model._reducer
        self._membership, self._parts = membership, dict(parts)
        self._backend, self._timeout = backend, timeout
        self.committed = -1
        self.names: list[str] = []
        self._number = ""  # of the quorum that is connected
        self._quorum: Quorum | None = None  # that is still to be connected
        self._address = own_address()
        self._is_asked = False
        self._position, self._batch_size = 0, 0
        self._slots: dict[str, int] = {}  # by name, which part of this step's rows each rank takes
        self._begin()

    # ------------------------------------------------------------------ the step

    @contextmanager
    def step(self) -> Generator[None, None, None]:
        """A block that ends with a synchronized backward; when it is over, the step is committed on all ranks.

        Raises:
            PeerAbortedError: Another rank, which is alive, has raised an error in its backward: as without.
            UnusableError: The others have gone on without this process.
        """
        if self._is_asked or self._quorum is not None:
            self._begin()
        try:
            yield
        except (CommunicationError, PeerAbortedError, dist.DistError) as error:
            if not is_loss(error):
                raise
            logger.warning("%s; the step is taken again by those that are left", str(error).split(". ")[0])
            self._again()

    def _begin(self) -> None:
        """Meet between two steps, where that is not done yet, and connect."""
        is_whole, self._is_asked = self._is_asked, False
        while True:
            if self._quorum is None:
                self._meet(is_ready=False, is_whole=is_whole)
            is_whole = False
            try:
                self._move()
                return
            except Exception as error:
                if not is_of_transport(error):
                    raise
                self._void(error)

    def _again(self) -> None:
        """Average the gradients that are in ``.grad`` over those that are left."""
        while True:
            self._begin()
            try:
                self._model.finish_grad_sync()
                return
            except (CommunicationError, PeerAbortedError, dist.DistError) as error:
                if not is_loss(error):
                    raise

    def _void(self, error: Exception) -> None:
        """Give up the quorum that could not connect, for all its members."""
        quorum, self._quorum = self._quorum, None
        logger.info("%s: %s", self._membership.name, error)
        if quorum is not None:
            with suppress(RuntimeError):  # its store may be gone
                quorum.store.set(_VOID, "")
        self._disconnect()  # some may be connected already, and wait for this rank

    def _meet(self, *, is_ready: bool, is_whole: bool = False) -> bool:
        """Meet those who live; whether the step is committed on this rank now.

        It ``is_ready`` with the averages of the step; if it ``is_whole``, nothing has failed, and the ranks go on as
        they are.
        """
        word = {**self._word, "ready": is_ready, "number": self._number if is_whole else ""}
        try:
            self._quorum = quorum = self._membership.meet(word)
        except (dist.DistError, CommunicationError) as error:
            raise UnusableError(
                f"{self._membership.name}: whoever finds out who is alive does not answer, so that the training cannot "
                f"go on without those that have died: {error}"
            ) from error
        steps = steps_after(quorum.words)
        if 0 <= self.committed < steps and not is_ready:
            raise UnusableError(
                f"{self._membership.name}: the others have committed {steps} steps and this process {self.committed}: "
                "it was away; start it again"
            )
        return self.committed < steps

    @property
    def _word(self) -> dict[str, Any]:
        process = None if self._address is None else self._address.packed()
        return {"committed": self.committed, "ready": False, "number": "", "process": process}

    def _commit(self) -> Steps:
        """Called in each synchronization when the averages are there, before anything is written to ``.grad``."""
        reducer = self._reducer
        groups = reducer.groups
        word = torch.tensor([self._membership.is_asked()], dtype=torch.uint8)
        if groups.world_size > 1:
            try:
                work = dist.all_reduce(word, dist.ReduceOp.MAX, group=groups.control, async_op=True)
                yield work.is_completed
                groups.failures.wait(work, word.device)
            except RuntimeError as error:
                if isinstance(error, PeerAbortedError) and not is_loss(error):
                    raise
                if not self._meet(is_ready=True):
                    lost = CommunicationError(f"the step could not be committed: {error}")
                    lost.ranks = ()
                    raise lost from None
        self._is_asked = bool(word.item())
        self.committed += 1

    # ------------------------------------------------------------------ moving to the next quorum

    def _move(self) -> None:
        """Connect the members of the quorum, and give those that join the state of the others."""
        quorum = self._quorum
        assert quorum is not None
        if len(quorum.names) == len(self.names) and all(one["number"] == self._number for one in quorum.words):
            self._quorum = None
            return
        store = self._connecting_store(quorum)
        with store.connecting():
            words = self._connect(quorum, store)
        self._divide(quorum, words)
        self.names, self._number, self._quorum = list(quorum.names), quorum.number, None
        self.committed = steps_after(quorum.words)

    def _connect(self, quorum: Quorum, store: _QuorumStore) -> Sequence[Any]:
        """Make the default group anew; where each of its ranks is in the data."""
        size = len(quorum.names)
        word = [self._position, self._slots]
        outcome = Meeting(WrittenKeys(store), "ppe_ddp/connects", quorum.rank, size).words(
            word, lambda: None, self._timeout
        )
        if not outcome.words:
            raise CommunicationError(f"rank {outcome.refusal[0]} has not come to connect")
        self._disconnect()
        self._store = store  # C++ does not keep a store of Python's alive
        limit = timedelta(seconds=self._timeout)
        dist.init_process_group(self._backend, store=store, rank=quorum.rank, world_size=size, timeout=limit)
        self._reducer = self._model._move(steps_after(quorum.words))
        self._reducer.synchronizer.commits = self._commit
        self._share_state(quorum)
        return outcome.words

    def _connecting_store(self, quorum: Quorum) -> _QuorumStore:
        address = self._address
        seen = PeerProcesses(quorum.rank, address, [one["process"] for one in quorum.words])
        elsewhere = [name for rank, name in enumerate(quorum.names) if rank not in (quorum.rank, *seen.on_this_node)]
        silent = paced(lambda: self._membership.silent(elsewhere), _LONG_LOOK_SECONDS)

        def look() -> None:
            if quorum.store.check([_VOID]):
                raise CommunicationError("a member has gone on to another quorum")
            if lost := seen.lost():
                raise CommunicationError(f"rank {', '.join(map(str, lost))} is gone")
            if silent():
                raise CommunicationError(f"of {', '.join(elsewhere)} one gives no sign of life")

        return _QuorumStore(quorum.store, look, self._timeout)

    def _disconnect(self) -> None:
        reducer = self._model._reducer
        assert reducer is not None
        if reducer.groups.is_duplicate and not reducer.groups.is_closed:
            reducer.groups.close()
        if dist.is_initialized():  # not where connecting has failed
            dist.destroy_process_group()
        count_groups_anew()

    def _share_state(self, quorum: Quorum) -> None:
        """Bring those that join the state of the others; every rank calls this.

        Large tensors are sent from their own memory in pieces: no rank pickles them, and those that have the state
        already need memory for one piece.
        """
        committed = [one["committed"] for one in quorum.words]
        source = committed.index(max(committed))
        if min(committed) >= 0:
            return
        buffer, large = io.BytesIO(), list[Tensor]()
        if quorum.rank == source:
            parts = {name: part.state_dict() for name, part in self._parts.items()}
            state = {"parts": parts, "random": random_states(), "memory": self._memory.common()}
            torch.save(_each_tensor(state, functools.partial(_take_large, large)), buffer)
        length = torch.tensor([buffer.tell()])
        self._broadcast(length, source)
        content = torch.empty(int(length), dtype=torch.uint8)
        if quorum.rank == source:
            content = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
        self._broadcast(content, source)
        if quorum.rank == source:
            for tensor in large:
                for piece in _bytes_of(tensor.detach().cpu().contiguous()).split(_PIECE_NBYTES):
                    self._broadcast(piece, source)
            return
        piece, joins = torch.empty(_PIECE_NBYTES, dtype=torch.uint8), committed[quorum.rank] < 0

        def receive(tensor: Tensor) -> Tensor:
            if not (tensor.is_meta and tensor.nbytes >= _LARGE_NBYTES):
                return tensor
            into = _bytes_of(torch.empty_like(tensor, device="cpu")) if joins else None
            for begin in range(0, tensor.nbytes, _PIECE_NBYTES):
                end = min(begin + _PIECE_NBYTES, tensor.nbytes)
                self._broadcast(piece[: end - begin] if into is None else into[begin:end], source)
            return tensor if into is None else into.view(tensor.dtype).view(tensor.shape)

        state = _each_tensor(torch.load(io.BytesIO(content.numpy().data), weights_only=True), receive)
        if joins:
            for name, part in self._parts.items():
                part.load_state_dict(state["parts"][name])
            self._memory.take(state["memory"])
            set_random_states(state["random"])

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        """Where it is seen that a rank is gone, as it is not in the default group."""
        groups = self._reducer.groups
        work = dist.broadcast(tensor, source, group=groups.control, async_op=True)
        groups.failures.wait(work, tensor.device)

    # ------------------------------------------------------------------ data

    def batches(self, length: int, batch_size: int, steps: int, *, seed: int = 0) -> Iterator[list[int]]:
        """The rows of a data set that this rank takes in each step, until ``steps`` steps are committed.

        All ranks together go through one shuffled list of the rows, and through another one when it is at its end. Each
        takes ``batch_size`` rows of it in each step; where the ranks change, what is left is divided by the new number.
        So each row is taken by one rank, and none is left out. What a rank has in hand when it dies is lost, if the
        step is taken again without it; rank 0 logs these rows' places.

        Args:
            length: Of the data set.
            batch_size: Of one rank.
            steps: When to end.
            seed: Of the order.
        """
        self._batch_size = batch_size
        while self.committed < steps:
            first = self._position + self._slots[self._membership.name] * batch_size
            yield [_row(place, length, seed) for place in range(first, first + batch_size)]
            self._position += len(self._slots) * batch_size
            self._slots = {name: rank for rank, name in enumerate(self.names)}
        self.end()

    def end(self) -> None:
        """Take part no longer, when the training is over; on all ranks. :meth:`batches` calls it at its end."""
        self._membership.leave(self._word)

    def _divide(self, quorum: Quorum, words: Sequence[Any]) -> None:
        """Let those that join take rows that nobody has taken; say whose are lost."""
        self._position = max(position for position, _ in words)
        self._slots = {name: slot for _, slots in words for name, slot in slots.items()}
        gone = {name: slot * self._batch_size + self._position for name, slot in self._slots.items()}
        come = [name for name in quorum.names if name not in self._slots]
        for name in quorum.names:
            self._slots.setdefault(name, len(self._slots))
            gone.pop(name, None)
        if quorum.rank == 0 and self.names and (gone or come):
            rows = [f"{name}, which had places {at} to {at + self._batch_size - 1}" for name, at in gone.items()]
            logger.warning(
                "after %d steps %d ranks go on; gone: %s; new: %s",
                steps_after(quorum.words),
                len(quorum.names),
                "; ".join(rows) or "none",
                ", ".join(come) or "none",
            )


def _each_tensor(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of nested dictionaries, lists and tuples with other tensors, which ``change`` gives, in their order."""
    if isinstance(state, Tensor):
        return change(state)
    if isinstance(state, dict):
        copied = copy.copy(state)  # with the attributes that a module's state has
        for key, value in state.items():
            copied[key] = _each_tensor(value, change)
        return copied
    if type(state) in (list, tuple):
        return type(state)(_each_tensor(value, change) for value in state)
    return state


def _take_large(large: list[Tensor], tensor: Tensor) -> Tensor:
    """Move a tensor that is large to this list; one without memory stays in its place."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.nbytes < _LARGE_NBYTES or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return tensor
    large.append(tensor)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _row(place: int, length: int, seed: int) -> int:
    epoch, offset = divmod(place, length)
    return int(_order(length, seed + epoch)[offset])


@functools.lru_cache(maxsize=2)
def _order(length: int, seed: int) -> Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))
