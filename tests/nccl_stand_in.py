"""A stand-in for `cupy.cuda.nccl` and for CUDA, on CPU memory: it computes, and records what it was asked.

A communicator reads and writes the addresses that it is given and communicates over gloo with its peers, which it
meets by way of the unique id alone. Within a group of calls nothing happens before the group's end, as with NCCL.
`StandInDevice` has streams that note who waited for whom. tests/test_gpu.py holds the stand-in and the real library
to the same.
"""

import contextlib
import ctypes
import os
import tempfile
import threading
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed import Backend, FileStore, ProcessGroupGloo

from ppe_ddp.backends.cupy_nccl.nccl_group import NcclGroup
from ppe_ddp.backends.device_routed_group import DeviceRoutedGroup, gloo_beside
from ppe_ddp.backends.rank_store import WrittenKeys
from ppe_ddp.nested_tensors import tensors_in

DTYPES = {
    0: torch.int8,
    1: torch.uint8,
    2: torch.int32,
    3: torch.uint32,
    4: torch.int64,
    5: torch.uint64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    9: torch.bfloat16,
    10: torch.float8_e4m3fn,
    11: torch.float8_e5m2,
}
SUM, PRODUCT, MAX, MIN, AVERAGE = range(5)
INTERNAL_ERROR, INVALID_ARGUMENT = 3, 4
ID_BYTES = 128
TIMEOUT = timedelta(seconds=30)


class NcclError(RuntimeError):
    """As CuPy's: made of a number."""

    def __init__(self, status):
        super().__init__(f"NCCL_ERROR: number {status}")


def memory(address, count, datatype):
    """The numbers at an address, as a tensor that shares them."""
    dtype = DTYPES[datatype]
    content = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(content, dtype=torch.uint8).view(dtype)


def wide(tensor):
    return tensor.double() if tensor.is_floating_point() else tensor.to(torch.int64)


def fold(parts, op):
    total = wide(parts[0])
    for part in map(wide, parts[1:]):
        if op in (SUM, AVERAGE):
            total = total + part
        else:
            total = {PRODUCT: torch.mul, MAX: torch.maximum, MIN: torch.minimum}[op](total, part)
    if op == AVERAGE:
        total = total.div(len(parts), rounding_mode=None if total.is_floating_point() else "trunc")
    dtype = parts[0].dtype
    # As NCCL has it: halves are added up in float32.
    return (total.float() if dtype.is_floating_point and dtype.itemsize < 4 else total).to(dtype)


class StandInLibrary:
    """What has the names of the module `cupy.cuda.nccl`.

    Args:
        version: That it tells; ids are tuples of numbers as in CuPy 13 for an odd one, else bytes.
    """

    NcclError = NcclError
    available = True

    def __init__(self, version=22900):
        self.version = version
        self.calls = []  # (name, communicator's size, stream), and "groupStart", "groupEnd"
        self.depth = 0
        self.waiting = []  # (whether it receives, what it does)
        self.broken = None  # the number that check_async_error fails with
        self.hangs = False  # whether a call waits in NCCL for another rank, until it is broken off

    def get_version(self):
        return self.version

    def get_unique_id(self):
        handle, name = tempfile.mkstemp(prefix="nccl_stand_in_")
        os.close(handle)
        os.unlink(name)
        content = name.encode().ljust(ID_BYTES, b"\0")
        # Signed, with numbers over 127 in it.
        return (*content[:-1], -1) if self.version % 2 else content[:-1] + b"\xff"

    def NcclCommunicator(self, ndev, commId, rank):
        assert self.depth == 0, "a communicator is made inside a group"
        assert len(commId) == ID_BYTES
        assert commId[-1] in (-1, 255)
        if isinstance(commId, tuple):
            commId = bytes(number & 0xFF for number in commId)
        else:
            assert isinstance(commId, bytes)
        return StandInCommunicator(self, ndev, commId[:-1].rstrip(b"\0").decode(), rank)

    def groupStart(self):
        self.calls.append("groupStart")
        self.depth += 1

    def groupEnd(self):
        self.calls.append("groupEnd")
        self.depth -= 1
        if self.depth == 0:
            waiting, self.waiting = self.waiting, []
            # All sends are on their way before anybody waits, or two ranks would wait for each other.
            landings = [body() for _, body in sorted(waiting, key=lambda one: one[0])]
            for land in filter(None, landings):
                land()


