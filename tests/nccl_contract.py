"""Checks what the backend expects of `cupy.cuda.nccl`: of the stand-in on CPUs, and of CuPy's on GPUs.

The same calls are made of both, on one rank, and what the backend asks of a library can be recorded, to compare what it
asks of the one with what it asks of the other.
"""

import pytest
import torch

ID_BYTES = 128
ADDRESSES = {"allReduce": 2, "reduce": 2, "broadcast": 2, "reduceScatter": 2, "allGather": 2, "send": 1, "recv": 1}


class CallRecorder:
    """A library that notes the calls of its communicators: names and arguments, but for addresses and streams."""

    def __init__(self, library):
        self._library = library
        self.calls = []

    def __getattr__(self, name):
        return getattr(self._library, name)

    def groupStart(self):
        self.calls.append(("groupStart",))
        self._library.groupStart()

    def groupEnd(self):
        self.calls.append(("groupEnd",))
        self._library.groupEnd()

    def NcclCommunicator(self, *arguments):
        return RecordedCommunicator(self._library.NcclCommunicator(*arguments), self.calls)


class RecordedCommunicator:
    def __init__(self, communicator, calls):
        self._communicator = communicator
        self._calls = calls

    def __getattr__(self, name):
        method = getattr(self._communicator, name)
        if name not in ADDRESSES:
            return method

        def call(*arguments):
            self._calls.append((name, *arguments[ADDRESSES[name] : -1]))
            method(*arguments)

        return call


def check_library(library, device, stream, synchronize):
    """The places of arguments, the numbers of datatypes and operations, ids, errors, and the end of a communicator.

    Args:
        library: `cupy.cuda.nccl`, or the stand-in.
        device: Of tensors.
        stream: The address of the stream that is to do it.
        synchronize: Waits for the device.
    """
    assert isinstance(library.get_version(), int)
    unique_id = library.get_unique_id()
    assert isinstance(unique_id, bytes | tuple)
    assert len(unique_id) == ID_BYTES
    communicator = library.NcclCommunicator(1, unique_id, 0)
    assert (communicator.size(), communicator.rank_id()) == (1, 0)
    source = torch.arange(5).to(device, torch.bfloat16)
    target = torch.zeros(5, dtype=torch.bfloat16, device=device)
    addresses = source.data_ptr(), target.data_ptr()

    def arrives(what):
        synchronize()
        assert torch.equal(source, target), what
        target.zero_()
        synchronize()

    synchronize()
    for name, arguments in {
        "allReduce": (5, 9, 4),
        "reduce": (5, 9, 0, 0),
        "broadcast": (10, 1, 0),
        "reduceScatter": (5, 9, 0),
        "allGather": (10, 1),
    }.items():
        getattr(communicator, name)(*addresses, *arguments, stream)
        arrives(name)
    library.groupStart()
    communicator.send(addresses[0], 10, 1, 0, stream)
    communicator.recv(addresses[1], 10, 1, 0, stream)
    library.groupEnd()
    arrives("send and recv")
    # Nothing that follows is spoilt by an error.
    with pytest.raises(library.NcclError):
        communicator.allReduce(*addresses, 5, 99, 0, stream)
    communicator.check_async_error()
    communicator.allReduce(*addresses, 5, 9, 0, stream)
    arrives("allReduce after an error")
    communicator.destroy()
    communicator.abort()
    for call in (communicator.check_async_error, lambda: communicator.allReduce(*addresses, 5, 9, 0, stream)):
        with pytest.raises(library.NcclError):
            call()
