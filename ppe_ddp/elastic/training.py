"""A step that either all live ranks commit, or none. After a death it is averaged again from the local gradients.

    backward ──► averages have arrived ──► ══► on every rank? ──► write .grad, and count the step
                   │ a rank is gone              │ a rank is gone
                   ▼                             ▼
                 meet: "not ready"             meet: "ready"
                   └────────┬────────────────────┘
            all live ranks ready, or one has committed?  yes: commit with the averages
                                                         no: put .grad back; connect; finish_grad_sync()

Why this is safe: a rank commits only when it has heard that every rank is ready, so that every other rank has the
averages. It writes them to ``.grad`` only then. A rank that was ready does not go back before it has met the others. So
there are two cases. Either some live rank has committed; then all others are ready and commit as well. Or none has, and
they decide together in the meeting.
"""

from __future__ import annotations

import functools
import io
import logging
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.serialization import default_restore_location

from ppe_ddp.backends.collective_arguments import as_bytes
from ppe_ddp.backends.group_internals import count_groups_anew, default_group
from ppe_ddp.backends.json_collectives import dump_plain
from ppe_ddp.backends.rank_store import ConnectingStore, Meeting, WrittenKeys
from ppe_ddp.checkpoints.checkpointer import random_states, set_random_states
from ppe_ddp.ddp import DistributedDataParallel
from ppe_ddp.elastic.memberships import Membership, Quorum
from ppe_ddp.engine.completion import Steps
from ppe_ddp.engine.failures import is_of_transport
from ppe_ddp.engine.peer_processes import PeerProcesses, own_address
from ppe_ddp.engine.plan import fingerprint
from ppe_ddp.errors import CommunicationError, DisagreementError, PeerAbortedError, UnusableError
from ppe_ddp.functions import name_of
from ppe_ddp.nested_tensors import mapped
from ppe_ddp.optim.optimizer import DistributedOptimizer
from ppe_ddp.torch_internals import uncompiled_hook, without_torch_function
from ppe_ddp.waiting import paced, probe

logger = logging.getLogger("ppe_ddp")

_LOOK_SECONDS = 0.2  # between looks for dead ranks of other nodes
_LARGE_NBYTES, _PIECE_NBYTES = 2**18, 2**23  # the least size of a tensor that is sent by itself, and of its pieces
_SHARDED = (
    "each rank has a share that nobody else has, which would be lost with it. Take the inner optimizer by itself: "
    "every rank keeps all of its state"
)
_VOID = "ppe_ddp/void"
"""The key in the store of a quorum by which a member tells that it has given the quorum up."""


def is_loss(error: BaseException) -> bool:
    """Whether ``error`` may be the consequence of a dead rank, on this rank or on the rank that has reported it."""
    if isinstance(error, PeerAbortedError):
        return error.reason.startswith(CommunicationError.__name__)
    return is_of_transport(error)  # also gloo's, of a collective of the user's own


def steps_after(words: Sequence[Mapping[str, Any]]) -> int:
    """The number of committed steps after a meeting, the same on all members."""
    trained = [one for one in words if one["committed"] >= 0]
    most = max((int(one["committed"]) for one in trained), default=0)
    return most + bool(trained and all(one["ready"] for one in trained))


def taken_after(words: Sequence[Mapping[str, Any]]) -> int:
    """The number of steps that compressors have completed after a meeting, with those before a restart."""
    trained = [one for one in words if one["committed"] >= 0] or words
    return steps_after(words) + max(int(one["before"]) for one in trained)


def drawn_alike(words: Sequence[Mapping[str, Any]]) -> set[str]:
    """The random number generators in which the members that have trained draw the same, so that who joins has to.

    With a seed of each rank's own, it would draw what another one draws.
    """
    states = [one["random"].items() for one in words if one["committed"] >= 0]
    return {kind for kind, _ in set.intersection(*map(set, states))} if states else set()


