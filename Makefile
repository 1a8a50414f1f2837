PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Workers take what others have left, and each computes with one thread (tests/conftest.py). SERIAL is what another
# test beside it would disturb.
PARALLEL := -n auto --dist worksteal
DEFAULT  := not slow and not gpu and not clients

# What depends on who computes; how weights are packed and what can be damaged does not.
ON_REFERENCE_OPS = tests/state $(addprefix tests/models/test_, \
	against_transformers.py deepseek_v4.py mtp_head.py llama.py tiled_heads.py loading.py)

# People's own clients do not agree on one openai package, and none of them needs ours: environments apart from this one.
CLIENTS  := .clients
PACKAGES := $(patsubst tests/clients/requirements/%.txt,$(CLIENTS)/%/.installed,$(wildcard tests/clients/requirements/*.txt))

.PHONY: run chat serve browser test test-all test-paths clients sanitize cross wheels fuzz docs artifacts soak lint format bench install help clean

run: $(STAMP)            ## install, then generate from the embedded model, MTP against plain
	$(BIN)/headlong run --compare --seed 2 "Write a short story about a shy dragon who learns to share."

chat: $(STAMP)           ## talk to the embedded model, drafted tokens tinted
	$(BIN)/headlong chat --show-drafts

serve: $(STAMP)          ## the embedded model behind an OpenAI-compatible server, with its page
	$(BIN)/headlong serve

# The page's tests need a browser; where none can be installed they skip and say so.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null \
	  || (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium) >/dev/null 2>&1 \
	  || echo "no Chromium here and none could be installed: the page's tests will be skipped"

test: $(STAMP) browser   ## the default tests: CPU, no network, about fourteen minutes on two cores
	$(BIN)/python -m pytest $(PARALLEL) -m "$(DEFAULT) and not serial"
	$(BIN)/python -m pytest -m "$(DEFAULT) and serial"

test-all: $(STAMP) browser ## the slow tier too, then the other paths (GPU tests skip without a GPU)
	$(BIN)/python -m pytest $(PARALLEL) -m "not gpu and not serial and not clients"
	$(BIN)/python -m pytest -m "gpu or serial"
	$(MAKE) test-paths

test-paths: $(STAMP)     ## the reference ops where native kernels served; the ops on BLAS paths of other CPUs
	HEADLONG_NATIVE=0 $(BIN)/python -m pytest $(PARALLEL) -m "not gpu" $(ON_REFERENCE_OPS)
	MKL_CBWR=COMPATIBLE $(BIN)/python -m pytest $(PARALLEL) -m "not gpu" tests/ops --ignore-glob='*test_triton_*'

# Where there is no Node.js, the clients from npm are skipped, and the tests say so.
clients: $(STAMP)        ## agents and libraries of others (LangChain, LiteLLM, Claude Code, ...) against the server: minutes
	@$(MAKE) --no-print-directory -j3 $(PACKAGES) $(if $(shell command -v npm),$(CLIENTS)/node/.installed)
	$(BIN)/python -m pytest -m clients tests/clients

$(CLIENTS)/node/.installed: $(wildcard tests/clients/node/*)
	mkdir -p $(@D)
	cp $^ $(@D)
	cd $(@D) && npm ci --no-audit --no-fund --loglevel=error
	touch $@

$(CLIENTS)/%/.installed: tests/clients/requirements/%.txt
	$(PYTHON) -m venv $(CLIENTS)/$*
	$(CLIENTS)/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile -r $<
	touch $@

# Needs GCC; apart from the tests, since the kernels are built for it anew.
sanitize: $(STAMP)       ## the native tests with address and undefined-behaviour sanitizers: minutes
	$(BIN)/python tests/sanitize.py

# Needs GCC for both machines and QEMU's user mode; where they are missing it says so and ends.
cross: $(STAMP)          ## the native kernels for 64-bit ARM, under QEMU, against those of this machine: minutes
	$(BIN)/python tests/cross.py

# Needs what `cross` needs; the wheels lie in dist.
wheels: $(STAMP)         ## the wheels for x86-64 and 64-bit ARM on Linux, built and tried: minutes
	$(BIN)/python release/wheels.py

# In an environment of its own, since its package is made for few machines; MINUTES for each target.
MINUTES ?= 5
fuzz: $(STAMP)           ## readers of strangers' bytes, fed by atheris: MINUTES for each of six targets
	@test -x .fuzz/bin/python || $(PYTHON) -m venv .fuzz
	.fuzz/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . "atheris>=3.0"
	for target in safetensors gguf tokenizer vocabulary chat sse; do \
	  nice .fuzz/bin/python tests/fuzz/run.py $$target -max_total_time=$$((60 * $(MINUTES))) || exit 1; done

docs: $(STAMP)           ## the site from docs/, into site/; links that lead nowhere are errors
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	$(BIN)/mkdocs build --strict --quiet

# Each tool has an environment of its own under .artifacts; ARTIFACTS="--only mlx" takes some of them.
artifacts: $(STAMP)      ## checkpoints made by the tools that people use, compared with what these mean: long, network
	$(BIN)/python release/artifacts.py $(ARTIFACTS)

# Thousands of random schedules, then many requests with faults among them, then replicas that are killed under load.
# SOAK="--minutes 5" shortens the second, REPLICAS="--minutes 1 --clients 8" the third.
soak: $(STAMP)           ## none lost, none wrong, memory flat, replicas killed: half an hour or more
	$(BIN)/python -m pytest -m slow tests/simulator
	$(BIN)/python benchmarks/soak.py $(SOAK)
	$(BIN)/python benchmarks/replicas_soak.py $(REPLICAS)

lint: $(STAMP)           ## ruff (lint and format) and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)          ## plain against each K; against transformers; acceptance over thirty prompts
	$(BIN)/headlong bench
	$(BIN)/python benchmarks/decode.py
	$(BIN)/python benchmarks/acceptance.py

install: $(STAMP)

help:                    ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

$(STAMP): pyproject.toml constraints.txt $(wildcard src/headlong/ops/csrc/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(CLIENTS) build dist site .fuzz *.egg-info src/*.egg-info src/headlong/ops/*.so .pytest_cache .ruff_cache .hypothesis
