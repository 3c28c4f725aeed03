"""Negotiation: checks that all ranks train the same model; agrees on existing gradients, their order and bucket sizes.

If the user gives no bucket size, it is chosen after some measured steps:

    each step         measure the duration of backward, and the bytes that were sent
    the last one      measure all-reduces of two sizes: the latency and the speed of the group
                      one small exchange: the maximum of each number over the ranks
    after it          use the size with the shortest step by a model, which is the same on every rank

After a failure the ranks start over with the default size, and measure again.
"""

from __future__ import annotations

import os
import statistics
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from hashlib import blake2b
from time import perf_counter_ns, process_time_ns, thread_time_ns
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup

from ppe_ddp.backends.json_collectives import all_gather_json
from ppe_ddp.engine.completion import ResultSteps, Steps
from ppe_ddp.engine.failures import COMPARE
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.mask_exchange import DIGEST, MaskExchange, MaskExchanger, ranks_named, with_complement
from ppe_ddp.engine.memory import allocator
from ppe_ddp.engine.module import ModuleState
from ppe_ddp.engine.peer_processes import Activity
from ppe_ddp.engine.plan import NodeMasks, Packing, ParameterSpec, Planner, fingerprint
from ppe_ddp.engine.record import Recorder
from ppe_ddp.errors import DisagreementError
from ppe_ddp.waiting import probe
from ppe_ddp.weighing import NBYTES, WEIGHS_NOTHING

MEASURED_STEPS = 10
_FIRST_STEPS = 5  # not measured: they make buckets and learn the order
_SIZES = tuple(1 << power for power in range(19, 26))  # 0.5 to 32 MiB
_SMALL, _LARGE = 1 << 10, 1 << 20
_TRIALS = 4  # all-reduces of each size; the first one only brings the ranks together
_HOST_SECONDS = 150e-6  # of the host for each bucket: launching it, waiting for it, handing it over
_UNDER_WAY = 2  # buckets in flight at a time: gloo has two threads
_GAIN = 0.02  # fraction of a step; a smaller gain is noise
_SAME = 1.005  # steps within this factor count as equal; the largest size with such a step has the fewest messages
_CPU = torch.device("cpu")
_MAX = dist.ReduceOp.MAX


def all_reduced(
    tensor: Tensor, groups: Groups, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, group: ProcessGroup | None = None
) -> Steps:
    """All-reduce a CPU tensor in place, as steps; in ``group``, or in the control group if that is None."""
    work = dist.all_reduce(tensor, op, group=group or groups.control, async_op=True)
    yield probe(work)
    groups.failures.wait(work, _CPU)


