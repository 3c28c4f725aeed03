"""Steps in which one rank alone fails, and checks of what all ranks see, for any backend and launcher."""

import contextlib
import gc
import logging
import random
import re
import time
from datetime import timedelta
from typing import ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from one_process import assert_gradients, in_place_mean, mean_gradients, of_all_ranks, seeded, square
from ppe_ddp import (
    CommunicationError,
    DistributedDataParallel,
    PeerAbortedError,
    UnusableError,
    average,
    broadcast,
    overlapped,
)
from ppe_ddp.backends import device_routed_group
from ppe_ddp.backends.group_internals import store_of
from ppe_ddp.engine import bucket, completion, failures, group_duplicates, groups

SECONDS = 60.0  # no group here has a shorter timeout: who has taken longer has waited for it, and was not told


class Refused(Exception):
    """The error that is raised on the failing rank."""


class Switch:
    """Makes this rank fail, at a given call from then on."""

    def __init__(self):
        self.left = -1
        self.error = Refused

    def refuse(self):
        self.left -= 1
        if self.left == -1:
            raise self.error("not today")


class FailingNet(nn.Module):
    """Three buckets, and a buffer that is broadcast."""

    def __init__(self, switch):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("count", torch.zeros(3))
        self.switch = switch

    def forward(self, x):
        for layer in self.layers:
            x = Fuse.apply(torch.tanh(layer(x)), self.switch)
        return x


class Fuse(torch.autograd.Function):
    """Passes through, and may fail in backward."""

    @staticmethod
    def forward(ctx, x, switch):
        ctx.switch = switch
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.switch is not None:
            ctx.switch.refuse()
        return gradient, None


def before(switch):
    def reduce(gradients, group):
        switch.refuse()
        in_place_mean(gradients, group)

    return {"reduce_function": reduce}


def after(switch):
    def reduce(gradients, group):
        in_place_mean(gradients, group)
        switch.refuse()

    return {"reduce_function": reduce}


def in_the_middle(switch):
    """Fails between two collectives of one bucket."""

    def reduce(gradients, group):
        for gradient in gradients:
            switch.refuse()
            dist.all_reduce(gradient, group=group)
            gradient.div_(dist.get_world_size(group))

    return {"reduce_function": reduce}


def by_messages(switch):
    """Rank 0 gathers, averages and answers; each rank returns the Work of an answer."""

    def reduce(gradients, group):
        flat, size, rank = gradients.buffer(), dist.get_world_size(group), dist.get_rank(group)
        if rank:
            switch.refuse()
            dist.send(flat, group=group, group_dst=0)
            return dist.irecv(flat, group=group, group_src=0)
        for other in range(1, size):
            part = torch.empty_like(flat)
            dist.recv(part, group=group, group_src=other)
            flat += part
        flat /= size
        switch.refuse()
        answers = [dist.isend(flat, group=group, group_dst=other) for other in range(1, size)]
        for answer in answers[1:]:
            answer.wait()
        return answers[0]

    return {"reduce_function": reduce}


def on_a_thread(switch):
    return {"reduce_function": overlapped(before(switch)["reduce_function"])}


def in_the_wait(switch):
    """Fails where the result is waited for: when the vote has left."""

    class Pending:
        def __init__(self, work):
            self.work = work

        def wait(self):
            self.work.wait()
            switch.refuse()

    return {"reduce_function": lambda gradients, group: Pending(average(gradients, group))}


def in_the_broadcast(switch):
    """Of buffers, after all."""

    def send(tensors, group):
        switch.refuse()
        return broadcast(tensors, group)

    return {"broadcast_function": send}


def in_a_sync_hook(switch):
    return {"sync_hook": lambda _wrapper: switch.refuse()}


def interrupted(switch):
    """Before this rank has told the others anything of the step."""
    switch.error = KeyboardInterrupt
    return in_a_sync_hook(switch)


def in_packing(switch):
    fill = bucket.fill

    def refuse(*arguments):
        switch.refuse()
        fill(*arguments)

    return {"patch": refuse}


def in_backward(switch):
    return {"own": switch}


WAYS = {
    way.__name__: way
    for way in (
        before,
        after,
        in_the_middle,
        by_messages,
        on_a_thread,
        in_the_wait,
        in_the_broadcast,
        in_a_sync_hook,
        interrupted,
        in_packing,
        in_backward,
    )
}
# Where the other ranks may have what they need already: they go on, and are in step with the one that has failed.
LATE = ("in_the_wait", "in_the_broadcast", "in_the_update")
ONCE_A_STEP = ("in_a_sync_hook", "interrupted", "in_the_broadcast")


