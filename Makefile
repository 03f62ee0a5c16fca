# All targets depend on `make setup`, which needs only Python >= 3.11.
PYTHON ?= python3
BIN := .venv/bin
# Containers often forbid bytecode. Each of many processes would then compile all of JAX's modules.
unexport PYTHONDONTWRITEBYTECODE
# Modules are compiled when they are imported, which most of an installation never are.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
# One process per core. Each begins with a part of the files in order, so that tests of a file share
# what they compile, and takes tests from another process when it has no more.
PYTEST := $(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal

.PHONY: setup demo test test-all lint bench aot docs clean

setup: .venv/.installed

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "expected Python >= 3.11, got %d.%d; try make PYTHON=python3.12" % v[:2])'
	$(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml | $(BIN)/python
	$(PIP) --editable .
	@touch $@

.venv/.tested: pyproject.toml | $(BIN)/python
	$(PIP) --editable '.[test]'
	@touch .venv/.installed $@

# dev contains test.
.venv/.compared: pyproject.toml | $(BIN)/python
	$(PIP) --editable '.[dev,parity]'
	@touch .venv/.installed .venv/.tested $@

.venv/.served: .venv/.tested
	$(PIP) --editable '.[clients,ray]'
	@touch $@

.venv/.documented: .venv/.installed
	$(PIP) --editable '.[docs]'
	@touch $@

demo: setup
	$(BIN)/dsv3 generate --model demo --stream --echo --temperature 0.6 --top-p 0.95 --seed 4 \
	  --max-new-tokens 160 --prompt 'def read_config(path):'

test: .venv/.tested
	$(PYTEST) -m 'not slow'

test-all: .venv/.compared
	$(PYTEST)

lint: .venv/.compared
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m scripts.check_words
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: .venv/.compared
	$(BIN)/python scripts/bench_cpu.py

# Compiles whole models for TPUs and GPUs, without having them, and compares the compiler's bytes with
# `dsv3 plan`. Takes hours on two cores; each finished program replaces its row in the results. Hopper
# kernels need jax 0.11 or newer and therefore Python 3.12: make aot PYTHON=python3.12.
RESULTS := benchmarks/results/plan_compiled.json
aot: setup
	$(PIP) --editable '.[tpu]'
	$(BIN)/python -m scripts.plan_compiled $(RESULTS) docs/planning.md --part tpu
	jax=$$($(BIN)/python -c 'import jax; print(jax.__version__)') && \
	  $(PIP) jax-cuda13-plugin==$$jax jax-cuda13-pjrt==$$jax
	$(BIN)/python -m scripts.plan_compiled $(RESULTS) docs/planning.md --part gpu

docs: .venv/.documented
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv .jax_cache site
