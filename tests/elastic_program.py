"""Replicas that train by `ppe_ddp.elastic`, are killed or stopped in phases that follow from a seed, and start again.

    python tests/elastic_program.py --seeds 0:20

Every replica writes what it does to a file of its own, which outlives it. One process replays that afterwards: who took
part in each step with which rows has to lead to the same weights. The store is served by a process that takes no part.
"""

import argparse
import ctypes
import faulthandler
import itertools
import json
import logging
import multiprocessing
import os
import random
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ppe_ddp
from ppe_ddp import elastic
from ppe_ddp.backends.group_internals import TCPStore
from ppe_ddp.backends.rank_store import ConnectingStore
from ppe_ddp.compression import ErrorFeedback, PowerSGD
from ppe_ddp.elastic import training as training_module
from ppe_ddp.elastic.training import ElasticTraining
from ppe_ddp.engine.synchronizer import BucketSynchronizer
from ppe_ddp.testing.nodes import Nodes

HUB = "10.0.0.254"
LEFT_OUT = 3  # the exit code of a replica that others have gone on without
FORK = multiprocessing.get_context("fork")
ROWS, BATCH, SECONDS = 1000, 4, 120
DATA = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
# Where a replica is killed: the function that it is about to call, or has called, so many times.
PHASES = {
    "forward": (nn.Tanh, "forward"),
    "mask": (BucketSynchronizer, "start_negotiation"),
    "bucket": (BucketSynchronizer, "make_schedule"),
    "vote": (BucketSynchronizer, "_vote"),
    "commit": (ElasticTraining, "_commit"),
    "hand over": (BucketSynchronizer, "_hand_over"),
    "optimizer": (torch.optim.Adagrad, "step"),
    "meet": (elastic.StoreMembership, "meet"),
    "connect": (ElasticTraining, "_connecting_store"),
    "address": (ConnectingStore, "set"),
    "init": (dist, "init_process_group"),
    "group": (ppe_ddp.DistributedDataParallel, "_move"),
    "state": (ElasticTraining, "_share_state"),
    "divide": (ElasticTraining, "_divide"),
}


class Total(nn.Module):
    """Adds up what passes, in a buffer that is in state dicts and in one that is not."""

    def __init__(self):
        super().__init__()
        self.register_buffer("saved", torch.zeros(()))
        self.register_buffer("transient", torch.zeros(()), persistent=False)

    def forward(self, hidden):
        self.saved += hidden.detach().sum()
        self.transient += self.saved
        return hidden


