"""The tasks of ``bench compression --task``: small, real, on data that are on every machine, or come with scikit-learn.

Weights follow from torch's global generator, data from the rank and the step, so that all contestants train the same
thing on the same data.
"""

from __future__ import annotations

import ast
import sysconfig
from abc import ABC, abstractmethod
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["TASKS", "Scorer", "Task"]

_HELD_OUT = 5  # one in so many is for the test


class Scorer(nn.Module):
    """A model whose ``forward(*batch)`` is the loss of one rank in one step."""

    def scores(self, inputs: Any) -> Tensor:
        """Of each class, for some inputs: classes are the last dimension."""
        raise NotImplementedError


class Task(ABC):
    """A model, its data, and when it has learned enough.

    Attributes:
        name: On the command line.
        title: What it is, in a few words.
        steps: How many there are, unless the user says otherwise.
        target: The mean loss of the last steps to reach.
        lr: Of Adam, in the first half of the steps; then it goes down to nothing.
        is_dynamic: Whether a step leaves parameters out, other ones on each rank.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    steps: ClassVar[int]
    target: ClassVar[float]
    lr: ClassVar[float]
    is_dynamic: ClassVar[bool] = False

    @abstractmethod
    def build(self) -> Scorer:
        """A new model, whose ``forward(step)`` is the loss of one rank's batch in this step."""

    @abstractmethod
    def batch(self, rank: int, step: int) -> tuple[object, ...]:
        """What the model is called with in one step."""

    @abstractmethod
    def accuracy(self, model: Scorer) -> float:
        """The part of what was held out that the model gets right."""


class Digits(Task):
    """Handwritten digits by a perceptron."""

    name, title = "digits", "digits, 64-512-512-10"
    steps, target, lr = 400, 0.1, 2e-3
    _size = 32

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        x, y = torch.tensor(images, dtype=torch.float32)[order] / 8 - 1, torch.tensor(labels)[order]
        count = len(y) // _HELD_OUT
        self._test, self._train = (x[:count], y[:count]), (x[count:], y[count:])

    def build(self) -> Scorer:
        """Three layers."""
        return _Classifier(
            nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
        )

    def batch(self, rank: int, step: int) -> tuple[object, ...]:
        """Some images with their labels."""
        x, y = self._train
        chosen = torch.randint(len(y), (self._size,), generator=_generator(rank, step))
        return x[chosen], y[chosen]

    def accuracy(self, model: Scorer) -> float:
        """Of the digits that were held out."""
        x, y = self._test
        return float((model.scores(x).argmax(1) == y).float().mean())


class _Classifier(Scorer):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self._layers = layers

    def scores(self, inputs: Any) -> Tensor:
        scores: Tensor = self._layers(inputs)
        return scores

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.scores(x), y)


_STATEMENTS = ("Assign", "AugAssign", "Expr", "For", "If", "Raise", "Return", "While", "With")


class Trees(Task):
    """What kind of statement is it, by what is below it? Another network in every step and on every rank."""

    name, title = "trees", "syntax trees, a cell of width 64 for each kind of node"
    steps, target, lr = 200, 0.45, 4e-3
    is_dynamic = True
    _width, _size, _smallest, _largest = 64, 24, 4, 24

    def __init__(self) -> None:
        roots = [node for path in _library(40) for node in ast.walk(ast.parse(path.read_bytes()))]
        sizes = [sum(1 for _ in ast.walk(root)) if type(root).__name__ in _STATEMENTS else 0 for root in roots]
        found = [root for root, size in zip(roots, sizes, strict=True) if self._smallest <= size <= self._largest]
        Random(0).shuffle(found)
        self._test, self._train = found[:400], found[400:]
        self._kinds = sorted({type(node).__name__ for root in found for node in ast.walk(root)})

    def build(self) -> Scorer:
        """A cell a kind, and a classifier."""
        return _TreeNetwork(self._kinds, self._width)

    def batch(self, rank: int, step: int) -> tuple[object, ...]:
        """Some statements."""
        return (Random(f"{rank} {step}").sample(self._train, self._size),)

    def accuracy(self, model: Scorer) -> float:
        """Of the statements that were held out."""
        labels = torch.tensor([_label(root) for root in self._test])
        return float((model.scores(self._test).argmax(1) == labels).float().mean())


class _TreeNetwork(Scorer):
    def __init__(self, kinds: list[str], width: int) -> None:
        super().__init__()
        self._width = width
        self.cells = nn.ModuleDict({kind: nn.Linear(width, width) for kind in kinds})
        self.leaf = nn.Parameter(torch.randn(width))
        self.head = nn.Linear(width, len(_STATEMENTS))

    def forward(self, roots: list[ast.AST]) -> Tensor:
        return functional.cross_entropy(self.scores(roots), torch.tensor([_label(root) for root in roots]))

    def scores(self, inputs: Any) -> Tensor:
        """Of each statement, from the sum of what is below it."""
        scores: Tensor = self.head(torch.stack([self._below(root) for root in inputs]))
        return scores

    def _below(self, node: ast.AST) -> Tensor:
        states = [torch.tanh(self.cells[type(child).__name__](self._below(child))) for child in _children(node)]
        return torch.stack(states).sum(0) if states else self.leaf


def _children(node: ast.AST) -> list[ast.AST]:
    return [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr_context)]


def _label(root: ast.AST) -> int:
    return _STATEMENTS.index(type(root).__name__)


class SmallGPT(Task):
    """The next byte of the source of Python's standard library."""

    name, title = "gpt", "GPT on Python's standard library, 3 layers of width 256"
    steps, target, lr = 80, 2.7, 1e-3
    _width, _depth, _length, _size = 256, 3, 32, 3

    def __init__(self) -> None:
        text = b"".join(path.read_bytes() for path in _library(100))[: 2 << 20]
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        count = len(data) // _HELD_OUT
        self._test, self._train = data[:count], data[count:]

    def build(self) -> Scorer:
        """Embedding, causal layers, and a head."""
        return _ByteModel(self._width, self._depth, self._length)

    def batch(self, rank: int, step: int) -> tuple[object, ...]:
        """Some pieces of text."""
        return (self._pieces(self._train, self._size, _generator(rank, step)),)

    def accuracy(self, model: Scorer) -> float:
        """Of the next bytes in text that was held out."""
        pieces = self._pieces(self._test, 64, _generator(0, 0))
        return float((model.scores(pieces[:, :-1]).argmax(2) == pieces[:, 1:]).float().mean())

    def _pieces(self, text: Tensor, count: int, generator: torch.Generator) -> Tensor:
        starts = torch.randint(len(text) - self._length, (count,), generator=generator)
        return text[starts[:, None] + torch.arange(self._length + 1)]


class _ByteModel(Scorer):
    def __init__(self, width: int, depth: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        layers = [
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        ]
        self.layers = nn.ModuleList(layers)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, pieces: Tensor) -> Tensor:
        return functional.cross_entropy(self.scores(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())

    def scores(self, inputs: Any) -> Tensor:
        """Of the byte after each."""
        length = inputs.shape[1]
        x = self.tokens(inputs) + self.places.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        scores: Tensor = self.head(self.norm(x))
        return scores


def _library(count: int) -> list[Path]:
    """Some files of the standard library, the same on every rank of one machine."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:count]


def _generator(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(100_000 * rank + step)


TASKS: dict[str, type[Task]] = {task.name: task for task in (Digits, Trees, SmallGPT)}
"""All of them; made when they are wanted, which reads their data."""
