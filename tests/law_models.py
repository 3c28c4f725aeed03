"""Random modules whose graphs differ on every rank and change at every step, made from a description.

    Recipe  --build()-->  RandomModule        the same parameters on every rank
    Recipe  --path()--->  ForwardPath         what one forward of one rank does: branches, exit, heads
    Recipe  --batch()-->  a tensor            what it does it to

A description is frozen and can be pickled, so ranks are sent a few numbers and make the module themselves; and
every rank can also make the inputs and paths of all the others, which is how it knows what the mean must be.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_ROWS = 2
_WIDTHS = (3, 8)


class Kind(enum.Enum):
    """What a layer does with its input. A *choice* is a number that each forward of each rank draws anew."""

    LINEAR = enum.auto()  # a linear map, always
    BRANCHES = enum.auto()  # the choice's linear map of several
    SKIPPED = enum.auto()  # a linear map or nothing (stochastic depth)
    SHARED = enum.auto()  # the linear map of an earlier layer, once more
    CHECKPOINTED = enum.auto()  # a linear map in a checkpoint
    REENTRANT = (
        enum.auto()
    )  # A linear map in a reentrant checkpoint, whose parameters autograd does not see beforehand.
    DETACHED = enum.auto()  # cuts the graph, or not: earlier parameters get no gradient
    FROZEN = enum.auto()  # a linear map that is not trained
    UNUSED = enum.auto()  # parameters that no path reaches
    EMPTY = enum.auto()  # a parameter without elements
    SCALAR = enum.auto()  # a parameter without dimensions
    EMBEDDING = enum.auto()  # adds the choice's row of a table whose gradient is sparse
    TRANSPOSED = enum.auto()  # a linear map whose weight is not row-major
    WITHHELD = enum.auto()  # a linear map whose function gives its weight a gradient, or None

    def __repr__(self) -> str:
        return f"Kind.{self.name}"


@dataclass(frozen=True)
class LayerRecipe:
    """One layer of a random module.

    Attributes:
        kind: What it does.
        dtype: The dtype of its parameters; activations are float32 between layers.
    """

    kind: Kind
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class ForwardPath:
    """The choices of one forward.

    Attributes:
        choices: A number a layer, for those that have a choice.
        depth: How many layers run before the heads (early exit).
        heads: Which heads give an output; at least one.
    """

    choices: tuple[int, ...]
    depth: int
    heads: tuple[int, ...]


@dataclass(frozen=True)
class Record:
    """One of the structures in which a module gives its outputs."""

    heads: list[Tensor | None]
    depth: int


@dataclass(frozen=True)
class Recipe:
    """The description of a random module and of the data it gets.

    Attributes:
        seed: Decides weights, inputs and paths.
        layers: In the order of forward.
        width: Features between layers.
        heads: Outputs there can be; a path gives some of them, and None for the others.
        early_exit: Whether a path may stop before the last layer.
        common_path: Whether all ranks take the same path in a step, and so have the same gradients.
        container: How outputs are given: 0 a tuple, 1 a dict, 2 a :class:`Record`.
        needs_buffer: Whether the graph needs the buffer that each forward makes anew.
    """

    seed: int
    layers: tuple[LayerRecipe, ...]
    width: int = 3
    heads: int = 1
    early_exit: bool = False
    common_path: bool = False
    container: int = 0
    needs_buffer: bool = False

    @classmethod
    def random(
        cls,
        seed: int,
        *,
        dtypes: Sequence[torch.dtype] = (torch.float32, torch.float64),
        kinds: Sequence[Kind] = tuple(Kind),
        common_path: bool = False,
    ) -> Recipe:
        """Draw a description.

        Args:
            seed: The same seed gives the same description, in every process.
            dtypes: The dtypes that parameters may have.
            kinds: The kinds that layers may be of.
            common_path: See the attribute.
        """
        draw = Random(f"recipe {seed}")
        layers = [LayerRecipe(draw.choice(kinds), draw.choice(dtypes)) for _ in range(draw.randint(3, 8))]
        return cls(
            seed,
            tuple(layers),
            width=draw.choice(_WIDTHS),
            heads=draw.randint(1, 3),
            early_exit=draw.random() < 0.5,
            common_path=common_path,
            container=draw.randrange(3),
        )

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """The dtypes of the parameters."""
        return frozenset({layer.dtype for layer in self.layers} | {self.head_dtype})

    @property
    def head_dtype(self) -> torch.dtype:
        """The dtype of the heads' parameters: that of the last layer."""
        return self.layers[-1].dtype if self.layers else torch.float32

    @property
    def is_reentrant(self) -> bool:
        """Whether backward may start another one inside, which rules out ``autograd.grad`` and ``inputs=``."""
        return any(layer.kind is Kind.REENTRANT for layer in self.layers)

    @property
    def withheld(self) -> frozenset[str]:
        """The names of the weights of which autograd may go through the function and give no gradient."""
        return frozenset(f"layers.{k}.maps.0.weight" for k, one in enumerate(self.layers) if one.kind is Kind.WITHHELD)

    def build(self, device: torch.device | str = "cpu") -> RandomModule:
        """The module; the same parameters and buffers at every call, and on every rank."""
        module = RandomModule(self)
        return module if device == "cpu" else module.to(device)

    def path(self, step: int, rank: int, forward: int = 0) -> ForwardPath:
        """The path of the ``forward``-th forward of ``rank`` in ``step``."""
        draw = self._draw("path", step, 0 if self.common_path else rank, forward)
        count = len(self.layers)
        return ForwardPath(
            tuple(draw.randrange(6) for _ in range(count)),
            draw.randint(0, count) if self.early_exit else count,
            tuple(sorted(draw.sample(range(self.heads), draw.randint(1, self.heads)))),
        )

    def batch(self, step: int, rank: int, forward: int = 0) -> Tensor:
        """The input of ``rank``: a float32 CPU tensor of shape (2, width) that requires grad."""
        generator = torch.Generator().manual_seed(self._draw("batch", step, rank, forward).getrandbits(60))
        return torch.randn(_ROWS, self.width, generator=generator).requires_grad_()

    def _draw(self, *names: object) -> Random:
        # A string seeds by its hash, which is the same in every process, unlike hash().
        return Random(" ".join(map(str, (*names, self.seed))))


