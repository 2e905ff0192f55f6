# Every target sets up the virtual environment it needs: .venv, or .venv-PYTHON-torch-VERSION for another torch.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Of test-torch: the oldest that pyproject.toml allows, that of constraints.txt, and the newest that installs.
TORCH  ?= 2.11.0 2.13.0 newest
OTHER  := .venv-$(notdir $(PYTHON))-torch-

.PHONY: demo test lint types unit test-slow test-torch bench tables figures screenshots docs release-check clean

# Four methods on embedded data, with half of the training labels wrong and with all of them right: two tables, and
# runs/demo/report.html. One thread: the network is small.
demo: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/llqr compare digits/mlp-noisy digits/mlp-clean --seeds 5 --out runs/demo

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# One thread per process: the networks of the tests are small, and two processes share two cores.
unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

# Checks that take minutes and are not part of CI.
test-slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow -n 2

# The unit tests on other versions of torch, and of Python: make test-torch TORCH=2.15.0 PYTHON=python3.13. Each takes
# five gigabytes: CUDA libraries come with it.
test-torch: $(TORCH:%=$(OTHER)%/.installed)
	for version in $(TORCH); do \
		OMP_NUM_THREADS=1 $(OTHER)$$version/bin/python -m pytest -q -n 2 --dist worksteal || exit 1; \
	done

# Our steps compared with pytorch_optimizer's, as ratios from one run.
bench: $(STAMP)
	$(BIN)/llqr bench peers --device cpu --batch 32 --out results/bench/peers-cpu.json

# The measured tables of the README, of the site and of the protocols, from results/.
tables: $(STAMP)
	for page in $$(grep -rl --include=*.md "^<!-- table:" README.md docs results); do $(BIN)/llqr table --write $$page || exit 1; done

# The pictures of the site, from results/, and the terminal of the demo.
figures: $(STAMP)
	$(BIN)/python docs/figures/bench.py $(addprefix results/bench/,cadence-vit-every-5.json scaling-vit.json \
		refresh-vit-b-few.json peers.json)
	$(BIN)/llqr table cifar100 --plot docs/figures/cifar100.svg > /dev/null
	$(BIN)/llqr results draw results/curves/cifar100-resnet18@rho-0.1-seed*.jsonl --method sam --method llqr-ngd+sam \
		--to docs/figures/cifar100-rho-0.1.svg
	$(BIN)/llqr results draw results/curves/iwslt14-europarl-de-en-seed0.jsonl --panel BLEU:step --panel token_error:step \
		--to docs/figures/europarl.svg
	for drawing in idea price terminal; do $(BIN)/python docs/figures/$$drawing.py || exit 1; done

# The report of the demo in light and dark, as pictures for the first page. Needs chromium.
screenshots: demo
	$(BIN)/llqr report runs/demo/digits/mlp-noisy --quiet
	$(BIN)/python docs/figures/report.py runs/demo/digits/mlp-noisy/report.html

# The site, in site/; a warning or a dead link is an error. `.venv/bin/mkdocs serve` shows it while you write.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The checklist of CONTRIBUTING in one command, in a clean checkout. Tests compare the versions; those of the slow lane
# build wheel and sdist and install them in fresh environments.
release-check: test docs
	grep -q "^## $$($(BIN)/python -c 'import llqr; print(llqr.__version__)') (20" CHANGELOG.md || \
		{ echo "CHANGELOG.md: this version has no section with a date"; exit 1; }
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow tests/test_packaging.py tests/test_optim_db.py
	$(MAKE) tables figures
	git diff --exit-code --stat || { echo "tables or figures are not those of results/, or the tree has changes"; exit 1; }

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	touch $@

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[docs]"
	touch $@

$(OTHER)%/.installed: pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q --upgrade torch$(if $(filter newest,$*),,==$*) -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis runs site
