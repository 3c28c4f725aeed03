"""Negotiation: all ranks train the same model, and agree on which gradients exist, their order, and sizes of buckets.

The size is chosen after some steps where the user names none, by what was measured until then:

    each step        how long backward was, and how many bytes were sent
    the last one     all-reduces of two sizes: the latency and the speed of the group
                     one small exchange: the largest of each number over the ranks
    from the next    the size with which a step is shortest, by a model of it: the same on every rank

After a failure the ranks start over with the default, and measure again.
"""

from __future__ import annotations

import os
import statistics
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from time import perf_counter_ns, process_time_ns, thread_time_ns
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed as dist

from ppe_ddp.backends.json_collectives import all_gather_json
from ppe_ddp.contracts import probe
from ppe_ddp.engine.mask_exchange import DIGEST, MaskExchange, MaskExchanger, ranks_named, with_complement
from ppe_ddp.engine.memory import allocator
from ppe_ddp.engine.peer_processes import Activity
from ppe_ddp.engine.plan import Planner, fingerprint
from ppe_ddp.errors import DisagreementError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from ppe_ddp.engine.completion import ResultSteps, Steps
    from ppe_ddp.engine.groups import Groups
    from ppe_ddp.engine.module import ModuleState
    from ppe_ddp.engine.plan import NodeMasks, Packing
    from ppe_ddp.engine.record import Recorder


MEASURED_STEPS = 10
_FIRST_STEPS = 5  # which make buckets and learn orders
_SIZES = tuple(1 << power for power in range(19, 26))  # 0.5 to 32 MiB
_SMALL, _LARGE = 1 << 10, 1 << 20
_TRIALS = 4  # of each size, of which the first brings the ranks together
_HOST_SECONDS = 150e-6  # for one more bucket: launching it, waiting for it, handing it over
_UNDER_WAY = 2  # at a time: gloo has two threads
_GAIN = 0.02  # of a step: what is less is noise
_SAME = 1.005  # of two sizes with steps of the same length the larger has fewer messages
_CPU = torch.device("cpu")
_COMPARISON = "a comparison of parameters"
_MAX = dist.ReduceOp.MAX


def all_reduced(
    tensor: Tensor, groups: Groups, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, group: ProcessGroup | None = None
) -> Steps:
    """All-reduce a tensor on the CPU in place, in ``group``, which is the control group if None; as steps."""
    work = dist.all_reduce(tensor, op, group=group or groups.control, async_op=True)
    yield probe(work)
    groups.failures.wait(work, _CPU)


