"""What fails on one rank of a split model: every rank hears of it, and the next step works.

What fails behind a backward, on any rank and in any shape of model, is in tests/simulation.
"""

import contextlib
import dataclasses
import io
import logging
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ppe_ddp
from failing import shorten_timeout
from parallel_layers import Toy, loss_of, reference_gradients, words
from ppe_ddp import (
    Checkpointer,
    CheckpointError,
    CommunicationError,
    DisagreementError,
    DistributedOptimizer,
    NonFiniteGradientError,
    PeerAbortedError,
    average,
)
from ppe_ddp.compression import Compressor, ErrorFeedback, Int8, PowerSGD, TopK
from ppe_ddp.engine import peer_processes
from ppe_ddp.engine.completion import Completion
from ppe_ddp.engine.failures import LostRanks
from ppe_ddp.errors import AbortedError
from ppe_ddp.megatron import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ParallelGroups,
    finalize,
    finalize_model_grads,
)
from ppe_ddp.testing import RankError, Ranks
from rank_tests import on_four_ranks, on_three_ranks, on_two_ranks
from test_megatron_parallel import SEQUENCE, Expert, Marked, PerToken, hold, parallel_groups, split_of


@pytest.mark.parametrize("marks", [[], SEQUENCE])
@pytest.mark.parametrize("dimension", ["tp", "pp"])
@on_four_ranks
def test_nan_on_one_rank_is_named_on_all(dimension, marks):
    """On its data-parallel peer by the NaN check, on the others by what finalizing tells; the next step works."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", dimension))
    config = DistributedDataParallelConfig(check_for_nan_in_grad=True, overlap_grad_reduce=True)
    model = DistributedDataParallel(None, config, Marked(marks), groups=ParallelGroups.from_mesh(mesh))
    expected = 2.0 if marks and dimension == "tp" else 1.0
    for step in range(4):
        is_bad = step in (0, 2)
        model.zero_grad_buffer()
        model(float("nan") if is_bad and dist.get_rank() == 1 else 1.0).backward()
        if not is_bad:
            finalize_model_grads([model])
            assert [*set(model.module.of_interest.main_grad.tolist())] == [expected]
        elif mesh.get_local_rank(dimension) == 1:
            with pytest.raises(NonFiniteGradientError, match="rank 0 in 'of_interest'"):
                finalize_model_grads([model])
        else:
            with pytest.raises(PeerAbortedError, match=r"rank 1 of the group failed in finalize_model_grads.*NaN"):
                finalize_model_grads([model])


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", ["tensor", "sequence"])
@on_four_ranks
def test_a_data_parallel_peer_aborts_while_layers_communicate_in_backward(kind, sharded):
    """Who hears of it there goes through its backward all the same, as the layers of another rank wait for it."""
    groups, group = parallel_groups(kind)
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=sharded, bucket_size=40)
    model = DistributedDataParallel(None, config, Toy(split_of(kind, group)), groups=groups)
    rank, place = dist.get_rank(), dist.get_rank(groups.data)
    has_aborted = dist.distributed_c10d._get_default_store()
    for step in range(3):
        model.zero_grad_buffer()
        x, y = words(step, place, 0)
        output = model(x)
        if step == 1 and place == 0:
            output.register_hook(lambda _: has_aborted.wait(["aborted"]))
        loss_of(output, y).backward()
        if step != 1:
            finalize_model_grads([model])
            hold(model, reference_gradients(step, 2, 1), sharded=sharded)
            continue
        if rank == 2:
            model.abort_grad_sync("cannot go on")
            has_aborted.set("aborted", "")
        with pytest.raises(PeerAbortedError, match="cannot go on"):
            finalize_model_grads([model])
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("culprit", ["its reduce function", "its check for NaN"])
@pytest.mark.parametrize("kind", ["tensor", "sequence", "expert"])
@on_four_ranks
def test_who_fails_between_two_layers_goes_through_its_backward(kind, culprit):
    """As the layers of another rank wait for it: its error comes out of its backward when that is over."""
    groups, group = parallel_groups(kind)
    rank, fails = dist.get_rank(), False

    def failing(bucket, group):
        if fails and culprit == "its reduce function":
            raise Boom
        return average(bucket, group)

    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=40, check_for_nan_in_grad=True)
    module = Toy(split_of(kind, group))
    model = DistributedDataParallel(None, config, module, groups=groups, reduce_function=failing)
    module.norm.weight.register_hook(lambda g: g * float("nan") if fails and culprit != "its reduce function" else None)
    own = Boom if culprit == "its reduce function" else NonFiniteGradientError
    for step in range(4):
        fails = rank == 1 and step % 2 == 1
        model.zero_grad_buffer()
        x, y = words(step, dist.get_rank(groups.data), 0)
        loss = loss_of(model(x), y)
        told = []
        for call in (loss.backward, lambda: finalize_model_grads([model])):
            try:
                call()
            except (Boom, PeerAbortedError, NonFiniteGradientError) as error:
                told.append(error)
        if step % 2 == 0:
            assert not told
            hold(model, reference_gradients(step, dist.get_world_size(groups.data), 1), sharded=False)
        else:  # in backward, or behind it where the mask has come late
            assert isinstance(told[0], own) if rank == 1 else told


@on_two_ranks
def test_who_is_interrupted_when_all_have_come_is_told_of_at_the_next_sum():
    said, logger = io.StringIO(), logging.getLogger("ppe_ddp")
    logger.addHandler(logging.StreamHandler(said))
    level = logger.level
    logger.setLevel(logging.WARNING)  # over mpi4py it is set to errors only
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    groups = ParallelGroups(data=alone, tensor=dist.group.WORLD)
    model = DistributedDataParallel(PerToken(), DistributedDataParallelConfig(), Marked(SEQUENCE), groups=groups)
    for step in range(3):
        model.zero_grad_buffer()
        model(1.0).backward()
        if step == 1 and dist.get_rank() == 1:
            with pytest.MonkeyPatch.context() as patches:
                patches.setattr(finalize, "_update_routers", _raise)
                with pytest.raises(Boom):
                    finalize_model_grads([model], torch.ones(1))
        else:
            finalize_model_grads([model], torch.ones(1))
        if step != 1:
            assert model.module.of_interest.main_grad.tolist() == [2.0] * 12
    logger.setLevel(level)
    assert ("were complete" in said.getvalue()) == (dist.get_rank() == 0)


@on_two_ranks
def test_a_rank_that_cannot_count_its_tokens_is_named_and_no_rank_has_averages_of_that_step():
    """Unless they were waited for before. The next step works."""
    rank, module = dist.get_rank(), Marked([])
    model = DistributedDataParallel(PerToken(), DistributedDataParallelConfig(), module)
    for step in range(5):
        is_lost, is_waited_for = step % 2 == 1, step == 3
        model.zero_grad_buffer()
        model(1.0 + rank).backward()
        if is_waited_for:
            model.start_grad_sync()
        tokens = torch.ones(1, device="meta" if is_lost and rank else "cpu")
        if not is_lost:
            finalize_model_grads([model], tokens)
        else:
            with pytest.raises((TypeError, RuntimeError) if rank else PeerAbortedError, match="meta") as caught:
                finalize_model_grads([model], tokens)
            assert rank or (caught.value.rank, caught.value.is_final) == (1, False)
        grad = 1.5 if not is_lost else 3.0 if is_waited_for else 1.0 + rank
        assert module.of_interest.main_grad.tolist() == [grad] * 12


@on_two_ranks
def test_tokens_that_only_some_ranks_have_given_are_an_error_on_all():
    """No rank has averages of that step, unless they were waited for before; that no rank gives them is no error."""
    rank, module = dist.get_rank(), Marked([])
    model = DistributedDataParallel(PerToken(), DistributedDataParallelConfig(), module)
    for step, given in enumerate([(0, 1), (0,), (), (1,), (0, 1)]):
        model.zero_grad_buffer()
        model(1.0 + rank).backward()
        if step == 3:
            model.start_grad_sync()
        fails = len(given) == 1
        text = rf"rank {given[0]} has given finalize_model_grads\(\) num_tokens, and rank .* has not" if fails else ""
        with pytest.raises(DisagreementError, match=text) if fails else contextlib.nullcontext():
            finalize_model_grads([model], torch.ones(1) if rank in given else None)
        grad = 1.0 + rank if step == 1 else 1.5 if len(given) == 2 else 3.0
        assert module.of_interest.main_grad.tolist() == [grad] * 12, step


@on_two_ranks
def test_an_interrupt_before_averages_are_waited_for_whose_error_is_kept_does_not_lose_them():
    """They are in flight: the next step waits for them first, and has its own averages."""
    rank, module = dist.get_rank(), Marked([])
    model = DistributedDataParallel(None, DistributedDataParallelConfig(overlap_grad_reduce=True), module)
    for step in range(4):
        model.zero_grad_buffer()
        model(1.0 + rank + 10 * step).backward()
        if step == 1 and rank == 0:
            with pytest.MonkeyPatch.context() as patches:
                patches.setattr(Completion, "finish", _interrupt)
                with pytest.raises(KeyboardInterrupt) as _kept:
                    model.finish_grad_sync()
        else:
            model.finish_grad_sync()
            assert module.of_interest.main_grad.tolist() == [1.5 + 10 * step] * 12


@pytest.mark.parametrize("behind", [False, True])
@on_two_ranks
def test_who_is_interrupted_as_it_tells_of_its_failure_begins_no_other_step_where_it_finishes_that_one(behind):
    rank, module, fails = dist.get_rank(), Marked([]), False
    has_ended = dist.distributed_c10d._get_default_store()

    def failing(bucket, group):
        if fails and not behind:
            raise Boom
        return average(bucket, group)

    config = DistributedDataParallelConfig(overlap_grad_reduce=True)
    model = DistributedDataParallel(None, config, module, reduce_function=failing)
    for step in range(3):
        fails = step == 1 and rank == 0
        model.zero_grad_buffer()
        with pytest.MonkeyPatch.context() as patches:
            if fails:
                patches.setattr(LostRanks, "await_completion", _interrupt)
            output = model(1.0 + rank)
            if behind and step == 1 and rank == 1:  # the other rank waits for results of this one
                output.register_hook(lambda _: has_ended.wait(["it has ended that step"]))
            with pytest.raises(KeyboardInterrupt) if fails else contextlib.suppress(PeerAbortedError):
                output.backward()
                if fails:
                    model.abort_grad_sync("behind its backward")
        told = step == 1 and not (behind and rank)
        with pytest.raises(PeerAbortedError) if told else contextlib.suppress(PeerAbortedError):
            model.finish_grad_sync()
        if fails:
            has_ended.set("it has ended that step", "")
    assert module.of_interest.main_grad.tolist() == [1.5] * 12


def _interrupt(*_):
    raise KeyboardInterrupt


class Boom(Exception):
    """What one rank alone raises."""


def split_model(sharded=True, groups=None, overlap=True, **options):
    """A copy of one layer on two data-parallel and two tensor-parallel ranks, its optimizer, and what SGD wraps."""
    if groups is None:
        groups = ParallelGroups.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    torch.manual_seed(0)
    module = nn.Linear(4, 2)
    module.weight.tensor_model_parallel = False
    config = DistributedDataParallelConfig(overlap_grad_reduce=overlap, use_distributed_optimizer=sharded)
    model = DistributedDataParallel(None, config, module, groups=groups, **options)
    inner = torch.optim.SGD(module.parameters(), 0.1)
    return model, DistributedOptimizer(inner, model) if sharded else inner, inner


def outcome_of(model, step):
    """What a step has raised; nothing where it was good."""
    model.zero_grad_buffer()
    try:
        model(torch.ones(3, 4)).sum().backward()
        finalize_model_grads([model])
        step()
    except (Boom, PeerAbortedError, DisagreementError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def assert_copies_are_equal(model):
    everyone = [torch.empty_like(model.module.weight) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, model.module.weight.detach())
    assert all(torch.equal(one, everyone[0]) for one in everyone)


@on_four_ranks
def test_who_raises_in_an_optimizers_step_leaves_other_copies_and_all_are_told():
    model, optimizer, inner = split_model()
    rank = dist.get_rank()
    assert outcome_of(model, optimizer.step) == ""
    handle = inner.register_step_pre_hook(_raise) if rank == 1 else None
    told = outcome_of(model, optimizer.step)
    assert ("Boom" in told) == (rank in (1, 3))  # the data-parallel ranks, which gather its part
    if handle is not None:
        handle.remove()
    told = outcome_of(model, optimizer.step)
    assert "DistributedOptimizer.step() has failed on rank 1 since the last step" in told
    assert outcome_of(model, optimizer.step) == ""


@on_two_ranks
def test_who_has_raised_in_an_optimizers_step_saves_nothing_before_all_are_told(tmp_path):
    groups = ParallelGroups.from_mesh(init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")))
    model, optimizer, inner = split_model(groups=groups)
    assert outcome_of(model, optimizer.step) == ""
    parts = {"model": model, "optimizer": optimizer}
    checkpointer = Checkpointer(tmp_path / str(dist.get_rank()), parts, process_group=groups.data)
    checkpointer.save(1)
    handle = inner.register_step_pre_hook(_raise) if dist.get_rank() == 1 else None
    outcome_of(model, optimizer.step)
    if handle is not None:
        handle.remove()
    with pytest.raises(CheckpointError, match="has failed here"):
        checkpointer.save(2)
    assert "has failed on rank 1" in outcome_of(model, optimizer.step)
    with pytest.raises(CheckpointError, match="has failed here"):
        checkpointer.save(2)
    assert checkpointer.load().step == 1
    handle = inner.register_step_pre_hook(_raise) if dist.get_rank() == 1 else None
    outcome_of(model, optimizer.step)
    if handle is not None:
        handle.remove()
    assert checkpointer.load().step == 1  # on all ranks, before the others are told
    assert outcome_of(model, optimizer.step) == ""
    assert_copies_are_equal(model)
    checkpointer.save(2)


@on_three_ranks
def test_who_has_copies_on_all_stages_saves_nothing_behind_a_step_that_has_failed(tmp_path):
    groups = ParallelGroups.from_mesh(init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "pp")))
    module = nn.Linear(4, 2)
    module.weight.pipeline_parallel = True
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True)
    model = DistributedDataParallel(None, config, module, groups=groups)
    optimizer = DistributedOptimizer(torch.optim.SGD(module.parameters(), 0.1), model)
    folder, parts = tmp_path / str(dist.get_rank()), {"model": model, "optimizer": optimizer}
    checkpointer = Checkpointer(folder, parts, process_group=groups.data)
    handle = optimizer.register_step_pre_hook(_raise) if dist.get_rank() == 1 else None  # neither first nor last
    assert ("Boom" in outcome_of(model, optimizer.step)) == (handle is not None)
    with pytest.raises(CheckpointError, match="has failed here"):
        checkpointer.save(1)


@on_four_ranks
def test_a_closure_that_has_raised_once_fails_no_later_step_but_the_next():
    model, optimizer, _ = split_model()

    def outcome(raises=False):
        def closure():
            model.zero_grad_buffer()
            model(torch.ones(3, 4)).sum().backward()
            finalize_model_grads([model])
            if raises:
                raise Boom

        try:
            optimizer.step(closure)
        except (Boom, PeerAbortedError, DisagreementError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    assert outcome() == ""
    told = outcome(raises=dist.get_rank() == 1)
    assert ("Boom" in told) == (dist.get_rank() in (1, 3))  # the data-parallel ranks, which gather its part
    assert "DistributedOptimizer.step() has failed on rank 1 since the last step" in outcome()
    assert [outcome(), outcome()] == ["", ""]


@pytest.mark.parametrize("overlap", [False, True])
@on_four_ranks
def test_an_error_names_the_rank_that_has_failed_and_not_one_that_has_told_of_it(overlap):
    model, *_ = split_model(sharded=False, overlap=overlap)
    rank = dist.get_rank()
    for culprit in (3, 0, 2):
        model.zero_grad_buffer()
        with contextlib.suppress(PeerAbortedError):  # a rank that overlaps may hear of it here already
            model(torch.ones(3, 4)).sum().backward()
        if rank == culprit:
            model.abort_grad_sync("cannot go on")
        with pytest.raises(PeerAbortedError, match="cannot go on") as caught:
            finalize_model_grads([model])
        assert rank == culprit or caught.value.job_rank == culprit


@on_four_ranks
def test_an_error_names_the_rank_that_has_nan_and_not_one_that_averages_with_it():
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    config = DistributedDataParallelConfig(check_for_nan_in_grad=True)
    model = DistributedDataParallel(None, config, torch.nn.Linear(2, 2), groups=ParallelGroups.from_mesh(mesh))
    for culprit in range(4):
        model.zero_grad_buffer()
        model(torch.full((1, 2), float("nan") if rank == culprit else 1.0)).sum().backward()
        with pytest.raises((NonFiniteGradientError, PeerAbortedError), match="NaN or infinity") as caught:
            finalize_model_grads([model])
        assert caught.value.job_rank == culprit
        if isinstance(caught.value, PeerAbortedError):
            assert f"(rank {culprit} of the job)" in str(caught.value)


def die_in_a_step(culprit):
    model, *_ = split_model(sharded=False)
    model.zero_grad_buffer()
    if dist.get_rank() == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(PeerAbortedError, CommunicationError):
        model(torch.ones(3, 4)).sum().backward()
    finalize_model_grads([model])


@pytest.mark.parametrize("culprit", [1, 2])
def test_an_error_names_a_rank_that_has_died_where_only_others_have_waited_for_it(culprit):
    with Ranks(4, timeout=120) as ranks, pytest.raises(RankError) as caught:
        ranks.run(die_in_a_step, culprit)
    told = caught.value.exceptions
    assert set(told) == {0, 1, 2, 3} - {culprit}
    assert {type(error) for error in told.values()} == {PeerAbortedError, CommunicationError}
    for error in told.values():
        assert (error.job_rank, error.is_final) == (culprit, True), error
        assert "which has died" in str(error)
        assert "start" in str(error)
        assert "next step" not in str(error)


def die_where_the_script_itself_communicates():
    model, *_ = split_model(groups=ParallelGroups.from_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))))
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(20):  # a connection may be closed before the process has ended
        model.zero_grad_buffer()
        with pytest.raises(RuntimeError):
            dist.recv(torch.empty(1), 0)
        model.abort_grad_sync("a stage has not received anything")
        with contextlib.suppress(PeerAbortedError):
            finalize_model_grads([model])
        time.sleep(0.1)


def test_a_rank_that_gives_a_step_up_hears_that_another_one_has_died():
    with Ranks(2, timeout=120) as ranks, pytest.raises(RankError) as caught:
        ranks.run(die_where_the_script_itself_communicates)
    told = caught.value.exceptions
    assert {(type(error), error.job_rank, error.is_final) for error in told.values()} == {(CommunicationError, 0, True)}


def die_beside_another_node(culprit, is_closed):
    """Rank 0 is alone on its node, and knows the process of no other rank."""
    rank, alone = dist.get_rank(), dist.get_rank() == 0
    peer_processes.node_name = lambda: b"alone" if alone else b"others"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    module = nn.Linear(4, 2)
    module.weight.tensor_model_parallel = False
    groups = ParallelGroups.from_mesh(mesh)
    model = DistributedDataParallel(None, DistributedDataParallelConfig(), module, groups=groups)
    if is_closed:
        with contextlib.suppress(Boom, PeerAbortedError):
            model(torch.ones(3, 4)).sum().backward()
            if alone:
                model.abort_grad_sync("all close their connections")
            finalize_model_grads([model])
        dist.barrier()
    model.zero_grad_buffer()
    if rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.ones(3, 4)).sum().backward()
    finalize_model_grads([model])


@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize("culprit", [1, 2])
def test_a_death_that_only_ranks_of_other_groups_can_see_is_known_to_all(culprit, is_closed):
    with Ranks(4, timeout=120) as ranks, pytest.raises(RankError) as caught:
        ranks.run(die_beside_another_node, culprit, is_closed)
    told = caught.value.exceptions
    assert set(told) == {0, 1, 2, 3} - {culprit}
    assert {(error.job_rank, error.is_final) for error in told.values()} == {(culprit, True)}, told


@on_four_ranks
def test_who_comes_too_late_is_told_so_where_ranks_have_other_numbers_among_those_of_its_experts():
    rank, experts = dist.get_rank(), [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    groups = ParallelGroups(data=dist.new_group(), expert=experts[rank % 2])
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for parameter in net[1].parameters():
        parameter.allreduce = False
    model = DistributedDataParallel(None, DistributedDataParallelConfig(), net, groups=groups)

    def step():
        model.zero_grad_buffer()
        model(torch.ones(1, 2)).sum().backward()
        finalize_model_grads(model)

    step()
    if rank == 3:
        dist.barrier()  # until the others have given the step up
    else:
        shorten_timeout(model, 2)
    told = "rank 3: this rank came too late" if rank == 3 else "needs rank 3, which has not come"
    with pytest.raises(CommunicationError, match=told):
        step()
    if rank != 3:
        dist.barrier()
        for connections in model._reducer.connections:
            connections.timeout_seconds = 60  # on a machine that is busy the ranks may take longer to connect again
    step()


@on_four_ranks
def test_who_raises_in_an_optimizers_step_says_nothing_of_another_model():
    model, optimizer, inner = split_model()
    other, of_other, _ = split_model(groups=model.groups)
    assert outcome_of(model, optimizer.step) == ""
    handle = inner.register_step_pre_hook(_raise) if dist.get_rank() == 1 else None
    outcome_of(model, optimizer.step)
    if handle is not None:
        handle.remove()
    assert outcome_of(other, of_other.step) == ""
    assert "has failed on rank 1 since the last step" in outcome_of(model, optimizer.step)
    assert outcome_of(other, of_other.step) == ""
    assert outcome_of(model, optimizer.step) == ""


@on_four_ranks
def test_who_raises_in_an_optimizers_step_tells_that_it_has_left_out_another_model_too():
    model, optimizer, inner = split_model()
    other, of_other, _ = split_model(groups=model.groups)
    handle = inner.register_step_pre_hook(_raise) if dist.get_rank() == 1 else None
    assert outcome_of(other, lambda: None) == ""
    outcome_of(model, lambda: [optimizer.step(), of_other.step()])
    if handle is not None:
        handle.remove()
    assert "has failed on rank 1 since the last step" in outcome_of(other, of_other.step)
    assert [outcome_of(other, of_other.step), outcome_of(model, optimizer.step)] == ["", ""]


@on_four_ranks
def test_who_raises_behind_an_optimizers_step_says_nothing_of_one_that_it_has_replaced():
    model, replaced, _ = split_model()
    assert outcome_of(model, replaced.step) == ""
    optimizer = DistributedOptimizer(torch.optim.SGD(model.module.parameters(), 0.1), model)
    handle = optimizer.register_step_post_hook(_raise) if dist.get_rank() == 1 else None
    assert ("Boom" in outcome_of(model, optimizer.step)) == (dist.get_rank() == 1)
    if handle is not None:
        handle.remove()
    assert outcome_of(model, optimizer.step) == ""
    assert_copies_are_equal(model)


@pytest.mark.parametrize("compressor", [TopK(0.25, min_numel=1), PowerSGD(1, min_compression=0.1)], ids=repr)
@on_four_ranks
def test_a_step_that_a_tensor_parallel_rank_drops_is_dropped_by_compressors_of_complete_ranks(compressor):
    model, optimizer, _ = split_model(sharded=False, reduce_function=ErrorFeedback(compressor))
    parameters = list(model.module.parameters())
    for step, fails in enumerate((False, False, True, False, False)):
        before = model.comm_state_dict()[0]["parameters"]
        batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank() // 2))
        is_culprit = fails and dist.get_rank() == 1
        handle = model.module.weight.register_hook(_raise) if is_culprit else None
        model.zero_grad_buffer()
        loss = model(batch).square().sum()
        # Who shares a gradient with the culprit may hear of it here already.
        with pytest.raises((Boom, PeerAbortedError)) if is_culprit else contextlib.suppress(PeerAbortedError):
            loss.backward()
        with pytest.raises(PeerAbortedError) if fails else contextlib.nullcontext():
            finalize_model_grads([model])
        if handle is not None:
            handle.remove()
        after = model.comm_state_dict()[0]["parameters"]
        is_as_before = all(torch.equal(kept, after[name][key]) for name in before for key, kept in before[name].items())
        assert is_as_before == (fails or not any(before.values()))
        for parameter in parameters:
            parameter.grad = None if fails else parameter.main_grad
        optimizer.step()
    assert_copies_are_equal(model)


def _raise(*_):
    raise Boom


class Counting(nn.Module):
    """A layer that each of two pipeline stages has a copy of, and a router that counts."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(40))
        self.weight.pipeline_parallel = True
        self.register_buffer("expert_bias", torch.zeros(2))
        self.register_buffer("local_tokens_per_expert", torch.zeros(2))

    def forward(self, x):
        self.local_tokens_per_expert += torch.tensor([1.0, 2.0])
        return (self.weight * x).sum()


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("when", ["before", "behind"])
@on_four_ranks
def test_who_fails_at_a_sum_of_finalizing_lets_no_rank_take_the_step(when, counts):
    """Nor those that sum nothing together with it: they would gather in vain, or have other copies and other biases."""
    groups = ParallelGroups.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")))
    module = Counting()
    its_config = SimpleNamespace(moe_router_enable_expert_bias=counts, moe_router_bias_update_rate=0.5)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(its_config, config, module, groups=groups)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    plain = finalize._sum

    def failing(*arguments):
        if fails and when == "before":
            raise Boom
        plain(*arguments)
        if fails:
            raise Boom

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(finalize, "_sum", failing)
        for step in range(4):
            fails = step == 1 and dist.get_rank() == 3
            model.zero_grad_buffer()
            model(2.0 + dist.get_rank()).backward()
            with pytest.raises((Boom, PeerAbortedError)) if step == 1 else contextlib.nullcontext():
                finalize_model_grads([model])
                optimizer.step()
    mean = (2.0 + 3.0 + 4.0 + 5.0) / 2  # over two ranks, and added up over two stages
    torch.testing.assert_close(module.weight.detach(), torch.full((40,), -3 * 0.1 * mean))
    assert module.expert_bias.tolist() == [1.5 * counts, -1.5 * counts]


