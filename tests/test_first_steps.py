"""What somebody who is new here runs into: each mistake is an error that names it and says what to do."""

import copy
import datetime
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import ppe_ddp
from library_warnings import library_warnings
from one_process import assert_gradients, data, mean_gradients, square
from ppe_ddp import (
    DisagreementError,
    DistributedDataParallel,
    DistributedOptimizer,
    PeerAbortedError,
    UnusableError,
)
from ppe_ddp.cli import doctor
from ppe_ddp.launch import check_backend
from ppe_ddp.megatron import DistributedDataParallel as MegatronDDP
from ppe_ddp.megatron import DistributedDataParallelConfig
from rank_tests import on_three_ranks, on_two_ranks

LAUNCHED = {
    "torchrun": {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
    "mpirun": {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"},
}


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_several_ranks_that_do_not_meet_are_an_error(launcher, monkeypatch):
    for name, value in LAUNCHED[launcher].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UnusableError, match=rf"rank 1 of 2, started by {launcher}.*ppe_ddp\.init_process_group\(\)"):
        DistributedDataParallel(nn.Linear(1, 1))


@pytest.mark.parametrize("variables", [{}, {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "none of torchrun's"}], ids=str)
def test_who_is_alone_is_warned(variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with library_warnings() as texts:
        DistributedDataParallel(nn.Linear(1, 1))
    assert "torch.distributed is not initialized" in "".join(texts)


@pytest.mark.parametrize("options", [{}, {"shared_memory": False}, {"overlap": False}], ids=str)
@pytest.mark.parametrize("first", ["forward", "no sync", "finish", "join", "copy"])
@on_two_ranks
def test_a_wrapper_that_was_made_before_the_ranks_met(first, options, tmp_path):
    # As in a notebook, or by torch.multiprocessing.spawn; each rank has weights of its own at first.
    rank, hooked = dist.get_rank(), []
    dist.destroy_process_group()
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model = DistributedDataParallel(module, **options)
    module[0] = nn.Linear(4, 3)
    model.register_comm_hook(hooked.append)
    model(torch.randn(5, 4)).sum().backward()
    model.zero_grad()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2)
    if first == "copy":
        model = copy.deepcopy(model)
    if first == "no sync":
        with model.no_sync():
            square(model, rank)
        model.zero_grad()
    if first == "join":
        with model.join():
            for step in range(rank):
                square(model, rank, step)
        model.check_in_sync()
        return
    if first == "finish" and rank == 1:
        model.finish_grad_sync()  # without a forward
    else:
        square(model, rank)
    assert hooked
    model.check_in_sync()
    assert_gradients(
        model.module, mean_gradients(model.module, lambda m, r: None if first == "finish" and r else square(m, r))
    )


@on_two_ranks
def test_a_wrapper_that_was_made_before_and_could_not_get_the_parameters_of_rank_0_gets_them_in_the_next_step(tmp_path):
    rank, fails = dist.get_rank(), [True, False]
    dist.destroy_process_group()

    def send(tensors, group):
        if fails.pop(0) and rank == 1:
            raise ValueError("not today")
        return ppe_ddp.broadcast(tensors, group)

    model = DistributedDataParallel(nn.Linear(4, 3), broadcast_function=send)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2)
    with pytest.raises(ValueError if rank == 1 else PeerAbortedError, match="not today"):
        square(model, rank)
    square(model, rank)
    model.check_in_sync()
    assert_gradients(model.module, mean_gradients(model.module, square))


@on_two_ranks
def test_the_wrapped_optimizer_does_not_step():
    model = DistributedDataParallel(nn.Linear(3, 2))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(inner, model)
    model(data(2, 3)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UnusableError, match=r"SGD is wrapped by a DistributedOptimizer.*DistributedOptimizer's step"):
        inner.step()
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))
    model.check_in_sync()
    with pytest.raises(UnusableError, match="wrapped by a DistributedOptimizer"):
        inner.step()


def takes_one(bucket):
    """No reduce function."""


