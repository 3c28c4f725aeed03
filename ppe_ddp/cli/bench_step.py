"""Measures one training step: forward, backward, exchange; no optimizer.

ppe_ddp, torch DDP, ppe's DDP and the bare module train copies of one model on
the same data, in turn, within one run over one backend, one thread a rank.
Look at the ratios: times on a shared machine mean little by themselves.
"exposed" is what a step takes beyond the bare model's, where torch DDP's is 1.
--json has all numbers, bytes of masks among them.

Started alone it starts its own ranks; under torchrun, srun or mpirun it uses
those that there are, and under mpirun ppe_ddp over mpi4py takes part as well:

  python -m ppe_ddp bench step --model mlp --model small
  torchrun --nproc_per_node=4 -m ppe_ddp bench step --json result.json
  mpirun -n 2 python -m ppe_ddp bench step --also shared_memory=False
  python -m ppe_ddp bench step --device cuda
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import importlib
import random
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ppe_ddp import DistributedDataParallel, Options
from ppe_ddp.cli.bench_platform import Platform, add_platform_arguments, measure_on_ranks, over_mpi
from ppe_ddp.cli.command_line import Spread, count, fail, output, print_table, told, write_report

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["WORKLOADS", "GradientMismatchError", "Workload", "add_arguments", "combine", "measure", "run", "tolerance"]

_REPEATS, _QUICK_REPEATS, _QUICK_STEPS = 15, 3, 2
# The first backwards of every wrapper are not like the later ones: buckets are made anew, orders learned.
_WARM_UP_STEPS = 3
# Of the largest value: what averaging in another order changes, with room for kernels that sum in another order.
_TOLERANCE, _ROUNDINGS = 1e-5, 4


# ---------------------------------------------------------------------- models


@dataclass(frozen=True)
class Workload:
    """One model with its data; weights, data and branches follow from seeds, so that all train the same thing.

    Attributes:
        build: Makes a new model, with weights from torch's global generator.
        batch: Makes the input of every step of one rank.
        loss: Of the model's output and the batch, a scalar to differentiate.
        route: The model's further arguments by step and rank: nothing, or the branches to take.
        steps: Steps in a block, unless the user says otherwise: more where a step is short.
        is_dynamic: Whether a step leaves some parameters out, which torch DDP has to be told.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor] = lambda output, _batch: output.square().mean()
    route: Callable[[int, int], tuple[object, ...]] = lambda _step, _rank: ()
    steps: int = 3
    is_dynamic: bool = False


