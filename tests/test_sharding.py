"""Sharded loading: the checks of sharding_checks.py over gloo and mpi4py, and what needs no ranks."""

import copy
import functools
import importlib.util
import io
import json
import math
import os
import pickle
import random
import signal
import time
from collections import OrderedDict
from pathlib import Path
from pickle import UnpicklingError

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sharding_checks
from failing import SECONDS
from ppe_ddp.backends.json_collectives import dump_plain, load_plain
from ppe_ddp.errors import CheckpointError, CommunicationError
from ppe_ddp.sharding import (
    Checkpoint,
    DistModule,
    broadcast_and_shard_state_dict,
    distribution,
    load_state_dict,
    patch_accelerate,
    shard_broadcasted_state_dict,
)
from ppe_ddp.sharding.load_group import LoadGroup
from ppe_ddp.sharding.load_plan import (
    ExpectedEntry,
    RoutedTensor,
    ShardLayout,
    SourceEntry,
    cut,
    match,
    plan_messages,
    shape_of,
)
from ppe_ddp.testing import RankError, Ranks
from subprocesses import MPIRUN, run, warm_python

HERE = Path(__file__).parent
# What has nothing to do with the transport is enough to be seen over one.
OVER_MPI = [
    "every_layout_and_dtype_bit_by_bit",
    "groups_of_every_size",
    "pieces_of_any_size",
    "fsdp_computes_the_same_and_trains",
    "a_failure_on_one_rank_reaches_all",
]


def skip_without(*modules):
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")


@pytest.mark.parametrize("name", sharding_checks.CHECKS)
def test_over_gloo(four_ranks, name):
    skip_without(*sharding_checks.needs(name))
    four_ranks.run(sharding_checks.run, name, timeout=150)


@functools.cache
def under_mpirun():
    command = [MPIRUN, "-n", sharding_checks.RANKS, *warm_python(), HERE / "sharding_checks.py", *OVER_MPI]
    code, output, errors = run(command, timeout=150)
    return code, {json.loads(line)["name"] for line in output.splitlines() if line.startswith("{")}, errors[-4000:]


needs_mpi = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None, reason="needs the extra [mpi]"
)


@needs_mpi
@pytest.mark.parametrize("name", OVER_MPI)
def test_over_mpi(name):
    _, done, errors = under_mpirun()
    assert name in done, errors


@needs_mpi
def test_the_run_over_mpi_ends_well():
    code, _, errors = under_mpirun()
    assert code == 0, errors


# --- plans, without ranks


def random_layout(dice):
    """A mesh of one or two dimensions, and how a tensor of two dimensions is placed on it."""
    shape = tuple(dice.choice([1, 2, 3]) for _ in range(dice.choice([1, 2])))
    ranks = list(range(math.prod(shape)))
    dice.shuffle(ranks)
    placements = tuple(dice.choice([(0,), (1,), ()]) for _ in shape)  # Shard(0), Shard(1), Replicate()
    return ShardLayout(tuple(ranks), shape, placements)


@pytest.mark.parametrize("seed", range(40))
def test_every_element_reaches_every_rank_that_holds_it(seed):
    """Sends a tensor by plan and tree, as the ranks would do, and compares with what torch's placements give."""
    dice = random.Random(seed)
    layout = random_layout(dice)
    size = len(layout.ranks)
    full = torch.arange(dice.randint(0, 9) * dice.randint(1, 9)).float()
    full = full.view(-1, dice.choice([n for n in range(1, 10) if full.numel() % n == 0]))
    regions = {rank: layout.region(tuple(full.shape), rank) for rank in layout.ranks}
    holders = {}
    for rank, region in regions.items():
        holders.setdefault(region, []).append(rank)
    shares = tuple((region, tuple(sorted(ranks))) for region, ranks in holders.items())
    routed_tensors = [RoutedTensor("t", full.dtype, shares)]
    most = dice.choice([4, 12, 40, 4000])
    plans = [list(plan_messages(routed_tensors, rank, most)) for rank in range(size)]
    locals_ = {rank: torch.full(shape_of(region), math.nan) for rank, region in regions.items()}
    for message in plans[0]:
        assert message.nbytes <= most
        assert sum(piece.nbytes for piece in message.pieces) == message.nbytes
        for piece in message.pieces:
            values = cut(full, piece.region, piece.box).flatten()
            for rank in message.route:
                locals_[rank].view(-1)[piece.offset : piece.offset + piece.numel] = values
    for rank, plan in enumerate(plans):
        # A rank's own plan is rank 0's without what does not concern it, in the same order.
        assert plan == [message for message in plans[0] if rank == 0 or rank in message.route]
    for place, rank in enumerate(layout.ranks):
        coordinate = torch.tensor(place)
        index = [int(i) for i in torch.unravel_index(coordinate, layout.mesh_shape)]
        expected = full
        for placement, count, i in zip(layout.placements, layout.mesh_shape, index, strict=True):
            if placement:
                chunks = expected.chunk(count, *placement)
                empty = expected.narrow(*placement, 0, 0)
                expected = chunks[i] if i < len(chunks) else empty
        assert torch.equal(locals_[rank], expected), (layout, rank)


