"""Mixed precision, compared with a module that is in low precision as a whole, with any graph.

torch's own wrapper is no reference on CPUs: it raises there ("cpu backend doesn't support events").
"""

import copy
import sys
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from one_process import assert_gradients, assert_same_on_all_ranks, data, gradients, mlp, of_all_ranks, seeded
from ppe_ddp import DisagreementError, DistributedDataParallel, DistributedOptimizer, average, mixed_precision
from rank_tests import on_two_ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Routes(nn.Module):
    """Goes another way on each rank and in each step; a rank may use no parameter that another uses."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(2))

    def forward(self, x, way):
        if way == 2:
            return self.parts[4](x) * self.scales[0]
        return self.parts[way](x) + self.parts[3](x)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x, way):
        hidden = self.hidden(self.embedding(x[:, 0].long().abs() % 6))
        return nn.functional.linear(hidden, self.embedding.weight) + self.head(hidden)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 4)

    def forward(self, x, way):
        return self.rnn(x)[0]


class Checkpointed(nn.Module):
    """What is computed again uses parameters of its own, of submodules, and of other modules."""

    def __init__(self, *, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.scale = nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList(mlp(4, 4, 4) for _ in range(3))
        self.last = nn.Linear(4, 4)

    def forward(self, x, way):
        x = self.blocks[0](x)
        for block in self.blocks[1 + way % 2 :]:
            x = checkpoint(self.part, block, x, use_reentrant=self.reentrant)
        return self.last(x)

    def part(self, block, x):
        return nn.functional.linear(block(x) * self.scale, self.last.weight)


MODELS = {
    "routes": Routes,
    "shared": Shared,
    "recurrent": Recurrent,
    "checkpointed": lambda: Checkpointed(reentrant=False),
    "reentrant": lambda: Checkpointed(reentrant=True),
}


def loss(model, rank, step=0, dtype=FP32):
    x = data(3, 4, rank=rank, step=step).to(dtype)
    return model(x, (rank + step) % 3).float().pow(2).sum()


def expected_gradients(module, config, step=0):
    """What each `.grad` shall be: computed in one dtype, averaged in another, kept in the parameter's own."""
    tables = []
    param_dtype = config.param_dtype or FP32
    for rank in range(dist.get_world_size()):
        twin = copy.deepcopy(module).to(param_dtype)
        for parameter in twin.parameters():
            parameter.grad = None
        loss(twin, rank, step, param_dtype).backward()
        tables.append(gradients(twin))
    reduce_dtype = config.reduce_dtype or param_dtype
    return {name: mean([table[name] for table in tables], reduce_dtype) for name in tables[0]}


def mean(gradients, dtype):
    shares = [gradient.to(dtype) / len(gradients) for gradient in gradients if gradient is not None]
    return sum(shares[1:], shares[0]).to(FP32) if shares else None


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "config",
    [
        _MixedPrecision(param_dtype=BF16),
        _MixedPrecision(param_dtype=BF16, reduce_dtype=FP32),
        _MixedPrecision(reduce_dtype=FP16),
    ],
    ids=["bf16", "bf16-fp32", "reduce-fp16"],
)
@on_two_ranks
def test_gradients_are_those_of_low_precision(config, name):
    module = seeded(MODELS[name])
    before = copy.deepcopy(module.state_dict())
    wrapper = DistributedDataParallel(module, mixed_precision=config, bucket_cap_mb=0.0001)
    for step in range(4):
        expected = expected_gradients(module, config, step)
        wrapper.zero_grad()
        loss(wrapper, dist.get_rank(), step).backward()
        # What a reentrant checkpoint uses arrives several times, and adds up in the dtype of .grad.
        assert_gradients(module, expected, rtol=2e-2 if name == "reentrant" else 1e-6, atol=1e-7)
        assert_same_on_all_ranks(module)
    for key, value in module.state_dict().items():
        assert value.dtype is FP32
        assert torch.equal(value, before[key])


class Interrupting:
    """Interrupts this process at a call of ``parameter_table`` of this number from a function of this name."""

    def __init__(self, name, number):
        self.name, self.left, self.call = name, number, mixed_precision.parameter_table

    def __call__(self, module):
        self.left -= sys._getframe(1).f_code.co_name == self.name
        if self.left == 0:
            self.left = -1
            raise KeyboardInterrupt
        return self.call(module)


@pytest.mark.parametrize("name", ["install", "_put_back"])
@pytest.mark.parametrize("number", [1, 3, 4])
@on_two_ranks
def test_an_interrupt_leaves_no_copies_in_the_place_of_parameters(name, number):
    module, config = seeded(mlp, 4, 4, 4), _MixedPrecision(param_dtype=BF16)
    wrapper = DistributedDataParallel(module, mixed_precision=config)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(mixed_precision, "parameter_table", Interrupting(name, number))
        with pytest.raises(KeyboardInterrupt) as _kept:
            wrapper(data(3, 4))
    assert all(isinstance(parameter, nn.Parameter) for parameter in module.parameters())
    assert all(value.dtype is FP32 for value in module.state_dict().values())


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, way):
        return torch.tanh(self.linear(torch.tanh(self.linear(x))))


