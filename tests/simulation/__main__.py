"""Runs histories: ``--seeds A:B`` or ``--seconds S`` many, ``--seed N`` one with its log, ``--shrink`` a small one."""

import argparse
import gc
import logging
import math
import multiprocessing
import os
import sys
import time
from functools import partial

import torch

from .found import found
from .processes import simulated
from .program import Program
from .replay import failure_of, replay, shrunk
from .split import SplitProgram

_CORES = sorted(os.sched_getaffinity(0))
_COLLECT = 100  # histories between collections


def run(programs, *, stop_after=5, tell=lambda program, text: None, until=math.inf):
    """Run each of ``programs``, up to so many that fail; what is wrong with these, each told as it is found.

    ``until`` this time of ``perf_counter()``, after which none begins.
    """
    failed = {}
    with simulated():
        for number, program in enumerate(programs):
            if time.perf_counter() > until:
                break
            text = failure_of(program)
            if text:
                failed[program] = text
                tell(program, text)
                if len(failed) == stop_after:
                    break
            if number % _COLLECT == 0:
                gc.collect()
                gc.freeze()  # what a first history has loaded needs no look any more
    return failed


def prepare(cores=None):
    """Let this process be one that runs histories: on one core, where its threads hand over in half the time.

    Args:
        cores: Those for several such processes, of which this one takes the next.
    """
    os.sched_setaffinity(0, {cores.get() if cores else _CORES[os.getpid() % len(_CORES)]})
    if os.sched_getscheduler(0) == os.SCHED_OTHER:  # in batches, who is woken takes the core when it is given away
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    torch.set_num_threads(1)
    logging.getLogger("ppe_ddp").setLevel(logging.CRITICAL)  # a rank that looks alone has more forwards
    gc.disable()  # a rank must not end what belongs to another


def _tell(program, text):
    print(f"seed {program.seed}: {text}", flush=True)
    print(
        f"    once more, with its log: python -m tests.simulation --seed {program.seed}{_kind_of(program)}", flush=True
    )


def _kind_of(program):
    if isinstance(program, SplitProgram):
        return " --split"
    return " --outer" * bool(program.outer) + " --saving" * program.saves


def _run_seeds(seeds, program_of, until):
    """How many of some seeds were run, and how many fail, which are told."""
    ran = []
    programs = (ran.append(seed) or program_of(seed) for seed in seeds)
    failed = run(programs, tell=_tell, stop_after=50, until=until)
    return len(ran), len(failed)


def run_seeds(seeds, jobs, program_of=Program.of, until=math.inf):
    """How many of ``seeds`` were run in so many processes, the first ones ``until`` some time, and how many fail."""
    if jobs == 1:
        return _run_seeds(seeds, program_of, until)
    count = jobs if until < math.inf else 4 * jobs
    parts = [seeds[first::count] for first in range(count)]
    fork = multiprocessing.get_context("fork")
    cores = fork.SimpleQueue()
    for job in range(jobs):
        cores.put(_CORES[job % len(_CORES)])
    with fork.Pool(jobs, prepare, [cores]) as pool:
        done = pool.imap_unordered(partial(_run_seeds, program_of=program_of, until=until), parts)
        return tuple(map(sum, zip(*done, strict=True)))


def program_of_kind(arguments):
    """By seed, the programs of the kind that the command line asks for."""
    kinds = {"split": SplitProgram.of, "outer": Program.with_outer_steps, "saving": Program.saving}
    return next((of for name, of in kinds.items() if getattr(arguments, name)), Program.of)


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--shrink", action="store_true", help="leave out of --seed what it needs not to fail")
    parser.add_argument("--found", action="store_true", help="histories that have failed once")
    parser.add_argument("--seeds", metavar="A:B", help="without B from A on; 0:100, or with --seconds from the time on")
    parser.add_argument("--seconds", type=float, help="end after so long")
    parser.add_argument("--split", action="store_true", help="all seeds are of models that are split over the ranks")
    parser.add_argument("--outer", action="store_true", help="all are of ranks that train by themselves")
    parser.add_argument("--saving", action="store_true", help="all that can save checkpoints")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    arguments = parser.parse_args()
    prepare()
    program_of = program_of_kind(arguments)
    if arguments.seed is not None:
        with simulated():
            program = program_of(arguments.seed)
            return replay(shrunk(program, tell=print) if arguments.shrink else program)
    start = time.perf_counter()
    if arguments.found:
        programs = found()
        count, failed, which = len(programs), len(run(programs, tell=_tell)), "programs that have failed once"
    else:
        usual = "0:100" if arguments.seconds is None else f"{int(time.time())}:"
        first, _, last = (arguments.seeds or usual).partition(":")
        first, last, until = int(first), int(last or int(first) + 10**9), math.inf
        if arguments.seconds is not None:
            until = start + arguments.seconds
            print(f"seeds from {first} on, for {arguments.seconds:.0f} s", flush=True)
        count, failed = run_seeds(range(first, last), arguments.jobs, program_of, until)
        which = f"seeds, {first}:{last}," if until == math.inf else f"seeds from {first} on"
    seconds = time.perf_counter() - start
    print(f"{count} {which} in {seconds:.1f} s, {count / seconds:.1f} a second: {failed} failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
