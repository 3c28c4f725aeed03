"""Tests whose body runs on every rank: the decorators that turn such a body into a test, and one for options."""

import functools
import importlib
import inspect
import reprlib
import sys
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

VARIANTS = [{"gradient_as_bucket_view": False}, {"bucket_cap_mb": 1e-6}, {}, {"overlap": False}]
each_variant = pytest.mark.parametrize("options", VARIANTS, ids=["copied", "adopted", "views", "after"])
_SHORT = reprlib.Repr()
_SHORT.maxother = _SHORT.maxstring = 500


def long(*values):
    """These values of a parameter, for `make test-long` alone."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]


def on_two_ranks(body):
    """Make a test of `body`, which is called on each of two ranks with the test's parameters."""
    return _on("two_ranks", body)


def on_three_ranks(body):
    """Make a test of `body`, which is called on each of three ranks with the test's parameters."""
    return _on("three_ranks", body)


def on_four_ranks(body):
    """Make a test of `body`, which is called on each of four ranks with the test's parameters."""
    return _on("four_ranks", body)


def _on(fixture, body):
    @functools.wraps(body)
    def test(**arguments):
        ranks = arguments.pop(fixture)
        ranks.run(_call, body.__module__, body.__qualname__, arguments, timeout=120)

    own = inspect.signature(body)
    first = inspect.Parameter(fixture, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    test.__signature__ = own.replace(parameters=[first, *own.parameters.values()])
    return test


def _call(module, name, arguments):
    # By name, as pickle would find the test that the decorator has put in the place of its body.
    test = getattr(importlib.import_module(module), name)
    torch.manual_seed(dist.get_rank())
    try:
        test.__wrapped__(**arguments)
    except AssertionError as error:  # pytest rewrites no assertion of a rank
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        values = "\n".join(f"    {name} = {_SHORT.repr(value)}" for name, value in frame.f_locals.items())
        raise AssertionError(f"{error}\n{values}") from error
    end_world()


def end_world():
    """End the process groups of this rank, with all others."""
    if dist.is_initialized():
        # Each wrapper makes process groups, which have threads and sockets; the next run gets a fresh world.
        dist.barrier()
        dist.destroy_process_group()


def make_tensors_on(device):
    """Let tensors and generators of tests be on this device where they name none."""
    original = torch.Generator

    class Generator(original):
        def __new__(cls, at=None):
            is_of_a_test = Path(sys._getframe(1).f_code.co_filename).parent == Path(__file__).parent
            return original(at or (device if is_of_a_test else "cpu"))

    torch.set_default_device(device)
    torch.Generator = Generator