@pytest.mark.parametrize(("make", "computes_again"), [(Routes, False), (Layer, True)], ids=["routes", "checkpoint"])
@on_two_ranks
def test_a_compiled_wrapper_has_the_same_gradients(make, computes_again):
    torch._dynamo.reset()
    config, module = _MixedPrecision(param_dtype=BF16), seeded(make)
    compiled = torch.compile(DistributedDataParallel(module, mixed_precision=config), backend="aot_eager")
    model = partial(checkpoint, compiled, use_reentrant=False) if computes_again else compiled
    loss(model, dist.get_rank()).backward()
    assert_gradients(module, expected_gradients(module, config), rtol=1e-6, atol=1e-7)  # None of what no rank uses
    if computes_again:
        compiled(data(3, 4), {"way": (0, 1)})  # Dynamo fails where it traces a cast of nested inputs
    torch._dynamo.reset()


class Given(nn.Module):
    """Gives what it computes with, so that a test can see it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 1 + 2**-12))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.left = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.ones(2))
        self.register_buffer("raw", torch.ones(2))
        self.register_buffer("count", torch.ones(2, dtype=torch.int64))

    def forward(self, x, *, index):
        seen = {name: tensor.dtype for name, tensor in (*self.named_parameters(), *self.named_buffers())}
        seen |= {"weight": self.weight.dtype, "x": x["x"].dtype, "index": index.dtype}
        return (x["x"] * self.weight * self.frozen).sum() + self.left.sum(), seen


@on_two_ranks
def test_what_is_cast_and_what_is_not():
    module = Given()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["left", "raw"])
    wrapper = DistributedDataParallel(module, mixed_precision=_MixedPrecision(BF16, FP16, FP16))
    output, seen = wrapper({"x": torch.ones(2)}, index=torch.ones(2, dtype=torch.int64))
    low = {"weight": BF16, "frozen": BF16, "x": BF16, "mean": FP16}
    assert seen == {**low, "left": FP32, "raw": FP32, "count": torch.int64, "index": torch.int64}
    # Not after the forward, before any backward:
    assert {parameter.dtype for parameter in wrapper.parameters()} == {FP32}
    assert (module.weight == 1 + 2**-12).all()
    output.backward()
    assert module.weight.grad.dtype is FP32
    with torch.no_grad():
        assert wrapper({"x": torch.ones(2)}, index=torch.ones(1))[1]["weight"] is BF16
    assert module.weight.dtype is FP32


@on_two_ranks
def test_buckets_are_reduced_in_reduce_dtype():
    seen = []

    def spied(bucket, group):
        seen.append(bucket.buffer().dtype)
        return average(bucket, group)

    for config, dtype in [
        (_MixedPrecision(reduce_dtype=FP16), FP16),
        (_MixedPrecision(param_dtype=BF16), BF16),
        (_MixedPrecision(param_dtype=BF16, reduce_dtype=FP32), FP32),
    ]:
        seen.clear()
        module = seeded(Routes)
        wrapper = DistributedDataParallel(module, mixed_precision=config, reduce_function=spied)
        loss(wrapper, dist.get_rank()).backward()
        assert set(seen) == {dtype}
        assert_gradients(module, expected_gradients(module, config), rtol=1e-6, atol=1e-7)


@on_two_ranks
def test_gradients_of_several_backwards_add_up_in_full_precision():
    config = _MixedPrecision(param_dtype=BF16, reduce_dtype=FP32)
    module = seeded(Routes)
    wrapper = DistributedDataParallel(module, mixed_precision=config)
    tables = [expected_gradients(module, config, step) for step in range(3)]
    total = {}
    for name in tables[0]:
        present = [table[name] for table in tables if table[name] is not None]
        total[name] = sum(present) if present else None
    with wrapper.no_sync():
        for step in range(2):
            loss(wrapper, dist.get_rank(), step).backward()
    loss(wrapper, dist.get_rank(), 2).backward()
    assert_gradients(module, total, rtol=1e-5, atol=1e-6)


class Failing(nn.Module):
    """Raises on rank 0 where it is told to, in the forward or when it is computed again in the backward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.fails_in = None

    def forward(self, x, way):
        if self.fails_in == "forward":
            raise ArithmeticError("here")
        return checkpoint(self.part, x, use_reentrant=False)

    def part(self, x):
        if self.fails_in == "backward" and torch._C._current_graph_task_id() != -1:
            raise ArithmeticError("here")
        return self.linear(x)


