"""Planted bugs, one at a time: how many histories the simulator needs to find each.

python -m tests.simulation.mutants --seeds 0:200

These are not found, with the reason as far as it is known:

    what had come is lost when put back    few ranks hear of a failure between the two parts of a gradient
    counts of a failed step are kept       the next step begins without gradients, by which they are dropped, too
    split: who fails next ends this step   a rank must look while its last message is under way and another rank has
                                           failed in the next step: 1 of 230 histories made for that came there
    outer: an interrupt is not told        the engine tells of those in its waits, and elsewhere no rank is interrupted

These are not planted, as no rank sees a difference:

    a rank goes on with its own step when the ranks have connected again: in each of 2,357 times all had counted alike
    finalize_model_grads() raises the error of its last chunk, and not that of a lost rank: in each of 117 calls with a
    lost rank the error of the last chunk was of that, too
    a rank does not note that it gathers, only that it has gathered: the former is for messages alone
"""

import __future__

import argparse
import ast
import contextlib
import inspect
import re
import textwrap
import time
from dataclasses import dataclass
from typing import Any
from unittest import mock

from ppe_ddp import joining, weighing
from ppe_ddp.backends import rank_store
from ppe_ddp.backends.shared_memory.shared_group import SharedMemoryGroup
from ppe_ddp.checkpoints import checkpointer
from ppe_ddp.compression import comm_state, outer_steps
from ppe_ddp.engine import bucket, completion, failures, gradients, groups, negotiation, reducer, synchronizer
from ppe_ddp.engine.zero.parameter_gather import ParameterGather
from ppe_ddp.megatron import buffer_synchronizer, finalize, parallel_groups, sharded_buffers
from ppe_ddp.optim import DistributedOptimizer, optimizer_state

from .__main__ import prepare, program_of_kind, run
from .found import found


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
        assert self.old in _source(self.owner, self.method), f"{self.title}: not in {self.method}() any more"
        return _patched(self.owner, self.method, _source(self.owner, self.method).replace(self.old, self.new))


def _source(owner, method):
    return textwrap.dedent(inspect.getsource(getattr(owner, method)))


def _patched(owner, method, source):
    """A patch that gives ``method`` another source, which may be parsed already."""
    code = compile(source, f"<{method}>", "exec", __future__.annotations.compiler_flag)
    exec(code, inspect.unwrap(getattr(owner, method)).__globals__, made := {})
    return mock.patch.object(owner, method, made[method])


