"""Checks of sharded loading on four ranks; run by test_sharding.py over gloo, and under mpirun."""

import itertools
import json
import sys
import tempfile
import traceback
import warnings
from collections import OrderedDict
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from one_process import of_all_ranks
from ppe_ddp.errors import CheckpointError
from ppe_ddp.sharding import (
    DistModule,
    broadcast_and_shard_state_dict,
    load_state_dict,
    shard_broadcasted_state_dict,
)

CHECKS = {}
RANKS = 4
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float64]
# Mesh shape and placements, on as many ranks as the mesh has.
LAYOUTS = [
    ((1,), [Shard(0)]),
    ((2,), [Shard(0)]),
    ((3,), [Shard(1)]),
    ((3,), [Replicate()]),
    ((4,), [Shard(0)]),
    ((4,), [Shard(1)]),
    ((2, 2), [Replicate(), Shard(0)]),
    ((2, 2), [Shard(1), Replicate()]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [Shard(0), Shard(0)]),
    ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
]


def check(function):
    CHECKS[function.__name__] = function
    return function


def values(seed, shape, dtype):
    """Random bits; the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    return torch.randn(shape, generator=generator).mul(100).to(dtype)


def bits(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def assert_bits(actual, expected, what):
    assert actual.shape == expected.shape, what
    assert actual.dtype == expected.dtype, what
    assert torch.equal(bits(actual), bits(expected)), what


def split(full, mesh, placements):
    """The local tensor as torch would cut it, without communication."""
    coordinate = mesh.get_coordinate()
    for placement, count, place in zip(placements, mesh.shape, coordinate, strict=True):
        if not isinstance(placement, Replicate):
            pieces, _ = placement._split_tensor(full, count, with_padding=False, contiguous=True)
            full = pieces[place]
    return full


def on_meta(full, mesh, placements):
    local = split(full, mesh, placements).to("meta")
    stride = full.contiguous().stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=stride)


def load(full, targets, **keywords):
    """What the two functions make of a checkpoint; the tensors are on rank 0 only."""
    result = {}
    group = keywords.get("process_group")
    if dist.get_rank(group) == 0:
        broadcast_and_shard_state_dict(full, targets, result, **keywords)
    else:
        shard_broadcasted_state_dict(targets, result, **keywords)
    return result


def error_on_all(call):
    """The text of the error, which every rank has to get."""
    try:
        call()
    except CheckpointError as error:
        text = str(error)
    else:
        text = None
    texts = of_all_ranks(text)
    assert len(set(texts)) == 1, texts
    assert text is not None, "there was no error"
    return text


class Net(nn.Module):
    """Parameters of any kind: sharded unevenly, tied, frozen, on no FSDP unit; buffers and extra state."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.body = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 6))
        self.scale = nn.Parameter(torch.ones(6))
        self.scalar = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2, device="cpu"), persistent=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.note = {"version": 0}

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state

    def forward(self, tokens):
        return self.head(self.body(self.embedding(tokens)) * self.scale * self.scalar)


def trained(seed=0):
    """A net with values that no other seed gives, in evaluation mode."""
    torch.manual_seed(seed)
    net = Net().eval()
    for entry in net.state_dict().values():
        if isinstance(entry, torch.Tensor) and entry.is_floating_point():
            entry.copy_(torch.rand_like(entry) + 0.5)
    net.seen.random_(100)
    net.note = {"version": seed + 1}
    return net


def sharded(mesh, *, meta=True):
    with torch.device("meta"):
        net = Net().eval()
    for layer in net.body:
        fully_shard(layer, mesh=mesh)
    # FSDP takes no scalars: this parameter stays whole on every rank.
    fully_shard(net, mesh=mesh, ignored_params={net.scalar})
    if not meta:
        net.to_empty(device="cpu")
    return net


def assert_loaded(net, reference):
    for key, expected in reference.state_dict().items():
        actual = net.state_dict()[key]
        if isinstance(expected, torch.Tensor):
            assert_bits(actual.full_tensor() if isinstance(actual, DTensor) else actual, expected, key)
        else:
            assert actual == expected, key


