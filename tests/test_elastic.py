"""Training goes on when ranks are killed, in whatever phase, and others join; over a store, torchft and ULFM."""

import contextlib
import copy
import importlib.util
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

import elastic_program
import ppe_ddp
from ppe_ddp import elastic, waiting
from ppe_ddp.backends import rank_store
from ppe_ddp.backends.group_internals import address_key, connections_awaited
from ppe_ddp.backends.rank_store import ConnectingStore
from ppe_ddp.compression import ErrorFeedback, LocalSGD, TopK
from ppe_ddp.compression.comm_state import CommState
from ppe_ddp.elastic.memberships import Quorum
from ppe_ddp.elastic.training import drawn_alike, steps_after, taken_after
from ppe_ddp.waiting import progress_engine
from rank_tests import long
from subprocesses import warm_python

PROGRAM = str(Path(elastic_program.__file__))
PHASES = list(elastic_program.PHASES)
needs_torchft = pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="needs torchft")


def run(*words):
    job = subprocess.run(
        [*warm_python(), PROGRAM, "--seeds", "0", *words], capture_output=True, text=True, timeout=150, check=False
    )
    assert job.returncode == 0, job.stdout + job.stderr[-5000:]
    return job.stdout


@pytest.mark.parametrize("phase", [*PHASES[::2], *long(*PHASES[1::2])])
@pytest.mark.parametrize(
    "after", [pytest.param(False, marks=pytest.mark.long, id="before"), pytest.param(True, id="after")]
)
def test_a_rank_is_killed(phase, after):
    # Of those that occur when ranks meet, the first is that of the start, which waits for all.
    is_rare = phase in ("meet", "connect", "address", "init", "group", "state", "divide")
    faults = {"1": [phase, 2 if is_rare else 5, after, False]}
    if is_rare:
        faults["0"] = ["bucket", 5, True, False]  # another one, after which they meet
    print(run("--faults", json.dumps(faults), "--steps", "30", "--no-restarts", "--size", "3"))


def test_a_replacement_joins_and_has_what_the_others_have():
    print(run("--faults", '{"1": ["vote", 5, true, false]}', "--steps", "150", "--size", "3"))


def test_buffers_are_those_of_a_rank_that_has_used_their_module():
    run("--faults", '{"1": ["mask", 5, false, false]}', "--steps", "8", "--no-restarts", "--size", "3", "--buffers")


def test_who_cannot_be_sent_the_state_ends_alone():
    run("--faults", '{"1": ["vote", 5, true, false]}', "--steps", "150", "--size", "3", "--unsendable")


def test_compressors_go_along():
    run("--faults", '{"1": ["vote", 5, true, false]}', "--steps", "150", "--size", "3", "--compressed")


def test_who_is_left_and_who_joins_save_checkpoints():
    run("--faults", '{"1": ["vote", 5, true, false]}', "--steps", "150", "--size", "3", "--saves-every", "20")


def test_a_rank_is_killed_in_steps_that_are_compiled():
    run("--faults", '{"1": ["vote", 5, true, false]}', "--steps", "30", "--no-restarts", "--size", "3", "--compiled")


def test_a_rank_is_killed_where_the_others_wait_in_a_collective_of_their_own():
    faults = '{"1": ["forward", 5, false, false]}'
    run("--faults", faults, "--steps", "30", "--no-restarts", "--size", "3", "--collective")


def test_two_are_killed_at_once():
    faults = {"1": ["vote", 5, False, False], "2": ["vote", 5, True, False]}
    run("--faults", json.dumps(faults), "--steps", "30", "--no-restarts", "--size", "4")


def test_all_but_one_are_killed():
    faults = {str(place): ["commit", 5 + place, True, False] for place in range(3)}
    run("--faults", json.dumps(faults), "--steps", "30", "--no-restarts", "--size", "4")


def test_a_rank_that_is_stopped_is_left_out():
    run("--faults", '{"1": ["bucket", 5, true, true]}', "--steps", "30", "--no-restarts", "--size", "3")


