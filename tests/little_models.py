"""Models of `bench step` that take a tenth of the time, for tests of what is measured and told."""

import contextlib
from dataclasses import replace
from unittest import mock

import torch

from ppe_ddp.cli import bench_step
from ppe_ddp.cli.bench_step import WORKLOADS
from ppe_ddp.cli.benchmarking import Platform

_OF_FULL_SIZE = dict(WORKLOADS)


def _little_supernet():
    with mock.patch.object(bench_step, "_linear", side_effect=lambda _: torch.nn.Linear(64, 64)):
        return _OF_FULL_SIZE["supernet-own"].build()


def _make_little():
    random, chain = bench_step._random, bench_step._chain
    WORKLOADS["small"] = replace(_OF_FULL_SIZE["small"], build=lambda: chain(16, 20), batch=random(4, 16))
    WORKLOADS["supernet-own"] = replace(WORKLOADS["supernet-own"], build=_little_supernet, batch=random(4, 64))


def _make_large():
    WORKLOADS.update(_OF_FULL_SIZE)


@contextlib.contextmanager
def on_ranks_with_little_models(ranks):
    """Benchmarks have no ranks of their own but these, where the models `small` and `supernet-own` are little."""
    ranks.run(_make_little)
    try:
        with mock.patch.object(Platform, "start", return_value=contextlib.nullcontext(ranks)):
            yield
    finally:  # other tests use these ranks, too
        ranks.run(_make_large)
