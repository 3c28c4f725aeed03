"""Checks of training on a device, for two ranks: what tests on CPUs hold to one process, where streams order the work.

Without CUDA they run on CPUs over gloo, to see that the checks themselves are right.
"""

import copy
import functools
import gc
import io
import os
import signal
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import ppe_ddp
from one_process import Routes, assert_same_on_all_ranks, data, gradients, mlp, of_all_ranks, seeded
from ppe_ddp import Checkpointer, DistributedDataParallel, DistributedOptimizer, megatron
from ppe_ddp.compression import BF16, FP16, DiLoCo, ErrorFeedback, Int8, PowerSGD, RandomK, Sign, TopK
from ppe_ddp.elastic.training import _placed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def run(name):
    """Call the check of this name; every rank does."""
    CHECKS[name]()


def batch(step=0, rank=None, dtype=torch.float32):
    return data(5, 8, rank=rank, step=step, dtype=dtype).to(DEVICE)


def network(dtype=torch.float32):
    return seeded(mlp, 8, 64, 64, 4).to(DEVICE, dtype)


def loss_of(model, step=0, rank=None, dtype=torch.float32):
    return model(batch(step, rank, dtype=dtype)).square().mean()


def averages(module, step=0, dtype=torch.float32):
    """The gradients of all ranks' batches, computed by this rank alone."""
    twin = copy.deepcopy(module)
    twin.zero_grad()
    size = dist.get_world_size()
    for rank in range(size):
        (loss_of(twin, step, rank, dtype) / size).backward()
    return [parameter.grad for parameter in twin.parameters()]


def hold(module, expected, **tolerance):
    torch.testing.assert_close([parameter.grad for parameter in module.parameters()], expected, **tolerance)
    assert_same_on_all_ranks(module)


@check
def a_scaler_skips_the_step_in_which_one_rank_overflows():
    module = network()
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=100)
    dtype = torch.float16 if DEVICE == "cuda" else torch.bfloat16
    for step in range(6):
        optimizer.zero_grad()
        before = [parameter.detach().clone() for parameter in module.parameters()]
        with torch.autocast(DEVICE, dtype):
            loss = loss_of(model, step)
        overflows = step == 2 and dist.get_rank() == dist.get_world_size() - 1
        scaler.scale(loss * (float("inf") if overflows else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))
        assert moved == (step != 2), step
        assert scaler.get_scale() == (2.0**10 if step < 2 else 2.0**9)
    model.check_in_sync()


@check
def nan_on_one_rank_is_told_on_all_or_the_step_is_skipped():
    for check_for_nan_in_grad in (True, "skip"):
        module = network()
        model = DistributedDataParallel(module, check_for_nan_in_grad=check_for_nan_in_grad)
        for step in range(4):
            model.zero_grad()
            last = dist.get_world_size() - 1
            factor = float("nan") if step == 1 and dist.get_rank() == last else 1.0
            if step == 1 and check_for_nan_in_grad is True:
                with pytest.raises(ppe_ddp.NonFiniteGradientError, match=f"rank {last}"):
                    (loss_of(model, step) * factor).backward()
                continue
            (loss_of(model, step) * factor).backward()
            if step != 1:
                hold(module, averages(module, step))


@check
def channels_last_is_kept():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(
        DEVICE, memory_format=torch.channels_last
    )
    model, twin = DistributedDataParallel(module), copy.deepcopy(module)
    size = dist.get_world_size()

    def images(rank):
        return data(2, 3, 9, 9, rank=rank).to(DEVICE).to(memory_format=torch.channels_last)

    for _ in range(3):
        model.zero_grad()
        model(images(dist.get_rank())).square().mean().backward()
    for rank in range(size):
        (twin(images(rank)).square().mean() / size).backward()
    hold(module, [parameter.grad for parameter in twin.parameters()], rtol=1e-3, atol=1e-5)
    assert module[0].weight.grad.is_contiguous(memory_format=torch.channels_last)


@check
def batch_norm_and_buffers():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).to(DEVICE)
    model = DistributedDataParallel(module)
    for step in range(3):
        model.zero_grad()
        loss_of(model, step).backward()
    model(batch(9))
    assert of_all_ranks(module[1].num_batches_tracked.item()) == [4] * dist.get_world_size()
    if dist.get_world_size() > 1:
        synced = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(module)).to(DEVICE))
        if DEVICE == "cuda":
            loss_of(synced).backward()
            assert_same_on_all_ranks(synced.module)


