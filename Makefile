# Every target works on a fresh clone. `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
PIP = --quiet --disable-pip-version-check --no-compile # Python compiles what it imports; pip would compile all
WORKERS ?= 3 # test processes, each with whole files; a launch waits much for its own ranks
QUEUE = -n $(strip $(WORKERS)) --dist loadfile --no-loadscope-reorder
QUICK := not slow_fault and not exhaustive
STAMP := $(VENV)/ready
.DEFAULT_GOAL := help
unexport PYTHONDONTWRITEBYTECODE # else each of a thousand processes compiles torch, transformers and DeepSpeed again
.PHONY: help setup demo test test-all test-faults lint types check docs benchmark lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## make the environment: venv, pinned dependencies, DeepSpeed's ops

$(VENV)/installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"remat needs Python 3.11 or newer (transformers 5.23 does), this is {v[0]}.{v[1]}: make PYTHON=/path/to/python3.11" if v < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "== torch and pinned dependencies"
	@$(BIN)/pip install $(PIP) "$(TORCH)" -r requirements.lock
	@$(BIN)/pip install $(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(STAMP): $(VENV)/installed
	@echo "== DeepSpeed ops"
	@$(BIN)/remat doctor --build cpu_adam
	@touch $@

$(VENV)/async_io: $(VENV)/installed # for the tests of NVMe offload; without libaio's headers they are skipped
	@./scripts/install_libaio.sh
	@$(BIN)/remat doctor --build async_io >/dev/null || ! echo '#include <libaio.h>' | cc -E -x c - >/dev/null 2>&1
	@touch $@

$(VENV)/test-ready: $(STAMP) $(VENV)/async_io
	@touch $@

$(VENV)/cluster: $(VENV)/installed # ssh and SLURM for `make test-all`; without them their tests are skipped
	@./scripts/install_cluster.sh
	@touch $@

$(VENV)/compiled: $(VENV)/installed # one process imports all that tests import, before three do at the same time
	@$(BIN)/python -m pytest tests --collect-only -qq -p no:xdist -p no:cacheprovider >/dev/null 2>&1 || true # errors are told by the tests
	@touch $@

demo: $(STAMP) ## train a small real model on real text, resume it, report, export, sample
	@./scripts/demo.sh

test: $(VENV)/installed ## lint, types and the test suite: of exhaustive grids a sample
	@$(MAKE) --no-print-directory -j 3 lint types $(VENV)/compiled $(VENV)/test-ready
	@$(BIN)/python -m pytest tests $(QUEUE) -m "$(QUICK)" --durations 15 || { \
	    echo "== what failed, once more, one by one: who passes now depends on load or order, which is a fault too"; \
	    $(BIN)/python -m pytest tests -m "$(QUICK)" --last-failed --last-failed-no-failures none; }

test-all: $(VENV)/installed $(VENV)/cluster ## the same with every case of every grid and every slow fault
	@$(MAKE) --no-print-directory -j 3 lint types $(VENV)/compiled $(VENV)/test-ready
	@$(BIN)/python -m pytest tests $(QUEUE) --durations 15

test-faults: $(VENV)/test-ready ## every fault: stops, kills, hangs, also the slow ones; and the slow launches
	@$(BIN)/python -m pytest tests/runs $(QUEUE)

lint: $(VENV)/installed ## ruff: lint and format; import-linter: who may import whom
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports --no-logo --no-cache | tail -n +3
	@$(BIN)/ruff format --check .

types: $(VENV)/installed ## mypy
	@$(BIN)/mypy

check: lint types ## what pre-commit runs, plus the fast tests
	@$(BIN)/python -m pytest tests --ignore tests/runs $(QUEUE) -m "$(QUICK)"

benchmark: $(STAMP) ## loop overhead against a bare DeepSpeed loop and the Hugging Face Trainer
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python benchmarks/loop_overhead.py

docs: $(VENV)-docs/ready ## the pages of docs/ as a site in site/; a link that leads nowhere is an error
	@NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --quiet --strict
	@echo "site/index.html"

$(VENV)-docs/ready: pyproject.toml # needs neither torch nor the package
	@test -x $(VENV)-docs/bin/python || $(PYTHON) -m venv $(VENV)-docs
	@$(VENV)-docs/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
	    | $(VENV)-docs/bin/pip install $(PIP) -r /dev/stdin
	@touch $@

lock: $(STAMP) ## renew requirements.lock from requirements.in and pyproject.toml (needs uv)
	@uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --extra dev --extra qlora \
	    requirements.in pyproject.toml -o $(VENV)/full.lock
	@(echo "# Made by \`make lock\`: everything but torch and what torch brings with it."; \
	    grep -vE '^(torch|triton|nvidia-|cuda-)' $(VENV)/full.lock) > requirements.lock

clean: ## remove the environment and caches, never outputs/
	rm -rf $(VENV) $(VENV)-docs site .pytest_cache .mypy_cache .ruff_cache *.egg-info