def found(*keys):
    return [SourceEntry(key, (1,), torch.float32, "Tensor") for key in keys]


def expected(*keys, **ties):
    return [ExpectedEntry(key, (1,), torch.float32, None, ties.get(key, key)) for key in keys]


@pytest.mark.parametrize(
    ("theirs", "ours", "sources"),
    [
        (["a", "b"], expected("a", "b"), {"a": "a", "b": "b"}),
        (["_orig_mod.a"], expected("a"), {"a": "_orig_mod.a"}),
        (["module.a", "module._orig_mod.b"], expected("a", "b"), {"a": "module.a", "b": "module._orig_mod.b"}),
        (["a"], expected("module._orig_mod.a"), {"module._orig_mod.a": "a"}),
        (["a"], expected("module.a", "_orig_mod.a"), {}),  # which one is meant?
        (["a"], expected("a", "b", b="a"), {"a": "a", "b": "a"}),
        (["a", "b"], expected("a", "b", b="a"), {"a": "b", "b": "b"}),
    ],
)
def test_keys_are_matched(theirs, ours, sources):
    matched = match(found(*theirs), [ours])
    assert matched.sources == sources
    assert matched.missing == [entry.key for entry in ours if entry.key not in sources]


# --- one process


def test_alone_it_is_load_state_dict_without_a_copy():
    full = {"weight": torch.randn(3, 2), "bias": torch.randn(3)}
    with torch.device("meta"):
        net = nn.Linear(2, 3)
    assert DistModule(net).load_state_dict(full, assign=True) == ([], [])
    assert net.weight.data_ptr() == full["weight"].data_ptr()
    other = nn.Linear(2, 3)
    memory = other.weight.data_ptr()
    DistModule(other).load_state_dict(full)
    assert torch.equal(other.weight, full["weight"])
    assert other.weight.data_ptr() == memory


def test_it_is_the_module_but_for_loading():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    wrapped = DistModule(net)
    wrapped.color = "red"
    assert net.color == "red"
    del wrapped.color
    assert not hasattr(net, "color")
    wrapped.eval()
    assert not net.training
    assert not wrapped.training
    assert [name for name, _ in wrapped.named_parameters()] == [name for name, _ in net.named_parameters()]
    assert [name for name, _ in wrapped.named_modules()] == [name for name, _ in net.named_modules()]
    assert wrapped.state_dict(prefix="x.").keys() == net.state_dict(prefix="x.").keys()
    calls = []
    net.register_forward_hook(lambda *_: calls.append(1))
    wrapped.register_forward_hook(lambda *_: calls.append(2))
    x = torch.randn(4, 2)
    assert torch.equal(wrapped(x), net(x))
    assert calls == [1, 2, 1, 2]
    with pytest.raises(AttributeError, match="nothing"):
        _ = wrapped.nothing
    with pytest.raises(TypeError, match="wraps a"):
        DistModule(torch.zeros(1))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_has_all_of_the_module(copied):
    net = nn.Linear(2, 3)
    net.register_buffer("scratch", torch.ones(1), persistent=False)
    net.register_state_dict_post_hook(_add_entry)
    x = torch.randn(4, 2)
    twin = copied(DistModule(net))
    assert twin.state_dict().keys() == net.state_dict().keys() == {"weight", "bias", "added"}
    assert torch.equal(twin(x), net(x))


def _add_entry(_module, state_dict, _prefix, _metadata):
    state_dict["added"] = torch.ones(1)


def test_a_rank_that_dies_in_a_load_is_named_on_all():
    with Ranks(3, timeout=120) as ranks, pytest.raises(RankError) as caught:
        ranks.run(load_and_die, grace=SECONDS)
    found = caught.value.exceptions
    assert sorted(found) == [0, 1]
    assert all(error.ranks == (2,) for error in found.values()), found
    assert all("rank 2, which has died" in str(error) for error in found.values()), found