class ElasticTraining:
    """Training in which ranks may die, and others may join, at any moment.

    First make ``membership``, then wrap the module for the default group, then make this object. Its constructor waits
    until the processes meet; a process that joins gets the state of the others::

        membership = StoreMembership("tcp://head:29400", size=4)        # not init_process_group()
        model = ppe_ddp.DistributedDataParallel(net)
        training = ElasticTraining(membership, {"model": model, "optimizer": optimizer})
        for rows in training.batches(len(data), batch_size=32, steps=1000):
            optimizer.zero_grad()
            with training.step():
                loss_of(model(data[rows])).backward()
            optimizer.step()

    A step in which a rank dies has one of two results. Either it is complete on all remaining ranks, with the dead
    rank's gradients. Or the remaining ranks average their own gradients again; no forward or backward is repeated.
    Each change of members makes a new default group, between two steps. Objects that depend on the old one (groups,
    samplers) have to be made anew.

    Args:
        membership: Finds out which processes are alive.
        parts: By name, the objects whose state a joining process gets: exactly one wrapper; optimizers, schedulers, and
            other objects with ``state_dict()`` and ``load_state_dict()``, of tensors and plain values. The process also
            gets a compressor's state without its residuals, and the state of each random number generator (Python's,
            NumPy's, torch's) that is the same on all the others.
        backend: The backend of the default group.
        timeout: The timeout of its collectives in seconds, after which a stopped rank is noticed.

    Attributes:
        committed: The number of synchronized backwards that all ranks have committed.
        names: The names of the current ranks, by rank.

    Raises:
        DisagreementError: This process wants to join with another compressor or other options of the wrapper.
        TypeError: A part is a ``DistributedOptimizer``: its shards would be lost with the rank that has them.
        UnusableError: The wrapper's ranks train apart, as under ``LocalSGD`` and ``DiLoCo``; it has a
            ``DistributedOptimizer``, or a hook of torch's kind with a state.
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
                raise TypeError(f"{name!r} is a DistributedOptimizer: {_SHARDED}")
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
        reducer = self._model._ready()  # one that was made before the membership, and a copy, get theirs here
        assert reducer is not None  # the membership has made a group
        self._reducer = reducer
        self._check_model()
        self._membership, self._parts = membership, dict(parts)
        self._backend, self._timeout = backend, timeout
        self.committed = -1
        self.names: list[str] = []
        self._number = ""  # of the connected quorum
        self._quorum: Quorum | None = None  # a quorum that is not connected yet
        self._address = own_address()
        self._is_asked = False
        self._position, self._batch_size = 0, 0
        self._given_at: int | None = None  # the committed steps when this rank got rows, until it asks for the next
        self._has_ended = False
        self._slots: dict[str, int] = {}  # by name, the number of the batch that each rank takes in this step
        self._begin()

    # ------------------------------------------------------------------ the step

    @contextmanager
    def step(self) -> Generator[None, None, None]:
        """A context for one step, which has to end with a synchronized backward; commits the step on all ranks.

        Raises:
            PeerAbortedError: Another live rank has raised an error in its backward, as without elastic training.
            UnusableError: The other processes have gone on without this one, or it has called :meth:`end`.
        """
        self._check_not_ended()
        self._check_model()
        if self._is_asked or self._quorum is not None:
            self._begin()
        try:
            yield
        except Exception as error:
            if not is_loss(error):
                raise
            logger.warning("%s; the step is taken again by those that are left", str(error).split(". ")[0])
            self._again(error)

    def _check_model(self) -> None:
        """Refuse what is lost with a rank, or what a process that joins would not get."""
        synchronizer = self._reducer.synchronizer
        if synchronizer.sharded_parameters is not None:
            raise UnusableError(f"the wrapper has a DistributedOptimizer: {_SHARDED}")
        if synchronizer.reduction.keeps_state_by_index:
            raise UnusableError(
                f"{synchronizer.reduction.title} keeps a state of its own, which a process that joins does not get, so "
                "that it would send other messages than the others: register a compressor, such as "
                "ErrorFeedback(PowerSGD(rank=4)), or a hook whose state is None"
            )

    def _check_not_ended(self) -> None:
        if self._has_ended:
            raise UnusableError(
                f"{self._membership.name}: this process has left the training, as end() was called, which batches() "
                "does at its end: pass ends=False to all batches() but the last"
            )

    @uncompiled_hook
    def _begin(self) -> None:
        """Meet between two steps, unless a quorum is there already, and connect."""
        is_whole, self._is_asked = self._is_asked, False
        while True:
            if self._quorum is None:
                self._meet(is_ready=False, is_whole=is_whole)
            if self._has_strangers():
                self._quorum = None
                continue
            is_whole = False
            try:
                self._move()
                return
            except Exception as error:
                if not is_of_transport(error):
                    raise
                self._void(error)

    @uncompiled_hook
    def _again(self, failure: Exception) -> None:
        """Average the gradients in ``.grad`` over the remaining ranks; raises torch's ``failure`` if none has left."""
        names, is_own = set(self.names), type(failure) is RuntimeError or isinstance(failure, dist.DistBackendError)
        if is_own:  # of a collective of the user's, in the default group, where others may wait for this rank
            self._is_asked = False
            self._disconnect()
        while True:
            self._begin()
            if is_own and names <= set(self.names):
                raise failure
            try:
                self._model.finish_grad_sync()
                return
            except (CommunicationError, PeerAbortedError, dist.DistError) as error:
                if not is_loss(error):
                    raise

    def _void(self, error: Exception) -> None:
        """Give up a quorum that could not connect, for all its members."""
        quorum, self._quorum = self._quorum, None
        logger.info("%s: %s", self._membership.name, error)
        if quorum is not None:
            with suppress(RuntimeError):  # its store may be gone
                quorum.store.set(_VOID, "")
        self._disconnect()  # members that have connected already wait for this rank

    def _meet(self, *, is_ready: bool, is_whole: bool = False) -> bool:
        """Meet the live processes; returns whether this rank has to commit the step.

        ``is_ready`` says that this rank has the averages of the step. ``is_whole`` says that nothing has failed, so
        that the ranks keep their connections if no member has changed.
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
        hooks, options = self._model._hooks, self._model._options
        said = [f"bucket_cap_mb={options.bucket_caps_mb}", f"negotiate_grads={self._model._negotiate}"]
        said += [f"broadcast_buffers={options.forward_sync_buffers}", f"compressor={hooks.compressor!r}"]
        said += [f"hook={None if hooks.comm is None else name_of(hooks.comm[1])}"]
        parameters = [spec.described() for spec in self._model._module_state.specs]
        said += [f"parameters whose names, shapes and dtypes have the digest {fingerprint(parameters).hex()}"]
        return {
            "committed": self.committed,
            "before": self._reducer.groups.taken - max(0, self.committed),
            "ready": False,
            "number": "",
            "process": process,
            "options": [*said, self._model._agreed()],
            "random": _digests(random_states()),
        }

    def _has_strangers(self) -> bool:
        """Whether a process of the quorum wants to join with other options, so that the others go on without it.

        Raises:
            DisagreementError: It is this one.
        """
        assert self._quorum is not None
        words = self._quorum.words
        expected = next((one["options"] for one in words if one["committed"] >= 0), None)
        strangers = [one for one in words if one["committed"] < 0 and one["options"] != expected]
        if expected is None or not strangers:
            return False
        own = words[self._quorum.rank]
        if own not in strangers:
            return True
        self.end()
        here, there = next(pair for pair in zip(own["options"], expected, strict=False) if pair[0] != pair[1])
        raise DisagreementError(
            f"{self._membership.name}: this process wanted to join with {here}, and the others train with {there}: "
            "start it again, with the same options before ElasticTraining is made"
        )

    def _commit(self) -> Steps:
        """Commit a step, as steps; called in each synchronization when the averages have arrived, before ``.grad``."""
        reducer = self._reducer
        groups = reducer.groups
        word = torch.tensor([self._membership.is_asked()], dtype=torch.uint8, device="cpu")
        if groups.world_size > 1:
            try:
                work = dist.all_reduce(word, dist.ReduceOp.MAX, group=groups.control, async_op=True)
                yield probe(work)
                groups.failures.wait(work, word.device)
            except RuntimeError as error:
                if (told := self._failure_before_commit(error)) is not None:
                    raise told from None
                groups.close()  # others may wait for this rank: those of another node do not see who is gone
                if not self._meet(is_ready=True):
                    lost = CommunicationError(f"the step could not be committed: {error}")
                    lost.ranks = ()
                    raise lost from None
        self._is_asked = bool(word.item())
        self.committed += 1

    def _failure_before_commit(self, error: RuntimeError) -> PeerAbortedError | None:
        """The failure of a live rank that has ended this step for all, if the wait for the commit raised ``error``.

        That rank has raised before it has sent its word, so no rank has committed. (After that only an interrupt can
        end its wait.) It tells of its failure before it closes its connections, but the transport may only say that
        they are closed.
        """
        groups, found = self._reducer.groups, error
        if not isinstance(error, PeerAbortedError):
            try:
                groups.failures.check()
            except (PeerAbortedError, CommunicationError) as told:
                found = told
        if not isinstance(found, PeerAbortedError) or is_loss(found):
            return None
        is_ahead = found.step is not None and found.step > groups.step  # it had committed this step
        return None if is_ahead else found

    # ------------------------------------------------------------------ moving to the next quorum

    def _move(self) -> None:
        """Connect the members of the quorum, and give joining ones the state of the others."""
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

    def _connect(self, quorum: Quorum, store: ConnectingStore) -> Sequence[Any]:
        """Make a new default group; returns the place in the data of each of its ranks."""
        size = len(quorum.names)
        word = [self._position, self._slots]
        outcome = Meeting(WrittenKeys(store), "ppe_ddp/connects", quorum.rank, size).words(
            word, lambda: None, self._timeout
        )
        if not outcome.words:
            raise CommunicationError(f"rank {outcome.refusal[0]} has not come to connect")
        self._disconnect()
        self._store = store  # C++ does not keep a store written in Python alive
        limit = timedelta(seconds=self._timeout)
        dist.init_process_group(self._backend, store=store, rank=quorum.rank, world_size=size, timeout=limit)
        before = self._reducer.groups
        self._reducer = self._model._move(taken_after(quorum.words))
        self._memory.rescale(before, self._reducer.groups)
        self._reducer.synchronizer.commits = self._commit
        self._share_state(quorum)
        return outcome.words

    def _connecting_store(self, quorum: Quorum) -> ConnectingStore:
        address = self._address
        seen = PeerProcesses(quorum.rank, address, [one["process"] for one in quorum.words])
        elsewhere = [name for rank, name in enumerate(quorum.names) if rank not in (quorum.rank, *seen.on_this_node)]
        silent = paced(lambda: self._membership.silent(elsewhere), _LOOK_SECONDS)

        def look() -> None:
            if quorum.store.check([_VOID]):
                raise CommunicationError("a member has gone on to another quorum")
            if lost := seen.lost():
                raise CommunicationError(f"rank {', '.join(map(str, lost))} is gone")
            if silent():
                raise CommunicationError(f"of {', '.join(elsewhere)} one gives no sign of life")

        return ConnectingStore(quorum.store, look, self._timeout)

    def _disconnect(self) -> None:
        reducer = self._model._reducer
        assert reducer is not None
        if reducer.groups.is_duplicate and not reducer.groups.is_closed:
            reducer.groups.close()
        if dist.is_initialized():  # false if connecting has failed
            dist.destroy_process_group()
        count_groups_anew()

    def _share_state(self, quorum: Quorum) -> None:
        """Send the state to the joining ranks; every rank calls this.

        Large tensors are sent from their own memory in pieces. So no rank pickles them, and a rank that has the state
        already needs memory for one piece only.
        """
        committed = [one["committed"] for one in quorum.words]
        source = committed.index(max(committed))
        if min(committed) >= 0:
            return
        sent, refusal, large = b"", "", list[Tensor]()
        if quorum.rank == source:
            sent, refusal = self._packed(large)
        length = torch.tensor([len(sent), bool(refusal)], device="cpu")
        self._broadcast(length, source)
        content = torch.empty(int(length[0]), dtype=torch.uint8, device="cpu")
        if quorum.rank == source:
            content = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
        self._broadcast(content, source)
        if length[1]:
            if committed[quorum.rank] < 0:
                self.end()
                self._disconnect()
                raise UnusableError(f"{self._membership.name}: {content.numpy().tobytes().decode()}")
            return
        if quorum.rank == source:
            for tensor in large:
                for piece in _pieces_of(tensor.detach().cpu().contiguous()):
                    self._broadcast(piece, source)
            return
        scratch, joins = torch.empty(_PIECE_NBYTES, dtype=torch.uint8, device="cpu"), committed[quorum.rank] < 0

        def receive(tensor: Tensor) -> Tensor:
            if not (tensor.is_meta and tensor.nbytes >= _LARGE_NBYTES):
                return tensor
            received = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu" if joins else "meta")
            for piece in _pieces_of(received):
                self._broadcast(scratch[: piece.numel()] if piece.is_meta else piece, source)
            return received if tensor.is_contiguous() else _reordered(received, tensor)

        state = mapped(receive, self._loaded(content))
        if joins:
            self._take_state(state, quorum)

    def _take_state(self, state: Mapping[str, Any], quorum: Quorum) -> None:
        for name, part in self._parts.items():
            part.load_state_dict(state["parts"][name])
        with torch.no_grad():
            for name, own in self._transient_buffers().items():
                value = state["buffers"].get(name)
                if value is not None and value.shape == own.shape:  # the first step tells of others
                    own.copy_(value)
        self._reducer.synchronizer.note_buffers()
        self._memory.take(state["memory"])
        drawn = {kind: state["random"][kind] for kind in drawn_alike(quorum.words)}
        set_random_states(random_states() | drawn)

    def _packed(self, large: list[Tensor]) -> tuple[bytes, str]:
        """The state to send, less the ``large`` tensors, which go by themselves; or a text if it cannot be loaded."""
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        buffers = self._transient_buffers()
        state = {"parts": parts, "buffers": buffers, "random": random_states(), "memory": self._memory.common()}
        try:
            return dump_plain(mapped(functools.partial(_take_large, large), state)), ""
        except TypeError as error:
            text = f"a state that a process that joins needs cannot be sent: {error}"
        for name, part in parts.items():
            try:
                dump_plain(mapped(functools.partial(_take_large, []), part))
            except TypeError as error:
                text = f"the state of part {name!r}, which a process that joins needs, cannot be sent: {error}"
        logger.warning("%s: %s", self._membership.name, text)
        return text.encode(), text

    def _loaded(self, content: Tensor) -> Any:
        """Load what another rank has saved, onto the device that this rank has in place of that one's."""
        with without_torch_function():  # of parameters that may be in flight
            device = next(self._model.parameters(), content).device
        return torch.load(io.BytesIO(content.numpy().data), functools.partial(_placed, device), weights_only=True)

    def _transient_buffers(self) -> dict[str, Tensor]:
        """The module's buffers that are not in its state dict, by name."""
        module = self._model.module
        saved = set(map(id, module.state_dict(keep_vars=True).values()))
        return {name: buffer for name, buffer in module.named_buffers() if id(buffer) not in saved}

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        """Broadcast in the wrapper's group, in which dead ranks are noticed, unlike in the default group."""
        groups = self._reducer.groups
        work = dist.broadcast(tensor, source, group=groups.control, async_op=True)
        groups.failures.wait(work, tensor.device)

    # ------------------------------------------------------------------ data

    def batches(
        self, length: int, batch_size: int, steps: int, *, seed: int = 0, ends: bool = True
    ) -> Iterator[list[int]]:
        """Yield the rows of a data set that this rank takes in each step, until ``steps`` steps are committed.

        All ranks together go through one shuffled list of all rows, then through another one. Each rank takes
        ``batch_size`` rows of it in each step. When the number of ranks changes, they divide the remaining rows by the
        new number. So each row is taken by one rank, and none is left out. One exception: if a rank dies and the step
        is averaged again without it, its rows of that step are lost; rank 0 logs their places.

        Args:
            length: The number of rows of the data set.
            batch_size: The rows of one rank in one step.
            steps: The number of committed steps at which it ends.
            seed: The seed of the shuffling.
            ends: Whether to call :meth:`end` at the end, after which nothing follows. Pass False if another loop does.
        """
        self._check_not_ended()
        if self._given_at is not None and self._given_at < self.committed:  # the loop before was left behind a step
            self._advance()
        self._batch_size = batch_size
        while self.committed < steps:
            first = self._position + self._slots[self._membership.name] * batch_size
            self._given_at = self.committed
            yield [_row(place, length, seed) for place in range(first, first + batch_size)]
            self._advance()
        if ends:
            self.end()

    def _advance(self) -> None:
        """Leave the rows behind that the ranks have got."""
        self._position += len(self._slots) * self._batch_size
        self._slots = {name: rank for rank, name in enumerate(self.names)}
        self._given_at = None

    @uncompiled_hook
    def end(self) -> None:
        """Leave when the training is over; all ranks call this, once. :meth:`batches` calls it at its end."""
        self._has_ended = True
        self._membership.leave(self._word)

    def _divide(self, quorum: Quorum, words: Sequence[Any]) -> None:
        """Give joining ranks the next rows that nobody has taken; log the rows that are lost."""
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