def _random(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(*shape, generator=generator)


def _chain(width: int, depth: int) -> nn.Sequential:
    """Many small layers in a row."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        linear = nn.Linear(width, width)
        # With others, gradients become denormal in a thousand layers, which makes arithmetic slow.
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
    """One random branch of each layer in every step: in a random order of them, that at a rank's ``place``."""

    def route(step: int, rank: int) -> tuple[object, ...]:
        chooser = random.Random(step)
        orders = [chooser.sample(range(_BRANCHES), _BRANCHES) for _ in range(_LAYERS)]
        return (tuple(order[place(rank)] for order in orders),)

    return Workload(_Supernet, _random(32, 512), route=route, steps=8, is_dynamic=True)


class _TokenModel(nn.Module):
    """An embedding, an encoder and a head."""

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
    """Random tokens, each to be told from all of them."""
    return Workload(
        lambda: _TokenModel(vocabulary, width, depth).to(dtype),
        lambda generator: torch.randint(vocabulary, shape, generator=generator),
        lambda output, batch: functional.cross_entropy(output.flatten(0, 1).float(), batch.flatten()),
    )


WORKLOADS: dict[str, Workload] = {
    # Few large gradients, all in every step: nothing to save but waiting.
    "mlp": Workload(
        lambda: nn.Sequential(*[layer for _ in range(8) for layer in (_linear(1024), nn.ReLU())]), _random(64, 1024)
    ),
    # Gradients so small that handling them costs more than sending them: 400.
    "small": Workload(lambda: _chain(64, 200), _random(16, 64), steps=8),
    # Three quarters of the gradients do not exist; all ranks take the same branches.
    "supernet-common": _supernet(lambda rank: 0),
    # A gradient that exists, exists on one rank only (of up to four).
    "supernet-own": _supernet(lambda rank: rank % _BRANCHES),
    # Gradients of all sizes, and the largest one, of the embedding, last of all.
    "transformer": _token_model(4096, 256, 4, (4, 32), torch.float32),
    # As large as GPT-2 small, in half precision: work for a GPU, and 330 MB of gradients to send beside it.
    "transformer-bf16": _token_model(50304, 768, 12, (8, 1024), torch.bfloat16),
    # On one rank what is left is the wrapper's own time for each of 2000 parameters.
    "tiny": Workload(lambda: _chain(8, 1000), _random(8, 8)),
}
"""All models, by name."""


# ---------------------------------------------------------------------- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to ``parser``."""
    names = f"{', '.join(WORKLOADS)} (default: all but tiny; transformer-bf16 on cuda only)"
    parser.add_argument("--model", action="append", choices=WORKLOADS, metavar="NAME", help=names)
    add_platform_arguments(parser)
    steps = "steps in a block (default: 3, or 8 where a step is short)"
    parser.add_argument("--steps", type=count, metavar="N", help=steps)
    parser.add_argument("--repeats", type=count, metavar="N", help=f"repetitions (default: {_REPEATS})")
    quick = f"{_QUICK_STEPS} steps, {_QUICK_REPEATS} repetitions: a first look"
    parser.add_argument("--quick", action="store_true", help=quick)
    to_json = "write all numbers there; - for stdout, with the table on stderr"
    parser.add_argument("--json", type=output, metavar="FILE", help=to_json)
    also = "ppe_ddp once more with this keyword of the wrapper, such as bucket_cap_mb=1 or shared_memory=False"
    parser.add_argument("--also", type=keyword, action="append", default=[], metavar="NAME=VALUE", help=also)


def keyword(text: str) -> str:
    """An option of the wrapper, as ``name=value``, that its class takes."""
    name, _, value = text.partition("=")
    try:
        Options(**{name: ast.literal_eval(value)})
    except (SyntaxError, TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no keyword of the wrapper with its value ({error})") from error
    return text


def run(arguments: argparse.Namespace) -> int:
    """Measures, and prints what came out.

    Returns:
        0 if all was measured; 1 if a rank that was started here failed; 2 if the ranks that there are cannot be used,
        or are not as many as were asked for.

    Raises:
        GradientMismatchError: In a rank that was started outside: two contestants do not compute the same.
    """
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
    }
    publish = partial(_publish, arguments, settings, platform)
    return measure_on_ranks(measure, (settings, platform), publish, ranks=arguments.ranks, platform=platform)


# ---------------------------------------------------------------------- contestants

Wrap = Callable[[nn.Module, "ProcessGroup | None", bool], nn.Module]


def _torch(module: nn.Module, group: ProcessGroup | None, is_dynamic: bool) -> nn.Module:
    """With the options that make it fast."""
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


def _contestants(also: Sequence[str]) -> dict[str, Wrap]:
    """Who takes part, in the order of results."""
    found: dict[str, Wrap] = {"ppe_ddp": partial(_ours, {})}
    for text in also:
        name, _, value = text.partition("=")
        found[text] = partial(_ours, {name: ast.literal_eval(value)})
    if over_mpi():
        found["over mpi4py"] = lambda module, _group, is_dynamic: _ours({}, module, None, is_dynamic)
    return {**found, "torch": _torch, "ppe": _ppe, "bare": lambda module, _group, _is_dynamic: module}


def _traffic(trained: nn.Module, module: nn.Module, *, is_dynamic: bool) -> list[int]:
    """The bytes of gradients, and those that show which exist, that one rank has sent in the last step."""
    parameters = list(module.parameters())
    if isinstance(trained, DistributedDataParallel):  # as the engine has recorded it
        trace = trained.trace()
        return [0, 0] if trace is None else [trace.gradient_nbytes, trace.control_nbytes]
    if isinstance(trained, TorchDDP):  # all gradients; an int32 for each parameter where some may be unused
        return [sum(parameter.nbytes for parameter in parameters), 4 * len(parameters) if is_dynamic else 0]
    if trained is module:
        return [0, 0]
    # ppe's: those that exist on some rank, which it fills in here, and an int64 for each parameter
    return [sum(one.grad.nbytes for one in parameters if one.grad is not None), 8 * len(parameters)]


# ---------------------------------------------------------------------- one rank


class GradientMismatchError(RuntimeError):
    """Two contestants have different gradients after the same step, so their times mean nothing."""


class RankResult(NamedTuple):
    """The measurements of one rank on one model.

    Attributes:
        seconds: By contestant, the seconds of one step, one number a repetition.
        traffic: By contestant, the bytes of gradients and of masks that this rank sent in a step.
        present: By parameter, whether this rank's own backward has its gradient in that step.
        nbytes: The size of each parameter's gradient.
        skipped: By contestant that did not take part, the reason.
    """

    seconds: dict[str, list[float]]
    traffic: dict[str, list[int]]
    present: list[bool]
    nbytes: list[int]
    skipped: dict[str, str]


def measure(settings: Mapping[str, Any], platform: Platform) -> list[RankResult]:
    """Measure some models in the default process group. All ranks call this together.

    Every repetition gives each contestant one block of consecutive steps, in an order drawn anew, behind a barrier.
    Noise that lasts longer than a block then meets them all, and a ratio within one repetition is free of what changed
    since the one before.

    Raises:
        GradientMismatchError: Two contestants do not compute the same.
    """
    platform.enter()
    control, group = platform.control(), dist.new_group(backend="gloo") if over_mpi() else None
    with warnings.catch_warnings():
        # ppe's own, which a benchmark can do nothing about.
        warnings.filterwarnings("ignore", "Using .*non-full backward hook", FutureWarning)
        contestants = _contestants(settings["also"])
        return [_Race(name, settings, platform, control).measured(contestants, group) for name in settings["models"]]


class _Race:
    """The contestants on one model, each with the number of steps that it has made."""

    def __init__(
        self, name: str, settings: Mapping[str, Any], platform: Platform, control: ProcessGroup | None
    ) -> None:
        self._name, self._workload, self._settings = name, WORKLOADS[name], settings
        self._rank, self._platform, self._control = dist.get_rank(), platform, control
        self._modules: dict[str, nn.Module] = {}
        self._trained: dict[str, nn.Module] = {}
        self._steps: dict[str, int] = {}
        # Made on the CPU, so that they are the same on every kind of device.
        generator = torch.Generator().manual_seed(self._rank)
        self._batch = self._workload.batch(generator).to(platform.device)
        torch.manual_seed(0)
        self._module = self._workload.build().to(platform.device)

    def measured(self, contestants: Mapping[str, Wrap], group: ProcessGroup | None) -> RankResult:
        """Let all take part: check them, then time them in turn."""
        skipped = {}
        for name, wrap in contestants.items():
            try:
                self._enter(name, wrap, group)
            except ImportError as error:
                skipped[name] = str(error)
        for _ in range(_WARM_UP_STEPS):
            for name in self._trained:
                self._run(name, 1)
            self._check()
        traffic = {
            name: _traffic(trained, self._modules[name], is_dynamic=self._workload.is_dynamic)
            for name, trained in self._trained.items()
        }
        bare = list(self._modules["bare"].parameters())
        present, nbytes = [one.grad is not None for one in bare], [one.nbytes for one in bare]
        seconds = self._timed()
        return RankResult(seconds, traffic, present, nbytes, skipped)

    def _enter(self, name: str, wrap: Wrap, group: ProcessGroup | None) -> None:
        module = copy.deepcopy(self._module)
        self._trained[name] = wrap(module, group, self._workload.is_dynamic)
        self._modules[name], self._steps[name] = module, 0

    def _run(self, name: str, steps: int) -> None:
        """Let one contestant make its next steps. The n-th is the same for all contestants."""
        first = self._steps[name]
        for number in range(first, first + steps):
            route = self._workload.route(number, self._rank)
            self._modules[name].zero_grad(set_to_none=True)
            self._workload.loss(self._trained[name](self._batch, *route), self._batch).backward()
        self._steps[name] = first + steps

    def _timed(self) -> dict[str, list[float]]:
        seconds: dict[str, list[float]] = {name: [] for name in self._trained}
        order, shuffler = list(seconds), random.Random(0)
        steps = self._settings["steps"] or self._workload.steps
        gc.collect()
        for _ in range(self._settings["repeats"]):
            shuffler.shuffle(order)
            for name in order:
                self._run(name, 1)  # warms the caches that the contestant before has filled
                self._platform.clock()
                dist.barrier(self._control)
                start = self._platform.clock()
                self._run(name, steps)
                seconds[name].append((self._platform.clock() - start) / steps)
        return seconds

    def _check(self) -> None:
        """Compare the gradients of all contestants that communicate."""
        expected = self._modules["torch"]
        for name in [name for name in self._trained if name not in ("torch", "bare")]:
            for named, theirs in zip(self._modules[name].named_parameters(), expected.parameters(), strict=True):
                _compare(named, theirs.grad, f"step {self._steps['torch'] - 1}, rank {self._rank}: {name}")


def tolerance(dtype: torch.dtype) -> float:
    """How far two gradients of this type may be apart, as a part of the largest value."""
    return max(_TOLERANCE, _ROUNDINGS * torch.finfo(dtype).eps)


def _compare(named: tuple[str, nn.Parameter], theirs: Tensor | None, where: str) -> None:
    name, parameter = named
    actual, expected = (
        (torch.zeros_like(parameter) if gradient is None else gradient).detach().double()
        for gradient in (parameter.grad, theirs)
    )
    largest, difference = float(expected.abs().max()), float((actual - expected).abs().max())
    # Not `>`, which a NaN would pass.
    if not difference <= tolerance(parameter.dtype) * largest:
        raise GradientMismatchError(
            f"{where} has a gradient of {name!r} that differs from torch's by up to {difference:.3g}, where "
            f"values go up to {largest:.3g}; nothing was timed"
        )


# ---------------------------------------------------------------------- all ranks


def combine(name: str, ranks: Sequence[RankResult]) -> dict[str, Any]:
    """Bring together what the ranks measured on a model, as a report has it.

    A block took as long as it took the slowest rank. What was sent is rank 0's, and nothing where there is no other.
    Ratios are to torch DDP, or of one rank to the bare model; ``exposed`` is how much longer than the bare model's a
    step takes, by medians, where torch DDP's is 1; None where torch's takes no longer.
    """
    first, size = ranks[0], len(ranks)
    blocks = {
        one: [max(times) for times in zip(*(rank.seconds[one] for rank in ranks), strict=True)] for one in first.seconds
    }
    reference = "bare" if size == 1 else "torch"
    bare, torchs = (statistics.median(blocks[one]) for one in ("bare", "torch"))

    def result(one: str) -> dict[str, Any]:
        own = blocks[one]
        ratio = Spread.of([value / other for value, other in zip(own, blocks[reference], strict=True)])
        gradients, masks = first.traffic[one] if size > 1 else (0, 0)
        return {
            "name": one,
            "milliseconds": Spread.of([1e3 * value for value in own]),
            "ratio": ratio,
            "exposed": (statistics.median(own) - bare) / (torchs - bare) if torchs > bare and size > 1 else None,
            "gradient_nbytes": gradients,
            "control_nbytes": masks,
            "steps_ms": [1e3 * value for value in own],
        }

    existing = [any(here) for here in zip(*(rank.present for rank in ranks), strict=True)]
    return {
        "name": name,
        "world_size": size,
        "parameters": len(first.nbytes),
        "parameter_nbytes": sum(first.nbytes),
        "existing_nbytes": sum(n for n, here in zip(first.nbytes, existing, strict=True) if here),
        "reference": reference,
        "contestants": [result(one) for one in blocks],
        "skipped": first.skipped,
    }


def _publish(
    arguments: argparse.Namespace, settings: Mapping[str, Any], platform: Platform, ranks: list[list[Any]]
) -> int:
    results = [combine(name, [RankResult(*found[k]) for found in ranks]) for k, name in enumerate(settings["models"])]
    headings = ["", "ms a step", "ratio", "exposed", "MB sent"]
    title = "One training step: medians (middle half)"
    print_table(title, str(platform), headings, _rows(results), told(arguments))
    for name, reason in results[0]["skipped"].items():
        print(f"{name} skipped: {reason}", file=told(arguments))
    used = {**settings, "platform": platform.facts(), "threads": 1}
    write_report(arguments, "bench step", settings=used, models=results)
    return 0


def _rows(results: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[str]]:
    for model in results:
        size, reference = model["world_size"], model["reference"]
        yield f"{model['name']}, {size} rank{'s' if size != 1 else ''}", "", f"to {reference}", "", ""
        for one in model["contestants"]:
            has_exposed = one["exposed"] is not None and one["name"] not in (reference, "bare")
            yield (
                f"  {one['name']}",
                one["milliseconds"].text(1),
                "" if one["name"] == reference else one["ratio"].text(2),
                f"{one['exposed']:.2f}" if has_exposed else "",
                f"{one['gradient_nbytes'] / 1e6:.2f}" if one["gradient_nbytes"] else "-",
            )
        yield ()
