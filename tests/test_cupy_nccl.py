"""The backend `cupy_nccl` over a stand-in for CuPy's NCCL and for CUDA: results, streams, groups of calls, failures."""

import contextlib
import queue
import sys
import threading
import time
import types
from collections import deque
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import nccl_checks
import nccl_stand_in
from nccl_contract import ADDRESSES, check_library
from nccl_stand_in import LIBRARY, StandInDevice, StandInLibrary
from one_process import assert_gradients, data, mean_gradients
from ppe_ddp import DistributedDataParallel
from ppe_ddp.backends import device_routed_group
from ppe_ddp.backends.cupy_nccl import nccl_group, nccl_library
from ppe_ddp.backends.cupy_nccl.nccl_communicator import Communicators, Members, PreparedCalls
from ppe_ddp.backends.cupy_nccl.nccl_library import load_nccl, reduction_of
from ppe_ddp.backends.device_routed_group import DeviceRoutedGroup
from ppe_ddp.backends.group_internals import store_of
from ppe_ddp.backends.rank_store import WrittenKeys
from ppe_ddp.engine import reduction
from ppe_ddp.errors import CommunicationError, PeerAbortedError, UnusableError
from ppe_ddp.testing import RankError, Ranks, World, check_backend
from rank_tests import on_three_ranks


def started(size):
    return Ranks(size, backend="cupy_stand_in", prepare=nccl_stand_in.register, group_timeout=20)


@pytest.fixture(scope="module")
def two():
    with started(2) as ranks:
        yield ranks


def test_all_collectives_of_all_dtypes(two):
    for called in two.run(everything, timeout=120):
        assert called == {*ADDRESSES, "groupStart", "groupEnd"}


def everything():
    # int8 is in the place of what goes to gloo.
    return {name for name, *_ in nccl_checks.everything(without=["int8"])}


# ---------------------------------------------------------------- on two ranks


def recorded(call, *, first=None):
    """What the streams and the library noted during a call, after one like it has made the communicators."""
    (first or call)()
    StandInDevice.log.clear()
    LIBRARY.calls.clear()
    call()
    return list(StandInDevice.log), [entry if isinstance(entry, str) else entry[0] for entry in LIBRARY.calls]


def streams_of_an_all_reduce():
    tensor = torch.ones(5)
    log, calls = recorded(lambda: dist.all_reduce(tensor))
    works = []
    unwaited, _ = recorded(lambda: works.append(dist.all_reduce(tensor, async_op=True)))
    return log, calls, unwaited


def test_nccls_stream_waits_for_the_callers_and_is_waited_for(two):
    for log, calls, unwaited in two.run(streams_of_an_all_reduce):
        stream = log[0][0]
        assert stream.startswith("nccl")
        assert log == [
            (stream, "waits for", "user"),
            (stream, "holds", 5),
            (stream, "calls", "NCCL"),
            ("user", "waits for", stream),
        ]
        assert calls == ["allReduce"]
        assert unwaited == log[:-1]


def groups_of_calls():
    group, size, cpu = dist.group.WORLD, dist.get_world_size(), torch.device("cpu")

    def lists():
        group.alltoall([torch.empty(3) for _ in range(size)], [torch.ones(3)] * size).wait()

    def coalesced():
        with dist._coalescing_manager(device=cpu):
            dist.broadcast(torch.ones(2), 0)
            dist.reduce(torch.ones(2), 0)

    def coalesced_by_cpp():
        """As versions of torch after 2.13 do it, by other names."""
        group.start_coalescing(cpu)
        group.broadcast([torch.ones(2)], dist.BroadcastOptions())
        group.reduce([torch.ones(2)], dist.ReduceOptions())
        group.end_coalescing(cpu).wait()

    def several():
        group.allreduce_coalesced([torch.ones(2), torch.ones(3)]).wait()

    def refused():
        with pytest.raises(TypeError, match="int16"):
            group.allreduce_coalesced([torch.ones(2), torch.ones(3, dtype=torch.int16)])

    return [recorded(call)[1] for call in (lists, coalesced, coalesced_by_cpp, several, refused)]


def test_what_belongs_together_is_one_group_of_calls(two):
    for lists, coalesced, coalesced_by_cpp, several, refused in two.run(groups_of_calls):
        assert lists == ["groupStart", "send", "send", "recv", "recv", "groupEnd"]
        assert coalesced == coalesced_by_cpp == ["groupStart", "broadcast", "reduce", "groupEnd"]
        assert several == ["groupStart", "allReduce", "allReduce", "groupEnd"]
        assert refused == []


def messages_and_collectives():
    def both():
        work = dist.isend(torch.ones(1), 1) if dist.get_rank() == 0 else dist.irecv(torch.ones(1), 0)
        dist.all_reduce(torch.ones(1))
        work.wait()

    log, _ = recorded(both)
    return [name for name, what, _ in log if what == "calls"]


