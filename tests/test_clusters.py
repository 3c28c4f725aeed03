"""The files of examples/clusters say what they are to say: each is parsed, and each command run, run dry or parsed."""

import os
from pathlib import Path

import pytest
from torch.distributed.run import parse_args

from subprocesses import MPIRUN, needs_mpirun, run, warm_python

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which transformers brings")
CLUSTERS = Path(__file__).parents[1] / "examples" / "clusters"
SAYS = '#!/bin/bash\nif [[ ${1:-} == --version ]]; then echo "$VERSION"; exit; fi\necho "${0##*/} $*"\n'


@pytest.fixture
def dry(tmp_path):
    """Runs a script of bash where launchers only say what they were called with."""

    def run_dry(*words, stubs, environment=None):
        for name, text in stubs.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **(environment or {})}
        code, said, errors = run(["bash", *words], timeout=150, environment=given)
        assert code == 0, errors
        return said

    return run_dry


def test_slurm_goes_back_into_the_queue_before_its_time_is_over(dry, tmp_path):
    os.mkfifo(queue := tmp_path / "queue")  # the ranks train on until the job is in the queue
    stubs = {"srun": SAYS + 'kill -USR1 $PPID\nread -r < "$QUEUE"\n', "scontrol": SAYS + 'echo > "$QUEUE"\n'}
    given = {"SLURM_JOB_ID": "7", "QUEUE": str(queue)}
    said = dry(CLUSTERS / "slurm.sbatch", "train.py", "--lr=1", stubs=stubs, environment=given)
    assert sorted(said.splitlines()) == ["scontrol requeue 7", "srun --kill-on-bad-exit=1 python train.py --lr=1"]
    options = [line.split()[1] for line in (CLUSTERS / "slurm.sbatch").read_text().splitlines() if "#SBATCH" in line]
    assert {"--nodes=2", "--requeue", "--signal=B:USR1@120"} <= set(options)


@pytest.mark.parametrize(
    ("version", "hosts", "called"),
    [
        ("mpirun (Open MPI) 5.0.11", "A slots=2\nB slots=3\n", "--hostfile FILE -n 5 -x PATH -x OMP_NUM_THREADS"),
        ("HYDRA build details:", "A:2\nB:3\n", "-f FILE -n 5 -genv OMP_NUM_THREADS 1"),
    ],
    ids=["Open MPI", "MPICH"],
)
def test_each_mpirun_gets_the_file_of_hosts_that_it_reads(dry, version, hosts, called):
    stub = {"mpirun": SAYS + 'cat "$2"\n'}
    words = (CLUSTERS / "mpirun.sh", "A:2", "B:3", "--", "python", "train.py")
    said, _, file = dry(*words, stubs=stub, environment={"VERSION": version}).partition("\n")
    words = said.split()
    assert [words[0], *words[1:2], "FILE", *words[3:]] == ["mpirun", *called.split(), "python", "train.py"]
    assert file == hosts


@needs_mpirun
def test_mpirun_starts_ranks_that_find_one_another(dry):
    path = f"{Path(MPIRUN).parent}:{os.environ['PATH']}"
    program = "import ppe_ddp as p; job = p.init_process_group(quiet=True); print(job.rank, job.world_size, flush=True)"
    words = (CLUSTERS / "mpirun.sh", "localhost:2", "--", *warm_python(), "-c", program)
    environment = {"PATH": path, "PYTHONPATH": str(CLUSTERS.parents[1])}
    assert sorted(dry(*words, stubs={}, environment=environment).split("\n")) == ["", "0 2", "1 2"]


def test_torchrun_is_elastic(dry):
    stub = {"torchrun": SAYS + 'echo "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE"\n'}
    said = dry(CLUSTERS / "torchrun.sh", "train.py", stubs=stub, environment={"HOST": "A"})
    assert "--nnodes=1:4 --nproc-per-node=4 --max-restarts=3" in said
    assert said.endswith("--rdzv-endpoint=A:29500 train.py\n1\n")


def test_skypilot(dry, tmp_path):
    task = yaml.safe_load((CLUSTERS / "skypilot.yaml").read_text())
    assert set(task) <= {"name", "num_nodes", "resources", "file_mounts", "workdir", "setup", "run", "envs"}
    (tmp_path / "run.sh").write_text(task["run"])
    given = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    said = dry(tmp_path / "run.sh", stubs={"torchrun": SAYS}, environment=given)
    assert said.split()[1:3] == ["--nnodes=2", "--node-rank=1"]
    assert "--master-addr=10.0.0.1 " in said


# The fields of a TrainJob of Kubeflow Trainer 2.2, as far as they may be of use here.
SPEC = {"runtimeRef", "trainer", "suspend", "activeDeadlineSeconds", "runtimePatches"}
TRAINER = {"image", "command", "args", "env", "numNodes", "numProcPerNode", "resourcesPerNode"}


@pytest.mark.parametrize("name", ["kubeflow_torch.yaml", "kubeflow_mpi.yaml"])
def test_kubeflow(name):
    *runtimes, job = yaml.safe_load_all((CLUSTERS / name).read_text())
    assert {one["apiVersion"] for one in (*runtimes, job)} == {"trainer.kubeflow.org/v1alpha1"}
    assert job["kind"] == "TrainJob"
    assert set(job["spec"]) <= SPEC
    assert set(job["spec"]["trainer"]) <= TRAINER
    for runtime in runtimes:
        asked = {"name": runtime["metadata"]["name"], "kind": runtime["kind"]}
        assert job["spec"]["runtimeRef"] == asked
        policy = runtime["spec"]["mlPolicy"]
        ranks = policy["numNodes"] * policy["mpi"]["numProcPerNode"]
        assert job["spec"]["trainer"]["command"][:3] == ["mpirun", "-n", str(ranks)]
        jobs = runtime["spec"]["template"]["spec"]["replicatedJobs"]
        assert [one["name"] for one in jobs] == ["node", "launcher"]


def test_torchrun_takes_what_kubeflow_tells_it(monkeypatch):
    trainer = yaml.safe_load((CLUSTERS / "kubeflow_torch.yaml").read_text())["spec"]["trainer"]
    told = {"nnodes": trainer["numNodes"], "nproc_per_node": trainer["numProcPerNode"], "node_rank": 1}
    for name, value in (told | {"master_addr": "train-node-0-0.train"}).items():
        monkeypatch.setenv(f"PET_{name.upper()}", str(value))
    launcher, *words = trainer["command"]
    read = parse_args(words)
    assert {name: int(getattr(read, name)) for name in told} == told
    assert (launcher, read.training_script, read.master_addr) == ("torchrun", "train.py", "train-node-0-0.train")


def test_every_file_is_on_the_page():
    page = (CLUSTERS.parents[1] / "docs" / "clusters.md").read_text()
    assert [file.name for file in CLUSTERS.iterdir() if file.name not in page] == []
