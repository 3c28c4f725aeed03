"""Several nodes on one machine: each with a network, processes, shared memory and a host name of its own.

    with Nodes(2, mbit=1000) as nodes:
        nodes.launch("mpirun", [sys.executable, "/path/train.py"], ranks=(2, 2), timeout=60)

                 hub, where mpirun runs: a bridge
        10.0.0.254 ┬──────────────────┬─── ...
              eth0 │ 10.0.0.1    eth0 │ 10.0.0.2
                 node n0            node n1

Nothing on one node can reach the memory or the processes of another, and only the file system is common, as by NFS.
Linux, as root. Nothing has a name outside of its namespaces, so several programs may make nodes at a time; and
nothing is left when this process ends, however it does.
"""

from __future__ import annotations

import contextlib
import os
import platform
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from ppe_ddp.launchers import find_mpirun
from ppe_ddp.testing.ranks import ForeignProcess, RankStarter

LAUNCHERS = ("mpirun", "torchrun", "ranks")
"""MPICH's mpirun; torchrun on each node; every rank by itself, with torchrun's variables."""

_PROGRAMS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "mount": "util-linux"}
_FIRST_PORT = 29500
_MOST = 200
_BRIDGE = "lan0"
_REMOTE_SHELL = "/dev/shm/remote_shell"
# A bucket of tokens that holds the largest packet that a virtual device sends, and a queue that drops none of ours.
_SHAPE = "tbf rate {mbit}mbit burst 128kb latency 400ms"
_READY = "ready"
_SECONDS = 20.0
# A process of an earlier PID namespace sees the one that it makes for its children only by this name.
_FILES = {"net": "net", "mount": "mnt", "ipc": "ipc", "uts": "uts", "pid": "pid_for_children"}
_TIMED_OUT = 124
_GRACE_SECONDS = 5.0
_LOOK_SECONDS = 0.01

# $1: host name; $2: what /etc/hosts says. The file is gone, but for where it is mounted.
_MACHINE = f"""
mount -t tmpfs tmpfs /dev/shm
echo "$1" > /proc/sys/kernel/hostname
printf '%s' "$2" > /dev/shm/hosts
mount --bind /dev/shm/hosts /etc/hosts
rm /dev/shm/hosts
echo {_READY}
exec cat > /dev/null
"""

_Environment = Mapping[str, object]


