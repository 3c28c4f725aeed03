"""A simulator: N ranks of the real engine in one process, one at a time, every order of events from a seed.

    __main__.py    python -m tests.simulation --seed 7    replays one history with its log; --shrink: a smaller one
                   python -m tests.simulation --seeds 0:1000
    replay.py      one history in words, and the smallest program that fails
    found.py       programs that have failed once
    program.py     what the ranks do, drawn from the seed
    wrappers.py    what they do it with
    split.py       programs of another kind: a model that is split over the ranks, by Megatron's wrapper
    split_oracle.py  one process that does the same
    outer.py       programs of ranks that train by themselves between outer steps, LocalSGD's or DiLoCo's
    outer_oracle.py  one process that does the same
    faults.py      what befalls them
    oracle.py      one process that does the same, and what a history is held to
    scheduler.py   who runs next, and virtual time; stands in for ``time``, ``os`` and ``threading`` in ppe_ddp
    group.py       the wire between the ranks: each message arrives when the scheduler delivers it
    store.py       the store that the ranks share
    processes.py   what is per process in torch and in ppe_ddp
    mutants.py     planted bugs, which the simulator has to find

Everything above the wire is the library's own code: wrapper, engine, process group, collectives, waits.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))  # where law_models and law_steps are
