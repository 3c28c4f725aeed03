"""Memory beyond the gradients: at most one copy of them and one bucket, and no more however many masks come."""

import gc
import os
import random

import pytest
import torch
import torch.distributed as dist

from one_process import Routes, data, seeded
from ppe_ddp import DistributedDataParallel
from ppe_ddp.backends.shared_memory.shared_reservation import shared_memory
from ppe_ddp.engine.plan import Plan
from rank_tests import on_two_ranks

CAP_MB = 0.25
LAYERS, WIDTH = 16, 128
LAYER_NBYTES = 4 * WIDTH * (WIDTH + 1)
# A bucket is closed when it has reached its size, by a gradient that may stand over.
BUCKET_NBYTES = int(CAP_MB * 2**20) + LAYER_NBYTES
VARIANTS = [{"gradient_as_bucket_view": False}, {}, {"overlap": False}]
each_variant = pytest.mark.parametrize("options", VARIANTS, ids=["copied", "views", "after"])


def way_of(rank, step):
    """A random subset of the layers in a random order; all of them now and then."""
    dice = random.Random(1000 * step + rank)
    return dice.sample(range(LAYERS), LAYERS if step % 20 == 19 else dice.randint(1, LAYERS))


def train(model, step, ranks):
    """One step with the ways of `ranks`, which leaves no gradient."""
    ways = [way_of(rank, step) for rank in ranks]
    sum(model(data(2, WIDTH, step=step), way).sum() for way in ways).backward()
    model.zero_grad()


def peak_of(steps, step_of):
    """The most bytes that were allocated at a time in `steps`, above what there was before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        for step in steps:
            step_of(step)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    assert len(events) > 10 * len(steps)
    return peak


def rounding(wrapper):
    """Capacities are rounded up, one piece a bucket."""
    return len(wrapper.trace().buckets) * 2**16


@each_variant
@on_two_ranks
def test_the_peak_is_one_copy_and_one_bucket_above_the_bare_module_and_between_steps_no_more_is_held(options):
    module, rank, held = seeded(Routes, WIDTH, LAYERS), dist.get_rank(), []
    # Alone, with the gradients that any of the ranks has: what the model needs by itself.
    bare = peak_of(range(20), lambda step: train(module, step, range(2)))
    assert bare > LAYERS * LAYER_NBYTES
    wrapper = DistributedDataParallel(module, bucket_cap_mb=CAP_MB, **options)
    # Nothing is held at the start, so the peak has in it what it comes to hold.
    assert wrapper._reducer.synchronizer.gradients.buffers.nbytes == 0

    def train_and_look(step):
        train(wrapper, step, [rank])
        held.append(wrapper._reducer.synchronizer.gradients.buffers.nbytes)
        agreed = {k for r in range(2) for k in way_of(r, step)}
        assert held[-1] <= len(agreed) * LAYER_NBYTES + BUCKET_NBYTES + rounding(wrapper)

    peak = peak_of(range(40), train_and_look)
    assert max(held) >= LAYERS * LAYER_NBYTES
    most = LAYERS * LAYER_NBYTES + BUCKET_NBYTES + rounding(wrapper)
    assert peak - bare <= most, f"{peak - bare} bytes more than {bare}"


def plans():
    """All plans in this process, in which other tests may have left some."""
    gc.collect()
    return [thing for thing in gc.get_objects() if isinstance(thing, Plan)]


@on_two_ranks
def test_nothing_grows_with_the_number_of_masks():
    wrapper = DistributedDataParallel(seeded(Routes, WIDTH, LAYERS), bucket_cap_mb=CAP_MB)
    masks, counts = set(), {}
    others = len(plans())
    for step in range(170):
        train(wrapper, step, [dist.get_rank()])
        masks.add(wrapper.trace().agreed)
        if step in (109, 169):  # each part of the parameters has been compared once
            gc.collect()
            counts[step] = len(gc.get_objects())
            assert len(plans()) - others <= 40
    assert len(masks) > 80
    # The set of masks grows here, not there.
    assert counts[169] - counts[109] < 2 * len(masks)
    assert wrapper._reducer.synchronizer.gradients.buffers.nbytes <= LAYERS * LAYER_NBYTES + BUCKET_NBYTES + rounding(
        wrapper
    )


def shared_nbytes():
    return 512 * os.fstat(shared_memory().address.descriptor).st_blocks


def shared_ranges():
    """The addresses of the memory that ranks share, of this one's and the others'."""
    with open("/proc/self/maps") as file:
        words = [line.split()[0] for line in file if "memfd:ppe_ddp" in line]
    return [tuple(int(bound, 16) for bound in word.split("-")) for word in words]


@each_variant
@on_two_ranks
def test_a_dropped_wrapper_leaves_nothing(options):
    gc.collect()
    others = {id(thing) for thing in gc.get_objects() if isinstance(thing, torch.Tensor)}
    shared = shared_nbytes()
    module = seeded(Routes, WIDTH, LAYERS)
    wrapper = DistributedDataParallel(module, bucket_cap_mb=CAP_MB, **options)
    for step in range(3):
        train(wrapper, step, [dist.get_rank()])
    gc.collect()
    gc.disable()
    try:
        del wrapper
        # At once, and not when the garbage collector gets to it.
        tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    finally:
        gc.enable()
    own = {parameter.data_ptr() for parameter in module.parameters()}
    tensors = [tensor for tensor in tensors if id(tensor) not in others]
    # The steps of sums in shared memory are kept: views that hold no memory.
    maps = shared_ranges()
    tensors = [tensor for tensor in tensors if not any(low <= tensor.data_ptr() < high for low, high in maps)]
    assert shared_nbytes() - shared < LAYER_NBYTES // 2
    large = [tensor for tensor in tensors if tensor.nbytes > LAYER_NBYTES // 2 and tensor.data_ptr() not in own]
    assert not large
