"""Finds where the package pickles, or sends pickles: loading one runs whatever its sender has named in it."""

import ast
from pathlib import Path

import private_names

# These talk to processes that they have started themselves; nobody trains by them.
OWN_PROCESSES = ("testing/",)
ALLOWED = {
    "sharding/checkpoint_reader.py": "the name of the error with which torch.load(weights_only=True) refuses",
    "checkpoints/checkpoint_files.py": "an Unpickler that makes the classes of torch's own metadata, and nothing else",
}
_MODULES = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle"}
_OF_TORCH = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}
_OF_MPI4PY = {
    "allgather",
    "allreduce",
    "alltoall",
    "bcast",
    "exscan",
    "gather",
    "ibsend",
    "irecv",
    "isend",
    "issend",
    "mprobe",
    "recv",
    "reduce",
    "scan",
    "scatter",
    "send",
    "sendrecv",
    "ssend",
}


def pickles_in(root):
    """What each file does with pickles, by its path below `root`."""
    found = {}
    for path in sorted(Path(root).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        lines = [] if name.startswith(OWN_PROCESSES) else list(_lines(private_names.nodes_of(path)))
        if lines:
            found[name] = lines
    return found


def _lines(nodes):
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    yield from sorted(f"imports {name}" for name in imported if name.split(".")[0] in _MODULES)
    with_mpi = any(name.split(".")[0] == "mpi4py" for name in imported)
    for node in nodes:
        field = {ast.Attribute: "attr", ast.Name: "id", ast.alias: "name"}.get(type(node))
        if field and getattr(node, field) in _OF_TORCH:
            yield f"line {node.lineno}: {getattr(node, field)}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called, receiver = node.func.attr, ast.unparse(node.func.value)
            if with_mpi and called in _OF_MPI4PY and not receiver.startswith(("self._messages", "self._calls")):
                yield f"line {node.lineno}: {receiver}.{called} of mpi4py"
            if (receiver, called) == ("torch", "load") and not _is_restricted(node):
                yield f"line {node.lineno}: torch.load without weights_only=True"


def _is_restricted(call):
    return any(
        word.arg == "weights_only" and isinstance(word.value, ast.Constant) and word.value.value is True
        for word in call.keywords
    )