@check
def compressors_average():
    methods = {
        "bf16": (BF16(), 2e-2),
        "fp16": (FP16(), 2e-3),
        "int8": (Int8(), 3e-2),
        "whole top k": (ErrorFeedback(TopK(1.0)), 1e-5),
    }
    for name, (compressor, tolerance) in methods.items():
        module = network()
        model = DistributedDataParallel(module, shared_memory=False)
        model.register_comm_hook(compressor)
        for step in range(3):
            model.zero_grad()
            loss_of(model, step).backward()
            for ours, theirs in zip(module.parameters(), averages(module, step), strict=True):
                error = (ours.grad - theirs).norm() / theirs.norm()
                assert error <= tolerance, (name, error)
        assert_same_on_all_ranks(module)


@check
def compressors_with_error_feedback_send_all_in_the_end():
    for compressor in (TopK(0.25), RandomK(0.25), Sign(), PowerSGD(rank=2)):
        module = network()
        model = DistributedDataParallel(module, shared_memory=False)
        model.register_comm_hook(ErrorFeedback(compressor))
        sums = [torch.zeros_like(parameter) for parameter in module.parameters()]
        steps = 40
        for _ in range(steps):  # the same batch, so that the mean of what was sent goes to its average
            model.zero_grad()
            loss_of(model, 0).backward()
            for total, parameter in zip(sums, module.parameters(), strict=True):
                total += parameter.grad / steps
        assert_same_on_all_ranks(module)
        expected = averages(module, 0)
        error = torch.cat([(total - mean).flatten() for total, mean in zip(sums, expected, strict=True)]).norm()
        assert error < 0.35 * torch.cat([mean.flatten() for mean in expected]).norm(), (compressor, error)


@check
def a_sharded_optimizer_trains_as_a_whole_one():
    for overlap in (False, True):
        ours, theirs = network(), network()
        model = DistributedDataParallel(ours)
        sharded = DistributedOptimizer(torch.optim.AdamW, model, lr=0.01, overlap=overlap)
        whole = torch.optim.AdamW(theirs.parameters(), lr=0.01)
        for step in range(5):
            sharded.zero_grad()
            loss_of(model, step).backward()
            norm = sharded.clip_grad_norm_(0.5)
            sharded.step()
            for parameter, gradient in zip(theirs.parameters(), averages(theirs, step), strict=True):
                parameter.grad = gradient
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs.parameters(), 0.5))
            whole.step()
        loss_of(model)
        torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), rtol=1e-4, atol=1e-5)


@check
def megatron_accumulates_in_float32():
    for sharded in (False, True):
        module = network(torch.bfloat16)
        config = megatron.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=sharded, bucket_size=2000
        )
        model = megatron.DistributedDataParallel(None, config, module)
        optimizer = DistributedOptimizer(torch.optim.AdamW, model, lr=0.01) if sharded else None
        for _ in range(3):
            model.zero_grad_buffer()
            with model.no_sync():
                loss_of(model, 0, dtype=torch.bfloat16).backward()
            loss_of(model, 1, dtype=torch.bfloat16).backward()
            model.finish_grad_sync()
            expected = [
                a.float() + b.float()
                for a, b in zip(averages(module, 0, torch.bfloat16), averages(module, 1, torch.bfloat16), strict=True)
            ]
            if optimizer is None:
                for parameter, mean in zip(module.parameters(), expected, strict=True):
                    assert parameter.main_grad.dtype is torch.float32
                    assert (parameter.main_grad - mean).norm() <= 2e-2 * mean.norm()
            else:
                optimizer.step()
        loss_of(model, dtype=torch.bfloat16)


@check
def supernets_and_weights():
    module = seeded(Routes, 8, 6).to(DEVICE)
    model = DistributedDataParallel(module)
    rank, size = dist.get_rank(), dist.get_world_size()

    def way(step, rank):
        return [(step + rank) % 6, (2 * step + 3 * rank) % 6]

    for step in range(6):
        model.zero_grad()
        ppe_ddp.weigh(model(batch(step), way(step, rank)).square().mean(), rank + 1.0).backward()
        twin = copy.deepcopy(module)
        twin.zero_grad()
        total = sum(range(1, size + 1))
        for other in range(size):
            loss = twin(batch(step, other), way(step, other)).square().mean()
            (loss * (other + 1.0) / total).backward()
        hold(module, [parameter.grad for parameter in twin.parameters()], rtol=1e-4, atol=1e-6)


@check
def outer_steps():
    module = network()
    model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    DiLoCo(model, optimizer, every=3)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    model.check_in_sync()


