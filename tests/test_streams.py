"""CUDA streams: a read of gradients waits for every stream that they are computed on. On a stand-in of CUDA."""

import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from one_process import seeded
from ppe_ddp import DistributedDataParallel, UnusableError
from ppe_ddp.engine.gradients import Gradients, GradientStreams
from ppe_ddp.engine.module import ModuleState
from ppe_ddp.megatron import DistributedDataParallel as MegatronDDP
from ppe_ddp.megatron import DistributedDataParallelConfig
from rank_tests import on_two_ranks

CPU = torch.device("cpu")


class Stream:
    """Counts what it was given, and knows how far it has waited for others."""

    def __init__(self):
        self.given = 0
        self.behind = {self: 0}

    def wait_stream(self, other):
        self.behind[other] = other.given


class Machine:
    """One device whose current stream is what the test says."""

    def __init__(self, count):
        self.streams = [Stream() for _ in range(count)]
        self.current = self.streams[0]
        self.arrived = {}
        self.held = set()
        self.sent = []
        self.capturing = False

    def current_stream(self, device):
        assert device == CPU
        return self.current

    def record_stream(self, tensor, stream):
        self.held.add((tensor.data_ptr(), stream))

    def is_capturing(self):
        return self.capturing

    def arrive(self, name, stream):
        """What autograd does: make the parameter's stream current, and put the accumulation into it."""
        self.current = stream
        stream.given += 1
        self.arrived[name] = stream, stream.given

    def may_read(self, name):
        """Whether the current stream comes after the gradient."""
        stream, place = self.arrived[name]
        return stream is self.current or self.current.behind.get(stream, 0) >= place

    def reduce(self, bucket, group):
        """A reduce function that wants to come after all gradients."""
        self.sent += bucket.names()
        late = [name for name in bucket.names() if not self.may_read(name)]
        assert not late, f"sent before they arrived: {late}"
        dist.all_reduce(bucket.buffer().div_(2), group=group)


def test_one_stream_waits_for_nothing():
    machine = Machine(1)
    streams = GradientStreams([torch.zeros(2)] * 3, machine, "cpu")
    for index in range(3):
        assert not streams.knows_stream(index)
        streams.note_stream(index)
        assert streams.knows_stream(index)
    streams.wait_for_gradients([torch.zeros(2)])
    assert machine.streams[0].behind == {machine.streams[0]: 0}
    assert machine.held == set()


def test_the_reading_stream_waits_and_holds():
    machine = Machine(3)
    reading, first, second = machine.streams
    streams = GradientStreams([torch.zeros(2)] * 2, machine, "cpu")
    for index, stream in enumerate((first, second)):
        machine.arrive(index, stream)
        streams.note_stream(index)
    machine.current = reading
    gradient = torch.zeros(2)
    streams.wait_for_gradients([None, gradient])
    assert machine.may_read(0)
    assert machine.may_read(1)
    assert machine.held == {(gradient.data_ptr(), reading)}
    streams.forget_streams([1])
    assert streams.knows_stream(0)
    assert not streams.knows_stream(1)


def test_what_is_on_no_such_device_is_passed_over():
    streams = GradientStreams([torch.zeros(2)], Machine(1), "cuda")
    assert streams.knows_stream(0)
    streams.note_stream(0)
    streams.wait_for_gradients([torch.zeros(2)])
    assert GradientStreams.of([torch.zeros(2)]) is None


def network():
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])


def several_streams(monkeypatch, module, seed):
    """Let each parameter of `module` have its gradient computed on a stream of its own choice."""
    machine = Machine(3)
    draw = random.Random(seed)
    for name, parameter in module.named_parameters():
        stream = draw.choice(machine.streams)
        parameter.register_hook(lambda _, name=name, stream=stream: machine.arrive(name, stream))
    monkeypatch.setattr(GradientStreams, "of", lambda parameters: GradientStreams(parameters, machine, "cpu"))
    return machine


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 1e-4}, {"overlap": False}])
@on_two_ranks
def test_buckets_are_packed_behind_all_landings(options):
    with pytest.MonkeyPatch.context() as monkeypatch:
        module = seeded(network)
        machine = several_streams(monkeypatch, module, seed=dist.get_rank())
        model = DistributedDataParallel(module, reduce_function=machine.reduce, **options)
        for _ in range(6):  # the first see the streams, the later ones remember them
            machine.sent.clear()
            machine.held.clear()
            model(torch.ones(2, 8)).sum().backward()
            assert sorted(machine.sent) == sorted(name for name, _ in module.named_parameters())
            assert machine.held
            model.zero_grad()


@pytest.mark.parametrize("accumulated", [False, True])
@on_two_ranks
def test_main_gradients_are_sent_behind_all_landings(accumulated):
    with pytest.MonkeyPatch.context() as monkeypatch:
        module = seeded(network)
        machine = several_streams(monkeypatch, module, seed=dist.get_rank())
        config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=100)
        model = MegatronDDP(None, config, module, reduce_function=machine.reduce)
        for _ in range(4):
            machine.sent.clear()
            model.zero_grad_buffer()
            if accumulated:
                with model.no_sync():
                    model(torch.ones(2, 8)).sum().backward()
            model(torch.ones(2, 8)).sum().backward()
            model.finish_grad_sync()
            assert sorted(machine.sent) == sorted(name for name, _ in module.named_parameters())


@on_two_ranks
def test_a_cuda_graph_is_not_captured():
    """The negotiation would not be replayed."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        module = seeded(network)
        machine = several_streams(monkeypatch, module, seed=0)
        model = DistributedDataParallel(module)
        machine.capturing = True
        with pytest.raises(UnusableError, match=r"rank \d: a CUDA graph is being captured"):
            model(torch.ones(2, 8)).sum().backward()
        machine.capturing = False
        model.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        assert module[5].bias.grad.tolist() == [2.0] * 8


def test_gradients_of_one_memory_are_copied_after_their_streams_were_waited_for():
    module = nn.Linear(2, 2, bias=False)
    module.other = nn.Parameter(torch.zeros(2, 2))
    module.weight.grad = module.other.grad = torch.zeros(2, 2)
    streams = SimpleNamespace(wait_for_gradients=lambda taken: taken[0].fill_(5.0))  # what had not come to its end
    gradients = Gradients(ModuleState(module), torch.empty, streams)
    gradients.existing(bytes(2))
    assert gradients.shared == [0, 1]
    taken = gradients.take([0, 1])
    assert [gradient.unique().tolist() for gradient in taken] == [[5.0], [5.0]]
    assert taken[0].data_ptr() != taken[1].data_ptr()
