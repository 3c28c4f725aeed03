"""Finds where sources use names that torch does not promise, by reading them."""

import ast
import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

# All private uses are here, each behind a named function.
INTERNALS = frozenset({"torch_internals.py", "backends/group_internals.py"})
# These still have some of their own.
PENDING: frozenset[str] = frozenset()

# A family that torch documents (in beta), and tries its own optimizers by; our trials have those that we use.
_FAMILY = "_foreach_"
_NOT_TORCH = {"os._exit", "sys._current_frames", "hasattr(value, '_fields')", "made._replace"}
_BY_NAME = {"getattr", "setattr", "hasattr", "delattr"}
# Without an instance, Python does not tell of these.
_OF_INSTANCES = {"_local_tensor", "_timeout", "_plugins", "_pre_hooks"}


def of_torch_in(root: Path) -> dict[str, list[str]]:
    """The private names of torch in the files below ``root``: by file, each as ``line: text``."""
    sources = {path.relative_to(root).as_posix(): nodes_of(path) for path in sorted(root.rglob("*.py"))}
    own = {name for nodes in sources.values() for name in _defined_in(nodes)}
    torchs = _attributes_of_torch()
    found = {file: list(_places(nodes, own | _of_libraries(file, nodes), torchs)) for file, nodes in sources.items()}
    return {file: places for file, places in found.items() if places}


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of the tree of a source, which several tests read."""
    return tuple(ast.walk(ast.parse(path.read_text())))


def _of_libraries(file: str, nodes: Iterable[ast.AST]) -> set[str]:
    """What an adapter uses of the library that it adapts, whose base classes leave such methods to override."""
    if not file.startswith("integrations/"):
        return set()
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and len(name) > 1 and not name.startswith(_FAMILY)


def _attributes_of_torch() -> set[str]:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter])
    owners = (parameter, nn.Module(), optimizer, dist.ProcessGroup, dist.Backend, dist.Work, dist.GradBucket, DTensor)
    return {name for owner in owners for name in dir(owner) if _is_private(name)} | _OF_INSTANCES


def _defined_in(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _places(nodes: Sequence[ast.AST], own: set[str], torchs: set[str]) -> Iterator[str]:
    roots = set(_imports(nodes))
    of_class = [[*ast.walk(node)] for node in nodes if isinstance(node, ast.ClassDef)]
    declared = {id(node): names for inner in of_class for names in [set(_defined_in(inner))] for node in inner}
    for node in nodes:
        text = ""
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            if any(map(_is_private, [*node.module.split("."), *(alias.name for alias in node.names)])):
                text = ast.unparse(node)
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            if _is_of_torch(node, roots, own, torchs, declared.get(id(node), set())):
                text = ast.unparse(node)
        elif (name := _by_name(node)) and _is_private(name) and (name not in own or name in torchs):
            text = ast.unparse(node)
        if text and text not in _NOT_TORCH:
            yield f"{node.lineno}: {text}"


def _is_of_torch(node: ast.Attribute, roots: set[str], own: set[str], torchs: set[str], declared: set[str]) -> bool:
    receiver: ast.expr = node.value
    is_self = isinstance(receiver, ast.Name) and receiver.id in ("self", "cls")
    while isinstance(receiver, ast.Attribute):
        receiver = receiver.value
    if isinstance(receiver, ast.Name) and receiver.id in roots:
        return True
    if node.attr not in own:
        return True
    return node.attr in torchs and not is_self and node.attr not in declared


def _by_name(node: ast.AST) -> str:
    """The name in ``getattr(x, "name")`` and ``x.__dict__["name"]``."""
    where: ast.expr | None = None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BY_NAME:
        where = node.args[1]
    elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "__dict__":
        where = node.slice
    return where.value if isinstance(where, ast.Constant) and isinstance(where.value, str) else ""


def _imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (
                (alias.asname or alias.name).split(".")[0]
                for alias in node.names
                if alias.name.split(".")[0] in ("torch", "sys", "os")
            )
