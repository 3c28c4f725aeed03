"""Measures a training step: forward, backward, exchange, and with --adamw AdamW.

ppe_ddp, torch DDP, pytorch-pfn-extras' DDP ("ppe") and the bare module take
turns in training copies of one model on the same data, over one backend, with
one thread a rank. Look at the ratios: times on a shared machine mean little.
"ms over bare" is the time of a step minus that of the bare module's. --json has
all numbers, also the bytes of masks. With --adamw DistributedOptimizer, with
and without overlap, and torch's ZeroRedundancyOptimizer ("zero") take part, and
"state" is the size of one rank's optimizer state.

Without a launcher it starts its own ranks. Under torchrun, srun or mpirun it
uses the ranks of the job; under mpirun ppe_ddp over mpi4py takes part, too:

  python -m ppe_ddp bench step --model mlp --model small
  torchrun --nproc_per_node=4 -m ppe_ddp bench step --json result.json
  mpirun -n 2 python -m ppe_ddp bench step --also shared_memory=False
  python -m ppe_ddp bench step --model transformer --adamw
  python -m ppe_ddp bench step --device cuda
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import os
import random
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ppe_ddp import DistributedDataParallel, DistributedOptimizer, Options
from ppe_ddp.cli import benchmarking
from ppe_ddp.cli.benchmarking import BACKENDS, Platform, Spread, in_turn, largest, on_ranks, over_mpi, print_table
from ppe_ddp.cli.command_line import count, fail, told, write_report

_REPEATS, _QUICK_REPEATS, _QUICK_STEPS = 15, 3, 2
# In the first backwards wrappers make buckets and learn the order of gradients.
_WARM_UP_STEPS = 3
# Of the largest value: rounding errors, as wrappers and kernels add up in different orders.
_TOLERANCE, _ROUNDINGS = 1e-5, 4


# ---------------------------------------------------------------------- models


@dataclass(frozen=True)
class Workload:
    """One model and its data; weights, data and branches follow from seeds, so that all contestants train the same."""

    build: Callable[[], nn.Module]  # makes a model, with weights from torch's global generator
    batch: Callable[[torch.Generator], Tensor]  # makes the input for all steps of a rank
    # The loss, of the model's output and the batch.
    loss: Callable[[Tensor, Tensor], Tensor] = lambda output, _batch: output.square().mean()
    # The model's further arguments, such as branches to take, by step and rank.
    route: Callable[[int, int], tuple[object, ...]] = lambda _step, _rank: ()
    steps: int = 3  # steps in a block by default; more if a step is short
    is_dynamic: bool = False  # a step leaves parameters out, so that torch DDP needs find_unused_parameters

    def made(self, device: str = "cpu") -> tuple[nn.Module, Tensor]:
        """A model, the same on every rank and device, and this rank's batch; both are made on the CPU and moved."""
        torch.manual_seed(0)
        batch = self.batch(torch.Generator().manual_seed(dist.get_rank()))
        return self.build().to(device), batch.to(device)


