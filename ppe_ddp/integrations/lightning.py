"""Lightning: the strategy "ppe_ddp" for ``Trainer`` and ``Fabric``; importing this module registers both.

    import ppe_ddp.integrations.lightning

    trainer = Trainer(strategy="ppe_ddp", accelerator="cpu", devices=2)
    fabric = Fabric(strategy="ppe_ddp", accelerator="cpu", devices=2)

Under mpirun on CPUs, the process group is over mpi4py. ``TrainerStrategy(...)`` and ``FabricStrategy(...)`` have the
arguments of Lightning's ``DDPStrategy``, but the keywords of our wrapper instead of torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric.plugins.environments import MPIEnvironment
from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_STRATEGIES
from lightning.fabric.strategies import DDPStrategy as FabricBase
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.pytorch.strategies import DDPStrategy as TrainerBase
from lightning.pytorch.strategies import StrategyRegistry as TRAINER_STRATEGIES
from torch import nn
from typing_extensions import override

from ppe_ddp.compression import Compressor
from ppe_ddp.compression.comm_state import forget_unsent
from ppe_ddp.ddp import DistributedDataParallel
from ppe_ddp.integrations.loading import loading
from ppe_ddp.torch_internals import uncompiled

__all__ = ["FabricStrategy", "TrainerStrategy"]


class _Strategy:
    strategy_name = "ppe_ddp"

    def _get_process_group_backend(self: Any) -> str:
        if self._process_group_backend:
            return self._process_group_backend
        if self.root_device.type == "cuda" and torch.distributed.is_nccl_available():
            return "cpu:gloo,cuda:nccl"
        return "mpi4py" if isinstance(self.cluster_environment, MPIEnvironment) else "gloo"

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register this strategy by its name."""
        strategy_registry.register(cls.strategy_name, cls, description="ppe_ddp.DistributedDataParallel", override=True)


class TrainerStrategy(_Strategy, TrainerBase):
    """Lightning's ``DDPStrategy`` with this library's wrapper, in automatic and in manual optimization.

    Only the last of ``accumulate_grad_batches`` micro-batches is synchronized. If a rank's ``training_step`` returns
    None, its gradients count as zero, and it takes the same step as the others. A ``ddp_comm_hook`` works on all
    devices, and may be a compressor: ``ddp_comm_hook=ErrorFeedback(PowerSGD(rank=4))``.
    """

    model: Any
    _has_loss = True

    @override
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    @override
    def _register_ddp_hooks(self) -> None:
        hook = self._ddp_comm_hook
        if isinstance(hook, Compressor):
            if not (self._ddp_comm_state is None and self._ddp_comm_wrapper is None):
                raise ValueError("a compressor takes no ddp_comm_state and no ddp_comm_wrapper: leave them out")
            self.model.register_comm_hook(hook)
        elif hook is not None:
            self.model.register_comm_hook(
                self._ddp_comm_state, hook if self._ddp_comm_wrapper is None else self._ddp_comm_wrapper(hook)
            )

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load as Lightning does, also in training (``lr_find``); a compressor then begins anew."""
        with loading(self.model):
            super().load_model_state_dict(checkpoint, strict)

    @override
    def block_backward_sync(self) -> AbstractContextManager[None]:
        """A context in which backwards are not synchronized."""
        return self.model.no_sync() if isinstance(self.model, DistributedDataParallel) else nullcontext()

    @override
    @uncompiled
    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the backward; one that ``training_step`` calls, so through no output of the wrapper, begins at its loss.

        So a rank whose loss uses no parameter takes part, and what ``training_step`` has unfrozen is averaged. All
        ranks call as many, but for those in ``block_backward_sync()``.
        """
        is_by_hand = not self.lightning_module.automatic_optimization
        reducer = self.model._ready() if is_by_hand and isinstance(self.model, DistributedDataParallel) else None
        if reducer is not None:
            closure_loss = reducer.watch(closure_loss, is_training=True)
        return super().backward(closure_loss, *args, **kwargs)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The output of Lightning's; a loss of zero instead of None, which Lightning refuses."""
        output = super().training_step(*args, **kwargs)
        self._has_loss = output is not None or not self.lightning_module.automatic_optimization
        return output if self._has_loss else torch.zeros((), requires_grad=True, device="cpu")

    @override
    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Step as Lightning does; without a loss, average the gradients of the other ranks first."""

        def step() -> Any:
            loss = closure()
            if not self._has_loss:
                self.model.finish_grad_sync()
            return loss

        return super().optimizer_step(optimizer, step, model, **kwargs)

    @override
    def teardown(self) -> None:
        """Remove the wrapper, and do what Lightning does."""
        if isinstance(self.model, DistributedDataParallel):
            self.model = self.lightning_module
        super().teardown()


class FabricStrategy(_Strategy, FabricBase):
    """Lightning Fabric's ``DDPStrategy`` with this wrapper; ``fabric.no_backward_sync`` calls its ``no_sync``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backward_sync_control = _NoSync()

    @override
    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap ``module``."""
        return DistributedDataParallel(module, device_ids=self._determine_ddp_device_ids(), **self._ddp_kwargs)

    @override
    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load as Fabric does, also in training; a compressor then begins anew."""
        super().load_module_state_dict(module, state_dict, strict)
        if isinstance(module, DistributedDataParallel):
            forget_unsent([module])


class _NoSync(_BackwardSyncControl):
    """Fabric's ``no_backward_sync`` for this wrapper; its own accepts only torch's."""

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        if not enabled:
            return nullcontext()
        if not isinstance(module, DistributedDataParallel):
            raise TypeError(f"no_backward_sync() takes what fabric.setup() has given, not a {type(module).__name__}")
        return module.no_sync()


TrainerStrategy.register_strategies(TRAINER_STRATEGIES)
FabricStrategy.register_strategies(FABRIC_STRATEGIES)
