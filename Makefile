# make demo    set up, then train a small language model on four local processes
# make test    set up, then lint and run the tests (minutes)
# make soak    the full numbers behind the tests, in parts of up to ten minutes; make soak PART=3 or PART=parity runs one
# make test-oldest  a few tests on the oldest PyTorch that Muster runs on, where its wheel for CPUs installs in two minutes
# make bench   compare a training step with other trainers (installs them)
# make lint    style and types
# make docs    build the pages of docs/ as a site, in build/docs
# make clean   remove what set-up and tests made; keeps runs/
#
# Variables: PYTHON=python3.12, JOBS=2 (test processes), PYTEST_ARGS='-k plan', PART=3 (of soak), ARGS=--fresh (of the demo), BENCH_ARGS=…

PYTHON ?= python3
JOBS ?= 2
PYTEST_ARGS ?=
ARGS ?=
PART ?=
BENCH_ARGS ?=

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.ONESHELL:
.SILENT:

# A stamp carries a digest of what decides about the installation: a matching one means that nothing is missing.
DIGEST := $(shell cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)
DEV := .venv/.muster-dev-$(DIGEST)
BENCH := .venv/.muster-bench-$(DIGEST)
# With byte code an interpreter starts in four fifths of the time; the tests themselves make none (see tests/conftest.py).
COMPILE := .venv/bin/python -m compileall -q -j 0 muster tests
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 .venv/bin/python -m pytest

# A wheel for CPUs alone, beside the one in .venv: those on PyPI bring gigabytes of CUDA.
OLDEST_TORCH := 2.11.0+cpu
OLDEST := build/torch-$(OLDEST_TORCH)
OLDEST_TESTS := tests/test_model.py tests/test_optim.py tests/test_varlen_attention.py tests/test_process_groups.py

.PHONY: demo test test-oldest soak bench lint docs clean

demo: $(DEV)
	exec .venv/bin/muster train --preset demo --run runs/demo $(ARGS)

test: $(DEV)
	.venv/bin/ruff check --quiet
	$(COMPILE)
	$(PYTEST) -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations 30 $(PYTEST_ARGS)

test-oldest: $(DEV)
	if [ ! -e $(OLDEST)/complete ]; then
	  rm -rf $(OLDEST)
	  # Without the libraries that a build for CUDA depends on, only one for CPUs can be imported.
	  if timeout 120 .venv/bin/pip install --quiet --retries 1 --timeout 20 --disable-pip-version-check --no-deps \
	      --target $(OLDEST) torch==$(OLDEST_TORCH) 2>/dev/null && PYTHONPATH=$(OLDEST) .venv/bin/python -c "import torch" 2>/dev/null; then
	    touch $(OLDEST)/complete
	  else
	    rm -rf $(OLDEST)
	    echo "torch $(OLDEST_TORCH) can't be installed here within two minutes: nothing was tested on it"
	    exit 0
	  fi
	fi
	PYTHONPATH=$(OLDEST) $(PYTEST) -n $(JOBS) $(OLDEST_TESTS) $(PYTEST_ARGS)

soak: $(DEV)
	$(COMPILE)
	failed=
	for part in $(or $(PART),$$(.venv/bin/python -c 'from tests.soak_parts import PARTS; print(*PARTS)')); do
	  echo "== soak part $$part"
	  $(PYTEST) -m soak --soak-part="$$part" -n $(JOBS) --timeout 3600 $(PYTEST_ARGS) || failed="$$failed $$part"
	done
	[ -z "$$failed" ] || { echo "soak parts that failed:$$failed" >&2; exit 1; }

bench: $(BENCH)
	.venv/bin/python -m benchmarks.train_step $(BENCH_ARGS)

lint: $(DEV)
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/pyright

docs: $(DEV)
	.venv/bin/python docs/tables.py
	.venv/bin/python docs/glossary.py
	.venv/bin/python docs/pictures.py
	.venv/bin/python -m sphinx --quiet --fail-on-warning --nitpicky -b html docs build/docs
	echo "build/docs/index.html"

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find muster tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

.venv/bin/pip:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
	  echo "Muster needs Python 3.11 or newer, and $(PYTHON) isn't: name one, as in 'make PYTHON=python3.12 test'." >&2
	  exit 1
	}
	$(PYTHON) -c 'import ensurepip' 2>/dev/null || {
	  echo "$(PYTHON) can't make virtual environments: install its venv package (on Debian: apt install python3-venv)." >&2
	  exit 1
	}
	echo "Making .venv with $$($(PYTHON) --version)"
	$(PYTHON) -m venv .venv

$(DEV) $(BENCH): | .venv/bin/pip
	extra=$$(cut -d- -f2 <<<"$(@F)")
	echo "Installing muster[$$extra] into .venv (PyTorch is large: minutes the first time)"
	.venv/bin/pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e ".[$$extra]" |
	  sed -un -e '/^ *Downloading.* [MG]B)/p' -e 's/^Installing collected.*/  Unpacking/p'
	rm -f .venv/.muster-$$extra-*
	touch $@