def _random(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(*shape, generator=generator)


def _chain(width: int, depth: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        linear = nn.Linear(width, width)
        # Other weights would give denormal gradients in a thousand layers, and so slow arithmetic.
        nn.init.orthogonal_(linear.weight)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers)


def _linear(width: int) -> nn.Linear:
    linear = nn.Linear(width, width)
    nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
    return linear


_LAYERS, _BRANCHES = 8, 4


class _Supernet(nn.Module):
    """Layers of several branches each; one branch of each layer is used at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(_linear(512) for _ in range(_LAYERS * _BRANCHES))

    def forward(self, x: Tensor, choices: tuple[int, ...]) -> Tensor:
        for layer, choice in enumerate(choices):
            x = functional.relu(self.branches[layer * _BRANCHES + choice](x))
        return x


def _supernet(place: Callable[[int], int]) -> Workload:
    """One random branch of each layer in every step: ranks with the same ``place`` take the same."""

    def route(step: int, rank: int) -> tuple[object, ...]:
        chooser = random.Random(step)
        orders = [chooser.sample(range(_BRANCHES), _BRANCHES) for _ in range(_LAYERS)]
        return (tuple(order[place(rank)] for order in orders),)

    return Workload(_Supernet, _random(32, 512), route=route, steps=8, is_dynamic=True)


class _TokenModel(nn.Module):
    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(vocabulary, width)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encoder(self.embedding(tokens)))
        return scores


def _token_model(vocabulary: int, width: int, depth: int, shape: tuple[int, int], dtype: torch.dtype) -> Workload:
    """A model that predicts random tokens."""
    return Workload(
        lambda: _TokenModel(vocabulary, width, depth).to(dtype),
        lambda generator: torch.randint(vocabulary, shape, generator=generator),
        lambda output, batch: functional.cross_entropy(output.flatten(0, 1).float(), batch.flatten()),
    )


WORKLOADS: dict[str, Workload] = {
    # Few large gradients, all in every step.
    "mlp": Workload(
        lambda: nn.Sequential(*[layer for _ in range(8) for layer in (_linear(1024), nn.ReLU())]), _random(64, 1024)
    ),
    # 400 gradients, so small that handling them costs more than sending them.
    "small": Workload(lambda: _chain(64, 200), _random(16, 64), steps=8),
    # All ranks take the same branches, and three quarters of the gradients do not exist.
    "supernet-common": _supernet(lambda rank: 0),
    # Each gradient exists on one rank at most (of up to four).
    "supernet-own": _supernet(lambda rank: rank % _BRANCHES),
    # Gradients of all sizes; the largest, of the embedding, comes last.
    "transformer": _token_model(4096, 256, 4, (4, 32), torch.float32),
    # As large as GPT-2 small, in half precision: work for a GPU, and 330 MB of gradients to send beside it.
    "transformer-bf16": _token_model(50304, 768, 12, (8, 1024), torch.bfloat16),
    # On one rank: the wrapper's own time for each of 2000 parameters.
    "tiny": Workload(lambda: _chain(8, 1000), _random(8, 8)),
}
"""All models, by name."""


# ---------------------------------------------------------------------- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to ``parser``."""
    names = f"{', '.join(WORKLOADS)} (default: all but tiny; transformer-bf16 on cuda only)"
    parser.add_argument("--model", action="append", choices=WORKLOADS, metavar="NAME", help=names)
    parser.add_argument("--device", choices=list(BACKENDS), default="cpu", help="to run on (default: cpu)")
    backends = list(dict.fromkeys(name for fitting in BACKENDS.values() for name in fitting))
    defaults = f"{', '.join(backends)} (default: {BACKENDS['cpu'][0]}, on cuda {BACKENDS['cuda'][0]})"
    parser.add_argument("--backend", choices=backends, metavar="NAME", help=defaults)
    steps = "steps in a block (default: 3, or 8 where a step is short)"
    parser.add_argument("--steps", type=count, metavar="N", help=steps)
    benchmarking.add_arguments(parser, repeats=_REPEATS)
    parser.set_defaults(repeats=None)  # which --quick decides upon
    quick = f"{_QUICK_STEPS} steps, {_QUICK_REPEATS} repetitions: a first look"
    parser.add_argument("--quick", action="store_true", help=quick)
    also = "ppe_ddp once more with this keyword of the wrapper, such as bucket_cap_mb=1 or shared_memory=False"
    parser.add_argument("--adamw", action="store_true", help="with AdamW, whole and in shards")
    parser.add_argument("--also", type=keyword, action="append", default=[], metavar="NAME=VALUE", help=also)


def keyword(text: str) -> str:
    """An option of the wrapper, as ``name=value``."""
    name, _, value = text.partition("=")
    try:
        Options(**{name: ast.literal_eval(value)})
    except (SyntaxError, TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no keyword of the wrapper with its value ({error})") from error
    return text


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; 1 if a rank failed, 2 if the ranks cannot be used or are not as many as was asked for."""
    try:
        platform = Platform.of(arguments.device, arguments.backend)
    except (ImportError, ValueError) as error:
        return fail(error, 2)
    left_out = {"tiny"} if platform.device == "cuda" else {"tiny", "transformer-bf16"}
    settings = {
        "models": list(dict.fromkeys(arguments.model or [name for name in WORKLOADS if name not in left_out])),
        "steps": arguments.steps or (_QUICK_STEPS if arguments.quick else None),
        "repeats": arguments.repeats or (_QUICK_REPEATS if arguments.quick else _REPEATS),
        "also": arguments.also,
        "adamw": arguments.adamw,
    }

    def publish(models: list[dict[str, Any]], _ranks: int) -> int:
        title = "One training step: medians (middle half)"
        headings = ["", "ms a step", "ratio", "ms over bare", "state MB" if arguments.adamw else "MB sent"]
        print_table(arguments, title, str(platform), headings, _rows(models))
        for name, reason in models[0]["skipped"].items():
            print(f"{name} skipped: {reason}", file=told(arguments))
        load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
        if load > cores + 1:
            text = f"This machine is busy (load {load:.0f}, cores {cores}): do not rely on these times."
            print(text, file=told(arguments))
        used = {**settings, "platform": platform.facts(), "threads": 1}
        write_report(arguments, "bench step", settings=used, models=models)
        return 0

    return on_ranks(measure, (settings, platform), publish, ranks=arguments.ranks, platform=platform)


def _rows(models: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[str]]:
    for model in models:
        size, reference = model["world_size"], model["reference"]
        yield f"{model['name']}, {size} rank{'s' if size != 1 else ''}", "", f"to {reference}"
        for one in model["contestants"]:
            ratio = "" if one["name"] == reference else one["ratio"].text(2)
            nbytes = one.get("state_nbytes", one["gradient_nbytes"])
            yield (
                f"  {one['name']}",
                one["milliseconds"].text(1),
                ratio,
                "" if one["name"] == "bare" else f"{one['over_bare_ms']:+.1f}",
                f"{nbytes / 1e6:.2f}" if nbytes else "-",
            )
        yield ()


# ---------------------------------------------------------------------- contestants

Wrap = Callable[[nn.Module, "ProcessGroup | None", bool], nn.Module]


def _torch(module: nn.Module, group: ProcessGroup | None, is_dynamic: bool) -> nn.Module:
    """Torch's wrapper, with the options that make it fast."""
    return TorchDDP(module, process_group=group, gradient_as_bucket_view=True, find_unused_parameters=is_dynamic)


def _ppe(module: nn.Module, group: ProcessGroup | None, _is_dynamic: bool) -> nn.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parallel = importlib.import_module("pytorch_pfn_extras.nn.parallel")
    except ImportError as error:
        raise ImportError(f"pytorch-pfn-extras is not installed ({error})") from error
    wrapped: nn.Module = parallel.DistributedDataParallel(module, process_group=group)
    return wrapped


def _ours(options: Mapping[str, Any], module: nn.Module, group: ProcessGroup | None, _is_dynamic: bool) -> nn.Module:
    return DistributedDataParallel(module, process_group=group, **options)


def _adamw(wrapper: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(wrapper.parameters(), lr=1e-4)


def _zero(wrapper: nn.Module) -> torch.optim.Optimizer:
    # Imported here, as torch then warns about itself.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    group = wrapper.process_group  # of torch's wrapper
    return ZeroRedundancyOptimizer(wrapper.parameters(), torch.optim.AdamW, process_group=group, lr=1e-4)


def _sharded(options: Mapping[str, Any], wrapper: Any) -> torch.optim.Optimizer:
    return DistributedOptimizer(_adamw(wrapper), wrapper, **options)


# Each in the wrapper that the name begins with.
_IN_SHARDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "ppe_ddp, sharded": partial(_sharded, {}),
    "ppe_ddp, overlap": partial(_sharded, {"overlap": True}),
    "torch, zero": _zero,
}


def wraps(also: Sequence[str], *, adamw: bool) -> dict[str, Wrap]:
    """The contestants by name; ``also`` has options of further ones of ppe_ddp, as ``name=value``."""
    found: dict[str, Wrap] = {"ppe_ddp": partial(_ours, {})}
    for text in also:
        name, _, value = text.partition("=")
        found[text] = partial(_ours, {name: ast.literal_eval(value)})
    if adamw:
        found |= {name: _torch if "torch" in name else partial(_ours, {}) for name in _IN_SHARDS}
    if over_mpi():
        found["over mpi4py"] = lambda module, _group, is_dynamic: _ours({}, module, None, is_dynamic)
    return {**found, "torch": _torch, "ppe": _ppe, "bare": lambda module, _group, _is_dynamic: module}


@dataclass
class Contestant:
    """A copy of a model in one wrapper; step n is the same for all contestants."""

    workload: Workload
    batch: Tensor
    module: nn.Module
    wrapper: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    steps: int = 0

    def take(self, steps: int) -> None:
        for _ in range(steps):
            route = self.workload.route(self.steps, dist.get_rank())
            (self.optimizer or self.module).zero_grad(set_to_none=True)
            self.workload.loss(self.wrapper(self.batch, *route), self.batch).backward()
            if self.optimizer is not None:
                self.optimizer.step()
            self.steps += 1

    def traffic(self) -> tuple[int, int]:
        """The bytes of gradients, and of masks, that this rank has sent in the last step."""
        parameters, wrapper = list(self.module.parameters()), self.wrapper
        if wrapper is self.module or dist.get_world_size() == 1:
            return 0, 0
        if isinstance(wrapper, DistributedDataParallel):
            trace = wrapper.trace()
            return (0, 0) if trace is None else (trace.gradient_nbytes, trace.control_nbytes)
        if isinstance(wrapper, TorchDDP):  # all gradients; an int32 for each parameter where some may be unused
            return sum(one.nbytes for one in parameters), 4 * len(parameters) if self.workload.is_dynamic else 0
        # ppe's: all that exist on some rank, as zeros if not here, and an int64 for each parameter
        return sum(one.grad.nbytes for one in parameters if one.grad is not None), 8 * len(parameters)

    def state_nbytes(self) -> int:
        inner: Any = getattr(self.optimizer, "optim", self.optimizer)  # ZeroRedundancyOptimizer's own
        tensors = [value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor)]
        master = self.optimizer.master_nbytes if isinstance(self.optimizer, DistributedOptimizer) else 0
        return master + sum(tensor.nbytes for tensor in tensors if tensor.dim())


# ---------------------------------------------------------------------- on all ranks


class GradientMismatchError(RuntimeError):
    """Two contestants have different gradients after the same step; nothing is measured."""


def measure(settings: Mapping[str, Any], platform: Platform) -> list[dict[str, Any]]:
    """Measure some models in the default process group, on all ranks together. Returns a report for each.

    Reports are the same on every rank, except the bytes sent, which are this rank's. GradientMismatchError if two
    contestants do not agree.
    """
    control, group = platform.enter(), dist.new_group(backend="gloo") if over_mpi() else None
    with warnings.catch_warnings():
        # ppe's own, and torch's about its own optimizers.
        warnings.filterwarnings("ignore", "Using .*non-full backward hook", FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        return [_measured(name, settings, platform, control, group) for name in settings["models"]]


def _measured(
    name: str, settings: Mapping[str, Any], platform: Platform, control: ProcessGroup | None, group: ProcessGroup | None
) -> dict[str, Any]:
    """Check all contestants on one model, then time them in turn."""
    workload, skipped = WORKLOADS[name], {}
    original, batch = workload.made(platform.device)
    contestants: dict[str, Contestant] = {}
    for one, wrap in wraps(settings["also"], adamw=settings["adamw"]).items():
        module = copy.deepcopy(original)
        try:
            wrapper = wrap(module, group, workload.is_dynamic)
        except ImportError as error:
            skipped[one] = str(error)
            continue
        optimizer = _IN_SHARDS.get(one, _adamw)(wrapper) if settings["adamw"] else None
        contestants[one] = Contestant(workload, batch, module, wrapper, optimizer)
    for _ in range(_WARM_UP_STEPS):
        for contestant in contestants.values():
            contestant.take(1)
        if not settings["adamw"]:  # AdamW turns small differences into large ones
            _check(contestants)
    bare = list(contestants["bare"].module.parameters())
    present = torch.tensor([one.grad is not None for one in bare], dtype=torch.uint8)
    dist.all_reduce(present, dist.ReduceOp.MAX, group=control)
    traffic = {one: contestant.traffic() for one, contestant in contestants.items()}
    steps = dict.fromkeys(contestants, settings["steps"] or workload.steps)
    takes = {one: contestant.take for one, contestant in contestants.items()}
    seconds = in_turn(takes, steps, settings["repeats"], platform, control)
    compared = compare(seconds, traffic, dist.get_world_size())
    if settings["adamw"]:
        states = largest([contestant.state_nbytes() for contestant in contestants.values()], control)
        for result, nbytes in zip(compared["contestants"], states, strict=True):
            result["state_nbytes"] = int(nbytes)
    return {
        "name": name,
        "world_size": dist.get_world_size(),
        "parameters": len(bare),
        "parameter_nbytes": sum(one.nbytes for one in bare),
        "existing_nbytes": sum(one.nbytes for one, here in zip(bare, present.tolist(), strict=True) if here),
        **compared,
        "skipped": skipped,
    }


def compare(
    seconds: Mapping[str, Sequence[float]], traffic: Mapping[str, tuple[int, int]], world_size: int
) -> dict[str, Any]:
    """The result of each contestant, from seconds of a step by repetition, and bytes of gradients and of masks.

    Ratios are to torch DDP, or on one rank to the bare model; ``over_bare_ms`` is the median time of a step minus that
    of the bare model's.
    """
    reference = "bare" if world_size == 1 else "torch"
    bare = statistics.median(seconds["bare"])
    results = [
        {
            "name": one,
            "milliseconds": Spread.of([1e3 * value for value in own]),
            "ratio": Spread.of(own, seconds[reference]),
            "over_bare_ms": 1e3 * (statistics.median(own) - bare),
            "gradient_nbytes": traffic[one][0],
            "control_nbytes": traffic[one][1],
            "steps_ms": [1e3 * value for value in own],
        }
        for one, own in seconds.items()
    ]
    return {"reference": reference, "contestants": results}


def _check(contestants: Mapping[str, Contestant]) -> None:
    expected = contestants["torch"].module
    for name, one in contestants.items():
        if name in ("torch", "bare"):
            continue
        for named, theirs in zip(one.module.named_parameters(), expected.parameters(), strict=True):
            _compare(named, theirs.grad, f"step {one.steps - 1}, rank {dist.get_rank()}: {name}")


def tolerance(dtype: torch.dtype) -> float:
    """The largest difference of two gradients of this dtype, divided by the largest value."""
    return max(_TOLERANCE, _ROUNDINGS * torch.finfo(dtype).eps)


def _compare(named: tuple[str, nn.Parameter], theirs: Tensor | None, where: str) -> None:
    name, parameter = named
    actual, expected = (
        (torch.zeros_like(parameter) if gradient is None else gradient).detach().double()
        for gradient in (parameter.grad, theirs)
    )
    largest, difference = float(expected.abs().max()), float((actual - expected).abs().max())
    # Not `>`, which is False for NaN.
    if not difference <= tolerance(parameter.dtype) * largest:
        raise GradientMismatchError(
            f"{where} has a gradient of {name!r} that differs from torch's by up to {difference:.3g}, where "
            f"values go up to {largest:.3g}; nothing was timed"
        )
