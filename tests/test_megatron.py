"""Megatron's interface: every attribute and method that its pages name, and both forms of the constructor."""

import copy
import dataclasses
import gc
import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

import ppe_ddp
from one_process import data, mlp, of_all_ranks, seeded
from ppe_ddp import DisagreementError, FunctionError
from ppe_ddp.engine.zero.shards import ShardedModel
from ppe_ddp.megatron import (
    DistributedDataParallel,
    DistributedDataParallelBase,
    DistributedDataParallelConfig,
    ParallelGroups,
    ParamAndGradBuffer,
    finalize_model_grads,
)
from rank_tests import on_two_ranks


def net():
    return seeded(mlp, 5, 7, 6, 3).double()


def loss(model, rank, step=0):
    return model(data(4, 5, rank=rank, step=step, dtype=torch.float64)).pow(2).sum()


def wrap(module=None, **options):
    return DistributedDataParallel(None, DistributedDataParallelConfig(**options), net() if module is None else module)


def mean_of(module, steps=(0,), ranks=None):
    twin = copy.deepcopy(module)
    count = dist.get_world_size() if ranks is None else ranks
    for rank in range(count):
        for step in steps:
            (loss(twin, rank, step) / count).backward()
    return [parameter.grad for parameter in twin.parameters()]


def mains(model):
    return [parameter.main_grad for parameter in model.module.parameters()]


def hold(model, expected):
    torch.testing.assert_close(mains(model), expected)


# ---------------------------------------------------------------------- the base class


class Plain(DistributedDataParallelBase):
    def forward(self, *inputs, **kwargs):
        return super().forward(*inputs, **kwargs)


class OwnCheckpoint(nn.Linear):
    def state_dict_for_save_checkpoint(self, prefix="", keep_vars=False):
        return {prefix + "mine": self.weight if keep_vars else self.weight.detach()}


def test_the_base_class_is_abstract_and_passes_on():
    with pytest.raises(TypeError, match="abstract"):
        DistributedDataParallelBase(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"wraps an nn\.Module, not int"):
        Plain(3)
    inner = nn.Linear(2, 3)
    base = Plain(inner)
    x = torch.ones(4, 2)
    torch.testing.assert_close(base(x), inner(x))
    assert base.module is inner
    hold_state(base, inner)


def hold_state(wrapper, inner):
    """The four methods of the public page, on `wrapper` around the linear layer `inner`."""
    assert list(wrapper.state_dict()) == ["weight", "bias"]
    assert list(wrapper.state_dict(prefix="a.")) == list(wrapper.state_dict("a.")) == ["a.weight", "a.bias"]
    assert wrapper.state_dict(keep_vars=True)["weight"] is inner.weight
    assert wrapper.state_dict("", True)["weight"] is inner.weight
    assert not wrapper.state_dict()["weight"].requires_grad
    assert wrapper.state_dict()["weight"].data_ptr() == inner.weight.data_ptr()
    assert list(wrapper.state_dict_for_save_checkpoint()) == ["weight", "bias"]
    assert wrapper.state_dict_for_save_checkpoint("b.", keep_vars=True)["b.bias"] is inner.bias
    given = {"weight": torch.full((3, 2), 2.0), "bias": torch.full((3,), 3.0)}
    before = inner.weight
    result = wrapper.load_state_dict(given)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert inner.weight is before
    assert inner.weight.eq(2).all()
    with pytest.raises(RuntimeError, match="Missing key"):
        wrapper.load_state_dict({"weight": given["weight"]}, strict=True)
    assert wrapper.load_state_dict({"weight": given["weight"], "x": before}, strict=False).missing_keys == ["bias"]
    with pytest.raises(ValueError, match="assign=True"):
        wrapper.load_state_dict(given, assign=True)


def test_a_wrapper_inside_a_module_and_torchs_functions_for_checkpoints():
    inner = nn.ModuleList([Plain(nn.Linear(2, 3)), Plain(nn.Linear(2, 3))])
    state = copy.deepcopy(inner.state_dict())
    assert list(state) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    with torch.no_grad():
        inner[1].module.weight.zero_()
    inner.load_state_dict(state)
    assert inner[1].module.weight.ne(0).all()
    base = Plain(nn.Linear(2, 3))
    found = get_model_state_dict(base)
    assert list(found) == ["weight", "bias"]
    set_model_state_dict(base, {name: torch.full_like(value, 2.0) for name, value in found.items()})
    assert base.module.weight.eq(2).all()
    base.load_state_dict({"module.weight": torch.ones(3, 2), "module.bias": torch.ones(3)})
    assert base.module.weight.eq(1).all()


