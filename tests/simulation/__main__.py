"""Runs histories: ``--seed N`` replays one with its log, ``--seeds A:B`` runs many and says how fast."""

import argparse
import gc
import logging
import sys
import time

import torch

from .processes import simulated
from .program import Program, Run
from .scheduler import Unsound


def run(seeds, *, stop_after=5):
    """Run the histories of ``seeds``; what is wrong, by seed."""
    failed = {}
    with simulated():
        for number, seed in enumerate(seeds):
            history = Run(Program.of(seed))
            try:
                history.run()
            except Unsound as error:
                failed[seed] = str(error)
                if len(failed) == stop_after:
                    break
            if number % 50 == 0:
                gc.collect()
    return failed


def replay(seed):
    """Run one history, and print its log."""
    history = Run(Program.of(seed))
    for field, value in vars(history.program).items():
        print(f"{field} = {value}")
    error = ""
    with simulated():
        try:
            history.run()
        except Unsound as unsound:
            error = str(unsound)
    for at, rank, event in history.scheduler.log:
        print(f"{at:12.6f}  {'' if rank is None else f'rank {rank}':7} {' '.join(map(str, event))}")
    print(error or "sound")
    return bool(error)


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", default="0:100")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("ppe_ddp").setLevel(logging.ERROR)  # a rank that looks alone has more forwards
    gc.disable()  # a rank must not end what belongs to another
    if arguments.seed is not None:
        return replay(arguments.seed)
    first, last = map(int, arguments.seeds.split(":"))
    start = time.process_time()
    failed = run(range(first, last))
    seconds = time.process_time() - start
    for seed, text in failed.items():
        print(f"seed {seed}: {text}")
    print(f"{last - first} seeds in {seconds:.1f} s of the processor: {(last - first) / seconds:.0f} a second, {len(failed)} failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
