"""A network in the shape of a program: has this function been tampered with?

    python examples/syntax_trees.py
    python -m torch.distributed.run --standalone --nproc_per_node=2 examples/syntax_trees.py

The data are the functions of Python's own standard library, as syntax trees without names and values. Of each
there is a second version, in which two expressions have changed places. Both versions have the same nodes, so
counting nodes is no better than a coin: one has to know what belongs where.

The network has one cell for each kind of node (If, Call, BinOp Add, ...) and is put together anew for each
batch, from the leaves to the roots. A cell gets a gradient where its kind occurs: other ones on other ranks.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import sys
import sysconfig
import zlib
from collections import Counter, defaultdict
from functools import cache
from itertools import groupby
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

import ppe_ddp

WIDTH, SMALLEST, LARGEST, FUNCTIONS_OF_A_STEP = 64, 20, 80, 16
# What can stand in few places only would give the game away if it were moved.
BOUND = (ast.Slice, ast.Starred, ast.JoinedStr, ast.FormattedValue)
# The parent's kind has the operators, and a context is known from the place.
LEFT_OUT = (ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context)


class Version(NamedTuple):
    """A function, and where it was tampered with: which node stands in the place of which."""

    root: ast.AST
    swapped: dict[ast.AST, ast.AST]

    def edges(self) -> list[tuple[str, str, str]]:
        """The kind, the field and the child's kind of each node below the root."""
        every = [(node, *pair) for node in ast.walk(self.root) for pair in children(node)]
        return [(kind(node), field, kind(self.swapped.get(child, child))) for node, field, child in every]


@cache
def kind(node: ast.AST) -> str:
    detail = getattr(node, "op", None) or getattr(node, "ops", [None])[0]
    if isinstance(node, ast.Constant):
        detail = node.value
    return " ".join(type(part).__name__ for part in (node, detail) if part is not None)


@cache
def children(node: ast.AST) -> list[tuple[str, ast.AST]]:
    fields = [(name, value if isinstance(value, list) else [value]) for name, value in ast.iter_fields(node)]
    nodes = [(name, value) for name, values in fields for value in values if isinstance(value, ast.AST)]
    return [(name, value) for name, value in nodes if not isinstance(value, LEFT_OUT)]


def read_functions(job: ppe_ddp.Job) -> tuple[list[ast.AST], list[ast.AST]]:
    """The functions in this rank's files: for training, and of one file in five for the test."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path.relative_to(library) for path in library.rglob("*.py"))
    paths = [path for path in paths if not {"site-packages", "dist-packages", "test", "tests"} & {*path.parts}]
    parts: tuple[list[ast.AST], list[ast.AST]] = [], []
    for path in paths[job.rank :: job.world_size]:
        try:
            nodes = list(ast.walk(ast.parse((library / path).read_bytes())))
        except (SyntaxError, ValueError):
            continue  # some files are wrong on purpose
        roots = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        parts[zlib.crc32(path.as_posix().encode()) % 5 == 0].extend(
            root for root in roots if SMALLEST <= len(Version(root, {}).edges()) <= LARGEST
        )
    return parts


def both_versions(root: ast.AST, chance: Random) -> list[Version]:
    """The function as it is, and with two expressions of different kinds in each other's places."""
    expressions = [node for node in ast.walk(root) if isinstance(node, ast.expr) and not isinstance(node, BOUND)]
    movable = [node for node in expressions if isinstance(getattr(node, "ctx", None), ast.Load | None)]
    for _ in range(20 if len(movable) > 1 else 0):
        a, b = chance.sample(movable, 2)
        if kind(a) != kind(b) and a not in ast.walk(b) and b not in ast.walk(a):
            return [Version(root, {}), Version(root, {a: b, b: a})]
    return []


