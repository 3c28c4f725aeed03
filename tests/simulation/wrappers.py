"""The models of one rank, plain or wrapped: what a step is taken with, and where its gradients are then."""

import contextlib
import enum
import weakref
from functools import partial
from types import SimpleNamespace

import torch
from torch import distributed as dist
from torch import nn

from law_models import Record
from ppe_ddp import DistributedDataParallel, DistributedOptimizer, megatron
from ppe_ddp.compression import ErrorFeedback, Sign, TopK
from ppe_ddp.optim import ShardedGradient

from .faults import Faults, Where, reduce_function
from .scheduler import Scheduler

RATE = 0.05
MOMENTUM = 0.5
_PAUSES = 0.3
SHARD = torch.empty(0)
"""In place of a gradient of which each rank has its shard."""


class Wrapping(enum.Enum):
    """What the models are wrapped in."""

    PLAIN = enum.auto()
    """The default reduce function."""
    FUNCTION = enum.auto()
    """A reduce function of the user's own."""
    HOOK = enum.auto()
    """A communication hook of torch's kind."""
    SYNC_HOOK = enum.auto()
    """A hook of pytorch-pfn-extras' kind, which communicates by itself before each synchronization."""
    CHECKED = enum.auto()
    """NaN is looked for, and an error on all ranks."""
    SKIPPING = enum.auto()
    """NaN is looked for, and drops the step on all ranks."""
    MEGATRON = enum.auto()
    """Megatron's wrapper, which synchronizes at the end."""
    MEGATRON_OVERLAP = enum.auto()
    """Megatron's wrapper, which synchronizes during the backward."""
    OPTIMIZER = enum.auto()
    """With a DistributedOptimizer."""
    TOPK = enum.auto()
    """With a compressor that keeps what it does not send."""
    SIGN = enum.auto()
    """With another one."""

    def __repr__(self):
        return self.name

    @property
    def is_megatron(self):
        """Whether gradients are in ``main_grad``."""
        return self in (Wrapping.MEGATRON, Wrapping.MEGATRON_OVERLAP)

    @property
    def looks_for_nan(self):
        """Whether it does."""
        return self in (Wrapping.CHECKED, Wrapping.SKIPPING)

    @property
    def compressor(self):
        """The compressor; None where there is none."""
        method = {Wrapping.TOPK: TopK(0.3, min_numel=2), Wrapping.SIGN: Sign(block=64)}.get(self)
        return None if method is None else ErrorFeedback(method)


class Models(nn.Module):
    """Several modules beside each other, or their wrappers; the interface that a step uses.

    Args:
        parts: The modules, or the wrappers.
        order: In which their forwards are called.
        momentum: Of :meth:`update`.

    Attributes:
        is_poisoned: Whether outputs are NaN.
        left_out: The numbers of the parts that are not used in this step.
        held: The outputs in this step. Several wrappers are told of an error before a backward comes to them only if
            there is one, or a parameter that no other wrapper has (docs/promises.md).
    """

    def __init__(self, parts, order, *, momentum=0.0):
        super().__init__()
        self.momentum, self.velocity = momentum, {}
        self.parts = nn.ModuleList(parts)
        self._order = order
        self.is_poisoned = False
        self.left_out = set()
        self.held = []
        self.table = {_plain(name): parameter for name, parameter in self.named_parameters()}
        self.trained = [parameter for parameter in self.table.values() if parameter.requires_grad]
        self._owners = [
            (_plain(f"{prefix}.{name}"), owner, name)
            for prefix, owner in self.named_modules()
            for name, _ in owner.named_buffers(recurse=False)
        ]

    def forward(self, batch, path):
        outputs = {}
        for k in self._order:
            if k not in self.left_out:
                outputs[k] = self.parts[k](batch, path)
        if self.parts[1:]:
            self.held.append(outputs)
        found = [one for k in sorted(outputs) for one in _listed(outputs[k])]
        factor = float("nan") if self.is_poisoned else 1.0
        return tuple(None if one is None else one * factor for one in found)

    def zero_grad(self, set_to_none=True):
        for parameter in self.table.values():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def gradients(self):
        """Copies of the gradients by name."""
        return {name: copy_of(parameter.grad) for name, parameter in self.table.items()}

    def update(self):
        """Take a step of gradient descent, with momentum if there is any."""
        with torch.no_grad():
            for name, parameter in self.table.items():
                if parameter.grad is not None:
                    change = parameter.grad
                    if self.momentum:
                        before = self.velocity.get(name)
                        change = change.clone() if before is None else self.momentum * before + change
                        self.velocity[name] = change
                    parameter.sub_(change, alpha=RATE)

    def parameter_values(self):
        """Copies of the parameters by name."""
        return {name: parameter.detach().clone() for name, parameter in self.table.items()}

    def give(self, values):
        """Set the parameters to ``values``, by name."""
        with torch.no_grad():
            for name, parameter in self.table.items():
                parameter.copy_(values[name])

    def buffer_values(self):
        """Copies of the buffers by name."""
        return {name: getattr(owner, key).clone() for name, owner, key in self._owners}


