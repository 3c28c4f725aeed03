"""Compatibility with torch's wrapper: keywords, groups, optimizers in backward."""

import copy
import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from library_warnings import library_warnings
from one_process import assert_gradients, assert_same_on_all_ranks, data, mean_gradients, mean_of, mlp, seeded, square
from ppe_ddp import DistributedDataParallel, UnusableError
from rank_tests import on_three_ranks, on_two_ranks


@on_two_ranks
def test_all_keywords_of_torch_are_known():
    signature = inspect.signature(TorchDDP)
    defaults = {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if name != "module" and parameter.default is not inspect.Parameter.empty
    }
    with library_warnings() as texts:
        square(DistributedDataParallel(seeded(mlp, 4, 2), **defaults), dist.get_rank())
    assert not texts


@pytest.mark.parametrize(
    "hint",
    [
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"check_reduction": True},
        {"device_ids": []},
        {"dim": 0},
    ],
    ids=str,
)
@on_two_ranks
def test_hints_that_are_never_needed(hint):
    module = seeded(mlp, 4, 2)
    with library_warnings() as texts:
        wrapper = DistributedDataParallel(module, **hint)
    assert not texts
    expected = mean_gradients(module, square)
    square(wrapper, dist.get_rank())
    assert_gradients(module, expected)


@pytest.mark.parametrize(
    "ignored",
    [
        {"output_device": 0},
        {"dim": 1},
        {"delay_all_reduce_named_params": [("a", None)]},
        {"param_to_hook_all_reduce": nn.Parameter(torch.zeros(1))},
    ],
    ids=lambda ignored: next(iter(ignored)),
)
@on_two_ranks
def test_what_has_no_meaning_is_warned_about_once(ignored):
    (name,) = ignored
    with library_warnings() as texts:
        wrapper = DistributedDataParallel(seeded(mlp, 4, 2), **ignored)
        for _ in range(2):
            square(wrapper, dist.get_rank())
    assert len(texts) == 1
    assert f"ignores {name}: " in texts[0]


@pytest.mark.parametrize("name", ["bucket_cap_mb", "bucket_cap_mb_list"])
@on_two_ranks
def test_buckets_of_several_sizes(name):
    module = seeded(mlp, *[8] * 9)  # eight layers of 288 bytes
    expected = mean_gradients(module, lambda m, rank: m(data(5, 8, rank=rank)).sum().backward())
    caps = [bytes_ / 2**20 for bytes_ in (256, 800, 500)]
    wrapper = DistributedDataParallel(module, **{name: caps})
    wrapper(data(5, 8, rank=dist.get_rank())).sum().backward()
    assert_gradients(module, expected)
    sizes = [bucket.nbytes for bucket in wrapper.trace().buckets]
    # A bucket is closed when it has reached its size; weights have 256 bytes, biases 32.
    assert sizes[0] < 256 + 288
    assert 800 <= sizes[1] < 800 + 256
    assert all(500 <= nbytes < 500 + 256 for nbytes in sizes[2:-1])
    assert sum(sizes) == 8 * 288


@pytest.mark.parametrize("caps", [[], 0, -1, float("nan"), [1, 0], (2, -1), "25", [1, "2"]], ids=str)
def test_bad_sizes_are_refused(caps):
    with pytest.raises(ValueError, match="bucket_cap_mb is a number of MiB above zero"):
        DistributedDataParallel(mlp(2, 2), bucket_cap_mb=caps)


@pytest.mark.parametrize(
    ("options", "synchronizes"),
    [
        ({"forward_sync_buffers": False}, False),
        ({"forward_sync_buffers": True, "broadcast_buffers": False}, True),
        ({"forward_sync_buffers": None, "broadcast_buffers": None}, True),
        ({"broadcast_buffers": False}, False),
    ],
    ids=str,
)
@on_two_ranks
def test_forward_sync_buffers(options, synchronizes):
    wrapper = DistributedDataParallel(nn.BatchNorm1d(4), **options)
    square(wrapper, dist.get_rank())
    means = [None] * 2
    dist.all_gather_object(means, wrapper.module.running_mean)
    assert torch.equal(*means) == synchronizes
    assert wrapper.forward_sync_buffers is synchronizes


