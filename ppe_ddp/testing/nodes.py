"""Nodes made of one machine, each with its own network, processes, shared memory and host name.

    with Nodes(2, mbit=1000) as nodes:
        nodes.launch("mpirun", [sys.executable, "/path/train.py"], ranks=(2, 2), timeout=60)

                 hub: a bridge; mpirun runs here
        10.0.0.254 ┬──────────────────┬─── ...
              eth0 │ 10.0.0.1    eth0 │ 10.0.0.2
                 node n0            node n1

The nodes share only the file system, as by NFS: nothing on one can reach the memory or the processes of another. Needs
Linux and root. Several programs may make nodes at the same time, as nothing has a name outside of its namespaces.
Nothing is left when this process ends in any way.
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
"""MPICH's mpirun; torchrun on each node; or no launcher: ranks are started with torchrun's variables."""

_PROGRAMS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "mount": "util-linux"}
_FIRST_PORT = 29500
_MOST = 200
_BRIDGE = "lan0"
_REMOTE_SHELL = "/dev/shm/remote_shell"
# The burst holds the largest packet of a virtual device; the queue is long enough to drop none.
_SHAPE = "tbf rate {mbit}mbit burst 128kb latency 400ms"
_READY = "ready"
_SECONDS = 20.0
# Names in /proc/PID/ns. unshare itself stays outside of the PID namespace that it makes for its children.
_FILES = {"net": "net", "mount": "mnt", "ipc": "ipc", "uts": "uts", "pid": "pid_for_children"}
_TIMED_OUT = 124
_GRACE_SECONDS = 5.0
_LOOK_SECONDS = 0.01

# $1: host name; $2: content of /etc/hosts. After the rm the file exists only where it is mounted.
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


class Nodes(contextlib.AbstractContextManager["Nodes"]):
    """Nodes on this machine, which the constructor makes, and :meth:`close` or the end of a ``with`` block ends.

    They run one job at a time: starting a job ends all processes of the one before.

    Args:
        count: The number of nodes.
        mbit: The speed of each node's link in each direction, in Mbit/s; None for no limit.
        latency_ms: The time of a packet from one node to another, in ms; None for no delay. Needs the kernel's netem.

    Raises:
        NodesError: Nodes cannot be made here; :func:`nodes_missing` tells beforehand.
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
        with self._stack:  # ends what has been made if an error follows
            self._nodes = [self._namespaces(("net", "mount", "pid", "ipc", "uts"), name) for name in self.names]
            self._hub = self._namespaces(("net", "mount", "uts"), "hub")
            self._hub.do(["sh", "-c", f"cat > {_REMOTE_SHELL}; chmod +x {_REMOTE_SHELL}"], text=self._remote_shell())
            self._connect()
            if mbit or latency_ms:
                self._shape(mbit, latency_ms)
            self._stack = self._stack.pop_all()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the nodes and all of their processes."""
        if self._job is not None:
            self._job.end()
        self._stack.close()

    def run(
        self, node: int, words: Sequence[str], *, timeout: float, environment: Mapping[str, str] | None = None
    ) -> Finished:
        """Run one command on node number ``node``; arguments and result are those of :meth:`launch`."""
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
        """Start a job and wait for its end; what still runs after the timeout is killed.

        Args:
            launcher: ``"mpirun"`` of MPICH; ``"torchrun"`` on each node; or ``"ranks"`` for no launcher: each rank is
                started with torchrun's variables.
            words: The command of each rank, with absolute paths.
            ranks: The number of ranks on each node.
            timeout: Seconds.
            environment: Variables in addition to those of this process.

        Raises:
            NodesError: There is no mpirun, or it is not MPICH's.
            ValueError: The launcher is unknown, or ``ranks`` has not a positive number for each node.
        """
        return self.start(launcher, words, ranks=ranks, environment=environment).wait(timeout)

    def start(
        self, launcher: str, words: Sequence[str], *, ranks: Sequence[int], environment: Mapping[str, str] | None = None
    ) -> NodeJob:
        """Start a job as :meth:`launch` does, without waiting for its end."""
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
        """The command that runs ``words`` on a node, or on the hub, in the current folder."""
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
        """The script that Hydra calls instead of ssh, with ``-x``, a host and a command line."""
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
            if latency_ms:  # only where a packet leaves a node, or it would be delayed twice
                _add_queue(node, "eth0", f"{'parent 1:1' if mbit else 'root'} netem delay {latency_ms}ms limit 100000")


def nodes_missing(*, mbit: float | None = None, latency_ms: float | None = None) -> str:
    """The reason why such :class:`Nodes` cannot be made here; empty if they can. It makes one to try, in 0.1 s."""
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
    """The path of the mpirun beside this Python, or else on PATH; NodesError if there is none."""
    mpirun = find_mpirun()
    if mpirun is None:
        raise NodesError("there is no mpirun: pip install 'ppe_ddp[mpi]'")
    return mpirun


# ---------------------------------------------------------------------- their namespaces, and what runs in them


class NodesError(RuntimeError):
    """Nodes cannot be made here, or a job cannot be started on them; the message says why."""


class Namespaces:
    """New Linux namespaces, and a shell that keeps them until :meth:`close`; NodesError if they cannot be made.

    The shell reads from a pipe that only this process holds, so the namespaces and every process in them end when this
    process does. ``kinds`` are some of ``net``, ``mount``, ``ipc``, ``uts`` and ``pid``, which also has a new
    ``/proc``; ``name`` is the host name, ``hosts`` the content of ``/etc/hosts``.
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
        """The process id of ``unshare``, by which other programs name the network namespace."""
        return self._process.pid

    def entering(self, words: Sequence[str], *, folder: str | None = None) -> list[str]:
        """The command that runs ``words`` in these namespaces, in ``folder`` or in the root."""
        files = [f"--{kind}=/proc/{self.pid}/ns/{_FILES[kind]}" for kind in self._kinds]
        there = [] if folder is None else ["env", "-C", folder]
        return ["nsenter", *files, "--", *there, *words]

    def do(self, words: Sequence[str], *, text: str = "") -> str:
        """Run a short command in there with ``text`` as its input; returns its output, or raises NodesError."""
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
        """End all processes in there except the shell that keeps the namespaces; needs a PID namespace."""
        assert "pid" in self._kinds, "every process of this machine would end"
        subprocess.run(self.entering(["sh", "-c", "kill -KILL -1"]), stderr=subprocess.DEVNULL, check=False)

    def close(self) -> None:
        """End the namespaces, with a PID namespace also every process in there; returns when they are gone."""
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
        code: The first exit code that is not 0, in the order of nodes; 124 if all are 0 but some commands were killed.
        output: The standard output, node by node.
        errors: The standard error, node by node.
    """

    code: int
    output: str
    errors: str


class NodeJob:
    """Commands that run at the same time on nodes; when they end, every process on these nodes ends."""

    def __init__(self, started: Sequence[tuple[Sequence[str], _Environment]], nodes: Sequence[Namespaces]) -> None:
        self._nodes = nodes
        # Not pipes, which would fill up as nobody reads them.
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
        """Wait for the end of all commands, at most ``timeout`` seconds, and end what is left.

        After one has failed, the others get five seconds: a launcher may wait for ranks that do not come.
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
        """End the commands and all processes on the nodes; ``reason`` is added to the errors if they were killed."""
        if self._result is not None:
            return
        codes = [process.poll() for process in self._processes]
        for process, code in zip(self._processes, codes, strict=True):
            if code is None:  # the id of a process that has ended may be another's by now
                os.killpg(process.pid, signal.SIGKILL)
        for node in self._nodes:
            node.end_processes()  # killpg() has not reached torchrun's and Hydra's children, which have other sessions
        for process in self._processes:
            process.wait()
        code = next((code for code in codes if code), _TIMED_OUT if reason else 0)
        self._result = Finished(code, self.text("output"), "\n".join(filter(None, (self.text("errors"), reason))))
        for file in (*self._texts["output"], *self._texts["errors"]):
            file.close()

    def text(self, kind: str) -> str:
        """The ``"output"`` so far, or the ``"errors"``."""
        # pread(), as the processes share the offset and go on writing.
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
# Variables of the launcher that has started this process; ranks that are started here must not see them.
_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PMI_", "PMIX_", "OMPI_COMM_", "MPI_LOCAL", "SLURM_")