@dataclass(frozen=True)
class MeasuredSpeed:
    """What the ranks have measured, the slowest of them."""

    backward: float  # seconds of a backward
    nbytes: int  # of its gradients
    latency: float  # seconds of an all-reduce of next to nothing
    per_byte: float  # seconds that each further byte adds
    # How long an all-reduce beside a backward keeps it waiting for a core, on which the transport's threads run; zero
    # where there are more cores than the ranks compute on.
    taken: float = 0.0
    taken_per_byte: float = 0.0

    def step_seconds(self, bucket_bytes: int) -> float:
        """From the begin of backward to the last average, with buckets of this size."""
        count = max(1, -(-self.nbytes // bucket_bytes))
        sent, arrivals = 0.0, [0.0] * _UNDER_WAY
        taken = self.taken + self.nbytes / count * self.taken_per_byte
        for k in range(1, count + 1):
            ready = self.backward * k / count + _HOST_SECONDS * k + taken * (k - 1)
            sent = max(ready, sent, arrivals[-_UNDER_WAY]) + self.nbytes / count * self.per_byte
            arrivals.append(sent + self.latency)
        return arrivals[-1]

    def best_bucket_bytes(self, default: int) -> int:
        """The size with which a step is shortest; ``default`` where that gains next to nothing."""
        seconds = {size: self.step_seconds(size) for size in _SIZES}
        shortest = min(seconds.values())
        if shortest >= (1 - _GAIN) * self.step_seconds(default):
            return default
        return max(size for size in _SIZES if seconds[size] <= _SAME * shortest)


class BucketSizeMeasurement:
    """Measures the first steps of a wrapper; all ranks make the same calls in the same steps."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._backwards: list[tuple[int, int]] = []
        self.speed: MeasuredSpeed | None = None  # what was measured, the same on every rank; None before
        self.count = 0  # the number of steps that were noted

    def after_step(self, recorder: Recorder) -> Steps:
        """Note one step; after the last of them measure the group, and agree. Every rank must run it to its end."""
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
        agreed.copy_(torch.tensor(found))
        yield from all_reduced(agreed, self._groups, _MAX)
        backward, nbytes, small, small_taken, large, large_taken = agreed.tolist()
        per_byte, taken_per_byte = (
            max(0, more - less) / 1e9 / (_LARGE - _SMALL) for more, less in ((large, small), (large_taken, small_taken))
        )
        self.speed = MeasuredSpeed(backward / 1e9, nbytes, small / 1e9, per_byte, small_taken / 1e9, taken_per_byte)
        recorder.control_nbytes += _TRIALS * (_SMALL + _LARGE) + agreed.nbytes

    def _cores_are_busy(self) -> bool:
        """Whether the ranks of this node compute on all of its cores."""
        ranks = 1 + len(self._groups.processes.on_this_node)
        return ranks * torch.get_num_threads() >= len(os.sched_getaffinity(0))


def _by_other_threads_ns() -> int:
    """How long other threads of this process than this one have computed."""
    return process_time_ns() - thread_time_ns()


_POSITIONS = 1_000_000
_NOTHING: Mapping[str, bytes] = MappingProxyType({})


class Agreement(NamedTuple):
    """What all ranks know after an exchange."""

    mask: bytes  # one byte a parameter: whether some rank has its gradient
    statuses: bytes  # one byte a rank: in a mask, whether it contributes
    nodes: bytes  # for each parameter 1 + the only node that has its gradient, else 0; empty where nobody asks for it
    writers: bytes = b""  # the maxima of what was given for them
    apart: bytes = b""  # of a mask: what all ranks end together with it (``completion.py``)
    weights: bytes = b""  # of a mask: what the ranks have said of their gradients' weights
    users: bytes = b""  # of a vote: which ranks had the gradients that are averaged where they are used
    times: bytes = b""  # of a vote: how long each rank took for the step
    parameters: bytes = b""  # of a vote: whether all have the same of some parameters
    missing: bytes = b""  # of a vote: whether a gradient that some rank has announced has not come there

    def senders(self, second: bytes) -> list[int]:
        """The rank that sends each submodule's buffers, by the digits in the mask and the ``second`` in the vote.

        The lowest that has written any of them; where none has, the first that contributes.
        """
        return ranks_named(self.writers, second, max(self.statuses.find(1), 0))


class Negotiation:
    """Holds what must be the same on every rank, and finds out by mask exchanges which gradients exist on any rank.

    If ranks do not ``negotiate``, a difference of their gradients is an error. Buffers must agree as well,
    ``with_buffers``, where they are broadcast; and so must ``options``, a text for error messages.
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
        self._buffer_lines: list[str] = []
        self._count = 0
        self._learned: tuple[object, ...] = ()  # what this rank has learned ...
        self._learned_field = b""  # ... and its digest
        self._before, self._after = bytes(groups.rank), bytes(groups.world_size - groups.rank - 1)  # a byte a rank
        self._generation = groups.generation
        self.node_masks: NodeMasks | None = None
        """Finds out on which node each gradient exists; None where that does not matter. The same on all ranks."""

    def use_module(self, module_state: ModuleState) -> None:
        """Negotiate on the parameters of ``module_state`` from now on; what was learned of the same ones stays."""
        self._module_state = module_state
        if self.planner.specs != tuple(module_state.specs):
            self.planner = Planner(module_state.specs, self._packing)
        self._digest = fingerprint(self._lines())

    def repack(self, packing: Packing) -> None:
        """Pack buckets by ``packing`` from now on."""
        self._default = packing
        self._repack(packing)
        self._digest = fingerprint(self._lines())

    def _repack(self, packing: Packing) -> None:
        self._packing = packing
        self.planner.repack(packing)

    def use_plug(self, what: str, *titles: str) -> None:
        """Hold the ranks to have the same plugged in or set up, from the next exchange on.

        ``what`` says what it does, as in ``"gradients averaged by"``, and ``titles`` what it is, a line each; none for
        what the ranks need not have in common.
        """
        self._plugs[what] = titles
        self._digest = fingerprint(self._lines())

    def check(self) -> None:
        """Compare parameters, buffers and options across the ranks, which must all call this.

        Raises:
            DisagreementError: On every rank, with the same text, naming the first that differs; or that other ranks
                are in a synchronized backward, which this one is behind with.
            ValueError: On every rank, if one has a tensor that cannot be written; names those of the first.
        """
        place = f"{_COMPARISON} after step {self._groups.step}"
        lines = [place, *self._lines(), *_buffer_lines(self._module_state.buffers())]
        expanded = self._module_state.expanded()
        fields = {"expanded": bytes([bool(expanded)])}
        if self._groups.is_closed or self._generation != self._groups.generation:
            self._restart()  # ranks that have failed may have learned other lengths
        agreement = MaskExchange(self._exchanger, fingerprint(lines), fields).result()
        if not agreement.same:
            error = _disagreement(lines, self._groups)
            if error.is_of_places:  # the others are in a backward, and make new connections after such an error
                self._groups.fail(error, "")
            raise error
        if any(agreement.fields["expanded"]):
            tables = all_gather_json(expanded, self._groups.control)
            rank, first = next((rank, table) for rank, table in enumerate(tables) if table)
            raise ValueError(
                f"rank {rank}: several elements of {', '.join(first)} are one place in memory (stride 0), so that the "
                "values of rank 0 cannot be written there: give it memory of its own, as .clone() of .expand() does"
            )

    def buffers(self) -> dict[str, Tensor]:
        """The module's buffers by name, if the ranks must agree on them; else none."""
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
        """Start to find out which gradients exist on any rank, and each rank's ``status`` (``mask_exchange.py``).

        Args:
            local: One byte a parameter: whether this rank has the gradient.
            status: A byte of this rank's, which all ranks get.
            buffers: What :meth:`buffers` gives now.
            is_vote: Whether this is the second message of a step: ranks may have different gradients in it even
                where they do not negotiate.
            said: Further fields, by name, of which all ranks get the maximum.
            own: Further fields of which all ranks get what each rank has said.
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
        # Where all ranks are to have the same gradients, they are held to it: a transport that gets buckets of
        # different sizes may end the process.
        same = "" if is_vote or self._negotiate else local.hex()
        digest = blake2b(f"{self._place} {same}".encode(), digest_size=DIGEST, key=self._digest).digest()
        fields = {"present": bytes(local)}
        if self.node_masks is not None:
            fields["present"], fields["nodes"] = self.node_masks.written(local)
        fields |= said
        if not is_vote:
            fields["learned"] = self._digest_of_learned()
        # What is told of each rank lies between zeros for the others: the maxima are what all have said.
        for name, field in {"statuses": bytes([status]), **own}.items():
            fields[name] = len(field) * self._before + field + len(field) * self._after
        return MaskExchange(self._exchanger, digest, fields)

    def _restart(self) -> None:
        """Start over with new connections: after a failure only some ranks may have learned something."""
        self._generation = self._groups.generation
        self._exchanger = MaskExchanger(self._groups)
        self._forget()

    def _digest_of_learned(self) -> bytes:
        """Of what this rank has learned, on which plans and what is learned next depend; the same in most steps."""
        packing, missed = self._packing, self._groups.step - self._count
        learned = self.planner.learned_digest, missed, packing.bucket_bytes, packing.measured, self._bucket_size.count
        if learned != self._learned:
            self._learned, self._learned_field = learned, with_complement(fingerprint([repr(learned)]))
        return self._learned_field

    def _forget(self) -> None:
        """Start over without what was learned, the order of arrival and the bucket size; all ranks do so together."""
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
            raise _disagreement([self._place, *self._lines(local)], self._groups)
        fields, nodes = dict(agreed.fields), b""
        if fields.pop("learned", None) != exchange.fields.get("learned"):
            self._forget()  # one rank alone has listed its module anew, or loaded an order
        mask = fields.pop("present")
        if self.node_masks is not None:
            specs = self._module_state.specs
            sizes = [spec.nbytes if spec.device.type == "cpu" and not spec.sparse else 0 for spec in specs]
            mask, nodes = self.node_masks.read(mask, fields.pop("nodes"), sizes)
        return Agreement(mask, nodes=nodes, **fields)

    def agree_held(self, held: Collection[int]) -> ResultSteps[bytes]:
        """One byte a parameter: whether any rank has ``held`` its gradient in this step. All ranks call it together."""
        mask = allocator(self._groups.control)(len(self._module_state.specs), torch.uint8, _CPU).zero_()
        mask[list(held)] = 1
        yield from all_reduced(mask, self._groups, _MAX)
        return bytes(mask.tolist())

    def learn(self, arrivals: Sequence[int], recorder: Recorder) -> Steps:
        """Learn from a backward how to make buckets in later ones; all ranks must do so after every backward."""
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
        """Learn in which order gradients arrive, while some are new."""
        count = len(self._module_state.specs)
        if self._groups.world_size == 1 or not self.planner.has_unlearned(recorder.agreed):
            return
        # In memory that the transport prefers: others may block where they are given any other.
        sums = allocator(self._groups.control)(2 * count, torch.int64, torch.device("cpu")).zero_().view(2, count)
        for place, i in enumerate(dict.fromkeys(arrivals)):
            sums[0, i] = place * _POSITIONS // count
            sums[1, i] = 1
        yield from all_reduced(sums, self._groups)
        places, seen = sums.tolist()
        self.planner.learn([place / (n * _POSITIONS) if n else None for place, n in zip(places, seen, strict=True)])
        recorder.control_nbytes += sums.nbytes

    def order_state(self) -> dict[str, Any]:
        """The order of arrival as learned so far, by names; nothing of it where the ranks are to connect again."""
        if self._groups.is_closed:
            self._forget()
        names = self._module_state.names
        return {
            "order": [names[i] for i in self.planner.order],
            "learned": [names[i] for i in self.planner.learned],
            "count": self._count,
            "bucket_bytes": None if self._packing == self._default else self._packing.bucket_bytes,
        }

    def load_order_state(self, state: Mapping[str, Any]) -> None:
        """Plan buckets by an order that :meth:`order_state` gave, if every rank loads the same; else all begin anew.

        Parameters that it does not have come last.
        """
        index = {name: i for i, name in enumerate(self._module_state.names)}
        learned = [index[name] for name in state["learned"] if name in index]
        order = [index.pop(name) for name in state["order"] if name in index]
        self.planner.restore([*order, *index.values()], learned)
        self._count = int(state["count"])
        chosen = state.get("bucket_bytes")
        if chosen is not None and self._packing.measured:
            self._packing = replace(self._packing, bucket_bytes=chosen, measured=False)
        self._repack(self._packing)

    def _lines(self, local: bytes | bytearray = b"") -> list[str]:
        """What all ranks must agree on, a line each."""
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
        lines.extend(self._buffer_lines)
        if not self._negotiate:
            lines.extend(
                f"{'a' if here else 'no'} gradient of {spec.name!r} (negotiate_grads=False)"
                for spec, here in zip(self._module_state.specs, local, strict=False)
            )
        return lines


def _buffer_lines(buffers: Mapping[str, Tensor]) -> list[str]:
    return [f"buffer {name!r} {buffer.dtype} {tuple(buffer.shape)}" for name, buffer in buffers.items()]


def _disagreement(lines: Sequence[str], groups: Groups) -> DisagreementError:
    """The error that names the ranks that differ from rank 0, and the first difference of their lines. Collective."""
    tables: list[list[str]] = all_gather_json(list(lines), groups.control)
    with suppress(RuntimeError):  # who leaves first may give the group up, while another still waits for its table
        dist.barrier(groups.control)
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
    here = table[place] if place < len(table) else "nothing more"
    there = reference[place] if place < len(reference) else "nothing more"
    ours, theirs = ({line.split()[0] for line in lines[place:]} for lines in (reference, table))
    if here not in reference and (there in table or here.split()[0] not in ours):
        difference = f"rank {rank} has {here}, which rank 0 lacks"
    elif there not in table and (here in reference or there.split()[0] not in theirs):
        difference = f"rank {rank} lacks {there}, which rank 0 has"
    else:
        difference = f"rank {rank} has {here} where rank 0 has {there}"
    also = f" (so do ranks {others[1:]}, there or elsewhere)" if others[1:] else ""
    return DisagreementError(
        f"rank {rank} differs from rank 0{also}: {difference}. Build the same module with the same options and hooks "
        "on every rank: parameters of the same names, order, shapes, dtypes and memory formats."
    )


def _out_of_step(places: Sequence[str]) -> DisagreementError:
    by_rank = ", ".join(f"rank {rank} is at {place}" for rank, place in enumerate(places))
    compares = any(_COMPARISON in place for place in places)
    together = "Register a compressor, or make a DistributedOptimizer, on all ranks together. " if compares else ""
    error = DisagreementError(
        f"the ranks have run different numbers of synchronized backwards: {by_rank} (steps are counted since the last "
        f"failure). {together}A rank that skips a backward, or goes on after its loss raised above the outputs of the "
        "module, must call model.finish_grad_sync() in that step. All ranks go on with their next step"
    )
    error.is_of_places = True
    return error
