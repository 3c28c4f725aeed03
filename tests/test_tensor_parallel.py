"""Tensor times data parallelism: parameters are DTensors over mesh["tp"], their averages are over mesh["dp"]."""

import copy
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from one_process import of_all_ranks, seeded
from ppe_ddp import Checkpointer, DistributedDataParallel, DistributedOptimizer, PeerAbortedError, average, weigh
from ppe_ddp.compression import ErrorFeedback, LocalSGD, TopK
from ppe_ddp.engine.gradients import has_nonzero
from ppe_ddp.megatron import DistributedDataParallel as MegatronDDP
from ppe_ddp.megatron import DistributedDataParallelConfig
from rank_tests import end_world, on_four_ranks, on_two_ranks

STEPS = 4


@pytest.fixture(scope="module", autouse=True)
def _fresh_worlds(two_ranks, four_ranks):
    """DTensor keeps what it has found for a mesh, with the names of its groups, which are the same in fresh worlds."""
    for ranks in (two_ranks, four_ranks):
        ranks.run(end_world)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, h):
        return h + self.down(self.up(self.norm(h)).relu())


class Net(nn.Module):
    """Goes through one of three blocks, of which nobody ever takes the last."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 5)

    def forward(self, tokens, branch):
        return self.head(self.blocks[branch](self.embedding(tokens)))


def parallelized(net, mesh):
    """`net`, with gradients whose placements differ from their parameters': of the embedding and of the norms."""
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(net, mesh, plan)


def mesh_of(data_parallel):
    ranks = dist.get_world_size()
    return init_device_mesh("cpu", (data_parallel, ranks // data_parallel), mesh_dim_names=("dp", "tp"))


def adam(net):
    return torch.optim.AdamW(net.parameters(), lr=0.05)


def keep(bucket, group):
    pass


def loss(model, replica, step):
    """Of one data-parallel rank: every rank on another branch at every step."""
    tokens = torch.randint(8, (2, 4), generator=torch.Generator().manual_seed(10 * step + replica))
    return model(tokens, (replica + step) % 2).pow(2).mean()


def train(model, optimizer, replicas, steps):
    for step in steps:
        optimizer.zero_grad()
        for replica in replicas:
            (loss(model, replica, step) / len(replicas)).backward()
        optimizer.step()


def assert_equal_to_one_process(net, twin):
    for (name, parameter), same in zip(net.named_parameters(), twin.parameters(), strict=True):
        assert (parameter.grad is None) == (same.grad is None), name
        torch.testing.assert_close(parameter.full_tensor(), same, rtol=1e-4, atol=1e-6)
        if same.grad is not None:
            assert parameter.grad.placements == parameter.placements, name
            torch.testing.assert_close(parameter.grad.full_tensor(), same.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": False}, {"bucket_cap_mb": 1e-6}], ids=["views", "copied", "small"]
)
@on_four_ranks
def test_weights_are_those_of_one_process(options):
    mesh = mesh_of(2)
    twin = seeded(Net)
    net = parallelized(copy.deepcopy(twin), mesh["tp"])
    if mesh.get_local_rank("dp"):
        net.head.bias.data.fill_(9)  # is overwritten by the first data-parallel rank's
    model = DistributedDataParallel(net, device_mesh=mesh["dp"], **options)
    train(model, adam(model), [mesh.get_local_rank("dp")], range(STEPS))
    train(twin, adam(twin), range(2), range(STEPS))
    assert_equal_to_one_process(net, twin)
    assert net.blocks[2].up.weight.grad is None
    present = [p.to_local() for p in net.parameters() if p.grad is not None]
    assert sum(bucket.nbytes for bucket in model.trace().buckets) == sum(p.nbytes for p in present)
    model.check_in_sync()


@on_four_ranks
def test_accumulation_a_second_loss_and_a_graph_that_is_kept():
    mesh = mesh_of(2)
    replica = mesh.get_local_rank("dp")
    twin = seeded(Net)
    net = parallelized(copy.deepcopy(twin), mesh["tp"])
    model = DistributedDataParallel(net, process_group=mesh["dp"].get_group())
    with model.no_sync():
        loss(model, replica, 0).backward()
    loss(model, replica, 1).backward()
    # DTensors of torch 2.10 raise where a graph of the backward is made.
    loss(model, replica, 2).backward(create_graph=torch.__version__ >= (2, 11), retain_graph=True)
    for one in range(2):
        for step in range(3):
            (loss(twin, one, step) / 2).backward()
    assert_equal_to_one_process(net, twin)


@on_four_ranks
def test_after_a_failed_step_gradients_are_what_this_rank_had():
    mesh = mesh_of(2)
    replica = mesh.get_local_rank("dp")
    net = parallelized(seeded(Net), mesh["tp"])
    alone = copy.deepcopy(net)

    def fails(bucket, group):
        raise ArithmeticError("no reduction today")

    model = DistributedDataParallel(net, device_mesh=mesh["dp"], reduce_function=fails)
    with pytest.raises(ArithmeticError):
        loss(model, replica, 0).backward()
    loss(alone, replica, 0).backward()
    for parameter, same in zip(net.parameters(), alone.parameters(), strict=True):
        assert (parameter.grad is None) == (same.grad is None)
        if same.grad is not None:
            expected = same.grad.redistribute(placements=same.placements)
            assert parameter.grad.placements == parameter.placements
            assert torch.equal(parameter.grad.to_local(), expected.to_local())


@on_two_ranks
def test_a_failed_step_calls_no_hooks_of_the_gradients_that_arrive_after_the_failure():
    """With tensor parallelism the backward goes on to its end; optimizers in hooks would step with local gradients."""
    mesh, calls, rank = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")), [], dist.get_rank()
    net = seeded(nn.Sequential, *(nn.Linear(256, 256, bias=False) for _ in range(4)))
    for layer in net:
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, mesh["tp"], [Replicate()]))
        layer.weight.register_post_accumulate_grad_hook(calls.append)
    model = DistributedDataParallel(net, device_mesh=mesh["dp"], bucket_cap_mb=1e-6)

    def fail(_):
        time.sleep(0.2)
        raise ArithmeticError("this rank alone")

    def step():
        model(distribute_tensor(torch.ones(1, 256), mesh["tp"], [Replicate()])).to_local().sum().backward()

    for _ in range(2):
        step()
    calls.clear()
    model.zero_grad()
    dist.barrier()
    slow = lambda _: time.sleep(0.5)  # noqa: E731
    handles = [net[k].weight.register_hook(fail if rank and k == 2 else slow) for k in range(3)]
    with pytest.raises(ArithmeticError if rank else PeerAbortedError):
        step()
    assert not calls
    for handle in handles:
        handle.remove()
    model.zero_grad()
    step()
    assert len(calls) == 4


