"""Checkpoints: without a prefix as ppe's, torch's with one load too, and a wrapper as a part of a larger module."""

import copy
import io
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from one_process import assert_gradients, data, mean_gradients, seeded
from ppe_ddp import DistributedDataParallel
from ppe_ddp.errors import UnusableError
from rank_tests import on_two_ranks


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        return self.norm(self.layer(x))


class Named(Plain):
    """Has a child of the very name that torch's wrapper puts in front."""

    def __init__(self):
        super().__init__()
        self.module = self._modules.pop("layer")

    def forward(self, x):
        return self.norm(self.module(x))


class Alike(Plain):
    """Has a child of that name, with names like its own."""

    def __init__(self):
        super().__init__()
        self.module = Plain()


class Extra(Plain):
    """Has a state of its own beside its tensors."""

    note = "fresh"

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]


class Nested(nn.Module):
    """A wrapper, or the bare module, as one part of a larger module."""

    def __init__(self, wrap, inner):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.net = wrap(inner)
        self.last = nn.BatchNorm1d(2)

    def forward(self, x):
        return self.last(self.net(self.first(x)))


each_kind = pytest.mark.parametrize("kind", [Plain, Named, Alike, Extra], ids=lambda kind: kind.__name__)


def saved(state):
    """`state` as it comes back from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def assert_same(one, two):
    assert list(one) == list(two)
    for name, value in one.items():
        same = torch.equal(value, two[name]) if isinstance(value, torch.Tensor) else value == two[name]
        assert same, name


def trained(kind):
    """A module that is not as it was made."""
    module = kind()
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.add_(torch.ones_like(tensor))
    module.note = "trained"
    return module


@each_kind
@on_two_ranks
def test_without_a_prefix(kind):
    bare = trained(kind)
    wrapper = DistributedDataParallel(copy.deepcopy(bare))
    if dist.get_rank() == 0:
        assert_same(wrapper.state_dict(), bare.state_dict())
    other = DistributedDataParallel(kind())
    result = other.load_state_dict(saved(wrapper.state_dict()))
    assert result.missing_keys == result.unexpected_keys == []
    assert_same(other.state_dict(), wrapper.state_dict())
    fresh = kind()
    assert not fresh.load_state_dict(wrapper.state_dict()).missing_keys
    assert_same(fresh.state_dict(), wrapper.state_dict())


@each_kind
@on_two_ranks
def test_a_checkpoint_of_torchs_wrapper(kind):
    state = saved(TorchDDP(trained(kind)).state_dict())
    assert all(key.startswith("module.") for key in state)
    before = list(state)
    wrapper = DistributedDataParallel(kind())
    result = wrapper.load_state_dict(state)
    assert result.missing_keys == result.unexpected_keys == []
    assert list(state) == before
    assert_same(OrderedDict((f"module.{key}", value) for key, value in wrapper.state_dict().items()), state)


@on_two_ranks
def test_old_checkpoints_keep_their_version():
    # A batch norm of version 1 has no count of batches; the version is in the metadata, prefix and all.
    state = TorchDDP(trained(Plain)).state_dict()
    del state["module.norm.num_batches_tracked"]
    state._metadata["module.norm"]["version"] = 1
    assert not DistributedDataParallel(Plain()).load_state_dict(state).missing_keys
    state = TorchDDP(trained(Plain)).state_dict()
    del state["module.norm.num_batches_tracked"]
    with pytest.raises(RuntimeError, match=r"Missing key.*norm\.num_batches_tracked"):
        DistributedDataParallel(Plain()).load_state_dict(state)

    class Tenths(nn.Linear):
        _version = 2

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
            if local_metadata.get("version", 1) < 2:
                state_dict[f"{prefix}bias"] = state_dict[f"{prefix}bias"] * 10
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    own = nn.Sequential(DistributedDataParallel(nn.Sequential(Tenths(1, 1))), DistributedDataParallel(Tenths(1, 1)))
    for state in (own.state_dict(), nn.Sequential(nn.Sequential(Tenths(1, 1)), Tenths(1, 1)).state_dict()):
        for _ in range(2):
            own.load_state_dict(saved(state))
        for name in ("0.0.bias", "1.bias"):
            torch.testing.assert_close(own.state_dict()[name], state[name])


@on_two_ranks
def test_arguments_and_results_of_torch():
    wrapper = DistributedDataParallel(trained(Plain))
    own = dict(wrapper.module.named_parameters())
    given = OrderedDict(before=torch.zeros(1))
    assert wrapper.state_dict(destination=given, prefix="a.b.") is given
    assert list(given) == ["before", *(f"a.b.{key}" for key in wrapper.module.state_dict())]
    assert wrapper.state_dict(keep_vars=True)["layer.weight"] is own["layer.weight"]
    assert not wrapper.state_dict()["layer.weight"].requires_grad

    state = wrapper.state_dict()
    renamed = OrderedDict((key.replace("layer.bias", "other"), value) for key, value in state.items())
    with pytest.raises(RuntimeError, match=r"Missing key.*layer\.bias(.|\n)*Unexpected key.*other"):
        wrapper.load_state_dict(renamed)
    result = wrapper.load_state_dict(renamed, strict=False)
    assert result.missing_keys == ["layer.bias"]
    assert result.unexpected_keys == ["other"]
    with pytest.raises(RuntimeError, match="size mismatch"):
        wrapper.load_state_dict({**state, "layer.bias": torch.zeros(3)})
    # By position as in torch: strict, assign.
    assert wrapper.load_state_dict(renamed, False, False).missing_keys == ["layer.bias"]


@on_two_ranks
def test_assign_replaces_the_parameters_and_training_goes_on():
    module = Plain()
    wrapper = DistributedDataParallel(module)
    state = {name: tensor.clone() for name, tensor in seeded(trained, Plain).state_dict().items()}
    weight = module.layer.weight
    wrapper.load_state_dict(state, assign=True)
    assert module.layer.weight is not weight
    assert module.layer.weight.data_ptr() == state["layer.weight"].data_ptr()

    def step(model, rank):
        model(data(5, 4, rank=rank)).pow(3).sum().backward()

    for _ in range(2):
        expected = mean_gradients(module, step)
        wrapper.zero_grad()
        step(wrapper, dist.get_rank())
        assert_gradients(module, expected)


@each_kind
@on_two_ranks
def test_a_wrapper_in_a_larger_module(kind):
    ours = Nested(DistributedDataParallel, trained(kind))
    bare = Nested(nn.Sequential, nn.Identity())
    bare.net = kind()
    state = ours.state_dict()
    # No prefix here either: a module that is not wrapped loads it, and the other way around.
    result = bare.load_state_dict(saved(state))
    assert result.missing_keys == result.unexpected_keys == []
    assert_same(bare.state_dict(), state)
    other = Nested(DistributedDataParallel, kind())
    keys = list(state)
    result = other.load_state_dict(state)
    assert result.missing_keys == result.unexpected_keys == []
    assert list(state) == keys
    assert_same(other.state_dict(), state)
    assert kind is not Extra or other.net.module.note == "trained"

    theirs = Nested(TorchDDP, trained(kind))
    result = other.load_state_dict(saved(theirs.state_dict()))
    assert result.missing_keys == result.unexpected_keys == []
    assert_same(dict(other.net.state_dict()), dict(theirs.net.module.state_dict()))


@on_two_ranks
def test_a_larger_module_names_what_is_missing():
    ours = Nested(DistributedDataParallel, Plain())
    state = ours.state_dict()
    state["net.other"] = state.pop("net.layer.bias")
    with pytest.raises(RuntimeError, match="Missing key") as caught:
        ours.load_state_dict(state)
    assert "layer.bias" in str(caught.value)
    result = ours.load_state_dict(state, strict=False)
    assert len(result.missing_keys) == len(result.unexpected_keys) == 1
    assert result.unexpected_keys == ["net.other"]


@on_two_ranks
def test_a_larger_module_with_two_wrappers_in_each_other():
    inner = DistributedDataParallel(trained(Plain))
    outer = DistributedDataParallel(Nested(nn.Sequential, inner))
    other = DistributedDataParallel(Nested(nn.Sequential, DistributedDataParallel(Plain())))
    state = saved(outer.state_dict())
    assert "net.0.layer.weight" in state
    assert not any("module" in key for key in state)
    result = other.load_state_dict(state)
    assert result.missing_keys == result.unexpected_keys == []
    assert_same(other.state_dict(), state)


@on_two_ranks
def test_hooks_on_the_state_are_called():
    module = Plain()
    wrapper = DistributedDataParallel(module)
    calls = []
    wrapper.module.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    wrapper.module.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    wrapper.register_state_dict_pre_hook(lambda *_: calls.append("saves"))
    wrapper.register_state_dict_post_hook(lambda *_: calls.append("has saved"))
    wrapper.register_load_state_dict_pre_hook(lambda *_: calls.append("loads"))
    wrapper.register_load_state_dict_post_hook(lambda *_: calls.append("has loaded"))
    wrapper.load_state_dict(wrapper.state_dict())
    assert calls == ["saves", "saved", "has saved", "loads", "loaded", "has loaded"]
    wrapper.loss = nn.MSELoss()
    wrapper.register_buffer("scratch", torch.ones(1), persistent=False)
    wrapper.register_buffer("nothing", None)
    wrapper.part, wrapper.alias = module, next(module.parameters())
    wrapper.state_dict()  # they have nothing to be saved, or are saved with the wrapped module
    wrapper.head, wrapper.scale = nn.Linear(1, 1), nn.Parameter(torch.ones(1))
    with pytest.raises(UnusableError, match="head, scale: a tensor or module of the wrapper itself"):
        wrapper.state_dict()
