"""Runs the ranks of one history one at a time, and decides by a seed who goes on at each wait and what arrives when.

Each rank is a thread that runs only while it has the baton. It gives the baton away wherever the library waits, naps or
yields: the names ``time``, ``os`` and ``threading`` of ppe_ddp's modules are replaced by those of this file. A rank
that polls runs again when something has happened since it looked, or else when virtual time has leapt on; so a timeout
of half an hour takes some hundred turns.
"""

import contextlib
import ctypes
import os
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

_LEAP_SECONDS = 0.002  # the shortest leap of time when nothing happens ...
_LEAP_PART = 0.35  # ... which grows with the time in which nothing has happened
_HANG_SECONDS = 4000.0  # more than any timeout of a program
_MOST_TURNS = 60_000
_MOST_CPU_SECONDS = 20.0  # a long history takes one
_FIRST_PID = 10_000_000  # no process of this system


def _held():
    lock = threading.Lock()
    lock.acquire()
    return lock


class Stopped(BaseException):
    """Unwinds the thread of a rank that is dead, when the history is over."""


class Unsound(AssertionError):
    """What a history must never do: the ranks hang, or their collectives do not fit together."""


@dataclass(eq=False)
class Task:
    """One thread of one rank."""

    rank: int
    name: str
    baton: Any = field(default_factory=lambda: _held())
    wake: float = 0.0
    until: Any = None  # what it waits for; None if it sleeps until `wake`
    may_look: bool = True  # whether something has happened since it looked last
    has_asked: bool = False  # whether it has asked the store since then ...
    asks: bool = True  # ... or had before that
    thread: Any = None
    is_over: bool = False
    is_dead: bool = False
    is_main: bool = False


