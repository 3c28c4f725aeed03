"""Random faults that are caught, wrappers made and dropped, modules that grow, for as long as it is told to.

    make soak MINUTES=10
    mpirun -n 2 python tests/soak.py --seconds 60
    mpirun -n 3 python tests/soak.py --failures 1000     each followed by a right step

Memory, descriptors and threads of each rank have to stay flat: what is judged is how much they grow in a round, by the
median of the slopes between all pairs of samples (Theil and Sen), which some steps and spikes do not move.
"""

import argparse
import ctypes
import gc
import logging
import math
import os
import random
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

import failing
from one_process import seeded
from ppe_ddp import DistributedDataParallel, init_process_group
from ppe_ddp.backends.json_collectives import all_gather_json, broadcast_json
from ppe_ddp.compression import ErrorFeedback, Sign

# What may be gained in a round: a wrapper that is kept costs several descriptors and threads, and a page of each of
# three ranks for each of two groups 24 kilobytes. Measured in 1000 rounds: 0.8 to 1.7 kilobytes, of C libraries.
BOUNDS = {"kilobytes": 4.0, "descriptors": 0.4, "threads": 0.4}
# What may be gained once: the allocator goes on to find its size for some dozen rounds, an arena for each thread; and
# connections that no wrapper needs any more are kept for the next. Measured in 24 rounds: up to 236 kilobytes in each.
ONCE = {"kilobytes": 10000.0, "descriptors": 60.0, "threads": 30.0}
SAMPLE_EVERY = 4  # rounds
PROGRESS = 50  # rounds between two lines
WARM_UP = 1 / 3  # of the samples: caches fill, and the allocator finds its size


@dataclass
class Samples:
    """What this process has held, by the round in which it was looked at."""

    rounds: list[int] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in BOUNDS})

    def take(self, turn):
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 1024
        found = (resident, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
        self.rounds.append(turn)
        for values, value in zip(self.values.values(), found, strict=True):
            values.append(value)

    def growth(self):
        """How much each grows in a round."""
        start = int(len(self.rounds) * WARM_UP)
        return {name: slope(self.rounds[start:], values[start:]) for name, values in self.values.items()}


def slope(places, values):
    """The median of the slopes between all pairs of points; 0 where there are too few to tell."""
    pairs = list(zip(places, values, strict=True))
    slopes = [(b - a) / (y - x) for k, (x, a) in enumerate(pairs) for y, b in pairs[k + 1 :]]
    return statistics.median(slopes) if len(slopes) > 2 else 0.0


def leaks(found):
    """What grows faster than it may, in words; of what one rank has found in :func:`soak`."""
    growth, rounds = found["growth"], found["rounds"]
    bounds = {name: bound + ONCE[name] / rounds for name, bound in BOUNDS.items()}
    return [f"{name}: {growth[name]:.2f} a round" for name, bound in bounds.items() if growth[name] > bound]


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def grow(turn):
    """A module that gets a layer after each step."""
    wrapper = DistributedDataParallel(seeded(Growing), bucket_cap_mb=1e-3)
    for _ in range(3):
        wrapper(torch.randn(2, 8)).sum().backward()
        torch.manual_seed(turn)
        wrapper.module.layers.append(nn.Linear(8, 8))


def compress(turn):
    """A wrapper with a compressor, and a step between whose wrappers are dropped in another order."""
    wrappers = [DistributedDataParallel(seeded(Growing)) for _ in range(2)]
    wrappers[turn % 2].register_comm_hook(ErrorFeedback(Sign()))
    for wrapper in wrappers:
        wrapper(torch.randn(2, 8)).sum().backward()
    wrappers.reverse()


WAYS = sorted(failing.WAYS)
DEEDS = [*WAYS, *WAYS, "grow", "compress"]


def one_round(turn, deed):
    if deed in failing.WAYS:
        failing.hold(deed, turns=1, seed=turn)
    else:
        {"grow": grow, "compress": compress}[deed](turn)


KEPT = []
LEAKS = {
    "kilobytes": lambda: KEPT.append(torch.ones(1 << 20)),
    "descriptors": lambda: KEPT.extend(os.dup(0) for _ in range(4)),
    "threads": lambda: [threading.Thread(target=threading.Event().wait, daemon=True).start() for _ in range(4)],
    "all": lambda: [LEAKS[name]() for name in BOUNDS],
    "wrappers": lambda: KEPT.append(DistributedDataParallel(nn.Linear(2, 2))),
}


def soak(seconds, *, rounds=None, deeds=(), leak=None, seed=0, progress=0):
    """Go on for so long on all ranks of the default group.

    Args:
        seconds: For how long; it is rank 0 that looks at the clock.
        rounds: How many at most.
        deeds: What to do in a round, of ``DEEDS``; nothing for all.
        leak: One of ``LEAKS``, to leak in each round.
        seed: Of all that is random.
        progress: After how many rounds rank 0 prints how far it is; 0 for never.

    Returns:
        On every rank what each rank has found: how much grows in a round, how many rounds there were, and the first
        and the last sample.
    """
    generator, samples = random.Random(seed), Samples()
    group, begin, turn = dist.group.WORLD, time.monotonic(), 0
    while turn != rounds and broadcast_json(time.monotonic() < begin + seconds, 0, group):
        one_round(turn, generator.choice(deeds or DEEDS))
        if leak is not None:
            LEAKS[leak]()
        turn += 1
        if turn % SAMPLE_EVERY == 0:
            samples.take(turn)
        if progress and turn % progress == 0 and dist.get_rank() == 0:
            now = ", ".join(f"{name} {values[-1]:.0f}" for name, values in samples.values.items() if values)
            print(f"{time.monotonic() - begin:.0f} s: {turn} rounds; {now}", flush=True)
    ends = {name: [*values[:1], *values[-1:]] for name, values in samples.values.items()}
    return all_gather_json({"growth": samples.growth(), "rounds": turn, "ends": ends}, group)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--backend", help="of the default group, where not the launcher's")
    parser.add_argument("--rounds", type=int, help="so many at most")
    parser.add_argument("--failures", type=int, help="so many rounds, in each of which one rank fails")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deeds", nargs="*", default=[], choices=DEEDS, help="do nothing but these")
    parser.add_argument("--leak", choices=list(LEAKS), help="leak this in each round, to see that it is found")
    options = parser.parse_args()
    logging.getLogger("ppe_ddp").setLevel(logging.ERROR)
    job = init_process_group(options.backend, timeout=20)
    deeds, rounds, seconds = options.deeds, options.rounds, options.seconds
    if options.failures is not None:
        deeds, rounds, seconds = WAYS, options.failures, math.inf
    begin = time.monotonic()
    found = soak(seconds, rounds=rounds, deeds=deeds, leak=options.leak, seed=options.seed, progress=PROGRESS)
    problems = [f"rank {rank}: {text}" for rank, one in enumerate(found) for text in leaks(one)]
    if job.rank == 0:
        for rank, one in enumerate(found):
            texts = ", ".join(
                f"{name} {value:+.3f} ({' to '.join(f'{end:.0f}' for end in one['ends'][name])})"
                for name, value in one["growth"].items()
            )
            print(f"rank {rank}: {one['rounds']} rounds, growth in a round: {texts}", flush=True)
        print(f"{time.monotonic() - begin:.0f} s", flush=True)
        print("\n".join(["LEAKS", *problems]) if problems else "flat", flush=True)
    dist.destroy_process_group()
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
