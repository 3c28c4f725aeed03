"""Data parallelism beside tensor, sequence, pipeline and expert parallelism: the gradients of one process."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from parallel_layers import BATCH, LENGTH, Split, Toy, loss_of, reference_gradients, words
from ppe_ddp.megatron import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ParallelGroups,
    finalize_model_grads,
)
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


def iteration(model, groups, step, *, reduction="mean", num_tokens=None):
    rank = dist.get_rank(groups.data)
    model.zero_grad_buffer()
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
