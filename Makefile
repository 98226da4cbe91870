# Everything runs in .venv, which is made on first use; it follows pyproject.toml and constraints.txt.
#
#   make serve ARGS="--port 9000"        make test PYTHON=python3.12        make test PYTEST_ARGS="-k sampler"

PYTHON ?= python3
ARGS ?=
PYTEST_ARGS ?=
VLLM ?= 0.28.0 0.30.0 0.32.0 0.33.0
WORKERS ?= 2

MODEL := smollm2-135m-instruct
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
NATIVE := hatch_build.py $(wildcard native/include/*.h native/src/*)
# The same examples each time; `searching` tries others.
THOROUGH := --hypothesis-profile=thorough
SEARCHING := --hypothesis-profile=searching
# Files stay whole, so that what a module sets up is made once. Those of servers, which often wait, run first, beside
# the checks of `.ci/run`; the pure ones, which are short, run last and leave no worker alone for long. What holds times
# follows, one by one; pytest's 5 is "none".
WORKED := --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder
FAST := tests/cpu/e2e tests/fleet tests/ray \
  $(filter-out %/e2e %/__pycache__,$(patsubst %/,%,$(wildcard tests/cpu/*/ tests/cpu/test_*.py))) tests/long tests/pure
RARE := /(tests?|testing|models|api|beta|admin|lexers|physics|combinatorics|signal|narwhals|graphql|semconv|quack|kubernetes|plotly|networkx|_inductor|pip|setuptools|mypy|mypyc)/
# Collecting all tests for the few that run last would take longer than these do.
ALONE = $(shell grep -rl --include='test_*.py' 'pytest[.]mark[.]alone' $(FAST))

# Tests start onbeat hundreds of times; without byte code at hand each start would compile all of it, for 0.6 s.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# A second installer in the same environment would break it.
.NOTPARALLEL:
.PHONY: help serve test test-all test-triton test-wheel test-vllm ablate check lint types imports format flags metrics size model clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

serve: .venv/.serve .venv/.native model ## Install what serving needs, get the embedded model and serve it (ARGS="...")
	$(BIN)/onbeat serve $(ARGS)

test: .venv/.dev .venv/.native model ## Run the fast tests
	@tested=5; note() { case $$1 in 0) [ $$tested != 5 ] || tested=0;; 5) ;; *) tested=$$1;; esac; }; \
	run() { $(BIN)/python -m pytest $(THOROUGH) $(PYTEST_ARGS) "$$@"; }; \
	twice() { run "$$@" && return; failed=$$?; [ $$failed = 1 ] || return $$failed; \
	  echo "What failed runs once more, one by one. What passes now is not steady: mend it, too."; run "$$@" --last-failed --numprocesses=0; }; \
	twice -m "not slow and not network and not alone" $(FAST) $(WORKED); note $$?; \
	twice -m "alone and not slow and not network" $(ALONE); note $$?; \
	exit $$tested

test-all: .venv/.dev .venv/.native model ## Run every test, the slow ones and those that need a package index too
	$(BIN)/python -m pytest $(SEARCHING) $(PYTEST_ARGS)

test-triton: .venv/.dev ## Install Triton (190 MB) and run the tests of the GPU engine's kernels on the CPU
	$(INSTALL) --no-deps triton==3.6.0
	$(BIN)/python -m pytest tests/cpu/engine/cuda $(PYTEST_ARGS)

test-wheel: .venv/.dev .venv/.native model ## Build a wheel, install it in a clean environment and serve with it
	$(BIN)/python -m pytest -m network tests/cpu/native/test_native_wheel.py -k clean -p no:cacheprovider $(PYTEST_ARGS)

test-vllm: ## Run the tests of the plug-in on vLLM's own schedulers (VLLM="0.32.0"; installs 4 GB into .vllm)
	@for version in $(VLLM); do echo "vLLM $$version"; scripts/vllm-env $$version && \
	PYTHONPATH=.vllm/$$version:src:. VLLM_NO_USAGE_STATS=1 .vllm/env-0.32.0/bin/python -m pytest -m vllm tests/vllm $(PYTEST_ARGS) || exit 1; done

ablate: .venv/.dev ## Show what each part of the slo policy is worth (simulated; traces under ONBEAT_SHARED)
	$(BIN)/python -m benchmarks.slo.study ablate $(ARGS)

check: lint types imports ## Run all static checks

lint: .venv/.dev ## Check format and lint rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/hadolint --ignore DL3008 deploy/Containerfile # versions of Debian's packages: those of the image
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.compose-spec deploy/compose/compose.yaml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yaml

types: .venv/.dev ## Check types
	$(BIN)/mypy

imports: .venv/.dev ## Check who imports whom
	$(BIN)/lint-imports

format: .venv/.dev ## Format the code and mend what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

flags: .venv/.serve ## Write docs/flags.md, and what docs say of fields, from what is declared
	$(BIN)/python scripts/flags > docs/flags.md
	$(BIN)/python scripts/fields > docs/compatibility.md
	$(BIN)/python scripts/api
	$(BIN)/python scripts/families

metrics: .venv/.serve ## Write the tables of docs/metrics.md from what the counts declare
	$(BIN)/python scripts/metrics

size: .venv/bin/python ## Hold packages to their budgets of lines (scripts/budgets.toml)
	@$(BIN)/python scripts/size

model: | .venv/.serve
	@$(BIN)/onbeat models fetch $(MODEL)

clean: ## Remove the environment and everything generated
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@scripts/make-venv "$(PYTHON)" .venv

.venv/.serve: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing onbeat into .venv"
	$(INSTALL) -e '.[plan]'
	@touch $@

# Installing builds the native engine, too; this builds it again where its sources have changed since. Without a
# compiler onbeat asks for torch.
.venv/.native: $(NATIVE) | .venv/.serve
	-@$(BIN)/python hatch_build.py
	@touch $@

# All that serving needs is in it, too. Byte code of 19,000 files would take two minutes of a core: what is hardly ever
# imported gets it when it is, and the rest on all cores here, where pip takes one. While pip fetches, another core
# builds the native engine, which pip then finds, or waits for.
.venv/.dev: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing onbeat, and what the tests and checks need, into .venv"
	$(BIN)/python hatch_build.py >/dev/null 2>&1 & \
	$(INSTALL) --no-compile -e '.[torch,plan,otel,dev]'
	@$(BIN)/python -m compileall -qq -j 0 -x '$(RARE)' .venv/lib src || true # as with pip, files of other Pythons are left out
	@touch .venv/.serve $@