def test_no_rank_waits_in_the_next_call_for_one_that_has_heard_of_a_death():
    with Ranks(3, group_timeout=100, timeout=120) as ranks, pytest.raises(RankError) as caught:
        ranks.run(call_again_after_a_death, grace=SECONDS, timeout=60)
    assert sorted(caught.value.exceptions) == [0, 1]


def call_again_after_a_death():
    group = LoadGroup()
    assert group.from_each(lambda: 1) == [1, 1, 1]
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    for call in (group.from_each, group.from_each, group.from_source):
        with pytest.raises(CommunicationError) as caught:
            call(lambda: 1)
    raise caught.value


def test_who_hears_of_a_death_in_another_group_knows_the_rank_in_the_job():
    with Ranks(3, timeout=120) as ranks, pytest.raises(RankError) as caught:
        ranks.run(die_in_one_group, grace=SECONDS)
    found = caught.value.exceptions
    assert [type(found[rank]) for rank in (0, 1)] == [CommunicationError] * 2
    assert [(found[rank].job_rank, found[rank].is_final) for rank in (0, 1)] == [(2, True)] * 2
    assert found[1].ranks == (1,)


def die_in_one_group():
    rank = dist.get_rank()
    near, far = dist.new_group([0, 1]), dist.new_group([1, 2])
    error = None
    if rank > 0:
        group = LoadGroup(far)
        assert group.from_each(lambda: rank) == [1, 2]
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(CommunicationError) as caught:
            group.from_each(lambda: rank)
        error = caught.value

    def tell():
        if error is not None:
            raise error

    LoadGroup(near).from_each(tell)


def load_and_die():
    transferred, begin = distribution.Load._transferred, time.monotonic()

    def die(load, message):
        if dist.get_rank() == 2 and message.pieces[0].routed.key == "2.weight":
            os.kill(os.getpid(), signal.SIGKILL)
        return transferred(load, message)

    distribution.Load._transferred = die
    net = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))
    with pytest.raises(CommunicationError) as caught:
        DistModule(net, piece_nbytes=1 << 18).load_state_dict(net.state_dict())
    assert time.monotonic() - begin < SECONDS
    raise caught.value


def test_wrong_arguments_are_refused():
    net = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="dtype"):
        DistModule(net, dtype="float32")
    with pytest.raises(ValueError, match="piece_nbytes"):
        DistModule(net, piece_nbytes=0)
    with pytest.raises(ValueError, match="assign=True"):
        DistModule(net, dtype="checkpoint").load_state_dict(net.state_dict())
    with pytest.raises(ValueError, match="rank 0"):
        shard_broadcasted_state_dict({}, {})
    with pytest.raises(ValueError, match="device_map"):
        load_state_dict("nowhere.pt", "no device")


def test_the_functions_fill_a_dictionary():
    full, result = {"a": torch.randn(2)}, {}
    broadcast_and_shard_state_dict(full, {"a": torch.empty(2, device="meta")}, result)
    assert torch.equal(result["a"], full["a"])


# --- files


