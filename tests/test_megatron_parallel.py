"""Data parallelism beside tensor, sequence, pipeline and expert parallelism: the gradients of one process."""

import itertools
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

from library_warnings import library_warnings
from parallel_layers import BATCH, LENGTH, Split, Toy, loss_of, reference_gradients, words
from ppe_ddp import (
    Checkpointer,
    CheckpointError,
    DisagreementError,
    DistributedOptimizer,
    NonFiniteGradientError,
)
from ppe_ddp.megatron import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ParallelGroups,
    finalize_model_grads,
)
from ppe_ddp.optim import clip_grad_norm_
from rank_tests import on_four_ranks, on_two_ranks

MICROS = 2
KINDS = ["tensor", "sequence", "pipeline", "expert"]
DIMENSION = {"tensor": "tp", "sequence": "tp", "pipeline": "pp", "expert": "ep"}
each_kind = pytest.mark.parametrize("kind", KINDS)


class PerToken:
    calculate_per_token_loss = True


def parallel_groups(kind):
    """The groups of two ranks that split the model by `kind`, and of as many such pairs as there are."""
    pairs = dist.get_world_size() // 2
    name = DIMENSION[kind]
    shape, names = ((2,), (name,)) if pairs == 1 else ((pairs, 2), ("dp", name))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    groups = ParallelGroups.from_mesh(mesh)
    if kind == "pipeline":  # both ends add positions
        groups = ParallelGroups(**{**vars(groups), "position_embedding": groups.embedding})
    return groups, mesh.get_group(name)


def split_of(kind, group):
    rank = dist.get_rank(group)
    return {
        "tensor": lambda: Split(tensor=group),
        "sequence": lambda: Split(tensor=group, sequence=True),
        "pipeline": lambda: Split(stage=rank, stages=2),
        "expert": lambda: Split(experts=group),
    }[kind]()


def micro_batch(model, pipeline, step, rank, micro, reduction):
    """Forward and backward of one micro-batch, through both stages if there are two."""
    x, y = words(step, rank, micro)
    split = model.module.split
    if pipeline is None:
        loss_of(model(x), y, reduction=reduction).backward()
    elif split.is_first:
        activations = model(x)
        dist.send(activations.detach(), group=pipeline, group_dst=1)
        gradient = torch.empty_like(activations)
        dist.recv(gradient, group=pipeline, group_src=1)
        activations.backward(gradient)
    else:
        activations = torch.empty(LENGTH, BATCH, 8, dtype=torch.float64)
        dist.recv(activations, group=pipeline, group_src=0)
        activations.requires_grad_()
        loss_of(model(activations), y, reduction=reduction).backward()
        dist.send(activations.grad, group=pipeline, group_dst=0)


def iteration(model, groups, step, *, reduction="mean", num_tokens=None, clear=()):
    rank = dist.get_rank(groups.data)
    model.zero_grad_buffer(zero_buffer=not clear)
    for optimizer in clear:
        optimizer.zero_grad()
    for micro in range(MICROS - 1):
        with model.no_sync():
            micro_batch(model, groups.pipeline, step, rank, micro, reduction)
    micro_batch(model, groups.pipeline, step, rank, MICROS - 1, reduction)
    finalize_model_grads([model], num_tokens)


def hold(model, expected, *, sharded):
    """What this rank has of the gradients is what it should be."""
    split = model.module.split
    if not sharded:
        for name, parameter in model.module.named_parameters():
            want = expected[name]
            want = torch.zeros_like(parameter) if want is None else split.part(name, want)
            torch.testing.assert_close(parameter.main_grad, want, msg=lambda text, name=name: f"{name}: {text}")
        return
    models = [model.sharded()] + ([model.sharded(experts=True)] if model.expert_parallel_buffers else [])
    for part in models:
        for shard, gradient in zip(part.shards, part.gradients(), strict=True):
            want = expected[shard.name]
            assert (gradient is None) == (want is None), shard.name
            if want is not None:
                want = split.part(shard.name, want).flatten()[shard.start : shard.stop]
                torch.testing.assert_close(gradient, want, msg=lambda text, name=shard.name: f"{name}: {text}")