@on_two_ranks
def test_require_backward_grad_sync_may_be_set():
    module = seeded(mlp, 4, 2)
    expected = mean_gradients(module, lambda m, rank: [square(m, rank, step) for step in range(2)])
    wrapper = DistributedDataParallel(module)
    for model in (wrapper, copy.deepcopy(wrapper)):  # which makes its connections at its first forward
        assert model.require_backward_grad_sync
        model.require_backward_grad_sync = False
        square(model, dist.get_rank())
        assert model.trace() is None
        with model.no_sync():
            pass
        assert not model.require_backward_grad_sync
        model.require_backward_grad_sync = True
        square(model, dist.get_rank(), 1)
        assert_gradients(model.module, expected)


@on_two_ranks
def test_gradient_as_bucket_view():
    for views in (False, True):
        module = seeded(mlp, 4, 8, 2)
        wrapper = DistributedDataParallel(module, gradient_as_bucket_view=views)
        for _ in range(3):
            wrapper.zero_grad()
            square(wrapper, dist.get_rank())
        storages = {parameter.grad.untyped_storage().data_ptr() for parameter in module.parameters()}
        assert len(storages) == (1 if views else 4)


@on_two_ranks
def test_init_sync():
    for synchronizes in (True, False):
        module = nn.BatchNorm1d(3)
        nn.init.constant_(module.weight, dist.get_rank() + 5)
        module.running_mean.fill_(dist.get_rank() + 5)
        DistributedDataParallel(module, init_sync=synchronizes)
        value = 5 if synchronizes else dist.get_rank() + 5
        assert (module.weight == value).all()
        assert (module.running_mean == value).all()


@pytest.mark.parametrize("library", [TorchDDP, DistributedDataParallel])
@on_two_ranks
def test_parameters_and_buffers_to_ignore(library):
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    ignored = ["0.weight", "1.running_mean"]
    library._set_params_and_buffers_to_ignore_for_model(module, ignored)
    assert module._ddp_params_and_buffers_to_ignore == ignored
    assert module[0].weight._ddp_ignored
    assert module[1].running_mean._ddp_ignored
    with torch.no_grad():
        module[0].weight.fill_(dist.get_rank())
    wrapper = DistributedDataParallel(module)
    assert (module[0].weight == dist.get_rank()).all()
    square(wrapper, dist.get_rank())
    assert "0.weight" not in wrapper.trace().agreed
    assert "0.bias" in wrapper.trace().agreed
    means, variances = [None] * 2, [None] * 2
    dist.all_gather_object(means, module[1].running_mean)
    dist.all_gather_object(variances, module[1].running_var)
    assert not torch.equal(*means)
    assert torch.equal(*variances)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("attached", ["before wrapping", "before the first step", "later", "in a forward"])
@on_two_ranks
def test_optimizers_of_apply_optimizer_in_backward(attached, hooked):
    # Here, as it warns of its own use of torch.jit when it is imported.
    from torch.distributed.optim import _apply_optimizer_in_backward

    module = seeded(mlp, 4, 4, 2)
    twin = copy.deepcopy(module)
    inside, is_early = list(module[0].parameters()), attached.startswith("before")

    def attach(*_):
        settings = {"optimizer_class": torch.optim.SGD, "optimizer_kwargs": {"lr": 0.1}, "register_hook": hooked}
        _apply_optimizer_in_backward(params=inside, **settings)

    if attached == "before wrapping":
        attach()
    wrapper = DistributedDataParallel(module)
    if attached == "before the first step":
        attach()
    reference = torch.optim.SGD(twin[0].parameters(), lr=0.1)
    for step in range(4):
        if step == 2 and attached == "later":
            attach()
        handle = module.register_forward_hook(attach) if step == 2 and attached == "in a forward" else None
        expected = mean_gradients(twin, lambda m, rank, s=step: square(m, rank, s))
        for name, parameter in twin.named_parameters():
            parameter.grad = expected[name] if is_early or step > 1 else None
        reference.step()
        wrapper.zero_grad()
        square(wrapper, dist.get_rank(), step)
        if handle is not None:
            handle.remove()
        assert all((parameter.grad is None) is (is_early or step > 1) for parameter in inside)
        for a, b in zip(module.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a, b)
    torch.testing.assert_close(module[2].weight.grad, expected["2.weight"])
    with pytest.raises(UnusableError, match="_apply_optimizer_in_backward"):
        wrapper.train_apart()


