"""Backends with known defects, for tests of `python -m ppe_ddp doctor`."""

import threading

import torch.distributed as dist
from torch.distributed import Backend, ProcessGroup, ProcessGroupGloo


class _OverGloo(ProcessGroup):
    """A process group over gloo, of which subclasses change the all-reduces."""

    def __init__(self, arguments, spoil):
        super().__init__(arguments.group_rank, arguments.group_size)
        self._store = arguments.store
        self._gloo = ProcessGroupGloo(
            arguments.store, arguments.group_rank, arguments.group_size, timeout=arguments.timeout
        )
        self._spoil = spoil
        self._name = arguments.group_id

    def allreduce(self, tensors, opts=None, timeout=None):
        opts = opts or dist.AllreduceOptions()
        work = self._gloo.allreduce(tensors, opts)
        work.wait()
        self._spoil(tensors[0], opts)
        return work

    def broadcast(self, tensors, opts=None, timeout=None):
        return self._gloo.broadcast(tensors, opts)

    def allgather(self, outputs, inputs, opts=None):
        return self._gloo.allgather(outputs, inputs)

    def all_gather_single(self, output, tensor, timeout=None):  # how torch 2.15 gathers objects
        return self._gloo.allgather([list(output.chunk(self.size()))], [tensor])

    def barrier(self, opts=None, timeout=None):
        return self._gloo.barrier()

    def getBackendName(self):
        return "broken"

    def getGroupName(self):
        return self._name

    def setGroupName(self, name):
        self._name = name

    def get_group_store(self):
        return self._store


def register_wrong():
    def spoil(tensor, opts):
        if opts.reduceOp == dist.ReduceOp.SUM and tensor.is_floating_point():
            tensor.mul_(1.5)

    _register("wrong", spoil)


def register_hanging():
    def spoil(tensor, opts):
        if dist.get_rank() == 1:
            threading.Event().wait()

    _register("hanging", spoil)


def _register(name, spoil):
    Backend.register_backend(name, lambda arguments, _: _OverGloo(arguments, spoil), extended_api=True, devices=["cpu"])


NOT_A_FUNCTION = 3
