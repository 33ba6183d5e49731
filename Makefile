# `make demo` and `make test` are all it takes: each sets up .venv first, which is skipped when it is current.
#
#   PYTHON=python3.12        the interpreter to build .venv from (3.11 or newer; by default the first one found)
#   TORCH_INDEX=URL          where torch's CPU build comes from if the configured package index has none
#   GPU=1                    set up for NVIDIA GPUs: torch and vLLM with CUDA, newest versions that pyproject.toml allows
#   PYTEST_ARGS="-k queue"   further arguments for pytest
#   TEST_PROCESSES=4         processes that share the test suite (by default 2)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.ONESHELL:

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
TORCH := 2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
LOCK := requirements/cpu.txt
GPU ?=
PYTEST_ARGS ?=
TEST_PROCESSES ?= 2
STAMP := $(VENV)/.set-up-for
# What the environment was made from; another lock, project file or kind of machine makes it stale.
WANTED := $(shell { echo "gpu=$(GPU)"; cat $(LOCK) pyproject.toml; } | cksum | tr -d ' ')

.PHONY: help setup demo test slow lint format lock docs clean

help: ## this list
	@grep -hE '^[a-z]+:.*## ' Makefile | sed -E 's/:.*## /|/' | awk -F '|' '{ printf "  make %-8s %s\n", $$1, $$2 }'

setup: ## make or bring up to date .venv (about 3 minutes once; GPU=1 on a machine with NVIDIA GPUs)
	@if [ "$$(cat $(STAMP) 2>/dev/null)" = "$(WANTED)" ] && [ -x $(VENV)/bin/asyncrl ]; then exit 0; fi
	rm -f $(STAMP)
	if ! $(PIP) --version >/dev/null 2>&1; then
	  python=$(PYTHON)
	  for candidate in $${python:-python3.11 python3.12 python3.13 python3}; do
	    if $$candidate -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
	      found=$$candidate; break
	    fi
	  done
	  if [ -z "$${found:-}" ]; then
	    echo "setup: no Python 3.11 or newer with its venv module here; install one (Debian: python3-venv), or name it: make setup PYTHON=..." >&2
	    exit 1
	  fi
	  echo "setup: making $(VENV) with $$($$found --version)"
	  $$found -m venv --clear $(VENV)
	fi
	if [ -n "$(GPU)" ]; then
	  echo "setup: installing the GPU build of everything"
	  $(PIP) install --quiet -e '.[gpu,dev]'
	else
	  echo "setup: installing torch $(TORCH) for CPU"
	  $(PIP) install --quiet --no-deps 'torch==$(TORCH)+cpu' 2>/dev/null \
	    || $(PIP) install --quiet --no-deps --index-url $(TORCH_INDEX) 'torch==$(TORCH)+cpu'
	  echo "setup: installing the locked versions of $(LOCK) (about 2 minutes)"
	  $(PIP) install --quiet --no-deps -r $(LOCK)
	  echo "setup: installing this project"
	  $(PIP) install --quiet --no-deps --no-build-isolation -e .
	fi
	echo "$(WANTED)" > $(STAMP)
	echo "setup: done"

demo: setup ## train the shipped model: asyncrl launch fully_async
	@$(VENV)/bin/asyncrl launch fully_async

test: setup ## the test suite
	@$(PY) -m pytest -n $(TEST_PROCESSES) --dist loadscope --no-loadscope-reorder $(PYTEST_ARGS)

slow: setup ## the tests that take minutes
	@$(PY) -m pytest -m slow $(PYTEST_ARGS)

lint: setup ## ruff, mypy, import contracts, freshness of docs/architecture.md
	@$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(PY) -m pytest -q --disable-warnings tests/test_architecture.py

format: setup ## apply ruff's fixes and format
	@$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: setup ## regenerate the generated pages of docs/
	@$(PY) -m asyncrl.config.docs docs/config.md
	$(PY) -m asyncrl.observe.metrics.registry > docs/metrics.md
	$(PY) -c 'from asyncrl.profiling.catalog import markdown; print(markdown(), end="")' > docs/events.md
	$(PY) -m asyncrl.observe.metrics.grafana > docs/grafana-dashboard.json
	WRITE_DOCS=1 $(PY) -m pytest -q --disable-warnings tests/test_architecture.py

# torch itself is left out (it is installed first, from its own index), and so is what pyproject.toml overrides away.
lock: setup ## resolve pyproject.toml anew into requirements/cpu.txt
	@{
	  echo '# Exact versions for CPU, Python 3.11 and later. Made by `make lock`; not by hand.'
	  echo '# Install torch $(TORCH)+cpu first, then this with `pip install --no-deps -r`.'
	  $(VENV)/bin/uv pip compile pyproject.toml --extra cpu --extra dev --universal --python-version 3.11 \
	    --no-header --no-annotate --quiet | grep -vE "^torch==|sys_platform == 'never'"
	} > $(LOCK).new
	mv $(LOCK).new $(LOCK)

clean: ## remove caches and build outputs (not .venv, not runs/)
	@rm -rf build *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
