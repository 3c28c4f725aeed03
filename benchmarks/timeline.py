"""Draws one step of torch DDP above the same step of ppe_ddp, on one scale.

The ranks are on this machine, or with --nodes N on N nodes that are made of it,
each with a link of --mbit to the others (as root; see `ppe_ddp.testing.Nodes`).
torch's wrapper is observed by a hook around its all-reduce. Needs matplotlib.

  python -m benchmarks timeline --out step.png
  python -m benchmarks timeline --out step.png --nodes 2 --compressor int8
"""

import argparse
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.nodes import add_node_arguments, started_ranks
from ppe_ddp import DistributedDataParallel
from ppe_ddp.cli.bench_step import WORKLOADS, Contestant
from ppe_ddp.cli.command_line import count, fail, output
from ppe_ddp.compression import BF16, FP16, Compressor, ErrorFeedback, Int8, PowerSGD, TopK
from ppe_ddp.engine.record import EventLog, Recorder
from ppe_ddp.testing import NodesError, RankError
from ppe_ddp.torch_internals import at_end_of_backward
from ppe_ddp.tracing.pictures import draw_steps
from ppe_ddp.tracing.rank_record import RankRecord, record, summarize
from ppe_ddp.tracing.timeline import check_pictures

_COMPRESSORS: dict[str, Compressor] = {
    "bf16": BF16(),
    "fp16": FP16(),
    "int8": Int8(),
    "top-k": ErrorFeedback(TopK(0.01)),
    "power-sgd": ErrorFeedback(PowerSGD(rank=4)),
}
_STEPS, _LEAD_STEPS = 12, 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to ``parser``."""
    parser.add_argument("--out", type=output, required=True, metavar="FILE", help="the picture: .png, .svg or .pdf")
    names = f"{', '.join(WORKLOADS)} (default: supernet-own)"
    parser.add_argument("--model", choices=WORKLOADS, default="supernet-own", metavar="NAME", help=names)
    add_node_arguments(parser)
    compressors = f"once more with this one ({', '.join(_COMPRESSORS)}); repeatable"
    parser.add_argument(
        "--compressor", action="append", default=[], choices=_COMPRESSORS, metavar="NAME", help=compressors
    )
    parser.add_argument("--no-torch", action="store_true", help="ppe_ddp alone")
    parser.add_argument("--steps", type=count, default=_STEPS, metavar="N", help=f"to record (default: {_STEPS})")


def run(arguments: argparse.Namespace) -> int:
    """Record, draw, and print the numbers; 1 if a rank failed, 2 if nodes or pictures cannot be made."""
    contestants = [] if arguments.no_torch else ["torch DDP"]
    contestants += ["ppe_ddp", *(f"ppe_ddp, {name}" for name in arguments.compressor)]
    panels = {}
    try:
        check_pictures()
        with started_ranks(arguments) as ranks:
            for name in contestants:
                records = ranks.run(record_steps, name, arguments.model, arguments.steps)
                panels[name] = [one.on_one_clock() for one in records]
    except (ImportError, NodesError) as error:
        return fail(error, 2)
    except RankError as error:
        return fail(error, 1)
    draw_steps(panels, Path(arguments.out))
    for name, records in panels.items():
        print(f"{name}: {summarize(records)}\n")
    return 0


def record_steps(contestant: str, model: str, steps: int) -> RankRecord:
    """Train on this rank, and record the last steps."""
    workload = WORKLOADS[model]
    module, batch = workload.made()
    wrapper: TorchDDP | DistributedDataParallel
    if contestant == "torch DDP":
        wrapper = TorchDDP(module, gradient_as_bucket_view=True, find_unused_parameters=workload.is_dynamic)
        TorchSpans(wrapper)
    else:
        wrapper = DistributedDataParallel(module)
        if ", " in contestant:
            wrapper.register_comm_hook(_COMPRESSORS[contestant.split(", ")[1]])
    trained = Contestant(workload, batch, module, wrapper)
    trained.take(_LEAD_STEPS)
    with record() as recording:
        dist.barrier()
        trained.take(steps)
    return recording.result()


class TorchSpans:
    """Records what torch's wrapper, which was not used before and has no hook, does, by a hook around its all-reduce.

    Callbacks before and after the wrapper's own, which waits, note the end of autograd's part and of the backward.
    """

    def __init__(self, wrapper: TorchDDP) -> None:
        self._name = type(wrapper.module).__name__
        self._recorder = Recorder(())
        wrapper.register_comm_hook(None, lambda _state, bucket: self._reduce(bucket))
        wrapper.register_forward_pre_hook(self._begin_forward)
        wrapper.register_forward_hook(self._end_forward)

    def _begin_forward(self, *_: object) -> None:
        if EventLog.current is not None:
            EventLog.current.begin("forward", self)

    def _end_forward(self, _module: object, _arguments: object, output: torch.Tensor) -> None:
        if EventLog.current is not None:
            EventLog.current.end("forward", self, self._name)
            output.register_hook(self._begin_backward)

    def _begin_backward(self, _gradient: torch.Tensor) -> None:
        self._recorder = Recorder(())
        at_end_of_backward(self._end_of_autograd)

    def _end_of_autograd(self) -> None:
        self._recorder.backward_at = perf_counter_ns()
        at_end_of_backward(self._end)  # after the wrapper's callback, which is in the queue already

    def _end(self) -> None:
        self._recorder.returned_at = self._recorder.done_at = perf_counter_ns()
        if EventLog.current is not None:
            EventLog.current.backwards.append(self._recorder)

    def _reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        begin = perf_counter_ns()
        tensor = bucket.buffer().div_(dist.get_world_size())
        work = dist.all_reduce(tensor, async_op=True)
        if EventLog.current is not None:
            EventLog.current.add_message("bucket", str(bucket.index()), begin, work, tensor.nbytes)
        return work.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]
