# make train: environment, then the toy run. make test: the same environment, then lint, tests and every claim.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test clean

train: .venv/ready
	$(BIN)/python train.py

test: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -q
	$(BIN)/python verify.py

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -e .
	touch $@

.venv/ready-dev: .venv/ready
	$(BIN)/python -m pip install -q -e '.[dev]'
	touch $@

clean:
	rm -rf .venv