@on_four_ranks
def test_checkpoints(tmp_path):
    mesh = mesh_of(2)
    replica = mesh.get_local_rank("dp")
    net = parallelized(seeded(Net), mesh["tp"])
    model = DistributedDataParallel(net, device_mesh=mesh["dp"])
    optimizer = adam(model)
    train(model, optimizer, [replica], range(2))
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=tmp_path)
    whole, _ = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        seeded(Net).load_state_dict(whole)

    fresh = parallelized(Net(), mesh["tp"])
    other = DistributedDataParallel(fresh, device_mesh=mesh["dp"])
    others = adam(other)
    train(other, others, [replica], range(2))  # has state of its own for what the checkpoint has
    loaded = dict(zip(("model", "optimizer"), get_state_dict(other, others), strict=True))
    dcp.load(loaded, checkpoint_id=tmp_path)
    set_state_dict(
        other,
        others,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
        options=StateDictOptions(strict=False),
    )
    for each, its in ((model, optimizer), (other, others)):
        train(each, its, [replica], range(2, 4))
    for parameter, same in zip(net.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(parameter.to_local(), same.to_local())


@on_four_ranks
def test_a_checkpointer_saves_the_parts_of_each_replica_if_they_differ(tmp_path):
    mesh = mesh_of(2)
    replica = mesh.get_local_rank("dp")

    def training():
        net = parallelized(seeded(Net), mesh["tp"])
        model = DistributedDataParallel(net, device_mesh=mesh["dp"])
        model.train_apart()
        optimizer = adam(model)
        return net, model, optimizer, Checkpointer(tmp_path, {"model": model, "optimizer": optimizer})

    net, model, optimizer, checkpointer = training()
    train(model, optimizer, [replica], range(1))  # each replica has state for another branch
    checkpointer.save(1)
    other = parallelized(seeded(Net), mesh_of(1)["tp"])
    Checkpointer(tmp_path, {"model": other, "optimizer": adam(other)}).load()
    for parameter, loaded in zip(net.parameters(), other.parameters(), strict=True):
        first, *_, last = torch.tensor(of_all_ranks(parameter.full_tensor().tolist()))
        whole = loaded.full_tensor()
        assert ((whole == first) | (whole == last)).all()
    resumed, *rest, checkpointer = training()
    checkpointer.load()
    for each, its in ((model, optimizer), rest):
        train(each, its, [replica], range(1, 4))
    for parameter, same in zip(net.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(parameter.to_local(), same.to_local())


@on_four_ranks
def test_a_compressor_begins_anew_where_as_many_ranks_load_on_another_mesh(tmp_path):
    states = []
    for replicas in (2, 4):
        mesh = mesh_of(replicas)
        model = DistributedDataParallel(parallelized(seeded(Net), mesh["tp"]), device_mesh=mesh["dp"])
        model.register_comm_hook(ErrorFeedback(TopK(0.1, min_numel=4)))
        optimizer = adam(model)
        checkpointer = Checkpointer(tmp_path, {"model": model, "optimizer": optimizer})
        if replicas == 4:
            checkpointer.load()
            states.append(model.comm_state_dict())
        train(model, optimizer, [mesh.get_local_rank("dp")], range(2))
        states.append(model.comm_state_dict())
        checkpointer.save(2)
    assert [bool(state["parameters"]) for state in states] == [True, False, True]
    assert [state["steps"] for state in states] == [2, 0, 2]


@pytest.mark.parametrize("replicas", [2, 4])
@on_four_ranks
def test_a_checkpointer_refuses_outer_steps_over_dtensors(tmp_path, replicas):
    mesh = mesh_of(replicas)
    model = DistributedDataParallel(parallelized(seeded(Net), mesh["tp"]), device_mesh=mesh["dp"])
    optimizer = adam(model)
    parts = {"model": model, "optimizer": optimizer, "outer": LocalSGD(model, optimizer, every=2)}
    with pytest.raises(ValueError, match="'outer' averages DTensors"):
        Checkpointer(tmp_path, parts)


@on_four_ranks
def test_placements_that_differ_from_replica_to_replica_are_named():
    mesh = mesh_of(2)
    net = nn.Sequential(nn.Linear(4, 4))
    plan = ColwiseParallel() if mesh.get_local_rank("dp") else RowwiseParallel()
    with pytest.raises(Exception, match=r"'0.weight'.*Shard\(dim=0\)"):
        DistributedDataParallel(parallelize_module(net, mesh["tp"], {"0": plan}), device_mesh=mesh["dp"])


@on_two_ranks
def test_every_rank_knows_whether_a_gradient_is_zero():
    mesh = mesh_of(1)["tp"]
    assert not has_nonzero([distribute_tensor(torch.zeros(4), mesh, [Shard(0)])])
    assert has_nonzero([distribute_tensor(torch.tensor([0.0, 1.0, 0.0, 0.0]), mesh, [Shard(0)])])
    large = torch.cat([torch.zeros(1, 8192), torch.ones(1, 8192)])  # as of a unit that is dead on one rank
    small = torch.zeros(4)
    assert has_nonzero([distribute_tensor(one, mesh, [Shard(0)]) for one in (large, small)])
    assert not has_nonzero([distribute_tensor(torch.zeros_like(one), mesh, [Shard(0)]) for one in (large, small)])


@on_four_ranks
def test_ranks_of_a_mesh_that_have_not_failed_get_no_message_of_those_that_have():
    mesh = mesh_of(2)
    rank, replica = dist.get_rank(), mesh.get_local_rank("dp")
    net = parallelized(seeded(Net), mesh["tp"])

    def reduce(bucket, group):
        if is_bad:
            raise ArithmeticError("planned")
        return average(bucket, group)

    model = DistributedDataParallel(net, device_mesh=mesh["dp"], reduce_function=reduce)
    for step in range(4):
        is_bad = step in (1, 2) and rank == 2
        has_failed = torch.zeros(1)
        net.zero_grad(set_to_none=step != 2)
        try:
            weigh(loss(model, replica, step), 1 + replica).backward()
        except (ArithmeticError, PeerAbortedError):
            has_failed.fill_(1)
        dist.all_reduce(has_failed, group=mesh["tp"].get_group())
        assert has_failed.item() == (step in (1, 2))


@on_two_ranks
def test_what_cannot_work_says_so():
    mesh = mesh_of(1)
    net = parallelized(Net(), mesh["tp"])
    with pytest.raises(ValueError, match=r"'embedding.weight' is a DTensor over ranks \[0, 1\].*=mesh\['dp'\]"):
        DistributedDataParallel(net)
    with pytest.raises(ValueError, match=r"drops a step on ranks .*'embedding.weight' is a DTensor over"):
        DistributedDataParallel(net, device_mesh=mesh["dp"], check_for_nan_in_grad="skip")
    model = DistributedDataParallel(net, device_mesh=mesh["dp"])
    with pytest.raises(ValueError, match=r"'embedding.weight' is a DTensor, which DistributedOptimizer does not take"):
        DistributedOptimizer(adam(model), model)
    with pytest.raises(ValueError, match=r"'embedding.weight' is a DTensor, which ppe_ddp.megatron does not take"):
        MegatronDDP(None, DistributedDataParallelConfig(), net)
    sharded = fully_shard(nn.Linear(4, 4), mesh=mesh["tp"])
    with pytest.raises(ValueError, match=r"fully_shard\(\)"):
        DistributedDataParallel(sharded, device_mesh=mesh["dp"])
    net.head.weight.grad = net.head.weight.detach().redistribute(placements=[Replicate()])
    model = DistributedDataParallel(net, process_group=mesh["dp"].get_group(), reduce_function=keep)
    with pytest.raises(ValueError, match=r"the gradient of parameter 'head.weight' has .*Replicate.*Shard"):
        model.finish_grad_sync()


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)

    def forward(self, x, y):
        return self.one(x).sum() + self.other(y).sum()


@pytest.mark.parametrize("steps", [True, False])
@on_two_ranks
def test_what_a_compressor_keeps_is_that_of_the_optimizer_that_steps(steps):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    module = parallelize_module(Towers(), mesh["tp"], {"one": ColwiseParallel(), "other": ColwiseParallel()})
    wrapper = DistributedDataParallel(module, device_mesh=mesh["dp"])
    wrapper.register_comm_hook(ErrorFeedback(TopK(0.25, min_numel=1)))
    optimizers = [torch.optim.SGD(own.parameters(), lr=0.1) for own in (module.one, module.other)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(wrapper(torch.full((1, 4), torch.inf), torch.tensor([[8.0, 4.0, 0.0, 0.0]]))).backward()
    for optimizer in optimizers if steps else optimizers[:1]:
        scaler.step(optimizer)
    wrapper.zero_grad()
    wrapper(torch.ones(1, 4), torch.zeros(1, 4)).backward()
    assert module.other.weight.grad.to_local().tolist() == [[0.0, 4.0 if steps else 0.0, 0.0, 0.0]]


@on_four_ranks
def test_copies_stay_equal_with_a_compressor_if_one_rank_has_inf():
    mesh = mesh_of(2)
    module = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)))
    module = parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    wrapper = DistributedDataParallel(module, device_mesh=mesh["dp"])
    wrapper.register_comm_hook(ErrorFeedback(TopK(0.25, min_numel=1)))
    optimizer, scaler = torch.optim.SGD(module.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0)
    copy_of, rests = module[2].bias, []
    for step in range(6):
        optimizer.zero_grad()
        rests.append({name: one["residual"].clone() for name, one in wrapper.comm_state_dict()["parameters"].items()})
        generator = torch.Generator().manual_seed(2 * step + mesh.get_local_rank("dp"))
        loss = wrapper(torch.randn(5, 6, generator=generator)).pow(2).mean()
        before, factor = copy_of.to_local().detach().clone(), torch.inf if step == 2 and dist.get_rank() == 0 else 1.0
        hook = module[0].weight.register_hook(lambda gradient, factor=factor: gradient * factor)
        scaler.scale(loss).backward()
        hook.remove()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(copy_of.to_local(), before) == (step == 2)
    copies = [torch.empty_like(before) for _ in range(4)]
    dist.all_gather(copies, copy_of.to_local().detach())
    assert all(torch.equal(copies[0], other) for other in copies[1:])
    if dist.get_rank() == 0:  # has the inf; its own parts are as before the step
        assert all(torch.equal(rests[3][name], rests[2][name]) for name in ("0.weight", "0.bias", "2.weight"))