class Hostile:
    """A pickle that runs code when it is loaded."""

    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def test_a_hostile_file_is_refused_and_nothing_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind, new in [("archive", True), ("legacy", False)]:
        torch.save({"a": Hostile()}, tmp_path / f"{kind}.pt", _use_new_zipfile_serialization=new)
        with pytest.raises(CheckpointError, match=rf"{kind}\.pt: refused.*executed"):
            load_state_dict(str(tmp_path / f"{kind}.pt"))
    assert not Path("executed").exists()
    for weight_map in [{"a": "../x.pt"}, {"a": "/x.pt"}, ["x"], {"a": 3}]:
        (tmp_path / "x.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=r"x\.index\.json"):
            Checkpoint(tmp_path / "x.index.json")


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_damaged_file_is_refused_by_name(tmp_path, suffix):
    file = tmp_path / f"model.{suffix}"
    tensors = {"a": torch.randn(50), "b": torch.arange(3)}
    if suffix == "pt":
        torch.save(tensors, file)
    else:
        skip_without("safetensors")
        from safetensors.torch import save_file

        save_file(tensors, file)
    whole = file.read_bytes()
    assert torch.equal(Checkpoint(file)["a"], tensors["a"])
    for broken in [b"", whole[:10], whole[: len(whole) // 2], b"\xff" * 64, whole[:-1]]:
        file.unlink()  # a file in use is not written over
        file.write_bytes(broken)
        with pytest.raises(CheckpointError, match=rf"model\.{suffix}: "):
            load_state_dict(str(file))
    file.unlink()
    with pytest.raises(CheckpointError, match=rf"model\.{suffix}: .*no such file"):
        Checkpoint(tmp_path / f"model.{suffix}")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match=r"list\.pt: .*holds a list"):
        load_state_dict(tmp_path / "list.pt")


@pytest.mark.parametrize("content", [b"", b"hello, I am a text", b"{}", b"\x80\x02hello", b"\x80", b"\x89PNG\r\n"])
def test_a_file_that_is_no_checkpoint_is_called_so(tmp_path, content):
    file = tmp_path / "notes.bin"
    file.write_bytes(content)
    for read in (Checkpoint, load_state_dict):
        with pytest.raises(CheckpointError, match=r"notes\.bin: .*no checkpoint"):
            read(file)


def test_devices_by_the_names_of_modules(tmp_path):
    torch.save({name: torch.ones(1) for name in ("a.x", "a.b.x", "ab.x", "c")}, tmp_path / "x.pt")
    mapped = load_state_dict(str(tmp_path / "x.pt"), {"a": "meta", "a.b": "cpu", "c": "disk"})
    assert {key: tensor.device.type for key, tensor in mapped.items()} == {
        "a.x": "meta",
        "a.b.x": "cpu",
        "ab.x": "cpu",
        "c": "cpu",
    }
    everywhere = load_state_dict(str(tmp_path / "x.pt"), "meta")
    assert all(tensor.is_meta for tensor in everywhere.values())
    assert load_state_dict(str(tmp_path / "x.pt"), {"": "meta", "c": "cpu"})["c"].device.type == "cpu"


def test_accelerate_gets_its_own_back():
    skip_without("accelerate")
    from accelerate.utils import modeling
    from torch.distributed.checkpoint import state_dict as torch_state_dict

    before = modeling.load_state_dict, torch_state_dict.set_model_state_dict
    with patch_accelerate():
        assert modeling.load_state_dict is not before[0]
    assert (modeling.load_state_dict, torch_state_dict.set_model_state_dict) == before


def test_any_memory_format():
    torch.manual_seed(0)
    full = {"weight": torch.randn(5, 3, 3, 4).permute(0, 3, 1, 2), "bias": torch.randn(10)[::2]}
    for assign in (True, False):
        net = nn.Conv2d(4, 5, 3).to(memory_format=torch.channels_last)
        DistModule(net, piece_nbytes=64).load_state_dict(full, assign=assign)
        assert torch.equal(net.weight, full["weight"])
        assert torch.equal(net.bias, full["bias"])
        assert assign or net.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("seconds", "shown"), [(0.0, True), (3600.0, False)])
def test_a_bar_for_long_loads(monkeypatch, capsys, seconds, shown):
    skip_without("tqdm")
    monkeypatch.setattr(distribution, "_SHOWN_AFTER", seconds)
    net = nn.Linear(64, 64)
    for wanted, seen in [(True, shown), (False, False), (None, False)]:  # what is captured is no terminal
        DistModule(net, progress=wanted, piece_nbytes=1024).load_state_dict(net.state_dict())
        assert ("loading" in capsys.readouterr().err) == seen


# --- values that are no tensors


@pytest.mark.parametrize(
    "value",
    [None, "text", 3, 0.1, True, b"bytes", (1, [2, {"a": (3,)}]), OrderedDict(a=1), torch.float16, torch.Size([2])],
)
def test_plain_values_come_back(value):
    back = load_plain(dump_plain(value))
    assert back == value
    assert type(back) is type(value)


def test_tensors_come_back_with_what_they_are_in():
    value = {"a": [torch.randn(3), {"b": torch.eye(2).to_sparse()}]}
    back = load_plain(dump_plain(value))
    assert torch.equal(back["a"][0], value["a"][0])
    assert torch.equal(back["a"][1]["b"].to_dense(), torch.eye(2))


def test_what_would_run_code_is_refused_on_both_sides(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match=r"it is a Hostile with .*getattr.*add_safe_globals"):
        dump_plain(Hostile())
    with pytest.raises(TypeError, match="it is a function, which cannot be saved"):
        dump_plain(lambda: None)
    content = io.BytesIO()
    torch.save([Hostile()], content)
    with pytest.raises(UnpicklingError):
        load_plain(content.getvalue())
    assert not Path("executed").exists()


def test_a_class_that_the_user_trusts_goes_through():
    with torch.serialization.safe_globals([complex]):
        assert load_plain(dump_plain([1j])) == [1j]