@check
def drift_is_found():
    module = network()
    model = DistributedDataParallel(module)
    model.check_in_sync()
    if dist.get_world_size() > 1:
        if dist.get_rank() == 1:
            with torch.no_grad():
                module[0].weight[0, 0] += 1e-3
        with pytest.raises(ppe_ddp.DisagreementError, match=r"0\.weight"):
            model.check_in_sync()


@check
def a_checkpoint_goes_on_bit_by_bit():
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, device=torch.device("cpu"))

    def training():
        model = DistributedDataParallel(seeded(mlp, 8, 16, 4).to(DEVICE))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer, Checkpointer(Path(folder[0]), {"model": model, "optimizer": optimizer})

    def steps(model, optimizer):
        for _ in range(4):
            optimizer.zero_grad()
            noise = torch.randn(5, 8, device=DEVICE)  # by the device's generator, which is part of the checkpoint
            model(noise).square().mean().backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    torch.manual_seed(dist.get_rank())
    model, optimizer, checkpointer = training()
    steps(model, optimizer)
    checkpointer.save(4)
    expected = steps(model, optimizer)
    torch.manual_seed(77)
    model, optimizer, checkpointer = training()
    assert checkpointer.load() is not None
    for ours, theirs in zip(steps(model, optimizer), expected, strict=True):
        assert torch.equal(ours, theirs)


@check
def a_rank_fails_and_all_go_on():
    module = network()
    model = DistributedDataParallel(module, bucket_cap_mb=0.01)
    failing = []

    def fail(gradient):
        if failing:
            raise ArithmeticError("this rank alone")

    module[2].register_forward_hook(lambda module, inputs, output: output.register_hook(fail) and None)
    size = dist.get_world_size()
    for step in range(6):
        failing[:] = [True] if step in (1, 3) and dist.get_rank() == size - 1 else []
        model.zero_grad()
        started = time.monotonic()
        if step in (1, 3):
            expected = ArithmeticError if dist.get_rank() == size - 1 else ppe_ddp.PeerAbortedError
            with pytest.raises(expected):
                loss_of(model, step).backward()
            assert time.monotonic() - started < 20
        else:
            loss_of(model, step).backward()
            hold(module, averages(module, step))


@check
def accumulation_and_hooks():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    for hook in (None, default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        module = network()
        model = DistributedDataParallel(module)
        if hook is not None:
            model.register_comm_hook(None, hook)
        for _ in range(2):
            model.zero_grad()
            with model.no_sync():
                loss_of(model, 0).backward()
            loss_of(model, 1).backward()
            expected = [a + b for a, b in zip(averages(module, 0), averages(module, 1), strict=True)]
            hold(module, expected, rtol=5e-3, atol=1e-3)


@check
def gradients_are_views_of_buckets_only_if_asked():
    for view in (True, False):
        module = network()
        model = DistributedDataParallel(module, gradient_as_bucket_view=view)
        for step in range(3):
            model.zero_grad(set_to_none=step != 1)
            loss_of(model, step).backward()
            hold(module, averages(module, step))
        kept = gradients(module)
        torch.testing.assert_close([*kept.values()], averages(module, 2))


@check
def a_compiled_model_trains():
    module = network()
    model = torch.compile(DistributedDataParallel(module), backend="aot_eager")
    for step in range(3):
        module.zero_grad()
        loss_of(model, step).backward()
        hold(module, averages(module, step), rtol=1e-4, atol=1e-5)


class OnTwoDevices(nn.Module):
    def __init__(self, *places):
        super().__init__()
        self.first, self.second = (nn.Linear(8, 8).to(place) for place in places)
        self.places = places

    def forward(self, x):
        return self.second(self.first(x.to(self.places[0])).to(self.places[1])).to(DEVICE)


@check
def parameters_on_the_cpu_and_on_the_device():
    module = seeded(OnTwoDevices, "cpu", DEVICE)
    model = DistributedDataParallel(module, check_for_nan_in_grad=True)
    for step in range(3):
        model.zero_grad()
        loss_of(model, step).backward()
        hold(module, averages(module, step))


@check
def ranks_run_out_of_inputs():
    rank, size = dist.get_rank(), dist.get_world_size()
    module = seeded(lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))).to(DEVICE)
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), 0.05)
    twin = copy.deepcopy(module)
    with model.join():
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if step >= 2 and rank == size - 1 > 0:  # the others give zeros
                assert_alone(module, twin, step, size)
            optimizer.step()
            twin.load_state_dict(module.state_dict())
    first, *others = of_all_ranks([values.cpu() for values in module.state_dict().values()])
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def assert_alone(module, twin, step, size):
    twin.zero_grad()
    (loss_of(twin, step) / size).backward()
    for one, other in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def fails(*_):
    raise ArithmeticError("in a hook")


