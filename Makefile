# `make demo` and `make test` need Python 3.11+ and a package index, nothing else: without an active
# environment they make .venv and install into it. pip's own settings (index, wheels on disk) hold.

CONSTRAINTS ?= constraints.txt
PYTEST_ARGS ?= -n auto --maxprocesses=8 --dist=worksteal
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)
VENV := $(or $(VIRTUAL_ENV),$(CURDIR)/.venv)
PY := "$(VENV)/bin/python"

# An install is repeated when what it depends on changed, or when the environment served another clone.
KEY := $(shell { pwd; cat pyproject.toml constraints.txt "$(CONSTRAINTS)"; } | cksum | cut -d ' ' -f 1)

.PHONY: help demo test lint lint-rules lint-format lint-types wheel venv env dev-env clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   decode text through both KV pools, on the CPU"
	@echo "make test   run the test suite"
	@echo "make lint   ruff and mypy --strict"
	@echo "make wheel  build the source archive and the wheel into dist/"
	@echo "make clean  remove build outputs and caches, keep the environment"

demo: env
	$(PY) examples/compare_pools.py

test: dev-env
	$(PY) -m pytest -q $(PYTEST_ARGS)

# Three targets, so that `make -k lint` reports all of them.
lint: lint-rules lint-format lint-types

lint-rules: dev-env
	$(PY) -m ruff check .

lint-format: dev-env
	$(PY) -m ruff format --check .

lint-types: dev-env
	$(PY) -m mypy --strict

wheel: dev-env
	$(PY) -m build --outdir dist .

# A virtual environment made by another tool, or by an interrupted run, may lack pip.
venv:
	@test -x $(PY) || { \
		test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found: install one, or give PYTHON=path" >&2; exit 1; }; \
		echo "making $(VENV)"; "$(PYTHON)" -m venv "$(VENV)"; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip --upgrade

env: venv
	@test -f "$(VENV)/.dsv4-dev-$(KEY)" || test -f "$(VENV)/.dsv4-run-$(KEY)" || { \
		echo "installing dsv4 into $(VENV)" \
		&& $(PY) -m pip install -q -c "$(CONSTRAINTS)" -e . \
		&& rm -f "$(VENV)"/.dsv4-* && touch "$(VENV)/.dsv4-run-$(KEY)"; }

dev-env: venv
	@test -f "$(VENV)/.dsv4-dev-$(KEY)" || { \
		echo "installing dsv4 and its test tools into $(VENV)" \
		&& $(PY) -m pip install -q -c "$(CONSTRAINTS)" -e ".[dev]" \
		&& rm -f "$(VENV)"/.dsv4-* && touch "$(VENV)/.dsv4-dev-$(KEY)"; }

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