class Nodes:
    """Nodes that are made at once and end with :meth:`close`, or with the ``with`` block.

    They are for one job at a time: what is started ends with all of its processes before the next is.

    Args:
        count: How many.
        mbit: What each node's link carries in each direction, in Mbit/s; None for no limit.
        latency_ms: How long a packet takes from a node to another; None for no delay. Needs the kernel's netem.

    Raises:
        NodesError: They cannot be made here; :func:`nodes_missing` says it beforehand.
        ValueError: A number is out of range.
    """

    def __init__(self, count: int = 2, *, mbit: float | None = None, latency_ms: float | None = None) -> None:
        if not 1 <= count <= _MOST or (mbit or 1) <= 0 or (latency_ms or 0) < 0:
            raise ValueError(f"there are 1 to {_MOST} nodes, with positive mbit: not {count}, {mbit}, {latency_ms}")
        missing = _programs_missing(is_shaped=bool(mbit or latency_ms))
        if missing:
            raise NodesError(missing)
        self.names = tuple(f"n{node}" for node in range(count))
        self.addresses = tuple(f"10.0.0.{node + 1}" for node in range(count))
        self._launches = 0
        self._job: NodeJob | None = None
        self._stack = contextlib.ExitStack()
        with self._stack:  # whatever has been made is ended if the next cannot be
            self._nodes = [self._namespaces(("net", "mount", "pid", "ipc", "uts"), name) for name in self.names]
            self._hub = self._namespaces(("net", "mount", "uts"), "hub")
            self._hub.do(["sh", "-c", f"cat > {_REMOTE_SHELL}; chmod +x {_REMOTE_SHELL}"], text=self._remote_shell())
            self._connect()
            if mbit or latency_ms:
                self._shape(mbit, latency_ms)
            self._stack = self._stack.pop_all()

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the nodes with all of their processes."""
        if self._job is not None:
            self._job.end()
        self._stack.close()

    def run(
        self, node: int, words: Sequence[str], *, timeout: float, environment: Mapping[str, str] | None = None
    ) -> Finished:
        """Run one command on the node of this number; arguments and result are those of :meth:`launch`."""
        return self._started([(self.entering(words, node=node), environment or {})]).wait(timeout)

    def launch(
        self,
        launcher: str,
        words: Sequence[str],
        *,
        ranks: Sequence[int],
        timeout: float,
        environment: Mapping[str, str] | None = None,
    ) -> Finished:
        """Start a job and wait for its end; what is still running after the timeout is killed.

        Args:
            launcher: ``"mpirun"``, ``"torchrun"`` or ``"ranks"``, as in :data:`LAUNCHERS`.
            words: The command of each rank, with absolute paths.
            ranks: How many of them on each node.
            timeout: Seconds.
            environment: What they have besides this process's own.

        Raises:
            NodesError: There is no mpirun, or not MPICH's.
            ValueError: The launcher is unknown, or these are not ranks for every node.
        """
        return self.start(launcher, words, ranks=ranks, environment=environment).wait(timeout)

    def start(
        self, launcher: str, words: Sequence[str], *, ranks: Sequence[int], environment: Mapping[str, str] | None = None
    ) -> NodeJob:
        """Start a job, as :meth:`launch`, and do not wait for it."""
        self._launches += 1
        if len(ranks) != len(self.names) or min(ranks) < 1:
            raise ValueError(f"{len(self.names)} nodes need as many positive numbers of ranks, but these are {ranks}")
        if launcher not in LAUNCHERS:
            raise ValueError(f"launcher should be one of {', '.join(LAUNCHERS)}, but it is {launcher!r}")
        if launcher == "mpirun":
            return self._started([(self.entering(self._mpirun(words, ranks)), environment or {})])
        address, port = self.addresses[0], _FIRST_PORT + self._launches
        started: list[tuple[list[str], _Environment]] = []
        for node, count in enumerate(ranks):
            if launcher == "torchrun":
                torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(ranks)}"]
                torchrun += [f"--node_rank={node}", f"--nproc_per_node={count}", f"--master_addr={address}"]
                torchrun += [f"--master_port={port}", "--no-python", *words]
                started.append((self.entering(torchrun, node=node), environment or {}))
                continue
            job = {**(environment or {}), "WORLD_SIZE": sum(ranks), "MASTER_ADDR": address, "MASTER_PORT": port}
            for local in range(count):
                place = {"RANK": len(started), "LOCAL_RANK": local}
                started.append((self.entering(words, node=node), {**job, **place}))
        return self._started(started)

    def _mpirun(self, words: Sequence[str], ranks: Sequence[int]) -> list[str]:
        mpirun = found_mpirun()
        version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
        if "HYDRA" not in version.upper():
            raise NodesError(f"{mpirun} is not MPICH's, whose options are used here")
        hosts = ",".join(f"{name}:{count}" for name, count in zip(self.names, ranks, strict=True))
        options = ["-launcher", "ssh", "-launcher-exec", _REMOTE_SHELL, "-iface", _BRIDGE]
        return [str(Path(mpirun).absolute()), *options, "-hosts", hosts, "-n", str(sum(ranks)), *words]

    def entering(self, words: Sequence[str], *, node: int | None = None) -> list[str]:
        """The command that does ``words`` on a node, or on the hub, in the current folder."""
        there = self._hub if node is None else self._nodes[node]
        return there.entering(words, folder=os.getcwd())

    def _started(self, commands: Sequence[tuple[list[str], _Environment]]) -> NodeJob:
        if self._job is not None:
            self._job.end()
        self._job = NodeJob(commands, self._nodes)
        return self._job

    def _namespaces(self, kinds: Sequence[str], name: str) -> Namespaces:
        lines = ["127.0.0.1 localhost", *map(" ".join, zip(self.addresses, self.names, strict=True)), "10.0.0.254 hub"]
        made = Namespaces(kinds, name, "".join(f"{line}\n" for line in lines))
        self._stack.callback(made.close)
        return made

    def _remote_shell(self) -> str:
        """The script that Hydra calls in the place of ssh: with -x, a host and a command line."""
        cases = "\n".join(
            f'{name}) exec {" ".join(node.entering(["sh", "-c"]))} "$*";;'
            for name, node in zip(self.names, self._nodes, strict=True)
        )
        return f'#!/bin/sh\n[ "$1" = -x ] && shift\nhost=$1\nshift\ncase $host in\n{cases}\nesac\nexit 255\n'

    def _connect(self) -> None:
        lines = [f"link add {_BRIDGE} type bridge", f"addr add 10.0.0.254/24 dev {_BRIDGE}"]
        lines += ["link set lo up", f"link set {_BRIDGE} up"]
        for number, node in enumerate(self._nodes):
            lines += [f"link add v{number} type veth peer name eth0 netns {node.pid}"]
            lines += [f"link set v{number} master {_BRIDGE} up"]
        self._hub.do(["ip", "-batch", "-"], text="\n".join(lines))
        for node, address in zip(self._nodes, self.addresses, strict=True):
            lines = [f"addr add {address}/24 dev eth0", "link set lo up", "link set eth0 up"]
            node.do(["ip", "-batch", "-"], text="\n".join(lines))

    def _shape(self, mbit: float | None, latency_ms: float | None) -> None:
        for number, node in enumerate(self._nodes):
            if mbit:
                _add_queue(node, "eth0", f"root handle 1: {_SHAPE.format(mbit=mbit)}")
                _add_queue(self._hub, f"v{number}", f"root {_SHAPE.format(mbit=mbit)}")
            if latency_ms:  # where a packet leaves a node, and not once more where it arrives
                _add_queue(node, "eth0", f"{'parent 1:1' if mbit else 'root'} netem delay {latency_ms}ms limit 100000")


def nodes_missing(*, mbit: float | None = None, latency_ms: float | None = None) -> str:
    """Why :class:`Nodes` of this kind cannot be made here; empty where they can. It makes one and ends it, in 0.1 s."""
    try:
        Nodes(1, mbit=mbit, latency_ms=latency_ms).close()
    except NodesError as error:
        return str(error)
    return ""


def _add_queue(where: Namespaces, device: str, queue: str) -> None:
    try:
        where.do(["tc", "qdisc", "add", "dev", device, *queue.split()])
    except NodesError as error:
        raise NodesError(f"links cannot be shaped here: {error}") from None


def _programs_missing(*, is_shaped: bool) -> str:
    if platform.system() != "Linux":
        return f"nodes are made of Linux namespaces, and this is {platform.system()}"
    if os.geteuid() != 0:
        return "nodes are made of namespaces, which only root may make"
    needed = _PROGRAMS | ({"tc": "iproute2"} if is_shaped else {})
    missing = [f"{program} (of {package})" for program, package in needed.items() if shutil.which(program) is None]
    return f"there is no {' and no '.join(missing)}" if missing else ""


def found_mpirun() -> str:
    """The path of the mpirun that belongs to this Python, or else is on PATH; NodesError where there is none."""
    mpirun = find_mpirun()
    if mpirun is None:
        raise NodesError("there is no mpirun: pip install 'ppe_ddp[mpi]'")
    return mpirun


# ---------------------------------------------------------------------- their namespaces, and what runs in them


class NodesError(RuntimeError):
    """This process cannot make nodes on this machine; the message says why not."""


class Namespaces:
    """New Linux namespaces, and a shell that keeps them until :meth:`close`; NodesError where they cannot be made.

    They have no names that another run could meet. The shell reads from a pipe that this process alone holds, so they
    end, with every process in them, however this one ends. ``kinds`` are some of ``net``, ``mount``, ``ipc``, ``uts``
    and ``pid``, with the last of which ``/proc`` is new as well; ``name`` is the host name, ``hosts`` the content of
    ``/etc/hosts``.
    """

    def __init__(self, kinds: Sequence[str], name: str, hosts: str) -> None:
        own = ["--fork", "--kill-child", "--mount-proc"] if "pid" in kinds else []
        shell = ["sh", "-e", "-c", _MACHINE, "sh", name, hosts]
        self._kinds = tuple(kinds)
        try:
            self._process = subprocess.Popen(
                ["unshare", *[f"--{kind}" for kind in kinds], *own, *shell],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,  # a Ctrl-C is for this process, which then ends them
            )
        except OSError as error:
            raise NodesError(f"unshare cannot be run ({error}); it comes with util-linux") from error
        try:
            self._await_script()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """A process of theirs, as this process sees it: for what takes a network namespace by a process."""
        return self._process.pid

    def entering(self, words: Sequence[str], *, folder: str | None = None) -> list[str]:
        """The command that does ``words`` in these namespaces, in this folder or the root."""
        files = [f"--{kind}=/proc/{self.pid}/ns/{_FILES[kind]}" for kind in self._kinds]
        there = [] if folder is None else ["env", "-C", folder]
        return ["nsenter", *files, "--", *there, *words]

    def do(self, words: Sequence[str], *, text: str = "") -> str:
        """Run a short command in there that reads ``text``, and give what it prints; NodesError where it fails."""
        try:
            done = subprocess.run(
                self.entering(words), input=text, capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NodesError(f"{' '.join(words)}: {error}") from error
        if done.returncode:
            raise NodesError(f"{' '.join(words)}: {_one_line(done.stderr) or f'exit code {done.returncode}'}")
        return done.stdout

    def end_processes(self) -> None:
        """End all processes in there but the shell that keeps them; only where there is a PID namespace."""
        assert "pid" in self._kinds, "every process of this machine would end"
        subprocess.run(self.entering(["sh", "-c", "kill -KILL -1"]), stderr=subprocess.DEVNULL, check=False)

    def close(self) -> None:
        """End them, and where there is a PID namespace every process in there; returns when they are gone."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            self._process.wait(_SECONDS)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise

    def _await_script(self) -> None:
        output = self._process.stdout
        assert output is not None
        first = output.readline() if select.select([output], [], [], _SECONDS)[0] else ""
        if first.strip() != _READY:
            self._process.kill()
            text = _one_line(first + output.read()) if first else ""
            raise NodesError(text or f"unshare has not made {', '.join(self._kinds)} within {_SECONDS:g} s")


