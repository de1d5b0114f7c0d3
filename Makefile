# make train: environment, then the toy run. make test: the same environment, then lint, tests and every claim.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test exercise exercises test-faults test-verl gpu clean

train: .venv/ready
	$(BIN)/python train.py

test: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -q -n 2 --dist loadfile
	$(BIN)/python verify.py

# make exercise N=6 grades one exercise. make exercises says how far you are. NOT YET (1) is no failure of make.
exercise exercises: .venv/ready
	@$(BIN)/python -m exercises.grader $(N) || [ $$? = 1 ]

# The long ones: 50 kills, 10,000 texts a verifier, 2,000 steps, every planted fault, every command of the READMEs in
# small, TRL on two processes, the speed of the tree page.
LONG_TESTS := $(patsubst %,tests/test_%.py,promises readme faults trl tree)
test-faults: .venv/ready-dev
	LONG=1 $(BIN)/python -m pytest -q -rA $(LONG_TESTS)

# verl pins another transformers, hence an environment of its own. No CUDA, vLLM or flash-attn is needed.
test-verl: .venv-verl/ready
	.venv-verl/bin/python -m pytest -q -rA tests/test_verl.py tests/test_audit.py
	.venv-verl/bin/python -m engines.audit verl

# Ten minutes on a machine with a GPU: a table to paste into an issue.
gpu: .venv/ready
	$(BIN)/python -m experiments.gpu

.venv-verl/ready: pyproject.toml
	$(PYTHON) -m venv .venv-verl
	.venv-verl/bin/python -m pip install -q -e '.[verl]' pytest
	touch $@

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -e '.[plot]'
	touch $@

.venv/ready-dev: .venv/ready
	$(BIN)/python -m pip install -q -e '.[dev]'
	touch $@

clean:
	rm -rf .venv .venv-verl
