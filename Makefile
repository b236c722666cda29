# `make demo` and `make test` set themselves up: they need Python and the package index, nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready
READY_DEV = $(VENV)/.ready-dev
DEMO ?= demo
WORKERS ?= auto

.PHONY: demo test test-all lint bench bench-smoke clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(READY): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(READY_DEV): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ $(READY)

demo: $(READY)
	PATH="$(abspath $(BIN)):$$PATH" bash configs/demo.sh $(DEMO)

test: $(READY_DEV)
	$(BIN)/python -m pytest -m "not slow and not gpu" -n $(WORKERS) -q

test-all: $(READY_DEV)
	$(BIN)/python -m pytest -m "not gpu" -n $(WORKERS)

lint: $(READY_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY_DEV)
	$(BIN)/python -m pytest bench

bench-smoke: $(READY_DEV)
	$(BIN)/python -m pytest bench --smoke -q

clean:
	rm -rf $(DEMO) .pytest_cache .mypy_cache .ruff_cache