class Wrappers(Models):
    """The wrappers on a rank, which may fail.

    Args:
        modules: What to wrap.
        order: In which their forwards are called.
        options: Of the wrappers.
        wrapping: What they are.
        hooks: Whether to note what hooks of the user's are called with.
        momentum: Of a DistributedOptimizer.
    """

    def __init__(self, modules, order, options, wrapping, *, hooks, momentum=0.0):
        super().__init__([_wrapped(module, options, wrapping) for module in modules], order)
        self.wrapping = wrapping
        self.is_quiet = False  # whether the last backward was, or is, not synchronized
        self._optimizers, taken = [], set()
        for part in self.parts if wrapping is Wrapping.OPTIMIZER else ():
            own = [parameter for parameter in part.parameters() if parameter.requires_grad and parameter not in taken]
            taken.update(own)
            if own:
                inner = torch.optim.SGD(own, lr=RATE, momentum=momentum)
                self._optimizers.append(DistributedOptimizer(inner, part, overlap=options["overlap"]))
        self._is_finished = False
        self.computed = set()  # names of the gradients that have come in this step
        self._called = {}  # by name, with which gradients hooks were called
        for name, parameter in self.table.items():
            if parameter.requires_grad:
                # Weakly: no garbage collector sees that the node of a parameter, which a wrapper holds, holds that.
                parameter.register_hook(partial(_call, weakref.WeakMethod(self._arrive), name))
                if hooks:
                    method = weakref.WeakMethod(self._accumulated)
                    parameter.register_post_accumulate_grad_hook(partial(_call, method, name))

    def forward(self, batch, path):
        faults = Faults.current
        batch = batch * 1.0
        batch.register_hook(faults.hook(Where.BACKWARD))
        outputs = super().forward(batch, path)
        for output in outputs:
            if output is not None and output.requires_grad:
                output.register_hook(faults.hook(Where.EARLY))
        faults.at(Where.LOSS)
        return outputs

    def _arrive(self, name, gradient):
        """A gradient has taken its time: what is under way arrives meanwhile. None is no gradient."""
        scheduler = Scheduler.current
        if scheduler.draw.random() < _PAUSES:
            scheduler.sleep(scheduler.draw.choice([0.0, 1e-5, 0.1]))
        if gradient is not None:
            self.computed.add(name)

    def _accumulated(self, name, parameter):
        if not self.is_quiet:
            self._called.setdefault(name, []).append(_shard_of(parameter.grad))

    def take_called(self):
        """By name, with which gradients hooks were called since the last time."""
        called, self._called = self._called, {}
        return called

    def zero_grad(self, set_to_none=True):
        if self.wrapping.is_megatron:
            for part in self.parts:
                part.zero_grad_buffer()
        elif self._optimizers:
            for optimizer in self._optimizers:
                optimizer.zero_grad(set_to_none)
        else:
            super().zero_grad(set_to_none)

    def gradients(self):
        if self._optimizers:
            return {name: _shard_of(parameter.grad) for name, parameter in self.table.items()}
        if not self.wrapping.is_megatron:
            return super().gradients()
        return {name: copy_of(getattr(parameter, "main_grad", None)) for name, parameter in self.table.items()}

    def saved(self):
        """What a checkpoint has of them."""
        return {
            **{str(k): part for k, part in enumerate(self.parts)},
            **{f"optimizer {k}": one for k, one in enumerate(self._optimizers)},
        }

    def update(self):
        for optimizer in self._optimizers:
            optimizer.step()
        if self._optimizers:
            for optimizer in self._optimizers:
                optimizer.synchronize()
        elif self.wrapping.is_megatron:
            with torch.no_grad():
                for parameter in self.table.values():
                    if getattr(parameter, "main_grad", None) is not None:
                        parameter.sub_(parameter.main_grad, alpha=RATE)
        else:
            super().update()

    def residuals(self):
        """By name, what a compressor has kept; empty where there is none.

        Of a parameter that several wrappers share each may have kept some: which one sends it is agreed in each step.
        """
        if self.wrapping.compressor is None:
            return {}
        kept, first_name = {}, {parameter: name for name, parameter in self.table.items()}
        for part in self.parts:
            shared_names = {name: first_name[parameter] for name, parameter in part.module.named_parameters()}
            for name, state in part.comm_state_dict()["parameters"].items():
                if state.get("residual") is not None:
                    known = kept.get(shared_names[name], 0)
                    kept[shared_names[name]] = known + state["residual"]
        return kept

    def settle(self):
        """A backward that is to be synchronized is over: wait for the averages."""
        for k in self.left_out:
            self.parts[k].finish_grad_sync()
        if self.wrapping.is_megatron and not self._is_finished:
            self.finish_grad_sync()
        self._is_finished = False

    def abort(self, where):
        """Tell the other ranks of what this one has raised ``where``, if they cannot know."""
        if self.is_quiet or self.wrapping is Wrapping.MEGATRON or where in (Where.LOSS, Where.EARLY, Where.INTERRUPT):
            for part in self.parts:
                part.abort_grad_sync("it has failed by plan")

    @property
    def is_exact(self):
        """Whether the last synchronization went in one round."""
        traces = [part.trace() for part in self.parts]
        return not any(trace is not None and trace.repaired for trace in traces)

    @contextlib.contextmanager
    def no_sync(self):
        with contextlib.ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.no_sync())
            self.is_quiet = True
            yield
            self.is_quiet = False

    def start_grad_sync(self):
        self._one_by_one("start_grad_sync")

    def finish_grad_sync(self):
        if self.wrapping.is_megatron:
            # One token in all: the sum over the ranks, behind the averages, changes no gradient.
            megatron.finalize_model_grads(list(self.parts), torch.tensor([1.0 if dist.get_rank() == 0 else 0.0]))
        else:
            self._one_by_one("finish_grad_sync")
        self._is_finished = True

    def _one_by_one(self, call):
        """Make the call of each wrapper; those that are not finished are given up where it raises."""
        for k, part in enumerate(self.parts):
            try:
                getattr(part, call)()
            except BaseException:
                for other in self.parts[k + 1 :] if call == "finish_grad_sync" else self.parts:
                    if other is not part:
                        other.abort_grad_sync()
                raise


