"""Data-parallel training in PyTorch for models whose graphs change from step to step."""

import ppe_ddp.backends  # noqa: F401  # registers our backends; nothing of MPI or CuPy is loaded yet
from ppe_ddp.checkpoints.checkpointer import Checkpointer, Restored
from ppe_ddp.contracts import BroadcastFunction, CommHook, GradBucket, ReduceFunction, SyncHook, Waitable
from ppe_ddp.ddp import DistributedDataParallel
from ppe_ddp.engine.record import BucketTrace, Trace
from ppe_ddp.errors import (
    CheckpointError,
    CommunicationError,
    DisagreementError,
    FunctionError,
    NonFiniteGradientError,
    PeerAbortedError,
    PpeDdpError,
    TorchChangedError,
    UnusableError,
)
from ppe_ddp.functions import average, broadcast, overlapped
from ppe_ddp.launch import Job, init_process_group
from ppe_ddp.optim import DistributedOptimizer
from ppe_ddp.options import Options
from ppe_ddp.stragglers import RankTime
from ppe_ddp.tracing import timeline
from ppe_ddp.weighing import weigh

__version__ = "0.1.0"

__all__ = [
    "BroadcastFunction",
    "BucketTrace",
    "CheckpointError",
    "Checkpointer",
    "CommHook",
    "CommunicationError",
    "DisagreementError",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "FunctionError",
    "GradBucket",
    "Job",
    "NonFiniteGradientError",
    "Options",
    "PeerAbortedError",
    "PpeDdpError",
    "RankTime",
    "ReduceFunction",
    "Restored",
    "SyncHook",
    "TorchChangedError",
    "Trace",
    "UnusableError",
    "Waitable",
    "average",
    "broadcast",
    "init_process_group",
    "overlapped",
    "timeline",
    "weigh",
]
