# Needs Python 3.11 or later and nothing else: each target makes .venv, with pinned versions, if there is none.
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint bench clean

demo: .venv/ready
	$(BIN)/muonshard demo --out out

test: .venv/ready
	$(BIN)/python -m pytest -q

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/ready
	-$(BIN)/pip install --quiet --no-deps --requirement requirements/bench.txt
	$(BIN)/python -m benchmarks.step

clean:
	rm -rf .venv out

.venv/ready: requirements/dev.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "muonshard needs Python 3.11 or later: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --requirement requirements/dev.txt
	$(BIN)/pip install --quiet --no-deps --editable .
	touch $@