class Hooked:
    """Torch's kind of hook, which one rank refuses to run, or to go on with."""

    def __init__(self, switch, how):
        self.switch = switch
        self.how = how

    def state(self):
        if self.how == "none":
            return None
        group = dist.new_group()
        return group if self.how != "stateful" else PowerSGDState(group, 1, start_powerSGD_iter=2)

    def __call__(self, state, bucket):
        if self.how == "stateful":
            self.switch.refuse()
            return powerSGD_hook(state, bucket)
        if self.how != "then":
            self.switch.refuse()
            return allreduce_hook(state, bucket)

        def refuse(future):
            self.switch.refuse()
            return future.value()

        return allreduce_hook(state, bucket).then(refuse)


HOOKS = ("none", "group", "stateful", "then")


def hook_in_a_users_group(state, bucket):
    """A hook that is none of torch's own: it communicates where its state says."""
    return allreduce_hook(state, bucket)


def wrapped(way, switch, *, hook=None, **options):
    plugs = WAYS[way](switch)
    sync_hook = plugs.pop("sync_hook", None)
    patch, own = plugs.pop("patch", None), plugs.pop("own", None)
    module = seeded(FailingNet, None)
    expected = mean_gradients(module, square)
    module.switch = own
    wrapper = DistributedDataParallel(module, bucket_cap_mb=4e-5, **plugs, **options)
    if sync_hook is not None:
        wrapper.register_comm_hook(sync_hook)
    if hook is not None:
        wrapper.register_comm_hook(None, hook)
    return wrapper, expected, patch


def by_hand(wrapper, rank):
    """A step that is synchronized by a call, and not at the end of backward."""
    with wrapper.no_sync():
        square(wrapper, rank)
    wrapper.finish_grad_sync()


