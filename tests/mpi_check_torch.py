"""Checks that what torch and this library build on process groups works over `mpi4py`; run by mpi_checks.py."""

import shutil
import tempfile
import warnings

import torch
import torch.distributed as dist

import test_drift as drift
import weighing
from mpi_check_kit import assert_same, check


def model_and_loss(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4), torch.nn.Linear(4, 1))
    return model, lambda output: output.square().mean()


def batch(step, rank):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def train_alone(size, steps=2):
    model, loss_of = model_and_loss(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model(torch.cat([batch(step, rank) for rank in range(size)]))).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def train(wrapped, loss_of, steps=2):
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(wrapped(batch(step, dist.get_rank()))).backward()
        optimizer.step()


def assert_trained(parameters, rtol=1e-5):
    for actual, wanted in zip(parameters, train_alone(dist.get_world_size()), strict=True):
        torch.testing.assert_close(actual.detach(), wanted, rtol=rtol, atol=rtol)


@check("plain", "fp16_compress", "power_sgd", ranks=2, most=2)
def torch_ddp(hook):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    model, loss_of = model_and_loss(3)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    if hook == "power_sgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook != "plain":
        wrapped.register_comm_hook(None, getattr(default_hooks, f"{hook}_hook"))
    train(wrapped, loss_of)
    assert_trained(model.parameters(), rtol={"plain": 1e-5, "power_sgd": 1e-1}.get(hook, 2e-2))


@check(most=2)
def own_ddp():
    import ppe_ddp

    model, loss_of = model_and_loss(3)
    train(ppe_ddp.DistributedDataParallel(model), loss_of)
    assert_trained(model.parameters())


@check(ranks=2, most=2)
def zero_redundancy():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)  # torch's own
        from torch.distributed.optim import ZeroRedundancyOptimizer

    model, loss_of = model_and_loss(3)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(wrapped(batch(step, dist.get_rank()))).backward()
        optimizer.step()
    assert_trained(model.parameters())


@check(ranks=2, most=2)
def collectives_in_what_is_compiled():
    """Dynamo puts some into its graph; the others call the group's methods while it is active."""

    def to_the_other(tensor):
        dist.send(tensor, 1) if dist.get_rank() == 0 else dist.recv(tensor, 0)

    calls = {
        "all_reduce": dist.all_reduce,
        "all_reduce, async": lambda tensor: dist.all_reduce(tensor, async_op=True).wait(),
        "broadcast": lambda tensor: dist.broadcast(tensor, 1),
        "reduce": lambda tensor: dist.reduce(tensor, 0),
        "barrier": lambda tensor: dist.barrier(),
        "send": to_the_other,
        "new_group": lambda tensor: dist.all_reduce(tensor, group=dist.new_group([0, 1])),
    }
    for name, call in calls.items():

        def twice(tensor, call=call):
            call(tensor)
            return tensor * 2

        given = torch.arange(3.0) + dist.get_rank()
        expected = twice(given.clone())
        torch.compiler.reset()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Dynamo does not know how to trace", UserWarning)  # torch's own classes
            assert_same(torch.compile(twice, backend="eager")(given), expected, name)


@check(most=2)
def dtensor():
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    size = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size,))
    full = torch.arange(7.0 * 3).view(7, 3)
    shard = distribute_tensor(full, mesh, [Shard(0)])
    assert_same(shard.full_tensor(), full, "shard, gather")
    assert_same(shard.redistribute(mesh, [Shard(1)]).full_tensor(), full, "shard 0 to 1")
    assert_same(shard.redistribute(mesh, [Replicate()]).to_local(), full, "replicate")
    partial = DTensor.from_local(torch.ones(4, 2), mesh, [Partial()])
    assert_same(partial.redistribute(mesh, [Shard(0)]).full_tensor(), torch.full((4, 2), float(size)), "partial")
    assert_same(torch.mm(shard.t(), shard).full_tensor(), full.t() @ full, "matrix product")


@check(ranks=2, most=2)
def fsdp2():
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model, loss_of = model_and_loss(3)
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, loss_of)
    assert_trained([parameter.full_tensor() for parameter in model.parameters()])


@check(ranks=2, most=2)
def checkpoint():
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor

    size = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size,))
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where, 0)
    full = torch.arange(10.0).view(5, 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # torch's own, before 2.11
        dcp.save({"weight": distribute_tensor(full, mesh, [Shard(0)]), "step": 3}, checkpoint_id=where[0])
    loaded = {"weight": distribute_tensor(torch.zeros(5, 2), mesh, [Shard(1)]), "step": 0}
    dcp.load(loaded, checkpoint_id=where[0])
    assert_same(loaded["weight"].full_tensor(), full, "loaded")
    assert loaded["step"] == 3
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(where[0])


@check(ranks=2)
def weighted_means_of_random_models():
    weighing.hold_random_model(3)
    weighing.hold_random_model(8, used=True)
    weighing.hold_optimizer(weighs=True)


@check(ranks=2)
def training_with_batches_of_other_sizes_is_that_of_one_process():
    weighing.hold_training(steps=10)


@check(ranks=3)
def parameters_that_come_to_differ_are_named():
    drift.test_the_rank_and_the_parameter_are_named.__wrapped__({})