BOTH = list(itertools.product((False, True), (False, True)))


def compare(kind, variants=BOTH):
    groups, group = parallel_groups(kind)
    ranks = dist.get_world_size(groups.data)
    for overlap, sharded in variants:
        config = DistributedDataParallelConfig(
            overlap_grad_reduce=overlap, use_distributed_optimizer=sharded, bucket_size=150
        )
        model = DistributedDataParallel(None, config, Toy(split_of(kind, group)), groups=groups)
        for step in range(2):
            iteration(model, groups, step)
            hold(model, reference_gradients(step, ranks, MICROS), sharded=sharded)


@each_kind
@on_two_ranks
def test_alone(kind):
    compare(kind)


@each_kind
@on_four_ranks
def test_times_data(kind):
    compare(kind)


@each_kind
@on_four_ranks
def test_gradients_per_token(kind):
    groups, group = parallel_groups(kind)
    ranks = dist.get_world_size(groups.data)
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=kind == "expert")
    model = DistributedDataParallel(PerToken(), config, Toy(split_of(kind, group)), groups=groups)
    counted = MICROS * LENGTH * BATCH if model.module.split.is_last else 0
    iteration(model, groups, 0, reduction="sum", num_tokens=torch.tensor([float(counted)]))
    hold(model, reference_gradients(0, ranks, MICROS, reduction="sum"), sharded=kind == "expert")


# ---------------------------------------------------------------------- marks


class Marked(nn.Module):
    """A parameter with marks, whose gradient is what the forward is given; there are others before and behind it."""

    share_embeddings_and_output_weights = False

    def __init__(self, marks=(), *, before=0, name="of_interest"):
        super().__init__()
        self.before = nn.Linear(3, 1 + before) if before else None
        self.register_parameter(name, nn.Parameter(torch.zeros(12)))
        self.behind = nn.Linear(2, 2)
        self.shared_by_stages = [getattr(self, name)]
        for mark in marks:
            setattr(self.shared_by_stages[0], mark, True)

    def shared_embedding_or_output_weight(self):
        return self.shared_by_stages[0]

    def forward(self, value):
        return (self.shared_by_stages[0] * value).sum()


def gradient_after(values, config, groups, *, sharded=False, modules=None):
    """What finalizing makes of the gradients `values`, one for each chunk."""
    modules = modules or [Marked() for _ in values]
    options = {"use_distributed_optimizer": sharded, "overlap_grad_reduce": True, "bucket_size": 10}
    chunks = [
        DistributedDataParallel(config, DistributedDataParallelConfig(**options), module, groups=groups)
        for module in modules
    ]
    for chunk, value in zip(chunks, values, strict=True):
        chunk.zero_grad_buffer()
        chunk(float(value)).backward()
    finalize_model_grads(chunks)
    found = []
    for chunk in chunks:
        main = chunk.module.shared_by_stages[0].main_grad
        if sharded:
            part = chunk.sharded()
            k = next(k for k, s in enumerate(part.shards) if s.parameter is chunk.module.shared_by_stages[0])
            main = part.gradients()[k]
        found += [*set(main.tolist())]
    return found


SEQUENCE = ["sequence_parallel"]
AVERAGE = ["average_gradients_across_tp_domain"]