def _one_line(text: str) -> str:
    return "; ".join(" ".join(line.split()) for line in text.strip().splitlines())


@dataclass(frozen=True)
class Finished:
    """The result of a job.

    Attributes:
        code: The first exit code that is not 0, in the order of nodes; 124 if there is none but some were killed.
        output: What the job has printed, node by node.
        errors: What it has written to its standard error, node by node.
    """

    code: int
    output: str
    errors: str


class NodeJob:
    """Commands that run at the same time, and have the nodes for themselves: with them every process there ends."""

    def __init__(self, started: Sequence[tuple[Sequence[str], _Environment]], nodes: Sequence[Namespaces]) -> None:
        self._nodes = nodes
        # Files without a name: pipes would fill up while nobody reads.
        self._texts = {kind: [tempfile.TemporaryFile() for _ in started] for kind in ("output", "errors")}  # noqa: SIM115
        self._processes: list[subprocess.Popen[bytes]] = []
        self._result: Finished | None = None
        try:
            for number, (words, environment) in enumerate(started):
                process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=self._texts["output"][number],
                    stderr=self._texts["errors"][number],
                    start_new_session=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1", **{k: str(v) for k, v in environment.items()}},
                )
                self._processes.append(process)
        except BaseException:
            self.end()
            raise

    @property
    def is_running(self) -> bool:
        """True while a command has not ended."""
        return self._result is None and any(process.poll() is None for process in self._processes)

    def wait(self, timeout: float) -> Finished:
        """Wait for the end of all commands, but no longer than ``timeout`` seconds; then end what is left.

        Once one has failed, the others have a few seconds: a launcher may wait for ranks that are not coming.
        """
        start = time.monotonic()
        deadline = start + timeout
        failed = False
        try:
            while self.is_running and time.monotonic() < deadline:
                if not failed and any(process.poll() for process in self._processes):
                    failed = True
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
                time.sleep(_LOOK_SECONDS)
        finally:
            seconds = time.monotonic() - start
            self.end(f"killed after {seconds:.1f} s" if self.is_running else "")
        assert self._result is not None
        return self._result

    def end(self, reason: str = "") -> None:
        """End the commands, and what they have left on the nodes; ``reason`` says why, if it is before their time."""
        if self._result is not None:
            return
        codes = [process.poll() for process in self._processes]
        for process, code in zip(self._processes, codes, strict=True):
            if code is None:  # otherwise the number may be that of another process by now
                os.killpg(process.pid, signal.SIGKILL)
        for node in self._nodes:
            node.end_processes()  # torchrun's and Hydra's children have sessions of their own
        for process in self._processes:
            process.wait()
        code = next((code for code in codes if code), _TIMED_OUT if reason else 0)
        self._result = Finished(code, self.text("output"), "\n".join(filter(None, (self.text("errors"), reason))))
        for file in (*self._texts["output"], *self._texts["errors"]):
            file.close()

    def text(self, kind: str) -> str:
        """The ``"output"`` so far, or the ``"errors"``."""
        # By its size and place: the offset is that of the processes, which write on.
        read = (os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0) for file in self._texts[kind])
        return b"".join(read).decode(errors="replace")


