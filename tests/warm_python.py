"""A Python that has imported torch: what it runs starts in a tenth of a second and not in three.

    python -IS warm_python.py NAME [-u] [-B] [-W error] (-c CODE | -m MODULE | SCRIPT) ARGUMENTS

asks the server of this name for a fork, hands it the environment, folder and open files, and ends as it does.
The fork goes on as the main program and leaves by Python's own exit. The server is started with its name alone, a file
of a socket, imports what takes long, and has one thread. Who asks from a node (of ppe_ddp.testing.Nodes) gets a fork
there.
"""

import os
import select
import signal
import socket
import struct
import sys

_HEAD = 16
_FIRST_FREE = 100  # above all descriptors that are handed over


def ask(name, words):
    """Have these words run, and end as what they are."""
    import marshal

    passed_on = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)  # until it is known to whom
    streams = [number for number in map(int, os.listdir("/proc/self/fd")) if _is_inheritable(number)]
    request = marshal.dumps((os.getcwd(), dict(os.environ), words, streams))
    server = socket.socket(socket.AF_UNIX)
    server.connect(name)
    socket.send_fds(server, [b"%*d" % (_HEAD, len(request))], streams)
    server.sendall(request)
    pid = int(server.recv(_HEAD))
    for number in passed_on:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    code = int(server.recv(_HEAD) or -signal.SIGKILL)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _is_inheritable(descriptor):
    try:
        return os.get_inheritable(descriptor)
    except OSError:  # that of the folder, which is closed by now
        return False


def serve(name):
    """Fork for each that asks until the standard input closes; returns in each fork, with the words that it runs."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(name)
    listening.listen(64)
    print("listening", flush=True)
    _import_what_takes_long()
    while listening in select.select([listening, 0], [], [])[0]:
        asking, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            return _fork_for(asking)
        asking.close()
        while _reap():
            pass
    os.unlink(name)
    os._exit(0)


def _import_what_takes_long():
    import gc

    import torch

    if not torch.cuda.is_available():
        sys.modules["triton"] = None  # it complains, at the end of a process, of what gc.freeze() has kept
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.run

    import ppe_ddp.testing  # noqa: F401

    gc.freeze()


def _reap():
    try:
        return os.waitpid(-1, os.WNOHANG)[0]
    except ChildProcessError:
        return 0


def _enter_node_of(asking):
    """Let the forks of this process be where the one is that asks."""
    import ctypes

    own, kinds = os.getpid(), ("ipc", "uts", "net", "pid", "mnt")  # the last hides the others
    pid = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[0]
    paths = [(f"/proc/{own}/ns/{kind}", f"/proc/{pid}/ns/{kind}") for kind in kinds]
    others = [os.open(there, os.O_RDONLY) for here, there in paths if not os.path.samefile(here, there)]
    for descriptor in others:
        if ctypes.CDLL(None).setns(descriptor, 0) != 0:
            raise OSError("it cannot be entered")
        os.close(descriptor)


def _fork_for(asking):
    """Returns in the program's process; this one tells of its end, and ends it with the one that has asked."""
    import marshal

    head, descriptors, _, _ = socket.recv_fds(asking, _HEAD, _FIRST_FREE)
    request = b""
    while len(request) < int(head):
        request += asking.recv(int(head) - len(request))
    folder, environment, words, streams = marshal.loads(request)
    _enter_node_of(asking)
    pid = os.fork()
    if pid == 0:
        asking.send(b"%*d" % (_HEAD, os.getpid()))  # as it is called there
        asking.close()
        _take_over(folder, environment, descriptors, streams)
        return words
    for descriptor in [0, 1, 2, *descriptors]:
        os.close(descriptor)
    program = os.pidfd_open(pid)
    if program not in select.select([program, asking], [], [])[0]:
        signal.pidfd_send_signal(program, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        asking.send(b"%*d" % (_HEAD, code))
    finally:
        os._exit(0)


def _take_over(folder, environment, descriptors, streams):
    import fcntl

    descriptors = [(descriptor, fcntl.fcntl(descriptor, fcntl.F_DUPFD, _FIRST_FREE)) for descriptor in descriptors]
    for given, _ in descriptors:  # all of them first: one may have the number that another is to have
        os.close(given)
    for (_, moved), stream in zip(descriptors, streams, strict=True):
        os.dup2(moved, stream)
        os.close(moved)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))


def _run(words):
    """Do as Python does with these words."""
    import runpy
    import types
    import warnings

    while words[0].startswith("-") and words[0] not in ("-c", "-m"):
        if words.pop(0) == "-W":
            warnings.simplefilter(words.pop(0))
    option = words.pop(0) if words[0] in ("-c", "-m") else ""
    name = words.pop(0)
    sys.argv[:] = [option or name, *words]
    sys.path[0] = os.path.dirname(os.path.abspath(name)) if not option else "" if option == "-c" else os.getcwd()
    if option == "-m":
        sys.modules.pop(name, None)  # runpy warns of a module that was imported before
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if not option:
        main.__file__ = name
        with open(name) as file:
            source = file.read()
    exec(compile(source if not option else name, name if not option else "<string>", "exec"), main.__dict__)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        ask(sys.argv[1], sys.argv[2:])
    _run(serve(sys.argv[1]))