@on_four_ranks
def test_who_is_interrupted_as_it_passes_on_a_failure_tells_it_to_all_of_its_groups():
    rank, interrupts = dist.get_rank(), []
    groups = ParallelGroups.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")))
    model = DistributedDataParallel(None, DistributedDataParallelConfig(), Counting(), groups=groups)
    plain, sums = LostRanks.await_completion, finalize._sum

    def interrupted(lost):
        if rank == 1 and step == 1 and not interrupts:
            interrupts.append(step)
            raise KeyboardInterrupt
        plain(lost)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(LostRanks, "await_completion", interrupted)
        for step in range(3):
            model.zero_grad_buffer()
            model(2.0 + rank).backward()
            patches.setattr(finalize, "_sum", _raise if rank == 3 and step == 1 else sums)
            with pytest.raises((Boom, PeerAbortedError, KeyboardInterrupt)) if step == 1 else contextlib.nullcontext():
                finalize_model_grads([model])
    assert len(interrupts) == (rank == 1)
    assert model.module.weight.main_grad.tolist() == [7.0] * 40


@pytest.mark.parametrize("who", [2, 0], ids=["the rank that has failed", "another one"])
@on_four_ranks
def test_after_a_failed_step_a_rank_without_a_backward_takes_part(who):
    """It connects its wrapper again first, as the others do in their backwards, and then what splits the model."""
    model, _, _ = split_model(sharded=False)
    rank, armed = dist.get_rank(), True
    model.module.weight.register_hook(lambda _: _raise() if armed else None)
    for step in range(4):
        armed = rank == 2 and step == 1
        model.zero_grad_buffer()
        told = None
        try:
            if step != 2 or rank != who:
                model(torch.full((3, 4), 1.0 + rank)).sum().backward()
        except (Boom, PeerAbortedError) as error:
            told = error
        try:
            finalize_model_grads([model])
        except PeerAbortedError as error:
            told = told or error
        assert (told is not None) == (step == 1)
        if told is None:
            peers = (rank % 2, rank % 2 + 2)
            mean = sum(3.0 * (1 + peer) for peer in peers if step != 2 or peer != who) / 2
            assert torch.equal(model.module.weight.main_grad, torch.full((2, 4), mean))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("ranks_of_an_expert", [1, 2])