@check
def every_layout_and_dtype_bit_by_bit():
    rank = dist.get_rank()
    shapes = [(5, 3), (4, 8), (1, 2), (0, 3), (9, 5)]
    layouts = LAYOUTS[:: 5 if dist.get_backend() == "mpi4py" else 1]
    for number, (mesh_shape, placements) in enumerate(layouts):
        count = torch.Size(mesh_shape).numel()
        mesh = DeviceMesh("cpu", torch.arange(count).view(mesh_shape))
        full, targets = {}, {}
        for k, (shape, dtype) in enumerate(itertools.product(shapes, DTYPES)):
            if any(isinstance(p, _StridedShard) for p in placements) and shape[0] % 4:
                continue  # torch has no even rule for these
            full[f"t{k}"] = values(100 * number + k, shape, dtype)
            if rank < count:
                targets[f"t{k}"] = on_meta(full[f"t{k}"], mesh, placements)
        full["plain"] = values(number, (2, 3), torch.float32)
        targets["plain"] = torch.empty(2, 3, device="meta")
        result = load(full, targets)
        assert result.keys() == targets.keys()
        for key in targets:
            expected = full[key]
            if key != "plain":
                expected = split(expected, mesh, placements)
                assert result[key].placements == tuple(placements)
                assert result[key].shape == full[key].shape
                assert result[key].stride() == full[key].stride()
            local = result[key].to_local() if key != "plain" else result[key]
            assert_bits(local, expected, f"{key} as {placements}")


@check
def groups_of_every_size():
    for size in range(1, RANKS + 1):
        group = dist.new_group(list(range(RANKS - size, RANKS)))
        mesh = DeviceMesh("cpu", list(range(RANKS - size, RANKS)))
        if dist.get_rank() >= RANKS - size:
            reference = trained(size)
            first = dist.get_rank(group) == 0
            for meta in (True, False):
                net = sharded(mesh, meta=meta)
                state_dict = reference.state_dict() if first else {}
                DistModule(net, process_group=group, piece_nbytes=96).load_state_dict(state_dict, assign=meta)
                assert_loaded(net, reference)
        dist.barrier()


@check
def pieces_of_any_size():
    mesh = init_device_mesh("cpu", (2, 2))
    full = {f"t{k}": values(k, (13, 3, 2), torch.float32) for k in range(2)} | {"one": values(9, (), torch.float32)}
    for piece_nbytes in (100, 900, 1 << 20):
        for placements in ([Shard(0), Shard(1)], [Replicate(), Shard(2)], [Replicate(), Replicate()]):
            net = nn.Module()
            for key, tensor in full.items():
                value = on_meta(tensor, mesh, placements) if tensor.dim() else tensor.to("meta")
                net.register_parameter(key, nn.Parameter(value))
            DistModule(net, piece_nbytes=piece_nbytes).load_state_dict(
                full if dist.get_rank() == 0 else {}, assign=True
            )
            for key, tensor in full.items():
                local = getattr(net, key).to_local() if tensor.dim() else getattr(net, key)
                assert_bits(local.detach(), split(tensor, mesh, placements) if tensor.dim() else tensor, key)


@check
def fsdp_computes_the_same_and_trains():
    mesh = init_device_mesh("cpu", (RANKS,))
    reference = trained()
    tokens = torch.arange(11)
    for meta in (True, False):
        net = sharded(mesh, meta=meta)
        wrapped = DistModule(net)
        result = wrapped.load_state_dict(reference.state_dict() if dist.get_rank() == 0 else {}, assign=meta)
        assert result == ([], [])
        assert_loaded(net, reference)
        assert net.head.weight is net.embedding.weight
        assert not net.scalar.requires_grad
        assert net.scale.requires_grad
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        output = wrapped(tokens)
        torch.testing.assert_close(output, reference(tokens))
        output.square().mean().backward()
        optimizer.step()
        assert not torch.equal(net.embedding.weight.full_tensor(), reference.embedding.weight)