class Scheduler:
    """The ranks of one history.

    Args:
        draw: Decides everything.
        worlds: What torch knows of its groups, by rank; made current with the rank.
        use_world: Makes one of them current.
    """

    current = None  # the scheduler of the history under way
    _histories = 0

    def __init__(self, draw, worlds, use_world):
        self.draw = draw
        self.now = 1.0  # waits take 0.0 for "not yet"
        self.turns = 0
        self.log = []
        self.failure = None
        self._worlds, self._use_world = worlds, use_world
        self._tasks = []
        self._living = []  # those that are not over, nor dead
        self._deliveries = []  # (time, what is done then)
        self.task = None
        """Who has the baton; None before the first task and after the last."""
        self._main = _held()
        self._changed_at = self.now
        self.is_over = False
        self.doom = {}  # in how many waits a rank dies
        self.signals = {}  # in how many a rank is interrupted
        self.dead = set()
        self.at_death = lambda rank: None
        Scheduler._histories += 1
        self._pid = _FIRST_PID + 1000 * Scheduler._histories

    # ------------------------------------------------------------------ for what is simulated

    def pid(self):
        """The process of this rank."""
        return os.getpid() if self.task is None else self._pid + self.task.rank

    def pid_of(self, rank):
        """The process of ``rank``."""
        return self._pid + rank

    def note(self, *event):
        """Write an event to the log."""
        task = self.task
        self.log.append((self.now, None if task is None else task.rank, event))

    def change(self, rank=None, *, in_store=False):
        """Something has happened that ``rank`` may wait for, or any rank where it is None: who asks the store alone?"""
        for task in self._living:
            if (rank is None or task.rank == rank) and (task.asks or not in_store):
                task.may_look = True
        self._changed_at = self.now

    def after(self, seconds, deliver):
        """Have ``deliver`` called some time from now on: in so many seconds at least."""
        self._deliveries.append((self.now + seconds, deliver))

    def spawn(self, rank, name, run):
        """A further thread, of ``rank``, that calls ``run``."""
        task = Task(rank, name)
        task.thread = threading.Thread(target=self._run, args=(task, run), name=f"simulated {name}", daemon=True)
        self._tasks.append(task)
        self._living.append(task)
        task.thread.start()
        return task

    def fail(self, text):
        """End the history: it is not sound."""
        self.failure = self.failure or Unsound(text)
        self.is_over = True
        if self.task is not None:
            raise Stopped

    def kill(self, rank):
        """No task of ``rank`` ever goes on."""
        for task in self._tasks:
            task.is_dead |= task.rank == rank
        self._living = [task for task in self._living if not task.is_dead]
        self.dead.add(rank)
        self.note("dies")
        self.at_death(rank)
        self.change()

    def sleep(self, seconds):
        """Sleep; others go on."""
        self._wait(None, seconds)

    def poll(self, seconds=0.0, until=bool):
        """Give the others a turn, and come back when something has happened, or some time has gone by."""
        self._wait(until, seconds)
        rank = self.task.rank
        if rank in self.signals and self.task.is_main:
            self.signals[rank] -= 1
            if self.signals[rank] == 0:
                del self.signals[rank]
                self.note("is interrupted")
                raise KeyboardInterrupt

    def wait(self, arrived, seconds=None):
        """Poll until ``arrived()``; whether it has, in so many seconds."""
        end = None if seconds is None else self.now + seconds
        while not arrived():
            if end is not None and self.now >= end:
                return False
            self.poll()
        return True

    def interrupt(self):
        """Let others go on before this one, at times."""
        if self.draw.random() < 0.15:
            self._wait(None, 0.0)

    # ------------------------------------------------------------------ the baton

    def run(self, programs):
        """Run one program for each rank to the end of all."""
        Scheduler.current = self
        try:
            for rank, program in enumerate(programs):
                self.spawn(rank, f"rank {rank}", program).is_main = True
            self._pass_on()
            self._await_end()
        finally:
            self.is_over = True
            for task in self._tasks:  # one after another, as ever
                self._hand_to(task)
                task.thread.join(60)
            Scheduler.current, self.task = None, None
        if self.failure is not None:
            raise self.failure

    def _await_end(self):
        """Wait for the end of the history; a rank that computes without end, and never waits, is stopped."""
        began = time.process_time()
        while not self._main.acquire(timeout=1.0):
            if time.process_time() - began > _MOST_CPU_SECONDS and not self.is_over:
                self._end("a rank neither waits nor ends", [self.task])
                thread = ctypes.c_ulong(self.task.thread.ident)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(Stopped))

    def _run(self, task, run):
        task.baton.acquire()
        try:
            if not self.is_over:
                self._use_world(self._worlds[task.rank])
                run()
        except Stopped:
            pass
        except BaseException as error:
            if not self.is_over:
                self.failure = Unsound(f"rank {task.rank}: {''.join(traceback.format_exception(error)[-6:])}")
                self.is_over = True
        task.is_over = True
        if not task.is_dead:
            self._living.remove(task)
        self.change(task.rank)
        self._pass_on()

    def _wait(self, until, seconds):
        task = self.task
        if self.is_over:
            raise Stopped
        if task.rank in self.doom:
            self.doom[task.rank] -= 1
            if self.doom[task.rank] == 0:
                self.kill(task.rank)
        task.until, task.wake = until, self.now + seconds
        task.may_look, task.asks, task.has_asked = False, task.has_asked, False
        self._switch()

    def _switch(self):
        task = self.task
        chosen = self._choose()
        if chosen is not task:
            self._hand_to(chosen)
            task.baton.acquire()
        if self.is_over:
            raise Stopped
        if chosen is not task:
            self._use_world(self._worlds[task.rank])

    def _pass_on(self):
        self._hand_to(self._choose())

    def _hand_to(self, task):
        self.task = task
        baton = self._main if task is None else task.baton
        if baton.locked():
            baton.release()

    def _choose(self):
        """Who goes on: a task, or None where the history is over. Delivers messages on the way."""
        draw = self.draw
        while not self.is_over:
            self.turns += 1
            living, now = self._living, self.now
            if not living:
                return None
            if self.turns > _MOST_TURNS:
                self._end("the ranks do not come to an end", living)
                break
            able = [task for task in living if task.wake <= now and (task.may_look or task.until is None)]
            if self._deliveries:
                able += [one for one in self._deliveries if one[0] <= now]
            if able:
                count = len(able)
                bits = count.bit_length()
                while (k := draw.getrandbits(bits)) >= count:  # as choice() draws
                    pass
                chosen = able[k]
                if isinstance(chosen, Task):
                    return chosen
                self._deliveries.remove(chosen)
                chosen[1]()
                self.now += 1e-6
            else:
                self._leap(living)
        return None

    def _leap(self, living):
        """Nothing can be done now: time goes on."""
        quiet = self.now - self._changed_at
        if quiet > _HANG_SECONDS:
            self._end(f"nobody has gone on for {quiet:.0f} s", living)
            return
        times = [at for at, _ in self._deliveries] + [task.wake for task in living if task.wake > self.now]
        self.now = min(times, default=self.now + max(_LEAP_SECONDS, quiet * _LEAP_PART))
        for task in living:
            if not times or self.draw.random() < 0.2:  # what it asks for now and then may have come since
                task.may_look = True

    def _end(self, why, living):
        frames = sys._current_frames()
        texts = [f"{task.name} is in {_where(frames.get(task.thread.ident))}" for task in living]
        self.failure = Unsound(f"{why}: {'; '.join(texts)}")
        self.is_over = True


