"""The backend `shm`: the checks of process groups on each number of ranks, and what it alone promises."""

import functools
import gc
import itertools
import os
import threading
from datetime import timedelta
from time import monotonic

import pytest
import torch
import torch.distributed as dist

import ppe_ddp.backends.work as work_module
from law_models import Recipe
from law_scenarios import every_variant
from law_steps import StepKind, TrainingStep, Zeroing
from laws import Case
from mpi_check_collectives import all_gather_single
from ppe_ddp import CommunicationError, DisagreementError, DistributedDataParallel
from ppe_ddp.backends.group_internals import registered_groups
from ppe_ddp.backends.shared_memory import shared_group, shared_reservation
from ppe_ddp.backends.shared_memory.shared_steps import AllReduceStep
from ppe_ddp.backends.shm import ShmOptions
from ppe_ddp.backends.shm.gloo_wire import GlooWire
from ppe_ddp.testing import RankError, Ranks
from ppe_ddp.waiting import background_thread, progress_engine
from rank_tests import on_three_ranks, on_two_ranks
from shm_checks import names_for, run_checks, run_wrappers
from subprocesses import run, warm_python
from test_laws import EVERYTHING, assert_laws

RANKS = (1, 2, 3)
CPU = torch.device("cpu")


@functools.cache
def results(ranks, folder):
    """All checks on so many ranks, started once; the error where that failed."""
    calls = [(rank, ranks, f"file://{folder}/shm-{ranks}", names_for(ranks)) for rank in range(ranks)]
    with Ranks(ranks, backend=None) as processes:
        try:
            return processes.run_each(run_checks, calls, timeout=300)[0]
        except RankError as error:
            return error


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks in RANKS for name in names_for(ranks)])
def test_on_ranks(ranks, name, tmp_path_factory):
    found = results(ranks, tmp_path_factory.getbasetemp())
    if isinstance(found, RankError):
        raise found
    assert not found[name], "\n".join(found[name])


@pytest.fixture(scope="module")
def two_shm_ranks():
    with Ranks(2, backend="shm") as ranks:
        yield ranks


def test_the_laws_on_a_model_of_every_layer(two_shm_ranks):
    recipe = Recipe(1, EVERYTHING, width=8, heads=3, early_exit=True)
    steps = tuple(
        TrainingStep(kind, zeroing) for kind, zeroing in zip(StepKind, itertools.cycle(Zeroing), strict=False)
    )
    assert_laws(two_shm_ranks, Case(recipe, steps), variants=every_variant()[::5])


def test_several_wrappers_and_collectives_of_the_model(two_shm_ranks):
    assert two_shm_ranks.run(run_wrappers, timeout=120)[0] > 5


def shm_group(**options):
    return dist.new_group(backend="shm", timeout=timedelta(seconds=20), pg_options=ShmOptions(**options))


def shared(numel, group):
    return group.allocate_tensor(numel, dtype=torch.float32, device=CPU).fill_(1.0)


@on_two_ranks
def test_a_rank_in_a_blocking_call_of_gloo_holds_nobody_up():
    """Law 7: the user's own collective by gloo blocks in C++, and the other rank comes to it after its sum."""
    group, store = shm_group(), dist.distributed_c10d._get_default_store()
    for turn in range(5):
        total = shared(100_000, group)
        if dist.get_rank() == 0:
            work = dist.all_reduce(total, group=group, async_op=True)
            store.set(f"launched/{turn}", "")
            dist.barrier()
            work.wait()
        else:
            store.wait([f"launched/{turn}"])
            dist.all_reduce(total, group=group)  # rank 0 is in the barrier, or on its way there
            dist.barrier()
        assert total.unique().tolist() == [2.0]


@on_two_ranks
def test_the_background_thread_rests_where_nothing_is_under_way():
    group = shm_group()
    dist.all_reduce(shared(1000, group), group=group)
    engine = progress_engine(os.getpid())
    end = monotonic() + 20
    thread = background_thread(os.getpid())
    while not thread.is_resting and monotonic() < end:  # naps for a while first
        pass
    turns = engine.turns
    dist.barrier()
    assert engine.turns == turns
    total = shared(1000, group)
    dist.all_reduce(total, group=group)  # wakes it up
    assert not thread.is_resting
    assert total.unique().tolist() == [2.0]