# ---------------------------------------------------------------------- jobs that serve calls

_RANK = "import sys; from ppe_ddp.testing.ranks import serve_job; serve_job(sys.argv[1])"
_START_SECONDS = 120.0
_ARRIVAL_SECONDS = 0.2
_TOLD = 4000
# Open MPI refuses to run as root, or with more ranks than cores, unless it is told to.
_OF_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
# Where this process itself was started by a launcher, its ranks are not those that are started here.
_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PMI_", "PMIX_", "OMPI_COMM_", "MPI_LOCAL", "SLURM_")


class JobStarter(RankStarter):
    """Starts ranks on nodes that are used like those on this machine, as ``starter=`` of :class:`Ranks`.

    Each connects to a socket in the file system, which all nodes have in common, and serves calls from there.

    Args:
        nodes: Where; they are in use as long as the ranks are. None for this machine, by ``"mpirun"``.
        launcher: As for :meth:`ppe_ddp.testing.nodes.Nodes.launch`.
        ranks: How many on each node.
    """

    def __init__(self, nodes: Nodes | None, launcher: str, ranks: Sequence[int]) -> None:
        self._nodes, self._launcher, self._ranks = nodes, launcher, tuple(ranks)
        self._job: NodeJob | None = None

    def start(self, stack_files: Sequence[Path]) -> Iterator[tuple[ForeignProcess, Connection]]:
        """Start the job, and give each rank with its pipe, in their order.

        Raises:
            NodesError: The launcher has failed, or not all ranks have come.
            ValueError: These are not as many ranks as are for the nodes.
        """
        if len(stack_files) != sum(self._ranks):
            raise ValueError(f"{len(stack_files)} ranks are asked for, and {self._ranks} are for the nodes")
        with tempfile.TemporaryDirectory(prefix="ppe_ddp_job_") as folder, socket.socket(socket.AF_UNIX) as listener:
            address = os.path.join(folder, "calls")
            listener.bind(address)
            listener.listen(len(stack_files))
            words = [sys.executable, "-c", _RANK, address]
            if self._nodes is None:
                self._job = _local_mpirun(words, len(stack_files))
            else:
                self._job = self._nodes.start(self._launcher, words, ranks=self._ranks)
            arrived = dict(self._accepted(listener, len(stack_files)))
        if len(arrived) < len(stack_files):
            others = f"{len(stack_files)} ranks, and they take themselves for ranks {sorted(arrived)}"
            raise NodesError(f"{self._launcher} has started {others}: it is that of another MPI")
        for rank, file in enumerate(stack_files):
            process, pipe = arrived[rank]
            pipe.send(str(file))
            yield process, pipe

    def end(self) -> None:
        """End the launcher, and what is left on the nodes."""
        if self._job is not None:
            self._job.end()
            self._job = None

    def errors(self) -> str:
        """The last that the job has written to its standard error."""
        return "" if self._job is None else self._job.text("errors")[-_TOLD:]

    def _accepted(self, listener: socket.socket, count: int) -> Iterator[tuple[int, tuple[ForeignProcess, Connection]]]:
        deadline = time.monotonic() + _START_SECONDS
        for arrived in range(count):
            while not select.select([listener], [], [], _ARRIVAL_SECONDS)[0]:
                assert self._job is not None
                if not self._job.is_running or time.monotonic() > deadline:
                    raise NodesError(f"{arrived} of {count} ranks have come by {self._launcher}:\n{self.errors()}")
            connected, _ = listener.accept()
            # The kernel tells the peer's process as this one sees it, and not by its number on the node.
            credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pipe = Connection(connected.detach())
            rank: int = pipe.recv()
            yield rank, (ForeignProcess(struct.unpack("3i", credentials)[0]), pipe)


def _local_mpirun(words: Sequence[str], ranks: int) -> NodeJob:
    environment = {name: os.environ.get(name, value) for name, value in _OF_OPEN_MPI.items()}
    others = [word for name in os.environ if name.startswith(_OF_LAUNCHERS) for word in ("-u", name)]
    return NodeJob([(["env", *others, found_mpirun(), "-n", str(ranks), *words], environment)], ())
