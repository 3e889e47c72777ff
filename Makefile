# make train    set up, then train a ResNet-18 on real digits
# make test     set up, then run the tests
# make quick    the tests that start no process and open no socket, for use while you edit
# make portable the quick tests as on other machines: an old CPU, other threads, a busy machine
# make demo     data and code to an object store, a job of two nodes, killed, restarted, and its report
# make thorough all tests that are not in `make test`: random faults, long runs; ROOM=jobs: those of tests/jobs
# make real     on real counterparts: Slurm, MPI, launchers, mounts, S3 servers (root; it installs Debian packages)
# make compat   the quick tests with the oldest versions that are supported, on Python 3.10 and 3.11
# make zoo      known defects of other trainers in their released packages: do the receipt and prove find them?
# make gpu      on a machine with a GPU: is all of it right there, and how fast?
# make docs     the pages as a site with a search in two languages, in build/site
# make setup | lint | benchmark | benchmark-gpu | clean

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
COMPAT := .venv-compat
ZOO := .venv-zoo
REAL := .venv-real
DOCS := .venv-docs
REAL_TESTS := tests/real tests/datasets/stores/test_redis_store.py
# A test that hangs fails after LIMIT seconds and shows where; one that hangs in C ends its process a little later.
# xdist gives the tests of a process that has ended to others, and then may wait for ever: the run ends there.
PYTEST := -m pytest --dist loadfile --no-loadscope-reorder --max-worker-restart=0 -o faulthandler_exit_on_timeout=true
LIMIT := --timeout=900 -o faulthandler_timeout=1000
LONG_LIMIT := --timeout=3600 -o faulthandler_timeout=4000
COMPAT_PYTHON ?= $(foreach python,python3.10 python3.11,$(shell $(python) -c 'print("$(python)")' 2>/dev/null))
COMPAT_TESTS := tests/bootfile tests/datasets tests/common tests/jobs/test_start.py tests/jobs/test_bad_input.py tests/jobs/test_imagenet.py tests/jobs/test_resume.py tests/test_marks.py

train: $(VENV)/installed
	@$(RUN) jobs/train.py --dataset digits --batch_size 32 --epochs 5

demo: setup
	@$(RUN) -m tests.demo

test: setup packages
	@$(RUN) $(PYTEST) $(LIMIT) -n 4 -m "not gpu and not thorough and not real"

# A test is skipped when it starts its first process or opens its first socket: see tests/conftest.py.
quick: setup
	@$(RUN) $(PYTEST) $(LIMIT) --quick -n 2 -m "not gpu and not thorough and not real"

# SMALL=--small: one variant with the tests of the mark rounding, as .ci/run does.
portable: setup
	@$(RUN) -m tests.portable $(SMALL)

# ROOM: folders or files of tests/, for example ROOM=faults or ROOM="jobs common/elastic". REPEATS: the share of
# random kills and faults, each kind at least once.
thorough: REPEATS ?= 0.2
thorough: setup packages emulator
	@REPEATS=$(REPEATS) $(RUN) $(PYTEST) $(LONG_LIMIT) -n 4 -m thorough $(addprefix tests/,$(ROOM))

# PYTORCH=FOLDER holds PyTorch's source, whose tests of its DataLoader then run with ours, 15 minutes more.
real: $(REAL)/installed
	@PYTORCH="$(abspath $(PYTORCH))" $(REAL)/bin/python $(PYTEST) $(LONG_LIMIT) -rs -n 3 $(REAL_TESTS)

# The versions of ModelArts' preset image, which are the floors of requirements.txt. torch 2.1 exists for Python
# 3.8 to 3.11. Each Python has a folder: make compat COMPAT_PYTHON=PATH/python3.10
compat: $(foreach python,$(COMPAT_PYTHON),$(COMPAT)/$(notdir $(python))/installed)
	@test -n "$^" || { echo "error: there is no python3.10 or python3.11: make compat COMPAT_PYTHON=..."; exit 2; }
	@status=0; for installed in $^; do \
	  $$(dirname $$installed)/bin/python $(PYTEST) $(LIMIT) -n 3 -m "not gpu and not thorough and not real" $(COMPAT_TESTS) || status=$$?; \
	  $$(dirname $$installed)/bin/python -m pytest tests/faults/test_platform_image.py || status=$$?; \
	done; exit $$status

# Broken links and anchors are errors. `pytest tests/site` then tests the site in Chromium.
docs: $(DOCS)/installed
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	@echo "build/site/index.html; to search in it: $(DOCS)/bin/python -m http.server -d build/site --bind 127.0.0.1"

# CASES: names of tests/zoo/cases.py (default: all).
zoo: $(ZOO)/installed
	@$(ZOO)/bin/python -m tests.zoo $(CASES)

# On a machine with a GPU: is it right (5 minutes), how fast (6), and what does a user get compared with PyTorch
# alone (6)? DATA=FOLDER holds Fashion-MNIST.
# It installs nothing, so it needs no network: with the packages of another Python, make gpu PYTHON=python3.
GPU_PYTHON = $(if $(filter file,$(origin PYTHON)),$(RUN),$(PYTHON))
gpu:
	@status=0; for run in right fast users; do \
	  $(GPU_PYTHON) -m tests.gpu $$run $(if $(DATA),--data $(DATA)) || status=$$?; done; exit $$status