MARKS = [
    ("tensor", SEQUENCE, "scale", None, 6.0),
    ("tensor", SEQUENCE, "scale", SimpleNamespace(sequence_parallel=False), None),
    ("tensor", AVERAGE, "scale", None, 3.0),
    ("tensor", SEQUENCE + AVERAGE, "scale", None, 3.0),
    ("tensor", [], "q_layernorm", None, None),
    ("tensor", [], "q_layernorm", SimpleNamespace(qk_layernorm=True), 6.0),
    ("tensor", SEQUENCE, "k_layernorm", SimpleNamespace(qk_layernorm=True, sequence_parallel=True), 6.0),
    ("pipeline", ["pipeline_parallel"], "scale", None, 6.0),
    ("embedding", [], "scale", None, None),
    ("embedding", [], "scale", SimpleNamespace(mtp_num_layers=1), 6.0),
]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("dimension", "marks", "name", "config", "expected"), MARKS)
@on_two_ranks
def test_marks_of_megatrons(dimension, marks, name, config, expected, sharded):
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    groups = ParallelGroups(data=alone, **{dimension: dist.group.WORLD})
    own = 2.0 + 2 * dist.get_rank()
    module = Marked(marks, name=name)
    assert gradient_after([own], config, groups, sharded=sharded, modules=[module]) == [expected or own]


