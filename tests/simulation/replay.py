"""One history for people: what the ranks do, what happened when, and the smallest program that still fails."""

import dataclasses

from law_steps import StepKind, TrainingStep, Zeroing

from .scheduler import Unsound
from .split import SplitProgram
from .wrappers import Wrapping

_ORDERS = 4  # of events, in which a smaller program is tried
_COMMON = ("recipes", "wrapping", "options", "shares", "ties")  # of a program and of that which goes on behind it
_USUAL = {"overlap": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 25.0, "forward_sync_buffers": False}


def failure_of(program):
    """What is wrong with one history of ``program``; empty where it is sound. Called in :func:`simulated`."""
    try:
        program.new_run().run()
    except Unsound as error:
        return str(error)
    except Exception as error:
        raise RuntimeError(f"seed {program.seed}") from error
    return ""


def told(program):
    """A program in words, a line each."""
    if isinstance(program, SplitProgram):
        yield from program.told()
        return
    nodes = ", ".join(name or "one that shows no processes" for name in program.nodes)
    yield f"{program.world_size} ranks, on nodes: {nodes}"
    common = {"": "", "heads": ", with heads in common", "all": ", all of one module"}[program.shares]
    yield f"{len(program.recipes)} wrappers of kind {program.wrapping.name}{common}; options {program.options}"
    for k, recipe in enumerate(program.recipes):
        layers = ", ".join(f"{layer.kind.name} {str(layer.dtype)[6:]}" for layer in recipe.layers)
        exits = ", with early exits" if recipe.early_exit else ""
        yield f"  module {k} (data of seed {recipe.seed}): {layers or 'nothing'}, then {recipe.heads} heads{exits}"
    for number, step in enumerate(program.steps):
        after = ", then an update" if step.updates else ""
        yield f"  step {number}: {step.kind.name}; gradients before it: {step.zeroing.name}{after}"
    if program.ties:
        yield "  in checkpoints is the first head once more"
    for rank, number, module in sorted(program.apart):
        yield f"  rank {rank} does not use module {module} in step {number}, and ends its wrapper's step by itself"
    if program.outer:
        yield f"  {program.outer}"
    if program.counts:
        over = "all ranks" if program.divides_by_all else "those that have inputs"
        yield f"  join() with {program.counts} steps, averages over {over}"
    for fault in program.faults:
        yield f"  fault: {fault.where.name} on rank {fault.rank} in step {fault.step} ({fault.number})"
    for change in program.changes:
        what = "thaws" if change.trains else "freezes"
        yield f"  change: rank {change.rank} {what} parameter {change.number} before step {change.step}"

    if program.following is not None:
        yield "then, from its last checkpoint:"
        yield from told(program.following)


def _in_words(event):
    kind, *rest = event
    if kind == "begins":
        group, number, name, size = rest
        return f"begins {name}{'' if size is None else f' of {size}'}, call {number} in {group.split()[0]}"
    if kind == "arrives":
        group, number, (name, *_), *gone = rest
        without = f", and it has failed: rank {gone} is gone" if gone else ""
        return f"        arrived: {name}, call {number} in {group.split()[0]}{without}"
    if kind == "step":
        return f"==== step {rest[0]}: {rest[1]}, gradients before it: {rest[2]}"
    if kind == "ends":
        return f"==== step {rest[0]} ends: {rest[1]}"
    if kind == "fault":
        return f"**** FAULT: {rest[0]}"
    return " ".join(map(str, event))


def log_of(scheduler):
    """What happened, a line each: virtual seconds, the rank, and what it did or what has come."""
    for at, rank, event in scheduler.log:
        yield f"{at:12.6f}  {'' if rank is None else f'rank {rank}':7} {_in_words(event)}"


def replay(program):
    """Run one history, and print it; whether it fails. Called in :func:`simulated`."""
    history, error = program.new_run(), ""
    print(f"program of seed {program.seed}", *told(program), "", sep="\n")
    try:
        history.run()
    except Unsound as unsound:
        error = str(unsound)
    for scheduler in history.schedulers:
        print(*log_of(scheduler), "", sep="\n")
    print(error or "sound")
    return bool(error)