# The other benchmarks of a GPU. DATA=FOLDER holds Fashion-MNIST.
benchmark-gpu: setup
	@$(RUN) -m tests.benchmarks.train
	@$(RUN) -m tests.benchmarks.train --arch resnet50
	@$(RUN) -m tests.benchmarks.blocks --blocks 1,3,6,8,9 --compile true
	@$(if $(DATA),$(RUN) -m tests.benchmarks.time_to_accuracy --dataset fashion_mnist --seeds 3 --data_url $(DATA))
	@$(RUN) jobs/imagenet.py --custom_data true --max_steps 1 --batch_size 64 --training_only --cache_dir output_dir/index
	@$(RUN) -m launch bench loaders --data_url output_dir/index/generated --pack output_dir/packs
	@$(RUN) -m tests.benchmarks.train --arch shufflenet_v2_x0_5 --batch_size 512 -- --workers 10
	@$(RUN) -m tests.benchmarks.batch_size --workers 10

benchmark: setup
	@$(RUN) -m tests.benchmarks.time_to_accuracy
	@$(RUN) -m tests.benchmarks.train
	@$(RUN) -m tests.benchmarks.train --arch resnet50
	@$(RUN) -m tests.benchmarks.blocks
	@$(RUN) -m tests.benchmarks.checkpoint
	@$(RUN) -m tests.benchmarks.loaders
	@$(RUN) -m tests.benchmarks.pairs
	@$(RUN) -m tests.benchmarks.own_step
	@$(RUN) -m tests.benchmarks.cache
	@$(RUN) -m tests.benchmarks.rendezvous

lint: setup
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy
	@for package in bootfile jobs common datasets launch; do printf '%-10s%4d files%7d lines\n' $$package \
	  $$(find $$package -name '*.py' | wc -l) $$(find $$package -name '*.py' -exec cat {} + | wc -l); done

setup: $(VENV)/installed-tests

# What jobs need; the tests' packages come on top. Their hundreds of starts need bytecode, which uv leaves out.
$(VENV)/installed: requirements.txt constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: there is no $(PYTHON): install it, or make PYTHON=..."; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "error: $$($(PYTHON) --version) is too old: make PYTHON=python3.12 (3.10 or later)"; exit 2; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || sh tests/install_packages.sh required \
	  $$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
	$(PYTHON) -m venv $(VENV)
	$(RUN) tests/install.py -r requirements.txt -c constraints.txt
	@touch $@

$(VENV)/installed-tests: $(VENV)/installed tests/requirements.txt
	$(RUN) tests/install.py -r tests/requirements.txt -c constraints.txt
	@$(RUN) -m compileall -q -j 0 $(VENV)/lib >/dev/null || true  # a package may have files for other versions
	@touch $@

define COMPAT_RULE
$(COMPAT)/$(notdir $(1))/installed: requirements.txt tests/requirements.txt tests/compat.txt
	$(1) -m venv --clear $$(@D)
	UV_COMPILE_BYTECODE=1 $$(@D)/bin/python tests/install.py -r tests/requirements.txt -c tests/compat.txt
	@touch $$@
endef
$(foreach python,$(COMPAT_PYTHON),$(eval $(call COMPAT_RULE,$(python))))

# The environment has the newest releases. Each line of releases.txt is installed into a folder of its own.
$(ZOO)/installed: tests/zoo/requirements.txt tests/zoo/releases.txt
	$(PYTHON) -m venv --clear $(ZOO)
	UV_COMPILE_BYTECODE=1 $(ZOO)/bin/python tests/install.py -r tests/zoo/requirements.txt
	@grep -v '^#' tests/zoo/releases.txt | while read -r release others; do echo "$$release $$others"; \
	  UV_COMPILE_BYTECODE=1 $(ZOO)/bin/python tests/install.py --no-deps --target $(ZOO)/releases/$$release $$release $$others || exit 1; done
	@touch $@

$(REAL)/installed: requirements.txt tests/requirements.txt tests/real/install.sh
	$(PYTHON) -m venv --clear $(REAL)
	UV_COMPILE_BYTECODE=1 $(REAL)/bin/python tests/install.py -r tests/requirements.txt -c constraints.txt
	@sh tests/real/install.sh $(REAL)/bin/python
	@touch $@

$(DOCS)/installed: docs/requirements.txt
	$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/python tests/install.py -r docs/requirements.txt
	@touch $@

packages:
	@command -v ip >/dev/null || sh tests/install_packages.sh optional iproute2
	@command -v redis-server >/dev/null || sh tests/install_packages.sh optional redis-server
	@command -v chromium >/dev/null || sh tests/install_packages.sh optional chromium

emulator:
	@command -v qemu-x86_64 >/dev/null || sh tests/install_packages.sh optional qemu-user

clean:
	rm -rf $(VENV) $(COMPAT) $(ZOO) $(REAL) $(DOCS) .pytest_cache .ruff_cache .mypy_cache build bootfile.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: docs emulator portable train demo test quick thorough real compat zoo gpu benchmark benchmark-gpu lint setup packages clean