class Branches(nn.Module):
    """A network that takes another path for other rows."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.head = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), Total()) for _ in range(3))

    def forward(self, rows):
        hidden = self.norm(self.stem(DATA[rows]))
        return self.head(hidden + self.branches[rows[0] % 3](hidden)).square().mean()


def network():
    torch.manual_seed(0)
    net = Branches().double()
    net.stem.weight.data = net.stem.weight.data.t().contiguous().t()  # as a weight in channels_last, in another order
    return net


def optimizer_of(net):
    """One that goes through a weight and its sum of squares in their order of memory.

    By ``eps`` rounding stays small where a gradient is nothing else, as of a bias before a BatchNorm.
    """
    return torch.optim.Adagrad(net.parameters(), lr=0.05, eps=0.01, fused=True)


def values_of(tensors):
    return torch.cat([tensor.detach().flatten().double() for tensor in tensors])


def files_in(folder):
    return sorted(path for path in Path(folder).iterdir() if path.is_file())


class Log:
    def __init__(self, folder, name):
        self._file = os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, what, *values):
        os.write(self._file, (json.dumps([what, time.monotonic(), *values]) + "\n").encode())


def membership_of(place, size):
    if place == "mpi":
        return elastic.MpiMembership(timeout=10, host="127.0.0.1")
    if place.startswith("tcp:"):
        return elastic.StoreMembership(place, size=size, timeout=30, silence=1.0)
    return elastic.LighthouseMembership(place, size=size, timeout=10, every=0.3, host="127.0.0.1")


def end_later(seconds, number, log):
    """Let a child send this process a signal, unless it has ended before."""
    own = os.pidfd_open(os.getpid())
    if os.fork() == 0:
        if not select.select([own], [], [], seconds)[0]:
            log("stopped" if number == signal.SIGSTOP else "killed", "any")
            signal.pidfd_send_signal(own, number)
        os._exit(0)
    os.close(own)


def cut_network():
    """Cut this node off from all others, for ever."""
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)


def arm(phase, occurrence, after, stop, log):
    """Kill or stop this process where it calls a function for the time of this number; ``any``: in so many ms."""
    if phase == "any":
        end_later(occurrence / 1000, signal.SIGSTOP if stop else signal.SIGKILL, log)
        return
    owner, name = PHASES[phase]
    call, count = getattr(owner, name), 0

    def armed(*args, **kwargs):
        nonlocal count
        count += 1
        if count != occurrence:
            return call(*args, **kwargs)
        if stop == "cut":
            log("cut", phase)
            cut_network()
            return call(*args, **kwargs)
        if after:
            call(*args, **kwargs)
        log("stopped" if stop else "killed", phase)
        os.kill(os.getpid(), signal.SIGSTOP if stop else signal.SIGKILL)
        return call(*args, **kwargs)

    setattr(owner, name, armed)


def fail(*_):
    raise ArithmeticError("this rank alone")


class Ballast:
    """State of so many MB that a replica has besides, and a step that takes so many seconds more, as on a device.

    Every replica begins with other numbers, and all end with those of the first.
    """

    def __init__(self, megabytes, seconds):
        self.content, self.seconds = torch.full((megabytes * 250_000,), os.getpid() % 1000.0), seconds
        self._turned = torch.arange(2**18).view(512, 512).bfloat16().t()
        self.best = None

    def state_dict(self):
        return {"content": self.content, "turned": [self._turned, (self._turned[:2], self.best)]}

    def load_state_dict(self, state):
        self.content.copy_(state["content"])
        turned, (start, nothing) = state["turned"]
        assert torch.equal(turned, self._turned)
        assert torch.equal(start, self._turned[:2])
        assert nothing is None


def enter(words):
    """Go on in the namespaces of a node, which are named in these words of ``nsenter``, by a child of this process."""
    libc, folder = ctypes.CDLL(None), os.getcwd()
    files = [os.open(word.partition("=")[2], os.O_RDONLY) for word in words if word.startswith("--") and "=" in word]
    assert not any([libc.setns(file, 0) for file in files])
    child = os.fork()
    if not child:
        libc.prctl(1, signal.SIGKILL)  # when its parent has died
        os.chdir(folder)
        return
    while True:  # as the child does
        _, status = os.waitpid(child, os.WUNTRACED)
        if os.WIFEXITED(status):
            os._exit(os.WEXITSTATUS(status))
        os.kill(os.getpid(), os.WSTOPSIG(status) if os.WIFSTOPPED(status) else os.WTERMSIG(status))


def replica(
    folder,
    name,
    place,
    size,
    steps,
    fault=None,
    compressor=None,
    raises_at=None,
    timeout=20.0,
    node=(),
    ballast=(0, 0),
    saves_every=0,
    compiled=False,
    collective=False,
    unsendable=False,
):
    if node:
        enter(node)
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    torch.set_num_threads(1)
    training_module._LARGE_NBYTES = 1024  # so that weights go by themselves
    log = Log(folder, name)
    logging.basicConfig(filename=Path(folder) / f"{name}.log", level=logging.INFO, format="%(asctime)s %(message)s")
    membership = membership_of(place, size)
    net = network()
    model = ppe_ddp.DistributedDataParallel(net, bucket_cap_mb=0.001)
    if compressor is not None:
        model.register_comm_hook(compressor)
    optimizer, ballast = optimizer_of(net), Ballast(*ballast)
    torch.manual_seed(os.getpid())
    log("starts", membership.name)
    if unsendable:
        net.register_forward_hook(lambda *_: setattr(ballast, "best", np.mean([1.0])))
    if collective:
        net.register_forward_hook(all_reduce_own)
    if fault is not None:
        arm(*fault, log)
    training = checkpointer = None
    try:
        parts = {"model": model, "optimizer": optimizer, "ballast": ballast}
        training = ElasticTraining(membership, parts, timeout=timeout)
        assert training.committed or dist.get_world_size() < 3 or torch.initial_seed() == os.getpid()
        if saves_every:
            saved = {"model": model, "optimizer": optimizer, "mean": AveragedModel(model)}
            checkpointer = ppe_ddp.Checkpointer(Path(folder) / "checkpoints", saved)
        log("joined", training.committed, dist.get_world_size(), values_of(net.buffers()).tolist())
        train(training, net, model, optimizer, ballast, raises_at, steps, log, checkpointer, saves_every, compiled)
    except ppe_ddp.UnusableError as error:
        log("late", str(error))
        sys.exit(LEFT_OUT if training is not None else 0)


def all_reduce_own(_net, _inputs, output):
    dist.all_reduce(torch.ones_like(output))  # as for a contrastive loss


def train(training, net, model, optimizer, ballast, raises_at, steps, log, checkpointer, saves_every, compiled):
    def take(rows, before):
        with training.step():
            loss = model(rows)
            time.sleep(ballast.seconds)
            if before == raises_at and dist.get_rank() == 1:
                loss.register_hook(fail)
            if -before == raises_at and dist.get_rank() == 1:  # behind the last message, as a compressor may
                training._reducer.synchronizer.commits = fail
            loss.backward()

    take = torch.compile(take, backend="eager") if compiled else take
    for rows in training.batches(ROWS, BATCH, steps):
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        optimizer.zero_grad()
        before = training.committed
        log("takes", before, rows)
        try:
            take(rows, before)
        except (ArithmeticError, ppe_ddp.PeerAbortedError):
            raises_at = None
            training._reducer.synchronizer.commits = training._commit
            log("drops", before)
            continue
        log("commits", before, training.names, training.committed)
        optimizer.step()
        if saves_every and training.committed % saves_every == 0:
            checkpointer.save(training.committed)
    state = itertools.chain(net.buffers(), [ballast.content.double().sum()])
    log("ends", values_of(net.parameters()).tolist(), values_of(state).tolist())


def replica_of_torchft(folder, name, place, size, steps, fault=None, timeout=5.0, **_):
    """The same by torchft's own wrapper, manager and optimizer; the network is static: one path for all."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    faulthandler.dump_traceback_later(SECONDS, exit=True)
    torch.set_num_threads(1)
    log, limit = Log(folder, name), timedelta(seconds=timeout)
    os.dup2(os.open(Path(folder) / f"{name}.log", os.O_WRONLY | os.O_CREAT), 2)
    net = network()
    inner = optimizer_of(net)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    if fault is not None:
        arm(*fault, log)

    def load(state):
        net.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=2,
        timeout=limit,
        rank=0,
        world_size=1,
        replica_id=f"replica_{name[1:]}",
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=place,
        hostname="localhost",
    )
    log("starts", name)
    model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, inner)
    while manager.current_step() < steps:
        optimizer.zero_grad()
        try:
            model([3 * random.randrange(ROWS // 3) for _ in range(BATCH)]).backward()
        except (AssertionError, AttributeError) as error:  # of torchft 0.2.0 over gloo, whatever has failed
            log("asserts")
            manager.report_error(error)
        optimizer.step()
        if manager.current_step() > 0:
            log("commits", manager.current_step() - 1, manager.num_participants(), manager.current_step())
    log("ends", values_of(net.parameters()).tolist(), [])
    time.sleep(1)  # for those who still need the checkpoint
    manager.shutdown(wait=False)


def serve(connection, hub):
    if hub:
        enter(hub)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # it listens on all interfaces
    connection.send(f"tcp://{HUB if hub else '127.0.0.1'}:{store.port}")
    connection.recv()


def lighthouse(connection, _):
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=1000, quorum_tick_ms=50, heartbeat_timeout_ms=700
    )
    connection.send(server.address())
    connection.recv()


class ElasticJob:
    """The replicas of one run, each started again when it was killed."""

    def __init__(self, folder, *, engine="store", size=4, nodes=None, **options):
        self.nodes = nodes
        self.folder, self.engine, self.size, self.options = folder, engine, size, options
        self._connection, theirs = FORK.Pipe()
        hub = nodes.entering([]) if nodes is not None else []
        server = FORK.Process(target=serve if engine == "store" else lighthouse, args=(theirs, hub), daemon=True)
        server.start()
        self.place = self._connection.recv()
        self._server, self.running = server, {}
        self._count = 0

    def start(self, fault=None):
        name, self._count = f"r{self._count}", self._count + 1
        options = {**self.options, "fault": fault}
        if self.nodes is not None:
            options["node"] = self.nodes.entering([], node=(self._count - 1) % len(self.nodes.names))
        target = replica_of_torchft if self.engine == "torchft" else replica
        process = FORK.Process(
            target=target, name=name, args=(self.folder, name, self.place, self.size), kwargs=options
        )
        process.start()
        self.running[process.sentinel] = process

    def kill_every(self, pause, seconds):
        """Train for so many seconds, and kill one that trains and start another at each pause; 0: none is killed."""
        for _ in range(self.size):
            self.start()
        while len(self._that_train()) < self.size:
            time.sleep(0.05)
        first = time.monotonic()
        while (left := first + seconds - time.monotonic()) > 0:
            time.sleep(min(left, pause or left))
            if pause and left > pause:
                victim = random.choice([process for process in self._that_train() if process.is_alive()])
                victim.kill()
                victim.join()
                del self.running[victim.sentinel]
                self.start()
        for process in self.running.values():
            process.kill()
            process.join()
        return first, first + seconds

    def _that_train(self):
        written = {path.name for path in files_in(self.folder) if '"commits"' in path.read_text()}
        return [process for process in self.running.values() if process.name in written]

    def run(self, faults, *, restarts=True):
        """Run to the end; the exit codes of all replicas."""
        codes = []
        for place in range(self.size):
            self.start(faults.get(place))
        deadline, written, stopped = time.monotonic() + SECONDS, 0, {}
        try:
            while self.running and time.monotonic() < deadline:
                if (so_far := sum(path.stat().st_size for path in files_in(self.folder))) > written:
                    deadline, written = time.monotonic() + SECONDS, so_far
                for ready in wait(list(self.running), timeout=0.2):
                    process = self.running.pop(ready)
                    process.join()
                    codes.append(process.exitcode)
                    # torchft leaves it to a launcher to start those again that end with an error of its own.
                    is_to_start = process.exitcode == -signal.SIGKILL or (self.engine == "torchft" and process.exitcode)
                    if is_to_start and restarts and 0 not in codes and self._count < 5 * self.size:
                        self.start()
                if self.engine != "store" and 0 in codes and time.monotonic() > deadline - SECONDS + 10:
                    break  # who has come too late waits for others
                self._go_on(stopped)
        finally:
            for process in self.running.values():
                codes.append("late" if self.engine != "store" and 0 in codes else "hangs")
                process.kill()
            self._connection.send("end")
            self._server.join()
        return codes

    def _go_on(self, stopped):
        """Kill what has stood still for a while, as a watchdog does."""
        for process in self.running.values():
            try:
                state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if state == "T" and time.monotonic() - stopped.setdefault(process.pid, time.monotonic()) > 4:
                process.kill()


def run_mpi(folder, faults, steps, size):
    """The same under mpirun, where nobody joins; the exit codes, as far as mpirun tells."""
    mpirun = shutil.which("mpirun", path=Path(sys.executable).parent) or "mpirun"
    words = [mpirun, "--with-ft", "ulfm", "-n", str(size), sys.executable, __file__]
    with Path(folder, "mpirun.log").open("w") as file:
        job = subprocess.run(
            [*words, "--mpi", folder, "--faults", json.dumps(faults), "--steps", str(steps)],
            timeout=3 * SECONDS,
            check=False,
            stdout=file,
            stderr=file,
        )
    return [0 if job.returncode in (0, 128 + signal.SIGKILL) else job.returncode]


def replica_of_mpi(folder, faults, steps):
    rank, size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    PHASES["meet"] = elastic.MpiMembership, "meet"
    fault = faults.get(str(rank))
    replica(folder, f"r{rank}", "mpi", size, steps, None if fault is None else (*fault[:3], False))


def read(folder):
    logs = {}
    for path in files_in(folder):
        if path.suffix != ".log":
            logs[path.name] = [json.loads(line) for line in path.read_text().splitlines()]
    return logs


def replay(logs, steps):
    """The weights to which one process comes, with what the replicas say that they have done; checks what they say.

    Also the buffers, of which each module has those of the first rank that has used it.
    """
    names = {entry[2]: name for name, log in logs.items() for entry in log if entry[0] == "starts"}
    rows = {(name, entry[2]): entry[3] for name, log in logs.items() for entry in log if entry[0] == "takes"}
    took_part = {}
    for log in logs.values():
        for what, _, *values in log:
            if what == "commits":
                step, members, after = values
                assert after == step + 1, f"a block has committed {after - step} steps"
                assert took_part.setdefault(step, members) == members, f"step {step} is torn: {members}"
    assert sorted(took_part) == list(range(steps)), "steps are missing"
    net = network()
    optimizer = optimizer_of(net)
    seen = set()
    for step in range(steps):
        optimizer.zero_grad()
        members = took_part[step]
        taken = [row for member in members for row in rows[names[member], step]]
        assert len(taken) == len(set(taken)) == BATCH * len(members), f"step {step} has rows twice"
        if BATCH * (step + 1) * 5 < ROWS:  # five replicas at most at a time: the first time through
            assert not seen & set(taken), f"step {step} has rows that were taken before"
            seen.update(taken)
        before = {name: buffer.clone() for name, buffer in net.named_buffers()}
        after = {}
        for member in members:
            (net(rows[names[member], step]) / len(members)).backward()
            written = {name: buffer.clone() for name, buffer in net.named_buffers() if not buffer.equal(before[name])}
            after = {**written, **after}
            for name, buffer in net.named_buffers():
                buffer.copy_(before[name])
        for name, value in after.items():
            net.get_buffer(name).copy_(value)
        optimizer.step()
    return values_of(net.parameters()), values_of(net.buffers())


def check(logs, codes, steps, *, replays=True, with_buffers=False):
    """What is wrong with a run; empty where nothing is.

    Buffers are those of one process only if no rank dies after it may have sent its own, and none joins meanwhile.
    """
    allowed = {0, -signal.SIGKILL, "late"}
    if any(entry[0] in ("cut", "stopped") for log in logs.values() for entry in log):
        allowed.add(LEFT_OUT)
    if not allowed.issuperset(codes):
        return f"exit codes {codes}"
    ends = [entry[2:] for log in logs.values() for entry in log if entry[0] == "ends"]
    if not ends:
        return "nobody has come to the end"
    for what, values in zip(("weights", "buffers"), zip(*ends, strict=True), strict=True):
        if any(one != values[0] for one in values):
            return f"the replicas have ended with different {what}"
    for values in (entry[4] for log in logs.values() for entry in log if entry[0] == "joined"):
        totals = values[-6:]  # of the three branches
        if any(saved and not transient for saved, transient in zip(totals[::2], totals[1::2], strict=True)):
            return f"a replica has joined without the buffers that no state dict has: {totals}"
    if not replays:
        return ""
    try:
        expected, buffers = replay(logs, steps)
    except (AssertionError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    if with_buffers and not torch.allclose(torch.tensor(ends[0][1][:-1]).double(), buffers):
        return f"the buffers are {ends[0][1]}, and those of one process {buffers.tolist()}"
    off = float((expected - torch.tensor(ends[0][0]).double()).abs().max())
    return "" if off < 1e-6 else f"the weights are {off:g} off those of one process"


def delays(logs):
    """By phase, the seconds from each fault to the next step that a survivor has committed."""
    commits = sorted((entry[1], entry[3]) for log in logs.values() for entry in log if entry[0] == "commits")
    found = []
    for log in logs.values():
        own = next((entry[2] for entry in log if entry[0] == "starts"), "")
        for what, at, *rest in log:
            if what in ("killed", "stopped", "cut"):
                most = max((count for moment, count in commits if moment <= at and isinstance(count, int)), default=0)
                after = (moment - at for moment, members in commits if moment > at and is_without(members, own, most))
                found.append((rest[0] if what == "killed" else what, next(after, None)))
    return found


def rate(logs, first, last):
    """Committed rows a second of a rank that trains, between two moments; how long those that join took."""
    work = alive = 0
    joins = []
    for log in logs.values():
        moments = [entry[1] for entry in log if entry[0] == "commits"]
        work += sum(first < at < last for at in moments)
        if moments:  # one that is killed at `last` or before has trained from its first step to its last
            alive += max(0, min(moments[-1], last) - max(moments[0], first))
        begun = [entry for entry in log if entry[0] in ("starts", "joined")]
        joins += [end[1] - start[1] for start, end in itertools.pairwise(begun) if end[2:] and end[2] > 0]
    return work / alive, joins


def is_without(members, own, most):
    """Whether a step was committed without one; torchft tells only how many have taken part."""
    return own not in members if isinstance(members, list) else members < most


def faults_of(seed, steps, size, nodes=None):
    """One fault or two, which replica has them, and where; on nodes, the network of a node may be cut instead."""
    rng = random.Random(seed)
    faults = {}
    for victim in rng.sample(range(size), rng.choice([1, 1, 1, 2])):
        phase = rng.choice(["any"] * len(PHASES) + list(PHASES))
        is_rare = phase in ("meet", "connect", "address", "init", "group", "state", "divide")
        occurrence = rng.choice([1, 2]) if is_rare else rng.randrange(1, steps)
        occurrence = rng.randrange(1, 12) if phase == "address" else occurrence
        occurrence = rng.randrange(3000) if phase == "any" else occurrence
        faults[victim] = phase, occurrence, rng.random() < 0.5, rng.random() < 0.1
    if nodes is not None and rng.random() < 0.2:
        phase = rng.choice(["forward", "mask", "bucket", "vote", "commit", "hand over", "optimizer"])
        return {rng.randrange(size): (phase, rng.randrange(1, steps), False, "cut")}
    return faults


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="0:20")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--engine", default="store")
    parser.add_argument("--mpi", help=argparse.SUPPRESS)
    parser.add_argument("--faults", type=json.loads, help="by replica: the phase, its number, after it?, stop?")
    parser.add_argument("--size", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--no-restarts", action="store_true")
    parser.add_argument("--compressed", action="store_true")
    parser.add_argument("--collective", action="store_true", help="call one of the program's own in each forward")
    parser.add_argument(
        "--unsendable", action="store_true", help="a part has what cannot be sent; who joins is refused"
    )
    parser.add_argument("--compiled", action="store_true", help="compile each step")
    parser.add_argument("--saves-every", type=int, default=0, help="steps, for checkpoints")
    parser.add_argument("--buffers", action="store_true", help="compare buffers with those of one process, too")
    parser.add_argument("--raises-at", type=int, help="a step in which rank 1 raises; -step: behind the last message")
    parser.add_argument("--timeout", type=float, default=3.0)
    parser.add_argument("--kill-every", type=float, nargs=2, metavar="SECONDS", help="the pause, and how long in all")
    parser.add_argument("--ballast", type=float, nargs=2, default=(10, 0), help="MB of state, seconds of each step")
    options = parser.parse_args()
    ballast = (int(options.ballast[0]), options.ballast[1])
    if not options.mpi:
        optimizer_of(network())  # what that imports takes two seconds, which each replica would need after its fork
    if options.kill_every:
        folder = tempfile.mkdtemp(prefix="elastic_")
        job = ElasticJob(folder, engine=options.engine, size=options.size, steps=10**9, timeout=3.0, ballast=ballast)
        span = job.kill_every(*options.kill_every)
        found, joins = rate(read(folder), *span)
        text = f"median {statistics.median(joins):.2f} s, most {max(joins):.2f} s" if joins else "none"
        print(f"{found:.2f} steps a second of a rank that trains; joined in: {text} ({folder})")
        return
    if options.mpi:
        replica_of_mpi(options.mpi, options.faults, options.steps)
        return
    first, _, last = options.seeds.partition(":")
    found, bad = {}, []
    for seed in range(int(first), int(last or int(first) + 1)):
        folder = tempfile.mkdtemp(prefix="elastic_")
        nodes = Nodes(options.nodes) if options.nodes > 1 else None
        faults = options.faults or faults_of(seed, options.steps, options.size, nodes)
        faults = {int(place): fault for place, fault in faults.items()}
        if options.engine == "mpi":
            codes = run_mpi(folder, faults, options.steps, options.size)
        else:
            compressor = ErrorFeedback(PowerSGD(rank=1)) if options.compressed else None
            rest = {
                "compressor": compressor,
                "raises_at": options.raises_at,
                "timeout": options.timeout,
                "nodes": nodes,
                "ballast": ballast,
                "saves_every": options.saves_every,
                "compiled": options.compiled,
                "collective": options.collective,
                "unsendable": options.unsendable,
            }
            job = ElasticJob(folder, engine=options.engine, size=options.size, steps=options.steps, **rest)
            is_cut = any(fault[3] == "cut" for fault in faults.values())
            codes = job.run(faults, restarts=not options.no_restarts and not is_cut)
        if nodes is not None:
            nodes.close()
        logs = read(folder)
        print(end=f"{seed} ", file=sys.stderr, flush=True)
        # Who fails in a forward counts as zero in that step.
        replays = not (options.compressed or options.collective or options.engine == "torchft")
        wrong = check(logs, codes, options.steps, replays=replays, with_buffers=options.buffers)
        refused = [entry[2] for log in logs.values() for entry in log if entry[0] == "late" and "'ballast'" in entry[2]]
        if options.unsendable and not refused:
            wrong = wrong or "nobody was refused"
        if wrong:
            bad.append(seed)
            print(f"seed {seed}: {faults}: {wrong} ({folder})", flush=True)
        for phase, seconds in delays(logs):
            found.setdefault(phase, []).append(seconds)
    for phase, seconds in sorted(found.items()):
        known = [one for one in seconds if one is not None]
        line = f"median {statistics.median(known):.2f} s, most {max(known):.2f} s" if known else "none after it"
        print(f"{phase}: {len(seconds)} faults, next commit: {line}")
    print(f"{len(bad)} bad seeds: {bad}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
