"""Compressors in the wrapper: on graphs that change, against one process, resumed, and beside everything else."""

import copy
import io
import itertools
import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as default
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.utils.checkpoint import checkpoint

from one_process import Routes, assert_gradients, assert_same_on_all_ranks, data, gradients, mean_gradients, mlp, seeded
from ppe_ddp import DisagreementError, DistributedDataParallel, DistributedOptimizer, FunctionError, PeerAbortedError
from ppe_ddp.compression import (
    BF16,
    FP16,
    ByParameter,
    Compressor,
    ErrorFeedback,
    Int8,
    Link,
    PowerSGD,
    RandomK,
    Sign,
    TopK,
    Uncompressed,
    WarmUp,
)
from rank_tests import each_variant, long, on_three_ranks, on_two_ranks

METHODS = {
    "fp16": FP16(),
    "int8": Int8(block=64),
    "topk": ErrorFeedback(TopK(0.2, min_numel=20)),
    "randomk": ErrorFeedback(RandomK(0.2, min_numel=20)),
    "sign": ErrorFeedback(Sign(block=64)),
    "powersgd": ErrorFeedback(PowerSGD(1)),
    "mixed": WarmUp(ErrorFeedback(ByParameter({"*.bias": BF16(), "layers.0.*": PowerSGD(1)}, Int8(block=8))), 2),
}
each_method = pytest.mark.parametrize("name", METHODS)


def way(rank, step):
    generator = torch.Generator().manual_seed(97 * step + 7 * rank)
    return torch.randperm(6, generator=generator)[: 1 + (step + rank) % 4].tolist()


def walk(step):
    def run(model, rank):
        model(data(5, 16, rank=rank, step=step), way(rank, step)).pow(2).sum().backward()

    return run


def residuals(wrapper):
    """The mean of what is kept, by name: by every rank, or by one of each node."""
    found = {}
    state = wrapper.comm_state_dict()
    state = (state[0] if isinstance(state, list) else state)["parameters"]  # Megatron's has one for each kind
    for name, parameter in wrapper.module.named_parameters():
        kept = state.get(name, {}).get("residual")
        number = torch.tensor(float(kept is not None))
        kept = torch.zeros_like(parameter) if kept is None else kept.view_as(parameter)
        dist.all_reduce(kept)
        dist.all_reduce(number)
        found[name] = kept / max(1.0, number.item())
    return found


def check_that_nothing_is_lost(name, **options):
    """Train on masks that change, and account for every gradient: handed over, or kept."""
    module = seeded(Routes, 16, 6)
    wrapper = DistributedDataParallel(module, **options)
    wrapper.register_comm_hook(METHODS[name])
    handed = {key: torch.zeros_like(parameter) for key, parameter in module.named_parameters()}
    total = copy.deepcopy(handed)
    for step in range(8):
        expected = mean_gradients(module, walk(step))
        wrapper.zero_grad()
        walk(step)(wrapper, dist.get_rank())
        assert_same_on_all_ranks(module)
        for key, parameter in module.named_parameters():
            assert (parameter.grad is None) == (expected[key] is None)
            if expected[key] is not None:
                total[key] += expected[key]
                handed[key] += parameter.grad
    rough = {"fp16": 2e-2, "int8": 0.5}.get(name)
    kept = residuals(wrapper)
    for key in handed:
        tolerance = 1e-4 if rough is None else rough
        torch.testing.assert_close(handed[key] + kept[key], total[key], rtol=tolerance, atol=tolerance)
    if rough is None:
        assert max(part.abs().max() for part in kept.values()) > 1e-3
    return wrapper


@each_method
@each_variant
@on_two_ranks
def test_masks_that_change_lose_nothing(name, options):
    check_that_nothing_is_lost(name, **options)


@each_method
@on_three_ranks
def test_masks_that_change_lose_nothing_on_three_ranks(name):
    check_that_nothing_is_lost(name, bucket_cap_mb=2e-3)


