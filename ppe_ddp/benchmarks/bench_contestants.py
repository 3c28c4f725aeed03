"""The contestants of ``bench step``: each wraps a model of its own and knows what it has sent.

Other people's wrappers are imported when they are made, so that one that is not installed is no error.
"""

from __future__ import annotations

import importlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ppe_ddp import DistributedDataParallel
from ppe_ddp.cli.machine import over_mpi

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup

    from ppe_ddp.engine.trace import Trace

__all__ = [
    "CONTESTANTS",
    "Bare",
    "Contestant",
    "Ours",
    "OursOverMpi",
    "OursOverMpiThread",
    "Torch",
    "Traffic",
    "contestants",
    "gradient_nbytes",
]


@dataclass(frozen=True)
class Traffic:
    """The bytes that one rank handed to the transport in one step.

    Attributes:
        gradient_nbytes: Gradients.
        control_nbytes: Of masks, which show the gradients that exist.
    """

    gradient_nbytes: int = 0
    control_nbytes: int = 0


class Contestant(ABC):
    """One way to train a model. All ranks make the same ones in the same order.

    Args:
        module: A model of its own.
        is_dynamic: Whether a step leaves out some parameters.
        options: Keywords for ppe_ddp.
        group: The group that all but those over mpi4py communicate in; None for the default group.

    Attributes:
        name: What it is called in results.
        module: The model.
        trained: What to call: the wrapped model.

    Raises:
        ImportError: It is not installed.
    """

    name: ClassVar[str]

    def __init__(
        self, module: nn.Module, *, is_dynamic: bool, options: Mapping[str, object], group: ProcessGroup | None = None
    ) -> None:
        self.module = module
        self._group = group
        self.trained = self._wrap(module, is_dynamic, options)
        self._is_dynamic = is_dynamic

    @abstractmethod
    def _wrap(self, module: nn.Module, is_dynamic: bool, options: Mapping[str, object]) -> nn.Module: ...

    @abstractmethod
    def traffic(self) -> Traffic:
        """The traffic of the last step; its gradients must still be there."""

    def launches(self) -> list[float]:
        """The seconds that the host took to pack and launch each bucket of the last step; empty if it is not known."""
        return []


class Ours(Contestant):
    """ppe_ddp, with its defaults unless the user asks for something else."""

    name = "ppe_ddp"

    def _wrap(self, module: nn.Module, is_dynamic: bool, options: Mapping[str, object]) -> nn.Module:
        return DistributedDataParallel(module, process_group=self._group, **options)  # type: ignore[arg-type]

    def traffic(self) -> Traffic:
        """As the engine has recorded it."""
        trace = self._trace()
        return Traffic() if trace is None else Traffic(trace.gradient_nbytes, trace.control_nbytes)

    def launches(self) -> list[float]:
        """As the engine has recorded it."""
        trace = self._trace()
        return [] if trace is None else [(one.launched_ns - one.launch_ns) / 1e9 for one in trace.buckets]

    def _trace(self) -> Trace | None:
        assert isinstance(self.trained, DistributedDataParallel)
        return self.trained.trace()


class OursByGloo(Ours):
    """The same, with groups over gloo alone."""

    name = "by gloo"

    def _wrap(self, module: nn.Module, is_dynamic: bool, options: Mapping[str, object]) -> nn.Module:
        return super()._wrap(module, is_dynamic, {**options, "shared_memory": False})


class OursOverMpi(Ours):
    """The same over the default group, which is mpi4py's under mpirun."""

    name = "over mpi4py"

    def _wrap(self, module: nn.Module, is_dynamic: bool, options: Mapping[str, object]) -> nn.Module:
        return DistributedDataParallel(module, **options)  # type: ignore[arg-type]


class OursOverMpiThread(Ours):
    """The same, with the progress thread of the backend."""

    name = "mpi thread"

    def _wrap(self, module: nn.Module, is_dynamic: bool, options: Mapping[str, object]) -> nn.Module:
        mpi = importlib.import_module("ppe_ddp.backends.mpi.mpi_group")
        group = dist.new_group(backend="mpi4py", pg_options=mpi.MpiOptions(thread=True))
        return DistributedDataParallel(module, process_group=group, **options)  # type: ignore[arg-type]


class Torch(Contestant):
    """torch's DistributedDataParallel, with the options that make it fast."""

    name = "torch"

    def _wrap(self, module: nn.Module, is_dynamic: bool, options: Mapping[str, object]) -> nn.Module:
        return TorchDDP(
            module,
            process_group=self._group,
            gradient_as_bucket_view=True,
            find_unused_parameters=is_dynamic,
        )

    def traffic(self) -> Traffic:
        """All gradients, present or not; an int32 for each parameter where some may be unused."""
        sent = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        nbytes = sum(parameter.numel() * parameter.element_size() for parameter in sent)
        return Traffic(nbytes, 4 * len(sent) if self._is_dynamic else 0)


class Ppe(Contestant):
    """The DistributedDataParallel of pytorch-pfn-extras."""

    name = "ppe"

    def _wrap(self, module: nn.Module, is_dynamic: bool, options: Mapping[str, object]) -> nn.Module:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                parallel = importlib.import_module("pytorch_pfn_extras.nn.parallel")
        except ImportError as error:
            raise ImportError(f"pytorch-pfn-extras is not installed ({error})") from error
        wrapped: nn.Module = parallel.DistributedDataParallel(module, process_group=self._group)
        return wrapped

    def traffic(self) -> Traffic:
        """The gradients that exist on some rank, which it fills in here, and an int64 for each parameter."""
        return Traffic(gradient_nbytes(self.module), 8 * len(list(self.module.parameters())))


class Bare(Contestant):
    """The model alone, on each rank for itself."""

    name = "bare"

    def _wrap(self, module: nn.Module, is_dynamic: bool, options: Mapping[str, object]) -> nn.Module:
        return module

    def traffic(self) -> Traffic:
        """Nothing."""
        return Traffic()


CONTESTANTS: tuple[type[Contestant], ...] = (Ours, Torch, Ppe, Bare)
"""In the order in which results show them."""


def contestants(*, with_thread: bool = False, with_gloo: bool = False) -> tuple[type[Contestant], ...]:
    """Those that can take part in the default process group, in the order of results."""
    gloo = (OursByGloo,) if with_gloo else ()
    if not over_mpi():
        return (Ours, *gloo, *CONTESTANTS[1:])
    thread = (OursOverMpiThread,) if with_thread else ()
    return (Ours, *gloo, OursOverMpi, *thread, *CONTESTANTS[1:])


def gradient_nbytes(module: nn.Module) -> int:
    """Bytes of the gradients that ``module`` holds."""
    gradients = [parameter.grad for parameter in module.parameters()]
    return sum(grad.numel() * grad.element_size() for grad in gradients if grad is not None)