WRONG = {
    "no reduce function": ({"reduce_function": "mean"}, r"reduce_function\(bucket, group\), not str"),
    "one argument": ({"reduce_function": takes_one}, r"takes_one\(bucket\) will be called as reduce_function\(bucket"),
    "no broadcast function": ({"broadcast_function": 3}, r"broadcast_function\(tensors, group\), not int"),
    "no tensors": ({"broadcast_function": takes_one}, r"takes_one\(bucket\) .*broadcast_function\(tensors, group\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_functions_are_checked_when_they_are_given(case):
    options, message = WRONG[case]
    with pytest.raises(TypeError, match=message):
        DistributedDataParallel(nn.Linear(1, 1), **options)


HOOKS = {
    "for a bucket": ((None, takes_one), r"takes_one\(bucket\) will be called as hook\(state, bucket\)"),
    "for the wrapper": ((lambda: None,), r"will be called as hook\(ddp\)"),
    "no function": ((None, "hook"), r"hook\(state, bucket\), not str"),
    "nothing": (("hook",), "takes a function of the wrapper, not str"),
}


@pytest.mark.parametrize("case", HOOKS)
def test_hooks_are_checked_when_they_are_given(case):
    arguments, message = HOOKS[case]
    with pytest.raises(TypeError, match=message):
        DistributedDataParallel(nn.Linear(1, 1)).register_comm_hook(*arguments)


class Failing:
    """A hook that is an object."""

    def __call__(self, ddp):
        raise ZeroDivisionError


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")
@on_two_ranks
def test_an_error_in_a_hook_names_it_and_the_rank():
    model = DistributedDataParallel(nn.Linear(1, 1))
    model.register_comm_hook(Failing())
    with pytest.raises(ZeroDivisionError) as caught:
        model(torch.ones(1, 1)).sum().backward()
    assert caught.value.__notes__ == [f"in hook Failing on rank {dist.get_rank()}, before gradients are synchronized"]


@pytest.mark.parametrize("wrap", [DistributedDataParallel, TorchDDP])
@on_two_ranks
def test_what_is_wrapped_is_not_wrapped_again(wrap):
    with pytest.raises(ValueError, match=r"wrapped already, by .*DistributedDataParallel.*wrap its \.module"):
        DistributedDataParallel(wrap(nn.Linear(1, 1)))


class Counting(nn.Linear):
    """A parameter without elements, and buffers of any dtype."""

    def __init__(self):
        super().__init__(3, 2)
        self.empty = nn.Parameter(torch.zeros(0))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("coarse", torch.zeros(3, dtype=torch.bfloat16))


@on_three_ranks
def test_ranks_are_compared_on_demand():
    model = DistributedDataParallel(Counting())
    model.check_in_sync()
    if dist.get_rank() == 0:  # as if it had loaded a checkpoint alone
        model.module.bias.data[1] += 1
    with pytest.raises(DisagreementError, match=r"ranks 1, 2 and rank 0 .* 1 of 5 .*: 'bias'\. Load a checkpoint"):
        model.check_in_sync()
    if dist.get_rank() == 0:
        model.module.bias.data[1] -= 1
    dist.broadcast(model.module.bias.data, 0)
    model.check_in_sync()
    if dist.get_rank() == 1:
        model.module.coarse[2] = 1
        model.module.count += 1
    with pytest.raises(DisagreementError, match=r"rank 1 and rank 0 .* 2 of 5 .*'count', 'coarse'\."):
        model.check_in_sync()
    DistributedDataParallel(model.module, broadcast_buffers=False, init_sync=False).check_in_sync()


@pytest.mark.parametrize("rank", [0, 1])
@on_two_ranks
def test_a_parameter_that_one_rank_lacks(rank):
    module = nn.Sequential(nn.Linear(1, 1))
    if dist.get_rank() == rank:
        module.append(nn.Linear(1, 1))
    told = (
        "rank 1 lacks parameter '1.weight'.*, which rank 0 has"
        if rank == 0
        else "has .*'1.weight'.*, which rank 0 lacks"
    )
    with pytest.raises(DisagreementError, match=told):
        DistributedDataParallel(module)


@pytest.mark.parametrize("arguments", [(), (None,), tuple(range(12))], ids=len)
def test_megatrons_old_form_is_told_from_its_new_one(arguments):
    with pytest.raises(TypeError, match=r"\(config, module, data_.*this is the old form.*\(config, ddp_config, module"):
        MegatronDDP(None, nn.Linear(1, 1), *arguments)


def test_megatrons_reduce_function_is_checked():
    with pytest.raises(TypeError, match=r"takes_one\(bucket\) will be called as reduce_function\(bucket, group\)"):
        MegatronDDP(None, DistributedDataParallelConfig(), nn.Linear(1, 1), reduce_function=takes_one)


@pytest.mark.parametrize(
    ("keyword", "message"),
    [("rank", "takes no 'rank': .*torch.distributed.init_process_group"), ("time_out", "did you mean 'timeout'")],
)
def test_keywords_of_torchs_function_are_told_from_misspelt_ones(keyword, message):
    with pytest.raises(TypeError, match=message):
        ppe_ddp.init_process_group(**{keyword: 1})


@pytest.mark.parametrize("timeout", ["30s", True])
def test_a_timeout_that_is_no_number(timeout):
    with pytest.raises(TypeError, match=r"number of seconds or a datetime\.timedelta, not"):
        ppe_ddp.init_process_group(timeout=timeout)


def test_a_backend_that_there_is_not():
    for backend in ("glo", "cpu:glo,cuda:nccl"):
        with pytest.raises(ValueError, match=r"no backend 'glo' .*did you mean 'gloo'\?.* mpi4py"):
            ppe_ddp.init_process_group(backend)
    for backend in ("gloo", "GLOO", "cpu:gloo,cuda:nccl", "cpu:mpi4py"):
        check_backend(backend)


def test_the_doctor_knows_no_such_backend(capsys):
    parser = doctor.argparse.ArgumentParser()
    doctor.Doctor.add_arguments(parser)
    assert doctor.Doctor.run(parser.parse_args(["--backend", "mpi4p"])) == 2
    assert "did you mean 'mpi4py'?" in capsys.readouterr().err


def test_options_of_the_backend_are_passed_on(monkeypatch):
    given = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **keywords: given.update(keywords))
    options = object()
    ppe_ddp.init_process_group("gloo", pg_options=options, timeout=17, quiet=True)
    assert given["pg_options"] is options
    assert given["timeout"] == datetime.timedelta(seconds=17)
