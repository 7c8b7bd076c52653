# Two commands matter: `make book` and `make test`. Both set up what they need first.
PRESET ?= quick
PYTHON ?= python3
CORES  ?= $(shell $(PYTHON) -c "import os; print(os.cpu_count())")
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
PEERS  := $(VENV)/.peers

.DEFAULT_GOAL := help
.PHONY: help setup corpus run book specimens test lab sync lint format bench lock clean distclean

help:  ## Show this help
	@awk -F':.*## ' '/^[a-z]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  PRESET=smoke|quick|paper chooses the parameters (config/PRESET.yaml); now: $(PRESET)"

# torch comes first and by version alone, so that whichever build of it fits this machine (CPU or
# CUDA) satisfies the lock; everything else is checked against the hashes in the lock.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
	  { echo "error: Python 3.11 or newer is needed; PYTHON=/path/to/python3.11 make ... chooses one"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' requirements.lock)"
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

setup: $(STAMP)  ## Make .venv from the lock file

corpus: $(STAMP)  ## Fetch and check the preset's corpus
	@$(BIN)/python -m attnlib corpus --preset $(PRESET)

run: corpus  ## Run the notebooks of the preset, without building the book
	@$(BIN)/python -m attnlib make notebooks --preset $(PRESET) --cores $(CORES)

book: corpus  ## Run what changed, then build the book
	@$(BIN)/python -m attnlib make book --preset $(PRESET) --cores $(CORES)
	@echo "The book is at $(CURDIR)/build/book/$(PRESET)/_build/html/index.html"

specimens: corpus  ## Train the models that the book keeps and that are missing (hours)
	@$(BIN)/python -m attnlib specimens

test: $(STAMP)  ## Ruff, unit and property tests, every notebook and the book at smoke size
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest

lab: sync  ## Open Jupyter Lab on the paired notebooks
	$(BIN)/jupyter lab build/ipynb

sync: $(STAMP)  ## Pair every text notebook with an .ipynb in build/ipynb
	@$(BIN)/python -m attnlib sync

lint: $(STAMP)  ## Ruff only
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: $(STAMP)  ## Let ruff mend what it can
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

# What the benchmarks compare with, beside what the lock above has installed; nothing else needs it.
$(PEERS): $(STAMP) requirements-bench.lock
	$(BIN)/python -m pip install --quiet --no-deps --requirement requirements-bench.lock
	touch $@

bench: $(PEERS)  ## Run the benchmarks and write their figures
	$(BIN)/python -m benchmarks

lock: $(STAMP)  ## Resolve the newest versions that pyproject.toml allows
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/python .ci/lock.py

clean:  ## Remove the book and the results, keep .venv and the corpora
	rm -rf build results .snakemake .graph.lock

distclean: clean  ## Remove .venv as well
	rm -rf $(VENV) *.egg-info
