# Everything a newcomer types. Each target sets up what it needs in .venv first.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Programs that tests start would compile every module again.
unexport PYTHONDONTWRITEBYTECODE
CHROMIUM := { command -v chromium || command -v chromium-browser || command -v google-chrome; }

.PHONY: setup test test-fast test-browser test-kernels test-lm-eval test-trackers coverage notebook wheel-check lint format demo docs kills bench clean

setup: .venv/.installed  ## make .venv and install the package with everything needed to develop it

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv .venv
	$(PIP) --editable '.[dev]'
	touch $@

test: lint  ## format, lint, types and tests: what CI runs; the browser's too, where Chromium is installed
	if $(CHROMIUM) >/dev/null; then $(PIP) playwright || echo 'Playwright is needed: the tests of the playground are skipped'; fi
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

test-fast: setup  ## format, lint and the quick tests, in under 90 seconds: for the loop between two edits; `make test` has types and all tests
	$(BIN)/ruff format --check --quiet
	$(BIN)/ruff check --quiet
	$(BIN)/python -m pytest -n auto -m "not slow" -q

test-browser: setup  ## drive the playground in Chromium; installs Chromium, Playwright and axe where they are missing
	$(PIP) playwright
	$(CHROMIUM) || apt-get install -y --no-install-recommends chromium || $(BIN)/playwright install --with-deps chromium
	npm install --silent --no-save --prefix .venv/axe axe-core || echo 'npm is needed for axe: its test is skipped'
	$(BIN)/python -m pytest tests/serving/test_playground.py

test-lm-eval:  ## standard benchmarks, in an environment of its own: lm-eval needs an older python-dateutil than the other tests
	$(PYTHON) -m venv .venv/lm-eval
	grep -v '^python-dateutil' constraints.txt > .venv/lm-eval/constraints.txt
	.venv/lm-eval/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv/lm-eval/constraints.txt --editable '.[lm-eval,peft]' beartype hypothesis pytest
	.venv/lm-eval/bin/python -m pytest tests/evaluation/test_harness.py tests/cli/test_lm_eval.py

test-kernels: .venv/triton/.installed  ## the Triton kernels on a CPU, in Triton's interpreter: 1 GB is installed aside; two minutes
	PYTHONPATH=.venv/triton TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/policy/test_kernels.py

.venv/triton/.installed: .venv/.installed
	$(PIP) --no-deps --target .venv/triton --upgrade 'triton>=3.5'
	touch $@

test-trackers:  ## tables of rollouts in TensorBoard, W&B (offline) and trackio, in an environment of its own
	$(PYTHON) -m venv .venv/trackers
	grep -v '^pillow' constraints.txt > .venv/trackers/constraints.txt # trackio needs an older one
	.venv/trackers/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv/trackers/constraints.txt --editable . beartype hypothesis pytest tensorboard 'trackio>=0.43' wandb
	.venv/trackers/bin/python -m pytest tests/training/test_trackers.py

coverage: .venv/triton/.installed  ## lines that tests run, by folder, programs that tests start included: some twenty minutes
	$(PIP) 'pytest-cov>=7' 'coverage>=7.17'
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --cov --cov-report=
	PYTHONPATH=.venv/triton TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/policy/test_kernels.py --cov --cov-append --cov-report=
	$(BIN)/coverage combine --append --quiet || true # programs that ended after the tests
	for part in core data policy tasks metrics training evaluation experiments serving cli; do \
		echo "$$part $$($(BIN)/coverage report --include "src/sequencematch/$$part/*" --format=total)%"; done

notebook:  ## make examples/notebook.ipynb from notebook.md and run it, in an environment of its own
	$(PYTHON) -m venv .venv/notebook
	.venv/notebook/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable . jupytext nbclient ipykernel
	.venv/notebook/bin/python dev/notebook.py examples/notebook.md

wheel-check:  ## install the built wheel into an empty environment and use it from an empty folder, each step timed: some minutes
	$(PYTHON) dev/wheel_check.py

lint: setup  ## format, lint and types
	$(BIN)/ruff format --check --quiet
	$(BIN)/ruff check --quiet
	$(BIN)/mypy --num-workers 2

format: setup  ## rewrite the code the way the check wants it
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

demo: setup  ## a model deletes wrong digits; then three ways to train it are compared
	$(BIN)/sequencematch demo

docs: setup  ## build the docs site into build/site, without a network and without a warning
	$(BIN)/python dev/pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo 'Open build/site/index.html, or for its search: $(BIN)/python -m http.server --directory build/site'

kills: setup  ## kill training runs at 200 random file-system calls and compare each, resumed, with a run that was not: half an hour
	$(BIN)/python -m tests.training.kills 200

bench: setup  ## training and sampling beside plain Hugging Face and the paper's recipe, on one thread; BENCH=--quick takes two minutes
	$(BIN)/python -m benchmarks $(BENCH)

clean:  ## remove what the other targets made
	rm -rf .venv out build
