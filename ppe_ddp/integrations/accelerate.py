"""Accelerate: an ``Accelerator`` that wraps models in this library's class instead of torch's.

Replace ``from accelerate import Accelerator`` by::

    from ppe_ddp.integrations.accelerate import Accelerator
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import ref

import accelerate
from torch import Tensor, nn
from torch import distributed as dist

from ppe_ddp.ddp import DistributedDataParallel
from ppe_ddp.integrations.loading import loading
from ppe_ddp.launch import init_process_group
from ppe_ddp.launchers import detect
from ppe_ddp.torch_internals import COMPILED, is_wrapped_by_compile
from ppe_ddp.weighing import weigh

__all__ = ["Accelerator"]


def join_launcher() -> None:
    """Call :func:`ppe_ddp.init_process_group` under mpirun and Slurm, unless torch.distributed is initialized.

    Accelerate would look for MASTER_ADDR, which these do not set.
    """
    if not ("MASTER_ADDR" in os.environ or dist.is_initialized()) and detect(os.environ).launcher != "alone":
        init_process_group()


class Accelerator(accelerate.Accelerator):
    """Accelerate's ``Accelerator`` with this library's wrapper on several CPUs or GPUs; FSDP and others do not change.

    Under mpirun and Slurm it calls :func:`ppe_ddp.init_process_group`, unless torch.distributed is initialized.

    Args:
        *args: As for Accelerate's.
        wrapper_options: Keywords of :class:`ppe_ddp.DistributedDataParallel`, such as ``reduce_function``. They take
            precedence over those of a ``DistributedDataParallelKwargs`` handler.
        **kwargs: As for Accelerate's.
    """

    wrapper_options: Mapping[str, Any] = {}
    counted: tuple[float, int] | None = None
    """This rank's items, by which a step's losses are divided, and the number of backwards; set by transformers."""

    _joins_on_cpus = False
    _wrappers: Sequence[ref[DistributedDataParallel]] = ()

    def __init__(self, *args: Any, wrapper_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self.wrapper_options = dict(wrapper_options or {})
        join_launcher()
        super().__init__(*args, **kwargs)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Place ``model``, set up its precision, and wrap it where several ranks train it."""
        is_prepared = getattr(model, "_is_accelerate_prepared", False)
        if is_prepared and isinstance(model, DistributedDataParallel):  # again, after free_memory()
            self._note(model)
        wraps = self._is_data_parallel and not evaluation_mode and not is_prepared
        # Accelerate does the same for evaluation, but without wrapping.
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode or wraps)
        if not (wraps and any(parameter.requires_grad for parameter in prepared.parameters())):
            return prepared
        options = {} if self.ddp_handler is None else self.ddp_handler.to_kwargs()
        wrapper: Any = DistributedDataParallel(prepared, **{**options, **self.wrapper_options})
        if self.ddp_handler is not None:
            self.ddp_handler.register_comm_hook(wrapper)
        wrapper._is_accelerate_prepared = True
        self._note(wrapper)
        return wrapper

    def _note(self, wrapper: DistributedDataParallel) -> None:
        self._wrappers = [*(one for one in self._wrappers if one() is not wrapper), ref(wrapper)]

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load as Accelerate does, also in training; compressors then begin anew."""
        with ExitStack() as stack:
            for reference in self._wrappers:
                stack.enter_context(loading(reference()))
            super().load_state(*args, **kwargs)

    def free_memory(self, *objects: Any) -> list[Any]:
        """Forget what was prepared, as Accelerate does."""
        self._wrappers = ()
        freed: list[Any] = super().free_memory(*objects)
        return freed

    @property
    def multi_device(self) -> bool:
        """Whether several GPUs train; while :meth:`join_uneven_inputs` begins, also for CPUs."""
        return self._joins_on_cpus or bool(super().multi_device)

    @property
    def _is_data_parallel(self) -> bool:
        """Whether Accelerate would wrap models in torch's ``DistributedDataParallel``."""
        is_sharded = self.parallelism_config is not None and self.parallelism_config.tp_enabled
        return not is_sharded and (self.multi_device or self.distributed_type == accelerate.DistributedType.MULTI_CPU)

    @contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Generator[None, None, None]:
        """Join uneven inputs as Accelerate does, but also on CPUs."""
        self._joins_on_cpus = self.distributed_type == accelerate.DistributedType.MULTI_CPU
        with super().join_uneven_inputs(joinables, even_batches):
            self._joins_on_cpus = False
            yield

    def backward(self, loss: Tensor, *, count: float | Tensor | None = None, **kwargs: Any) -> None:
        """Call ``loss.backward()`` as Accelerate does.

        Args:
            loss: The loss.
            count: The number of samples or tokens of which ``loss`` is the mean, for :func:`ppe_ddp.weigh`: gradients
                are averaged over those of all ranks and accumulation steps.
            **kwargs: As for Accelerate's.
        """
        if count is not None and self.num_processes == 1 and self.gradient_accumulation_steps == 1:
            count = None  # without other ranks and a wrapper, the mean over all samples is this loss
        if count is not None:
            loss = weigh(loss * self.gradient_accumulation_steps, count)
        elif self.counted is not None:
            items, backwards = self.counted
            loss = weigh(loss * (backwards / self.num_processes), items / backwards)
        super().backward(loss, **kwargs)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The module that was prepared, also of ``torch.compile(prepared)``, which stays as it is."""
        held = model.get_submodule(COMPILED) if is_wrapped_by_compile(model) else model
        inner = held.module if isinstance(held, DistributedDataParallel) else model
        return super().unwrap_model(inner, keep_fp32_wrapper, keep_torch_compile)

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Generator[None, None, None]:
        """A context in which backwards synchronize, also inside of ``no_sync``."""
        if not isinstance(model, DistributedDataParallel):
            with accelerate.Accelerator.trigger_sync_in_backward(model):
                yield
            return
        before, model.require_backward_grad_sync = model.require_backward_grad_sync, True
        try:
            yield
        finally:
            model.require_backward_grad_sync = before
