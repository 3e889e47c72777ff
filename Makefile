# make train   set up, then train a ResNet-18 on real digits (about a minute)
# make test    set up, then run the tests
# make setup | lint | gpu | benchmark | clean

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

train: setup
	@$(RUN) jobs/train.py --dataset digits --epochs 12

test: setup
	@$(RUN) -m pytest -m "not gpu"

# On a machine with a GPU: correctness first, then the figures.
gpu: setup
	@$(RUN) -m pytest -m gpu
	@$(RUN) -m tests.benchmarks.accuracy --gpu $(if $(DATA),--data_url $(DATA))

benchmark: setup
	@$(RUN) -m tests.benchmarks.order
	@$(RUN) -m tests.benchmarks.accuracy

lint: setup
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .

setup: $(VENV)/installed

$(VENV)/installed: requirements.txt tests/requirements.txt constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "error: $$($(PYTHON) --version) is too old: make PYTHON=python3.12 (any version from 3.10 on)"; exit 2; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || sh tests/install_venv.sh $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -r tests/requirements.txt -c constraints.txt
	@touch $@

clean:
	rm -rf $(VENV) output_dir .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: train test gpu benchmark lint setup clean
