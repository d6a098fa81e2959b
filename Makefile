# `make serve` and `make test` do all their own set-up: a virtual environment, the pinned packages, and the run.
# Variables, each explained in README.md: PYTHON VENV DEVICE TORCH_INDEX MODEL TP HOST PORT SERVE_ARGS PYTEST_ARGS

PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV ?= .venv
DEVICE ?= $(if $(shell command -v nvidia-smi),gpu,cpu)
TORCH_INDEX ?=

MODEL ?= examples/tiny-model
TP ?= 2
HOST ?= 127.0.0.1
PORT ?= 8000
SERVE_ARGS ?= --device cpu
PYTEST_ARGS ?= -n 2 --no-loadscope-reorder

ifeq ($(DEVICE),gpu)
extras := [gpu]
dev_extras := [gpu,dev]
else ifeq ($(DEVICE),cpu)
dev_extras := [dev]
# Without a GPU kernels run in Triton's interpreter, and the signatures of FlashInfer's calls are tested: it imports if its
# CUDA libraries stay away.
kernels := flashinfer-python apache-tvm-ffi nvidia-ml-py tqdm requests triton
else
$(error DEVICE must be cpu or gpu, not '$(DEVICE)')
endif

python := $(VENV)/bin/python
pip_install := $(python) -m pip --disable-pip-version-check install --quiet --constraint constraints/$(DEVICE).txt
requirements := pyproject.toml $(wildcard constraints/*.txt)
installed := $(VENV)/.installed-$(DEVICE)
url := http://$(HOST):$(PORT)

.PHONY: help serve test venv lint types bench clean
.DELETE_ON_ERROR:

help:
	@echo 'make serve         install, start Ray and serve $(MODEL) on $(url)'
	@echo 'make test          install, then lint, check types and run the tests'
	@echo 'make lint, types   one part of `make test`'
	@echo 'make bench         time a scheduling step'
	@echo 'make venv          only install, development tools included, into $(VENV)'
	@echo 'make clean         remove $(VENV) and the caches'

serve: $(installed)
	@$(VENV)/bin/shoal serve --model $(MODEL) --tp $(TP) --host $(HOST) --port $(PORT) $(SERVE_ARGS)

test: lint types
	$(python) -m pytest $(PYTEST_ARGS)

venv: $(installed)-dev

lint: $(installed)-dev
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .

types: $(installed)-dev
	$(VENV)/bin/mypy

bench: $(installed)
	$(python) benchmarks/scheduler.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build *.egg-info

$(VENV)/pyvenv.cfg:
	@test -n '$(PYTHON)' || { echo 'Shoal needs Python 3.11 or newer and found none.' \
		'Install it, or say where it is: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'Shoal needs Python 3.11 or newer;' \
		'PYTHON=$(PYTHON) is not. Name another: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch-$(DEVICE): $(requirements) | $(VENV)/pyvenv.cfg
ifneq ($(TORCH_INDEX),)
	$(pip_install) --no-deps --index-url $(TORCH_INDEX) torch
endif
	@touch $@

$(installed): $(requirements) | $(VENV)/.torch-$(DEVICE)
	@echo 'Installing into $(VENV) (a few minutes the first time)'
	$(pip_install) --editable '.$(extras)'
	@touch $@

$(installed)-dev: $(requirements) | $(VENV)/.torch-$(DEVICE)
	@echo 'Installing into $(VENV) (a few minutes the first time)'
	$(pip_install) --editable '.$(dev_extras)'
	$(if $(kernels),$(pip_install) --no-deps $(kernels))
	@touch $(installed) $@