@on_two_ranks
def test_without_loss_of_information_gradients_are_those_of_no_compression():
    for compressor, exact in ((Uncompressed(), True), (ErrorFeedback(TopK(1.0, min_numel=0)), False)):
        plain, ours = seeded(Routes, 16, 6), seeded(Routes, 16, 6)
        wrappers = [DistributedDataParallel(module, bucket_cap_mb=2e-3) for module in (plain, ours)]
        wrappers[1].register_comm_hook(compressor)
        for step in range(5):
            for wrapper in wrappers:
                wrapper.zero_grad()
                walk(step)(wrapper, dist.get_rank())
            for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
                assert (one.grad is None) == (other.grad is None)
                if one.grad is not None and exact:
                    assert torch.equal(one.grad, other.grad)
                elif one.grad is not None:
                    torch.testing.assert_close(one.grad, other.grad)


def move(layers):
    layers.add_module("moved", layers._modules.pop("0"))


def move_last(layers):
    layers.add_module("moved", layers._modules.pop("2"))


def swap(layers):
    layers[0], layers[2] = layers[2], layers[0]


def in_place(wrapper, rename):
    rename(wrapper.module)
    return wrapper


def copied_behind(wrapper, rename):
    return copy.deepcopy(in_place(wrapper, rename))


def copied_before(wrapper, rename):
    again = copy.deepcopy(wrapper)
    in_place(wrapper, rename)
    return in_place(again, rename)


def resumed(wrapper, rename):
    module = copy.deepcopy(in_place(wrapper, rename).module)
    state = wrapper.comm_state_dict()
    wrapper = DistributedDataParallel(module)
    wrapper.register_comm_hook(ErrorFeedback(TopK(0.1, min_numel=0)))
    wrapper.load_comm_state_dict(state)
    return wrapper


