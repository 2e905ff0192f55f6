# `make demo` and `make test` set everything up by themselves, in .venv.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test lint types unit test-slow bench tables clean

# Four methods on an embedded data set: a table, and runs/demo/report.html.
demo: $(STAMP)
	$(BIN)/llqr compare --data digits --model mlp --methods sgdm,llqr,sam,llqr+sam --seeds 3 --out runs/demo

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# One thread a process: the tests' networks are small, and two processes share two cores.
unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2

# Checks that take minutes and are not part of CI.
test-slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow -n 2

# Our steps beside pytorch_optimizer's, as ratios from one run; and what each inner solver gets for its products.
bench: $(STAMP)
	$(BIN)/llqr bench peers --device cpu --batch 32 --out results/bench/peers-cpu.json
	$(BIN)/llqr bench solvers --device cpu --batch 32 --out results/bench/solvers-cpu.json

# The measured tables of the README and of docs/bench.md, from results/.
tables: $(STAMP)
	$(BIN)/llqr table --write README.md
	$(BIN)/llqr table --write docs/bench.md

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis runs
