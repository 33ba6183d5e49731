# `make demo` and `make test` are enough to start: each sets up .venv first, unless it is up to date.
#
#   PYTHON=python3.12        the interpreter to build .venv from (3.11 or newer; by default the first one found)
#   TORCH_INDEX=URL          index of torch's CPU build, used if the configured package index does not have it
#   GPU=1                    set up for NVIDIA GPUs: torch and vLLM with CUDA, in the newest versions that pyproject.toml allows;
#                            later commands keep them, and `make setup GPU=` goes back to the CPU builds
#   PYTEST_ARGS="-k queue"   additional arguments for pytest
#   TEST_PROCESSES=4         number of processes that run the test suite (by default 2)

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
PYTEST_ARGS ?=
TEST_PROCESSES ?= 2
STAMP := $(VENV)/.set-up-for
# The stamp has the kind of .venv, gpu or cpu, and the checksum of the lock file and pyproject.toml. If another checksum
# is wanted, packages are updated; the two kinds cannot be installed over each other, so another kind is a new .venv.
HAS := $(if $(filter gpu,$(shell cat $(STAMP) 2>/dev/null)),gpu,cpu)
GPU ?= $(filter gpu,$(HAS))
KIND := $(if $(filter-out 0,$(GPU)),gpu,cpu)
WANTED := $(KIND) $(shell cat $(LOCK) pyproject.toml | cksum | tr -d ' ')

.PHONY: help setup bench-setup bench-check demo test slow lint format lock docs clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /|/' | awk -F '|' '{ printf "  make %-11s %s\n", $$1, $$2 }'

setup: ## create or update .venv (about 3 minutes the first time; GPU=1 on a machine with NVIDIA GPUs)
	@if [ "$$(cat $(STAMP) 2>/dev/null)" = "$(WANTED)" ] && [ -x $(VENV)/bin/asyncrl ]; then exit 0; fi
	if [ $(HAS) != $(KIND) ] || ! $(PIP) --version >/dev/null 2>&1; then
	  python=$(PYTHON)
	  for candidate in $${python:-python3.11 python3.12 python3.13 python3}; do
	    if $$candidate -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
	      found=$$candidate; break
	    fi
	  done
	  if [ -z "$${found:-}" ]; then
	    echo "setup: found no Python 3.11 or newer with the venv module; install one (Debian: python3-venv), or select one: make setup PYTHON=..." >&2
	    exit 1
	  fi
	  echo "setup: creating $(VENV) for $(KIND) with $$($$found --version)"
	  $$found -m venv --clear $(VENV)
	fi
	echo $(KIND) > $(STAMP)
	if [ $(KIND) = gpu ]; then
	  echo "setup: installing the GPU builds of all packages"
	  $(PIP) install --quiet -e '.[gpu,liger,dev]'
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

bench-setup: setup ## create .bench/, an environment for each peer of python -m benchmarks.compare (about 8 minutes)
	@for list in benchmarks/compare/requirements-*.txt; do
	  peer=$${list##*requirements-}; venv=.bench/$${peer%.txt}; wanted=$$(cat $(LOCK) $$list | cksum | tr -d ' ')
	  if [ "$$(cat $$venv/.set-up-for 2>/dev/null)" = "$$wanted" ]; then continue; fi
	  echo "bench-setup: installing $$list into $$venv"
	  $(PY) -m venv --clear $$venv
	  install="$$venv/bin/python -m pip --disable-pip-version-check install --quiet --no-deps"
	  $$install 'torch==$(TORCH)+cpu' 2>/dev/null || $$install --index-url $(TORCH_INDEX) 'torch==$(TORCH)+cpu'
	  $$install -r $(LOCK)
	  # A peer that cannot be installed does not stop the others: the comparison lists it with its error.
	  if $$install -r $$list 2> >(tee $$venv/install.err >&2); then echo "$$wanted" > $$venv/.set-up-for; fi
	done

bench-check: setup ## compare ratios of speed with benchmarks/baseline.json (about 10 minutes on two idle cores)
	@$(PY) -m benchmarks.check

demo: setup ## train the included model: asyncrl launch fully_async
	@$(VENV)/bin/asyncrl launch fully_async

test: setup ## run the test suite
	@$(PY) -m pytest -n $(TEST_PROCESSES) --dist loadscope --no-loadscope-reorder $(PYTEST_ARGS)

slow: setup ## run the tests that take minutes each
	@$(PY) -m pytest -m slow -n $(TEST_PROCESSES) --dist loadscope $(PYTEST_ARGS)

lint: setup ## run ruff, mypy and the import contracts; check that docs/architecture.md is current
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

# The lock omits torch, which is installed first from its own index, and the packages that pyproject.toml excludes by an override.
lock: setup ## resolve the requirements of pyproject.toml into requirements/cpu.txt
	@{
	  echo '# Exact versions for CPU, Python 3.11 and later. Generated by `make lock`; do not edit.'
	  echo '# Install torch $(TORCH)+cpu first, then this file with `pip install --no-deps -r`.'
	  $(VENV)/bin/uv pip compile pyproject.toml --extra cpu --extra dev --universal --python-version 3.11 \
	    --no-header --no-annotate --quiet | grep -vE "^torch==|sys_platform == 'never'"
	} > $(LOCK).new
	mv $(LOCK).new $(LOCK)

clean: ## remove caches and build outputs (not .venv, not runs/)
	@rm -rf build *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