@on_two_ranks
def test_optimizers_of_apply_optimizer_in_backward_that_come_where_ranks_train_apart_are_refused():
    from torch.distributed.optim import _apply_optimizer_in_backward

    wrapper = DistributedDataParallel(seeded(mlp, 4, 4, 2))
    wrapper.train_apart()
    square(wrapper, dist.get_rank())
    _apply_optimizer_in_backward(torch.optim.SGD, wrapper.module[0].parameters(), {"lr": 0.1})
    for _ in range(2):
        with pytest.raises(UnusableError, match="do not step optimizers of torch's _apply_optimizer_in_backward"):
            square(wrapper, dist.get_rank())


class Routes(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x, way):
        self.seen = self.seen + x.mean()
        return self.parts[way](x) + self.parts[3](x)


@pytest.mark.parametrize("by", ["process_group", "device_mesh"])
@on_three_ranks
def test_a_subgroup_keeps_to_itself(by):
    rank = dist.get_rank()
    members = [1, 2]
    group = dist.new_group(members)
    module = Routes()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(rank)
    module.seen.fill_(rank)
    if rank in members:
        if by == "device_mesh":
            mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu")
            wrapper = DistributedDataParallel(module, device_mesh=mesh)
            assert wrapper.device_mesh is mesh
        else:
            wrapper = DistributedDataParallel(module, process_group=group)
        # From rank 1, the first of the group.
        assert all((parameter == 1).all() for parameter in module.parameters())
        assert (module.seen == 1).all()

        def step(model, rank):
            model(data(5, 4, rank=rank), way=rank).pow(2).sum().backward()

        tables = [mean_gradients(module, lambda m, _, r=r: step(m, r), world_size=1) for r in members]
        means = mean_of(tables, len(members))
        start = module.seen.clone()
        for _ in range(3):
            wrapper.zero_grad()
            module.seen = start.clone()
            step(wrapper, rank)
            assert_gradients(module, means)
            assert_same_on_all_ranks(module, group)
            torch.testing.assert_close(module.seen, start + data(5, 4, rank=1).mean())
        assert module.parts[0].weight.grad is None
    else:
        # Nothing at all: what it does on its own, no matter when, disturbs nobody.
        square(nn.Linear(4, 2), rank)
        assert (module.seen == rank).all()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 3


@on_three_ranks
def test_different_groups_at_the_same_time():
    rank = dist.get_rank()
    groups = [dist.new_group(members) for members in ([0], [1, 2])]
    everyone = DistributedDataParallel(seeded(mlp, 4, 2))
    mine = DistributedDataParallel(seeded(mlp, 4, 2), process_group=groups[0 if rank == 0 else 1])
    expected = mean_gradients(everyone.module, square)
    tables = [mean_gradients(mine.module, lambda m, _, r=r: square(m, r), world_size=1) for r in range(3)]
    own = tables[0] if rank == 0 else mean_of(tables[1:], 2)
    for _ in range(3 if rank == 0 else 1):
        # As often as it likes where it is alone.
        mine.zero_grad()
        square(mine, rank)
    square(everyone, rank)
    assert_gradients(everyone.module, expected)
    assert_gradients(mine.module, own)