def test_a_module_may_say_what_a_checkpoint_holds():
    inner = OwnCheckpoint(2, 2)
    assert list(Plain(inner).state_dict_for_save_checkpoint("p.")) == ["p.mine"]
    assert Plain(inner).state_dict_for_save_checkpoint(keep_vars=True)["mine"] is inner.weight


def test_parameters_are_named_and_ordered_as_on_the_pages():
    base = DistributedDataParallelBase
    assert list(inspect.signature(base.__init__).parameters) == ["self", "module"]
    assert list(inspect.signature(base.load_state_dict).parameters)[:3] == ["self", "state_dict", "strict"]
    assert list(inspect.signature(base.state_dict_for_save_checkpoint).parameters) == ["self", "prefix", "keep_vars"]
    assert list(inspect.signature(DistributedDataParallel.zero_grad_buffer).parameters) == ["self", "zero_buffer"]
    for name in ["broadcast_params", "finish_grad_sync", "no_sync", "forward", "start_grad_sync", "scale_gradients"]:
        assert getattr(DistributedDataParallel, name).__doc__


# ---------------------------------------------------------------------- the constructor


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
@on_two_ranks
def test_both_forms_by_position_and_by_name(overlap, sharded):
    config, group = object(), dist.group.WORLD
    new = DistributedDataParallelConfig(True, overlap, False, sharded, True)
    made = [
        DistributedDataParallel(config, net(), group, True, overlap, sharded, True, True),
        DistributedDataParallel(
            config,
            module=net(),
            data_parallel_group=group,
            accumulate_allreduce_grads_in_fp32=True,
            overlap_grad_reduce=overlap,
            use_distributed_optimizer=sharded,
            disable_bucketing=True,
            check_for_nan_in_grad=True,
        ),
        DistributedDataParallel(config, new, net(), True),
        DistributedDataParallel(
            config=config, ddp_config=new, module=net(), disable_bucketing=True, groups=ParallelGroups(data=group)
        ),
    ]
    for model in made:
        assert model.ddp_config == new
        assert model.config is config
        assert model.bucket_size is None
        loss(model, dist.get_rank()).backward()
        finalize_model_grads([model])
        if not sharded:
            hold(model, mean_of(model.module))


@on_two_ranks
def test_the_old_form_has_megatrons_defaults():
    model = DistributedDataParallel(None, net(), dist.group.WORLD, False, True, False)
    assert model.ddp_config == DistributedDataParallelConfig(overlap_grad_reduce=True)
    assert model.bucket_size == 1_000_000
    sized = DistributedDataParallel(None, net(), dist.group.WORLD, False, True, False, bucket_size=7)
    assert sized.bucket_size == 7
    assert wrap(overlap_grad_reduce=False).bucket_size is None
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    stage = ParallelGroups(data=alone, pipeline=dist.group.WORLD)
    late = DistributedDataParallel(None, DistributedDataParallelConfig(overlap_grad_reduce=True), net(), groups=stage)
    assert (late.bucket_size is None) == (dist.get_rank() == 1)


@on_two_ranks
def test_bad_arguments():
    config = DistributedDataParallelConfig()
    with pytest.raises(TypeError, match="overlap_grad_reduc"):
        DistributedDataParallelConfig(overlap_grad_reduc=True)
    with pytest.raises(TypeError, match="speed"):
        DistributedDataParallel(None, config, net(), speed=1)
    with pytest.raises(TypeError, match=r"pass groups=ParallelGroups\(data=pg_collection\.dp_cp"):
        DistributedDataParallel(None, config, net(), pg_collection=None)
    with pytest.raises(TypeError, match="use_distributed_optimizer"):
        DistributedDataParallel(None, net(), dist.group.WORLD, True, False)
    with pytest.raises(TypeError, match=r"nn\.Module, not NoneType"):
        DistributedDataParallel(None, config, None)
    with pytest.raises(TypeError, match="ddp_config"):
        DistributedDataParallel(None, ddp_config=None, module=net())
    with pytest.raises(ValueError, match="positive"):
        DistributedDataParallelConfig(bucket_size=0)
    with pytest.raises(ValueError, match="use_distributed_optimizer"):
        DistributedDataParallelConfig(overlap_param_gather=True)
    with pytest.raises(ValueError, match="not both"):
        DistributedDataParallel(None, config, net(), groups=ParallelGroups(), data_parallel_group=dist.group.WORLD)
    with pytest.raises(ValueError, match="leave one"):
        DistributedDataParallel(
            None,
            DistributedDataParallelConfig(use_distributed_optimizer=True),
            net(),
            reduce_function=ppe_ddp.overlapped(ppe_ddp.average),
        )
    expert = net()
    expert[2].bias.allreduce = False
    with pytest.raises(ValueError, match=r"'2.bias' is an expert's"):
        wrap(expert)
    with pytest.raises(ValueError, match="made with use_distributed_optimizer=True"):
        wrap().sharded()
    with pytest.raises(ValueError, match="no experts"):
        wrap(use_distributed_optimizer=True).sharded(experts=True)
    with pytest.raises(TypeError, match="copy or save the module inside"):
        copy.deepcopy(wrap())
    with pytest.raises(TypeError, match="not Linear"):
        finalize_model_grads([nn.Linear(1, 1)])


