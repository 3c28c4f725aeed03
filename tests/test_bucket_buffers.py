"""Buffers for buckets: reused when no tensor holds a part of them, and never before."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ppe_ddp.engine.bucket import concatenate
from ppe_ddp.engine.memory import BucketBuffers
from ppe_ddp.engine.plan import Packing, ParameterSpec, make_plan
from ppe_ddp.torch_internals import sole_owner
from rank_tests import on_two_ranks

CPU = torch.device("cpu")
SHAPES = [(3, 3), (5,), (2, 3, 2, 2)]


def members_of(bucket, *lists):
    return [[each[i] for i in bucket.members] for each in lists]


class World:
    """Parameters, their only bucket, and buffers that count what they allocate."""

    def __init__(self, shapes=SHAPES, dtype=torch.float32, *, is_row_major=True):
        self.parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
        if not is_row_major:
            self.parameters[-1].data = self.parameters[-1].data.to(memory_format=torch.channels_last)
        self.specs = [ParameterSpec(f"p{i}", tuple(p.shape), p.stride(), dtype, CPU) for i, p in self.numbered()]
        self.bucket = self.bucket_of(range(len(shapes)))
        self.sizes = []
        self.buffers = BucketBuffers(self._allocate)

    def numbered(self):
        return enumerate(self.parameters)

    def bucket_of(self, members):
        present = bytes(i in members for i in range(len(self.parameters)))
        (bucket,) = make_plan(present, self.specs, [*range(len(self.specs))], Packing(10**9, 10**9)).buckets
        return bucket

    def _allocate(self, numel, dtype, device):
        self.sizes.append(numel)
        return torch.empty(numel, dtype=dtype, device=device)

    def buffer(self, bucket=None):
        bucket = bucket or self.bucket
        return self.buffers.buffer(bucket, *members_of(bucket, self.specs, self.parameters))


@pytest.fixture
def world():
    return World()


def test_a_buffer_that_nobody_holds_is_given_out_again(world):
    first = world.buffer()
    assert first.is_free()
    assert world.buffer() is first
    assert len(world.sizes) == 1
    assert world.buffers.nbytes == 4 * world.sizes[0]
    other = world.buffer(world.bucket_of([1]))  # another bucket, laid out in the same memory
    assert other is first
    assert [slot.shape for slot in other.slots] == [(5,)]
    assert len(world.sizes) == 1


def hold_by_name(slot, parameter):
    return slot


def hold_a_view(slot, parameter):
    return slot.view(-1)[1:]


def hold_a_detached_one(slot, parameter):
    return slot.detach()


def hold_as_gradient(slot, parameter):
    parameter.grad = slot


def hold_in_a_graph(slot, parameter):
    return (parameter * slot).sum()  # autograd has saved it


@pytest.mark.parametrize("hold", [hold_by_name, hold_a_view, hold_a_detached_one, hold_as_gradient, hold_in_a_graph])
def test_a_buffer_is_left_alone_while_somebody_holds_a_slot(world, hold):
    buffer = world.buffer()
    held = hold(buffer.slots[1], world.parameters[1])
    assert not buffer.is_free()
    assert world.buffer() is not buffer
    assert world.buffer(world.bucket_of([0])) is not buffer
    del held
    world.parameters[1].grad = None
    assert buffer.is_free()
    assert buffer in (world.buffer(), world.buffer())


@on_two_ranks
def test_a_buffer_is_left_alone_while_a_message_that_was_given_up_may_write_into_it():
    world = World()
    buffer = world.buffer()
    if dist.get_rank() == 0:
        dist.all_reduce(buffer.flat, async_op=True)  # gloo alone holds it, without a reference of Python's
        assert not buffer.is_free()
    dist.barrier(dist.new_group())
    if dist.get_rank() == 1:
        dist.all_reduce(buffer.flat)
    dist.barrier()
    deadline = time.monotonic() + 10
    while not buffer.is_free() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert buffer.is_free()


@pytest.mark.parametrize(
    "change",
    [lambda slot: slot.resize_(1), lambda slot: slot.requires_grad_(), lambda slot: slot.t_()],
    ids=["resized", "requires grad", "turned"],
)
def test_a_slot_that_somebody_made_into_something_else_is_not_given_out(world, change):
    buffer = world.buffer()
    change(buffer.slots[0])
    assert not buffer.is_free()
    fresh = world.buffer()
    assert fresh is not buffer
    assert fresh.slots[0].shape == world.parameters[0].shape
    assert not fresh.slots[0].requires_grad


def test_what_was_not_used_since_the_last_trim_is_given_up(world):
    buffer = world.buffer()
    world.buffers.trim()
    assert world.buffers.nbytes == buffer.memory.nbytes
    gradients = list(buffer.slots)
    assert world.buffer() is not buffer  # in which gradients lie: also a use of it
    world.buffers.trim()
    assert world.buffers.nbytes == 2 * buffer.memory.nbytes
    world.buffers.trim()
    buffer.flat.fill_(3.0)
    world.buffers.trim()
    assert world.buffers.nbytes == 0
    world.buffer().flat.zero_()
    assert len(world.sizes) == 3
    assert all((gradient == 3.0).all() for gradient in gradients)  # it stays theirs


def test_sole_owner():
    tensor = torch.ones(4)
    other = tensor  # a second name, the same tensor
    assert sole_owner(other)
    view = tensor[1:]
    assert not sole_owner(tensor)
    assert not sole_owner(view)
    del view
    assert sole_owner(tensor)
    detached = tensor.detach()
    assert not sole_owner(tensor)
    del detached
    weight = torch.ones(2, requires_grad=True)
    result = tensor[:2] + weight  # needs nothing of the view in backward
    assert sole_owner(tensor)
    result = tensor[:2] * weight  # the view is gone, but not for autograd
    assert not sole_owner(tensor)
    del result
    assert sole_owner(tensor)


@pytest.mark.parametrize("is_first", [True, False])
def test_runs_are_the_places_of_gradients_that_one_call_concatenates(is_first):
    shapes = [(3, 2), (2,), (1, 2), (5,), (4, 2), (0, 2), (0,), (1,)]
    world = World(shapes if is_first else [*shapes, (3, 5)])
    if not is_first:
        world.buffer()  # of a plan that is another one
    bucket = world.bucket_of(range(len(shapes)))
    buffer = world.buffer(bucket)
    assert [count for count, _ in buffer.runs] == [4, 4]
    (gradients,) = members_of(bucket, [torch.randn(shape) for shape in shapes])
    gradients[0] = gradients[0].t().contiguous().t()  # in another memory format
    own = [slot.shape for slot in buffer.slots]
    assert concatenate(buffer.runs, own, gradients)
    for slot, gradient in zip(buffer.slots, gradients, strict=True):
        assert torch.equal(slot, gradient)
    assert not concatenate(buffer.runs, own, [None, *gradients[1:]])
    assert not concatenate(buffer.runs, own, [gradients[0][:1], *gradients[1:]])
    del buffer
    assert world.buffer(bucket).is_free()


def test_there_are_no_runs_where_a_copy_each_is_as_quick():
    assert World([(3, 2), (2,), (4, 3)]).buffer().runs == []
    assert World([()] * 9).buffer().runs == []
    assert World([(3, 2, 2, 2)] * 9, is_row_major=False).buffer().runs == []
