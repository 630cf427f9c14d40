# `make demo` and `make test` are all the set-up there is: both install first, and both are quick when nothing changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest
CONSTRAINTS := -c constraints.txt
TORCH = $(shell grep '^torch==' constraints.txt)
# what `make newest` gives pip for torch; a CPU build where pip's index has other ones:
# make newest NEWEST_TORCH='torch --index-url https://download.pytorch.org/whl/cpu'
NEWEST_TORCH ?= torch
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
DOCS_STAMP := $(VENV)/.installed-docs

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help install demo test slow gpu newest mutants times skips lint docs pictures clean

help:
	@echo "make demo     install, run the main job on embedded data, print the table, write the report"
	@echo "make test     install, run the tests (the slow ones left out)"
	@echo "make slow     install, run the slow tests"
	@echo "make gpu      install, run all tests that need a GPU; says what was skipped and why"
	@echo "make newest   the tests in an environment of its own with the newest versions that pyproject.toml allows"
	@echo "make mutants  install, plant bugs one at a time and count those that the tests notice"
	@echo "make times    install, run the tests, print their CPU time by folder and file"
	@echo "make skips    list every reason for which a test may be skipped: what to install or to set"
	@echo "make lint     install, ruff check, ruff format --check, mypy"
	@echo "make docs     install, build the documentation into site/"
	@echo "make pictures take the documentation's pictures again (needs chromium)"
	@echo "make install  create $(VENV) and install everfed with what the demo needs"
	@echo "make clean    remove $(VENV), site/ and the caches"
	@echo "PYTHON=...    which Python 3.11 to 3.13 to create $(VENV) with (now: $(PYTHON))"

install: $(RUN_STAMP)

demo: $(RUN_STAMP)
	$(BIN)/everfed demo

test: $(DEV_STAMP)
	$(PYTEST) -n 2 --dist worksteal

slow: $(DEV_STAMP)
	$(PYTEST) -n 2 --dist worksteal -m slow --timeout 7200

# slow ones, too; -rs names what is skipped and why
gpu: $(DEV_STAMP)
	$(PYTEST) -m gpu -rs --timeout 7200

# Made anew every time: what is there already pip would keep, as it must keep the torch that was installed first.
newest:
	rm -rf .venv-newest
	$(MAKE) VENV=.venv-newest CONSTRAINTS= TORCH='$(NEWEST_TORCH)' test

times: $(DEV_STAMP)
	rm -f .cpu-times
	-EVERFED_CPU_TIMES=$(CURDIR)/.cpu-times $(PYTEST) -n 2 --dist worksteal
	$(BIN)/python tests/support/cpu.py .cpu-times

skips: $(DEV_STAMP)
	@$(BIN)/python tests/test_skips.py

mutants: $(DEV_STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants/run.py

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(DOCS_STAMP)
	$(BIN)/mkdocs build --strict --site-dir site

pictures: $(DEV_STAMP)
	$(BIN)/python docs/pictures.py

clean:
	rm -rf $(VENV) .venv-newest .cpu-times site .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The check runs where an environment is about to be made, so that an existing one needs no system Python.
# torch comes first and alone: with it in place no later requirement makes pip fetch another, larger build.
# hatchling comes from the constraints too, hence no isolated build of everfed below.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
	  echo "everfed needs Python 3.11, 3.12 or 3.13, but '$(PYTHON) --version' says '$$($(PYTHON) --version 2>&1 | tail -n 1)': name another with make PYTHON=/path/to/python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-torch: constraints.txt | $(BIN)/python
	$(PIP) $(CONSTRAINTS) $(TORCH)
	$(PIP) $(CONSTRAINTS) hatchling
	@touch $@

$(RUN_STAMP): $(VENV)/.installed-torch pyproject.toml
	$(PIP) $(CONSTRAINTS) --no-build-isolation -e '.[ui,plots]'
	@touch $@

$(DEV_STAMP): $(VENV)/.installed-torch pyproject.toml
	$(PIP) $(CONSTRAINTS) --no-build-isolation -e '.[all,dev]'
	@touch $(RUN_STAMP) $@

$(DOCS_STAMP): $(VENV)/.installed-torch pyproject.toml
	$(PIP) $(CONSTRAINTS) --no-build-isolation -e '.[docs]'
	@touch $@