def test_all_fields_of_megatrons_config_are_known():
    defaults = {field.name: getattr(DistributedDataParallelConfig(), field.name) for field in fields()}
    assert len(defaults) > 27
    assert DistributedDataParallelConfig(**defaults) == DistributedDataParallelConfig()
    for name, value in REFUSED.items():
        with pytest.raises(ValueError, match=rf"{name}=.* is not supported, only .*: [a-z]"):
            DistributedDataParallelConfig(**{name: value})
    DistributedDataParallelConfig(param_name_patterns_for_fp32_local_accumulation=[])


def fields():
    return dataclasses.fields(DistributedDataParallelConfig)


REFUSED = {
    "num_distributed_optimizer_instances": 2,
    "check_for_large_grads": True,
    "num_buckets": 3,
    "reduce_scatter_with_fp32_accumulation": True,
    "param_name_patterns_for_fp32_local_accumulation": ("all",),
    "fp8_param_gather": True,
    "use_megatron_fsdp": True,
    "data_parallel_sharding_strategy": "optim",
    "nccl_ub": True,
    "delay_wgrad_compute": True,
}


@on_two_ranks
def test_the_config_may_be_changed_until_it_is_used():
    config = DistributedDataParallelConfig()
    config.nccl_ub = True
    with pytest.raises(ValueError, match="nccl_ub"):
        DistributedDataParallel(None, config, net())
    config.nccl_ub, config.overlap_grad_reduce = False, True
    model = DistributedDataParallel(None, config, net())
    assert model.bucket_size == 1_000_000
    with pytest.raises(AttributeError, match="setting bucket_size would change nothing"):
        config.bucket_size = 3
    other = dataclasses.replace(config, bucket_size=3)
    other.bucket_size = 4
    assert DistributedDataParallel(None, other, net()).bucket_size == 4
    config.note = "of the program"
    other = copy.deepcopy(config)
    other.bucket_size = 5
    assert other == dataclasses.replace(config, bucket_size=5)
    assert other.note == config.note


@pytest.mark.parametrize("overlap", [False, True])
@on_two_ranks
def test_start_grad_sync_waits_without_overlap(overlap):
    """And what one rank looks at in between does not make it send once more, alone."""
    model, rank = wrap(overlap_grad_reduce=overlap), dist.get_rank()
    for _ in range(2):
        model.zero_grad_buffer()
        with model.no_sync():
            loss(model, rank).backward()
        model.start_grad_sync()
        if not overlap:
            hold(model, mean_of(model.module))
        if rank == 0:
            model.scale_gradients(1.0)
        model.finish_grad_sync(force_all_reduce=True)
        hold(model, mean_of(model.module))
    model.zero_grad_buffer()
    loss(model, rank).backward()
    with pytest.raises(ValueError, match="reduce-scattered"):
        wrap(use_distributed_optimizer=True).finish_grad_sync(force_all_reduce=True)


@on_two_ranks
def test_ranks_that_differ_are_named():
    with pytest.raises(DisagreementError, match="overlap_grad_reduce"):
        wrap(overlap_grad_reduce=dist.get_rank() == 1)
    with pytest.raises(DisagreementError, match="rank 1 differs from rank 0"):
        wrap(nn.Linear(3, 3 + dist.get_rank()))


# ---------------------------------------------------------------------- gradients