class JobStarter(RankStarter):
    """Starts ranks on nodes, as the ``starter`` of :class:`Ranks`.

    Each rank connects to a socket in the file system, which all nodes share, and serves calls from there.

    Args:
        nodes: The nodes, which are in use as long as the ranks run. None for this machine, by ``"mpirun"``.
        launcher: A launcher, as for :meth:`ppe_ddp.testing.nodes.Nodes.launch`.
        ranks: The number of ranks on each node.
    """

    def __init__(self, nodes: Nodes | None, launcher: str, ranks: Sequence[int]) -> None:
        self._nodes, self._launcher, self._ranks = nodes, launcher, tuple(ranks)
        self._job: NodeJob | None = None

    def start(self, stack_files: Sequence[Path]) -> Iterator[tuple[ForeignProcess, Connection]]:
        """Start the job; yield each rank's process and pipe, in the order of ranks.

        Raises:
            NodesError: The launcher failed, or a rank did not connect.
            ValueError: Another number of ranks is asked for than the nodes have.
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
        """End the launcher and all processes on the nodes."""
        if self._job is not None:
            self._job.end()
            self._job = None

    def errors(self) -> str:
        """The end of the job's standard error."""
        return "" if self._job is None else self._job.text("errors")[-_TOLD:]

    def _accepted(self, listener: socket.socket, count: int) -> Iterator[tuple[int, tuple[ForeignProcess, Connection]]]:
        deadline = time.monotonic() + _START_SECONDS
        for arrived in range(count):
            while not select.select([listener], [], [], _ARRIVAL_SECONDS)[0]:
                assert self._job is not None
                if not self._job.is_running or time.monotonic() > deadline:
                    raise NodesError(f"{arrived} of {count} ranks have come by {self._launcher}:\n{self.errors()}")
            connected, _ = listener.accept()
            # The kernel gives the peer's process id as this process sees it, not as the node does.
            credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pipe = Connection(connected.detach())
            rank: int = pipe.recv()
            yield rank, (ForeignProcess(struct.unpack("3i", credentials)[0]), pipe)


def _local_mpirun(words: Sequence[str], ranks: int) -> NodeJob:
    environment = {name: os.environ.get(name, value) for name, value in _OF_OPEN_MPI.items()}
    others = [word for name in os.environ if name.startswith(_OF_LAUNCHERS) for word in ("-u", name)]
    return NodeJob([(["env", *others, found_mpirun(), "-n", str(ranks), *words], environment)], ())
