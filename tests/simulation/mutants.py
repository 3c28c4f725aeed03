"""Planted bugs, one at a time: how many histories the simulator needs to find each.

python -m tests.simulation.mutants --seeds 0:200
"""

import argparse
import gc
import inspect
import logging
import textwrap
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from ppe_ddp.backends import rank_store
from ppe_ddp.engine import bucket, completion, failures, gradients, groups, reducer, synchronizer

from .__main__ import found, run
from .program import Program


@dataclass(frozen=True)
class Mutant:
    """One planted bug.

    Attributes:
        title: What is wrong.
        owner: The class or module that has it.
        method: Its name.
        old: What is there.
        new: What takes its place.
    """

    title: str
    owner: Any
    method: str
    old: str
    new: str

    def planted(self):
        """A patch that plants it."""
        function = getattr(self.owner, self.method)
        source = textwrap.dedent(inspect.getsource(function))
        assert self.old in source, f"{self.title}: {self.old!r} is not in {self.method}() any more"
        code = "from __future__ import annotations\n" + source.replace(self.old, self.new)
        exec(compile(code, f"<{self.title}>", "exec"), inspect.unwrap(function).__globals__, made := {})
        return mock.patch.object(self.owner, self.method, made[self.method])


SYNC, REDUCER, GROUPS = synchronizer.BucketSynchronizer, reducer.Reducer, groups.Groups
MUTANTS = [
    Mutant("a late gradient is not voted for", SYNC, "_vote", "mask[i] = 1", "mask[i] = 0"),
    Mutant("what is in .grad already is not negotiated", gradients.Gradients, "existing", "mask[i] = 1", "pass"),
    Mutant("what had come is lost when put back", gradients.Gradients, "put_back", "= gradient + there", "= gradient"),
    Mutant("gradients are not put back", SYNC, "put_back", "schedule.put_back()", "()"),
    Mutant("a failure is not reported", GROUPS, "fail", "self.failures.report(", "bool("),
    Mutant("connections are not made anew", GROUPS, "fail", "self._close()", "pass"),
    Mutant("a lost step is not counted", GROUPS, "skip_step", "self.step += 1", "pass"),
    Mutant("the ranks go on with the smallest step", GROUPS, "_follow", "max(outcome.words)", "min(outcome.words)"),
    Mutant("reports of before are read again", GROUPS, "_connect_failures", "{self.name}/{generation}", "{self.name}"),
    Mutant("old and new attempts are mixed up", failures.Renewals, "_do", "/{self.number}", ""),
    Mutant("a meeting ends one rank early", rank_store.Meeting, "come", "== self._size", ">= self._size - 1"),
    Mutant("the last to come does not decide", rank_store.Meeting, "_decide", "compare_set(", "set("),
    Mutant(
        "who fails does not let others complete", failures.LostRanks, "await_completion", "_ARRIVING_SECONDS", "0.0"
    ),
    Mutant("one wrapper of a backward is ended", REDUCER, "_on_output_gradient", "other._begin_once()", "pass"),
    Mutant(
        "wrappers are ended one after another",
        completion,
        "finish",
        "_poll(completions, others)",
        "[one.advance(to_end=True) for one in completions]",
    ),
    Mutant(
        "buckets go in another order",
        bucket.LaunchSchedule,
        "_launch",
        "k = self._gone\n",
        "k = len(self.buckets) - 1 - self._gone\n",
    ),
    Mutant(
        "buffers are always of rank 0",
        SYNC,
        "_broadcast_buffers",
        "backward.agreement.senders(writers)",
        "[0] * len(backward.agreement.senders(writers))",
    ),
]


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:200")
    first, last = map(int, parser.parse_args().seeds.split(":"))
    torch.set_num_threads(1)
    logging.getLogger("ppe_ddp").setLevel(logging.CRITICAL)
    gc.disable()
    programs = [*(Program.of(seed) for seed in range(first, last)), *found()]
    count = 0
    for mutant in MUTANTS:
        with mutant.planted():
            failed = run(programs, stop_after=1)
        count += bool(failed)
        which = f"seed {next(iter(failed)).seed}" if failed else "not found"
        print(f"{mutant.title:48} {which:12} {next(iter(failed.values()), '')[:110]!r}", flush=True)
    print(f"{count} of {len(MUTANTS)} found")


if __name__ == "__main__":
    main()
