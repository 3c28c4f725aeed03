"""torch_internals.py: each use of torch's internals has a trial, which names a torch that behaves differently."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

import group_internals_check
import torch_internals_check
from ppe_ddp.backends import group_internals
from ppe_ddp.errors import TorchChangedError
from renamed_names import names_of_torch, problem_after_renaming


def test_this_torch_behaves_as_expected():
    assert list(torch_internals_check.check()) == []
    assert list(group_internals_check.check()) == []


@pytest.mark.parametrize(
    ("owner", "name", "change", "told"),
    [
        (torch._C, "_will_engine_execute_node", lambda node: True, "node_is_executed is_captured"),
        (torch._C, "_storage_Use_Count", lambda handle: 2, "storage_users"),
        (torch._C, "_current_graph_task_id", lambda: -1, "is_in_backward"),
        (torch, "_amp_foreach_non_finite_check_and_unscale_", lambda *arguments: None, "is_scaler_check"),
    ],
)
def test_a_torch_that_has_changed_is_told_of_by_name(monkeypatch, owner, name, change, told):
    monkeypatch.setattr(owner, name, change)
    assert [problem.split(":")[0] for problem in torch_internals_check.check()] == told.split()


@pytest.mark.parametrize(("internals", "name"), names_of_torch(), ids=lambda value: getattr(value, "__name__", value))
def test_a_name_that_torch_has_renamed_is_told_of(internals, name):
    assert problem_after_renaming(internals, name)


def helper_with_other_names(arguments, creator_fn):
    return creator_fn(arguments)


@pytest.mark.parametrize(
    ("owner", "name", "change", "told"),
    [
        (c10d, "_get_process_group_store", lambda group: dist.HashStore(), "store_of"),
        (c10d, "_new_process_group_helper", helper_with_other_names, "backends_being_made"),
        (c10d, "_new_group_with_tag", lambda *a, **k: c10d._world.default_pg, "new_group_named"),
    ],
)
def test_groups_that_have_changed_are_told_of_by_name(monkeypatch, owner, name, change, told):
    monkeypatch.setattr(owner, name, change)
    assert told in [problem.split(":")[0] for problem in group_internals_check.check()]


def test_trials_leave_the_groups_of_this_process_alone(two_ranks):
    assert two_ranks.run(groups_after_trials) == [True, True]


def groups_after_trials():
    before, hooks = dict(c10d._world.pg_map), c10d._process_group_name
    problems = list(group_internals_check.check())
    total = torch.ones(())
    dist.all_reduce(total)
    return not problems and dict(c10d._world.pg_map) == before and c10d._process_group_name is hooks and total == 2


def test_a_group_that_torch_has_named_otherwise_is_an_error_and_is_gone_again(two_ranks):
    for groups, told in two_ranks.run(named_otherwise):
        assert groups == 0
        assert told.startswith("new_group_named: torch ")
        assert "'wanted'" in told


def named_otherwise():
    before = len(c10d._world.pg_map)
    own = c10d._new_group_with_tag

    # as if torch asked another function for the name
    def named_by_another(ranks, *arguments, **keywords):
        return made_by_all(own(ranks, *arguments, **{**keywords, "use_local_synchronization": _forget_the_patch()}))

    c10d._new_group_with_tag = named_by_another
    try:
        with pytest.raises(TorchChangedError) as caught:
            group_internals.new_group_named("wanted", [0, 1], None, "gloo", None)
    finally:
        c10d._new_group_with_tag = own
    return len(c10d._world.pg_map) - before, str(caught.value)


def made_by_all(group):
    """`group`, which every rank has made: one that destroys it before breaks what another is connecting."""
    dist.barrier()
    return group


def _forget_the_patch():
    c10d.__dict__["_process_group_name"] = lambda ranks, use_hashed_name: "another"
    return True


def test_other_threads_get_torchs_names_while_a_group_is_made(two_ranks):
    for own, other in two_ranks.run(names_in_two_threads):
        assert own == "wanted"
        assert other != "wanted"


def names_in_two_threads():
    own = c10d._new_group_with_tag
    seen = []

    def look():
        seen.append(c10d._process_group_name([0, 1], use_hashed_name=True))

    def looked_at(*arguments, **keywords):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join(timeout=20)
        return made_by_all(own(*arguments, **keywords))

    c10d._new_group_with_tag = looked_at
    try:
        group = group_internals.new_group_named("wanted", [0, 1], None, "gloo", None)
    finally:
        c10d._new_group_with_tag = own
    name = group.group_name
    dist.destroy_process_group(group)
    return name, *seen


def test_groups_that_threads_make_at_once_have_their_names(two_ranks):
    assert two_ranks.run(named_in_two_threads) == [(["second", "first"], True)] * 2


def named_in_two_threads():
    """The second group is asked for while the first is made, and made when the first is there."""
    own, torchs = c10d._new_group_with_tag, c10d._process_group_name
    has_entered, may_go_on = threading.Event(), threading.Event()

    def one_after_another(*arguments, **keywords):
        if threading.current_thread() is threading.main_thread():
            may_go_on.set()
            first.result(timeout=20)
        else:
            has_entered.set()
            may_go_on.wait(timeout=20)
        return own(*arguments, **keywords)

    def make(name):
        return group_internals.new_group_named(name, [0, 1], None, "gloo", None)

    c10d._new_group_with_tag = one_after_another
    try:
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(make, "first")
            assert has_entered.wait(timeout=20)
            groups = [make("second"), first.result()]
    finally:
        may_go_on.set()
        c10d._new_group_with_tag, left = own, c10d._process_group_name
        c10d._process_group_name = torchs
    names = [group.group_name for group in groups]
    dist.barrier()
    for group in groups:
        dist.destroy_process_group(group)
    return names, left is torchs


def test_backends_of_a_group_that_nobody_makes_are_an_error():
    with pytest.raises(TorchChangedError, match=r"_new_process_group_helper\(\) is not being called"):
        group_internals.backends_being_made()


def test_a_call_of_torch_that_hides_its_backends_is_an_error():
    def _new_process_group_helper():
        return group_internals.backends_being_made()

    with pytest.raises(TorchChangedError, match="has no 'backend_config'"):
        _new_process_group_helper()


def test_what_is_kept_with_a_group_goes_with_it(two_ranks):
    assert two_ranks.run(kept_after_the_group) == [True, True]


def kept_after_the_group():
    import weakref

    group = made_by_all(dist.new_group([0, 1]))
    kept = weakref.ref(group_internals.kept_with(group, nn.Module))
    same = kept() is group_internals.kept_with(group, nn.Module)
    dist.destroy_process_group(group)
    group_internals.kept_with(dist.group.WORLD, nn.Module)
    return same and kept() is None