@pytest.mark.parametrize("options", [{}, {"overlap_grad_reduce": True, "bucket_size": 20}])
@on_two_ranks
def test_main_grads_are_views_of_contiguous_buffers(options):
    module = net()
    module[2] = module[2].float()
    module[2].weight.requires_grad_(False)
    model = wrap(module, **options)
    double, single = sorted(model.grad_buffers, key=lambda buffer: buffer.kind.grad_dtype is torch.float32)
    assert isinstance(double, ParamAndGradBuffer)
    assert model.expert_parallel_buffers == []
    assert single.params == [module[2].bias]
    assert double.params == list(reversed([*module[0].parameters(), *module[4].parameters()]))
    assert not hasattr(module[2].weight, "main_grad")
    for buffer in model.grad_buffers:
        start = buffer.grad_data.data_ptr()
        for bucket in buffer.buckets:
            assert bucket.padded % 2 == 0
            for i, offset in zip(bucket.plan.members, bucket.plan.offsets, strict=True):
                main = list(module.parameters())[i].main_grad
                assert main.data_ptr() == start + (bucket.start + offset) * main.element_size()
                assert main.is_contiguous()
        assert buffer.grad_data.numel() == sum(bucket.padded for bucket in buffer.buckets)


@pytest.mark.parametrize("options", [{}, {"overlap_grad_reduce": True, "bucket_size": 20}])
@on_two_ranks
def test_an_iteration(options):
    model, rank = wrap(**options), dist.get_rank()
    with pytest.raises(KeyError), model.no_sync():
        raise KeyError
    for step in range(2):
        model.zero_grad_buffer(zero_buffer=True)
        assert not any(main.any() for main in mains(model))
        with model.no_sync():
            loss(model, rank, 10).backward()
            assert model.trace() is None or step
        own = [main.clone() for main in mains(model)]
        assert any(main.any() for main in own)
        model.scale_gradients(2.0)
        hold(model, [2 * main for main in own])
        model.scale_gradients(0.5)
        loss(model, rank, 11).backward()
        model.start_grad_sync()
        model.start_grad_sync("unused", 1)
        model.finish_grad_sync()
        hold(model, mean_of(model.module, (10, 11)))
        model.scale_gradients(torch.tensor(4.0))
        hold(model, [4 * gradient for gradient in mean_of(model.module, (10, 11))])
        assert all(parameter.grad is None for parameter in model.module.parameters())
    # Without zeroing, what there is counts as accumulated.
    model.zero_grad_buffer(zero_buffer=False)
    loss(model, rank, 12).backward()
    model.finish_grad_sync()
    expected = zip(mean_of(model.module, (10, 11)), mean_of(model.module, (12,)), strict=True)
    hold(model, [4 * a + b for a, b in expected])


@pytest.mark.parametrize("overlap", [False, True])
@on_two_ranks
def test_post_accumulate_hooks_get_each_micro_batchs_gradient(overlap):
    """Whether registered before wrapping or after, and also where a backward comes through no output of the wrapper."""
    module, rank, limit = net(), dist.get_rank(), 0.1
    twin = copy.deepcopy(module)

    def clamp(parameter):
        parameter.grad.clamp_(-limit, limit)

    module[0].weight.register_post_accumulate_grad_hook(clamp)
    model = wrap(module, overlap_grad_reduce=overlap)
    module[4].bias.register_post_accumulate_grad_hook(clamp)  # its gradient is the first
    expected = [torch.zeros_like(parameter) for parameter in twin.parameters()]
    for of_rank, step in ((0, 0), (0, 1), (1, 0), (1, 1)):
        grads = torch.autograd.grad(loss(twin, of_rank, step), [*twin.parameters()])
        for k, (total, grad) in enumerate(zip(expected, grads, strict=True)):
            total += (grad.clamp(-limit, limit) if k in (0, 5) else grad) / 2
    for last in (model, module):
        model.zero_grad_buffer()
        with model.no_sync():
            loss(model, rank, 0).backward()
        loss(last, rank, 1).backward()
        model.finish_grad_sync()
        hold(model, expected)


@on_two_ranks
def test_with_overlap_buckets_leave_in_reverse_order():
    model, rank = wrap(overlap_grad_reduce=True, bucket_size=20), dist.get_rank()
    loss(model, rank).backward()
    buckets = [bucket.parameters for bucket in model.trace().buckets]
    assert buckets == [("4.bias", "4.weight"), ("2.bias", "2.weight"), ("0.bias", "0.weight")]
    model.finish_grad_sync()
    one = DistributedDataParallel(None, model.ddp_config, net(), disable_bucketing=True)
    loss(one, rank).backward()
    one.finish_grad_sync()
    assert len(one.trace().buckets) == 1
    hold(one, mains(model))


