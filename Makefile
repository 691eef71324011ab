# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
# PyTorch's CPU package index, where you have one: a small torch on machines without an NVIDIA GPU.
TORCH_INDEX ?=
# What the demo's benchmark may take; a slow machine is told how much it needs.
BUDGET ?= 150s
# The other checkout that `make gate` compares this one with, what it measures, and where report and record go.
BASE ?= ../base
GATE ?= --scenario decode --input-len 64 --output-len 32 --margin 5% --budget 20m
OUT ?= build/gate
# More words for pytest, and for golden verify. Tests run on every core, a file of them on one: a server or an engine that a
# file's tests share is started once. PYTEST=-n0 runs them in one process, in order.
PYTEST ?=
WORKERS := -n auto --maxprocesses 8 --dist loadfile
GOLDEN ?=
export TORCH_INDEX

BIN := $(VENV)/bin

.PHONY: help demo test test-full check golden models-check gate docs setup setup-test model clean

help:
	@echo "make demo          set up, fetch the default model, and run the main job: a benchmark in arms behind a golden check"
	@echo "make test          the whole test suite, lint and type checks included (what CI runs)"
	@echo "make test-full     what takes longer: long shapes, sanitizers, other processors under emulation (nightly)"
	@echo "make check         lint, types and layer contracts only"
	@echo "make golden        does the default model still answer as recorded, through every entry point?"
	@echo "make models-check  does a page claim more than the records prove?"
	@echo "make gate          is this checkout slower than the one in BASE? Both run interleaved, here and now"
	@echo "make docs          regenerate the command page, the model pages and the picture"
	@echo "Variables:   PYTHON=python3.12   VENV=.venv   BUDGET=150s   TORCH_INDEX=<address of PyTorch's CPU package index>"
	@echo "             PYTEST=<words for pytest, such as -n0 for one process>   GOLDEN=<words for golden verify>   BASE=../base   GATE=<words for bench gate>"

setup:
	@$(PYTHON) .ci/setup.py --venv $(VENV)

setup-test:
	@$(PYTHON) .ci/setup.py --venv $(VENV) --extra test

model: setup
	@$(BIN)/pocketllm models pull smollm2-135m

demo: setup model
	$(BIN)/pocketllm bench --scenario prefill --input-len 256 --arms base --arms chunk-64:prefill_chunk=64 --budget $(BUDGET)

# as modules: what the Python below has already, installation leaves where it is, without a command in .venv/bin
check: setup-test
	$(BIN)/python -m ruff check pocketllm tests .ci hatch_build.py
	$(BIN)/python -m ruff format --check pocketllm tests .ci hatch_build.py
	$(BIN)/python -m mypy
	$(BIN)/lint-imports

# without a network the tests that need the model, or npm's packages, are skipped, and say so; CI must have them
test: setup-test check
	@! command -v npm > /dev/null || npm ci --silent --prefix tests/served/clients || test -z "$$CI"
	@$(BIN)/pocketllm models pull smollm2-135m || test -z "$$CI"
	$(BIN)/python -m pytest $(WORKERS) $(PYTEST)

test-full: setup-test
	@$(BIN)/pocketllm models pull smollm2-135m
	@$(BIN)/pocketllm models pull gemma3-270m
	-@.ci/aarch64 $(BIN)/python
	$(BIN)/python -m pytest -m full $(PYTEST)

golden: model
	$(BIN)/pocketllm golden verify --require $(GOLDEN)

models-check: setup
	$(BIN)/pocketllm models check

gate: model
	@mkdir -p $(OUT)
	$(BIN)/pocketllm bench gate --junit $(OUT)/bench.xml --record-dir $(OUT) --arms base:path=$(BASE) --arms new:path=. $(GATE)

docs: setup-test
	$(BIN)/python -m tests.docs.cli_pages docs/cli.md
	$(BIN)/pocketllm models docs
	$(BIN)/python -m tests.docs.picture docs/pictures/demo.svg
	$(BIN)/python -m tests.docs.example_page docs/examples/bench-report.html

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	rm -f pocketllm/engine/backends/cpu/*.so pocketllm/engine/backends/cpu/native_build.txt
