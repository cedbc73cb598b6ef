# Every target sets up what it needs in .venv; nothing has to be installed but Python, make and a
# C compiler. Variables, as in `make demo PYTHON=python3.12`:
#
#   PYTHON         the interpreter that .venv is made from
#   TORCH          another torch than the pinned one, as in `make test TORCH=2.15`, in an environment of its
#                  own, .venv-torch-2.15
#   TORCH_INDEX    where to look for torch besides PyPI, which offers only the build with 4 GB of GPU
#                  libraries; by default the index of CPU builds where there is no NVIDIA GPU.
#                  `make test TORCH_INDEX=` on a login node prepares .venv for the GPU nodes.
#   PIP_FLAGS      further arguments for pip, such as --index-url of a site's mirror
#   PYTEST_FLAGS   further arguments for pytest, such as "-k plan -x"
#   FUZZ_FLAGS     further arguments of the fuzzer, such as "--seed 3" or "--layout pipe=2"
#   JOBS           test processes at once, two more than cores: many a test waits

PYTHON ?= python3
TORCH ?=
TORCH_INDEX ?= $(if $(wildcard /dev/nvidiactl),,https://download.pytorch.org/whl/cpu)
PIP_FLAGS ?=
PYTEST_FLAGS ?=
FUZZ_FLAGS ?=
JOBS ?= 4

VENV := .venv$(TORCH:%=-torch-%)
BIN := $(VENV)/bin
CONSTRAINTS := $(VENV)/constraints.txt
INSTALL_FLAGS := install --quiet --disable-pip-version-check -c $(CONSTRAINTS) $(PIP_FLAGS)
NATIVE := native/CMakeLists.txt $(wildcard native/*.[ch])
# Another torch is asked for in spite of what a site's pip.conf holds it to.
INSTALL := $(if $(TORCH),PIP_CONSTRAINT=$(CONSTRAINTS) )$(BIN)/python -m pip $(INSTALL_FLAGS)

.DEFAULT_GOAL := help
.PHONY: help demo test test-long smoke fuzz soak check format docs lock native sanitize torch-distributed gpu-kit clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 24

demo: $(VENV)/.run  ## train ResNet-20 on handwritten digits in two processes
	$(BIN)/fivefold train digits -n 2

test: $(VENV)/.develop  ## run the default test suite
	@# Files in the order of their names: the longest have few tests, and sorting by number puts them last.
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_FLAGS)

test-long: override PYTEST_FLAGS += -m "long and not slow"
test-long: test  ## run the rest: long tests, all cases of sampled ones, the code in the documentation

smoke: $(VENV)/.run  ## a minute: a small model under each kind of layout, against one process
	for layout in data=2 width=2 pipe=2; do \
	  OMP_NUM_THREADS=1 $(BIN)/fivefold verify resnet20 --layout $$layout --steps 2 || exit 1; \
	done

fuzz: $(VENV)/.develop  ## random nets under random layouts against one process: 2,000 cases, an hour or so
	PYTHONPATH=tests $(BIN)/python -m fuzz --cases 2000 $(FUZZ_FLAGS)

soak: $(VENV)/.develop  ## the slow tests: all cases of costly ones, nodes lost at random: an hour and more
	$(INSTALL) -e '.[wandb,mlflow]'
	$(BIN)/python -m pytest -m "not slow" tests/processes/test_logging.py
	$(BIN)/python -m pytest -m slow tests $(PYTEST_FLAGS)

check: $(VENV)/.develop  ## format, lint, types, layers, spelling and the documentation build
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/codespell
	bash -n .ci/run
	$(MAKE) --no-print-directory docs

format: $(VENV)/.develop  ## rewrite the sources as `make check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.develop  ## build the documentation into docs/_build/html
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

native:  ## test the C core alone, with threads as ranks
	cmake -S native -B build/native -DFIVEFOLD_DRIVER=ON >/dev/null
	cmake --build build/native
	for ranks in 2 3 5; do build/native/driver $$ranks 300 || exit 1; done
	for nodes in "2 100 1 2" "5 100 1 2" "5 100 2 3" "4 100 3 2 3" "16 20 1 16" "5 100 1 3 1 0 mpi"; do build/native/driver $$nodes || exit 1; done

sanitize:  ## the same under the thread and the address sanitizer of the C compiler
	for kind in thread address; do \
	  cmake -S native -B build/$$kind -DFIVEFOLD_DRIVER=ON -DFIVEFOLD_SANITIZE=$$kind >/dev/null && \
	  cmake --build build/$$kind && build/$$kind/driver 2 100 && build/$$kind/driver 4 100 && \
	  build/$$kind/driver 4 50 1 2 && build/$$kind/driver 5 50 2 3 && build/$$kind/driver 4 50 3 2 3 && build/$$kind/driver 64 3 1 64 && \
	  build/$$kind/driver 5 50 1 3 1 0 mpi || exit 1; \
	done

torch-distributed: $(VENV)/.develop  ## PyTorch's own tests of torch.distributed, over our backend
	$(BIN)/python tests/torch_distributed/standing_in.py fivefold
	$(BIN)/python tests/torch_distributed/standing_in.py nodes
	WORLD_SIZE=4 $(BIN)/python tests/torch_distributed/standing_in.py nodes

gpu-kit: $(VENV)/.develop  ## pack what a GPU machine without a network lacks for benchmarks/share
	$(BIN)/python benchmarks/share/kit.py build/gpu-kit.tar.gz $(PIP_FLAGS)

clean:  ## remove what make has made: the environment, caches and built files
	rm -rf .venv .venv-torch-* build dist docs/_build .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: Fivefold needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not found);" \
	       "name another one: make PYTHON=python3.12 ..." >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "error: '$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }

# Everything as locked but what torch's GPU build needs, which differs with torch; with TORCH, that torch, and
# the torchvision and setuptools that fit it. Without hashes: pip wants none beside a checkout, nor for builds of other indexes.
$(VENV)/constraints.txt: constraints.txt requirements.lock $(VENV)/bin/python
	@{ cat constraints.txt; sed -nE 's/^([^ #]+==.*[^ ]) \\$$/\1/p' requirements.lock; } | \
	  grep -vE '^(cuda-|nvidia-[^m]|triton)$(TORCH:%=|^(torch|setuptools))' > $@
	@$(TORCH:%=echo 'torch==%.*' >> $@)

lock: $(VENV)/bin/python  ## pin anew all that constraints.txt leads to, with hashes, in requirements.lock
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --all-extras --generate-hashes \
	  --custom-compile-command 'make lock' -c constraints.txt -o requirements.lock pyproject.toml

# Stamps: an environment is renewed when the list of what goes into it has changed.
# Torch comes alone, so that only one look-up has to wait for an index that is out of reach.
$(VENV)/.torch: $(VENV)/bin/python $(CONSTRAINTS)
	@echo "installing torch into $(VENV) (under a minute on a fast network)"
	$(INSTALL) --no-deps --retries 1 --timeout 10 $(TORCH_INDEX:%=--extra-index-url %) torch
	@touch $@

$(VENV)/.run: $(VENV)/.torch pyproject.toml $(CONSTRAINTS) $(NATIVE)
	@echo "installing Fivefold into $(VENV)"
	$(INSTALL) -e '.[recipes]'
	@touch $@

$(VENV)/.develop: $(VENV)/.torch pyproject.toml $(CONSTRAINTS) $(NATIVE)
	@echo "installing Fivefold and its tools into $(VENV)"
	$(INSTALL) -e '.[recipes,images,mpi,vision,diffusers,fsspec,gpu,serve,exports,docs,dev]'
	@# MPICH, which the tests start as well, apart: its programs are called like those of Open MPI.
	$(BIN)/python -m venv --without-pip $(VENV)/mpich
	$(BIN)/python -m pip --python $(VENV)/mpich/bin/python $(INSTALL_FLAGS) mpich
	@touch $@ $(VENV)/.run