@check
def each_rank_receives_its_shard_and_no_more():
    mesh = init_device_mesh("cpu", (RANKS,))
    net = nn.Sequential(nn.Linear(64, 256, bias=False, device="meta"), nn.Linear(256, 10, bias=False, device="meta"))
    fully_shard(net[0], mesh=mesh)
    full = {"0.weight": torch.randn(256, 64), "1.weight": torch.randn(10, 256)}
    received = []
    irecv, broadcast = dist.irecv, dist.broadcast

    def counted(function):
        def call(tensor, *args, **kwargs):
            received.append(tensor.nbytes)
            return function(tensor, *args, **kwargs)

        return call

    with mock.patch.multiple(dist, irecv=counted(irecv), broadcast=counted(broadcast)):
        DistModule(net).load_state_dict(full if dist.get_rank() == 0 else {}, assign=True)
    length, description, *received = received
    assert length == 8
    assert description < 2500
    expected = full["1.weight"].nbytes + (full["0.weight"].nbytes // RANKS if dist.get_rank() else 0)
    assert sum(received) == expected, (received, expected)


@check
def keys_are_agreed_first():
    mesh = init_device_mesh("cpu", (RANKS,))
    reference = trained()
    full = reference.state_dict()
    untouched = trained(5)
    for broken, words in [
        ({key: full[key] for key in full if "scale" not in key}, ["Missing", '"scale"', "pre-hooks, versions"]),
        ({**full, "extra": torch.ones(1)}, ["Unexpected", '"extra"']),
        ({**full, "seen": torch.ones(4)}, ["size mismatch for seen", "[4]", "[3]"]),
        ({**full, "seen": "text"}, ["expected a tensor for seen", "str"]),
    ]:
        net = sharded(mesh, meta=False)
        start = untouched.state_dict() if dist.get_rank() == 0 else {}
        DistModule(net).load_state_dict(start)
        given = broken if dist.get_rank() == 0 else {}
        text = error_on_all(lambda net=net, given=given: DistModule(net).load_state_dict(given))
        assert all(word in text for word in ["loading state_dict for FSDPNet:", *words]), text
        assert_loaded(net, untouched)


@check
def not_strict_tells_the_truth():
    mesh = init_device_mesh("cpu", (RANKS,))
    reference = trained()
    full = OrderedDict(reference.state_dict(), extra=torch.ones(2))
    missing = ["scale", "body.0.bias"]
    for key in missing:
        del full[key]
    for meta in (True, False):
        net = sharded(mesh, meta=meta)
        result = DistModule(net).load_state_dict(full if dist.get_rank() == 0 else {}, strict=False, assign=meta)
        assert result == (missing, ["extra"])
        assert_bits(net.body[0].weight.full_tensor().detach(), full["body.0.weight"], "loaded")
        assert net.scale.is_meta == meta


@check
def tied_weights_once_and_still_tied():
    mesh = init_device_mesh("cpu", (RANKS,))
    full = trained().state_dict()
    del full["head.weight"]  # as safetensors saves it
    net = sharded(mesh)
    sent = []
    isend = dist.isend

    def counted(tensor, *args, **kwargs):
        sent.append(tensor.nbytes)
        return isend(tensor, *args, **kwargs)

    with mock.patch.object(dist, "isend", counted):
        result = DistModule(net).load_state_dict(full if dist.get_rank() == 0 else {}, assign=True)
    assert result == ([], [])
    assert net.head.weight is net.embedding.weight
    assert_bits(net.head.weight.full_tensor().detach(), full["embedding.weight"], "head")


@check
def dtypes_by_choice():
    mesh = init_device_mesh("cpu", (RANKS,))
    for theirs, ours in itertools.permutations([torch.float32, torch.bfloat16, torch.float64], 2):
        full = {"weight": torch.randn(6, 5, dtype=theirs), "bias": torch.randn(6, dtype=theirs)}
        for choice, assign in [(None, False), (None, True), ("module", True), ("checkpoint", True)]:
            net = nn.Linear(5, 6, dtype=ours, device="cpu" if not assign else "meta")
            fully_shard(net, mesh=mesh)
            DistModule(net, dtype=choice).load_state_dict(full if dist.get_rank() == 0 else {}, assign=assign)
            wanted = ours if choice == "module" or not assign else theirs
            everywhere = of_all_ranks(full)
            for key in full:
                assert_bits(getattr(net, key).full_tensor().detach(), everywhere[0][key].to(wanted), key)


@check
def versions_of_modules_come_from_torch_files():
    class Doubled(nn.Linear):
        _version = 2

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
            if local_metadata.get("version", 1) < 2:
                state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 2
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def make():
        return nn.ModuleDict({"a": Doubled(2, 2), "b": nn.ModuleDict({"c": Doubled(2, 2)})})

    trained, loaded = make(), make()
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where, 0)
    folder = Path(where[0])
    if dist.get_rank() == 0:
        for name, module in trained.items():
            torch.save(nn.ModuleDict({name: module}).state_dict(), folder / f"{name}.pt")
        names = {key: f"{key[0]}.pt" for key in trained.state_dict()}
        (folder / "model.index.json").write_text(json.dumps({"weight_map": names}))
    dist.barrier()
    DistModule(loaded).load_checkpoint(folder / "model.index.json")
    read = load_state_dict(folder / "a.pt")
    full = of_all_ranks(trained.state_dict())[0]
    for key, value in loaded.state_dict().items():
        assert_bits(value, full[key], key)
    if dist.get_rank() == 0:
        alone = nn.ModuleDict({"a": Doubled(2, 2)})
        alone.load_state_dict(read)
        assert_bits(alone["a"].weight, full["a.weight"], "a.weight")