SYNC, REDUCER, GROUPS = synchronizer.BucketSynchronizer, reducer.Reducer, groups.Groups
WEIGHTS = weighing.Weights
JOIN = joining.DdpJoinHook
MEGATRON = buffer_synchronizer.BufferSynchronizer
PARALLEL, COPIES = parallel_groups.ModelParallel, parallel_groups.CopiesOfParameters
SHARDED = sharded_buffers.ShardedBuffers
OUTER = outer_steps.OuterSteps
# title, owner, method, what is there, what takes its place
MUTANTS = [
    Mutant(*row)
    for row in [
        # what exists
        ("a late gradient is not voted for", SYNC, "_vote", "mask[i] = 1", "mask[i] = 0"),
        ("what is in .grad already is not negotiated", gradients.Gradients, "existing", "mask[i] = 1", "pass"),
        ("a gradient that nobody expected is left out", SYNC, "_vote", "backward.add_late(", "bool("),
        ("what one node sends leaves out a gradient here", SYNC, "make_schedule", "backward.leave_for_vote(", "bool("),
        ("one node sends what another one has", SharedMemoryGroup, "only_rank", "return node", "return node and 0"),
        ("an unexpected arrival is not noted", REDUCER, "_count_arrived", "backward.unexpected.append(i)", "pass"),
        ("a second arrival counts as the first", REDUCER, "_count_arrived", "waiting[i] -= 1", "pass"),
        # what is launched while backward runs
        (
            "a backward that has raised sends more",
            SYNC,
            "make_schedule",
            "nothing if backward.silent or senders",
            "nothing if senders",
        ),
        ("who is told in one wrapper is blamed in others", REDUCER, "_fail", "theirs.cause = told", "pass"),
        ("what was launched is not given back", SYNC, "give_back", "in backward.rounds", "in backward.rounds[:0]"),
        ("a second round is never made", SYNC, "complete", "if any(outcome.mask):", "if False:"),
        (
            "a second round takes the place of the first",
            SYNC,
            "_hand_over",
            "reversed(backward.rounds)",
            "backward.rounds[-1:]",
        ),
        (
            "late gradients do not count as used",
            SYNC,
            "_held",
            "set(backward.late).union(",
            "set().union(",
        ),
        (
            "the vote says what the mask said",
            SYNC,
            "complete",
            'negotiation.finish(vote, b"")',
            'negotiation.finish(vote, b"")._replace(mask=self._nothing)',
        ),
        (
            "what one rank alone has is left out of the plan",
            SYNC,
            "make_schedule",
            "plan(answer.mask,",
            "plan(bytes(map(min, answer.mask, recorder.local)),",
        ),
        ("what no rank has had counts as zero", SYNC, "complete", "if any(outcome.missing) and", "if False and"),
        # in what order
        (
            "buckets go in another order",
            bucket.LaunchSchedule,
            "_launch",
            "k = self._gone\n",
            "k = len(self.buckets) - 1 - self._gone\n",
        ),
        ("a bucket goes before its gradients are there", bucket.LaunchSchedule, "launch_ready", "<= 0", "<= 1"),
        (
            "a bucket goes as soon as it is full, not in turn",
            bucket.LaunchSchedule,
            "launch_ready",
            "self._missing[self._gone] <= 0",
            "min(self._missing[self._gone :]) <= 0",
        ),
        (
            "the last bucket is not waited for",
            bucket.LaunchSchedule,
            "finish",
            "zip(self.buckets, self.record.buckets, strict=True)",
            "zip(self.buckets[:-1] or self.buckets, self.record.buckets, strict=False)",
        ),
        # Who learns another order than the others begins anew with them: the masks have a digest of it.
        (
            "who has nothing to learn learns nothing",
            negotiation.Negotiation,
            "_learn_order",
            "has_unlearned(recorder.agreed)",
            "has_unlearned(recorder.local)",
        ),
        (
            "an order is learned once more by those that have it",
            negotiation.Negotiation,
            "learn",
            "if not self._count & (self._count - 1):",
            "if arrivals and not self._count & (self._count - 1):",
        ),
        ("one wrapper of a backward is ended", REDUCER, "_begin_others", "stack.callback(other._begin_once)", "pass"),
        (
            "wrappers are ended one after another",
            completion,
            "finish",
            "_poll(completions, others)",
            "[one.advance(to_end=True) for one in completions]",
        ),
        ("those that share parameters do not take turns", completion.Turn, "_has_come", "is _State.SENDING", "is None"),
        ("those that share parameters all give them", completion.Turn, "claim", "rest[i] = 0", "pass"),
        (
            "turns are those of this rank",
            completion,
            "arrange",
            "sorted(joined, key=lambda turn: in_order(turn._shared.groups))",
            "sorted(joined, key=id)",
        ),
        # sums
        (
            "a step is handed over before the vote is read",
            SYNC,
            "complete",
            "yield from schedule.finish()\n",
            "yield from schedule.finish(); self._hand_over(backward, backward.recorder.agreed, b'')\n",
        ),
        (
            "averages of a bucket go to its neighbour",
            bucket.LaunchSchedule,
            "hand_over",
            "bucket.expected_of(averages)",
            "bucket.expected_of(averages[::-1])",
        ),
        (
            "buffers are always of rank 0",
            SYNC,
            "_broadcast_buffers",
            "backward.agreement.senders(writers)",
            "[0] * len(backward.agreement.senders(writers))",
        ),
        ("who has written buffers is asked of the vote alone", SYNC, "_vote", '"writers": writers', '"writers": b""'),
        (
            "buffers count as written for ever",
            SYNC,
            "_broadcast_buffers",
            "self._buffer_writes.note(has_failed=not is_over)",
            "pass",
        ),
        (
            "NaN drops the step on one rank",
            SYNC,
            "complete",
            "any(status & NON_FINITE for status in statuses)",
            "self._finite.status & NON_FINITE",
        ),
        (
            "NaN in a late gradient is not looked for",
            SYNC,
            "_vote",
            "self._finite.look(late.keys(), late.values())",
            "pass",
        ),
        # what failed
        ("what had come is lost when put back", gradients.Gradients, "put_back", "= gradient + there", "= gradient"),
        ("gradients are not put back", SYNC, "put_back", "schedule.put_back()", "()"),
        ("a late gradient is not put back", SYNC, "put_back", "self.gradients.put_back(backward.late.items())", "pass"),
        ("a compressor keeps a dropped step", SYNC, "put_back", "self.reduction.abandon()", "pass"),
        ("residuals are never put back", comm_state.CommState, "put_back", "own.update(entries)", "pass"),
        (
            "what a step may replace is not kept",
            comm_state.CommState,
            "keep",
            "if name not in self._before",
            "if False",
        ),
        ("a failure is not reported", GROUPS, "fail", "self.failures.report_error(self.step, phase, told)", "pass"),
        ("connections are not made anew", GROUPS, "fail", "self.close()", "pass"),
        (
            "connections are closed before the report",
            GROUPS,
            "fail",
            "instead: PpeDdpError | None = None",
            "instead: PpeDdpError | None = None\n    self.close()",
        ),
        ("a lost step is not counted", GROUPS, "skip_step", "self.step += 1", "pass"),
        ("a failed attempt is not a step", GROUPS, "_end_attempt", "self.step += 1", "pass"),
        ("reports of before are read again", GROUPS, "_connect_failures", "{self.name}/{generation}", "{self.name}"),
        ("old and new attempts are mixed up", failures.Renewals, "_do", "/{self.number}", ""),
        ("an attempt has no end", failures.Renewals, "end", "self._ended = self.number", "pass"),
        ("a meeting ends one rank early", rank_store.Meeting, "come", "== self._size", ">= self._size - 1"),
        ("the last to come does not decide", rank_store.Meeting, "_decide", "compare_set(", "set("),
        ("who fails does not let others complete", failures.LostRanks, "await_completion", "_ARRIVING_SECONDS", "0.0"),
        # What was learned may survive a failure: where it differs, the digest in the masks tells.
        ("an old report fails the next step", SYNC.__mro__[1], "postpone", "backward.restart()", "return False"),
        (
            "who raises in its backward tells nobody",
            REDUCER,
            "_abort_if_unfinished",
            "self.synchronizer.abort(backward)",
            "False",
        ),
        ("the status of who raises is dropped", SYNC, "_vote", "backward.aborted | found", "found"),
        ("nobody looks at the statuses", SYNC, "complete", "if any(statuses) and", "if False and"),
        ("who waits does not look for failures", failures.Failures, "_await", "self.check()", "pass"),
        (
            "who waits does not look for the dead",
            failures.Failures,
            "_await",
            "if gone := self._lost.gone():",
            "if gone := []:",
        ),
        ("the dead are not looked for in a meeting", GROUPS, "_meet", "lost.extend(self._lost.gone())", "None"),
        (
            "a hook of ppe's kind that raises tells nobody",
            REDUCER,
            "_finish_failed",
            "yield from self._finish_aborted(backward)",
            "yield from ()",
        ),
        # join()
        ("join: a failed step ends it", JOIN, "_listen", "PeerAbortedError, Non", "Non"),
        (
            "join: who listens does not look for failures",
            joining,
            "_any_announces",
            "groups.failures.wait(work, word.device)",
            "work.wait()",
        ),
        ("join: NaN ends it", JOIN, "_listen", ", NonFiniteGradientError", ""),
        (
            "join: who has run out does not connect again",
            JOIN,
            "_hears",
            "reducer.synchronizer.connect_again()",
            "pass",
        ),
        ("join: it ends before all have their parameters", JOIN, "post_hook", "groups.await_start()", "pass"),
        ("join: averages over all ranks in any case", SYNC, "_factors", "if self.scale_by_active", "if False"),
        ("join: who has run out announces, too", SYNC, "start_negotiation", "and not backward.has_run_out", ""),
        ("join: parameters in common are averaged twice", completion.Turn, "_claims", "is _State.ASKED", "is None"),
        # weigh()
        (
            "gradients that weigh nothing are not put back",
            SYNC,
            "put_back",
            "self.gradients.put_back(backward.take_aside().items())",
            "pass",
        ),
        (
            "gradients that weigh nothing are not given back",
            SYNC,
            "give_back",
            "self.gradients.put_back(backward.take_aside().items())",
            "pass",
        ),
        (
            "gradients that weigh nothing are announced",
            SYNC,
            "start_negotiation",
            "backward.silent or weights.is_nothing",
            "backward.silent",
        ),
        ("who weighs nothing adds to the averages", SYNC, "_hand_over", "if self.weights.is_nothing", "if False"),
        ("counts are kept after the averages", SYNC, "_hand_over", "self.weights.settle()", "pass"),
        ("late gradients are not weighed", SYNC, "_repair", "weight=backward.weight", "weight=None"),
        ("counts of a failed step are kept", WEIGHTS, "give_up", "self._note_failure()", "pass"),
        ("what no_sync() left is not known again", WEIGHTS, "note", "at_end_of_backward(self.remember)", "pass"),
        (
            "a mean where it is used is not weighed",
            weighing.WhereUsed,
            "factors",
            "is_weighed = ",
            "is_weighed = 0 and ",
        ),
        ("join: weighed averages are scaled once more", SYNC, "_factors", "and backward.weight is None", ""),
        # Megatron's wrapper
        # A failure that no call has told is forgotten by zero_grad_buffer(), too, which comes before the next step.
        (
            "finalizing tells of no failure of Megatron's",
            MEGATRON,
            "raise_if_bad",
            "raise failure",
            "pass",
        ),
        ("a late gradient of Megatron's is lost", MEGATRON, "_take_results", "if any(outcome.mask):", "if False:"),
        (
            "a late gradient of Megatron's is not put back",
            MEGATRON,
            "put_back",
            "self.gradients.put_back(backward.late)",
            "pass",
        ),
        # Who raises in its backward closes the connections; that the votes tell of it takes an error before the mask,
        # which only weigh() raises in Megatron's wrapper.
        ("Megatron's ranks are not told of NaN", MEGATRON, "_collect_errors", "if NON_FINITE in of_ranks", "if False"),
        ("a new gradient does not open its bucket", MEGATRON, "_prepare", "bucket.reopen()", "pass"),
        # a model that is split over the ranks
        ("split: an old failure costs the next step", PARALLEL, "_vote", "groups.step -= 1  #", "pass  #"),
        ("split: a vote is lost when it is repeated", PARALLEL, "_vote", "extremes.copy_(mine)", "extremes.fill_(0)"),
        (
            "split: the first group is told nothing",
            PARALLEL,
            "_give_up",
            "in reversed(self._distinct):",
            "in reversed(self._distinct[1:]):",
        ),
        (
            "split: who relays a failure names itself",
            parallel_groups,
            "relayed",
            "dist.get_rank() if job_rank is None else job_rank",
            "dist.get_rank()",
        ),
        ("split: one group alone hears of an update", PARALLEL, "agree", "failed = int(extremes[2])", "pass"),
        (
            "split: a failed update is told twice",
            PARALLEL,
            "agree",
            "one.failed_update.is_told = True",
            "pass",
        ),
        ("split: the ranks agree without connections", PARALLEL, "agree", "self.renew()", "pass"),
        ("split: a renewed group begins no step", PARALLEL, "renew", "self._begin_step(", "bool("),
        ("split: clipping is a step of its own", PARALLEL, "step", "if is_next:", "if True:"),
        ("split: what all raise is told besides", PARALLEL, "step", "if error is not self._agreed else None", ""),
        ("split: who fails next ends this step", failures.Failures, "_await", "is_ahead = ", "is_ahead = False and "),
        ("split: nobody waits for gathers", SHARDED, "install", "self.note_gather(Activity.GATHERED)", "pass"),
        ("split: copies count twice in a norm", COPIES, "counts", "return rank == 0 or", "return True or"),
        (
            "split: nothing to gather is awaited",
            DistributedOptimizer,
            "_fail",
            "has_told = self._model.groups.parent, is_awaited",
            "has_told = self._model.groups.parent, True",
        ),
        ("split: an optimizer fails in one group alone", ParameterGather, "_fail_in", "user is not None", "False"),
        ("split: experts are clipped apart", COPIES, "agreeing", "self._parallel.tells_all", "self.is_split"),
        ("split: averaged copies are summed", finalize, "_over_tensor", ", 1.0 / groups.world_size", ""),
        ("split: who tells of NaN has it", gradients.FiniteCheck, "_error", "error.job_rank =", "_ ="),
        (
            "split: who has heard of a failed update calls it its own",
            DistributedOptimizer,
            "_fail",
            "if has_told and is_own and",
            "if has_told and",
        ),
        # outer steps of ranks that train by themselves
        ("outer: an outer step that fails counts as taken", OUTER, "_average", "or after != (before or 0)", "or True"),
        ("outer: an error before anything is sent is not told", OUTER, "synchronize", "self._tell(error)", "pass"),
        ("outer: ... where the last one has failed, too", OUTER, "synchronize", "reducer.begin_step()", "pass"),
        ("outer: an interrupt is not told", OUTER, "_average", "self._tell(error)", "pass"),
        ("outer: what an error has left is never completed", OUTER, "_begin_inner_step", "self._remember()", "pass"),
        ("outer: ... is completed without its momentum", OUTER, "_update", "if velocity is not None:", "if False:"),
        ("outer: gradients stay", OUTER, "synchronize", "parameter.grad = of_others.get(name)", "pass"),
        ("outer: what is loaded is not where the next one begins", OUTER, "_note", "known[1].copy_(parameter)", "pass"),
        (
            "outer: an error leaves out those of other wrappers",
            outer_steps,
            "_count_all",
            "stack.callback(one.count)",
            "one.count()",
        ),
        (
            "outer: ranks learn before they have taken it",
            SYNC,
            "complete",
            "self.weights.is_refused and not",
            "False and not",
        ),
        ("outer: what is loaded later is the checkpoint's", OUTER, "end_loading", "if one in loaded", "if False"),
        ("outer: momentum is not loaded", OUTER, "load_state_dict", 'in state["velocity"].items()', "in ()"),
        ("outer: the count of inner steps is not loaded", OUTER, "load_state_dict", 'int(state["steps"])', "0"),
        (
            "outer: between outer steps one rank's model is saved",
            checkpointer,
            "own_part",
            "for one in between",
            "for one in ()",
        ),
        ("outer: each rank loads the first one's optimizer", checkpointer, "loaded_part", "rank % saved_by", "0"),
        # checkpoints
        ("saving: what differs is one rank's", checkpointer.Checkpointer, "_add_differing", ") > 1:", ") > 9:"),
        (
            "saving: what was not sent is not loaded",
            checkpointer,
            "_load_communication",
            "fitting_state(saved, own)",
            "own",
        ),
        (
            "saving: buffers of the last mask are compared",
            negotiation.Negotiation,
            "_lines",
            " if buffers is None else buffers",
            "",
        ),
        ("saving: a shard begins with no momentum", optimizer_state, "restore", "master.index in found.state", "False"),
    ]
]


