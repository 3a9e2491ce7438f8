# `make run` and `make test` set up everything they need, from a fresh clone.

PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# Servers and commands are started hundreds of times: without compiled modules, imports would take minutes of that.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test test-all lint format setup clean

run: $(READY) ## tune the bundled engine on this machine, then print the report and export the decision
	$(BIN)/tuner run quickstart.yaml
	$(BIN)/tuner report quickstart --output studies/quickstart/report.md --html studies/quickstart/report.html
	$(BIN)/tuner export quickstart --format shell --output studies/quickstart/export
	@echo
	@echo "Report:    studies/quickstart/report.html (and report.md, the record to keep)"
	@echo "Artefact:  studies/quickstart/export/run.sh"

# Tests that measure time have the machine to themselves; the others run side by side.
SIDE_BY_SIDE := -n $(JOBS) --dist worksteal

test: $(READY) ## the tests that gate every change: minutes, no GPU
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not slow and not gpu and not timing"
	$(BIN)/python -m pytest -m "timing and not slow and not gpu"

test-all: $(READY) ## every test; what could not run here is listed at the end
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not timing"
	$(BIN)/python -m pytest -m timing

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; name one with PYTHON=..."; exit 2; }
	@echo "Installing into $(VENV), about a minute after downloads ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --upgrade pip
	$(BIN)/python -m pip install -qq --constraint constraints.txt --editable ".[dev]"
	@touch $(READY)

clean:
	rm -rf $(VENV) build *.egg-info