def check_that_nothing_is_lost_of_what_is_renamed(rename, goes_on=in_place):
    """Account for each parameter, whatever its name: handed over, or kept."""
    module, rank = seeded(mlp, 16, 16, 16), dist.get_rank()
    wrapper = DistributedDataParallel(module)
    wrapper.register_comm_hook(ErrorFeedback(TopK(0.1, min_numel=0)))
    total, handed = {}, {}
    for number in range(6):
        if number == 3:
            wrapper = goes_on(wrapper, rename)
            renamed = dict(zip(module.parameters(), wrapper.module.parameters(), strict=True))
            total, handed = ({renamed[one]: value for one, value in table.items()} for table in (total, handed))
            module = wrapper.module

        def step(model, rank, number=number):
            model(data(5, 16, rank=rank, step=number)).pow(2).sum().backward()

        expected = mean_gradients(module, step)
        wrapper.zero_grad()
        step(wrapper, rank)
        for name, parameter in module.named_parameters():
            total[parameter] = total.get(parameter, 0) + expected[name]
            handed[parameter] = handed.get(parameter, 0) + parameter.grad
    for name, kept in residuals(wrapper).items():
        parameter = module.get_parameter(name)
        torch.testing.assert_close(handed[parameter] + kept, total[parameter], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rename", [move, move_last, swap])
@pytest.mark.parametrize("goes_on", [in_place, copied_behind, copied_before, resumed])
@on_two_ranks
def test_what_is_kept_follows_its_parameter_to_another_name(rename, goes_on):
    check_that_nothing_is_lost_of_what_is_renamed(rename, goes_on)


def train(wrapper, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        walk(step)(wrapper, dist.get_rank())
        optimizer.step()


def check_resumed(name):
    """Train without and with an interruption."""

    def made():
        wrapper = DistributedDataParallel(seeded(Routes, 16, 6), bucket_cap_mb=2e-3)
        wrapper.register_comm_hook(METHODS[name])
        return wrapper, torch.optim.SGD(wrapper.parameters(), lr=0.05, momentum=0.9)

    wrapper, optimizer = made()
    train(wrapper, optimizer, range(7))
    saved = copy.deepcopy((wrapper.state_dict(), optimizer.state_dict(), wrapper.comm_state_dict()))
    train(wrapper, optimizer, range(7, 14))

    again, its_optimizer = made()
    again.load_state_dict(saved[0])
    its_optimizer.load_state_dict(saved[1])
    again.load_comm_state_dict(saved[2])
    train(again, its_optimizer, range(7, 14))
    for key, value in wrapper.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    if name not in ("fp16", "int8"):  # and that is not so by itself
        forgetful, other = made()
        forgetful.load_state_dict(saved[0])
        other.load_state_dict(saved[1])
        train(forgetful, other, range(7, 14))
        assert any(not torch.equal(value, forgetful.state_dict()[key]) for key, value in wrapper.state_dict().items())


@each_method
@on_two_ranks
def test_a_resumed_run_equals_an_uninterrupted_one(name):
    check_resumed(name)


@on_two_ranks
def test_a_state_is_that_of_one_rank_and_one_compressor():
    wrapper = DistributedDataParallel(seeded(Routes, 16, 6))
    assert wrapper.comm_state_dict().keys() == {"buckets"}
    wrapper.load_comm_state_dict({})
    wrapper.register_comm_hook(ErrorFeedback(Sign()))
    walk(0)(wrapper, dist.get_rank())
    state = wrapper.comm_state_dict()
    wrapper.load_comm_state_dict({"buckets": state["buckets"]})  # as it is without a compressor
    assert not any(wrapper.comm_state_dict()["parameters"].values())
    full = wrapper.comm_state_dict()
    wrapper.load_comm_state_dict({key: own for key, own in full.items() if own != {}})  # as it is in a checkpoint
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    assert torch.load(file, weights_only=True).keys() == state.keys()
    with pytest.raises(ValueError, match="state of communication is of rank 5, and here it is"):
        wrapper.load_comm_state_dict({**state, "rank": 5})
    with pytest.raises(ValueError, match="of world_size 7, and here it is 2"):
        wrapper.load_comm_state_dict({**state, "world_size": 7})
    with pytest.raises(ValueError, match=r"of compressor 'Int8\(\)'"):
        wrapper.load_comm_state_dict({**state, "compressor": "Int8()"})
    with pytest.raises(ValueError, match="parameter 'gone', which the module does not have"):
        wrapper.load_comm_state_dict({**state, "parameters": {"gone": {}}})
    with pytest.raises(ValueError, match="state of communication is of rank None"):
        wrapper.load_comm_state_dict({"steps": 1})


@on_two_ranks
def test_with_an_empty_state_a_compressor_begins_anew():
    wrapper = DistributedDataParallel(seeded(Routes, 16, 6))
    wrapper.register_comm_hook(ErrorFeedback(Sign()))
    walk(0)(wrapper, dist.get_rank())
    before = wrapper.comm_state_dict()
    wrapper.load_comm_state_dict({})
    after = wrapper.comm_state_dict()
    assert (before["steps"], after["steps"]) == (1, 0)
    assert before["parameters"]
    assert not after["parameters"]
    assert after["buckets"] == before["buckets"]


@on_two_ranks
def test_where_ranks_train_apart_a_compressor_begins_anew():
    wrapper = DistributedDataParallel(seeded(Routes, 16, 6))
    wrapper.register_comm_hook(WarmUp(ErrorFeedback(Sign()), 1))
    for step in range(2):
        walk(step)(wrapper, dist.get_rank())
    together = wrapper.comm_state_dict()
    assert together["steps"] == 2
    wrapper.train_apart()
    assert wrapper.comm_state_dict()["steps"] == 0
    wrapper.load_comm_state_dict(together)
    assert wrapper.comm_state_dict()["steps"] == 0
    assert not wrapper.comm_state_dict()["parameters"]


@on_two_ranks
def test_a_copy_made_after_a_failed_step_counts_steps_alike():
    wrapper = DistributedDataParallel(seeded(mlp, 16, 16, 16), bucket_cap_mb=1e-6)
    wrapper.register_comm_hook(WarmUp(ErrorFeedback(RandomK(0.2, min_numel=0)), 2))
    for _ in range(2):
        output = wrapper(data(3, 16, rank=dist.get_rank()))
        if dist.get_rank():
            output.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError if dist.get_rank() else PeerAbortedError):
            output.sum().backward()
        wrapper = copy.deepcopy(wrapper)
        wrapper.zero_grad()
        wrapper(data(3, 16, rank=dist.get_rank())).square().sum().backward()
        assert_same_on_all_ranks(wrapper.module)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, *long(torch.float16, torch.float64)], ids=str)