@on_three_ranks
def test_what_is_small_goes_directly_where_the_group_is_for_control():
    options = ShmOptions(shared_memory=False).for_control()
    most, rank, size = options.direct_bytes, dist.get_rank(), dist.get_world_size()
    groups = {True: shm_group(shared_memory=False, direct_bytes=most), False: shm_group(shared_memory=False)}
    sent = []

    def all_to_all(wire, *arguments):
        sent.append(True)
        return to_each(wire, *arguments)

    to_each = GlooWire.all_to_all
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GlooWire, "all_to_all", all_to_all)
        for (is_direct, group), nbytes in itertools.product(groups.items(), (1, most, most + 1)):
            mask, whole = torch.full((nbytes,), rank, dtype=torch.uint8), torch.zeros(size * nbytes, dtype=torch.uint8)
            all_gather_single(whole, mask, group=group)
            assert whole.view(size, -1).tolist() == [[other] * nbytes for other in range(size)]
            dist.all_reduce(mask, dist.ReduceOp.MAX, group=group)
            assert mask.unique().tolist() == [size - 1]
            assert len(sent) == (2 if is_direct and nbytes <= most else 0)
            sent.clear()
        total = torch.tensor([1.5 + rank, 2.0], dtype=torch.bfloat16)
        dist.all_reduce(total, dist.ReduceOp.AVG, group=groups[True])
        assert total.tolist() == [2.5, 2.0]
    assert [options.direct_up_to(size) for size in (2, 16, 17)] == [most, most, 0]


@on_three_ranks
def test_the_default_dtype_changes_nothing():
    group, rank = shm_group(), dist.get_rank()
    torch.set_default_dtype(torch.bfloat16 if rank else torch.float64)
    try:
        total = torch.full((1000,), 1.0 if rank else 256.0, dtype=torch.bfloat16)
        dist.all_reduce(total, group=group)
        dist.barrier(group)
    finally:
        torch.set_default_dtype(torch.float32)
    assert total.unique().tolist() == [258]  # 256 + 1 is 256 in bfloat16


@on_two_ranks
def test_a_rank_that_is_interrupted_while_it_sums_does_not_sum_twice():
    group, total, act = shm_group(), torch.ones(1000), AllReduceStep.act

    def interrupted_act(*arguments):
        act(*arguments)
        AllReduceStep.act = act
        raise KeyboardInterrupt

    if dist.get_rank() == 0:
        dist.barrier()
        AllReduceStep.act = interrupted_act
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(total, group=group)
    else:
        work = dist.all_reduce(total, group=group, async_op=True)
        dist.barrier()
        with pytest.raises(CommunicationError, match="its part in shared memory failed: KeyboardInterrupt"):
            work.wait()


@on_two_ranks
def test_on_one_node_memory_shows_who_has_given_up():
    assert shm_group()._waits.sees_every_rank
    assert not shm_group(shared_memory=False)._waits.sees_every_rank


def test_the_store_is_hardly_asked_where_memory_shows_who_has_given_up(monkeypatch):
    """Each look is a message to a process that may have to wait for a core, while this rank waits for it."""

    class Store:
        asked = 0

        def check(self, keys):
            self.asked += 1
            return False

    seconds = itertools.count()  # a second passes between looks
    monkeypatch.setattr(work_module, "monotonic", lambda: float(next(seconds)))
    store = Store()
    waits = work_module.Waits(store, 0, "rank 0 of 2", 60.0, "shm")

    def asked(looks, look):
        before = store.asked
        assert not any([look() for _ in range(looks)])
        return store.asked - before

    assert asked(5, waits.is_given_up) == 5
    waits.sees_every_rank = True
    assert asked(9, waits.is_given_up) == 0
    assert asked(2, waits.look_now) == 2
    waits.is_closed_elsewhere, before = lambda: True, store.asked
    assert waits.is_given_up()
    assert store.asked == before + 1


def test_a_store_that_does_not_answer_keeps_nobody_waiting():
    """As behind a network that was cut, where its calls do not end."""
    answer = threading.Event()

    class Store:
        def check(self, keys):
            answer.wait()
            return False

        def compare_set(self, key, expected, value):
            answer.wait()

    waits = work_module.Waits(Store(), 0, "rank 0 of 2", 60.0, "shm")
    try:
        assert not waits.look_now()
        waits.give_up("of a test")
        assert waits.failure == "of a test"
        assert not answer.is_set()
    finally:
        answer.set()