@pytest.mark.parametrize("sharded", [False, True])
@on_four_ranks
def test_copies_in_all_chunks_of_all_stages_are_added(sharded):
    """Though the stages have other parameters beside them, which shift what is sharded."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    groups, stage = ParallelGroups.from_mesh(mesh), mesh.get_local_rank("pp")
    modules = [Marked(["pipeline_parallel"], before=stage * chunk) for chunk in range(2)]
    values = [10.0**stage, 100 * 10.0**stage]
    assert gradient_after(values, None, groups, sharded=sharded, modules=modules) == [1111.0] * 2


@on_two_ranks
def test_what_the_ranks_sum_must_be_the_same():
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    groups = ParallelGroups(data=alone, tensor=dist.group.WORLD)
    marks = SEQUENCE if dist.get_rank() else AVERAGE
    with pytest.raises(DisagreementError, match=r"of_interest: shape \(12,\), torch.float32, times 0.5"):
        gradient_after([1.0], None, groups, modules=[Marked(marks)])
    model = DistributedDataParallel(PerToken(), DistributedDataParallelConfig(), Marked([]), groups=groups)
    model(1.0).backward()
    with pytest.raises(DisagreementError, match=r"rank 0 has \[\], and rank 1 has \['tensor: num_tokens'\]"):
        finalize_model_grads([model], torch.ones(1) if dist.get_rank() else None)
    assert gradient_after([1.0], None, groups, modules=[Marked(SEQUENCE)]) == [2.0]


@pytest.mark.parametrize(
    "config",
    [
        SimpleNamespace(gtp_weight_remat_size=2),
        SimpleNamespace(flextron=True),
        SimpleNamespace(moe_router_load_balancing_type="quantile_balancing"),
    ],
)
@on_two_ranks
def test_what_is_not_built_is_refused(config):
    (name,) = vars(config)
    with pytest.raises(ValueError, match=f"does not support {name}="):
        gradient_after([1.0], config, ParallelGroups())


@pytest.mark.parametrize("of_wrapper", [True, False])
@on_two_ranks
def test_megatrons_collection_of_groups_is_taken_in_finalizing(of_wrapper):
    """Also if the wrapper has none, or its are others of the same ranks."""
    alone, both = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()], dist.new_group([0, 1])
    given = ParallelGroups(data=alone, tensor=dist.group.WORLD) if of_wrapper else ParallelGroups(data=alone)
    model = DistributedDataParallel(None, DistributedDataParallelConfig(), Marked(SEQUENCE), groups=given)
    own = model.gradient_buffers.model_parallel
    for _ in range(2):
        model.zero_grad_buffer()
        model(2.0 + 2 * dist.get_rank()).backward()
        finalize_model_grads([model], None, SimpleNamespace(dp_cp=alone, tp=both, pp=alone, embd=None))
        assert model.module.of_interest.main_grad.unique().tolist() == [6.0]
    assert own is model.gradient_buffers.model_parallel
    with pytest.raises(ValueError, match="not both"):
        finalize_model_grads([model], None, SimpleNamespace(), groups=given)


# ---------------------------------------------------------------------- routers


class Router(Marked):
    def __init__(self, tokens, *, frozen=False):
        super().__init__()
        self.frozen_expert_bias = frozen
        self.register_buffer("expert_bias", torch.ones(4))
        self.register_buffer("local_tokens_per_expert", torch.tensor(tokens))


@pytest.mark.parametrize("wraps", [False, True], ids=["plain", "in wrappers"])
@on_four_ranks
def test_the_bias_of_routers_follows_the_tokens_of_all_ranks(wraps):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    config = SimpleNamespace(moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.25)
    mine = [0.0] * 4
    mine[dist.get_rank()] = 4.0 * dist.get_rank()  # 0, 4, 8 and 12 together; 6 on average
    routers = [Router(mine), Router(mine, frozen=True), Router(mine).eval()]
    gradient_after(
        [1.0] * 3,
        config,
        ParallelGroups.from_mesh(mesh),
        modules=[*map(checkpoint_wrapper, routers)] if wraps else routers,
    )
    assert routers[0].expert_bias.tolist() == [1.25, 1.25, 0.75, 0.75]
    for router in routers:
        assert not router.local_tokens_per_expert.any()
    assert [*routers[1].expert_bias.tolist(), *routers[2].expert_bias.tolist()] == [1.0] * 8


class Expert(nn.Module):
    """An expert beside a layer that all ranks have."""

    def __init__(self):
        super().__init__()
        self.dense, self.expert = nn.Linear(4, 4), nn.Linear(4, 4)
        for parameter in self.expert.parameters():
            parameter.allreduce = False

    def forward(self, x, *, has_tokens):
        return self.expert(self.dense(x)) if has_tokens else self.dense(x)


@on_two_ranks
def test_a_scaler_checks_experts_that_have_seen_no_token():
    groups = ParallelGroups.from_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(None, config, Expert(), groups=groups)
    optimizers = [
        DistributedOptimizer(torch.optim.AdamW(part.parameters(), 0.1), shards)
        for part, shards in ((model.module.dense, model.sharded()), (model.module.expert, model.sharded(experts=True)))
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        before = [parameter.detach().clone() for parameter in model.module.expert.parameters()]
        has_tokens = step != 1 or dist.get_rank() == 0
        is_infinite = step == 2 and dist.get_rank() == 0  # on one rank, and no other takes the step
        model.zero_grad_buffer()
        assert all(optimizer.param_groups for optimizer in optimizers)  # which schedulers look at
        loss = model(torch.ones(2, 4), has_tokens=has_tokens).sum() * (float("inf") if is_infinite else 1.0)
        scaler.scale(loss).backward()
        finalize_model_grads([model])
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        norm = clip_grad_norm_(optimizers, 1.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert norm.isfinite() == (step != 2)
        for was, parameter in zip(before, model.module.expert.parameters(), strict=True):
            assert torch.equal(was, parameter) == (not has_tokens or step == 2)


@on_two_ranks
def test_nan_in_an_expert_is_named_on_its_own_rank():
    groups = ParallelGroups.from_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    config = DistributedDataParallelConfig(check_for_nan_in_grad=True)
    model, rank = DistributedDataParallel(None, config, Expert(), groups=groups), dist.get_rank()
    if rank == 1:
        model.module.expert.bias.register_hook(lambda gradient: gradient * float("nan"))
    model(torch.ones(2, 4), has_tokens=True).sum().backward()
    where = r"'expert\.bias'" if rank == 1 else "an expert"
    with pytest.raises(NonFiniteGradientError, match=rf"rank 1 in {where} \(ranks of the 2 that average them"):
        finalize_model_grads([model])


@on_two_ranks
def test_chunks_without_a_pipeline_have_no_copies_of_one_another():
    groups = ParallelGroups.from_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    chunks = [DistributedDataParallel(None, config, nn.Linear(3, 1, bias=False), groups=groups) for _ in range(2)]
    optimizers = []
    for chunk in chunks:
        chunk.module.weight.pipeline_parallel = True
        optimizers.append(DistributedOptimizer(torch.optim.SGD(chunk.module.parameters(), 0.1), chunk))
        chunk(torch.full((1, 3), 10.0 ** len(optimizers))).sum().backward()
    finalize_model_grads(chunks)
    assert clip_grad_norm_(optimizers, 1e9).item() == pytest.approx((3 * 10**2 + 3 * 100**2) ** 0.5)


@on_four_ranks
def test_the_dimensions_of_a_mesh_may_come_in_any_order():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
    groups = ParallelGroups.from_mesh(mesh)
    assert dist.get_process_group_ranks(groups.data) == [0, 1, 2, 3]
    assert dist.get_process_group_ranks(groups.expert) == mesh["dp"].mesh.tolist()


@on_four_ranks
def test_groups_of_slices_of_a_mesh_do_not_meet():
    """As of two models, each on some of the ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "pp"))
    for _ in range(2):
        groups = ParallelGroups.from_mesh(mesh["pp"])
        numbers = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(numbers, group=groups.embedding)
        assert dist.get_process_group_ranks(groups.embedding) == mesh["pp"].mesh.tolist()
        assert numbers.item() == mesh["pp"].mesh.sum().item()