def reaching(mutants, programs):
    """By title, the ``programs`` whose histories come to a statement that a mutant changes: it changes no others."""
    found, reached = {mutant.title: [] for mutant in mutants}, set()
    trees = {}
    for mutant in mutants:
        source = _source(mutant.owner, mutant.method)
        tree = trees.setdefault((mutant.owner, mutant.method), ast.parse(source))
        for place in re.finditer(re.escape(mutant.old), source):
            _note(tree, source[: place.start()].count("\n") + 1, f"_reached({mutant.title!r})")

    def one_by_one():
        for program in programs:
            reached.clear()
            yield program
            for title in reached:
                found[title].append(program)

    with contextlib.ExitStack() as stack:
        for (owner, method), tree in trees.items():
            scope = inspect.unwrap(getattr(owner, method)).__globals__
            stack.enter_context(mock.patch.dict(scope, _reached=reached.add))
            stack.enter_context(_patched(owner, method, ast.fix_missing_locations(tree)))
        run(one_by_one(), stop_after=None)
    return found


def _note(tree, line, call):
    """Make the ``call`` before the statement that has this line."""
    blocks = [getattr(node, name, ()) for node in ast.walk(tree) for name in ("body", "orelse", "finalbody")]
    found = [(block, one) for block in blocks if isinstance(block, list) for one in block if _has(one, line)]
    block, one = found[-1]  # the innermost
    if isinstance(one, ast.FunctionDef):
        block, one = one.body, one.body[0]
    block.insert(block.index(one), ast.parse(call).body[0])