@on_two_ranks
def test_after_a_step_that_was_given_up_behind_backward_tokens_are_counted_again(overlap, ranks_of_an_expert):
    """Of experts, too: who hears of it in the sum of the tokens, and who has given up, connect the same groups."""
    mesh = init_device_mesh("cpu", (ranks_of_an_expert, 2 // ranks_of_an_expert), mesh_dim_names=("dp", "ep"))
    config = DistributedDataParallelConfig(overlap_grad_reduce=overlap)
    model = DistributedDataParallel(PerToken(), config, Expert(), groups=ParallelGroups.from_mesh(mesh))
    for step in range(6):
        fails = step % 2 == 1
        model.zero_grad_buffer()
        with contextlib.suppress(*[PeerAbortedError] * fails):  # who is late hears of it in backward
            model(torch.ones(2, 4), has_tokens=True).sum().backward()
        if fails and dist.get_rank() == 1:
            model.start_grad_sync()  # without overlap the averages are there behind it
            model.abort_grad_sync("by hand")
        with pytest.raises(PeerAbortedError) if fails else contextlib.nullcontext():
            finalize_model_grads([model], torch.tensor([4.0]))


@on_four_ranks
def test_ranks_with_other_experts_take_the_step_after_one_of_which_they_had_the_averages():
    """Who hears in its backward that another rank has given the last step up tells those with the same experts."""
    groups = ParallelGroups.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep")))
    config = DistributedDataParallelConfig(overlap_grad_reduce=True)
    model = DistributedDataParallel(None, config, Expert(), groups=groups)
    for step in range(6):
        gives_up = step % 2 == 0 and dist.get_rank() == 2
        model.zero_grad_buffer()
        model(torch.ones(2, 4), has_tokens=True).sum().backward()
        if not gives_up:
            model.finish_grad_sync()
        dist.barrier()
        if gives_up:
            model.abort_grad_sync("by hand")
        else:
            assert model.module.expert.bias.main_grad.tolist() == [1.0] * 4  # 2 of each of two ranks, over four
        dist.barrier()


@on_four_ranks
def test_who_fails_in_the_optimizer_of_one_part_connects_again_with_ranks_that_have_heard_of_it_in_another():
    """The scaler's check of the experts ends on the other ranks before they gather these."""
    groups = ParallelGroups.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep")))
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True)
    model = DistributedDataParallel(None, config, Expert(), groups=groups)
    inner = [torch.optim.SGD(part.parameters(), 0.1) for part in (model.module.dense, model.module.expert)]
    shards = [model.sharded(), model.sharded(experts=True)]
    optimizers = [DistributedOptimizer(*both, overlap=True) for both in zip(inner, shards, strict=True)]
    for step in range(3):
        fails = step == 1
        handle = inner[0].register_step_post_hook(_raise) if fails and dist.get_rank() == 0 else None
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        model.zero_grad_buffer()
        scaler.scale(model(torch.ones(2, 4), has_tokens=True).sum()).backward()
        finalize_model_grads([model])
        with pytest.raises((Boom, PeerAbortedError)) if fails else contextlib.nullcontext():
            for optimizer in optimizers:
                scaler.step(optimizer)
        if handle is not None:
            handle.remove()


@on_four_ranks
def test_after_a_failure_ranks_save_the_optimizer_of_one_part_whose_connections_have_been_closed_on_some_alone():
    """Rank 1, whose scaler has heard of the failure of rank 2, has closed nothing in which experts are averaged."""
    groups = ParallelGroups.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    alone = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    groups = dataclasses.replace(groups, expert=groups.tensor, expert_tensor=alone)
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True)
    net = Expert()
    model = DistributedDataParallel(None, config, net, groups=groups)
    parts = [[net.dense.weight], [net.dense.bias], net.expert.parameters()]
    inner = [torch.optim.SGD(part, 0.1) for part in parts]
    shards = [model.sharded(), model.sharded(), model.sharded(experts=True)]
    optimizers = [DistributedOptimizer(*both) for both in zip(inner, shards, strict=True)]
    handle = inner[1].register_step_post_hook(_raise) if dist.get_rank() == 2 else None
    for expected in ((Boom, PeerAbortedError), DisagreementError, None):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        with contextlib.nullcontext() if expected is None else pytest.raises(expected):
            model.zero_grad_buffer()
            scaler.scale(model(torch.ones(2, 4), has_tokens=True).sum()).backward()
            finalize_model_grads([model])
            for optimizer in optimizers:
                scaler.step(optimizer)
        if handle is not None:
            handle.remove()
        for optimizer in optimizers[:2]:
            optimizer.state_dict()
        dist.barrier(groups.expert)  # as ranks that save these experts exchange
        optimizers[2].state_dict()