def test_a_call_after_the_group_was_given_up_tells_who_has_done_that():
    def begun_over_closed_connections():
        raise CommunicationError("the connections are closed")
        yield

    waits = work_module.Waits(dist.HashStore(), 0, "rank 0 of 2", 60.0, "shm")
    call = work_module.WireCall("all_gather", waits, begun_over_closed_connections(), is_queued=False)
    waits.give_up("it was interrupted")
    with pytest.raises(CommunicationError, match=r"all_gather over shm failed: it was interrupted"):
        work_module.CallSet(waits).begin(call)


@on_two_ranks
def test_a_rank_that_is_interrupted_while_it_makes_the_group_tells_the_others():
    for culprit in range(2):
        is_culprit = dist.get_rank() == culprit
        with pytest.MonkeyPatch.context() as patches:
            if is_culprit:
                patches.setattr(shared_group, "_attach", interrupted)
            text = None if is_culprit else f"rank {culprit} has given this group up.*: KeyboardInterrupt"
            with pytest.raises(KeyboardInterrupt if is_culprit else CommunicationError, match=text):
                dist.new_group([0, 1], timedelta(seconds=200), "shm", use_local_synchronization=True)
        gc.collect()  # what is left of it keeps nobody waiting: its timeout is longer than that of the test
        dist.barrier()


def interrupted(*_):
    raise KeyboardInterrupt


@on_two_ranks
def test_a_group_ends_though_one_rank_has_begun_more_than_the_other():
    group = shm_group()
    if dist.get_rank() == 0:
        dist.all_reduce(shared(10, group), group=group, async_op=True)
    dist.destroy_process_group(group)


def test_other_options_and_devices_are_refused(two_shm_ranks):
    two_shm_ranks.run(refuse_options_and_devices)


def refuse_options_and_devices():
    with pytest.raises(TypeError, match="pg_options for the backend shm are ppe_ddp's ShmOptions, not str"):
        dist.new_group(pg_options="fast")
    with pytest.raises(TypeError, match="the shm backend is for tensors on cpu, not on meta"):
        dist.all_reduce(torch.ones(3, device="meta"))


@on_two_ranks
def test_the_wrapper_uses_it_beside_a_group_over_gloo():
    """Where it is asked to: gradients lie in shared memory, and the next wrapper takes over the connections."""
    memory, rank = shared_reservation.shared_memory(), dist.get_rank()
    for wanted in (True, False, True):
        model = DistributedDataParallel(torch.nn.Linear(3, 1), shared_memory=wanted)
        for _ in range(2):
            model.zero_grad()
            model(torch.full((1, 3), 1.0 + rank)).sum().backward()
            grad = model.module.weight.grad
            assert grad.tolist() == [[1.5] * 3]
            assert (memory.position(grad) >= 0) == wanted
        del model, grad
        gc.collect()
    assert len([group for group, _ in registered_groups() if "ppe_ddp" in group.group_name]) == 4


@on_two_ranks
def test_ranks_that_do_not_agree_on_shared_memory_are_told():
    for _ in range(2):
        with pytest.raises(DisagreementError, match=r"shared_memory is not .* False on rank 0, True on rank 1"):
            DistributedDataParallel(torch.nn.Linear(3, 1), shared_memory=dist.get_rank() == 1)
    DistributedDataParallel(torch.nn.Linear(3, 1), shared_memory=True)


SCRIPT = """
import os, sys, torch, torch.distributed as dist, ppe_ddp
dist.init_process_group(sys.argv[1])
model = ppe_ddp.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False), shared_memory=True)
model(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
left = dist.irecv(torch.empty(1), 1 - dist.get_rank(), tag=9)  # that nobody answers
os.write(1, f"grad {model.module.weight.grad[0, 0].item()} {'mpi4py' in sys.modules}\\n".encode())
"""


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.long)])
def test_a_script_under_torchrun_that_just_ends(backend, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    launcher = [*warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--no-python"]
    code, output, errors = run([*launcher, *warm_python(), tmp_path / "train.py", backend], timeout=150)
    assert (code, output) == (0, "grad 1.5 False\n" * 2), errors