@each_method
@on_two_ranks
def test_gradients_of_any_dtype(name, dtype):
    def run(model, rank):
        for k, parameter in enumerate(model.parameters()):
            parameter.grad = data(*parameter.shape, rank=rank, step=k, dtype=dtype)

    class Tensors(nn.Module):
        def __init__(self):
            super().__init__()
            for k, shape in enumerate([(16, 16), (), (0,), (5,), (8, 2, 3, 3)]):
                setattr(self, f"p{k}", nn.Parameter(torch.zeros(shape, dtype=dtype)))
            self.t = nn.Parameter(torch.zeros(12, 20, dtype=dtype).t())
            self.c = nn.Parameter(torch.zeros(4, 6, 3, 3, dtype=dtype).to(memory_format=torch.channels_last))

    module = Tensors()
    wrapper = DistributedDataParallel(module)
    wrapper.register_comm_hook(METHODS[name])
    total = {key: torch.zeros_like(parameter) for key, parameter in module.named_parameters()}
    expected = mean_gradients(module, run)
    for _ in range(60):
        run(module, dist.get_rank())
        wrapper.finish_grad_sync()
        assert_same_on_all_ranks(module)
        for key, parameter in module.named_parameters():
            assert parameter.grad.dtype is dtype
            total[key] += parameter.grad / 60
    for key, value in expected.items():  # what is kept is a few gradients of sixty
        assert (total[key] - value).norm() <= 0.25 * value.norm() + 0.02, key


def assert_gradients_of(found, expected, **tolerance):
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, msg=lambda text, key=key: f"{key}: {text}", **tolerance)


def check_one_rank_alone(compressor, **tolerance):
    """One rank has a backward, the other only takes part in it."""
    module = seeded(Routes, 16, 6)
    wrapper = DistributedDataParallel(module)
    wrapper.register_comm_hook(compressor)

    def step(model, rank):
        if rank == 1:
            model(data(5, 16, rank=rank), [2, 4]).sum().backward()

    expected = mean_gradients(module, step)
    step(wrapper, dist.get_rank())
    if dist.get_rank() != 1:
        wrapper.finish_grad_sync()
    assert_gradients(module, expected, **tolerance)
    assert_same_on_all_ranks(module)
    walk(0)(wrapper, dist.get_rank())


@on_two_ranks
def test_one_rank_alone_has_a_gradient():
    check_one_rank_alone(ErrorFeedback(PowerSGD(16, min_compression=0)), rtol=1e-4, atol=1e-4)


class Withheld(torch.autograd.Function):
    """Gives None as the gradient of a weight."""

    @staticmethod
    def forward(_ctx, _weight, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, gradient):
        return None, gradient


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x, *, uses):
        return x * self.weight if uses else Withheld.apply(self.weight, x)


@on_two_ranks
def test_a_gradient_that_autograd_gives_as_none_stays_none_unless_something_was_kept():
    model = DistributedDataParallel(Gate())
    model.register_comm_hook(ErrorFeedback(TopK(0.25, min_numel=0)))  # sends one element a step
    handed = torch.zeros(4)
    for uses, exists in [(False, False), (True, True), (False, True), (False, True), (False, True), (False, False)]:
        model.zero_grad()
        model(torch.arange(1.0, 5.0), uses=uses).sum().backward()
        assert (model.module.weight.grad is not None) is exists
        handed += model.module.weight.grad if exists else 0
    assert handed.tolist() == [1, 2, 3, 4]


