"""Layouts of gradient buffers, on random parameters. Pure, without ranks."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from ppe_ddp.megatron.gradient_buffers import BufferKind, Item, lay_out

CPU = torch.device("cpu")
KINDS = [
    BufferKind(0, torch.float32, torch.float32, CPU),
    BufferKind(0, torch.bfloat16, torch.float32, CPU),
    BufferKind(1, torch.float32, torch.float32, CPU),
]
item = st.tuples(st.integers(0, 50), st.sampled_from(KINDS), st.booleans())
sizes = st.one_of(st.none(), st.integers(1, 120))


@given(st.lists(item, max_size=12), sizes, st.integers(1, 5), st.integers(1, 5))
def test_laws_of_a_layout(drawn, bucket_size, dense, expert):
    items = [Item(2 * k, numel, kind, alone) for k, (numel, kind, alone) in enumerate(drawn)]
    layout = lay_out(items, bucket_size=bucket_size, divisors=[dense, expert])
    by_index = {item.index: item for item in items}

    # Every parameter has one place, in a buffer of its kind, beside those of no other.
    places = {}
    for bucket in layout.buckets:
        kind = layout.kinds[bucket.buffer]
        assert bucket.padded % (dense, expert)[kind.reduction_group] == 0
        assert bucket.plan.numel <= bucket.padded
        assert bucket.reduction_group == kind.reduction_group
        assert bucket.plan.dtype is kind.grad_dtype
        end = 0
        for i, offset in zip(bucket.plan.members, bucket.plan.offsets, strict=True):
            assert by_index[i].kind == kind
            assert offset == end
            end += by_index[i].numel
            places[i] = bucket.start + offset
        assert end == bucket.plan.numel
        assert len(bucket.plan.members) == 1 or not any(by_index[i].alone for i in bucket.plan.members)
        if bucket_size is not None:  # closed by its last member
            assert bucket.plan.numel - by_index[bucket.plan.members[-1]].numel < bucket_size
    assert places.keys() == by_index.keys() == layout.bucket_of.keys()
    for number, size in enumerate(layout.sizes):
        mine = sorted((b for b in layout.buckets if b.buffer == number), key=lambda b: b.start)
        assert [b.start for b in mine] == [sum(b.padded for b in mine[:k]) for k in range(len(mine))]
        assert size == sum(b.padded for b in mine)

    # In reverse order of registration, within a bucket and over all buckets.
    for bucket in layout.buckets:
        assert list(bucket.plan.members) == sorted(bucket.plan.members, reverse=True)
    assert [b.plan.members[-1] for b in layout.buckets] == sorted(b.plan.members[-1] for b in layout.buckets)[::-1]
    assert [b.plan.index for b in layout.buckets] == list(range(len(layout.buckets)))
    assert {b.plan.members[-1] for b in layout.buckets} <= layout.launch_triggers


@given(st.lists(item, min_size=1, max_size=12), sizes, st.data())
def test_only_buckets_with_a_gradient_are_sent(drawn, bucket_size, data):
    items = [Item(k, numel, kind, alone) for k, (numel, kind, alone) in enumerate(drawn)]
    layout = lay_out(items, bucket_size=bucket_size, divisors=[2, 2])
    present = bytes(data.draw(st.lists(st.integers(0, 1), min_size=len(items), max_size=len(items))))
    plan = layout.plan(present)
    sent = {i for bucket in plan.buckets for i in bucket.members}
    assert {i for i, here in enumerate(present) if here} <= sent
    assert all(any(present[i] for i in bucket.members) for bucket in plan.buckets)
    assert all(i in plan.buckets[k].members for i, k in plan.bucket_of.items())
    assert [bucket.index for bucket in plan.buckets] == sorted(bucket.index for bucket in plan.buckets)