@check
def one_element_with_any_stride():
    net = nn.Module()
    net.alone = nn.Parameter(torch.zeros(6).view(1, 6)[:, 0])
    net.square = nn.Parameter(torch.zeros(1, 1))
    table = torch.arange(1.0, 7.0).view(1, 6)
    for piece_nbytes in (1 << 20, 4):
        for full in ({"alone": table[:, 0], "square": table[:, 1:2]}, {"alone": table[0, :1], "square": table[:, ::6]}):
            DistModule(net, piece_nbytes=piece_nbytes).load_state_dict(full if dist.get_rank() == 0 else {})
            assert [net.alone.item(), net.square.item()] == [full["alone"].item(), full["square"].item()]


@check
def a_failure_on_one_rank_reaches_all():
    mesh = init_device_mesh("cpu", (RANKS,))
    rank = dist.get_rank()
    full = trained().state_dict()

    class Failing(dict):
        def __init__(self, *args, after):
            super().__init__(*args)
            self.after = after

        def __getitem__(self, key):
            self.after -= 1
            if self.after < 0:
                raise OSError("the disk is gone")
            return super().__getitem__(key)

        def items(self):
            if self.after < 0:
                raise OSError("the disk was never there")
            return super().items()

    def attempt(given, *, on=None, **keywords):
        net = sharded(mesh, meta=keywords.pop("meta", False))
        if on == rank:
            net.register_load_state_dict_pre_hook(refuse)
        return error_on_all(lambda: DistModule(net).load_state_dict(given if rank == 0 else {}, **keywords))

    def refuse(*_):
        raise KeyError("on purpose")

    assert "rank 0: OSError: the disk was never there" in attempt(Failing(full, after=-1))
    assert "rank 0: OSError: the disk is gone" in attempt(Failing(full, after=3))
    assert "rank 2: KeyError: 'on purpose'" in attempt(full, on=2)
    assert "pass assign=True" in attempt(full, meta=True)
    assert "'_extra_state' cannot be sent: it is a function" in attempt({**full, "_extra_state": lambda: None})
    assert "meta device" in attempt({**full, "seen": torch.empty(3, device="meta")})
    wrong = on_meta(torch.empty(8, 8), mesh, [Shard(0)])
    assert "DTensor" in attempt({**full, "seen": wrong})
    text = error_on_all(
        lambda: DistModule(sharded(mesh)).load_state_dict({} if rank else full, strict=rank != 3, assign=True)
    )
    assert "rank 3" in text
    assert "strict" in text
    for failing in (0, 2):
        # There is no such device, so there is no memory on it.
        device = "hpu" if rank == failing else "cpu"
        wrapped = DistModule(sharded(mesh), device=device)
        text = error_on_all(lambda wrapped=wrapped: wrapped.load_state_dict(full, assign=True))
        assert text.startswith(f"rank {failing}: "), text
    net = sharded(mesh)
    DistModule(net).load_state_dict(full if rank == 0 else {}, assign=True)
    assert_loaded(net, trained())


@check
def ranks_may_have_different_parts():
    """As stages of a pipeline do, each on a mesh of its own."""
    full = {"first": torch.arange(10.0).view(5, 2), "second": torch.arange(12.0).view(4, 3), "both": torch.ones(3)}
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])]
    stage = dist.get_rank() // 2
    key = ["first", "second"][stage]
    targets = {key: on_meta(full[key], meshes[stage], [Shard(0)]), "both": torch.empty(3)}
    result = load(full, targets)
    assert result.keys() == targets.keys()
    assert_bits(result[key].to_local(), split(full[key], meshes[stage], [Shard(0)]), key)
    assert_bits(result["both"], full["both"], "both")


@check
def wrappers_names_are_understood():
    mesh = init_device_mesh("cpu", (RANKS,))
    reference = trained()
    net = sharded(mesh)
    compiled = torch.compile(net)
    for given in (reference.state_dict(), torch.compile(reference).state_dict()):
        for target in (net, compiled):
            DistModule(target).load_state_dict(given if dist.get_rank() == 0 else {}, assign=True)
            assert_loaded(net, reference)
    prefixed = {f"module.{key}": value for key, value in reference.state_dict().items()}
    DistModule(net).load_state_dict(prefixed if dist.get_rank() == 0 else {})
    assert_loaded(net, reference)
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 3))
    full = nn.Linear(2, 3).state_dict()
    DistModule(ddp).load_state_dict(full if dist.get_rank() == 0 else {})
    everywhere = of_all_ranks(full)
    assert_bits(ddp.module.weight.detach(), everywhere[0]["weight"], "weight")