@check
def a_rank_fails_in_one_of_two_wrappers():
    """The others give both up, though calls that never end are on the device."""
    last = dist.get_world_size() - 1
    modules = [network(), network()]
    models = [DistributedDataParallel(module, bucket_cap_mb=0.01) for module in modules]
    for step in range(5):
        for model in models:
            model.zero_grad()
        outputs = [model(batch(step)) for model in models]
        total = sum(output.square().mean() for output in outputs)
        if step in (1, 3):
            if dist.get_rank() == last:
                outputs[step // 2].register_hook(fails)
            with pytest.raises((ArithmeticError, ppe_ddp.PeerAbortedError)):
                total.backward()
        else:
            total.backward()
            for module in modules:
                hold(module, averages(module, step))


@check
def a_wrapper_is_moved():
    model = DistributedDataParallel(seeded(mlp, 8, 64, 64, 4))
    for place in ("cpu", DEVICE, "cpu"):
        model.to(place)
        model.zero_grad()
        output = model(batch())
        assert output.device.type == place
        output.square().mean().backward()
        assert_same_on_all_ranks(model.module)


def weighted(module, loss, counts):
    """The gradients of the mean of ``loss(module, 0, rank)`` with these counts, computed by this rank alone."""
    twin = copy.deepcopy(module)
    twin.zero_grad()
    for rank, count in enumerate(counts):
        (loss(twin, 0, rank) * (count / sum(counts))).backward()
    return [parameter.grad for parameter in twin.parameters()]


@check
def a_weighed_loss_on_the_device_of_a_checkpointed_wrapper_on_the_cpu():
    module, rank = seeded(mlp, 8, 8, 4), dist.get_rank()
    model, counts = DistributedDataParallel(module), [3 + 4 * other for other in range(dist.get_world_size())]

    def loss(module, step, other):
        x = data(5, 8, rank=other).requires_grad_()
        return checkpoint(module, x, use_reentrant=True).to(DEVICE).square().mean()

    for _ in range(2):
        model.zero_grad()
        ppe_ddp.weigh(loss(model, 0, rank), counts[rank]).backward()
        hold(module, weighted(module, loss, counts), rtol=1e-4, atol=1e-5)


@check
def weighed_backwards_on_two_threads():
    """Each waits on its own thread, on the CPU, until the other one has begun; a GPU has one thread for both."""
    rank, size, meeting = dist.get_rank(), dist.get_world_size(), threading.Barrier(2)
    modules, counts = [network() for _ in range(2)], [[3 + k for k in range(size)], [50 - 40 * k for k in range(size)]]
    losses = []
    for module, own in zip(modules, counts, strict=True):
        loss = loss_of(DistributedDataParallel(module), 0, rank).cpu()
        loss.register_hook(lambda gradient: gradient * (meeting.wait(20) < 2))
        losses.append(ppe_ddp.weigh(loss, own[rank]))
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(torch.Tensor.backward, losses))
    for module, own in zip(modules, counts, strict=True):
        hold(module, weighted(module, loss_of, own), rtol=1e-4, atol=1e-5)


@check
def a_function_that_fails_before_its_first_call_on_the_device_is_told_at_once():
    """The other ranks wait for it in a blocking call of their functions."""

    def average(gradients, group):
        if dist.get_rank() == dist.get_world_size() - 1:
            raise ArithmeticError
        for gradient in gradients:
            dist.all_reduce(gradient, group=group)

    module = network()
    config = megatron.DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1)
    model = megatron.DistributedDataParallel(None, config, module, reduce_function=average)

    def step():
        model.zero_grad_buffer()
        loss_of(model).backward()
        model.finish_grad_sync()

    for _ in range(2):
        start = time.monotonic()
        with pytest.raises((ArithmeticError, ppe_ddp.PeerAbortedError)):
            step()
        assert time.monotonic() - start < 15


@check
def gradients_on_two_devices_are_clipped():
    for places in (("cpu", DEVICE), (DEVICE, "cpu")):
        ours, theirs = (seeded(OnTwoDevices, *places) for _ in range(2))
        model = DistributedDataParallel(ours)
        sharded, whole = (
            DistributedOptimizer(torch.optim.SGD, model, lr=0.1),
            torch.optim.SGD(theirs.parameters(), 0.1),
        )
        loss_of(model).backward()
        sharded.clip_grad_norm_(0.1)
        sharded.step()
        for parameter, gradient in zip(theirs.parameters(), averages(theirs), strict=True):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        whole.step()
        torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), rtol=1e-4, atol=1e-5)


