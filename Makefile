# make demo      set up, then see fsample work: on the GPU when there is one, on the CPU otherwise
# make test      set up, then lint, types and the whole CPU test suite
# make newest-triton  set up, then compile and interpret the kernels with the newest Triton of the package index
# make gpu-test  set up, then the tests that need a GPU
# make format    lay the code out as `make test` wants it
# make tables    README's tables and outputs, from the records under profiles/
# make image     README's picture of the terminal, from the same records
#
# All are safe to repeat and touch nothing outside this folder. PYTHON=python3.12 chooses the interpreter to
# start from; NO_INSTALL=1 takes it as it is, for a machine without network that has the packages already.

SHELL := /bin/sh
VENV ?= .venv
export VENV
ARGS ?=

ifdef NO_INSTALL
PYTHON ?= python3
python := PYTHONPATH=.:kernels $(PYTHON)
ready_for =
else
export PYTHON
python := $(VENV)/bin/python
ready_for = $(VENV)/.ready-$(1)
endif
fsample := $(python) -m fsample_cli

GPU := $(shell nvidia-smi -L 2>/dev/null | grep '^GPU' | head -n 1)
ifeq ($(GPU),)
BENCH := --preset cpu-small --batch 1,16,64,256 --sampler fused,gemm,multinomial-eager \
	--baseline multinomial-eager --iterations 10 --warmup 2
else
BENCH := --batch 1..256
endif

.PHONY: help demo test newest-triton gpu-test lint wheel-test format tables image clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(call ready_for,demo)
	$(fsample) verify
	$(fsample) bench $(BENCH)
	$(fsample) io-model

test: $(call ready_for,dev) lint
	OMP_NUM_THREADS=1 $(python) -m pytest -n 2 --dist loadfile --durations=15 $(ARGS)

newest-triton: $(call ready_for,dev)
	rm -rf build/newest-triton
	$(python) -m pip --disable-pip-version-check install --quiet --no-deps --target build/newest-triton triton
	PYTHONPATH=build/newest-triton OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist load --durations=5 \
		$(addprefix tests/kernels/test_, $(addsuffix .py, compile compile_hopper contraction device hopper_deal \
		lm_head_sample logits_sample reduce_candidates sort_sparse warm_up))

gpu-test: $(call ready_for,dev)
	@test -n "$(GPU)" || { echo "gpu-test: nvidia-smi shows no NVIDIA GPU here; run it on a machine with one" >&2; exit 1; }
	$(python) -m pytest -m "gpu or multi_gpu" $(ARGS)

lint: $(call ready_for,dev)
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy

format: $(call ready_for,dev)
	$(python) -m ruff check --fix .
	$(python) -m ruff format .

# A wheel, installed as a user would into an environment of its own, used from another folder.
wheel-test: $(call ready_for,dev)
	rm -rf build/wheel-test
	$(python) -m build --wheel --outdir build/wheel-test/dist . >/dev/null
	.ci/try-wheel $(python) build/wheel-test

tables: $(call ready_for,demo)
	$(python) profiles/tables.py

image: $(call ready_for,demo)
	$(python) profiles/terminal_image.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/.ready-demo: pyproject.toml constraints-cpu.txt .ci/setup
	@.ci/setup
	@touch $@

$(VENV)/.ready-dev: pyproject.toml constraints-cpu.txt .ci/setup
	@.ci/setup dev
	@touch $@
