"""A model of one training step over nodes: latencies and bandwidths go in, seconds come out. Pure.

    forward | backward: gradients, packed and summed in the node | waiting | spread    what a rank does
            | mask ------->                                      | vote ->             the small messages
                           | piece 0 -----> | piece 1 -----> | ...                     between the nodes

An all-reduce of n bytes takes alpha + beta n in the memory of a node. Between N nodes a ring, as gloo's, takes
2 (N - 1) rounds and 2 (N - 1) / N n bytes on every link; recursive doubling, as in MPICH, log2 N rounds of n bytes, and
two more where N is no power of two. No bucket goes before the mask is known, which is noticed when the next gradient
arrives, and no more than two pieces are under way at a time. MPI moves what is under way only while it is called:
nothing much during backward.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ppe_ddp.backends.shm import ShmOptions

_HEADER_BYTES = 32  # of the mask: two digests
_UNDER_WAY = 2  # all-reduces that gloo's threads work on at a time


@dataclass(frozen=True)
class Constants:
    """What is measured.

    Attributes:
        node_latency: Seconds of the smallest all-reduce among the ranks of a node.
        node_per_byte: Seconds that each further byte adds there.
        wire_latency: Seconds of one round between nodes.
        wire_per_byte: Seconds that a byte takes on a node's link.
        pack_per_byte: Seconds that a rank needs to copy a byte of gradients into a bucket.
        algorithm: Between the nodes: ``"ring"`` as in gloo, which has threads; ``"doubling"`` as in MPI.
    """

    node_latency: float
    node_per_byte: float
    wire_latency: float
    wire_per_byte: float
    pack_per_byte: float = 0.0
    algorithm: Literal["ring", "doubling"] = "ring"

    def rounds(self, nodes: int) -> int:
        """How often an all-reduce waits for a message from another node."""
        if self.algorithm == "ring":
            return 2 * (nodes - 1)
        powers = nodes.bit_length() - 1
        return powers if nodes == 1 << powers else powers + 2

    def volume(self, nodes: int) -> float:
        """How often the bytes of an all-reduce go over the link of a node, in each direction."""
        return 2 * (nodes - 1) / nodes if self.algorithm == "ring" else float(self.rounds(nodes))


@dataclass(frozen=True)
class Cluster:
    """Nodes with as many ranks each; flat where these send to one another in one ring instead of in two levels."""

    nodes: int
    ranks: int
    is_flat: bool = False

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.nodes * self.ranks


@dataclass(frozen=True)
class Load:
    """One step of a model whose gradients come evenly during backward.

    Attributes:
        nbytes: Of the gradients that exist on some rank.
        parameters: Of the model, all of one size.
        forward: Seconds.
        backward: Seconds.
        bucket_bytes: The size of a bucket.
        piece_bytes: What is larger goes through shared memory in pieces of this size.
    """

    nbytes: int
    parameters: int
    forward: float
    backward: float
    bucket_bytes: int = 4 << 20
    piece_bytes: int = 4 << 20


class PredictedStep(NamedTuple):
    """What comes out, in seconds.

    Attributes:
        step: From the begin of forward to the last average.
        exposed: What the step takes beyond forward and backward.
        mask: From the begin of backward until the mask has arrived.
        mask_delay: How long the first bucket was complete before that was noticed.
    """

    step: float
    exposed: float
    mask: float
    mask_delay: float


def mask_seconds(load: Load, cluster: Cluster, constants: Constants) -> float:
    """The time of the mask, or of the vote: in two levels only where one ring would have too many rounds.

    Over gloo few ranks send it from each to each at once, in one round.
    """
    ranks = cluster.world_size
    nbytes = _HEADER_BYTES + load.parameters + ranks
    if ranks == 1:
        return 0.0
    is_ring = constants.algorithm == "ring"
    if cluster.nodes > 1 and is_ring and nbytes <= ShmOptions().for_control().direct_up_to(ranks):
        return constants.wire_latency
    in_levels = cluster.nodes == 1 or (is_ring and ShmOptions().two_levels_from(ranks) == 0)
    return all_reduce_seconds(nbytes, cluster if in_levels else replace(cluster, is_flat=True), constants)


def all_reduce_seconds(nbytes: float, cluster: Cluster, constants: Constants) -> float:
    """The time of one all-reduce that nothing else is beside."""
    return _in_node(nbytes, cluster, constants) + _latency(cluster, constants) + _on_wire(nbytes, cluster, constants)


def predict(load: Load, cluster: Cluster, constants: Constants) -> PredictedStep:
    """The times of one step."""
    mask = mask_seconds(load, cluster, constants)
    now = load.forward  # on the rank's own thread
    known = now + (noticed(mask, load) if mask < load.backward else mask)
    first_ready = now + load.backward * min(1.0, load.bucket_bytes / load.nbytes)
    moves_during_backward = constants.algorithm == "ring"
    wire = _Wire(cluster, constants, 0.0 if moves_during_backward else load.forward + load.backward)
    waiting: list[int] = []
    for nbytes in _parts(load.nbytes, load.bucket_bytes):
        now += load.backward * nbytes / load.nbytes
        waiting.append(nbytes)
        if now >= known:
            now = _launch(waiting, now, load, wire)
    if waiting:
        now = _launch(waiting, max(now, known), load, wire)
    last = min(load.bucket_bytes, load.piece_bytes, load.nbytes)
    over = max(wire.arrivals, default=0.0)
    arrived = over + _in_node(last, cluster, constants) / 2 if over else now
    end = max(now, arrived, now + mask)  # the vote is sent beside the last bucket
    return PredictedStep(end, end - load.forward - load.backward, mask, max(0.0, known - first_ready))


def noticed(mask: float, load: Load) -> float:
    """When a mask that takes so long is noticed, from the begin of backward: when the next gradient arrives."""
    interval = load.backward / load.parameters
    return math.ceil(mask / interval) * interval if interval else mask


class _Wire:
    """The links between the nodes, which all carry the same: when the last byte has left, and what arrives when."""

    def __init__(self, cluster: Cluster, constants: Constants, begin: float) -> None:
        self.cluster, self.constants, self._free = cluster, constants, begin
        self.arrivals: list[float] = []

    def send(self, nbytes: int, now: float) -> None:
        """One more piece may go from ``now`` on."""
        if self.cluster.nodes == 1:
            return
        earlier = sorted(self.arrivals)[-_UNDER_WAY] if len(self.arrivals) >= _UNDER_WAY else 0.0
        start = max(now, earlier)
        self._free = max(start, self._free) + _on_wire(nbytes, self.cluster, self.constants)
        self.arrivals.append(max(self._free, start) + _latency(self.cluster, self.constants))


def _launch(waiting: list[int], now: float, load: Load, wire: _Wire) -> float:
    """Launch the buckets that wait; when the rank has done its part."""
    for nbytes in waiting:
        now += nbytes * wire.constants.pack_per_byte
        for piece in _parts(nbytes, load.piece_bytes):
            now += _in_node(piece, wire.cluster, wire.constants)
            wire.send(piece, now)
    waiting.clear()
    return now


def _parts(nbytes: int, size: int) -> Iterator[int]:
    for start in range(0, nbytes, size):
        yield min(size, nbytes - start)


def _in_node(nbytes: float, cluster: Cluster, constants: Constants) -> float:
    if cluster.ranks == 1 or (cluster.is_flat and cluster.nodes > 1):
        return 0.0
    return constants.node_latency + nbytes * constants.node_per_byte


def _members(cluster: Cluster) -> int:
    """How many take part between the nodes; volume and rounds of one alone are nothing."""
    return 1 if cluster.nodes == 1 else cluster.world_size if cluster.is_flat else cluster.nodes


def _latency(cluster: Cluster, constants: Constants) -> float:
    return constants.rounds(_members(cluster)) * constants.wire_latency


def _on_wire(nbytes: float, cluster: Cluster, constants: Constants) -> float:
    return constants.volume(_members(cluster)) * nbytes * constants.wire_per_byte