class Reentrant(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)

    def forward(self, x, rank):
        x = torch.tanh(self.first(x))
        if rank == 0:
            return checkpoint(self.second, x, use_reentrant=True)
        return self.second(x)


@on_two_ranks
def test_gradients_that_come_late_are_compressed_in_a_second_round():
    module = seeded(Reentrant)
    wrapper = DistributedDataParallel(module)
    wrapper.register_comm_hook(ErrorFeedback(TopK(0.1, min_numel=0)))
    total, handed = {}, {}
    for turn in range(6):

        def step(model, rank, turn=turn):
            model(data(5, 16, rank=rank, step=turn), rank).pow(2).sum().backward()

        expected = mean_gradients(module, step)
        wrapper.zero_grad()
        step(wrapper, dist.get_rank())
        for key, parameter in module.named_parameters():
            total[key] = total.get(key, 0) + expected[key]
            handed[key] = handed.get(key, 0) + parameter.grad
    kept = residuals(wrapper)
    assert_gradients_of({key: handed[key] + kept[key] for key in total}, total, rtol=1e-4, atol=1e-4)


class Failing(Compressor):
    """Raises once, on one rank, between two rounds of the step after ``step`` others."""

    def __init__(self, step):
        self.step = step
        self.has_failed = False

    def __repr__(self):
        return f"Failing({self.step})"

    def average(self, gradients, link):
        yield from link.all_reduce(torch.ones(3))
        if gradients.step == self.step and dist.get_rank() == 1 and not self.has_failed:
            self.has_failed = True
            raise KeyError("between two rounds")
        yield from Uncompressed().average(gradients, link)


class Silent(Compressor):
    def average(self, gradients, link):
        gradients.average.div_(2)


def check_a_compressor_that_raises():
    """One rank's compressor raises between two rounds; the steps after that are right."""
    module = seeded(Routes, 16, 6)
    wrapper = DistributedDataParallel(module, bucket_cap_mb=1e-3)
    wrapper.register_comm_hook(Failing(1))
    walk(0)(wrapper, dist.get_rank())
    wrapper.zero_grad()
    with pytest.raises(KeyError if dist.get_rank() == 1 else RuntimeError, match="between two rounds"):
        walk(1)(wrapper, dist.get_rank())
    for step in range(2, 5):
        expected = mean_gradients(module, walk(step))
        wrapper.zero_grad()
        walk(step)(wrapper, dist.get_rank())
        assert_gradients(module, expected)


@on_two_ranks
def test_a_compressor_that_raises_is_named_and_the_next_step_works():
    check_a_compressor_that_raises()
    wrapper = DistributedDataParallel(seeded(mlp, 4, 4))
    wrapper.register_comm_hook(ErrorFeedback(Silent()))
    with pytest.raises(FunctionError, match=r"Silent\(\) has returned NoneType: write it as a generator"):
        wrapper(torch.ones(1, 4)).sum().backward()


@on_two_ranks
def test_ranks_must_register_the_same():
    wrapper = DistributedDataParallel(seeded(Routes, 16, 6))
    with pytest.raises(DisagreementError, match=r"rank 1 has gradients averaged by compressor TopK\(ratio=0.2"):
        wrapper.register_comm_hook(TopK(0.1 * (1 + dist.get_rank())))


@on_two_ranks
def test_a_wrapper_takes_one():
    wrapper = DistributedDataParallel(seeded(Routes, 16, 6))
    with pytest.raises(TypeError, match=r"takes a compressor, not its class: Int8\(\.\.\.\)"):
        wrapper.register_comm_hook(Int8)
    wrapper.register_comm_hook(Int8())
    with pytest.raises(RuntimeError, match=r"and has Int8\(block=256, stochastic=False\)"):
        wrapper.register_comm_hook(Sign())
    with pytest.raises(RuntimeError, match="takes one compressor or one hook"):
        wrapper.register_comm_hook(None, lambda state, bucket: None)
    other = DistributedDataParallel(seeded(Routes, 16, 6))
    other.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(RuntimeError, match="has a hook already"):
        other.register_comm_hook(Int8())