@on_two_ranks
def test_a_chunk_that_fails_while_another_one_is_waited_for_takes_the_next_step():
    fails, word = [False], torch.ones(1)

    class Failing(Compressor):
        def average(self, gradients, link):
            if fails[0] and dist.get_rank():
                dist.recv(word, 0)  # the other one has come to this bucket, too
                raise Boom
            if fails[0]:
                dist.send(word, 1)
            yield from Int8().average(gradients, link)

        def __repr__(self):
            return "Failing()"

    config, rank = DistributedDataParallelConfig(), dist.get_rank()
    chunks = [DistributedDataParallel(None, config, nn.Linear(3, 3), reduce_function=one) for one in (None, Failing())]
    for step in range(6):
        fails[0] = step % 2 == 1
        for chunk in chunks:
            chunk.zero_grad_buffer()
            chunk(torch.ones(2, 3)).sum().backward()
        if not fails[0]:
            finalize_model_grads(chunks)
            continue
        if rank == 0:
            chunks[1].begin_grad_sync()
            chunks[0].finish_grad_sync()  # which goes on with the other one
            with contextlib.suppress(PeerAbortedError):  # where it has heard of the failure by then
                chunks[1].scale_gradients(1.0)
        with pytest.raises((Boom, PeerAbortedError)):
            chunks[1].finish_grad_sync()
        if rank:
            chunks[0].finish_grad_sync()


