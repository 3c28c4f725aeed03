"""Random training programs (optim_programs.py), run by a DistributedOptimizer on ranks and by torch in one process.

WrapperRunner     runs one on ranks
ReferenceRunner   runs it in one process: for halves with master weights, as one would write it by hand
"""

import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from one_process import seeded
from optim_programs import OPTIMIZERS, Dynamic, Program, loss_of
from ppe_ddp import DistributedDataParallel, DistributedOptimizer, megatron

# Sums in another order: a few units of the last place in each of a few steps, of numbers of about one. In halves one
# weight that is rounded to the other side, for that.
TOLERANCES = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-9},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-3},
    torch.float16: {"rtol": 2e-3, "atol": 2e-4},
}


def make_model(dtype):
    """The same on every rank and in one process."""
    return seeded(Dynamic).to(dtype)


def make_optimizer(name, model):
    """Of all parameters, in two groups."""
    parameters = list(model.parameters())
    return OPTIMIZERS[name]([{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.02}])


def edit(weights, factor, in_place):
    """Change gradients, as a user may between backward and step."""
    for weight in weights:
        if weight.grad is None:
            continue
        if in_place:
            weight.grad.mul_(factor)
        else:
            weight.grad = weight.grad * factor


def weights_of(optimizer):
    """All that it updates."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


class Runner:
    """What both sides do in the same way."""

    def __init__(self, program):
        self.program = program
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=program.scaled)
        self.norms = []

    def run(self, steps):
        schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        for number in steps:
            step = self.program.steps[number]
            self.clear(step)
            for k, synchronized in enumerate(step.batches):
                self.backward(number * 10 + k, step, synchronized=synchronized)
                if step.looks and synchronized:
                    self.gradients_arrive()
            self.gradients_arrive()
            if step.max_norm is not None or step.edit is not None:
                self.scaler.unscale_(self.optimizer)
            if step.edit is not None and not step.inf:
                edit(weights_of(self.optimizer), *step.edit)
            if step.max_norm is not None:
                self.norms.append(self.clip(step.max_norm).double())
            if not step.skipped:
                self.scaler.step(self.optimizer)
                self.scaler.update()
                if not self.program.scaled:
                    schedule.step()
            elif self.program.scaled:
                self.scaler.update(self.scaler.get_scale())
            self.stepped()

    def gradients_arrive(self):
        """Look at the groups, as schedulers do."""
        assert all(group["lr"] > 0 for group in self.optimizer.param_groups)

    def stepped(self):
        """After each step."""


class WrapperRunner(Runner):
    """Runs a program on the ranks of a group."""

    def __init__(self, program, group=None):
        super().__init__(program)
        self.rank = dist.get_rank(group)
        module = make_model(program.dtype)
        if program.wrapper == "plain":
            self.wrapper = DistributedDataParallel(module, process_group=group, **program.options)
        else:
            config = megatron.DistributedDataParallelConfig(use_distributed_optimizer=True, **program.options)
            self.wrapper = megatron.DistributedDataParallel(None, config, module, data_parallel_group=group)
        self.module = module
        self.inner = make_optimizer(program.optimizer, module)
        self.optimizer = DistributedOptimizer(self.inner, self.wrapper, master_dtype=program.master_dtype)
        self.another = torch.optim.SGD(module.parameters(), lr=0.0)

    def clear(self, step):
        if self.program.wrapper == "megatron":
            if step.clearing is not None:
                self.wrapper.zero_grad_buffer()
                self.optimizer.zero_grad()
        elif step.clearing == "loop":
            for parameter in self.module.parameters():
                parameter.grad = None
        elif step.clearing is not None:
            getattr(self, step.clearing).zero_grad(set_to_none=step.to_none)

    def backward(self, batch, step, *, synchronized):
        is_inf = step.inf and self.rank == 0
        if synchronized:
            loss = loss_of(self.wrapper, batch, self.rank)
            self.scaler.scale(loss * float("inf") if is_inf else loss).backward()
            if self.program.wrapper == "megatron":
                self.wrapper.finish_grad_sync()
            return
        with self.wrapper.no_sync():
            self.scaler.scale(loss_of(self.wrapper, batch, self.rank)).backward()

    def clip(self, max_norm):
        return self.optimizer.clip_grad_norm_(max_norm)

    def state(self):
        """Parameters, and the state of the optimizer: whole, flattened, by name."""
        self.optimizer.synchronize()
        saved = self.optimizer.state_dict()
        found = {name: parameter.detach().clone() for name, parameter in self.module.named_parameters()}
        for name, entries in saved["state"].items():
            if saved["exists"][name]:
                found |= {f"{name}/{key}": _whole(value) for key, value in entries.items()}
        return found

    def save(self, path):
        quietly(dcp.save, {"model": self.wrapper.state_dict(), "optimizer": self.optimizer}, checkpoint_id=path)
        return self.scaler.state_dict()

    def load(self, path, scaler):
        model = self.wrapper.state_dict()
        quietly(dcp.load, {"model": model, "optimizer": self.optimizer}, checkpoint_id=path)
        self.wrapper.load_state_dict(model)
        self.scaler.load_state_dict(scaler)


class ReferenceRunner(Runner):
    """Runs a program in one process, on the batches of all ranks, as one would write it by hand.

    Each rank's micro-batches add up in the precision of its gradients; what is averaged is averaged in float32 or more,
    and added to the gradient of a master weight. Megatron's wrapper adds up, and keeps averages, in ``main_grad``.
    """

    def __init__(self, program, world_size):
        super().__init__(program)
        self.world_size = world_size
        self.module = make_model(program.dtype)
        self.parameters = list(self.module.parameters())
        wide = torch.promote_types(program.dtype, program.master_dtype)
        self.twin = make_model(program.dtype).to(wide)
        self.masters = list(self.twin.parameters())
        # torch's fused kernel for CPUs takes a strided parameter for one without holes.
        self.optimizer = make_optimizer(program.optimizer.replace("fused", "foreach"), self.twin)
        self.is_megatron = program.wrapper == "megatron"
        in_fp32 = program.options.get("grad_reduce_in_fp32", False)
        self.main_dtype = torch.promote_types(program.dtype, torch.float32) if in_fp32 else program.dtype
        self.main = [None] * len(self.masters)
        self.local = {}

    def clear(self, step):
        if step.clearing is not None:
            self.zero_grad(set_to_none=step.to_none)

    def zero_grad(self, *, set_to_none=True):
        """Forget all gradients."""
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.main = [None] * len(self.masters)

    def backward(self, batch, step, *, synchronized):
        for rank in range(self.world_size):
            local = self.local.setdefault(rank, [None] * len(self.parameters))
            for parameter, gradient in zip(self.parameters, local, strict=True):
                parameter.grad = None if self.is_megatron else gradient
            loss = loss_of(self.module, batch, rank)
            is_inf = step.inf and synchronized and rank == 0
            self.scaler.scale(loss * float("inf") if is_inf else loss).backward()
            for i, parameter in enumerate(self.parameters):
                if not self.is_megatron:
                    local[i] = parameter.grad
                elif parameter.grad is not None:
                    gradient = parameter.grad
                    local[i] = gradient.to(self.main_dtype) if local[i] is None else local[i].add_(gradient)
        if synchronized:
            for i, gradients in enumerate(zip(*self.local.values(), strict=True)):
                present = [gradient for gradient in gradients if gradient is not None]
                if present:
                    self._add(i, self._mean(present))
            self.local.clear()
        if synchronized and self.is_megatron:
            for main, master in zip(self.main, self.masters, strict=True):
                master.grad = None if main is None else main.to(master.dtype)  # a copy where the dtype is another

    def _mean(self, gradients):
        dtype = torch.promote_types(gradients[0].dtype, torch.float32)
        total = torch.zeros_like(gradients[0], dtype=dtype)
        for gradient in gradients:
            total.add_(gradient.to(dtype), alpha=1 / self.world_size)
        return total

    def _add(self, i, average):
        master = self.masters[i]
        if not self.is_megatron:
            average = average.to(master.dtype)
            master.grad = average if master.grad is None else master.grad + average
            return
        average = average.to(self.main_dtype)
        self.main[i] = average if self.main[i] is None else self.main[i].add_(average)

    def clip(self, max_norm):
        return nn.utils.clip_grad_norm_(self.masters, max_norm)

    def stepped(self):
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)

    def state(self):
        found = {name: parameter.detach().clone() for name, parameter in self.module.named_parameters()}
        for name, master in self.twin.named_parameters():
            if not master.requires_grad:
                continue  # for which Adagrad has state from the beginning
            for key, value in self.optimizer.state.get(master, {}).items():
                is_cut = torch.is_tensor(value) and value.dim() == master.dim() and key not in ("step", "mu", "eta")
                is_cut = is_cut and key != "mu_product" and value.shape == master.shape
                found[f"{name}/{key}"] = _in_memory_order(value, master) if is_cut else value
        return found


def assert_same(module, expected, **tolerance):
    """All values of both modules are close."""
    state = module.state_dict()  # waits for what is under way
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(state[name], value, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def _in_memory_order(value, parameter):
    strides = torch.empty_like(parameter, device="meta").stride()
    laid_out = torch.empty_strided(parameter.shape, strides, dtype=value.dtype)
    return laid_out.copy_(value).as_strided((value.numel(),), (1,))


def _whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def quietly(function, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own
        function(*args, **kwargs)


def compare(ours, theirs):
    """Parameters, state and norms are the same."""
    tolerance = TOLERANCES[ours.program.dtype]
    for norm, want in zip(ours.norms, theirs.norms, strict=True):
        torch.testing.assert_close(norm, want, equal_nan=True, **tolerance)  # of a step that is skipped
    found, expected = ours.state(), theirs.state()
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        got = found[name]
        is_tensor = torch.is_tensor(want)
        if is_tensor:
            assert got.dtype == want.dtype, f"{name} of {ours.program}: {got.dtype} instead of {want.dtype}"
            want, got = want.double(), got.double().view_as(want)
        where = f"{name} of {ours.program}"
        torch.testing.assert_close(got, want, **tolerance, msg=lambda text, where=where: f"{where}: {text}")
    assert ours.scaler.get_scale() == theirs.scaler.get_scale()


def hold(program, group=None):
    """Run a program up to where it is saved, on ranks and in one process, and compare."""
    ours, theirs = WrapperRunner(program, group), ReferenceRunner(program, dist.get_world_size(group))
    for runner in (ours, theirs):
        runner.run(range(program.saved_after + 1))
    compare(ours, theirs)
    return ours, theirs


def first_half(seed, path):
    """What the scaler's state is when the program is saved."""
    ours, _ = hold(Program.random(seed))
    return ours.save(path)


def second_half(seed, path, scaler, saved_by):
    """Load it on these ranks, which may be more or fewer, and run the rest."""
    program = Program.random(seed)
    ours, theirs = WrapperRunner(program), ReferenceRunner(program, saved_by)
    ours.load(path, scaler)
    theirs.run(range(program.saved_after + 1))
    theirs.zero_grad()
    theirs.world_size = dist.get_world_size()
    theirs.norms.clear()
    rest = range(program.saved_after + 1, len(program.steps))
    for runner in (ours, theirs):
        runner.run(rest)
    compare(ours, theirs)
