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
import statistics
from collections import Counter, defaultdict
from itertools import accumulate, groupby
from random import Random
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import ppe_ddp
from command_line import parser_for, positive
from tampered_functions import Edge, Version, both_versions, read_functions, seats_of

if TYPE_CHECKING:
    import ast

WIDTH, FUNCTIONS_OF_A_STEP = 64, 16


class Cell(nn.Module):
    """The state (nodes, WIDTH) of nodes of one kind, from their inboxes (nodes, fields * WIDTH)."""

    def __init__(self, fields: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(fields * WIDTH, WIDTH) / (3 * WIDTH * max(fields, 1)) ** 0.5)
        self.bias = nn.Parameter(torch.randn(WIDTH) / 2)

    def forward(self, inboxes: Tensor) -> Tensor:
        return torch.addmm(self.bias, inboxes, self.weight).tanh()


class TreeNetwork(nn.Module):
    """A cell for each kind of node; a field of an inbox is the sum of the children in it.

    Args:
        fields: The fields of each kind in which there are nodes.
    """

    def __init__(self, fields: dict[str, list[str]]) -> None:
        super().__init__()
        self.fields = fields
        self.cells = nn.ModuleDict({name: Cell(len(of)) for name, of in fields.items()})
        self.judge = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
        nn.init.constant_(self.judge[-1].bias, -4)  # nearly every node is where it belongs

    def forward(self, batch: list[Version]) -> Tensor:
        """Logits (N,) of being tampered with: whether any node looks odd, given what is below it."""
        seats = seats_of(batch, known=self.fields)
        # All nodes of one height are computed together, and those of one kind by one call of its cell.
        order = sorted(range(len(seats)), key=lambda number: seats[number][:2])
        row = {number: place for place, number in enumerate(order, start=1)}
        states = torch.zeros(1, WIDTH)
        for _, level in groupby(order, key=lambda number: seats[number].height):
            inboxes: dict[str, list[list[list[int]]]] = defaultdict(list)
            for seat in (seats[number] for number in level):
                fields = self.fields[seat.kind]
                inboxes[seat.kind].append([[row[child] for child in seat.below.get(f, ())] for f in fields])
            sums = sum_rows(states, [bag for nodes in inboxes.values() for bags in nodes for bag in bags])
            parts = sums.split([len(nodes) * len(nodes[0]) for nodes in inboxes.values()])
            new = [
                self.cells[name](part.reshape(len(nodes), len(nodes[0]) * WIDTH))
                for (name, nodes), part in zip(inboxes.items(), parts, strict=True)
            ]
            states = torch.cat([states, *new])
        odd = F.softplus(self.judge(states[1:]).squeeze(1))
        versions = torch.tensor([seats[number].version for number in order])
        surprise = torch.zeros(len(batch)).index_add(0, versions, odd)  # -log of: no node is odd
        return surprise + torch.log(-torch.expm1(-surprise))


def sum_rows(table: Tensor, bags: list[list[int]]) -> Tensor:
    rows = torch.tensor([row for bag in bags for row in bag], dtype=torch.long)
    ends = torch.tensor([0, *accumulate(map(len, bags))])
    return F.embedding_bag(rows, table, ends, mode="sum", include_last_offset=True)


def labels_of(batch: list[Version]) -> Tensor:
    return torch.tensor([1.0 if version.swapped else 0.0 for version in batch])


def total(*values: int) -> list[int]:
    """The sums over all ranks."""
    sums = torch.tensor(values)
    dist.all_reduce(sums)
    return sums.tolist()


def train(
    model: nn.Module, functions: list[ast.AST], options: argparse.Namespace, console: Console
) -> tuple[float, float]:
    """Returns MiB of gradients in a step: those that there were on any rank, and those that this rank sent."""
    chance = Random(1000 * (options.seed + 1) + dist.get_rank())
    # The files of one rank have more functions than those of another: the longest decides.
    steps = torch.tensor(-(-len(functions) // FUNCTIONS_OF_A_STEP))
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=options.epochs * int(steps))
    used, sent = [], []
    for epoch in range(1, options.epochs + 1):
        chance.shuffle(functions)
        losses = []
        bar = {"console": console, "transient": True, "disable": not console.is_terminal}
        for step in track(range(steps), f"epoch {epoch}", **bar):
            mine = functions[step * FUNCTIONS_OF_A_STEP : (step + 1) * FUNCTIONS_OF_A_STEP]
            batch = [version for root in mine for version in both_versions(root, chance)]
            optimizer.zero_grad()
            if batch:
                loss = F.binary_cross_entropy_with_logits(model(batch), labels_of(batch))
                loss.backward()
                losses.append(loss.item())
            else:
                # No functions are left here: this rank has no backward, and takes part in the step by this.
                model.finish_grad_sync()
            # A kind of node that no rank met has `grad is None`: it was not sent, and Adam leaves it alone.
            optimizer.step()
            schedule.step()
            used.append(sum(p.nbytes for p in model.parameters() if p.grad is not None))
            sent.append(model.trace().gradient_nbytes + model.trace().control_nbytes)
        console.print(f"epoch {epoch}   {int(steps)} steps   loss {statistics.fmean(losses):.3f}")
    return statistics.fmean(used) / 2**20, statistics.fmean(sent) / 2**20


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--epochs", type=positive, default=4, help="how often to go through the data")
    parser.add_argument("--functions", type=positive, help="at most so many on each rank: a first look")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order")
    options = parser.parse_args()
    job = ppe_ddp.init_process_group()
    console = Console(quiet=job.rank != 0, highlight=False)
    torch.manual_seed(options.seed)

    functions, held_out = read_functions(job.rank, job.world_size, options.functions)
    everyones: list[Counter[Edge]] = [Counter()] * job.world_size
    dist.all_gather_object(everyones, Counter(edge for root in functions for edge in Version(root, {}).edges()))
    seen = sum(everyones, Counter())
    fields: dict[str, list[str]] = {name: [] for edge in sorted(seen) for name in (edge[0], edge[2])}
    for parent, field in sorted({edge[:2] for edge in seen}):
        fields[parent].append(field)
    console.print("{} functions, and {} of other files for the test".format(*total(len(functions), len(held_out))))

    model = ppe_ddp.DistributedDataParallel(TreeNetwork(fields))
    used, sent = train(model, functions, options, console)

    chance = Random(options.seed)
    exams = [version for root in held_out for version in both_versions(root, chance)]
    with torch.no_grad():
        batches = [exams[i : i + 64] for i in range(0, len(exams), 64)]
        right = sum(int(((model(batch) > 0) == labels_of(batch)).sum()) for batch in batches)
    looked_up = sum(any(seen[edge] < 2 for edge in exam.edges()) == bool(exam.swapped) for exam in exams)
    right, looked_up, count = total(right, looked_up, len(exams))
    table = Table("told apart", "right", title=f"{count} versions of functions", title_justify="left")
    table.add_row("by a coin, or by counting nodes", "50.0%")
    table.add_row("by looking up each parent and child: was it seen twice?", f"{looked_up / count:.1%}")
    table.add_row("by the network", f"{right / count:.1%}")
    console.print(table)
    console.print(f"The network is {100 * (right - looked_up) / count:.1f} points better than looking up.")
    mib = sum(p.nbytes for p in model.parameters()) / 2**20
    console.print(f"On average a step used {used / mib:.0%} of its {len(fields)} cells, by their size;")
    if job.world_size > 1:
        console.print(f"{sent:.2f} MiB were sent, where torch DDP would have sent {mib:.2f}.")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