def shrunk(program, tell=lambda text: None):
    """The smallest program that fails, of those that come of ``program`` by leaving things out one at a time."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in _smaller(program):
            fails = next((one for one in _in_orders(candidate) if failure_of(one)), None)
            if fails is not None:
                program, is_smaller = fails, True
                tell(f"{program.world_size} ranks, {len(program.faults)} faults: still fails")
                break
    return program


def _in_orders(program):
    for k in range(_ORDERS):
        yield dataclasses.replace(program, seed=program.seed + k)


def _smaller(program):
    """Programs with one thing less, those that leave out most first."""
    if isinstance(program, SplitProgram):
        yield from program.smaller()
        return
    change, following = dataclasses.replace, program.following
    if following is not None:
        yield change(program, following=None)
        yield from (change(program, following=one) for one in _smaller(following) if _alike(one, following))
        for one in _smaller(change(program, following=None)):
            common = {name: getattr(one, name) for name in _COMMON}
            yield change(one, following=change(following, **common))
        return
    for k in range(len(program.steps)) if program.steps[1:] else ():
        steps = (*program.steps[:k], *program.steps[k + 1 :])
        kept = {
            name: tuple(change(one, step=one.step - (one.step > k)) for one in found if one.step != k)
            for name, found in (("faults", program.faults), ("changes", program.changes))
        }
        counts = tuple(count - (count > k) for count in program.counts)
        kept["outer"] = program.outer and program.outer.without(k)
        kept["apart"] = frozenset((rank, n - (n > k), module) for rank, n, module in program.apart if n != k)
        yield change(program, steps=steps, counts=counts, **kept)
    if program.world_size > 2:
        count = program.world_size - 1
        yield change(
            program,
            world_size=count,
            nodes=program.nodes[:count],
            counts=program.counts[:count],
            outer=program.outer and program.outer.among(count),
            faults=tuple(one for one in program.faults if one.rank < count),
            changes=tuple(one for one in program.changes if one.rank < count),
            apart=frozenset(one for one in program.apart if one[0] < count),
        )
    for one in program.apart:
        yield change(program, apart=program.apart - {one})
    for k in range(len(program.recipes)) if program.recipes[1:] else ():
        apart = frozenset((rank, number, j - (j > k)) for rank, number, j in program.apart if j != k)
        recipes = (*program.recipes[:k], *program.recipes[k + 1 :])
        yield change(program, recipes=recipes, apart=apart if recipes[1:] else frozenset())
    for name in ("faults", "changes"):
        found = getattr(program, name)
        for k in range(len(found)):
            yield change(program, **{name: (*found[:k], *found[k + 1 :])})
    for k, recipe in enumerate(program.recipes):
        for j in range(len(recipe.layers)) if recipe.layers[1:] else ():
            less = change(recipe, layers=(*recipe.layers[:j], *recipe.layers[j + 1 :]))
            yield change(program, recipes=(*program.recipes[:k], less, *program.recipes[k + 1 :]))
        if recipe.heads > 1:
            yield change(program, recipes=tuple(change(one, heads=1) for one in program.recipes))
    yield from _plainer(program)


def _alike(one, other):
    return all(getattr(one, name) == getattr(other, name) for name in _COMMON)


def _plainer(program):
    """Programs in which one thing is as usual."""
    change = dataclasses.replace
    if program.wrapping is not Wrapping.PLAIN and not program.wrapping.looks_for_nan:
        yield change(program, wrapping=Wrapping.PLAIN)
    if program.shares:
        yield change(program, shares="")
    for outer in program.outer.plainer() if program.outer else ():
        yield change(program, outer=outer)
    if program.weighs:
        yield change(program, weighs=False)
    if program.counts:
        yield change(program, counts=())
    if program.ties:
        yield change(program, ties=False)
    for rank, count in enumerate(program.counts):
        if count < max(program.counts):
            yield change(program, counts=(*program.counts[:rank], count + 1, *program.counts[rank + 1 :]))
    if set(program.nodes) != {"here"}:
        yield change(program, nodes=("here",) * program.world_size)
    for name, value in _USUAL.items():
        if program.options[name] != value:
            yield change(program, options={**program.options, name: value})
    usual = TrainingStep(StepKind.ONE_BACKWARD, Zeroing.TO_NONE, updates=False)
    for k, step in enumerate(program.steps):
        for name in ("kind", "zeroing") if program.outer else ("kind", "zeroing", "updates"):
            if getattr(step, name) != getattr(usual, name):
                plain = change(step, **{name: getattr(usual, name)})
                yield change(program, steps=(*program.steps[:k], plain, *program.steps[k + 1 :]))