def test_an_error_of_a_rank_that_lives_is_raised_as_ever():
    run("--faults", '{"2": ["forward", 20, true, false]}', "--steps", "30", "--no-restarts", "--raises-at", "7")


def test_an_error_behind_the_last_message_drops_the_step_on_all_who_live():
    fault = '{"2": ["forward", 20, true, false]}'
    run("--faults", fault, "--steps", "30", "--no-restarts", "--raises-at", "-7", "--timeout", "60", "--size", "3")


@needs_torchft
def test_torchft_leads():
    run("--faults", '{"1": ["vote", 5, true, false]}', "--steps", "300", "--size", "3", "--engine", "lighthouse")


def is_open_mpi():
    mpirun = shutil.which("mpirun", path=Path(sys.executable).parent)
    words = [mpirun or "true", "--version"]
    return "Open MPI" in subprocess.run(words, capture_output=True, text=True, timeout=20, check=False).stdout


@pytest.mark.skipif("not is_open_mpi()", reason="needs the mpirun of Open MPI beside this Python")
@pytest.mark.parametrize(
    "faults",
    [
        {"1": ["any", 0, False, False], "2": ["any", 3, False, False]},
        {"0": ["meet", 1, True, False], "1": ["any", 20, False, False]},  # the first serves the store
        {"0": ["connect", 1, False, False], "1": ["vote", 9, False, False]},
    ],
)
def test_mpi_leads_and_two_are_killed(faults):
    run("--faults", json.dumps(faults), "--steps", "30", "--engine", "mpi")


def word(committed, *, is_ready):
    return {"committed": committed, "ready": is_ready}


def test_who_commits_follows_from_what_all_who_live_say():
    assert steps_after([word(-1, is_ready=False)] * 2) == 0
    assert steps_after([word(3, is_ready=True), word(3, is_ready=True), word(-1, is_ready=False)]) == 4
    assert steps_after([word(3, is_ready=True), word(3, is_ready=False)]) == 3
    assert steps_after([word(4, is_ready=False), word(3, is_ready=True)]) == 4