class StandInCommunicator:
    def __init__(self, library, size, file, rank):
        self.library, self.size_, self.rank = library, size, rank
        self.state = "open"
        self.aborted = threading.Event()
        store = FileStore(file, size)
        self.gloo = ProcessGroupGloo(store, rank, size, timeout=TIMEOUT)

    def _do(self, name, datatype, stream, body, is_receive=False):
        """Call `body` now or at the end of the group; what it returns is called when the group's others have been."""
        if self.state != "open" or datatype not in DTYPES:
            raise NcclError(INVALID_ARGUMENT)
        if self.library.hangs and self.aborted.wait(TIMEOUT.total_seconds()):
            raise NcclError(INTERNAL_ERROR)
        self.library.calls.append((name, self.size_, stream))
        StandInDevice.check_running(stream)
        if self.library.depth:
            self.library.waiting.append((is_receive, body))
        else:
            landing = body()
            if landing is not None and is_receive:
                landing()
            elif landing is not None:
                # The host goes on; who waits for the stream waits for this.
                StandInDevice.streams[stream].events.append(landing)

    def _gathered(self, address, count, datatype):
        mine = memory(address, count, datatype).view(torch.uint8).clone()
        parts = [torch.empty_like(mine) for _ in range(self.size_)]
        self.gloo.allgather([parts], [mine]).wait()
        return [part.view(DTYPES[datatype]) for part in parts]

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
        def body():
            memory(recvbuf, count, datatype).copy_(fold(self._gathered(sendbuf, count, datatype), op))

        self._do("allReduce", datatype, stream, body)

    def reduce(self, sendbuf, recvbuf, count, datatype, op, root, stream):
        def body():
            result = fold(self._gathered(sendbuf, count, datatype), op)
            if self.rank == root:
                memory(recvbuf, count, datatype).copy_(result)

        self._do("reduce", datatype, stream, body)

    def broadcast(self, sendbuff, recvbuff, count, datatype, root, stream):
        def body():
            source = sendbuff if self.rank == root else recvbuff
            memory(recvbuff, count, datatype).copy_(self._gathered(source, count, datatype)[root])

        self._do("broadcast", datatype, stream, body)

    def reduceScatter(self, sendbuf, recvbuf, recvcount, datatype, op, stream):
        def body():
            parts = [
                part.chunk(self.size_)[self.rank] for part in self._gathered(sendbuf, recvcount * self.size_, datatype)
            ]
            memory(recvbuf, recvcount, datatype).copy_(fold(parts, op))

        self._do("reduceScatter", datatype, stream, body)

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):
        def body():
            memory(recvbuf, count * self.size_, datatype).copy_(torch.cat(self._gathered(sendbuf, count, datatype)))

        self._do("allGather", datatype, stream, body)

    def send(self, sendbuf, count, datatype, peer, stream):
        def body():
            if peer == self.rank:
                self.to_self = memory(sendbuf, count, datatype).clone()
                return None
            content = [memory(sendbuf, count, datatype).view(torch.uint8).clone()]
            work = self.gloo.send(content, peer, 0)
            return lambda: (work.wait(), content)

        self._do("send", datatype, stream, body)

    def recv(self, recvbuf, count, datatype, peer, stream):
        def body():
            if peer == self.rank:
                memory(recvbuf, count, datatype).copy_(self.to_self)
                return None
            work = self.gloo.recv([memory(recvbuf, count, datatype)], peer, 0)
            return lambda: work.wait()

        self._do("recv", datatype, stream, body, is_receive=True)

    def check_async_error(self):
        if self.state != "open":
            raise NcclError(INVALID_ARGUMENT)
        if self.library.broken is not None:
            raise NcclError(self.library.broken)

    def abort(self):
        self._end("aborted")
        self.aborted.set()

    def destroy(self):
        self._end("destroyed")

    def _end(self, state):
        # The second end of a communicator is none.
        self.state = state if self.state == "open" else self.state

    def rank_id(self):
        return self.rank

    def size(self):
        return self.size_


class StandInEvent:
    def __init__(self, stream):
        self.stream = stream

    def query(self):
        return not StandInDevice.stuck


class StandInStream:
    """Notes what happens in its order."""

    def __init__(self, name, number):
        self.name = name
        self.cuda_stream = number
        self.events = []

    def __repr__(self):
        return self.name

    def wait_event(self, event):
        StandInDevice.log.append((self.name, "waits for", event.stream.name))
        while event.stream.events:
            event.stream.events.pop(0)()

    def record_event(self):
        return StandInEvent(self)


class StandInDevice:
    """CPU memory in the place of CUDA's; one current stream, by the name of "user"."""

    log: ClassVar = []  # of all streams, in order
    stuck = False  # whether nothing ends any more
    capturing = False
    streams: ClassVar = {}
    now = StandInStream("user", 1)

    @classmethod
    def check_running(cls, number):
        assert number in cls.streams, f"{number} is not one of NCCL's streams"
        cls.log.append((cls.streams[number].name, "calls", "NCCL"))

    def current(self):
        return 0

    def make_current(self, index):
        return contextlib.nullcontext()

    def current_stream(self, index):
        return StandInDevice.now

    def make_stream(self, index):
        number = 100 + len(self.streams)
        self.streams[number] = StandInStream(f"nccl{len(self.streams)}", number)
        return self.streams[number]

    @contextlib.contextmanager
    def use_stream(self, stream):
        before, StandInDevice.now = StandInDevice.now, stream
        try:
            yield
        finally:
            StandInDevice.now = before

    def record_stream(self, tensor, stream):
        self.log.append((stream.name, "holds", tensor.numel()))

    def torch_device(self, index):
        return torch.device("cpu")

    def is_capturing(self):
        return self.capturing

    def future(self, index):
        return torch.futures.Future()


LIBRARY = StandInLibrary()


class _RoutedByDtype(DeviceRoutedGroup):
    def _group_for(self, arguments, name):
        is_int8 = any(tensor.dtype is torch.int8 for tensor in tensors_in(arguments))
        return self._group("beside") if is_int8 else super()._group_for(arguments, name)


def _make(arguments, options):
    # CPU tensors are in the place of CUDA's, and those of int8 in the place of the CPU's, which go to gloo.
    keys = WrittenKeys(arguments.store)
    return _RoutedByDtype(
        arguments,
        "cupy_stand_in",
        ("cpu",),
        made={"beside": gloo_beside(arguments, keys)},
        makers={"cpu": lambda: NcclGroup(arguments, LIBRARY, StandInDevice(), keys)},
        keys=keys,
    )


def register():
    """Make `cupy_stand_in` a backend: cupy_nccl over this library and device."""
    if "CUPY_STAND_IN" not in Backend._plugins:
        Backend.register_backend("cupy_stand_in", _make, extended_api=True, devices=["cpu"])


def nccl_group(group=None):
    """The group over the stand-in inside of torch's."""
    return (group or dist.group.WORLD)._group("cpu")
