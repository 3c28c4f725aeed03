"""The data of `syntax_trees.py`: functions of Python's standard library, and how they are tampered with.

It is apart so that the example has the network and its training only. Nothing here is about ppe_ddp.
"""

from __future__ import annotations

import ast
import sysconfig
import zlib
from collections.abc import Container
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from random import Random

SMALLEST, LARGEST = 30, 100
# What can stand in few places only would give the game away if it were moved.
BOUND = (ast.Slice, ast.Starred, ast.JoinedStr, ast.FormattedValue)
# The parent's kind has the operator, and the context is known from the place.
LEFT_OUT = (ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context)

Edge = tuple[str, str, str]


class Version(NamedTuple):
    """A function, and where it was tampered with: which node stands in the place of which."""

    root: ast.AST
    swapped: dict[ast.AST, ast.AST]

    def edges(self) -> list[Edge]:
        """The kind, the field and the child's kind of each node below the root."""
        pairs = [(node, *pair) for node in ast.walk(self.root) for pair in children(node)]
        return [(kind(node), field, kind(self.swapped.get(child, child))) for node, field, child in pairs]


@cache
def kind(node: ast.AST) -> str:
    """What a node is, with its operator or the type of its constant."""
    detail = getattr(node, "op", None) or getattr(node, "ops", [None])[0]
    if isinstance(node, ast.Constant):
        detail = node.value
    return type(node).__name__ + ("" if detail is None else f" {type(detail).__name__}")


@cache
def children(node: ast.AST) -> list[tuple[str, ast.AST]]:
    """The nodes below a node, each with the field that it is in."""
    fields = [(name, value if isinstance(value, list) else [value]) for name, value in ast.iter_fields(node)]
    nodes = [(name, value) for name, values in fields for value in values if isinstance(value, ast.AST)]
    return [(name, value) for name, value in nodes if not isinstance(value, LEFT_OUT)]


def read_functions(rank: int, world_size: int, most: int | None) -> tuple[list[ast.AST], list[ast.AST]]:
    """At most so many functions of a rank's share of the files: for training, and of one file in five for the test."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path.relative_to(library) for path in library.rglob("*.py"))
    others = {"site-packages", "dist-packages", "test", "tests"}
    parts: tuple[list[ast.AST], list[ast.AST]] = [], []
    for path in [path for path in paths if not others & {*path.parts}][rank::world_size]:
        if most is not None and min(map(len, parts)) >= most:
            break
        try:
            nodes = list(ast.walk(ast.parse((library / path).read_bytes())))
        except (SyntaxError, ValueError):
            continue  # some files are wrong on purpose
        roots = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        parts[zlib.crc32(path.as_posix().encode()) % 5 == 0].extend(
            root for root in roots if SMALLEST <= sum(1 for _ in ast.walk(root)) <= LARGEST
        )
    return parts[0][:most], parts[1][:most]


def both_versions(root: ast.AST, chance: Random) -> list[Version]:
    """The function as it is, and with two expressions of different kinds in each other's places."""
    found = [node for node in ast.walk(root) if isinstance(node, ast.expr) and not isinstance(node, BOUND)]
    movable = [node for node in found if isinstance(getattr(node, "ctx", None), ast.Load | None)]
    for _ in range(20 if len(movable) > 1 else 0):
        a, b = chance.sample(movable, 2)
        if kind(a) != kind(b) and a not in ast.walk(b) and b not in ast.walk(a):
            return [Version(root, {}), Version(root, {a: b, b: a})]
    return []


class Seat(NamedTuple):
    """The place of a node in a batch. `below` has the numbers of its children's seats, by field."""

    height: int
    kind: str
    version: int
    below: dict[str, list[int]]


def seats_of(batch: list[Version], known: Container[str]) -> list[Seat]:
    """A seat for each node of each version, children first; kinds not known are left out with all below them."""
    seats: list[Seat] = []

    def seat(node: ast.AST, number: int) -> int:
        node = batch[number].swapped.get(node, node)
        below: dict[str, list[int]] = {}
        for field, child in children(node):
            if kind(batch[number].swapped.get(child, child)) in known:
                below.setdefault(field, []).append(seat(child, number))
        height = 1 + max((seats[child].height for numbers in below.values() for child in numbers), default=0)
        seats.append(Seat(height, kind(node), number, below))
        return len(seats) - 1

    for number, version in enumerate(batch):
        seat(version.root, number)
    return seats