def _call(method, *arguments):
    return method()(*arguments)


def _wrapped(module, options, wrapping):
    if wrapping.is_megatron:
        config = megatron.DistributedDataParallelConfig(
            overlap_grad_reduce=wrapping is Wrapping.MEGATRON_OVERLAP,
            bucket_size=None if options["bucket_cap_mb"] > 1 else 10,
        )
        return megatron.DistributedDataParallel(SimpleNamespace(), config, module)
    further = {
        Wrapping.FUNCTION: {"reduce_function": reduce_function},
        Wrapping.CHECKED: {"check_for_nan_in_grad": True},
        Wrapping.SKIPPING: {"check_for_nan_in_grad": "skip"},
    }
    wrapper = DistributedDataParallel(module, **options, **further.get(wrapping, {}))
    if wrapping is Wrapping.HOOK:
        state = (
            [] if options["gradient_as_bucket_view"] else None
        )  # with one, a bucket has the same parameters for ever
        wrapper.register_comm_hook(state, _hook)
    elif wrapping is Wrapping.SYNC_HOOK:
        wrapper.register_comm_hook(_sync_hook)
    elif wrapping.compressor is not None:
        wrapper.register_comm_hook(wrapping.compressor)
    return wrapper


def _hook(_, bucket):
    """A communication hook of torch's kind: the mean."""
    Faults.current.at(Where.FUNCTION)
    flat = bucket.buffer().div_(dist.get_world_size())
    future = dist.all_reduce(flat, async_op=True).get_future()
    Faults.current.at(Where.FUNCTION_LATE)
    return future.then(lambda done: done.value()[0])


def _sync_hook(_):
    """A hook of pytorch-pfn-extras' kind."""
    Faults.current.at(Where.FUNCTION)


def _shard_of(gradient):
    return SHARD if isinstance(gradient, ShardedGradient) else copy_of(gradient)


def _listed(outputs):
    if isinstance(outputs, Record):
        return outputs.heads
    return list(outputs.values()) if isinstance(outputs, dict) else outputs


def _plain(name):
    return name.replace(".module.", ".")


def copy_of(gradient):
    """A copy of a gradient; None of None."""
    if gradient is None:
        return None
    gradient = gradient.detach()
    return gradient.to_dense() if gradient.is_sparse else gradient.clone()
