# Development commands. Each creates .venv and installs what it needs on first use.
# Everything else, such as other releases of PyTorch or sanitizers, is a nox session: `.venv/bin/nox -l`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.demo
DEV := $(VENV)/.dev
CPP := $(wildcard src/torchop/_native/csrc/* tests/integration/device/standin/csrc/* benchmarks/*.cpp examples/package/csrc/*)

# Container images often set this. Without bytecode, every child process recompiles torchop.
unexport PYTHONDONTWRITEBYTECODE
# uv does not read pip's configuration. On a machine with local wheels of PyTorch, use these.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)

.PHONY: setup demo test test-all lint format docs bench ci clean

setup: $(DEV)

# The extension is compiled into the user's cache, as for any program that imports torchop.
demo: $(DEMO)
	@cat examples/_demo/introduction.txt
	@PYTHONPATH=src $(BIN)/python examples/crop_demo.py

# Three workers for two cores, because tests wait for child processes a tenth of the time.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
# The tests use a cache inside the working tree. Compile first: pytest hides output during collection.
test test-all: export TORCHOP_CACHE_DIR ?= $(CURDIR)/.native_cache
test: $(DEV)
	@$(BIN)/python -c "import torchop; torchop.native.wait()"
	$(PYTEST) -m "not project"

# All combinations of the tests marked `pairwise`, more generated examples, and the project's own tests.
test-all: $(DEV)
	TORCHOP_EXAMPLES=300 TORCHOP_FUZZ_EXAMPLES=6000 $(PYTEST) --all-combinations

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

docs: $(DEV)
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

bench: $(DEV)
	for file in registration calls training compiling providers residuals structures precision kernels; do \
		$(BIN)/python benchmarks/$$file.py || exit 1; \
	done

ci:
	.ci/run

clean:
	rm -rf $(VENV) .realworld .nox .native_cache docs/_build docs/reference/api demo_output
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis

# uv installs PyTorch in a fifth of the time that pip takes, and reports each download.
$(VENV)/bin/uv: requirements/uv.txt
	@echo "Creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip --disable-pip-version-check --quiet install -r requirements/uv.txt
	@touch $@

$(DEMO): $(VENV)/bin/uv requirements/demo.txt
	@echo "Installing PyTorch, NumPy, Pillow and rich"
	@$(BIN)/uv pip install --python $(BIN)/python -r requirements/demo.txt
	@touch $@

$(DEV): $(DEMO) requirements/dev.txt pyproject.toml
	@echo "Installing the tools of the tests"
	@$(BIN)/uv pip install --python $(BIN)/python -r requirements/demo.txt -r requirements/dev.txt
	@$(BIN)/uv pip install --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@