def _where(frame):
    """The innermost places of ours that a thread is in."""
    places = []
    while frame is not None and len(places) < 5:
        code = frame.f_code
        if "ppe_ddp" in code.co_filename and "waiting.py" not in code.co_filename:
            places.append(f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return " < ".join(places)


# ---------------------------------------------------------------------- what ppe_ddp sees


class _Shim:
    """A module of Python's, some names of which are others."""

    def __init__(self, module, **names):
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name):
        value = self.__dict__[name] = getattr(self._module, name)
        return value


def _monotonic():
    return Scheduler.current.now


def _perf_counter_ns():
    return int(Scheduler.current.now * 1e9)


def _sleep(seconds):
    # A nap in a loop that polls: it ends when something happens, as a nap is shorter than that takes.
    Scheduler.current.poll(0.0 if seconds < 0.05 else seconds)


def _yield():
    Scheduler.current.poll()


def _getpid():
    return os.getpid() if Scheduler.current is None else Scheduler.current.pid()


class _Event:
    """``threading.Event``."""

    def __init__(self):
        self._is_set = False

    def set(self):
        self._is_set = True
        if Scheduler.current is not None:
            Scheduler.current.change()

    def clear(self):
        self._is_set = False

    def is_set(self):
        return self._is_set

    def wait(self, timeout=None):
        return Scheduler.current.wait(self.is_set, timeout)


class _Thread:
    """``threading.Thread``, as a further task of the rank that starts it."""

    def __init__(self, group=None, target=None, name="", args=(), kwargs=None, *, daemon=None):
        self._call = (target, args, kwargs or {})
        self.name, self._task = name, None

    def start(self):
        target, args, kwargs = self._call
        scheduler = Scheduler.current
        self._task = scheduler.spawn(scheduler.task.rank, self.name, lambda: target(*args, **kwargs))

    def is_alive(self):
        return self._task is not None and not self._task.is_over

    def join(self, timeout=None):
        if Scheduler.current is not None:  # Python ends otherwise
            Scheduler.current.wait(lambda: self._task.is_over, timeout)


class _Pool:
    """``ThreadPoolExecutor`` of one thread that is given one call, which is its own ``Future`` too."""

    def __init__(self, _workers, thread_name_prefix=""):
        self._name, self._error = thread_name_prefix, None

    def submit(self, function, *args):
        self._thread = _Thread(target=self._run, name=self._name, args=(function, *args))
        self._thread.start()
        return self

    def _run(self, function, *args):
        try:
            function(*args)
        except Exception as error:
            self._error = error

    def done(self):
        return not self._thread.is_alive()

    def result(self):
        self._thread.join()
        if self._error is not None:
            raise self._error

    def shutdown(self):
        pass


@contextlib.contextmanager
def simulated_time():
    """While this is entered, ppe_ddp's modules see virtual time, and the ranks' own processes and threads."""
    clock = _Shim(time, monotonic=_monotonic, perf_counter_ns=_perf_counter_ns, sleep=_sleep)
    system = _Shim(os, getpid=_getpid, sched_yield=_yield)
    threads = _Shim(threading, Event=_Event, Thread=_Thread)
    instead = {
        id(time): clock,
        id(os): system,
        id(threading): threads,
        id(ThreadPoolExecutor): _Pool,
        id(time.monotonic): _monotonic,
        id(time.perf_counter_ns): _perf_counter_ns,
        id(time.process_time_ns): _perf_counter_ns,  # the two are alike: nothing is done by other threads
        id(time.thread_time_ns): _perf_counter_ns,
        id(time.sleep): _sleep,
    }
    before = []
    for name, module in list(sys.modules.items()):
        if name.startswith("ppe_ddp"):
            before += [(module, key, value) for key, value in vars(module).items() if id(value) in instead]
    for module, key, value in before:
        setattr(module, key, instead[id(value)])
    try:
        yield
    finally:
        for module, key, value in before:
            setattr(module, key, value)
