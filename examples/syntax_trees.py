"""A network in the shape of a program: has this function been tampered with?

    python examples/syntax_trees.py
    python -m torch.distributed.run --standalone --nproc_per_node=2 examples/syntax_trees.py

The data are the functions of Python's own standard library, as syntax trees without names and values. Of each
there is a second version, in which two expressions have changed places. Both versions have the same nodes, so
counting nodes is no better than a coin: one has to know what belongs where.

The network has a cell for each kind of node (If, Call, BinOp Add, ...) and is put together anew for each batch,
from the leaves to the roots. A cell gets a gradient where its kind occurs: other ones on other ranks.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import sys
import sysconfig
import zlib
from collections import Counter
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

WIDTH, SMALLEST, LARGEST, FUNCTIONS_OF_A_STEP = 64, 30, 100, 16
# What can stand in few places only would give the game away if it were moved.
BOUND = (ast.Slice, ast.Starred, ast.JoinedStr, ast.FormattedValue)
# The parent's kind has the operator, and the context is known from the place.
LEFT_OUT = (ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context)


class Version(NamedTuple):
    """A function, and where it was tampered with: which node stands in the place of which."""

    root: ast.AST
    swapped: dict[ast.AST, ast.AST]

    def edges(self) -> list[tuple[str, str, str]]:
        """The kind, the field and the child's kind of each node below the root."""
        pairs = [(node, *pair) for node in ast.walk(self.root) for pair in children(node)]
        return [(kind(node), field, kind(self.swapped.get(child, child))) for node, field, child in pairs]


@cache
def kind(node: ast.AST) -> str:
    detail = getattr(node, "op", None) or getattr(node, "ops", [None])[0]
    if isinstance(node, ast.Constant):
        detail = node.value
    return type(node).__name__ + ("" if detail is None else f" {type(detail).__name__}")


@cache
def children(node: ast.AST) -> list[tuple[str, ast.AST]]:
    fields = [(name, value if isinstance(value, list) else [value]) for name, value in ast.iter_fields(node)]
    nodes = [(name, value) for name, values in fields for value in values if isinstance(value, ast.AST)]
    return [(name, value) for name, value in nodes if not isinstance(value, LEFT_OUT)]