@on_two_ranks
def test_ranks_that_average_have_the_same_part_of_the_model():
    everyone, alone = dist.group.WORLD, [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    others = rf"rank {dist.get_rank()}: ranks \[{1 - dist.get_rank()}\] are in groups"
    for given, text in (
        ({"tensor": everyone}, r"\.data \(data=None: all ranks\), .* in groups\.tensor"),
        ({"data": everyone, "pipeline": everyone}, r"\.data .* in groups\.pipeline"),
        ({"data": alone, "tensor": everyone, "expert": everyone}, r"\.expert .* in groups\.tensor.* expert_tensor"),
    ):
        with pytest.raises(ValueError, match=others + text):
            DistributedDataParallel(None, DistributedDataParallelConfig(), Expert(), groups=ParallelGroups(**given))
    groups = ParallelGroups(data=alone, tensor=everyone, expert=everyone, expert_tensor=alone)
    DistributedDataParallel(None, DistributedDataParallelConfig(), Expert(), groups=groups)


@on_two_ranks
def test_a_wrapper_that_is_not_told_how_its_model_is_split_warns():
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    for is_marked in (True, False):
        module = nn.Linear(4, 2)
        module.weight.tensor_model_parallel = is_marked
        for given in ({"data_parallel_group": alone}, {"groups": ParallelGroups(alone, tensor=dist.group.WORLD)}, {}):
            with library_warnings() as texts:
                DistributedDataParallel(None, DistributedDataParallelConfig(), module, **given)
            expected = f"the wrapper of ranks [{dist.get_rank()}] knows of no other group"
            assert [expected in text for text in texts] == [True] * (is_marked and "data_parallel_group" in given)


@on_two_ranks
def test_a_checkpointer_saves_the_parts_of_a_split_model_apart(tmp_path):
    """One for all ranks would save one tensor of each name."""
    groups = ParallelGroups.from_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    model = DistributedDataParallel(None, DistributedDataParallelConfig(), nn.Linear(4, 2), groups=groups)
    with pytest.raises(ValueError, match=r"'model' is split over ranks.*process_group=groups\.data"):
        Checkpointer(tmp_path, {"model": model})
    with pytest.raises(ValueError, match=r"'chunks\.0' is split over ranks"):
        Checkpointer(tmp_path, {"chunks": nn.ModuleList([model])})
    checkpointer = Checkpointer(tmp_path / f"{dist.get_rank()}", {"model": model}, process_group=groups.data)
    before = model.module.weight.detach().clone()
    checkpointer.save(1)
    with torch.no_grad():
        model.module.weight.zero_()
    assert checkpointer.load().step == 1
    assert torch.equal(model.module.weight, before)


@on_two_ranks
def test_all_parts_of_a_split_model_go_on_from_one_step(tmp_path):
    """Of a job that is killed as it saves, some parts have a later checkpoint than others."""
    rank = dist.get_rank()
    groups = ParallelGroups.from_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(None, config, nn.Linear(4, 2), groups=groups)
    optimizer = DistributedOptimizer(torch.optim.SGD, model, lr=0.1)

    def checkpointer(case, **options):
        own, parts = tmp_path / case / f"{rank}", {"optimizer": optimizer, "model": model}
        return Checkpointer(own, parts, process_group=groups.data, **options)

    def saved(case, *steps, lost=(), **options):
        """A Checkpointer behind these `steps`; this rank was killed before it had saved those that are `lost`."""
        for step in steps:
            with torch.no_grad():
                model.module.weight.fill_(step)
            checkpointer(case, **options).save(step)
        for step in lost:
            shutil.rmtree(next((tmp_path / case / f"{rank}").glob(f"*-step-{step}")))
        dist.barrier()
        return checkpointer(case)

    later = saved("killed", 1, 2, 3, 4, lost=[3, 4] * rank)  # the last three are kept
    assert later.load().step == 2
    assert model.module.weight.unique().tolist() == [2.0]
    with pytest.raises(CheckpointError, match="no checkpoint of step 4"):  # on both
        later.load(4)
    later.save(3)
    assert len(later.steps()) == 2, "those of which the other rank has none are removed"
    last = saved("killed", 3, lost=[] if rank else [3])
    assert last.load().step == 3
    assert model.module.weight.unique().tolist() == [2.0], "another checkpoint of step 3"
    assert saved("killed at the first", 1, lost=[1] * rank).load() is None
    with pytest.raises(CheckpointError, match="is there of all parts of the model"):
        saved("all lost", 1, 2, lost=[1, 2] * rank).load()
    with pytest.raises(CheckpointError, match="with keep=1 they are lost"):
        saved("kept one", 1, 2, keep=1 + rank, lost=[2] * rank).load()
    damaged = saved("damaged", 1, 2, lost=[] if rank else [2])
    if rank == 0:
        next((tmp_path / "damaged" / "0").glob("*-step-1/*.distcp")).write_bytes(b"")
    with pytest.raises(CheckpointError, match="damaged"):
        damaged.load()
    last = checkpointer("killed")
    if rank == 0:
        last._folder.next_number = lambda: (_ for _ in ()).throw(OSError("the disk is gone"))
    with pytest.raises(CheckpointError, match="OSError: the disk is gone"):
        last.save(9)  # on both, before either has begun
    alone = Checkpointer(tmp_path / "killed" / f"{rank}", {"optimizer": optimizer}, process_group=groups.data)
    assert alone.load().step == 3


@pytest.mark.parametrize("overlap", [True, False])
@on_two_ranks
def test_a_rank_without_a_backward_finalizes_chunks_in_whatever_order_the_others_go_through_them(overlap):
    config = DistributedDataParallelConfig(overlap_grad_reduce=overlap)
    chunks = [DistributedDataParallel(None, config, Marked()) for _ in range(2)]
    for step in range(4):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        has_none = step == 1 and dist.get_rank() == 1
        for chunk in [] if has_none else reversed(chunks):
            chunk(1.0).backward()
        finalize_model_grads(chunks)
        for chunk in chunks:
            assert chunk.module.of_interest.main_grad.unique().tolist() == [0.5 if step == 1 else 1.0]


@on_two_ranks
def test_experts_that_all_ranks_have_are_saved_as_other_parameters(tmp_path):
    groups = ParallelGroups.from_mesh(init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "ep")))
    model = DistributedDataParallel(None, DistributedDataParallelConfig(), Expert(), groups=groups)
    assert Checkpointer(tmp_path, {"model": model}).save(1).exists()
