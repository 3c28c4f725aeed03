"""The conformance kit: certifies a backend, a reduce function or a hook in three lines.

    from ppe_ddp.testing import check_reduce_function
    if __name__ == "__main__":  # ranks are new processes, which import this file
        check_reduce_function(my_reduce)

A check starts ranks, makes calls with known results, trains a dynamic model, and compares its gradients with those of
one process (both in :mod:`~ppe_ddp.testing.probes`). It does not measure speed, and cannot find errors that need more
ranks, more data or other hardware than it is given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import distributed as dist

from ppe_ddp.contracts import BroadcastFunction, CommHook, ReduceFunction
from ppe_ddp.errors import PpeDdpError
from ppe_ddp.functions import name_of
from ppe_ddp.testing.probes import Plugs, probe_backend, probe_broadcast, probe_reduction, train
from ppe_ddp.testing.ranks import RankError, Ranks

T = TypeVar("T")

_TOLD = 12


class ConformanceError(PpeDdpError):
    """A backend, function or hook breaks its contract; the message says where, and what was expected."""


@dataclass(frozen=True)
class World:
    """The ranks and the backend that a check runs on.

    Attributes:
        sizes: Numbers of ranks, started one after another. Three find errors that two do not; more take longer.
        backend: The backend of the default process group.
        setup: A function of a module, called without arguments in each new process, such as to register the backend.
        device: The device of modules and tensors: "cpu", or "cuda" for the current device of each rank.
        timeout: Seconds after which the ranks are killed, for each part of a check.
        ranks: Running ranks to use instead of starting any; then ``device`` alone of the above has an effect.
    """

    sizes: tuple[int, ...] = (2, 3)
    backend: str = "gloo"
    setup: Callable[[], object] | None = None
    device: str = "cpu"
    timeout: float = 60.0
    ranks: tuple[Ranks, ...] = ()


def check_reduce_function(
    reduce_function: ReduceFunction,
    *,
    tolerance: float | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float64),
    world: World | None = None,
) -> None:
    """Certify a reduce function; :class:`ppe_ddp.ReduceFunction` has the contract.

    It must average in place, in the given group, for all shapes; must write to no other memory; and must return None or
    something to wait for. A dynamic model that is trained with it must get the gradients of one process.

    Args:
        reduce_function: A function of a module, or an instance that can be pickled, as the ranks import it.
        tolerance: The largest error of a mean, in units of the largest element. None: what rounding explains.
        dtypes: The dtypes of gradients that it must average.
        world: The ranks; by default two and then three, over gloo.

    Raises:
        ConformanceError: It does not conform.
        TypeError: It cannot be sent to the ranks.
    """
    plugs = Plugs(reduce_function=reduce_function, tolerance=tolerance)
    name = f"reduce function {name_of(reduce_function)}"
    _check(name, plugs, probe_reduction, dtypes, world or World())


def check_comm_hook(
    state: object,
    hook: CommHook,
    *,
    tolerance: float | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    world: World | None = None,
) -> None:
    """Certify a communication hook of torch's kind: ``hook(state, bucket)`` returns a Future.

    Args:
        state: The hook's state, which can be pickled; copied for each model.
        hook: A function of a module, or an instance that can be pickled.
        tolerance: The largest error of a mean, in units of the largest gradient element, for hooks that compress.
            None: what rounding explains.
        dtypes: The dtypes of gradients that it must average.
        world: The ranks; by default two and then three, over gloo.

    Errors are those of :func:`check_reduce_function`.
    """
    plugs = Plugs(hook=hook, state=state, tolerance=tolerance)
    _check(f"communication hook {name_of(hook)}", plugs, probe_reduction, dtypes, world or World())


def check_broadcast_function(
    broadcast_function: BroadcastFunction,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool),
    world: World | None = None,
) -> None:
    """Certify a broadcast function; :class:`ppe_ddp.BroadcastFunction` has the contract.

    Args:
        broadcast_function: A function of a module, or an instance that can be pickled.
        dtypes: The dtypes of tensors that it must copy. The trained model has float32, float64 and int64.
        world: The ranks; by default two and then three, over gloo.

    Errors are those of :func:`check_reduce_function`.
    """
    plugs = Plugs(broadcast_function=broadcast_function)
    name = f"broadcast function {name_of(broadcast_function)}"
    _check(name, plugs, probe_broadcast, dtypes, world or World(), trained=(torch.float32, torch.float64))


def check_backend(
    backend: str,
    setup: Callable[[], object] | None = None,
    *,
    device: str = "cpu",
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float64, torch.bfloat16),
    world: World | None = None,
) -> None:
    """Certify a torch.distributed backend for use with this library.

    It must do what the engine asks for: all-reduces (MAX of uint8 and int64; SUM of int64 and floating-point numbers),
    broadcasts, all-gathers, collectives of objects, barriers, Works with ``wait()``, ``is_completed()`` and
    ``get_future()``, and groups that only their members make. A dynamic model that is trained over it must get the
    gradients of one process. If it lacks ``all_gather_into_tensor``, ``reduce_scatter_tensor`` or
    ``all_to_all_single``, a line on stderr says which parts of the library cannot be used over it.

    Args:
        backend: Its name, as for ``torch.distributed.init_process_group``.
        setup: A function of a module that registers the backend; called in each new process.
        device: The device of modules and tensors: "cpu" or "cuda".
        dtypes: The dtypes of the model's parameters.
        world: The ranks; ``backend``, ``setup`` and ``device`` take precedence over its own.

    Raises:
        ConformanceError: It does not conform.
    """
    world = replace(world or World(), backend=backend, setup=setup, device=device)
    _check(f"backend {backend}", Plugs(), _probe_backend, dtypes, world, has_sparse=True)


def examine_backend(dtypes: Sequence[torch.dtype], device: str) -> list[str]:
    """The problems of the default process group on this rank, as :func:`check_backend` looks for them; collective."""
    return [*probe_backend(device), *train(Plugs(), dtypes, device, has_sparse=True).problems]


def _probe_backend(_plugs: Plugs, _dtypes: Sequence[torch.dtype], device: str) -> list[str]:
    return probe_backend(device)


def _check(
    name: str,
    plugs: Plugs,
    probe: Callable[[Plugs, Sequence[torch.dtype], str], list[str]],
    dtypes: Sequence[torch.dtype],
    world: World,
    *,
    trained: Sequence[torch.dtype] = (),
    has_sparse: bool = False,
) -> None:
    for ranks in _worlds(world, name):
        where = f"{name} on {ranks.world_size} ranks"
        print(f"{where}: the contract, then a dynamic model ...", file=sys.stderr, flush=True)
        _judge(where, _ran(where, ranks, probe, plugs, tuple(dtypes), world.device))
        found = _ran(where, ranks, partial(train, has_sparse=has_sparse), plugs, tuple(trained or dtypes), world.device)
        _judge(where, [one.problems for one in found])
        first = found[0].digests
        others = "has other bits than on rank 0"
        _judge(where, [[f"{k} {others}" for k, own in one.digests.items() if own != first[k]] for one in found])


def _worlds(world: World, name: str) -> Iterator[Ranks]:
    for ranks in world.ranks:
        yield ranks
        ranks.run(_leave)
    for size in () if world.ranks else world.sizes:
        with Ranks(size, backend=world.backend, timeout=world.timeout, prepare=world.setup) as ranks:
            _ran(f"{name}: starting {size} ranks", ranks, int)
            yield ranks


def _ran(where: str, ranks: Ranks, function: Callable[..., T], *args: object) -> list[T]:
    try:
        return ranks.run(function, *args)
    except RankError as error:
        raise ConformanceError(f"{where}: {error}") from error


def _leave() -> None:
    """End the groups of all wrappers, whose threads and sockets would add up; the next run gets new ones."""
    dist.barrier()
    dist.destroy_process_group()


def _judge(where: str, by_rank: Sequence[Sequence[str]]) -> None:
    """Raise ConformanceError if there are problems; one that several ranks have is told once."""
    ranks_of: dict[str, list[int]] = {}
    for rank, problems in enumerate(by_rank):
        for problem in problems:
            ranks_of.setdefault(problem, []).append(rank)
    if not ranks_of:
        return
    lines = [problem if len(by_rank) == 1 else f"ranks {who}: {problem}" for problem, who in ranks_of.items()]
    more = [f"... and {len(lines) - _TOLD} more"] if len(lines) > _TOLD else []
    raise ConformanceError("\n  ".join([f"{where} does not conform:", *lines[:_TOLD], *more]))
