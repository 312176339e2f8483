# make env     an environment in .venv with the package and what its tests need
# make demo    a small comparison of methods, from a fresh checkout
# make test    all tests; PYTEST_ARGS='-k fedper' for some of them
# make lint    style and types
# make bench   speed and memory; BENCH_PEERS=1 also of other simulators
# make clean   removes what these made
#
# VENV, PYTHON and WORKERS (test processes) can be set: make test VENV=.venv-3.13 PYTHON=python3.13 WORKERS=1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash

VENV ?= .venv
WORKERS ?= auto
PYTEST_ARGS ?=
BIN := $(VENV)/bin

# The first Python that runs and is new enough: a name on the path may be a shim without a Python behind it.
IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
ifndef PYTHON
PYTHON := $(shell for name in python3 python3.11 python3.12 python3.13 python3.14; do \
	"$$name" -c '$(IS_NEW_ENOUGH)' >/dev/null 2>&1 && { echo "$$name"; break; }; done)
endif

.PHONY: help env demo test lint bench clean
help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

# Each stamp is newer than what it was installed from, so that nothing is installed twice.
$(VENV)/.python:
	@"$(PYTHON)" -c '$(IS_NEW_ENOUGH)' >/dev/null 2>&1 || { \
		echo "fedjax_pers needs Python 3.11 or newer, and $(if $(PYTHON),'$(PYTHON)' is not,none was found on the path)." >&2; \
		echo "Install one (Debian: apt-get install python3 python3-venv), or name it: make env PYTHON=/path/to/python3.12" >&2; \
		exit 1; }
	@"$(PYTHON)" -m venv --clear $(VENV) || { \
		echo "'$(PYTHON)' cannot make environments; on Debian: apt-get install python3-venv" >&2; rm -rf $(VENV); exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	@touch $@

$(VENV)/.runtime: $(VENV)/.python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.development: $(VENV)/.python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test,lint]'
	@touch $(VENV)/.runtime $@

env: $(VENV)/.development

demo: $(VENV)/.runtime
	$(BIN)/python experiments/demo/run.py

test: $(VENV)/.development
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadgroup $(PYTEST_ARGS)

lint: $(VENV)/.development
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.runtime
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info .coverage .coverage.* .hypothesis
	find . -name '.*_cache' -prune -exec rm -rf {} +
	find . -name __pycache__ -prune -exec rm -rf {} +