def test_messages_have_a_stream_of_their_own(two):
    for first, second in two.run(messages_and_collectives):
        assert first != second


def beside_gloo():
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((3,), rank + 1, dtype=torch.int8)
    _, calls = recorded(lambda: dist.all_reduce(tensor.clone()))
    dist.all_reduce(tensor)
    sub = dist.new_group([1]) if rank == 1 else dist.new_group([1]) and None
    if rank == 1:
        dist.all_reduce(torch.ones(2, dtype=torch.int8), group=sub)
    return calls, tensor.tolist() == [size * (size + 1) // 2] * 3


@pytest.mark.parametrize("backend", ["cupy_nccl", "cpu:gloo,cuda:shm"])
@on_three_ranks
def test_the_first_call_over_gloo_may_be_one_of_some_ranks(backend):
    with mock.patch.object(nccl_group, "load_nccl"):  # which tensors on the CPU do not need
        group = dist.new_group(backend=backend, timeout=timedelta(seconds=5))
    number = torch.full((1,), float(dist.get_rank()))
    if dist.get_rank() == 0:
        dist.send(number, 1, group=group)
    elif dist.get_rank() == 1:
        dist.recv(number, 0, group=group)
        assert number.item() == 0


def test_tensors_on_another_device_go_to_gloo(two):
    assert two.run(beside_gloo) == [([], True)] * 2


def trained_by_torch():
    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    expected = mean_gradients(module, lambda model, rank: model(data(5, 4, rank=rank)).sum().backward())
    wrapper = torch.nn.parallel.DistributedDataParallel(module)
    wrapper(data(5, 4)).sum().backward()
    assert_gradients(wrapper.module, expected)
    wrapper = torch.nn.parallel.DistributedDataParallel(module)
    wrapper.register_comm_hook(None, default_hooks.fp16_compress_hook)
    wrapper.zero_grad()
    wrapper(data(5, 4)).sum().backward()
    assert_gradients(wrapper.module, expected, rtol=2e-2, atol=2e-2)


def test_torchs_own_wrapper_and_hooks_train_over_it(two):
    two.run(trained_by_torch)


def averaged_by_the_transport():
    """Half-precision gradients whose sum is too large, as the engine sends them over NCCL."""
    ops = []

    def all_reduce(tensor, op, *arguments, **keywords):
        ops.append((tensor.dtype, op))
        return dist.all_reduce(tensor, op, *arguments, **keywords)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(reduction, "_AVERAGING", ("cupy_stand_in",))
        monkeypatch.setattr(reduction, "dist", types.SimpleNamespace(**{**vars(dist), "all_reduce": all_reduce}))
        module = torch.nn.Linear(3, 2, dtype=torch.float16)
        model = DistributedDataParallel(module)
        (model(torch.ones(1, 3).half()).sum() * (40000.0 + 16 * dist.get_rank())).backward()
    assert ops == [(torch.float16, ReduceOp.AVG)]
    torch.testing.assert_close(module.bias.grad, torch.full((2,), 40008.0).half())


def test_the_engine_lets_nccl_average(two):
    two.run(averaged_by_the_transport)


def connected_again():
    module = torch.nn.Linear(3, 2)
    model = DistributedDataParallel(module)
    groups = model._reducer.groups
    for step in range(2):
        if step == 1 and dist.get_rank() == 1:
            module.weight.register_hook(fail)
        with pytest.raises((ArithmeticError, PeerAbortedError)) if step == 1 else contextlib.nullcontext():
            model(torch.ones(1, 3)).sum().backward()
    assert groups.is_closed
    deque(groups.renewing(), maxlen=0)
    return [one is not None for one in nccl_stand_in.nccl_group(groups.buckets)._communicators]


def fail(_):
    raise ArithmeticError


def test_devices_are_connected_again_where_all_ranks_are(two):
    """And not in the first call, which would wait for ranks that wait for this one in another group."""
    assert two.run(connected_again) == [[True]] * 2


def told_beside_gloo():
    """Rank 1 fails before its first call in that group, and no keys are left of it."""
    fails, counts = [], []

    def average(gradients, group):
        if fails and dist.get_rank() == 1:
            raise ArithmeticError
        dist.all_reduce(torch.ones(1, dtype=torch.int8), group=group)  # over gloo, as for tensors of another device

    model = DistributedDataParallel(torch.nn.Linear(3, 2), reduce_function=average)
    for _ in range(5):
        fails.append(True)
        start = time.monotonic()
        with pytest.raises(ArithmeticError if dist.get_rank() == 1 else PeerAbortedError):
            model(torch.ones(1, 3)).sum().backward()
        assert time.monotonic() - start < 4  # connections that are kept are closed after 5
        fails.clear()
        model.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        dist.barrier()
        counts.append(store_of(dist.group.WORLD).num_keys())
        dist.barrier()
    assert counts[4] <= counts[3], counts


def test_who_waits_in_a_gloo_group_beside_it_is_told_of_a_failure_before_the_timeout():
    with Ranks(2, backend="cupy_stand_in", prepare=nccl_stand_in.register, group_timeout=600) as ranks:
        ranks.run(told_beside_gloo, timeout=60)


def test_an_abort_that_waits_for_calls_in_other_groups_does_not_keep_the_host(monkeypatch):
    monkeypatch.setattr(device_routed_group, "_ABORT_SECONDS", 0.01)
    others_are_aborted, log = threading.Event(), queue.Queue()
    stuck = mock.Mock(abort=lambda: log.put(others_are_aborted.wait(60)))
    host = mock.Mock()
    group = routed(host, stuck)
    group.abort()
    group.shutdown()
    assert log.empty()
    assert not stuck.shutdown.called
    assert host.mock_calls == [mock.call.abort(), mock.call.shutdown()]
    others_are_aborted.set()
    assert log.get(timeout=60)


def routed(host, device):
    """A group that was used on a device."""
    names = {"group_rank": 0, "group_size": 1, "group_id": "0"}
    arguments = types.SimpleNamespace(store=None, timeout=timedelta(seconds=1), **names)
    made, makers, keys = {"cpu": host}, {"meta": lambda: device}, WrittenKeys(None)
    group = DeviceRoutedGroup(arguments, "routed", ("meta", "cpu"), made=made, makers=makers, keys=keys)
    group._group_for((torch.ones(1, device="meta"),), "all_reduce")
    return group


def test_an_abort_beside_other_groups_of_the_device_leaves_these_a_moment_to_hear_of_the_failure():
    groups = [routed(mock.Mock(), mock.Mock()) for _ in range(2)]
    with mock.patch.object(threading, "Timer") as timer:
        for group in groups:
            group.abort()
    assert [call.args[0] for call in timer.call_args_list] == [device_routed_group._PAUSE_SECONDS, 0.0]


def test_it_conforms():
    check_backend("cupy_stand_in", nccl_stand_in.register, world=World(sizes=(2,), timeout=40))


def a_graph_is_captured():
    StandInDevice.capturing = True
    try:
        with pytest.raises(UnusableError, match="CUDA graph"):
            dist.all_reduce(torch.ones(1))
    finally:
        StandInDevice.capturing = False


def test_capture_is_refused(two):
    two.run(a_graph_is_captured)


def fails_later():
    dist.all_reduce(torch.ones(1))
    group = nccl_stand_in.nccl_group()
    LIBRARY.broken = 6
    group._watchdog.poll()
    LIBRARY.broken = None
    with pytest.raises(CommunicationError, match=r"rank \d of 2.*number 6"):
        dist.all_reduce(torch.ones(1))


def test_an_asynchronous_error_of_nccl_comes_out_of_the_next_call(two):
    two.run(fails_later)
    two.restart()


def never_ends():
    dist.all_reduce(torch.ones(1))
    group = nccl_stand_in.nccl_group()
    StandInDevice.stuck = True
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert not work.is_completed()
    with pytest.raises(CommunicationError, match=r"is not over after 0\.05 s"):
        work.wait(timedelta(seconds=0.05))
    group._watchdog.poll()  # not yet
    group._watchdog._timeout = 0.0
    group._watchdog.poll()
    StandInDevice.stuck = False
    assert work.is_completed()
    assert not work.is_success()
    for call in (work.wait, lambda: dist.all_reduce(torch.ones(1))):
        with pytest.raises(CommunicationError, match=r"all_reduce is not over after the group's timeout"):
            call()


def test_what_never_ends_is_broken_off_and_named(two):
    two.run(never_ends)
    two.restart()


def hangs_in_nccl():
    dist.all_reduce(torch.ones(1))
    group = nccl_stand_in.nccl_group()
    group._watchdog._timeout = 0.0
    LIBRARY.hangs = True
    with pytest.raises(CommunicationError, match=r"all_reduce is not over after the group's timeout"):
        dist.all_reduce(torch.ones(1))
    LIBRARY.hangs = False


def test_a_call_that_waits_in_nccl_for_a_rank_that_does_not_come_is_broken_off(two):
    """NCCL connects when it first uses an algorithm, on the host."""
    two.run(hangs_in_nccl)
    two.restart()


def comes_alone():
    group = dist.new_group()
    nccl_stand_in.nccl_group(group)._communicators._timeout = 0.2
    if dist.get_rank() == 0:
        with pytest.raises(CommunicationError, match=r"ranks \[1\] did not come within 0\.2 s"):
            dist.all_reduce(torch.ones(1), group=group)


def test_a_rank_that_never_comes_is_named(two):
    two.run(comes_alone)


def sends_alone():
    group = dist.new_group()
    nccl_stand_in.nccl_group(group)._communicators._timeout = 0.2
    if dist.get_rank() == 0:
        works = [dist.isend(torch.ones(1), 1, group), dist.irecv(torch.ones(1), 1, group)]
        for work in works * 2:
            with pytest.raises(CommunicationError, match=r"ranks \[1\] did not come within 0\.2 s"):
                work.wait()
            assert work.is_completed()
            assert not work.is_success()


def test_no_message_has_arrived_that_could_not_leave(two):
    """The wait for one of them connects all; each tells of its failure, however often it is asked."""
    two.run(sends_alone)


def ends():
    dist.all_reduce(torch.ones(1))
    group = dist.group.WORLD
    (communicator,) = nccl_stand_in.nccl_group()._communicators
    dist.destroy_process_group()
    assert communicator.state == "destroyed"
    with pytest.raises(UnusableError, match="was destroyed"):
        group.allreduce([torch.ones(1)])


def test_destroying_gives_the_communicators_back(two):
    two.run(ends)


def ends_though_a_call_never_does():
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    nccl_stand_in.StandInDevice.stuck = True
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    group.abort()
    dist.destroy_process_group(group)
    nccl_stand_in.StandInDevice.stuck = False
    del work


def test_destroying_what_was_aborted_does_not_wait(two):
    two.run(ends_though_a_call_never_does, timeout=20)


# ---------------------------------------------------------------- in this process


def test_the_stand_in_keeps_the_contract_of_cupys_nccl():
    check_library(LIBRARY, "cpu", StandInDevice().make_stream(0).cuda_stream, lambda: None)


def communicators_of(library=LIBRARY):
    return Communicators(library, StandInDevice(), WrittenKeys(dist.HashStore()), 0, "rank 0 of 1, group 'x'", 1.0)


@pytest.mark.parametrize("version", [22900, 22901], ids=["bytes of CuPy 14", "numbers of CuPy 13"])
def test_an_id_arrives_as_it_was(version):
    communicators = communicators_of(StandInLibrary(version))
    communicators.connect([communicators.of(0, Members("collectives", (0,)))])
    (connected,) = communicators
    assert connected.size() == 1


@pytest.mark.parametrize(("dtype", "number"), [(torch.int8, 0), (torch.bfloat16, 9), (torch.float8_e5m2, 11)])
def test_datatypes_have_nccls_numbers(dtype, number):
    assert reduction_of(dtype, ReduceOp.SUM)[0] == number


def test_an_error_that_cupy_has_no_name_for_is_translated():
    told = pytest.raises(CommunicationError, match="rank 0: all_reduce over NCCL failed: error 6")
    with told, communicators_of().translated_errors("rank 0: all_reduce"):
        raise KeyError(6)


@pytest.mark.parametrize("orderly", [True, False])
def test_what_was_ended_is_not_made_again(orderly):
    """Nobody would come; the watchdog may end it all while a call is on its way."""
    communicators = communicators_of()
    communicator = communicators.of(0, Members("collectives", (0,)))
    communicators.connect([communicator])
    communicators.end(orderly=orderly)
    call = PreparedCalls().send(torch.ones(1), 0)
    for use in (lambda: communicators.connect([communicator]), lambda: communicators.call([(communicator, call)])):
        with pytest.raises(CommunicationError, match=r"rank 0 of 1, group 'x': .* were ended"):
            use()


@pytest.mark.parametrize(("torchs", "warns"), [(22907, False), (22809, True), (None, False)])
def test_two_nccls_in_one_process_are_told(monkeypatch, torchs, warns):
    library = types.ModuleType("nccl")
    library.available, library.get_version = True, lambda: 22907
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["cupy.cuda"].nccl = library
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(nccl_library, "torch_nccl", lambda: torchs)
    told = pytest.warns(RuntimeWarning, match=r"NCCL 2\.28\.9, and CuPy calls 2\.29\.7")
    with told if warns else contextlib.nullcontext():
        assert load_nccl() is library


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_what_is_missing():
    with pytest.raises(UnusableError, match=r"needs an NVIDIA GPU.*ppe-ddp\[cupy1[23]\]"):
        load_nccl()
    with pytest.raises(RankError, match="needs an NVIDIA GPU"), Ranks(1, backend="cupy_nccl") as ranks:
        ranks.run(int)


def test_without_cupy_it_names_the_extra(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(ImportError, match=r"needs CuPy.*ppe-ddp\[cupy12\]"):
        load_nccl()