@on_two_ranks
def test_one_warning_where_all_ranks_are_on_one_machine():
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("ppe_ddp").addHandler(handler)
    logging.getLogger("ppe_ddp").setLevel(logging.WARNING)
    wrapper = DistributedDataParallel(seeded(Routes, 16, 6))
    wrapper.register_comm_hook(Int8())
    for step in range(2):
        walk(step)(wrapper, dist.get_rank())
    logging.getLogger("ppe_ddp").removeHandler(handler)
    found = [message for message in messages if "compression is for links between machines" in message]
    assert len(found) == (1 if dist.get_rank() == 0 else 0)


@each_method
@on_two_ranks
def test_a_distributed_optimizer_gets_the_same_averages(name):
    plain, sharded = seeded(Routes, 16, 6), seeded(Routes, 16, 6)
    wrappers = [DistributedDataParallel(module) for module in (plain, sharded)]
    for wrapper in wrappers:
        wrapper.register_comm_hook(METHODS[name])
    optimizers = [
        torch.optim.SGD(plain.parameters(), lr=0.1),
        DistributedOptimizer(torch.optim.SGD(sharded.parameters(), lr=0.1), wrappers[1]),
    ]
    for step in range(5):
        for wrapper, optimizer in zip(wrappers, optimizers, strict=True):
            optimizer.zero_grad()
            walk(step)(wrapper, dist.get_rank())
            optimizer.step()
    for one, other in zip(plain.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@on_two_ranks
def test_one_rank_alone_compresses_as_well():
    groups = [dist.new_group([rank]) for rank in range(2)]
    module = seeded(Routes, 16, 6)
    wrapper = DistributedDataParallel(module, process_group=groups[dist.get_rank()])
    wrapper.register_comm_hook(FP16())
    walk(0)(wrapper, dist.get_rank())
    found = gradients(module)
    plain = seeded(Routes, 16, 6)
    walk(0)(plain, dist.get_rank())
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(found[name], parameter.grad.half().float())


def settled(hook, steps):
    """The gradients of a module whose parameters stay, after many steps with the same data."""
    module = seeded(lambda: mlp(4, 30, 20, 4))
    wrapper = DistributedDataParallel(module)
    wrapper.register_comm_hook(*hook)
    for _ in range(steps):
        wrapper.zero_grad()
        wrapper(data(5, 4)).pow(2).sum().backward()
    return gradients(module)


@on_two_ranks
def test_torchs_hook_of_the_same_method_agrees():
    state = power.PowerSGDState(
        None,
        matrix_approximation_rank=1,
        start_powerSGD_iter=2,
        min_compression_rate=1,
        use_error_feedback=False,
        random_seed=3,
    )
    exact = settled((Uncompressed(),), 1)
    for ours, theirs, tolerance, steps in (
        (PowerSGD(1, min_compression=1), (state, power.powerSGD_hook), 1e-3, 40),
        (FP16(), (None, default.fp16_compress_hook), 2e-3, 2),
        (BF16(), (None, default.bf16_compress_hook), 2e-2, 2),
    ):
        found, expected = settled((ours,), steps), settled(theirs, steps)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=tolerance, atol=tolerance)
        assert any(not torch.equal(gradient, exact[name]) for name, gradient in found.items())


class Slow(Compressor):
    """Three rounds of messages that tell what goes on; each is right only if every rank sends the same in its turn."""

    def __init__(self, log):
        self.log = log

    def __repr__(self):
        return "Slow()"

    def average(self, gradients, link):
        name = gradients.segments[0].name
        for number in range(3):
            stamp = torch.tensor([float(sum(map(ord, name)) + number)])
            self.log.append((name, number))
            yield from link.all_reduce(stamp)
            assert stamp.item() == link.size * (sum(map(ord, name)) + number)
        yield from Uncompressed().average(gradients, link)


