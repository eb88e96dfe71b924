# Every target works on a fresh clone. `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
STAMP := $(VENV)/ready
DEEPSPEED = PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m remat.launch
RUN_ID := demo-$(shell date +%Y%m%d-%H%M%S)
DEMO_DIR := outputs/tiny_zero3_offload/$(RUN_ID)

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types check benchmark lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## make the environment: venv, pinned dependencies, DeepSpeed's ops

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"remat needs Python 3.11 or newer (transformers 5.23 does), this is {v[0]}.{v[1]}: make PYTHON=/path/to/python3.11" if v < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "== torch"
	@$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	@echo "== pinned dependencies"
	@$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@echo "== DeepSpeed ops"
	@$(BIN)/remat doctor --build cpu_adam
	@touch $@
