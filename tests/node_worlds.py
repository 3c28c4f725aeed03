"""Worlds of ranks on several nodes, for tests: the parameters of the fixture `world`, and what runs there."""

import itertools

import pytest
import torch
import torch.distributed as dist

from subprocesses import needs_mpirun

on_nodes = pytest.mark.nodes
long_on_nodes = pytest.mark.nodes(long=True)
BACKENDS = {"mpirun": "mpi4py", "torchrun": "gloo"}


def worlds(*layouts, launchers=tuple(BACKENDS), short=((2, 1),)):
    """The parameters of the fixture `world`: each launcher with ranks on each node.

    `make test` has those whose layout, or launcher and layout, is in `short`; `make test-nodes` all.
    """
    made = []
    for layout, launcher in itertools.product(layouts, launchers):
        marks = [on_nodes] + ([needs_mpirun] if launcher == "mpirun" else [])
        marks += [] if layout in short or (launcher, layout) in short else [long_on_nodes]
        made.append(pytest.param((launcher, layout), marks=marks, id=f"{launcher}-{'+'.join(map(str, layout))}"))
    return made


def some(values, few):
    """These values of a parameter, of which `make test` has a few."""
    return [pytest.param(value, marks=[] if value in few else [long_on_nodes]) for value in values]


def in_own_world(function, *arguments):
    """Call a function as on ranks of its own: its groups, which have threads and sockets, end with it."""
    torch.manual_seed(dist.get_rank())
    found = function(*arguments)
    dist.barrier()
    dist.destroy_process_group()
    return found
