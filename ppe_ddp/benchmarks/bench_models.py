"""The models of ``bench step``: seven, each hard on data parallelism in another respect.

Weights, data and branches follow from a seed alone, so that all contestants train the same thing.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["WORKLOADS", "TransformerBf16", "Workload"]


class Workload(ABC):
    """One model with its data.

    Attributes:
        name: What it is called on the command line.
        title: What it is, in a few words.
        steps: Steps in a block, unless the user says otherwise: more where a step is short.
        is_dynamic: Whether a step leaves some parameters out, which torch DDP has to be told.
        world_size: The number of ranks that it is meant for; None for any.
        on: The device on which it takes part without being named; None for any.
        reference: The contestant that the others are compared with.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    steps: ClassVar[int] = 3
    is_dynamic: ClassVar[bool] = False
    world_size: ClassVar[int | None] = None
    on: ClassVar[str | None] = None
    reference: ClassVar[str] = "torch"

    @abstractmethod
    def build(self) -> nn.Module:
        """A new model, with weights from torch's global generator."""

    @abstractmethod
    def batch(self, generator: torch.Generator) -> Tensor:
        """The input of every step of one rank."""

    def route(self, seed: int, step: int, rank: int) -> tuple[object, ...]:
        """The model's further arguments in one step: nothing, or the branches to take."""
        return ()

    def loss(self, output: Tensor, batch: Tensor) -> Tensor:
        """A scalar to differentiate."""
        return output.square().mean()


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


class WideMLP(Workload):
    """Few large gradients, all in every step: nothing to save but waiting."""

    name = "mlp"
    title = "wide MLP, 8 x Linear(1024, 1024)"

    def build(self) -> nn.Module:
        """Eight layers."""
        return nn.Sequential(*[layer for _ in range(8) for layer in (_linear(1024), nn.ReLU())])

    def batch(self, generator: torch.Generator) -> Tensor:
        """64 samples."""
        return torch.randn(64, 1024, generator=generator)


class SmallParameters(Workload):
    """Gradients so small that handling them costs more than sending them."""

    name = "small"
    title = "400 small parameters, 200 x Linear(64, 64)"
    steps = 8

    def build(self) -> nn.Module:
        """Two hundred layers."""
        return _chain(64, 200)

    def batch(self, generator: torch.Generator) -> Tensor:
        """16 samples."""
        return torch.randn(16, 64, generator=generator)


class TinyParameters(Workload):
    """One rank alone: what is left is the wrapper's own time for each parameter."""

    name = "tiny"
    title = "2000 tiny parameters, 1000 x Linear(8, 8), one rank"
    world_size = 1
    reference = "bare"

    def build(self) -> nn.Module:
        """A thousand layers."""
        return _chain(8, 1000)

    def batch(self, generator: torch.Generator) -> Tensor:
        """8 samples."""
        return torch.randn(8, 8, generator=generator)


class _Branches(nn.Module):
    """Layers of several branches each; one branch of each layer is used at a time."""

    def __init__(self, layers: int, branches: int, width: int) -> None:
        super().__init__()
        self._count = branches
        self.branches = nn.ModuleList(_linear(width) for _ in range(layers * branches))

    def forward(self, x: Tensor, choices: tuple[int, ...]) -> Tensor:
        for layer, choice in enumerate(choices):
            x = functional.relu(self.branches[layer * self._count + choice](x))
        return x


class _Supernet(Workload):
    """One random branch of each layer in every step."""

    layers: ClassVar[int] = 8
    branches: ClassVar[int] = 4
    steps = 8
    is_dynamic = True

    def build(self) -> nn.Module:
        return _Branches(self.layers, self.branches, 512)

    def batch(self, generator: torch.Generator) -> Tensor:
        return torch.randn(32, 512, generator=generator)

    def route(self, seed: int, step: int, rank: int) -> tuple[object, ...]:
        chooser = random.Random(f"{seed} {step}")
        orders = [chooser.sample(range(self.branches), self.branches) for _ in range(self.layers)]
        return (tuple(order[self._place(rank)] for order in orders),)

    @abstractmethod
    def _place(self, rank: int) -> int:
        """Where in a random order of the branches the one of ``rank`` stands."""


class SupernetCommon(_Supernet):
    """The same branches on all ranks: three quarters of the gradients do not exist."""

    name = "supernet-common"
    title = "supernet, 1 of 4 Linear(512, 512) in each of 8 layers, the same on all ranks"

    def _place(self, rank: int) -> int:
        return 0


class SupernetOwn(_Supernet):
    """Other branches on each rank (of up to four): a gradient that exists, exists on one rank only."""

    name = "supernet-own"
    title = "supernet, 1 of 4 Linear(512, 512) in each of 8 layers, another on each rank"

    def _place(self, rank: int) -> int:
        return rank % self.branches


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


class Transformer(Workload):
    """Gradients of all sizes, and the largest one, of the embedding, last of all."""

    name = "transformer"
    title = "transformer encoder, 4 layers of width 256, 4096 tokens"

    def build(self) -> nn.Module:
        """Embedding, encoder, head."""
        return _TokenModel(4096, 256, 4)

    def batch(self, generator: torch.Generator) -> Tensor:
        """Four sequences of 32 random tokens."""
        return torch.randint(4096, (4, 32), generator=generator)

    def loss(self, output: Tensor, batch: Tensor) -> Tensor:
        """Cross-entropy of each token given all of them."""
        return functional.cross_entropy(output.flatten(0, 1), batch.flatten())


class _Block(nn.Module):
    """One causal layer, normalized before each of its halves."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.first_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.second_norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        queries_keys_values = self.attention_in(self.first_norm(x)).unflatten(-1, (3, self._heads, -1))
        query, key, value = queries_keys_values.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(seen.transpose(1, 2).flatten(2))
        return x + self.inner(self.second_norm(x))  # type: ignore[no-any-return]


class _LanguageModel(nn.Module):
    """Blocks between an embedding and a head that share their weights."""

    def __init__(self, vocabulary: int, length: int, width: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        self.blocks = nn.Sequential(*[_Block(width, width // 64) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return functional.linear(self.norm(self.blocks(x)), self.tokens.weight)


class TransformerBf16(Workload):
    """As large as GPT-2 small, in half precision: work for a GPU, and 250 MB of gradients to send beside it."""

    name = "transformer-bf16"
    title = "bf16 language model, 12 layers of width 768, 50304 tokens, 8 x 1024 a step"
    on = "cuda"
    vocabulary: ClassVar[int] = 50304
    width: ClassVar[int] = 768
    depth: ClassVar[int] = 12
    sequences: ClassVar[int] = 8
    length: ClassVar[int] = 1024

    def build(self) -> nn.Module:
        """124 million parameters."""
        return _LanguageModel(self.vocabulary, self.length, self.width, self.depth).bfloat16()

    def batch(self, generator: torch.Generator) -> Tensor:
        """Sequences of random tokens."""
        return torch.randint(self.vocabulary, (self.sequences, self.length), generator=generator)

    def loss(self, output: Tensor, batch: Tensor) -> Tensor:
        """Cross-entropy of each token given those before it, in single precision."""
        return functional.cross_entropy(output[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())


WORKLOADS: tuple[Workload, ...] = (
    WideMLP(),
    SmallParameters(),
    SupernetCommon(),
    SupernetOwn(),
    Transformer(),
    TransformerBf16(),
    TinyParameters(),
)
"""All of them; the one for a single rank last, since it needs processes of its own."""