@on_two_ranks
def test_broadcast_params():
    for options in ({}, {"use_distributed_optimizer": True}):
        module = net()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(dist.get_rank())
        model = wrap(module, **options)
        model.broadcast_params()
        torch.testing.assert_close(list(module.parameters()), list(net().parameters()))
        if dist.get_rank() == 1:
            model.abort_grad_sync("behind a step, so that the other rank hears of it only now")
            with torch.no_grad():
                module[0].weight.add_(1)
        model.broadcast_params()
        torch.testing.assert_close(list(module.parameters()), list(net().parameters()))


@on_two_ranks
def test_state_of_the_wrapper():
    inner = nn.Linear(2, 3)
    hold_state(wrap(inner, use_distributed_optimizer=True), inner)


@on_two_ranks
def test_a_reduce_function_of_ones_own():
    seen = []

    def doubled(bucket, group):
        seen.append((bucket.names(), bucket.index(), bucket.is_last()))
        dist.all_reduce(bucket.buffer(), group=group)  # the sum, twice the mean

    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=20)
    for function in (doubled, ppe_ddp.overlapped(doubled)):
        model = DistributedDataParallel(None, config, net(), reduce_function=function)
        loss(model, dist.get_rank()).backward()
        model.finish_grad_sync()
        hold(model, [2 * gradient for gradient in mean_of(model.module)])
    names = [("4.bias", "4.weight"), ("2.bias", "2.weight"), ("0.bias", "0.weight")]
    assert seen[:3] == list(zip(names, range(3), (False, False, True), strict=True))
    model = DistributedDataParallel(None, DistributedDataParallelConfig(), net(), reduce_function=lambda b, g: b)
    loss(model, dist.get_rank()).backward()
    with pytest.raises(FunctionError, match="returned GradBucket"):
        model.finish_grad_sync()


@on_two_ranks
def test_a_kernel_that_adds_to_main_grad_by_itself():
    model, rank = wrap(overlap_grad_reduce=True), dist.get_rank()
    fused = model.module[2].weight
    for _ in range(2):
        model.zero_grad_buffer()
        assert not fused.grad_added_to_main_grad

        def hook(gradient):
            fused.main_grad.add_(gradient)
            fused.grad_added_to_main_grad = True
            return torch.full_like(gradient, 1e9)  # a dummy

        handle = fused.register_hook(hook)
        loss(model, rank).backward()
        handle.remove()
        model.finish_grad_sync()
        hold(model, mean_of(model.module))


@on_two_ranks
def test_embeddings_with_sparse_gradients():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(9, 3, sparse=True)

        def forward(self, x):
            return self.words(x).pow(2).sum()

    model = wrap(seeded(Words), overlap_grad_reduce=True)
    rows = [torch.tensor([1, 2]), torch.tensor([2, 7])]
    model(rows[dist.get_rank()]).backward()
    model.finish_grad_sync()
    twin = copy.deepcopy(model.module)
    ((twin(rows[0]) + twin(rows[1])) / 2).backward()
    hold(model, [twin.words.weight.grad.to_dense()])


@on_two_ranks
def test_a_wrapper_that_is_gone_leaves_the_module_alone():
    model = wrap(overlap_grad_reduce=True)
    module = model.module
    del model
    gc.collect()
    loss(module, dist.get_rank()).backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


class Odd(nn.Module):
    """An empty parameter, a scalar, and a large frozen one."""

    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.ones(3, 3), requires_grad=False)

    def forward(self, x):
        return self.scalar * x.sum() + self.empty.sum() + (self.frozen * x).sum()


@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize("sharded", [False, True])
@on_two_ranks
def test_odd_parameters_and_odd_groups(size, sharded):
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    for group, mean in ((None, 1.5), (alone, 1.0 + dist.get_rank())):
        config = DistributedDataParallelConfig(
            overlap_grad_reduce=size is not None, use_distributed_optimizer=sharded, bucket_size=size
        )
        model = DistributedDataParallel(None, config, Odd(), data_parallel_group=group)
        model(torch.tensor(1.0 + dist.get_rank())).backward()
        model.finish_grad_sync()
        if sharded:
            part = model.sharded()
            mine = next(g for s, g in zip(part.shards, part.gradients(), strict=True) if s.name == "scalar")
            assert mine.tolist() in ([], [mean])
            for unit in range(len(part.units)):
                (part.gather(unit) or torch.futures.collect_all([])).wait()
            assert model.module.scalar.item() == 2.0
        else:
            assert model.module.scalar.main_grad.item() == mean
            assert model.module.empty.main_grad.shape == (0, 3)
        nothing = wrap(nn.Tanh())
        nothing.zero_grad_buffer()
        nothing.finish_grad_sync()
        finalize_model_grads([nothing])