def _digests(states: Mapping[str, Any]) -> dict[str, int]:
    """A number for the state of each random number generator."""
    texts = {kind: one.tolist() if isinstance(one, Tensor) else one for kind, one in states.items()}
    return {kind: zlib.crc32(repr(text).encode()) for kind, text in texts.items()}


def _placed(device: torch.device, storage: Any, location: str) -> Any:
    """Put memory on ``device`` if it was on such a device, which had perhaps another number, and else on the CPU."""
    return default_restore_location(storage, str(device) if location.split(":")[0] == device.type else "cpu")


def _take_large(large: list[Tensor], tensor: Tensor) -> Tensor:
    """Append a large tensor to ``large``, and return a meta tensor like it in its place; return any other itself."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.nbytes < _LARGE_NBYTES or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return tensor
    large.append(tensor)
    return torch.empty_like(tensor, device="meta", requires_grad=False)


def _reordered(values: Tensor, like: Tensor) -> Tensor:
    """``values`` in the order of memory of ``like``, a meta tensor."""
    return torch.empty_like(like, device=values.device).copy_(values)


def _pieces_of(tensor: Tensor) -> Sequence[Tensor]:
    """The memory of a contiguous tensor as bytes, in the pieces in which it is sent."""
    return list(as_bytes(tensor).split(_PIECE_NBYTES))


def _row(place: int, length: int, seed: int) -> int:
    epoch, offset = divmod(place, length)
    return int(_order(length, seed + epoch)[offset])


@functools.lru_cache(maxsize=2)
def _order(length: int, seed: int) -> Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed), device="cpu")
