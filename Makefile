# Two commands: `make demo` sets up and runs the main job, `make test` sets up and passes every check.
# Both need Python 3.11 or newer with pip and venv. PYTHON and VENV may be set: make test PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint types imports unit ranks browser notebooks check clean

demo: $(VENV)/.users
	$(BIN)/fsdpviz demo --out demo

test: $(VENV)/.developers
	$(MAKE) --no-print-directory check VENV=$(VENV)

check: lint types imports unit ranks browser notebooks

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/pyright --pythonpath $(BIN)/python

imports:
	$(BIN)/lint-imports

unit:
	$(BIN)/python -m pytest tests/unit

ranks:
	$(BIN)/python -m pytest tests/ranks

browser:
	$(BIN)/python -m pytest tests/browser tests/gpu

notebooks:
	$(BIN)/python -m pytest --nbmake --nbmake-timeout=240 notebooks

$(VENV)/.users: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable .
	touch $@

$(VENV)/.developers: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable '.[dev]'
	touch $@ $(VENV)/.users

clean:
	rm -rf $(VENV) demo runs notebooks/runs
