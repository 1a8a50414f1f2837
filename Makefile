PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: run chat test test-all lint format bench install clean

run: $(STAMP)            ## install, then generate from the embedded model, plain against MTP
	$(BIN)/headlong run --compare "Write a short story about a shy dragon who learns to share."

chat: $(STAMP)           ## talk to the embedded model, drafted tokens tinted
	$(BIN)/headlong chat --show-drafts

test: $(STAMP)           ## the default tests: CPU, no network, minutes
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-all: $(STAMP)       ## the slow tier too (GPU tests skip without a GPU)
	$(BIN)/python -m pytest

lint: $(STAMP)           ## ruff (lint and format) and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)          ## plain against each K on the embedded model
	$(BIN)/headlong bench

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info src/*.egg-info .pytest_cache .ruff_cache .hypothesis
