"""The laws on random models and the distributed optimizer over mpi4py; run under mpirun by test_mpi_laws.py.

Takes the number of cases of each kind, as JSON, and prints one JSON line on rank 0: the result of each kind.
"""

import faulthandler
import functools
import json
import logging
import operator
import shutil
import sys
import tempfile

import torch
import torch.distributed as dist
from mpi4py import MPI

import mpi_megatron
import mpi_wrappers
from law_scenarios import every_variant, scenarios
from laws import breaches, observe_all
from optim_programs import Program
from optim_runners import first_half, hold, second_half
from ppe_ddp.backends.mpi import MpiOptions
from ppe_ddp.testing.probes import probe_backend
from random_training import differences, train

OPTIONS = {
    "messages": MpiOptions(shared_memory=False),
    "shared": MpiOptions(shared_bytes=16, shared_piece_bytes=4096),
    "thread": MpiOptions(thread=True),
}


def report(count, way):
    dist.init_process_group("mpi4py", init_method="mpi://", pg_options=OPTIONS[way])
    problems = [list(probe_backend("cpu"))]
    variants = every_variant()[:: {2: 5, 3: 7, 4: 8}[dist.get_world_size()]]
    seen = [observe_all(case, variants, plugs) for case, plugs in scenarios(count)]
    for observation in functools.reduce(operator.iadd, seen, []):
        observation.gradients = {}
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (problems, functools.reduce(operator.iadd, seen, [])))
    found = [text for probed, _ in everyone for texts in probed for text in texts]
    for observations in zip(*(observed for _, observed in everyone), strict=True):
        found += breaches(observations)
    made = {"problems": found, "cases": len(everyone[0][1]), "backend": dist.get_backend()}
    dist.destroy_process_group()
    return made


def hold_the_optimizer():
    """It trains as one process does, by messages and through shared memory."""
    for name, way in (("momentum", "messages"), ("adamw", "shared")):
        dist.init_process_group("mpi4py", init_method="mpi://", pg_options=OPTIONS[way])
        hold(Program.plain(name, 5))
        dist.destroy_process_group()


def hold_random_training():
    """Users do to ``.grad`` what they like, as in test_random_training.py."""
    for way, seeds in (("messages", range(1)), ("shared", range(1, 2))):
        dist.init_process_group("mpi4py", init_method="mpi://", pg_options=OPTIONS[way])
        problems, results = train(seeds)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, results)
        assert problems + differences(everyone) == []
        dist.destroy_process_group()


def hold_random_programs():
    """A distributed optimizer is used in many ways, as in test_optim_programs.py, which has shared memory."""
    dist.init_process_group("mpi4py", init_method="mpi://", pg_options=OPTIONS["messages"])
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(path)
    scaler = first_half(1, path[0])
    second_half(1, path[0], scaler, dist.get_world_size())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path[0])
    dist.destroy_process_group()


def main():
    faulthandler.dump_traceback_later(380)
    torch.set_num_threads(1)
    logging.getLogger("ppe_ddp").setLevel(logging.ERROR)
    reports = {way: report(count, way) for way, count in json.loads(sys.argv[1]).items()}
    if MPI.COMM_WORLD.Get_size() in (2, 3):
        reports["wrappers"] = mpi_wrappers.report()
    if MPI.COMM_WORLD.Get_size() == 2:
        hold_the_optimizer()
        hold_random_training()
        reports["megatron"] = mpi_megatron.report()
        hold_random_programs()
    if MPI.COMM_WORLD.Get_rank() == 0:
        print(json.dumps(reports))


if __name__ == "__main__":
    main()