# ---------------------------------------------------------------------- a distributed optimizer


@pytest.mark.parametrize("overlap", [False, True])
@on_two_ranks
def test_shards(overlap):
    options = {"use_distributed_optimizer": True, "overlap_grad_reduce": overlap, "bucket_size": 30}
    module = net()
    model, rank = wrap(module, **options), dist.get_rank()
    torch.testing.assert_close(list(module.parameters()), list(net().parameters()))
    (buffer,) = model.grad_buffers
    assert all(p.untyped_storage().data_ptr() == buffer.param_data.data_ptr() for p in module.parameters())
    part = model.sharded()
    assert isinstance(part, ShardedModel)
    assert part is model.sharded()
    assert part.group is dist.group.WORLD
    assert [shard.name for shard in part.shards] == [name for name, _ in module.named_parameters()]
    assert sorted(k for unit in part.units for k in unit) == list(range(6))
    assert part.units[0][0] == 0  # a forward needs the first layer first
    everyone = of_all_ranks([(shard.start, shard.stop) for shard in part.shards])
    for shard, *pieces in zip(part.shards, *everyone, strict=True):
        covered = sorted(i for start, stop in pieces for i in range(start, stop))
        assert covered == list(range(shard.parameter.numel()))
    held = sum(shard.numel for shard in part.shards)
    assert held <= buffer.grad_data.numel() // 2

    loss(model, rank).backward()
    if not overlap:
        with pytest.raises(RuntimeError, match=r"call finish_grad_sync\(\)"):
            part.gradients()
    model.finish_grad_sync()
    for shard, gradient, want in zip(part.shards, part.gradients(), mean_of(module), strict=True):
        torch.testing.assert_close(gradient, want.flatten()[shard.start : shard.stop])
    for k, shard in enumerate(part.shards):
        part.write(k, shard.parameter.detach().flatten()[shard.start : shard.stop].float() + 1)
    for unit in range(len(part.units)):
        pending = part.gather(unit)
        if pending is not None:
            pending.wait()
        part.install(unit)
    torch.testing.assert_close(
        list(module.parameters()), [p + 1 for p in net().parameters()], rtol=1e-6, atol=1e-6, check_dtype=False
    )


@pytest.mark.parametrize("overlap", [False, True])
@on_two_ranks
def test_param_sync_before_or_during_the_forward(overlap):
    options = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 30}
    model, rank = wrap(overlap_param_gather=overlap, **options), dist.get_rank()
    twin = net()
    part = model.sharded()

    def move(by):
        for k, shard in enumerate(part.shards):
            part.write(k, shard.parameter.detach().flatten()[shard.start : shard.stop] + by)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.add_(by)

    for by in (1.0, 2.0):
        move(by)
        model.start_param_sync()
        torch.testing.assert_close(loss(model, rank), loss(twin, rank))
    move(0.5)
    model.start_param_sync(force_sync=True)
    torch.testing.assert_close(list(model.module.parameters()), list(twin.parameters()))
    move(0.25)
    if rank == 1:
        model.abort_grad_sync("behind a step, so that the other rank hears of it only now")
    model.disable_forward_pre_hook(param_sync=True)
    torch.testing.assert_close(list(model.module.parameters()), list(twin.parameters()))
    model.enable_forward_pre_hook()
    move(0.125)
    model.start_param_sync()
    torch.testing.assert_close(loss(model, rank), loss(twin, rank))


# ---------------------------------------------------------------------- groups


@on_two_ranks
def test_groups_of_a_mesh():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "pp"))
    groups = ParallelGroups.from_mesh(mesh)
    assert dist.get_world_size(groups.data) == 1
    assert dist.get_process_group_ranks(groups.pipeline) == dist.get_process_group_ranks(groups.embedding) == [0, 1]
    assert (groups.tensor, groups.expert, groups.position_embedding) == (None, None, None)
    groups = ParallelGroups.from_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    assert dist.get_process_group_ranks(groups.data) == [0, 1]
    assert dist.get_process_group_ranks(groups.expert) == [dist.get_rank()]
    with pytest.raises(ValueError, match="must be named"):
        ParallelGroups.from_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("rows",)))
