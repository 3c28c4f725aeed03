"""The models of ``bench step``: seven, each hard on data parallelism in another respect.

Weights, data and branches follow from a seed alone, so that all contestants train the same thing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["WORKLOADS", "Workload"]

Route = Callable[[int, int, int], tuple[object, ...]]


def _mean_square(output: Tensor, _batch: Tensor) -> Tensor:
    return output.square().mean()


def _no_route(_seed: int, _step: int, _rank: int) -> tuple[object, ...]:
    return ()


@dataclass(frozen=True)
class Workload:
    """One model with its data.

    Attributes:
        title: What it is, in a few words.
        build: Makes a new model, with weights from torch's global generator.
        batch: Makes the input of every step of one rank.
        loss: Of the model's output and the batch, a scalar to differentiate.
        route: The model's further arguments by seed, step and rank: nothing, or the branches to take.
        steps: Steps in a block, unless the user says otherwise: more where a step is short.
        is_dynamic: Whether a step leaves some parameters out, which torch DDP has to be told.
        is_usual: Whether it takes part on the CPU without being named.
    """

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor] = _mean_square
    route: Route = _no_route
    steps: int = 3
    is_dynamic: bool = False
    is_usual: bool = True


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


def _supernet(title: str, place: Callable[[int], int]) -> Workload:
    """One random branch of each layer in every step: in a random order of them, that at a rank's ``place``."""

    def route(seed: int, step: int, rank: int) -> tuple[object, ...]:
        chooser = random.Random(f"{seed} {step}")
        orders = [chooser.sample(range(_BRANCHES), _BRANCHES) for _ in range(_LAYERS)]
        return (tuple(order[place(rank)] for order in orders),)

    title = f"supernet, 1 of 4 Linear(512, 512) in each of 8 layers, {title}"
    return Workload(title, _Supernet, _random(32, 512), route=route, steps=8, is_dynamic=True)


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


def _token_model(vocabulary: int, width: int, depth: int, shape: tuple[int, int]) -> Workload:
    """Random tokens, each to be told from all of them."""
    return Workload(
        f"transformer encoder, {depth} layers of width {width}, {vocabulary} tokens, {shape[0]} x {shape[1]} a step",
        lambda: _TokenModel(vocabulary, width, depth),
        lambda generator: torch.randint(vocabulary, shape, generator=generator),
        lambda output, batch: functional.cross_entropy(output.flatten(0, 1).float(), batch.flatten()),
    )


WORKLOADS: dict[str, Workload] = {
    # Few large gradients, all in every step: nothing to save but waiting.
    "mlp": Workload(
        "wide MLP, 8 x Linear(1024, 1024)",
        lambda: nn.Sequential(*[layer for _ in range(8) for layer in (_linear(1024), nn.ReLU())]),
        _random(64, 1024),
    ),
    # Gradients so small that handling them costs more than sending them.
    "small": Workload("400 small parameters, 200 x Linear(64, 64)", lambda: _chain(64, 200), _random(16, 64), steps=8),
    # Three quarters of the gradients do not exist.
    "supernet-common": _supernet("the same on all ranks", lambda rank: 0),
    # A gradient that exists, exists on one rank only (of up to four).
    "supernet-own": _supernet("another on each rank", lambda rank: rank % _BRANCHES),
    # Gradients of all sizes, and the largest one, of the embedding, last of all.
    "transformer": _token_model(4096, 256, 4, (4, 32)),
    # As large as GPT-2 small, in half precision: work for a GPU, and 330 MB of gradients to send beside it.
    "transformer-bf16": replace(
        _token_model(50304, 768, 12, (8, 1024)),
        build=lambda: _TokenModel(50304, 768, 12).bfloat16(),
        is_usual=False,
    ),
    # On one rank what is left is the wrapper's own time for each parameter.
    "tiny": Workload(
        "2000 tiny parameters, 1000 x Linear(8, 8)", lambda: _chain(8, 1000), _random(8, 8), is_usual=False
    ),
}
"""All of them, by name."""