class _Affine(nn.Module):
    """A linear map of float32 activations, computed in the dtype of its parameters."""

    def __init__(self, width: int, layer: LayerRecipe, generator: torch.Generator) -> None:
        super().__init__()
        shape = (width, width)
        weight = torch.randn(shape, generator=generator, dtype=torch.float64) / width**0.5
        if layer.dtype.is_complex:
            weight = torch.complex(weight, torch.randn(shape, generator=generator, dtype=torch.float64))
        weight = weight.to(layer.dtype)
        if layer.kind is Kind.TRANSPOSED:
            weight = weight.t()
        trains = layer.kind is not Kind.FROZEN
        self.weight = nn.Parameter(weight, requires_grad=trains)
        self.bias = nn.Parameter(torch.zeros(width, dtype=layer.dtype), requires_grad=trains)

    def forward(self, hidden: Tensor, *, gives: bool = True) -> Tensor:
        """Map (rows, width) to (rows, width); the weight's gradient is None unless it ``gives`` one."""
        weight = self.weight if gives else _Withheld.apply(self.weight)
        result = hidden.to(weight.dtype) @ weight + self.bias
        return torch.tanh(_real(result).float())


class _Withheld(torch.autograd.Function):
    """What gives no gradient, though autograd goes through it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor).sum(-1) if tensor.is_complex() else tensor


class _RandomLayer(nn.Module):
    """A layer that is made from its description; ``shared`` is the linear map of an earlier one."""

    def __init__(self, layer: LayerRecipe, width: int, generator: torch.Generator, shared: _Affine | None) -> None:
        super().__init__()
        self.kind = layer.kind
        self.maps = nn.ModuleList()
        self.extra: nn.Parameter | None = None
        if layer.kind is Kind.EMPTY:
            self.extra = nn.Parameter(torch.zeros((0, width), dtype=layer.dtype))
        elif layer.kind is Kind.SCALAR:
            self.extra = nn.Parameter(torch.ones((), dtype=layer.dtype))
        elif layer.kind is Kind.EMBEDDING:
            # torch differentiates no complex embedding.
            dtype = torch.float32 if layer.dtype.is_complex else layer.dtype
            table = torch.randn((6, width), generator=generator).to(dtype)
            self.maps.append(nn.Embedding(6, width, sparse=True, _weight=table))
        elif layer.kind is Kind.SHARED and shared is not None:
            self.maps.append(shared)
        elif layer.kind is not Kind.DETACHED:
            count = 3 if layer.kind is Kind.BRANCHES else 1
            self.maps.extend(_Affine(width, layer, generator) for _ in range(count))

    def forward(self, hidden: Tensor, choice: int) -> Tensor:
        """Map (rows, width) to (rows, width) in the way of ``choice``."""
        kind = self.kind
        if kind is Kind.DETACHED:
            return hidden.detach() if choice % 2 else hidden
        if kind is Kind.UNUSED or (kind is Kind.SKIPPED and choice % 2):
            return hidden
        if self.extra is not None:
            term = _real(self.extra.sum(0)).float()
            return hidden + term if kind is Kind.EMPTY else hidden * term
        if kind is Kind.EMBEDDING:
            rows = torch.tensor([choice, 0], device=hidden.device)
            found: Tensor = self.maps[0](rows)
            return hidden + found.float()
        affine = self.maps[choice % len(self.maps)]
        if kind is Kind.WITHHELD:
            return affine(hidden, gives=bool(choice % 2))  # type: ignore[no-any-return]
        if kind in (Kind.CHECKPOINTED, Kind.REENTRANT):
            # A reentrant checkpoint whose input needs no gradient computes none at all.
            hidden = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
            return checkpoint(affine, hidden, use_reentrant=kind is Kind.REENTRANT)  # type: ignore[no-any-return]
        return affine(hidden)  # type: ignore[no-any-return]


class RandomModule(nn.Module):
    """The module that a :class:`Recipe` describes, with two buffers that follow this rank's inputs: one is written in
    place, and one is made anew.
    """

    seen: Tensor
    running: Tensor

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        generator = torch.Generator().manual_seed(recipe.seed)
        shared: _Affine | None = None
        self.layers = nn.ModuleList()
        for description in recipe.layers:
            layer = _RandomLayer(description, recipe.width, generator, shared)
            if shared is None and description.kind is Kind.LINEAR:
                first = layer.maps[0]
                assert isinstance(first, _Affine)
                shared = first
            self.layers.append(layer)
        head = LayerRecipe(Kind.LINEAR, recipe.head_dtype)
        self.heads = nn.ModuleList(_Affine(recipe.width, head, generator) for _ in range(recipe.heads))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("running", torch.zeros(recipe.width))

    def forward(self, batch: Tensor, path: ForwardPath) -> Any:
        """Run ``path`` on ``batch``, of shape (rows, width); heads that the path leaves out are None."""
        with torch.no_grad():
            self.seen += 1
            self.running = self.running.lerp(batch.detach().mean(0), 0.25)
        hidden = batch
        for layer, choice in zip(list(self.layers)[: path.depth], path.choices, strict=False):
            hidden = layer(hidden, choice)
        if self.recipe.needs_buffer:
            hidden = hidden + hidden * self.running
        outputs = [head(hidden) if k in path.heads else None for k, head in enumerate(self.heads)]
        if self.recipe.container == 1:
            return {f"head{k}": output for k, output in enumerate(outputs)}
        if self.recipe.container == 2:
            return Record(outputs, path.depth)
        return tuple(outputs)


def losses(outputs: Any) -> list[Tensor]:
    """A scalar loss for each output that there is."""
    if isinstance(outputs, Record):
        outputs = outputs.heads
    elif isinstance(outputs, dict):
        outputs = list(outputs.values())
    return [(output + 0.5).square().mean() for output in outputs if output is not None]
