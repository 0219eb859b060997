# `make train` and `make test` need make, git and Python >= 3.10; they bring everything else themselves.
#
# TORCH_INDEX: where the build of torch comes from. The default is PyTorch's index of CPU builds, which are a tenth of
# the size; `make train TORCH_INDEX=https://download.pytorch.org/whl/cu130` takes a CUDA build. When the index cannot
# be reached, or has no such build, the package index's own build is taken.

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check
REQUIREMENTS = setup.cfg pyproject.toml constraints.txt
ARGS ?=
# Tests wait more than they compute; those of one file share what they set up.
PARALLEL = -n logical --maxprocesses 4 --dist loadfile

.PHONY: train test test-all lint docs clean

# A second time it resumes the run if it is unfinished, else starts another one beside it.
train: $(VENV)/.installed ## train FrozenLake on this machine; ARGS="dir=runs/second" and the like override settings
	$(VENV)/bin/agentkit run examples/frozen_lake.yaml --again $(ARGS)

test: $(VENV)/.installed-test ## the everyday tests
	$(VENV)/bin/python -m pytest $(PARALLEL) $(ARGS)

test-all: $(VENV)/.installed-test ## the slow ones too
	$(VENV)/bin/python -m pytest $(PARALLEL) -m "not vllm" $(ARGS)

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/pyright

docs: $(VENV)/.installed-dev ## the site, in site/
	$(VENV)/bin/python docs/generate_configuration.py
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

clean:
	rm -rf $(VENV) site build dist *.egg-info

# An installation is up to date until what it was made from changes.
$(VENV)/.installed: $(VENV)/bin/pip $(REQUIREMENTS)
	$(PIP) install --no-deps --index-url $(TORCH_INDEX) --timeout 10 --retries 1 torch==$(TORCH)+$(notdir $(TORCH_INDEX)) \
		|| $(PIP) install -c constraints.txt torch==$(TORCH)
	$(PIP) install -c constraints.txt -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) install -c constraints.txt -e '.[test]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-test
	$(PIP) install -c constraints.txt -e '.[dev]'
	touch $@

# Debian and Ubuntu ship Python without the means to make a virtual environment.
$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "Python 3.10 or newer is needed, $(PYTHON) is older; name another by PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
		if [ "$$(id -u)" = 0 ]; then run=; else run=sudo; fi; \
		version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
		$$run apt-get update && { $$run apt-get install -y python$$version-venv || $$run apt-get install -y python3-venv; }; \
	} || { echo "python3-venv is missing and could not be installed; install it and try again"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