def _has(statement, line):
    return statement.lineno <= line <= statement.end_lineno


def find(mutant, programs):
    """A failing program and what is wrong with it, for one of these; None and nothing where all are sound."""
    with mutant.planted():
        failed = run(programs, stop_after=1)
    return next(iter(failed.items()), (None, ""))


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:2000")
    parser.add_argument("--only", default="", help="those whose titles have this")
    parser.add_argument("--split", action="store_true", help="all seeds are of models that are split over the ranks")
    parser.add_argument("--outer", action="store_true", help="all are of ranks that train by themselves")
    parser.add_argument("--saving", action="store_true", help="all that can save checkpoints")
    arguments = parser.parse_args()
    first, last = map(int, arguments.seeds.split(":"))
    program_of = program_of_kind(arguments)
    prepare()
    wanted = [mutant for mutant in MUTANTS if arguments.only in mutant.title]
    programs = reaching(wanted, map(program_of, range(first, last)))
    count = 0
    for mutant in wanted:
        start, reached = time.perf_counter(), programs[mutant.title]
        program, text = find(mutant, reached)
        which = f"seed {program.seed}" if program is not None else "not found"
        if program is None and last:
            program, text = find(mutant, found())
            which = "has failed once" if program is not None else which
        count += program is not None
        seconds = time.perf_counter() - start
        print(f"{mutant.title:58} {which:15} of {len(reached):4} in {seconds:4.0f} s  {text[:80]!r}", flush=True)
    print(f"{count} of {len(wanted)} found")


if __name__ == "__main__":
    main()