class TreeNetwork(nn.Module):
    """A cell for each kind of node, fed with the sum of the children in each of the fields of that kind."""

    def __init__(self, fields: dict[str, list[str]]) -> None:
        super().__init__()
        self.fields = fields
        self.starts = nn.ParameterDict({name: torch.randn(WIDTH) / 2 for name in fields})
        self.cells = nn.ModuleDict(
            {name: nn.Linear(WIDTH * len(of), WIDTH, bias=False) for name, of in fields.items() if of}
        )
        self.judge = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
        nn.init.constant_(self.judge[-1].bias, -4)  # nearly every node is innocent

    def forward(self, batch: list[Version]) -> Tensor:
        """Logits (N,) of the probability that any node of a version looks odd, from what is below it."""
        groups: dict[tuple[int, str], list] = defaultdict(list)

        def place(number: int, node: ast.AST) -> tuple[int, str, int]:
            node = batch[number].swapped.get(node, node)
            below = defaultdict(list)
            for field, child in children(node):
                if kind(child) in self.fields:
                    below[field].append(place(number, child))
            height = 1 + max((height for places in below.values() for height, *_ in places), default=0)
            group = groups[height, kind(node)]
            group.append((number, below))
            return height, kind(node), len(group) - 1

        for number, version in enumerate(batch):
            place(number, version.root)
        first: dict[tuple[int, str], int] = {}
        states = torch.zeros(1, WIDTH)  # embedding_bag takes no empty table
        owners: list[int] = []
        for _, keys in groupby(sorted(groups), key=lambda key: key[0]):
            rows, bags, sizes = [], [], {}
            for key in keys:
                first[key] = 1 + len(owners)
                for number, below in groups[key]:
                    owners.append(number)
                    for field in self.fields[key[1]]:
                        bags.append(len(rows))
                        rows += [first[height, name] + i for height, name, i in below[field]]
                sizes[key[1]] = len(groups[key])
            sums = F.embedding_bag(torch.tensor(rows, dtype=torch.long), states, torch.tensor(bags, dtype=torch.long), mode="sum")
            inboxes = sums.split([n * len(self.fields[name]) for name, n in sizes.items()])
            new = [
                self.starts[name] + (self.cells[name](inbox.view(n, -1)) if name in self.cells else inbox.new_zeros(n, WIDTH))
                for (name, n), inbox in zip(sizes.items(), inboxes, strict=True)
            ]
            states = torch.cat([states, torch.tanh(torch.cat(new))])
        odd = F.softplus(self.judge(states[1:]).squeeze(1))  # -log of a node's probability to be innocent
        total = torch.zeros(len(batch)).index_add(0, torch.tensor(owners), odd)
        return total + torch.log(-torch.expm1(-total))


def agree_on_fields(functions: list[ast.AST]) -> Counter[tuple[str, str, str]]:
    """All the edges of the training functions of all ranks."""
    mine = Counter(edge for root in functions for edge in Version(root, {}).edges())
    everyones: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return sum(everyones, Counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    job = ppe_ddp.init_process_group()
    console = Console(quiet=job.rank != 0, highlight=False)
    torch.manual_seed(options.seed)
    chance = Random(1000 * (options.seed + 1) + job.rank)
    train, test = read_functions(job)
    seen = agree_on_fields(train)
    fields: dict[str, list[str]] = {name: [] for edge in seen for name in (edge[0], edge[2])}
    for parent, field, _ in seen:
        fields[parent] = sorted({field, *fields[parent]})
    model = ppe_ddp.DistributedDataParallel(TreeNetwork(dict(sorted(fields.items()))))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    exams = [v for root in test for v in both_versions(root, Random(len(ast.dump(root))))]
    import time
    for epoch in range(1, options.epochs + 1):
        chance.shuffle(train)
        n=len(train)//16
        t0=time.time(); ls=[]; fr=[]
        for step in track(range(n), console=console, transient=True, disable=not sys.stdout.isatty()):
            batch = [v for root in train[step*16:step*16+16] for v in both_versions(root, chance)]
            y = torch.tensor([float(bool(v.swapped)) for v in batch])
            loss = F.binary_cross_entropy_with_logits(model(batch), y)
            optimizer.zero_grad(); loss.backward(); optimizer.step(); ls.append(loss.item())
            fr.append(sum(p.nbytes for p in model.parameters() if p.grad is not None))
        t1=time.time()
        with torch.no_grad():
            ok=sum(int(((model.module(b)>0)==torch.tensor([bool(v.swapped) for v in b])).sum()) for b in (exams[i:i+64] for i in range(0,len(exams),64)))
        console.print(epoch, n, statistics.fmean(ls), ok/len(exams), t1-t0, time.time()-t1, statistics.fmean(fr)/sum(p.nbytes for p in model.parameters()), len(fields), sum(p.nbytes for p in model.parameters()))
    for th in (1,2,3):
        console.print("lookup", th, sum(any(seen[e]<th for e in v.edges())==bool(v.swapped) for v in exams)/len(exams), len(exams))

if __name__ == "__main__":
    main()
