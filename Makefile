# Every target sets up all that it needs in .venv: Python 3.10+, a C++17 compiler, make and git are
# enough. Versions are pinned in requirements-dev.txt.
#
#   make demo [ARGS='--prompt "..."']   make bench [ARGS='--preset smollm2-135m']
#   XPRESS_CUDA=1 make build            with the CUDA half; nvcc comes from PyPI where there is none

PYTHON3 ?= python3
VENV := .venv
PYTHON := $(VENV)/bin/python
ARGS ?=
# Processes that share the tests; ARGS='-n 0' runs them in one.
TEST_JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 1); echo $$(( n < 4 ? n : 4 )))
PYTEST := $(PYTHON) -m pytest
RESULTS := benchmarks/results

SHELL := bash

# While working on the project a warning of the CUDA compiler is an error.
export XPRESS_WERROR := 1

.PHONY: help demo test test-long test-install fuzz bench results lint format build cuda-archs \
        environment clean

help:
	@sed -n 's/^#: //p' Makefile

#: make demo          a real model decodes three ways, side by side
demo: build
	@$(VENV)/bin/xpress demo $(ARGS)

# Tests run the kernels in the emulator where there is no GPU.
test test-long fuzz: export XPRESS_EMULATOR := 1

#: make test          every test
test: build
	@$(PYTEST) -n $(TEST_JOBS) $(ARGS)

#: make test-long     the wide sweeps, on each instruction set; result in benchmarks/results
test-long: build
	@$(PYTHON) tools/long_tests.py $(ARGS)

#: make fuzz          the property tests, with many fresh examples
fuzz: build
	@XPRESS_TEST_PROFILE=fuzz $(PYTEST) -m hypothesis $(ARGS)

#: make bench         microseconds per block over the number of passes, beside torch
bench: build
	@$(PYTHON) benchmarks/latency_vs_K.py $(ARGS)

#: make results       measure again what the documents show; GSM8K=FILE for the acceptance
results: build
	$(PYTHON) benchmarks/latency_vs_K.py --json $(RESULTS)/latency_qwen3-8b.json \
	  --png $(RESULTS)/latency_qwen3-8b.png
	$(PYTHON) benchmarks/latency_vs_K.py --bars --json $(RESULTS)/latency_bars.json
	$(PYTHON) benchmarks/acceptance.py $(if $(GSM8K),--gsm8k $(GSM8K)) \
	  --json $(RESULTS)/acceptance_smollm2.json
	$(PYTHON) benchmarks/demo_table.py
	$(PYTHON) benchmarks/render_tables.py

#: make lint          ruff, mypy, clang-format
lint: environment
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/ruff format --quiet --check . || { echo "run 'make format'"; exit 1; }
	@$(VENV)/bin/mypy
	@git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' \
	  | xargs $(VENV)/bin/clang-format --dry-run -Werror

#: make format        format all sources
format: environment
	@$(VENV)/bin/ruff check --quiet --fix .
	@$(VENV)/bin/ruff format --quiet .
	@git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' | xargs $(VENV)/bin/clang-format -i

#: make test-install  every way to install the package, in environments of their own
test-install: environment
	@$(PYTHON) tools/test_install.py $(ARGS)

#: make build         the operator library, in place
build: $(VENV)/.installed
	@mkdir -p build && $(PYTHON) setup.py --quiet build_ext --inplace > build/build.log 2>&1 \
	  || { cat build/build.log; exit 1; }

#: make cuda-archs    the CUDA sources, compiled for every architecture of a release
cuda-archs: environment
	@$(PYTHON) tools/cuda_archs.py

# The package itself, editable: gives the command `xpress`.
$(VENV)/.installed: setup.py pyproject.toml tools/build_backend/xpress_build.py | environment
	@echo "building the operator library"
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps \
	  --editable .
	@touch $@

environment:
	@$(PYTHON3) tools/environment.py --venv $(VENV)

#: make clean         remove what was built; .venv stays
clean:
	rm -rf build dist xpress_ext.egg-info xpress_ext/libxpress_ops.so $(VENV)/.installed