@on_two_ranks
def test_the_step_after_one_of_which_a_rank_had_the_averages_is_taken_by_a_second_wrapper():
    """The group of its dense parameters goes on counting; that of its experts, of this rank alone, begins anew."""
    hold_step_after_averages((2,), ("ep",))


@on_four_ranks
def test_the_step_after_one_of_which_a_rank_had_the_averages_is_taken_where_groups_count_apart():
    hold_step_after_averages((2, 2), ("dp", "ep"), steps_before=5)


def hold_step_after_averages(shape, names, steps_before=0):
    """Hold that step, in groups of which the one of dense parameters was used in so many steps before."""
    groups = ParallelGroups.from_mesh(init_device_mesh("cpu", shape, mesh_dim_names=names))
    if steps_before:
        before = ppe_ddp.DistributedDataParallel(nn.Linear(4, 2), process_group=groups.data)
        for _ in range(steps_before):
            before(torch.ones(1, 4)).sum().backward()
        del before
    config = DistributedDataParallelConfig(overlap_grad_reduce=True)

    def step():
        model.zero_grad_buffer()
        model(torch.ones(1, 4), has_tokens=True).sum().backward()
        finalize_model_grads([model])

    model = DistributedDataParallel(None, config, Expert(), groups=groups)
    step()
    del model
    model = DistributedDataParallel(None, config, Expert(), groups=groups)
    step()
    dist.barrier()
    if dist.get_rank() == 0:  # as it does where it fails behind the last message
        for groups in model._reducer.synchronizer.groups:
            groups.fail(AbortedError("no memory"), "finishing")
    dist.barrier()
    step()
    step()


@pytest.mark.parametrize("overlap", [True, False])
@on_two_ranks
def test_after_a_failure_the_gradients_of_an_expert_that_only_this_rank_has_are_not_divided(overlap):
    groups = ParallelGroups.from_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    config = DistributedDataParallelConfig(overlap_grad_reduce=overlap, check_for_nan_in_grad=True)
    model, rank = DistributedDataParallel(None, config, Expert(), groups=groups), dist.get_rank()
    for is_bad in (False, True, False):
        model.zero_grad_buffer()
        (model(torch.ones(1, 4), has_tokens=True).sum() * (float("nan") if is_bad and rank else 1.0)).backward()
        with pytest.raises(NonFiniteGradientError) if is_bad else contextlib.nullcontext():
            finalize_model_grads([model])
        if not (is_bad and rank):
            assert model.module.expert.bias.main_grad.tolist() == [1.0 if is_bad else 0.5] * 4