def read_functions(job: ppe_ddp.Job) -> tuple[list[ast.AST], list[ast.AST]]:
    """The functions in this rank's files: for training, and of one file in five for the test."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path.relative_to(library) for path in library.rglob("*.py"))
    others = {"site-packages", "dist-packages", "test", "tests"}
    parts: tuple[list[ast.AST], list[ast.AST]] = [], []
    for path in [path for path in paths if not others & {*path.parts}][job.rank :: job.world_size]:
        try:
            nodes = list(ast.walk(ast.parse((library / path).read_bytes())))
        except (SyntaxError, ValueError):
            continue  # some files are wrong on purpose
        roots = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        parts[zlib.crc32(path.as_posix().encode()) % 5 == 0].extend(
            root for root in roots if SMALLEST <= sum(1 for _ in ast.walk(root)) <= LARGEST
        )
    return parts


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
    """The place of a node in a batch; children are numbers of seats, by field."""

    height: int
    kind: str
    version: int
    children: list[tuple[str, int]]


class TreeNetwork(nn.Module):
    """A cell for each kind of node: it takes the sum of the children in each of the fields of that kind."""

    def __init__(self, fields: dict[str, list[str]]) -> None:
        super().__init__()
        self.fields = fields
        self.bias = nn.ParameterDict({name: torch.randn(WIDTH) / 2 for name in fields})
        self.weight = nn.ParameterDict(
            {name: torch.randn(len(of) * WIDTH, WIDTH) / (3 * len(of) * WIDTH) ** 0.5 for name, of in fields.items() if of}
        )
        self.judge = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
        nn.init.constant_(self.judge[-1].bias, -4)  # nearly every node is where it belongs

    def seats(self, batch: list[Version]) -> list[Seat]:
        seats: list[Seat] = []

        def seat(node: ast.AST, version: int) -> int:
            node = batch[version].swapped.get(node, node)
            below = [(field, seat(child, version)) for field, child in children(node) if kind(child) in self.fields]
            height = 1 + max((seats[number].height for _, number in below), default=0)
            seats.append(Seat(height, kind(node), version, below))
            return len(seats) - 1

        for number, version in enumerate(batch):
            seat(version.root, number)
        return seats

    def forward(self, batch: list[Version]) -> Tensor:
        """Logits (N,) of being tampered with: whether any node looks odd, given what is below it."""
        seats = self.seats(batch)
        order = sorted(range(len(seats)), key=lambda number: seats[number][:2])
        row = {number: place for place, number in enumerate(order, start=1)}
        states = torch.zeros(1, WIDTH)
        for _, level in groupby(order, key=lambda number: seats[number].height):
            counts: Counter[str] = Counter()
            sources: list[int] = []
            bags: list[int] = []
            for seat in (seats[number] for number in level):
                counts[seat.kind] += 1
                for field in self.fields[seat.kind]:
                    bags.append(len(sources))
                    sources += [row[number] for name, number in seat.children if name == field]
            sums = F.embedding_bag(torch.tensor(sources, dtype=torch.long), states, torch.tensor(bags, dtype=torch.long), mode="sum")
            inboxes = sums.split([count * len(self.fields[name]) for name, count in counts.items()])
            new = [
                torch.addmm(self.bias[name], inbox.view(counts[name], -1), self.weight[name])
                if name in self.weight else self.bias[name].expand(counts[name], -1)
                for name, inbox in zip(counts, inboxes, strict=True)
            ]
            states = torch.cat([states, torch.tanh(torch.cat(new))])
        odd = F.softplus(self.judge(states[1:]).squeeze(1))
        owners = torch.tensor([seats[number].version for number in order])
        total = torch.zeros(len(batch)).index_add(0, owners, odd)
        return total + torch.log(-torch.expm1(-total))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=4e-3)
    options = parser.parse_args()
    job = ppe_ddp.init_process_group()
    console = Console(quiet=job.rank != 0, highlight=False)
    torch.manual_seed(options.seed)
    chance = Random(1000 * (options.seed + 1) + job.rank)
    import time
    t0=time.time(); c0=time.process_time()
    train, test = read_functions(job)
    console.print("read", len(train), len(test), time.process_time()-c0)
    seen = Counter(edge for root in train for edge in Version(root, {}).edges())
    gathered=[None]*job.world_size
    dist.all_gather_object(gathered, seen)
    seen = sum(gathered, Counter())
    console.print("read", len(train), len(test), time.process_time()-c0)
    fields: dict[str, list[str]] = {name: [] for edge in sorted(seen) for name in (edge[0], edge[2])}
    for parent, field, _ in sorted(seen):
        fields[parent] = sorted({field, *fields[parent]})
    model = ppe_ddp.DistributedDataParallel(TreeNetwork(fields))
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    exams = [v for root in test for v in both_versions(root, chance)]
    n=len(train)//16
    sch=torch.optim.lr_scheduler.OneCycleLR(optimizer,options.lr,total_steps=options.epochs*(n+50))
    for epoch in range(1, options.epochs + 1):
        chance.shuffle(train)
        nn_=torch.tensor(n); dist.all_reduce(nn_, op=dist.ReduceOp.MIN); n=int(nn_)
        t0=time.process_time(); ls=[]; fr=[]
        for step in track(range(n), console=console, transient=True, disable=not sys.stdout.isatty()):
            batch = [v for root in train[step*16:step*16+16] for v in both_versions(root, chance)]
            y = torch.tensor([float(bool(v.swapped)) for v in batch])
            loss = F.binary_cross_entropy_with_logits(model(batch), y)
            optimizer.zero_grad(); loss.backward(); optimizer.step(); ls.append(loss.item()); sch.step()
            fr.append(sum(p.nbytes for p in model.parameters() if p.grad is not None))
        t1=time.process_time()
        with torch.no_grad():
            ok=sum(int(((model.module(b)>0)==torch.tensor([bool(v.swapped) for v in b])).sum()) for b in (exams[i:i+64] for i in range(0,len(exams),64)))
        console.print(epoch, n, statistics.fmean(ls), ok/len(exams), t1-t0, time.process_time()-t1, statistics.fmean(fr)/sum(p.nbytes for p in model.parameters()), len(fields), sum(p.nbytes for p in model.parameters()))
    for th in (1,2,3):
        console.print("lookup", th, sum(any(seen[e]<th for e in v.edges())==bool(v.swapped) for v in exams)/len(exams), len(exams))
    console.print(time.process_time())

if __name__ == "__main__":
    main()