@dataclass(frozen=True)
class MeasuredSpeed:
    """The measurements: of each, the maximum over the ranks."""

    backward: float  # seconds of a backward
    nbytes: int  # bytes of its gradients
    latency: float  # seconds of a tiny all-reduce
    per_byte: float  # seconds that each further byte adds
    # Seconds (and seconds a byte) for which an all-reduce takes a core from backward, on which the transport's threads
    # run; zero if the ranks leave cores idle.
    taken: float = 0.0
    taken_per_byte: float = 0.0

    def step_seconds(self, bucket_bytes: int) -> float:
        """The seconds from the begin of backward to the last average, with buckets of this size."""
        count = max(1, -(-self.nbytes // bucket_bytes))
        sent, arrivals = 0.0, [0.0] * _UNDER_WAY
        taken = self.taken + self.nbytes / count * self.taken_per_byte
        for k in range(1, count + 1):
            ready = self.backward * k / count + _HOST_SECONDS * k + taken * (k - 1)
            sent = max(ready, sent, arrivals[-_UNDER_WAY]) + self.nbytes / count * self.per_byte
            arrivals.append(sent + self.latency)
        return arrivals[-1]

    def best_bucket_bytes(self, default: int) -> int:
        """The size with the shortest step; ``default`` if the gain is too small."""
        seconds = {size: self.step_seconds(size) for size in _SIZES}
        shortest = min(seconds.values())
        if shortest >= (1 - _GAIN) * self.step_seconds(default):
            return default
        return max(size for size in _SIZES if seconds[size] <= _SAME * shortest)


class BucketSizeMeasurement:
    """Measures the first steps of a wrapper. All ranks make the same calls in the same steps."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._backwards: list[tuple[int, int]] = []
        self.speed: MeasuredSpeed | None = None  # the result, the same on every rank; None until it is known
        self.count = 0  # number of measured steps so far

    def after_step(self, recorder: Recorder) -> Steps:
        """Note one step; after the last of them, measure the group and agree on the result, which is collective."""
        nbytes = sum(bucket.nbytes for one in recorder.rounds for bucket in one.buckets)
        self._backwards.append((recorder.backward_at - recorder.begin, nbytes))
        self.count += 1
        if self.count != MEASURED_STEPS:
            return
        found = [int(statistics.median(column)) for column in zip(*self._backwards[_FIRST_STEPS:], strict=True)]
        for size in (_SMALL, _LARGE):
            message = allocator(self._groups.buckets)(size // 4, torch.float32, _CPU).zero_()
            times, taken = [], []
            for _ in range(_TRIALS):
                start, start_of_threads = perf_counter_ns(), _by_other_threads_ns()
                yield from all_reduced(message, self._groups, _MAX, self._groups.buckets)
                times.append(perf_counter_ns() - start)
                taken.append(_by_other_threads_ns() - start_of_threads)
            found += min(times[1:]), self._cores_are_busy() * max(0, min(taken[1:]))
        agreed = allocator(self._groups.control)(len(found), torch.int64, _CPU)
        agreed.copy_(torch.tensor(found, device="cpu"))
        yield from all_reduced(agreed, self._groups, _MAX)
        backward, nbytes, small, small_taken, large, large_taken = agreed.tolist()
        per_byte, taken_per_byte = (
            max(0, more - less) / 1e9 / (_LARGE - _SMALL) for more, less in ((large, small), (large_taken, small_taken))
        )
        self.speed = MeasuredSpeed(backward / 1e9, nbytes, small / 1e9, per_byte, small_taken / 1e9, taken_per_byte)
        recorder.control_nbytes += _TRIALS * (_SMALL + _LARGE) + agreed.nbytes

    def _cores_are_busy(self) -> bool:
        """Whether the ranks of this node use all of its cores."""
        ranks = 1 + len(self._groups.processes.on_this_node)
        return ranks * torch.get_num_threads() >= len(os.sched_getaffinity(0))


def _by_other_threads_ns() -> int:
    """The CPU time of all other threads of this process."""
    return process_time_ns() - thread_time_ns()


_POSITIONS = 1_000_000
_KEPT_MASKS = 8
_TAKEN = struct.Struct(">I")  # of the number of steps that a compressor has completed
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Agreement(NamedTuple):
    """The result of a mask exchange, the same on all ranks."""

    mask: bytes  # one byte a parameter: whether some rank has its gradient
    statuses: bytes  # one byte a rank: in a mask, whether it contributes
    nodes: bytes  # a parameter: 1 + the only node that has its gradient, else 0; empty without :class:`NodeMasks`
    writers: bytes = b""  # the maxima of the digits of writers (``mask_exchange.py``)
    apart: bytes = b""  # of a mask: the wrappers that all ranks end together (``completion.py``)
    weights: bytes = b""  # of a mask: each rank's weight
    users: bytes = b""  # of a vote: which ranks had the gradients that are averaged where they are used
    times: bytes = b""  # of a vote: the duration of each rank's step
    parameters: bytes = b""  # of a vote: whether some parameters are the same on all ranks
    missing: bytes = b""  # of a vote: whether an announced gradient has not come on some rank

    def senders(self, second: bytes) -> list[int]:
        """The rank that sends each submodule's buffers, by the digits in the mask and the ``second`` in the vote.

        It is the lowest rank that has written any of them, and whose losses weigh something; if none has, the first
        rank that contributes.
        """
        first, weights = max(self.statuses.find(1), 0), self.weights
        if WEIGHS_NOTHING in weights:
            weigh = [weights[i : i + NBYTES] != WEIGHS_NOTHING for i in range(0, len(weights), NBYTES)]
            first = next((i for i, status in enumerate(self.statuses) if status == 1 and weigh[i]), first)
        return ranks_named(self.writers, second, first)


_WATCH_EVERY = 16
_NOW = "now has"


class Negotiation:
    """Finds out by mask exchanges which gradients exist on any rank, and checks what must be the same on every rank.

    Without ``negotiate`` all ranks must have the same gradients; a difference is an error. ``with_buffers`` says that
    buffers are broadcast, so they must have the same names, dtypes and shapes. ``options`` is a text that must be the
    same, too.
    """

    def __init__(
        self, groups: Groups, packing: Packing, *, negotiate: bool, with_buffers: bool, options: str = ""
    ) -> None:
        self._groups = groups
        self._exchanger = MaskExchanger(groups)
        self._default = self._packing = packing
        self.planner = Planner((), packing)
        self._bucket_size = BucketSizeMeasurement(groups)
        self._negotiate = negotiate
        self._with_buffers = with_buffers
        self._place = "start"
        self._options = [f"options {options}"] if options else []
        self._plugs: dict[str, tuple[str, ...]] = {}
        self._watched: dict[str, Callable[[], Sequence[str]]] = {}
        self._compared: list[str] = []  # what these have returned for the current exchange
        self._buffer_lines: list[str] = []
        self._count = 0
        self._learned: tuple[object, ...] = ()  # what this rank has learned ...
        self._learned_field = b""  # ... and its digest
        self._before, self._after = bytes(groups.rank), bytes(groups.world_size - groups.rank - 1)  # a byte a rank
        self._generation = groups.generation
        self._is_loaded = False  # whether what is learned was loaded since the failure that closed the connections
        self.sends_by_node = False
        """Whether a gradient of one node only is sent by that node. The same on all ranks."""
        self.has_compressor = False
        """Whether a compressor averages, whose steps the ranks count. The same on all ranks."""

    def use_module(self, module_state: ModuleState) -> None:
        """Negotiate on the parameters of ``module_state`` from now on; keep what was learned if the specs are equal."""
        self._module_state = module_state
        if self.planner.specs != tuple(module_state.specs):
            self.planner = Planner(module_state.specs, self._packing)
        self._digest = fingerprint(self._lines())
        # Most steps have the same masks.
        self._read = lru_cache(_KEPT_MASKS)(partial(_read_masks, module_state.specs, self._groups.world_size))

    def repack(self, packing: Packing) -> None:
        """Pack buckets by ``packing`` from now on."""
        self._default = packing
        self._repack(packing)
        self._digest = fingerprint(self._lines())

    def _repack(self, packing: Packing) -> None:
        self._packing = packing
        self.planner.repack(packing)

    def use_plug(self, what: str, *titles: str, watched: Mapping[str, Callable[[], Sequence[str]]] = _NOTHING) -> None:
        """Require that all ranks have the same plug, from the next exchange on.

        ``what`` tells its purpose, as in ``"gradients averaged by"``. ``titles`` tell its identity, one line each; pass
        none if the plugs of the ranks may differ. ``watched`` has functions, by what they belong to in place of an
        earlier one. They return lines that may change from step to step, and are compared in every 16th.
        """
        self._plugs[what] = titles
        self._watched |= watched
        self._digest = fingerprint(self._lines())

    def _watched_lines(self) -> list[str]:
        first: dict[Callable[[], Sequence[str]], str] = {}
        for what, look in self._watched.items():
            first.setdefault(look, what)  # it may belong to several
        return [f"{what} {_NOW} {line}" for look, what in first.items() for line in look()]

    def check(self, *, with_buffers: bool = True, writes_buffers: bool = False) -> None:
        """Compare parameters, options and (``with_buffers``) buffers across the ranks, which must all call this.

        ``writes_buffers`` says that values of another rank are then written into buffers, too.

        Raises:
            DisagreementError: On every rank, with the same text. It names the first difference, or says that some ranks
                are in a synchronized backward instead.
            ValueError: On every rank, if one has a tensor that cannot be written; names the tensors of the first such
                rank.
        """
        place = f"{COMPARE} after step {self._groups.step}"
        # Not those of the last mask, which a rank that has failed before it may not have sent.
        lines = [place, *self._lines(buffers=_buffer_lines(self._module_state.buffers() if with_buffers else {}))]
        unwritable = self._module_state.unwritable(with_buffers=writes_buffers)
        fields = {"unwritable": bytes([bool(unwritable)])}
        if self._generation != self._groups.generation:
            self._restart()  # after a failure the ranks may have messages of different lengths
        agreement = MaskExchange(self._exchanger, fingerprint(lines), fields).result()
        if not agreement.same:
            error = _disagreement(lines, self._groups)
            if error.is_of_places:  # the other ranks are in a backward, and renew their connections after this error
                self._groups.fail(error, "")
            raise error
        if any(agreement.fields["unwritable"]):
            tables = all_gather_json(unwritable, self._groups.control)
            rank, first = next((rank, table) for rank, table in enumerate(tables) if table)
            raise ValueError(f"rank {rank}: the values of rank 0 cannot be written everywhere: {'; '.join(first)}")

    def buffers(self) -> dict[str, Tensor]:
        """The module's buffers by name, if they are broadcast; else none."""
        return self._module_state.buffers() if self._with_buffers else {}

    def start(
        self,
        local: bytes | bytearray,
        status: int,
        *,
        buffers: Mapping[str, Tensor] | None = None,
        is_vote: bool = False,
        said: Mapping[str, bytes] = _NOTHING,
        own: Mapping[str, bytes] = _NOTHING,
    ) -> MaskExchange:
        """Start the exchange of a mask or vote (``mask_exchange.py``).

        Args:
            local: One byte a parameter: whether this rank has the gradient.
            status: A byte of this rank, which all ranks get.
            buffers: The result of :meth:`buffers`.
            is_vote: Whether this is the second message of a step.
            said: Further fields, by name, of which all ranks get the maximum.
            own: Further fields, by name, of which all ranks get the value of each rank.
        """
        groups = self._groups
        if self._generation != groups.generation:
            self._restart()
        if not is_vote:
            groups.step += 1
        groups.note(Activity.VOTE if is_vote else Activity.MASK)
        self._place = f"{'vote' if is_vote else 'mask'} of step {groups.step}"
        if not is_vote and (lines := _buffer_lines(buffers) if buffers else []) != self._buffer_lines:
            self._buffer_lines = lines
            self._digest = fingerprint(self._lines())
        self._compared = [] if is_vote or not self._watched or groups.step % _WATCH_EVERY else self._watched_lines()
        said_here = "\n".join([self._place, *self._compared])
        digest = blake2b(said_here.encode(), digest_size=DIGEST, key=self._digest).digest()
        fields = {"present": bytes(local)}
        if self.sends_by_node and groups.node_masks is not None:
            fields["present"], fields["nodes"] = map(fields["present"].translate, groups.node_masks.tables)
        fields |= said
        more: dict[str, bytes] = {}
        if not is_vote:
            fields["learned"] = self._digest_of_learned()
            if self.has_compressor:
                more["taken"] = _TAKEN.pack(groups.taken)
        # A field of each rank has zeros in the places of the other ranks, so the maxima have the values of all ranks.
        for name, field in {"statuses": bytes([status]), **own, **more}.items():
            fields[name] = len(field) * self._before + field + len(field) * self._after
        return MaskExchange(self._exchanger, digest, fields)

    def _restart(self) -> None:
        """Start over with new connections, and forget what was learned: a failure may have kept it from some ranks.

        What was loaded since the failure is kept. If a rank has loaded before it heard of that, all ranks forget.
        """
        self._generation = self._groups.generation
        self._exchanger = MaskExchanger(self._groups)
        if not self._is_loaded:
            self._forget()
        self._is_loaded = False

    def _digest_of_learned(self) -> bytes:
        """The digest of all that plans and the next learning step depend on; cached, as it rarely changes."""
        packing, missed = self._packing, self._groups.step - self._count
        learned = self.planner.learned_digest, missed, packing.bucket_bytes, packing.measured, self._bucket_size.count
        if learned != self._learned:
            self._learned, self._learned_field = learned, with_complement(fingerprint([repr(learned)]))
        return self._learned_field

    def _forget(self) -> None:
        """Forget the learned order of arrival and bucket size; all ranks do so together."""
        self._count = 0
        self._packing = self._default
        self._bucket_size = BucketSizeMeasurement(self._groups)
        self.planner = Planner(self._module_state.specs, self._packing)

    def finish(self, exchange: MaskExchange, local: bytes | bytearray) -> Agreement:
        """Wait for the result of :meth:`start`.

        Raises:
            DisagreementError: On every rank, if their modules or options differ by now.
        """
        agreed = exchange.result()
        if not agreed.same:
            raise _disagreement([self._place, *self._lines(local), *self._compared], self._groups)
        fields, nodes = dict(agreed.fields), b""
        if fields.pop("learned", None) != exchange.fields.get("learned"):
            self._forget()  # a single rank has changed its module, or loaded an order
        if "taken" in fields:
            self._agree_on_taken([count for (count,) in _TAKEN.iter_unpack(fields.pop("taken"))])
        mask = fields.pop("present")
        if self.sends_by_node and self._groups.node_masks is not None:
            mask, nodes = self._read(self._groups.node_masks, mask, fields.pop("nodes"))
        held, lacking = fields.pop("held", b""), fields.pop("lacking", b"")
        if any(map(min, held, lacking)):
            own = exchange.fields["held"]
            is_silent = not any(own + exchange.fields["lacking"])
            raise _disagreement([self._place, *self._lines(held if is_silent else own)], self._groups)
        return Agreement(mask, nodes=nodes, **fields)

    def _agree_on_taken(self, counts: Sequence[int]) -> None:
        """Take the largest number of steps that a rank's compressor has completed, by the ``counts`` of the ranks.

        In a failed step one rank may have completed what another has not, and the state that they then save and load
        is one step apart. More is a mistake.
        """
        fewest, most = min(counts), max(counts)
        if most - fewest > 1:
            await_all(self._groups)
            raise DisagreementError(
                f"rank {counts.index(most)} has a state of the compressor after step {most}, and rank "
                f"{counts.index(fewest)} has one after step {fewest}: call load_comm_state_dict() on every rank with "
                "what that rank saved, all at the same step"
            )
        self._groups.taken = most

    def agree_held(self, held: Collection[int]) -> ResultSteps[bytes]:
        """One byte a parameter: whether it is in ``held`` on any rank. All ranks call this together."""
        mask = allocator(self._groups.control)(len(self._module_state.specs), torch.uint8, _CPU).zero_()
        mask[list(held)] = 1
        yield from all_reduced(mask, self._groups, _MAX)
        return bytes(mask.tolist())

    def learn(self, arrivals: Sequence[int], recorder: Recorder) -> Steps:
        """Learn the order and bucket size for later backwards; all ranks must call this after every backward."""
        self._count += 1
        if not self._count & (self._count - 1):  # at the 1st, 2nd, 4th, 8th …
            yield from self._learn_order(arrivals, recorder)
        if self._packing.measured and self._groups.world_size > 1:
            yield from self._bucket_size.after_step(recorder)
            speed = self._bucket_size.speed
            if speed is not None:
                chosen = speed.best_bucket_bytes(self._packing.bucket_bytes)
                self._repack(replace(self._packing, bucket_bytes=chosen, measured=False))

    def _learn_order(self, arrivals: Sequence[int], recorder: Recorder) -> Steps:
        """Learn the order in which gradients arrive, as long as some parameter has no learned place."""
        count = len(self._module_state.specs)
        if self._groups.world_size == 1 or not self.planner.has_unlearned(recorder.agreed):
            return
        # In memory that the transport prefers: with other memory some transports block.
        sums = allocator(self._groups.control)(2 * count, torch.int64, torch.device("cpu")).zero_().view(2, count)
        for place, i in enumerate(dict.fromkeys(arrivals)):
            sums[0, i] = place * _POSITIONS // count
            sums[1, i] = 1
        yield from all_reduced(sums, self._groups)
        places, seen = sums.tolist()
        self.planner.learn([place / (n * _POSITIONS) if n else None for place, n in zip(places, seen, strict=True)])
        recorder.control_nbytes += sums.nbytes

    def order_state(self) -> dict[str, Any]:
        """The learned order of arrival, by names; the initial one behind a failure, until another one is loaded."""
        if self._groups.is_closed and not self._is_loaded:
            self._forget()
        names = self._module_state.names
        return {
            "order": [names[i] for i in self.planner.order],
            "learned": [names[i] for i in self.planner.learned],
            "count": self._count,
            "bucket_bytes": None if self._packing == self._default else self._packing.bucket_bytes,
        }

    def load_order_state(self, state: Mapping[str, Any]) -> None:
        """Plan buckets by a saved :meth:`order_state`. If the ranks load different ones, all ranks forget them.

        Parameters that are missing in it come last.
        """
        is_behind_failure = self._groups.is_closed or self._generation != self._groups.generation
        if is_behind_failure:
            self._forget()
        index = {name: i for i, name in enumerate(self._module_state.names)}
        learned = [index[name] for name in state["learned"] if name in index]
        order = [index.pop(name) for name in state["order"] if name in index]
        self.planner.restore([*order, *index.values()], learned)
        self._count = int(state["count"])
        chosen = state.get("bucket_bytes")
        if chosen is not None and self._packing.measured:
            self._packing = replace(self._packing, bucket_bytes=chosen, measured=False)
        self._repack(self._packing)
        self._is_loaded = is_behind_failure

    def _lines(self, local: bytes | bytearray = b"", *, buffers: Sequence[str] | None = None) -> list[str]:
        """Everything that must be the same on all ranks, one line each; of the last mask's ``buffers`` if None."""
        packing = self._default
        caps = ", ".join(str(size / 2**20) for size in (*packing.first_bytes, packing.bucket_bytes))
        lines = [f"parameter {spec.described()}" for spec in self._module_state.specs]
        plugs = ((what, title) for what, titles in self._plugs.items() for title in titles)
        lines.extend(f"{what} {title or 'a function'}" for what, title in plugs)
        lines.append(
            f"bucket_cap_mb {caps} (alone from {packing.adopt_bytes} bytes, "
            f"fixed {packing.fixed}, by measurement {packing.measured}), negotiate_grads {self._negotiate}, "
            f"broadcast_buffers {self._with_buffers}"
        )
        lines.extend(self._options)
        lines.extend(self._buffer_lines if buffers is None else buffers)
        if not self._negotiate:
            lines.extend(
                f"{'a' if here else 'no'} gradient of {spec.name!r} (negotiate_grads=False)"
                for spec, here in zip(self._module_state.specs, local, strict=False)
            )
        return lines


def _read_masks(
    specs: Sequence[ParameterSpec], world_size: int, masks: NodeMasks, first: bytes, second: bytes
) -> tuple[bytes, bytes]:
    """The mask, and the node of each gradient that one node sends; of several ranks it sends CPU tensors alone."""
    kinds = {"cpu"} if masks.count < world_size else {spec.device.type for spec in specs}
    sizes = [spec.nbytes if spec.device.type in kinds and not spec.sparse else 0 for spec in specs]
    return masks.read(first, second, sizes)


def _buffer_lines(buffers: Mapping[str, Tensor]) -> list[str]:
    shapes = {name: "nested" if buffer.is_nested else tuple(buffer.shape) for name, buffer in buffers.items()}
    return [f"buffer {name!r} {buffer.dtype} {shapes[name]}" for name, buffer in buffers.items()]


def await_all(groups: Groups) -> None:
    """Wait until all ranks have read the last message: one that raises might close the group."""
    with suppress(RuntimeError):
        groups.failures.wait(dist.barrier(groups.control, async_op=True), _CPU)


def _disagreement(lines: Sequence[str], groups: Groups) -> DisagreementError:
    """The error that names the ranks that differ from rank 0, and the first difference of their lines. Collective."""
    tables: list[list[str]] = all_gather_json(list(lines), groups.control)
    await_all(groups)
    reference = tables[0]
    others = [rank for rank, table in enumerate(tables) if table != reference]
    if not others:
        return DisagreementError("the ranks disagree, but not any more: did one of them change its module meanwhile?")
    if len({table[0] for table in tables}) > 1:
        return _out_of_step([table[0] for table in tables])
    rank = others[0]
    table = tables[rank]
    place = next(
        (k for k, (ours, theirs) in enumerate(zip(reference, table, strict=False)) if ours != theirs),
        min(len(reference), len(table)),
    )
    here = table[place] if place < len(table) else ""
    there = reference[place] if place < len(reference) else "nothing more"
    ours, theirs = ({line.split()[0] for line in lines[place:]} for lines in (reference, table))
    if place >= len(table):
        difference = f"rank {rank} lacks {there}, which rank 0 has"
    elif here not in reference and (there in table or here.split()[0] not in ours):
        difference = f"rank {rank} has {here}, which rank 0 lacks"
    elif there not in table and (here in reference or there.split()[0] not in theirs):
        difference = f"rank {rank} lacks {there}, which rank 0 has"
    else:
        difference = f"rank {rank} has {here} where rank 0 has {there}"
    also = f" (so do ranks {others[1:]}, there or elsewhere)" if others[1:] else ""
    advice = (
        "Build the same module with the same options and hooks on every rank: parameters of the same names, order, "
        "shapes, dtypes and memory formats."
    )
    if _NOW in difference:
        advice = (
            "Each rank has trained its own shards with its own numbers for some steps: let schedulers do the same on "
            "every rank, and load a checkpoint if that matters."
        )
    return DisagreementError(f"rank {rank} differs from rank 0{also}: {difference}. {advice}")


def _out_of_step(places: Sequence[str]) -> DisagreementError:
    by_rank = ", ".join(f"rank {rank} is at {place}" for rank, place in enumerate(places))
    compares = any(COMPARE in place for place in places)
    calls = "Register a compressor, and make, save or load a DistributedOptimizer, on all ranks together. "
    together = calls if compares else ""
    error = DisagreementError(
        f"the ranks have run different numbers of synchronized backwards: {by_rank} (steps are counted since the last "
        f"failure). {together}A rank that skips a backward, or goes on after its loss raised above the outputs of the "
        "module, must call model.finish_grad_sync() in that step. All ranks go on with their next step"
    )
    error.is_of_places = True
    return error
