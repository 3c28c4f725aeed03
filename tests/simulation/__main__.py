"""Runs histories: ``--seed N`` replays one with its log, ``--seeds A:B`` runs many and says how fast."""

import argparse
import gc
import logging
import sys
import time

import torch

from law_models import Kind, LayerRecipe, Recipe
from law_steps import StepKind, TrainingStep

from .faults import Fault, Where
from .processes import simulated
from .program import Program, Run
from .scheduler import Unsound


def run(programs, *, stop_after=5, tell=lambda program, text: None):
    """Run each of ``programs``; what is wrong, by program. ``tell`` is called with each that fails."""
    failed = {}
    with simulated():
        for number, program in enumerate(programs):
            history = Run(program)
            try:
                history.run()
            except Unsound as error:
                failed[program] = str(error)
                tell(program, str(error))
                if len(failed) == stop_after:
                    break
            if number % 50 == 0:
                gc.collect()
    return failed


def found():
    """Programs that have failed once, each in several orders of events."""
    steps = (TrainingStep(StepKind.ONE_BACKWARD), TrainingStep(StepKind.ONE_BACKWARD))
    recipe = Recipe(1, (LayerRecipe(Kind.LINEAR), LayerRecipe(Kind.SKIPPED)))
    programs = []
    for seed in range(40):
        # A step was complete on one rank only, where no rank sees the processes of others.
        torn = Fault(0, 1, Where.LOSS, 0)
        # A rank has died while the ranks connected again: the others waited for the timeout, and named one another.
        dies = (Fault(0, 0, Where.LOSS, 0), Fault(1, 1, Where.DIES, 1 + seed))
        for nodes, faults in [(("",) * 3, (torn,)), (("here",) * 3, dies)]:
            programs.append(Program(seed, 3, (recipe,), {"forward_sync_buffers": True}, False, steps, nodes, faults))
    return programs


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
    parser.add_argument("--found", action="store_true", help="histories that have failed once")
    parser.add_argument("--seeds", default="0:100")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("ppe_ddp").setLevel(logging.ERROR)  # a rank that looks alone has more forwards
    gc.disable()  # a rank must not end what belongs to another
    if arguments.seed is not None:
        return replay(arguments.seed)
    first, last = map(int, arguments.seeds.split(":"))
    start = time.process_time()
    programs = found() if arguments.found else [Program.of(seed) for seed in range(first, last)]
    failed = run(programs, tell=lambda program, text: print(f"seed {program.seed}: {text}", flush=True))
    seconds = time.process_time() - start
    rate = len(programs) / seconds
    which = "programs that have failed once" if arguments.found else f"seeds, {first}:{last},"
    print(f"{len(programs)} {which} in {seconds:.1f} s of the processor: {rate:.0f} a second, {len(failed)} failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
