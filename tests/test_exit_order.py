"""The wrapper's connections end before Python does: else a thread of gloo may need Python when it is gone."""

import subprocess
import sys
from pathlib import Path

import pytest

PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
SCRIPT = """
import atexit, sys, torch, torch.distributed as dist
from ppe_ddp import DistributedDataParallel

how, rank, meeting = sys.argv[1:]
atexit.register(lambda: print("ended" if groups.is_closed else "open"))  # what is registered first comes last
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=2)
model = DistributedDataParallel(torch.nn.Linear(8, 8))
groups = model._reducer.groups
model(torch.ones(2, 8)).sum().backward()
if how == "destroy":
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["leave", "destroy"])
def test_connections_end_before_python(tmp_path, how):
    command = [sys.executable, "-c", SCRIPT, how]
    environment = {"PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank), tmp_path / "meeting"], env=environment, **PIPES) for rank in range(2)
    ]
    try:
        for process in ranks:
            output, errors = process.communicate(timeout=60)
            assert (process.returncode, output.split(), errors) == (0, ["ended"], "")
    finally:
        for process in ranks:
            process.kill()