@pytest.mark.parametrize("where", ["forward", "backward"])
@on_two_ranks
def test_an_error_leaves_the_parameters_in_place(where):
    config = _MixedPrecision(param_dtype=BF16)
    module = seeded(Failing)
    parameters = list(module.parameters())
    wrapper = DistributedDataParallel(module, mixed_precision=config)
    module.fails_in = where
    with pytest.raises(ArithmeticError):
        loss(wrapper, dist.get_rank()).backward()
    assert [id(parameter) for parameter in module.parameters()] == [id(parameter) for parameter in parameters]
    module.fails_in = None
    wrapper.zero_grad()
    expected = expected_gradients(module, config)
    loss(wrapper, dist.get_rank()).backward()
    assert_gradients(module, expected, rtol=1e-6, atol=1e-7)


@on_two_ranks
def test_hooks_see_the_parameters():
    module = seeded(lambda: Checkpointed(reentrant=False))
    parameters = [id(parameter) for parameter in module.parameters()]
    wrapper = DistributedDataParallel(module, mixed_precision=_MixedPrecision(param_dtype=BF16))
    seen = []
    wrapper.register_comm_hook(lambda model: seen.append([id(parameter) for parameter in model.parameters()]))
    loss(wrapper, dist.get_rank()).backward()
    assert seen == [parameters]


@on_two_ranks
def test_a_wrapper_inside_has_its_parameters_while_copies_are_in_their_place():
    """Also where it lists them anew in the forward of the outer one, which averages over other ranks."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    inner = DistributedDataParallel(seeded(nn.Linear, 4, 4))
    outer = nn.Sequential(inner, seeded(nn.Linear, 4, 4))
    outer = DistributedDataParallel(outer, mixed_precision=_MixedPrecision(param_dtype=BF16), process_group=alone)
    inner.module.bias.requires_grad_(False)
    outer(data(3, 4)).float().sum().backward()
    assert torch.equal(*of_all_ranks(inner.module.weight.grad))


@on_two_ranks
def test_a_wrapper_can_be_copied_after_a_step():
    config = _MixedPrecision(param_dtype=BF16)
    wrapper = DistributedDataParallel(seeded(Recurrent), mixed_precision=config)
    loss(wrapper, dist.get_rank()).backward()
    twin = copy.deepcopy(wrapper)
    twin.zero_grad()
    expected = expected_gradients(twin.module, config)
    loss(twin, dist.get_rank()).backward()
    assert_gradients(twin.module, expected, rtol=1e-6, atol=1e-7)


@on_two_ranks
def test_a_distributed_optimizer_steps_with_the_same_gradients():
    config = _MixedPrecision(param_dtype=BF16)
    module, twin = seeded(Routes), seeded(Routes)
    reference = torch.optim.SGD(twin.parameters(), lr=0.1)
    wrapper = DistributedDataParallel(module, mixed_precision=config)
    optimizer = DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), wrapper, overlap=True)
    for step in range(3):
        expected = expected_gradients(twin, config, step)
        for name, parameter in twin.named_parameters():
            parameter.grad = expected[name]
        reference.step()
        optimizer.zero_grad()
        loss(wrapper, dist.get_rank(), step).backward()
        optimizer.step()  # the parameters arrive in the next forward, before that casts them
    optimizer.synchronize()
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@on_two_ranks
def test_ranks_must_choose_the_same():
    dtype = BF16 if dist.get_rank() else FP16
    with pytest.raises(DisagreementError, match=r"reduce_dtype torch\.bfloat16.* rank 0 .*torch\.float16"):
        DistributedDataParallel(mlp(2, 2), mixed_precision=_MixedPrecision(reduce_dtype=dtype))


@dataclass
class Policy:
    param_dtype: torch.dtype | None = BF16
    reduce_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = False
    output_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False


@on_two_ranks
def test_inputs_stay_as_they_are_where_the_config_says_so():
    wrapper = DistributedDataParallel(Given(), mixed_precision=Policy())
    output, seen = wrapper({"x": torch.ones(2)}, index=torch.ones(1))
    assert (seen["x"], seen["weight"]) == (FP32, BF16)
    output.backward()


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        (BF16, TypeError, "must have param_dtype and reduce_dtype"),
        (Policy(output_dtype=FP32), ValueError, r"output_dtype=torch\.float32 is not supported"),
        (Policy(keep_low_precision_grads=True), ValueError, "keep_low_precision_grads=True is not supported"),
    ],
    ids=["dtype", "output_dtype", "keep_low_precision_grads"],
)
def test_a_config_that_cannot_be_honoured_is_refused(config, error, text):
    with pytest.raises(error, match=text):
        DistributedDataParallel(mlp(2, 2), mixed_precision=config)