@check
def shards_of_fused_and_capturable_optimizers_are_loaded_from_the_cpu():
    for options in ({"fused": True}, {"capturable": True} if DEVICE == "cuda" else {}, {}):
        results = []
        for loads in (False, True):
            module = network()
            model = DistributedDataParallel(module)
            optimizer = DistributedOptimizer(torch.optim.AdamW, model, lr=0.01, **options)
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
                if loads and step == 1:
                    file = io.BytesIO()
                    torch.save(optimizer.state_dict(), file)
                    file.seek(0)
                    optimizer.load_state_dict(torch.load(file, map_location="cpu", weights_only=False))
            results.append(list(module.parameters()))
        assert all(map(torch.equal, *results)), options


def without_waiting(step):
    """Call ``step`` in torch's mode in which what makes the host wait for the device raises."""
    for _ in range(10):
        step()
    if DEVICE == "cuda" and "nccl" in str(dist.get_backend_config()):  # gloo takes tensors to the host
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
    finally:
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@check
def weighed_micro_batches_do_not_wait():
    gc.collect()  # wrappers of earlier checks, whose gradients weigh() would look at
    model, x = DistributedDataParallel(network()), batch()

    def step():
        model.zero_grad()
        with model.no_sync():
            ppe_ddp.weigh(model(x).square().mean(), 3 + dist.get_rank()).backward()
        ppe_ddp.weigh(model(x).square().mean(), 2).backward()

    without_waiting(step)


@check
def compressors_do_not_wait():
    for compressor in (BF16(), Int8()):
        model, x = DistributedDataParallel(network(), shared_memory=False), batch()
        model.register_comm_hook(compressor)

        def step(model=model, x=x):
            model.zero_grad()
            model(x).square().mean().backward()

        without_waiting(step)


@check
def gathered_parameters_are_read_on_two_streams():
    ours = network()
    model = DistributedDataParallel(ours)
    optimizer = DistributedOptimizer(torch.optim.SGD, model, lr=0.5, overlap=True)
    x = batch(3, 0)
    for step in range(3):
        theirs, means = copy.deepcopy(ours), averages(ours, step)
        with torch.no_grad():
            torch._foreach_sub_(list(theirs.parameters()), means, alpha=0.5)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        with torch.no_grad():
            outputs = []
            if DEVICE == "cuda":
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(100_000_000)
                    outputs.append(ours(x))
            outputs.append(ours(x))
            want = theirs(x)
            if DEVICE == "cuda":
                torch.testing.assert_close(outputs[-1].clone(), want, rtol=1e-4, atol=1e-5)
                torch.cuda.synchronize()
            for output in outputs:
                torch.testing.assert_close(output, want, rtol=1e-4, atol=1e-5)


@check
def complex_parameters():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 4, dtype=torch.complex64) / 3)

        def forward(self, x):
            return (x.to(torch.complex64) @ self.weight).abs()

    for sharded in (False, True):
        module = seeded(Complex).to(DEVICE)
        model, (want,) = DistributedDataParallel(module), averages(module)
        optimizer = DistributedOptimizer(torch.optim.SGD, model, lr=0.1) if sharded else None
        before = module.weight.detach().clone()
        loss_of(model).backward()
        if optimizer is None:
            hold(module, [want])
        else:
            optimizer.step()
            torch.testing.assert_close(module.weight.detach(), before - 0.1 * want, rtol=1e-4, atol=1e-5)


@check
def memory_of_another_device_of_this_kind_is_loaded_onto_this_ranks():
    """As of a process that joins in ``ppe_ddp.elastic``, where each process sees one GPU."""
    file = io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda _: "cuda:9")
        torch.save({"step": torch.ones(2, device=DEVICE)}, file)
    for device in (torch.ones((), device=DEVICE).device, torch.device("cpu")):
        file.seek(0)
        loaded = torch.load(file, functools.partial(_placed, device), weights_only=True)["step"]
        assert loaded.device == device
        assert loaded.tolist() == [1.0, 1.0]


def dies(at):
    """The last rank is killed in the step `at`; the others are told of it."""
    module = network()
    model = DistributedDataParallel(module, bucket_cap_mb=0.01)
    for step in range(at + 1):
        model.zero_grad()
        if step == at:
            if dist.get_rank() == dist.get_world_size() - 1:
                module[2].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            started = time.monotonic()
            with pytest.raises(ppe_ddp.CommunicationError, match=f"rank {dist.get_world_size() - 1}"):
                loss_of(model, step).backward()
            return time.monotonic() - started
        loss_of(model, step).backward()
    raise AssertionError
