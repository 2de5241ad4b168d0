# A newcomer needs python3 (3.10 or later) and make; everything else goes into .venv.
#
# On Linux pip's own index gives torch with several gigabytes of CUDA. For the CPU build alone:
#   make demo PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
BIN := .venv/bin
# Not compiled at once, which takes a minute: Python compiles what it imports, and keeps that.
INSTALL := $(BIN)/python -m pip install --no-compile -c constraints-cpu.txt
unexport PYTHONDONTWRITEBYTECODE
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint style types imports tests clean

help:  ## say what the targets do
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

demo: .venv/installed  ## convert the embedded checkpoint and print before and after, in under two minutes
	$(BIN)/surgery demo

test: style  ## lint, then the whole test suite, types checked beside it
	@$(MAKE) --no-print-directory -j 2 types tests

test-all: style  ## the same, with the tests marked slow, which take minutes each
	@$(MAKE) --no-print-directory -j 2 types tests PYTEST_ARGS='-m "" $(PYTEST_ARGS)'

lint: style types imports  ## ruff (lint, format), mypy, and who may import whom

style: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed-test
	$(BIN)/mypy

imports: .venv/installed-test
	$(BIN)/python tests/helpers/check_imports.py

tests: .venv/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

clean:  ## remove .venv, caches and the demo's folders
	rm -rf .venv build dist surgery-demo surgery-demo-[0-9]* .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps: made once, and again when what is to be installed changes. The pip that comes with Python 3.11 takes twice as long.
.venv/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "surgery needs Python 3.10 or later; make PYTHON=python3.12 ..")'
	$(PYTHON) -m venv .venv
	$(INSTALL) -q pip==26.3
	@touch $@

.venv/installed: .venv/python pyproject.toml constraints-cpu.txt
	$(INSTALL) -e .
	@touch $@

.venv/installed-test: .venv/python pyproject.toml constraints-cpu.txt
	$(INSTALL) -e '.[test]'
	@touch .venv/installed $@
