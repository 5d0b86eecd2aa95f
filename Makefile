# Warpsmith: `make run` is the main job, `make test` the tests, `make help` the rest. Every target installs what it needs.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP_INSTALL = PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --disable-pip-version-check --quiet
BUDGET ?= 6s
MODULES ?= examples/softmax.py examples/fused_linear_row_sum.py examples/gelu_bias_scale.py

.PHONY: help setup run test test-gpu check format wheelhouse baseline stubs clean

help: ## lists the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(READY): pyproject.toml constraints.txt $(wildcard proto/warpsmith/v1/*.proto) proto/generate.py
	@PYTHON=$(PYTHON) VENV=$(VENV) TORCH_INDEX=$(TORCH_INDEX) bash .ci/setup.sh
	@touch $@

setup: $(READY) ## creates .venv and installs Warpsmith in it (TORCH_INDEX=URL chooses torch's package index)

run: $(READY) ## optimises three examples (BUDGET=6s of search for each, MODULES=…)
	@$(BIN)/warpsmith optimize $(MODULES) --budget $(BUDGET)

test: $(READY) ## runs the tests that need no GPU, with coverage
	@$(BIN)/pytest -m "not gpu and not vllm" --cov --cov-report=term:skip-covered

test-gpu: ## runs the tests that need a Hopper GPU, with the Python that has torch
	@$(PYTHON) -m pytest -m gpu

check: $(READY) ## lint, formatting, types, import contracts, proto lint and compatibility, module sizes
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/buf lint proto
	@$(BIN)/buf breaking proto --against proto/baseline.binpb
	@$(BIN)/python .ci/module_sizes.py

format: $(READY) ## formats the sources
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

baseline: $(READY) ## takes the contract as it is for what `check` compares it with
	@$(BIN)/buf build proto --exclude-source-info -o proto/baseline.binpb

stubs: $(READY) ## generates the gRPC stubs again
	@$(BIN)/python proto/generate.py

wheelhouse: $(READY) ## collects our wheel and what an offline machine with torch lacks (PYTHON_VERSION=3.12)
	@PYTHON_VERSION=$(or $(PYTHON_VERSION),3.12) VENV=$(VENV) bash .ci/wheelhouse.sh

clean: ## removes what the targets made, but not runs/
	@rm -rf $(VENV) wheelhouse dist build .mypy_cache .ruff_cache .pytest_cache
