# Everything stands on `make setup`, which needs Python >= 3.11 and nothing else.
PYTHON ?= python3
BIN := .venv/bin
# A process a core; a file's tests share what they compile.
PYTEST := $(BIN)/pytest -n auto --maxprocesses 8 --dist loadfile

.PHONY: setup demo test test-all lint bench docs clean

setup: .venv/.installed

.venv/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "expected Python >= 3.11, got %d.%d; try make PYTHON=python3.12" % v[:2])'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	@touch $@

.venv/.tested: .venv/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev,parity]'
	@touch $@

.venv/.documented: .venv/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

demo: setup
	$(BIN)/dsv3 generate --model demo --stream --echo --temperature 0.6 --top-p 0.95 --seed 4 \
	  --max-new-tokens 160 --prompt 'def read_config(path):'

test: .venv/.tested
	$(PYTEST) -m 'not slow'

test-all: .venv/.tested
	$(PYTEST)

lint: .venv/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: .venv/.tested
	$(BIN)/python scripts/bench_cpu.py

docs: .venv/.documented
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv .jax_cache site