@each_variant
@on_three_ranks
def test_several_buckets_are_under_way_in_the_same_order_everywhere(options):
    log, module = [], seeded(Routes, 16, 6)
    wrapper = DistributedDataParallel(module, **{"bucket_cap_mb": 1e-3, **options})
    wrapper.register_comm_hook(Slow(log))
    for step in range(6):
        expected = mean_gradients(module, walk(step))
        wrapper.zero_grad()
        walk(step)(wrapper, dist.get_rank())
        assert_gradients(module, expected)
    logs = [None] * 3
    dist.all_gather_object(logs, log)
    assert logs[0] == logs[1] == logs[2]
    firsts = [k for k, (_, number) in enumerate(logs[0]) if number == 0]
    assert any(later == earlier + 1 for earlier, later in itertools.pairwise(firsts))


@on_two_ranks
@pytest.mark.parametrize(("numel", "pieces"), [(1, 1), (1 << 16, 1), ((1 << 17) + 3, 3)])
def test_long_messages_go_over_gloo_in_pieces(numel, pieces):
    link = Link(dist.group.WORLD, dist.get_rank(), 2, torch.device("cpu"))
    gathering = link.all_gather(torch.arange(numel, dtype=torch.float32).view(1, -1) + dist.get_rank())
    pending = next(gathering)
    assert len(pending.parts) == pieces
    pending.wait()
    with pytest.raises(StopIteration) as ended:
        next(gathering)
    rows = ended.value.value
    assert rows.shape == (2, 1, numel)
    for rank in range(2):
        assert torch.equal(rows[rank, 0], torch.arange(numel, dtype=torch.float32) + rank)


@on_two_ranks
def test_what_is_kept_follows_a_parameter_into_another_order_of_memory_or_dtype():
    module = nn.Conv2d(3, 4, 2, bias=False)
    wrapper = DistributedDataParallel(module)
    wrapper.register_comm_hook(ErrorFeedback(TopK(0.05, min_numel=1)))
    given = handed = torch.zeros_like(module.weight)
    changes = {2: {"memory_format": torch.channels_last}, 4: {"memory_format": torch.contiguous_format}}
    changes[6] = {"dtype": torch.float64}
    for step in range(9):
        module.to(**changes.get(step, {}))
        wrapper.zero_grad()
        with wrapper.no_sync():
            wrapper(data(1, 3, 2, 2, rank=dist.get_rank(), step=step).to(module.weight)).pow(2).sum().backward()
        given = given + module.weight.grad.contiguous()
        wrapper.finish_grad_sync()
        handed = handed + module.weight.grad.contiguous()
    kept = wrapper.comm_state_dict()["parameters"]["weight"]["residual"]
    lost = given - handed - kept.view_as(given)
    dist.all_reduce(lost)
    assert lost.abs().max() < 1e-4 < kept.abs().max()


@on_two_ranks
def test_a_state_has_the_parameters_of_the_module():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wrapper = DistributedDataParallel(module)
    wrapper.register_comm_hook(ErrorFeedback(TopK(0.5, min_numel=1)))
    wrapper(torch.ones(1, 4)).sum().backward()
    del module[1]
    wrapper.zero_grad()
    wrapper(torch.ones(1, 4)).sum().backward()
    state = wrapper.comm_state_dict()
    assert set(state["parameters"]) == {"0.weight", "0.bias"}
    module[0] = nn.Linear(4, 4)
    module.append(nn.Linear(4, 4))
    wrapper.zero_grad()
    (0 * wrapper(torch.ones(1, 4)).sum()).backward()
    assert not any(parameter.grad.any() for parameter in module.parameters())  # nothing of those that are gone
    wrapper.load_comm_state_dict(state)
