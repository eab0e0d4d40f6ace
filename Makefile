# Every target sets up .venv by itself; nothing else has to be installed but python3 (3.11 or newer) with venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
# The packages are pinned, so pip has no need to look for newer releases of itself or of them.
PIP_INSTALL := $(PIP) install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check bench coverage format clean

help:
	@echo "make demo      train on two ranks, kill them, resume bit for bit (about 3 minutes)"
	@echo "make test      all tests"
	@echo "make check     format, lint, types, layers, spelling"
	@echo "make bench     measure against other engines; needs about 8 GB of disk and memory"
	@echo "make coverage  the tests again, with branch coverage"
	@echo "make clean     remove .venv, caches and what demo and bench wrote"

demo: $(VENV)/.demo
	@$(BIN)/python examples/demo.py

test: $(VENV)/.dev
	@$(BIN)/python -m pytest

check: $(VENV)/.dev
	@$(BIN)/ruff format --check --quiet . >/dev/null || { echo "some files are not formatted: make format"; exit 1; }
	@$(BIN)/ruff check --quiet --output-format concise .
	@$(BIN)/mypy --no-error-summary
	@report=$$($(BIN)/lint-imports --no-logo) || { echo "$$report"; exit 1; }
	@$(BIN)/codespell
	@echo "format, lint, types, layers, spelling: good"

format: $(VENV)/.dev
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(VENV)/.bench
	@command -v fio >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -qq -y fio >/dev/null; } \
	  || echo "fio is missing: the lines that need it are left out"
	@$(BIN)/python -m benchmarks

coverage: $(VENV)/.dev
	@$(BIN)/coverage erase
	@$(BIN)/coverage run -m pytest
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report

clean:
	@rm -rf $(VENV) build dist demo-out benchmarks/scratch .coverage* .hypothesis
	@rm -rf .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# A stamp per set of extras: installed again only when the dependencies change.
$(VENV)/.demo: EXTRAS := torch,demo
$(VENV)/.dev: EXTRAS := torch,demo,test,dev
$(VENV)/.bench: EXTRAS := torch,bench
$(VENV)/.demo $(VENV)/.dev $(VENV)/.bench: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing relight[$(EXTRAS)] into $(VENV) (pinned by constraints.txt; torch is large, this can take minutes)"
	@$(PIP_INSTALL) -e ".[$(EXTRAS)]"
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "relight needs Python 3.11 or newer: make PYTHON=python3.11 ..."; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { echo "python3-venv is missing: apt-get install python3-venv"; rm -rf $(VENV); exit 1; }
