"""A torch that has renamed something: files of internals are run with a name replaced that torch does not promise."""

import ast
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import group_internals_check
import torch_internals_check
from ppe_ddp import torch_internals
from ppe_ddp.backends import group_internals

# Not private by its look, though of a private object.
FURTHER = {"backend_config", "device_backend_map", "creator_fn", "extended_api", "backend_type_map"}
# Only some versions of torch have the first, and the others do without; the second is Python's.
LEFT_OUT = {"_ensure_backend_registered", "_getframe"}
if group_internals.creator_of("gloo") is not None:  # then what torch has registered calls it
    LEFT_OUT.add("_set_sequence_number_for_group")
TRIALS = {torch_internals: (torch_internals_check,), group_internals: (group_internals_check,)}


def names_of_torch():
    """Each name that a file of internals relies on, with the file's module."""
    return [(internals, name) for internals in TRIALS for name in sorted(_names(_tree(internals)) - LEFT_OUT)]


def problem_after_renaming(internals, name):
    """The first that the trials of ``internals`` tell of a torch in which ``name`` is called differently, or None."""
    renamed, trials = _copy_of(internals), [_copy_of(module) for module in TRIALS[internals]]
    with pytest.MonkeyPatch.context() as patch:
        for module in (renamed, *trials):  # not patch.dict(): what the trials import meanwhile has to stay
            patch.setitem(sys.modules, module.__name__, module)
        try:
            _run(_Renaming(name).visit(_tree(internals)), renamed)
            for module in trials:
                _run(_tree(module), module)
        except (ImportError, AttributeError) as error:  # not even `import ppe_ddp` goes on
            return str(error)
        return next(trials[-1].check(), None)


def _tree(module):
    return ast.parse(Path(module.__file__).read_text())


def _copy_of(module):
    copy = ModuleType(module.__name__)
    copy.__file__ = module.__file__
    return copy


def _run(tree, module):
    exec(compile(ast.fix_missing_locations(tree), module.__file__, "exec"), vars(module))


def _names(tree):
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    found = {name for node in ast.walk(tree) for name in _torchs_names(node)}
    return {name for name in found - own if not hasattr(dict, name)}


def _torchs_names(node):
    if isinstance(node, ast.Attribute):
        if _is_torchs(node.attr) or _is_of_private(node.value):
            yield node.attr
    elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
        private = any(map(_is_private, node.module.split(".")))
        yield from (alias.name for alias in node.names if private or _is_private(alias.name))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_torchs(node.value):
        yield node.value


def _is_private(name):
    return re.fullmatch(r"_[A-Za-z]\w+", name) is not None


def _is_torchs(name):
    return _is_private(name) or name in FURTHER


def _is_of_private(node):
    return isinstance(node, ast.Attribute) and (_is_private(node.attr) or _is_of_private(node.value))


class _Renaming(ast.NodeTransformer):
    def __init__(self, name):
        self.name, self.other = name, f"{name}_renamed"

    def visit_Attribute(self, node):
        self.generic_visit(node)
        node.attr = self.other if node.attr == self.name else node.attr
        return node

    def visit_Constant(self, node):
        return ast.Constant(self.other) if node.value == self.name else node

    def visit_ImportFrom(self, node):
        for alias in node.names:
            if alias.name == self.name:
                alias.name, alias.asname = self.other, alias.asname or self.name
        return node