@pytest.mark.parametrize("heard", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("alive", [subset for n in (1, 2, 3) for subset in itertools.combinations(range(3), n)])
def test_no_step_is_torn_whoever_is_left(heard, alive):
    # All three are ready, and some have heard that all are, and so have committed; those that are left meet.
    words = [word(4, is_ready=False) if heard[rank] else word(3, is_ready=True) for rank in alive]
    assert steps_after(words) == 4
    # One is not ready, so nobody has heard that all are.
    words = [word(3, is_ready=rank != 0) for rank in alive]
    assert steps_after(words) == (3 if 0 in alive else 4)


@pytest.fixture
def lone():
    store = elastic_program.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    membership = elastic.StoreMembership(f"tcp://127.0.0.1:{store.port}")
    yield membership
    membership.leave({})
    torch.distributed.destroy_process_group()


def test_one_alone(lone):
    net = torch.nn.Linear(8, 1)
    model = ppe_ddp.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    training = elastic.ElasticTraining(lone, {"model": model, "optimizer": optimizer})
    taken = []
    for rows in training.batches(length=10, batch_size=4, steps=5):
        taken += rows
        with training.step():
            model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    assert training.committed == 5
    assert sorted(taken) == sorted([*range(10)] * 2)


def test_compressors_count_on_after_a_restart(lone):
    model = ppe_ddp.DistributedDataParallel(torch.nn.Linear(8, 1))
    model.register_comm_hook(ErrorFeedback(TopK(0.1)))
    model.load_comm_state_dict({**model.comm_state_dict(), "steps": 5})
    training = elastic.ElasticTraining(lone, {"model": model})
    with training.step():
        model(torch.ones(4, 8)).sum().backward()
    assert model.comm_state_dict()["steps"] == 6
    trains, joins = {**training._word, "ready": True}, {"committed": -1, "before": 105, "ready": False}
    assert taken_after([trains, trains]) == 7
    assert taken_after([{**trains, "ready": False}, joins]) == 6


def test_who_joins_keeps_nothing_of_a_checkpoint_that_the_others_have_sent_since():
    state = CommState()
    state.of("weight").update(residual=torch.ones(3), power_sgd=torch.ones(2))
    state.take({"bias": {"power_sgd": torch.zeros(2)}})
    assert list(state.common()["bias"]) == ["power_sgd"]
    assert not state.of("weight")


def test_what_each_has_loaded_by_itself_counts_in_full_when_they_meet(lone, tmp_path):
    """A checkpoint of one rank, whose residual one of two ranks keeps: their step is divided by two."""
    program = """if True:
        import sys, torch, ppe_ddp, ppe_ddp.elastic
        from ppe_ddp.compression import ErrorFeedback, TopK
        membership = ppe_ddp.elastic.StoreMembership(sys.argv[2], size=2)
        model = ppe_ddp.DistributedDataParallel(torch.nn.Linear(8, 1))
        model.register_comm_hook(ErrorFeedback(TopK(0.1, min_numel=1)))
        ppe_ddp.Checkpointer(sys.argv[1], {"model": model}).load()
        ppe_ddp.elastic.ElasticTraining(membership, {"model": model})
        print(sum(one["residual"].sum().item() for one in model.comm_state_dict()["parameters"].values()))
    """
    model = ppe_ddp.DistributedDataParallel(torch.nn.Linear(8, 1))
    model.register_comm_hook(ErrorFeedback(TopK(0.1, min_numel=1)))
    training = elastic.ElasticTraining(lone, {"model": model})
    with training.step():
        model(torch.ones(4, 8)).sum().backward()
    ppe_ddp.Checkpointer(tmp_path, {"model": model}).save(1)
    kept = sum(one["residual"].sum().item() for one in model.comm_state_dict()["parameters"].values())
    assert kept == 4.0 * 7  # one of eight elements was sent
    store = elastic_program.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = [*warm_python(), "-c", program, str(tmp_path), f"tcp://127.0.0.1:{store.port}"]
    jobs = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        printed = [job.communicate(timeout=60)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert sorted(map(float, printed)) == [0.0, 2 * kept]


def test_loops_that_follow_one_another_take_each_row_once(lone, tmp_path):
    model = copy.deepcopy(ppe_ddp.DistributedDataParallel(torch.nn.Linear(8, 1)))  # which has no engine yet
    checkpointer = ppe_ddp.Checkpointer(tmp_path, {"model": model})
    training = elastic.ElasticTraining(lone, {"model": model})
    taken = []

    def train(rows):
        taken.extend(rows)
        with training.step():
            model(torch.ones(4, 8)).sum().backward()

    for rows in training.batches(length=20, batch_size=4, steps=9):
        train(rows)
        if training.committed == 2:
            break
    for steps, ends in ((4, False), (5, True)):
        for rows in training.batches(length=20, batch_size=4, steps=steps, ends=ends):
            train(rows)
    assert sorted(taken) == [*range(20)]
    checkpointer.save(5)
    with pytest.raises(ppe_ddp.UnusableError, match="pass ends=False"):
        next(training.batches(length=20, batch_size=4, steps=6))
    with pytest.raises(ppe_ddp.UnusableError, match="pass ends=False"):
        train([])


def test_an_error_of_gloo_is_raised_where_nobody_has_left(lone):
    model = ppe_ddp.DistributedDataParallel(torch.nn.Linear(8, 1))
    training = elastic.ElasticTraining(lone, {"model": model})
    with pytest.raises(RuntimeError, match="preamble"), training.step():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes")
    with training.step():
        model(torch.ones(1, 8)).sum().backward()
    assert training.committed == 1


class Best:
    """As of early stopping."""

    loss = 1.0

    def state_dict(self):
        return {"loss": self.loss}

    def load_state_dict(self, state):
        self.loss = state["loss"]


def test_a_state_that_cannot_be_sent_is_refused_by_the_name_of_its_part(lone):
    best, model = Best(), ppe_ddp.DistributedDataParallel(torch.nn.Linear(8, 1))
    training = elastic.ElasticTraining(lone, {"model": model, "best": best})
    content, refusal = training._packed([])
    assert not refusal
    assert training._loaded(torch.frombuffer(bytearray(content), dtype=torch.uint8))["parts"]["best"] == {"loss": 1.0}
    best.loss = np.mean([1.0])
    content, refusal = training._packed([])
    assert content.decode() == refusal
    assert refusal.startswith(
        "the state of part 'best', which a process that joins needs, cannot be sent: it is a dict"
    )


def test_who_differs_from_those_that_train_does_not_join(lone):
    training = elastic.ElasticTraining(lone, {"model": ppe_ddp.DistributedDataParallel(torch.nn.Linear(8, 1))})
    own = training._word
    other = {**own, "options": ["bucket_cap_mb=(1,)", *own["options"][1:]]}

    def has_strangers(*words):
        training._quorum = Quorum("7", ["here", "there"], words, 0, training._store)
        return training._has_strangers()

    joins = {"committed": -1}
    assert not has_strangers(own | joins, other | joins)  # all begin: the engine tells all of them
    assert not has_strangers(own, own | joins)
    assert not has_strangers(own, other)  # both have trained together: one has changed since
    assert has_strangers(own, other | joins)
    with pytest.raises(ppe_ddp.DisagreementError, match=r"with bucket_cap_mb=None, and the others .*=\(1,\)"):
        has_strangers(own | joins, other)
    training._model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    assert has_strangers(own, training._word | joins)
    training._model.module.weight.data = torch.ones(2, 8)
    training._model._ready()
    assert training._word["options"][-2] != own["options"][-2]


@pytest.mark.parametrize("sizes", [(3, 2), (2, 3), (2, 1)])
def test_what_was_kept_counts_as_in_the_step_that_kept_it(sizes):
    state = CommState()
    state.of("weight").update(residual=torch.ones(3), power_sgd=torch.ones(2))
    before, now = (SimpleNamespace(world_size=size, nodes=()) for size in sizes)
    state.rescale(before, now)
    assert torch.equal(state.of("weight")["residual"] / sizes[1], torch.ones(3) / sizes[0])
    assert torch.equal(state.of("weight")["power_sgd"], torch.ones(2))
    nodes = SimpleNamespace(world_size=4, nodes=((0, 1), (2, 3)))  # whose compressor averages one gradient of each
    state.rescale(now, nodes)
    assert torch.equal(state.of("weight")["residual"] / 2, torch.ones(3) / sizes[0])


def test_who_joins_draws_what_all_others_draw():
    def drawn(*words):
        return drawn_alike([{"committed": done, "random": {"python": 1, "cpu": cpu}} for done, cpu in words])

    assert drawn((-1, 5), (-1, 5)) == set()
    assert drawn((4, 5), (4, 6), (-1, 7)) == {"python"}
    assert drawn((4, 5), (4, 5), (-1, 7)) == {"python", "cpu"}


def test_one_alone_does_not_commit_what_it_leaves_out(lone):
    model = ppe_ddp.DistributedDataParallel(torch.nn.Linear(8, 1), check_for_nan_in_grad="skip")
    training = elastic.ElasticTraining(lone, {"model": model})
    for weight, committed in ((1, 0), (0, 1)):  # a loss that stands for nothing may be NaN
        with training.step():
            ppe_ddp.weigh(model(torch.ones(4, 8)).sum() * math.nan, weight).backward()
        assert model.module.weight.grad is None
        assert training.committed == committed
    output = model(torch.ones(4, 8))
    output.register_hook(elastic_program.fail)
    with pytest.raises(ArithmeticError), training.step():
        output.sum().backward()
    assert training.committed == 1


def test_a_store_that_is_silent_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(waiting, "_JOIN_SECONDS", 0.2)  # for the thread that is in the store
    connection, theirs = elastic_program.FORK.Pipe()
    server = elastic_program.FORK.Process(target=elastic_program.serve, args=(theirs, []), daemon=True)
    server.start()
    membership = elastic.StoreMembership(connection.recv(), timeout=2.0)
    word, found = {"committed": -1, "ready": False}, []
    membership.meet(word)

    def meet():
        with pytest.raises(ppe_ddp.CommunicationError, match="does not answer"):
            membership.meet(word)
        membership.leave(word)
        found.append("is told")

    try:
        os.kill(server.pid, signal.SIGSTOP)
        meets = threading.Thread(target=meet, daemon=True)
        meets.start()
        meets.join(30)
    finally:
        server.kill()
        rank_store._caller()._silent.exception(30)  # then the thread that calls stores is free for other tests
        torch.distributed.destroy_process_group()
    assert found


class _Gone(elastic_program.dist.Store):
    """Another rank is gone, so that nobody can connect."""

    def set(self, key, value):
        pass

    def wait(self, keys, timeout=None):
        raise ppe_ddp.CommunicationError("rank 1 is gone")

    get = wait


def test_another_wrapper_that_was_made_before_does_not_go_on_alone(lone):
    """It was made in the group of one process that the membership makes."""
    model, other = (ppe_ddp.DistributedDataParallel(torch.nn.Linear(8, 1)) for _ in range(2))
    elastic.ElasticTraining(lone, {"model": model})
    with pytest.raises(ppe_ddp.UnusableError, match=r"was destroyed; wrap the module again"):
        other(torch.ones(4, 8))


def test_who_could_not_connect_names_groups_as_those_who_join(lone):
    model = ppe_ddp.DistributedDataParallel(torch.nn.Linear(8, 1))
    training = elastic.ElasticTraining(lone, {"model": model})
    torch.distributed.destroy_process_group()
    store = _Gone()
    with pytest.raises(ppe_ddp.CommunicationError, match="rank 1 is gone"):
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=2)
    training._disconnect()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    assert torch.distributed.group.WORLD.group_name == "0"


def test_gloo_does_not_wait_for_one_that_is_gone_before_it_has_connected():
    inner, is_gone = torch.distributed.HashStore(), threading.Event()

    def look():
        if is_gone.is_set():
            raise ppe_ddp.CommunicationError("rank 1 is gone")

    store = ConnectingStore(inner, look, 60.0)

    def connect():
        with store.connecting(), contextlib.suppress(RuntimeError):
            torch.distributed.ProcessGroupGloo(store, 0, 2, timedelta(seconds=60))

    connects = threading.Thread(target=connect, daemon=True)
    connects.start()
    own = store.get(address_key(0))
    port = connections_awaited(own)[1].to_bytes(2, "big")
    inner.set(address_key(1), own.replace(port, b"\xff\xff", 1))  # gloo waits for the one at the higher port
    is_gone.set()
    connects.join(30)
    assert not connects.is_alive()


def test_a_store_in_which_ranks_have_connected_lets_go_of_what_has_looked():
    """Those are the groups of a wrapper, whose connections have this store, and end with the last reference to them."""

    class Looking:
        def look(self):
            pass

    looking = Looking()
    is_alive = weakref.ref(looking)
    store = ConnectingStore(torch.distributed.HashStore(), looking.look, 5.0)
    with store.connecting():
        store.set("a key", "a word")
    del looking
    assert is_alive() is None
    assert store.get("a key") == b"a word"


def test_who_advances_groups_can_read_what_others_have_written_in_the_store_of_a_quorum():
    """As a rank does whose connection is closed: otherwise a failure of another rank would be taken for its death."""
    store = ConnectingStore(torch.distributed.HashStore(), lambda: None, 5.0)
    store.set("failure", "rank 1 has raised")
    found = []

    class Reading:
        def advance(self):
            found.append(rank_store.BoundedStore(store).do(lambda shared: shared.get("failure")))
            return True

    progress = progress_engine(os.getpid())
    progress.add(Reading())
    progress.progress()
    assert found == [b"rank 1 has raised"]


def test_who_cannot_commit_lets_those_go_that_wait_for_it_before_it_meets_them(lone, monkeypatch):
    """One of them may be on another node than the dead rank, and would wait for this one until the timeout."""
    training = elastic.ElasticTraining(lone, {"model": ppe_ddp.DistributedDataParallel(torch.nn.Linear(8, 1))})
    done = []
    failures = SimpleNamespace(check=lambda: None, wait=_closed)
    groups = SimpleNamespace(world_size=3, control=None, failures=failures, close=lambda: done.append("closes"))
    monkeypatch.setattr(training, "_reducer", SimpleNamespace(groups=groups))
    monkeypatch.setattr(training, "_meet", lambda *, is_ready: done.append(f"meets: {is_ready}") or True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: SimpleNamespace(is_completed=lambda: True))
    assert len([*training._commit()]) == 1
    assert done == ["closes", "meets: True"]
    assert training.committed == 1


def _closed(*_):
    raise RuntimeError("gloo: connection closed by peer")


def test_a_distributed_optimizer_is_refused(lone):
    model = ppe_ddp.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = ppe_ddp.DistributedOptimizer(torch.optim.SGD, model, lr=0.1)
    with pytest.raises(TypeError, match="'optimizer' is a DistributedOptimizer"):
        elastic.ElasticTraining(lone, {"model": model, "optimizer": optimizer})
    with pytest.raises(ppe_ddp.UnusableError, match="the wrapper has a DistributedOptimizer"):
        elastic.ElasticTraining(lone, {"model": model})


def test_what_a_process_that_joins_would_not_get_is_refused(lone):
    kept, later = (ppe_ddp.DistributedDataParallel(torch.nn.Linear(8, 1)) for _ in range(2))
    state = power.PowerSGDState(None, start_powerSGD_iter=2)
    kept.register_comm_hook(state, power.powerSGD_hook)
    with pytest.raises(ppe_ddp.UnusableError, match="hook powerSGD_hook keeps a state of its own"):
        elastic.ElasticTraining(lone, {"model": kept})
    training = elastic.ElasticTraining(lone, {"model": later})
    with pytest.raises(ppe_ddp.UnusableError, match=r"join\(\) is not for ppe_ddp.elastic"), later.join():
        pass
    later.register_comm_hook(state, power.powerSGD_hook)
    with pytest.raises(ppe_ddp.UnusableError, match="a process that joins does not get"), training.step():
        pass


def test_outer_steps_are_refused(lone):
    parts = [ppe_ddp.DistributedDataParallel(torch.nn.Linear(8, 1)) for _ in range(2)]
    apart, elastically = parts
    LocalSGD(apart, torch.optim.SGD(apart.parameters(), lr=0.1), every=2)
    with pytest.raises(ppe_ddp.UnusableError, match="are not synchronized"):
        elastic.ElasticTraining(lone, {"model": apart})
    elastic.ElasticTraining(lone, {"model": elastically})
    optimizer = torch.optim.SGD(elastically.parameters(), lr=0.1)
    with pytest.raises(ppe_ddp.UnusableError, match=r"ppe_ddp\.elastic takes a synchronized backward again"):
        LocalSGD(elastically, optimizer, every=2)
    assert elastically.require_backward_grad_sync


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchft", None)
    with pytest.raises(ImportError, match=r"pip install 'ppe-ddp\[torchft\]'"):
        elastic.LighthouseMembership("http://localhost:1")
    with pytest.raises(ValueError, match="tcp://host:port"):
        elastic.StoreMembership("localhost:29400")
    torch.distributed.destroy_process_group()


def test_mpi_without_ulfm_is_refused():
    pytest.importorskip("mpi4py")
    script = "from ppe_ddp import elastic; elastic.MpiMembership()"
    job = subprocess.run([*warm_python(), "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert "mpirun --with-ft ulfm" in job.stderr


def test_nothing_of_it_is_imported_by_the_package():
    script = "import sys, ppe_ddp; assert not [name for name in sys.modules if name.startswith('ppe_ddp.elastic')]"
    subprocess.run([*warm_python(), "-c", script], check=True, timeout=60)
