# Warpsmith: `make run` is the main job, `make test` the tests, `make help` the rest. Every target installs what it needs.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS = -n auto --maxprocesses=4 --dist loadfile --max-worker-restart 0
TESTS = $(BIN)/pytest $(WORKERS) --durations=12 \
  -m "not gpu and not vllm and not hostile and not postgres and not simt and not services and not web and not faults"
PIP_INSTALL = PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --disable-pip-version-check --quiet
HOSTILE_SOLUTIONS = tests/hostile/test_solutions.py tests/hostile/test_red_team.py
BUDGET ?= 5s
MODULES ?= examples/gelu_bias_scale.py examples/fused_linear_row_sum.py examples/softmax.py

.PHONY: help setup run quick test coverage test-simt test-hostile test-hostile-kernels test-hostile-solutions red-team honest test-hostile-gpu test-postgres test-faults chaos test-web test-gpu test-vllm check format wheelhouse baseline stubs clean agents-check images push images-check k8s-check chart monitoring monitoring-check monitoring-pictures docs docs-check sbom system-deps

help: ## lists the targets
	@sed -nE 's/^##@ (.*)/\n\1/p; s/^([a-z0-9-]+):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 22

$(READY): pyproject.toml constraints.txt $(wildcard proto/warpsmith/v1/*.proto) proto/generate.py
	@PYTHON=$(PYTHON) VENV=$(VENV) TORCH_INDEX=$(TORCH_INDEX) bash .ci/setup.sh
	@touch $@

##@ Use

setup: $(READY) ## creates .venv and installs Warpsmith in it (TORCH_INDEX=URL chooses torch's package index)

run: $(READY) ## optimises three examples (BUDGET=5s of search for each, MODULES=…)
	@$(BIN)/warpsmith optimize $(MODULES) --budget $(BUDGET)

##@ Before a commit

quick: $(READY) ## lint, types and the tests that your change touches, in 90 seconds
	@$(BIN)/python .ci/quick.py

check: $(READY) ## lint, formatting, types, import contracts, proto lint and compatibility, sizes of modules, classes and functions, rooms, no GPU's constants
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/buf lint proto
	@$(BIN)/buf breaking proto --against proto/baseline.binpb
	@$(BIN)/python .ci/module_sizes.py
	@$(BIN)/python .ci/machine_constants.py
	@$(BIN)/python .ci/import_circles.py

format: $(READY) ## formats the sources
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

test: $(READY) ## runs the tests that need no GPU
	@$(TESTS)

coverage: $(READY) ## the same, and which lines they do not reach; takes half as long again
	@$(TESTS) --cov --cov-report=term:skip-covered

##@ Tests of their own

test-simt: $(READY) ## runs CUDA emitters on the CPU under sanitizers and finds planted faults: a slice, or all of them (ALL=1)
	@$(BIN)/$(if $(ALL),python tests/simt/table.py,pytest -m simt tests/simt)

test-hostile: $(READY) ## programs, plans, modules and solutions that cheat, crash or break out: none may pass (RUNG=landlock, SCOREBOARD=FILE)
ifdef SCOREBOARD
	@$(BIN)/pytest --scoreboard $(SCOREBOARD) -m hostile tests/hostile $(if $(RUNG),--rung $(RUNG))
else
	@$(MAKE) test-hostile-kernels test-hostile-solutions
endif

test-hostile-kernels: $(READY) ## the part of it that has many processes at once: programs, plans and modules
	@$(BIN)/pytest $(WORKERS) $(HOSTILE_SOLUTIONS:%=--ignore=%) -m hostile tests/hostile $(if $(RUNG),--rung $(RUNG))

test-hostile-solutions: $(READY) ## the part of it that has one at a time: solutions, and the red team in small
	@$(BIN)/pytest -m hostile $(HOSTILE_SOLUTIONS) $(if $(RUNG),--rung $(RUNG))

test-postgres: $(READY) ## the archive and runs on a real PostgreSQL server of the tests' own (HOLD=60: seconds for which it is locked and away)
	@HOLD=$(HOLD) $(BIN)/pytest -m postgres tests/orchestrator

test-faults: $(READY) ## kills and stops what a run is made of, at every event and at random, locks and fills its store (KILLS=200, SEED=, HOLD=60: seconds that it lasts)
	@KILLS=$(KILLS) SEED=$(SEED) HOLD=$(HOLD) $(BIN)/pytest $(WORKERS) -m faults tests/faults

chaos: $(READY) ## an hour in which services die, stop and slow down and the store is locked and full; promises looked at every minute (MINUTES=60, SEED=1)
	@cd tests/faults && PYTHONPATH=$(CURDIR):$(CURDIR)/proto:$$PYTHONPATH $(abspath $(BIN))/python chaos.py --minutes $(or $(MINUTES),60) --seed $(or $(SEED),1)

test-web: $(READY) ## opens pages in a real Chromium: errors, requests, axe-core, how long it takes
	@$(BIN)/pytest -m web tests/orchestrator

test-vllm: $(READY) ## runs the tests on a real vLLM with a tiny random model, in an environment of its own (.venv-vllm)
	@PYTHON=$(PYTHON) TORCH_INDEX=$(TORCH_INDEX) bash .ci/vllm_environment.sh
	@$(BIN)/pytest -m vllm

agents-check: $(READY) ## the example agents (Python plugin, TypeScript server): each fits its role and drives a whole run; whole runs on real services
	@VENV=$(VENV) bash .ci/agents_check.sh

test-gpu: ## runs the tests that need a Hopper GPU, with the Python that has torch
	@$(PYTHON) -m pytest -m gpu $(shell grep -rl --include='*.py' mark.gpu tests | grep -v tests/hostile)

##@ Trust

red-team: $(READY) ## draws COUNT attacks on the judge and tells which are believed (SEED=, JOBS=, ONLY="a word", TARGET=cuda, FILE=, CASES=DIR: a folder's cases)
	@$(BIN)/python tests/red_team/red_team.py $(if $(COUNT),--count $(COUNT)) $(if $(SEED),--seed $(SEED)) $(if $(JOBS),--jobs $(JOBS)) \
	  $(if $(ONLY),--only "$(ONLY)") $(if $(TARGET),--target $(TARGET)) $(if $(FILE),--file $(FILE)) $(if $(CASES),--cases $(CASES)) $(if $(RUNG),--rung $(RUNG))

honest: $(READY) ## judges unusual honest solutions and tells which are refused (COUNT=, LOAD=processes that spin beside it, REPEAT=, JOBS=, ONLY=)
	@$(BIN)/python tests/red_team/honest.py $(if $(COUNT),--count $(COUNT)) $(if $(LOAD),--load $(LOAD)) $(if $(REPEAT),--repeat $(REPEAT)) \
	  $(if $(JOBS),--jobs $(JOBS)) $(if $(ONLY),--only "$(ONLY)")

test-hostile-gpu: ## the hostile suite on a Hopper GPU, with the Python that has torch (KERNELBENCH=DIR: its own adversarial programs too; RUNG=landlock, ONLY="names,…", PART=1/4 for the first of four GPUs)
	@KERNELBENCH=$(KERNELBENCH) $(PYTHON) tests/hostile/hostile_gpu.py $(if $(RUNG),--rung $(RUNG)) $(if $(ONLY),--only "$(ONLY)") $(if $(PART),--part $(PART))

##@ Deploy

images: ## builds the container images (REGISTRY=, TAG=, IMAGES=, BASE_IMAGE=, TORCH_INDEX=, ENGINE=docker|podman|buildah)
	@PYTHON=$(PYTHON) bash .ci/images.sh build

push: ## pushes them (REGISTRY=host/path)
	@bash .ci/images.sh push

images-check: $(READY) ## builds images on a debootstrap base and starts their services (IMAGES=agent); needs root and buildah
	@VENV=$(VENV) IMAGES="$(or $(IMAGES),agent)" TORCH_INDEX=$(TORCH_INDEX) bash .ci/images_check.sh

k8s-check: ## renders and validates every manifest, audits them, lints the Dockerfile; needs no cluster
	@PYTHON=$(PYTHON) bash .ci/k8s_check.sh

chart: $(READY) ## makes the Helm chart's files from the kustomizations
	@$(BIN)/python k8s/chart_files.py

monitoring: $(READY) ## makes the dashboards and the operator's rules, which the chart has too
	@$(BIN)/python k8s/monitoring/dashboards.py
	@$(BIN)/python k8s/chart_files.py

monitoring-check: $(READY) ## checks rules and dashboards; a real Prometheus scrapes a real run
	@VENV=$(VENV) bash .ci/monitoring_check.sh

monitoring-pictures: $(READY) ## runs two modules under Prometheus and draws the dashboards into docs/images
	@$(BIN)/python k8s/monitoring/live_check.py --pictures docs/images

##@ Docs

docs: ## builds docs/ as a static site in build/site, with an environment of its own (.venv-docs)
	@PYTHON=$(PYTHON) bash .ci/docs_check.sh

docs-check: $(READY) ## builds it strictly; checks links, anchors, navigation, requests, pages made from the code, and every command that a page shows
	@PYTHON=$(PYTHON) VENV=$(VENV) bash .ci/docs_check.sh check

##@ House

stubs: $(READY) ## generates the gRPC stubs again
	@$(BIN)/python proto/generate.py

baseline: $(READY) ## takes the contract as it is for what `check` compares it with
	@$(BIN)/buf build proto --exclude-source-info -o proto/baseline.binpb

wheelhouse: $(READY) ## collects our wheel and what an offline machine with torch lacks (PYTHON_VERSION=3.12)
	@PYTHON_VERSION=$(or $(PYTHON_VERSION),3.12) VENV=$(VENV) bash .ci/wheelhouse.sh

sbom: $(READY) ## writes what is installed, with versions and licences, as CycloneDX JSON (FILE=build/sbom.json)
	@VENV=$(VENV) bash .ci/sbom.sh $(or $(FILE),build/sbom.json)

system-deps: ## installs Debian packages for monitoring-check, images-check and the tests on PostgreSQL, in a browser and of a cut network (as root)
	@apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install --yes -qq --no-install-recommends prometheus buildah debootstrap postgresql chromium iproute2

clean: ## removes what the targets made, but not runs/
	@rm -rf $(VENV) .venv-k8s .venv-checkov .venv-docs wheelhouse dist build .mypy_cache .ruff_cache .pytest_cache