@check
def only_its_own_memory_is_needed():
    """The peak of allocations: a rank's shard, and one piece."""
    mesh = init_device_mesh("cpu", (RANKS,))
    piece_nbytes = 1 << 20
    net = nn.ModuleList(nn.Linear(512, 512, bias=False, device="meta") for _ in range(16))
    for number, layer in enumerate(net):
        dim = number % 2  # whole rows can be sent from where they are, columns cannot
        fully_shard(layer, mesh=mesh, shard_placement_fn=lambda _, dim=dim: Shard(dim))
    full = {f"{k}.weight": torch.randn(512, 512) for k in range(16)} if dist.get_rank() == 0 else {}
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        DistModule(net, piece_nbytes=piece_nbytes).load_state_dict(full, assign=True)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    shard = 16 * 512 * 512 * 4 // RANKS
    assert shard <= peak <= shard + piece_nbytes + (256 << 10), (shard, peak)


def saved(folder, full):
    from safetensors.torch import save_file

    tensors = {key: value.clone() for key, value in full.items() if isinstance(value, torch.Tensor)}
    keys = sorted(tensors)
    parts = {"a.safetensors": keys[::2], "b.safetensors": keys[1::2]}
    for name, part in parts.items():
        save_file({key: tensors[key] for key in part}, folder / name, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: name for name, part in parts.items() for key in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.save(full, folder / "all.pt")
    torch.save(full, folder / "old.pt", _use_new_zipfile_serialization=False)
    whole = (folder / "a.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(whole[:-3])
    (folder / "cut.pt").write_bytes((folder / "all.pt").read_bytes()[:-100])
    (folder / "broken.index.json").write_text(json.dumps({"weight_map": {"x": "../a.safetensors"}}))


@check
def files():
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where, 0)
    folder = Path(where[0])
    reference = trained()
    full = reference.state_dict()
    if dist.get_rank() == 0:
        saved(folder, full)
    dist.barrier()
    mesh = init_device_mesh("cpu", (RANKS,))
    for name in ("all.pt", "old.pt", "", "model.safetensors.index.json"):
        net = sharded(mesh)
        net.note = reference.note
        result = DistModule(net).load_checkpoint(folder / name, strict=name.endswith("pt"), assign=True)
        assert result == ([] if name.endswith("pt") else ["_extra_state"], [])
        assert_loaded(net, reference)
    for name in ("cut.safetensors", "cut.pt", "broken.index.json", "none.safetensors"):
        text = error_on_all(lambda name=name: DistModule(sharded(mesh)).load_checkpoint(folder / name, assign=True))
        assert name in text, text


@check
def accelerate_loads_through_it():
    import accelerate
    from accelerate.utils import modeling

    from ppe_ddp.sharding import load_state_dict, patch_accelerate

    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where, 0)
    folder = Path(where[0])
    reference = trained()
    if dist.get_rank() == 0:
        saved(folder, reference.state_dict())
        (folder / "bad.safetensors").write_bytes(b"not at all")
    dist.barrier()
    assert bool(load_state_dict(str(folder / "a.safetensors"))) == (dist.get_rank() == 0)
    mesh = init_device_mesh("cpu", (RANKS,))
    theirs = modeling.load_state_dict
    for wrap in (DistModule, lambda net: net):
        for meta in (True, False):
            net = sharded(mesh, meta=meta)
            net.note = reference.note
            with patch_accelerate():
                index = str(folder / "model.safetensors.index.json")
                accelerate.load_checkpoint_in_model(wrap(net), index)
            assert_loaded(net, reference)
    with patch_accelerate():
        bad = str(folder / "bad.safetensors")
        text = error_on_all(lambda: accelerate.load_checkpoint_in_model(sharded(mesh), bad))
    assert "bad.safetensors" in text
    assert modeling.load_state_dict is theirs is accelerate.utils.load_state_dict


def needs(name):
    """Modules that a check needs and that may not be installed."""
    return {"files": ["safetensors"], "accelerate_loads_through_it": ["safetensors", "accelerate"]}.get(name, [])


def run(name):
    """One check, on a rank of any process group."""
    torch.manual_seed(dist.get_rank())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*ComplexHalf.*")
        CHECKS[name]()
    dist.barrier()


def main(names):
    import ppe_ddp

    torch.set_num_threads(1)
    ppe_ddp.init_process_group("mpi4py", init_method="mpi://", quiet=True)
    for name in names:
        error = None
        try:
            run(name)
        except Exception:
            error = f"rank {dist.get_rank()}:\n{traceback.format_exc()}"
            print(name, error, file=sys.stderr, flush=True)
            sys.exit(1)  # the other ranks may hang in this check
        if dist.get_rank() == 0:
            print(json.dumps({"name": name, "errors": []}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