def hold(way, *, turns=3, seed=0, after_turn=lambda: None, step=square, **options):
    """Random steps in which a random rank fails in this way, and right ones after each, and then `after_turn()`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator, switch = random.Random(f"{way} {seed}"), Switch()
    wrapper, expected, patch = wrapped(way, switch, **options)
    with pytest.MonkeyPatch.context() as patches:
        if patch is not None:
            patches.setattr(bucket, "fill", patch)
        for _ in range(turns):
            culprit = generator.randrange(size)
            call = 0 if way in ONCE_A_STEP else generator.randrange(3)
            switch.left = call if rank == culprit else -1
            wrapper.zero_grad()
            fail(wrapper, way, culprit, step)
            switch.left = -1
            one = torch.ones(1)
            dist.all_reduce(one)  # of the user's own
            assert one.item() == size
            for _ in range(generator.randrange(1, 3)):
                wrapper.zero_grad()
                step(wrapper, rank)
                assert_gradients(wrapper.module, expected)
            after_turn()


def hold_without_a_trace(way, *, turns=16, **options):
    """After failures no more is left in the ranks' store, and in torch's tables of groups, than before them."""
    counts = []

    def count():
        dist.barrier()  # all have deleted what they delete
        counts.append((store_of(dist.group.WORLD).num_keys(), len(c10d._world.tags_to_pg)))
        dist.barrier()

    hold(way, turns=turns, after_turn=count, **options)
    half = turns // 2
    for most, last in zip(map(max, zip(*counts[:half], strict=True)), counts[-1], strict=True):
        assert last < most + half, counts


def hold_many(count, *, seed=0):
    """So many failures, each in a random way and of a random rank, each followed by a right step, in one process."""
    ways = random.Random(f"many {seed}").choices(
        [way for way in WAYS if "sync_hook" not in WAYS[way](Switch())], k=count // 4
    )
    for place, way in enumerate(ways):
        hold(way, turns=4, seed=f"{seed} {place}")


def shorten_timeout(wrapper, seconds):
    """Let this rank wait so long by the wrapper's connections; those that it has after a failure have the usual time.

    On a machine that is busy the ranks may take longer to make groups, and to begin.
    """
    for connections in wrapper._reducer.connections:
        connections.timeout_seconds = seconds
        for group in (connections.buckets, connections.control):
            group._waits.timeout = seconds


class Telling(logging.Handler):
    """Says in the store that the library has warned here of a wait."""

    def __init__(self, store):
        super().__init__(logging.WARNING)
        self.store, self.texts = store, []

    def emit(self, record):
        if "has waited for" in record.getMessage():
            self.texts.append(record.getMessage())
            self.store.set("has told", "")


def hold_told_wait(**options):
    """The last rank comes to a step when the others have said that they wait for it: one of them, and nobody else."""
    wrapper = DistributedDataParallel(seeded(nn.Linear, 4, 2), **options)
    rank, last, store = dist.get_rank(), dist.get_world_size() - 1, c10d._get_default_store()
    telling, log = Telling(store), logging.getLogger("ppe_ddp")
    waiting, tell_wait = [f"rank {other} waits" for other in range(last)], failures.LostRanks.tell_wait

    def tell_once_all_wait(lost, seconds):  # else one that is slow to come to its wait would be named as well
        store.set(f"rank {rank} waits", "")
        if store.check(waiting) and not store.check(["has told"]):
            tell_wait(lost, seconds)

    square(wrapper, rank)
    log.addHandler(telling)
    try:
        with (
            mock.patch.multiple(failures, _TELL_SECONDS=1.0, _RARELY_SECONDS=1.0),
            mock.patch.object(failures.LostRanks, "tell_wait", tell_once_all_wait),
        ):
            if rank == last:
                store.wait(["has told"], timedelta(seconds=SECONDS))
            square(wrapper, rank)
    finally:
        log.removeHandler(telling)
    dist.barrier()
    for key in (f"rank {rank} waits", *["has told"] * (rank == last)):
        store.delete_key(key)
    if rank == 0 and last not in wrapper._reducer.groups.processes.on_this_node:
        who = "a rank of another node, where the log may tell which"
    else:
        who = rf"rank {last}, which has not come \(it had completed step \d+ and"
    needs = rf"rank 0: step \d+ has waited for \d+ s for {who}"
    assert all(re.match(needs, text) for text in telling.texts), telling.texts
    assert bool(telling.texts) == (rank == 0)


class Interrupted:
    """Interrupts this rank once, as it connects again.

    Attributes:
        MOMENTS: When: what is called then, and whether before or after it.
    """

    MOMENTS: ClassVar = {
        "before_it_comes": (failures.Renewals, "begin", "before"),
        "as_it_comes": (failures.Renewals, "come", "before"),
        "when_it_has_come": (failures.Renewals, "come", "after"),
        "while_it_waits": (failures.Renewals, "outcome", "before"),
        "when_it_has_heard": (failures.Renewals, "outcome", "after"),
        "while_it_gives_back": (groups, "release_all", "before"),
        "before_it_makes_groups": (groups, "duplicates", "before"),
        "between_two_groups": (group_duplicates, "_new_group", "after"),
        "before_gloo_connects": (device_routed_group, "group_over", "before"),  # in shared memory
        "when_it_has_made_them": (groups, "duplicates", "after"),
    }

    def __init__(self, moment, times, patches):
        owner, name, self.when = self.MOMENTS[moment]
        self.left, self.call = times, getattr(owner, name)
        patches.setattr(owner, name, lambda *arguments, **keywords: self(*arguments, **keywords))

    def __call__(self, *arguments, **keywords):
        result = self.call(*arguments, **keywords) if self.when == "after" else None
        if self.left and not (self.call.__name__ == "outcome" and self.when == "after" and result is None):
            self.left -= 1
            raise KeyboardInterrupt
        return result if self.when == "after" else self.call(*arguments, **keywords)


def hold_interrupted(moment, *, times=2, seconds=60, **options):
    """One rank is interrupted as the ranks connect again, so many steps long: they find together and average a step.

    The others are told at once, and wait for no timeout, which would be that of the test.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    parent, switch = dist.new_group(timeout=timedelta(seconds=seconds)), Switch()
    wrapper, expected, _ = wrapped("before", switch, process_group=parent, **options)
    own = wrapper._reducer.groups
    for culprit in range(size):
        switch.left = 0 if rank == culprit else -1
        wrapper.zero_grad()
        fail(wrapper, "before", culprit)
        switch.left = -1
        with pytest.MonkeyPatch.context() as patches:
            interrupted = Interrupted(moment, times if rank == culprit else 0, patches)
            for _ in range(20):
                wrapper.zero_grad()
                with contextlib.suppress(KeyboardInterrupt, PeerAbortedError, CommunicationError):
                    square(wrapper, rank)
                    break
            assert interrupted.left == 0
        for _ in range(2):
            wrapper.zero_grad()
            square(wrapper, rank)
            assert_gradients(wrapper.module, expected)
        counts = of_all_ranks((own.step, own.generation))
        assert len(set(counts)) == 1, counts


def _together(first, second, batch):
    (first(batch) + second(batch)).sum().backward()


def _started_before_the_other(first, second, batch):
    second.start_grad_sync()
    first(batch).sum().backward()
    second.finish_grad_sync()


