"""Ray Train with this library's wrapper: as one process, also where a worker has died on the way."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from routed import assert_trained, indices, made, sgd, trained_alone

# Not imported here: that takes seconds, and every worker collects every file.
pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray, which is heavy: make test-integrations")

STEPS = 6


def train(config):
    """The body of a worker; that of rank 1 dies once, in the middle."""
    import tempfile

    import ray.train
    import torch.distributed as dist

    from ppe_ddp.integrations.ray import prepare_model

    folder = Path(config["folder"])
    net = made()
    optimizer = sgd(net)
    begin = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as saved:
            state = torch.load(Path(saved, "state"))
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["step"]
    model = prepare_model(net)
    for step in range(begin, STEPS):
        if step == config["dies_at"] and begin == 0 and dist.get_rank() == 1:
            os._exit(1)
        optimizer.zero_grad()
        model(indices(STEPS)[step]).pow(2).mean().backward()
        optimizer.step()
        with tempfile.TemporaryDirectory() as saving:
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, Path(saving, "state"))
            own = ray.train.Checkpoint.from_directory(saving) if dist.get_rank() == 0 else None
            ray.train.report({"begin": begin}, checkpoint=own)
    model.check_in_sync()
    optimizer.zero_grad()
    assert_trained(net, trained_alone(STEPS))
    (folder / f"{dist.get_rank()} began at {begin}").touch()


@pytest.fixture(scope="module")
def _cluster():
    import ray

    folder = Path(__file__).parent
    environment = {"PYTHONPATH": f"{folder.parent}:{folder}", "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": environment}, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dies_at", [None, 3], ids=["untroubled", "a worker dies"])
@pytest.mark.usefixtures("_cluster")
def test_workers(tmp_path, dies_at):
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    TorchTrainer(
        train,
        train_loop_config={"folder": str(tmp_path), "dies_at": dies_at},
        scaling_config=ScalingConfig(num_workers=2),
        torch_config=TorchConfig(backend="gloo", timeout_s=30),
        run_config=RunConfig(storage_path=str(tmp_path), name="run", failure_config=FailureConfig(max_failures=1)),
    ).fit()
    began = {int(path.name.split()[0]): int(path.name.split()[-1]) for path in tmp_path.glob("* began at *")}
    assert began[0] == began[1]
    # Which of the checkpoints before the failure Ray has kept when it sees that one has died depends on time.
    assert began[0] in ([0] if dies_at is None else range(1, dies_at + 1))
