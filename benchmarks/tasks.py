"""The tasks of ``benchmarks training``: small, real, on data that are on every machine, or come with scikit-learn.

Weights follow from torch's global generator, data from the rank and the step, so that all contestants train the same
thing on the same data.
"""

import ast
import sysconfig
from abc import ABC, abstractmethod
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

_HELD_OUT = 5  # one in so many is for the test


class Scorer(nn.Module):
    """A model whose ``forward(inputs, labels)`` is the loss of one rank in one step."""

    def scores(self, inputs: Any) -> Tensor:
        """Of each class, for some inputs: classes are the last dimension."""
        raise NotImplementedError

    def forward(self, inputs: Any, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.scores(inputs).flatten(0, -2), labels.flatten())


class Task(ABC):
    """A model, its data, and when it has learned enough.

    Attributes:
        steps: How many there are, unless the user says otherwise.
        target: The mean loss of the last steps to reach.
        lr: Of Adam, in the first half of the steps; then it goes down to nothing.
        is_dynamic: Whether a step leaves parameters out, other ones on each rank.
    """

    steps: ClassVar[int]
    target: ClassVar[float]
    lr: ClassVar[float]
    is_dynamic: ClassVar[bool] = False

    @abstractmethod
    def build(self) -> Scorer:
        """A new model."""

    @abstractmethod
    def batch(self, rank: int, step: int) -> tuple[Any, Tensor]:
        """Inputs and labels of one step."""

    @abstractmethod
    def held_out(self) -> tuple[Any, Tensor]:
        """Inputs and labels for the test."""

    def accuracy(self, model: Scorer) -> float:
        """The part of what was held out that the model gets right."""
        inputs, labels = self.held_out()
        return float((model.scores(inputs).argmax(-1) == labels).float().mean())


class Digits(Task):
    """Handwritten digits by a perceptron."""

    steps, target, lr = 400, 0.1, 2e-3

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        self._x, self._y = torch.tensor(images, dtype=torch.float32)[order] / 8 - 1, torch.tensor(labels)[order]
        self._first = len(order) // _HELD_OUT

    def build(self) -> Scorer:
        return _Classifier()

    def batch(self, rank: int, step: int) -> tuple[Any, Tensor]:
        chosen = torch.randint(self._first, len(self._y), (32,), generator=_generator(rank, step))
        return self._x[chosen], self._y[chosen]

    def held_out(self) -> tuple[Any, Tensor]:
        return self._x[: self._first], self._y[: self._first]


class _Classifier(Scorer):
    def __init__(self) -> None:
        super().__init__()
        first, second, last = nn.Linear(64, 512), nn.Linear(512, 512), nn.Linear(512, 10)
        self._layers = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)

    def scores(self, inputs: Any) -> Tensor:
        return self._layers(inputs)  # type: ignore[no-any-return]


_STATEMENTS = ("Assign", "AugAssign", "Expr", "For", "If", "Raise", "Return", "While", "With")


class Trees(Task):
    """What kind of statement is it, by what is below it? Another network in every step and on every rank."""

    steps, target, lr = 200, 0.45, 4e-3
    is_dynamic = True
    _smallest, _largest = 4, 24

    def __init__(self) -> None:
        roots = [node for path in _library(40) for node in ast.walk(ast.parse(path.read_bytes()))]
        sizes = [sum(1 for _ in ast.walk(root)) if type(root).__name__ in _STATEMENTS else 0 for root in roots]
        found = [root for root, size in zip(roots, sizes, strict=True) if self._smallest <= size <= self._largest]
        Random(0).shuffle(found)
        self._test, self._train = found[:400], found[400:]
        self._kinds = sorted({type(node).__name__ for root in found for node in ast.walk(root)})

    def build(self) -> Scorer:
        return _TreeNetwork(self._kinds, 64)

    def batch(self, rank: int, step: int) -> tuple[Any, Tensor]:
        return _labelled(Random(f"{rank} {step}").sample(self._train, 24))

    def held_out(self) -> tuple[Any, Tensor]:
        return _labelled(self._test)


def _labelled(roots: list[ast.AST]) -> tuple[Any, Tensor]:
    return roots, torch.tensor([_STATEMENTS.index(type(root).__name__) for root in roots])


class _TreeNetwork(Scorer):
    """A cell for each kind of node, and a classifier of the sum of what is below a statement."""

    def __init__(self, kinds: list[str], width: int) -> None:
        super().__init__()
        self.cells = nn.ModuleDict({kind: nn.Linear(width, width) for kind in kinds})
        self.leaf = nn.Parameter(torch.randn(width))
        self.head = nn.Linear(width, len(_STATEMENTS))

    def scores(self, inputs: Any) -> Tensor:
        return self.head(torch.stack([self._below(root) for root in inputs]))  # type: ignore[no-any-return]

    def _below(self, node: ast.AST) -> Tensor:
        children = [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr_context)]
        states = [torch.tanh(self.cells[type(child).__name__](self._below(child))) for child in children]
        return torch.stack(states).sum(0) if states else self.leaf


def _library(count: int) -> list[Path]:
    """Some files of the standard library, the same on every rank of one machine."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:count]


def _generator(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(100_000 * rank + step)


TASKS: dict[str, type[Task]] = {"digits": Digits, "trees": Trees}
"""All of them; made when they are wanted, which reads their data."""