def _both_started(first, second, _batch):
    second.start_grad_sync()
    first.start_grad_sync()
    first.finish_grad_sync()
    second.finish_grad_sync()


def _by_hand(first, second, _batch):
    second.finish_grad_sync()
    first.finish_grad_sync()


def _one_after_the_other(first, second, batch):
    second(batch).sum().backward()
    first(batch).sum().backward()


ORDERS = {
    "started_before_the_other": (_started_before_the_other, 1, 0),
    "both_started": (_both_started, 0, 0),
    "by_hand": (_by_hand, 0, 0),
    "one_after_the_other": (_one_after_the_other, 1, 1),
}
"""How the last rank comes to two wrappers, and whether it has gradients for the first and for the second."""


def hold_order(order, hook=None, **options):
    """The ranks come to two wrappers in different orders in the step after a failure, and connect again in each."""
    rank, size = dist.get_rank(), dist.get_world_size()
    step, *has_gradients = ORDERS[order]
    wrappers = [DistributedDataParallel(seeded(nn.Linear, 4, 3), **options) for _ in range(2)]
    for wrapper in wrappers if hook is not None else ():
        wrapper.register_comm_hook(None, hook)
    batch = torch.full((1, 4), rank + 1.0)
    for turn in range(3):
        outputs = wrappers[turn % 2](batch), wrappers[1 - turn % 2](batch)
        if rank == turn % size:
            outputs[0].register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError if rank == turn % size else PeerAbortedError):
            sum(outputs).sum().backward()
        for wrapper in wrappers:
            wrapper.zero_grad()
        start = time.monotonic()
        (step if rank == size - 1 else _together)(*wrappers, batch)
        assert time.monotonic() - start < SECONDS
        for wrapper, is_there in zip(wrappers, has_gradients, strict=True):
            total = sum(range(1, size)) + (size if is_there else 0)
            assert wrapper.module.weight.grad.tolist() == torch.full((3, 4), total / size).tolist()


def fail(wrapper, way, culprit, step=square):
    """One step in which rank `culprit` fails."""
    rank, start = dist.get_rank(), time.monotonic()
    if rank == culprit:
        # as a RuntimeError where it comes out of one of torch's Futures
        with pytest.raises((Refused, RuntimeError, KeyboardInterrupt), match=r"^not today|: not today"):
            step(wrapper, rank)
        return
    try:
        step(wrapper, rank)
    except PeerAbortedError as error:
        text = str(error)
        assert f"rank {culprit} " in text, text
        if way not in ("in_backward", "in_a_sync_hook"):  # which say it in the vote
            assert ": not today" in text, text
    else:
        assert way in LATE
    assert time.monotonic() - start < SECONDS


def ending_within(seconds):
    """What a hook has begun may take so long to end after a failure: short where the others' part never comes."""
    return mock.patch.object(completion, "_ENDING_SECONDS", seconds)


def hold_hooks(how, *, seed=0, **options):
    """Torch's hooks communicate where nobody can begin anew: after a failure every rank says so, and none waits."""
    with ending_within(1.0 if how == "then" else 0.2):
        _hold_hooks(how, seed, options)
    gc.collect()  # what still holds a hook's group on one rank keeps the others waiting when they destroy theirs


def _hold_hooks(how, seed, options):
    rank, size = dist.get_rank(), dist.get_world_size()
    generator, switch = random.Random(f"{how} {seed}"), Switch()
    module = seeded(FailingNet, None)
    expected = mean_gradients(module, square)
    wrapper = DistributedDataParallel(module, bucket_cap_mb=4e-5, **options)
    hook = Hooked(switch, how)
    wrapper.register_comm_hook(hook.state(), hook)
    square(wrapper, rank)
    culprit = generator.randrange(size)
    switch.left = generator.randrange(3) if rank == culprit else -1
    wrapper.zero_grad()
    fail(wrapper, "in_the_wait" if how == "then" else how, culprit)
    switch.left = -1
    wrapper.zero_grad()
    start = time.monotonic()
    if how == "then":  # where all ranks have sent all that belongs together
        square(wrapper, rank)
        assert_gradients(module, expected)
        return
    for _ in range(2):
        with pytest.raises(UnusableError, match="when a rank failed, communication hook Hooked was under way on rank"):
            square(wrapper, rank)
    assert time.monotonic() - start < SECONDS
    if how == "none":
        dist.destroy_process_group()  # the default group itself is of no use any more
        return
    again = DistributedDataParallel(module, bucket_cap_mb=4e-5, **options)
    again.zero_grad()
    square(again, rank)
    assert_gradients(module, expected)
