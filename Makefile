# Every target makes .venv on first use and installs the pinned requirements into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := $(wildcard src/torchop/_native/csrc/* tests/device/standin/csrc/* benchmarks/*.cpp examples/package/csrc/*)

# Images of containers often set it. Each program of the tests would compile the modules of torchop,
# and pytest all of its own.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo introduction newcomer native test test-project test-all device gpu zoo comparison fuzz mutants leaks sanitize lint bench sharding docs notebooks changelog format clean \
	realworld realworld-quick realworld-operators realworld-checks realworld-steps realworld-tests \
	realworld-vllm \
	matrix prerelease interpreters threads threads-sanitized

# It compiles native calls into the user's cache, for the first program of one's own.
demo: introduction $(STAMP)
	@$(BIN)/python examples/crop_demo.py

introduction:
	@cat examples/_demo/introduction.txt

# Three processes for two cores, because each waits for programs and threads a tenth of its time.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# The tests have a cache in the working tree. It is filled here, because pytest keeps what is said
# while it imports the tests.
native test test-project: export TORCHOP_CACHE_DIR ?= $(CURDIR)/.native_cache
native: $(STAMP)
	@$(BIN)/python -c "import torchop; torchop.native.wait()"

# With DEVICE=standin:1, or that of a GPU, the tests of some rooms with their tensors there.
DEVICE ?=
test: native
ifdef DEVICE
	TORCHOP_TEST_DEVICE=$(DEVICE) $(PYTEST) -p tests.on_device
else
	$(PYTEST) -m "not project"
endif

# Those of what surrounds the package: its site and documentation, examples, notebooks, benchmarks,
# type checkers and whole runs of pytest, and the tests on a device that is not there.
# It names their files, because to import all others takes as long as some of these tests.
test-project: native
	$(PYTEST) -m project $$(grep -rl --include='*.py' 'pytest\.mark\.project' tests)

# The tests on a device that is not there, which need a process of their own.
device: $(STAMP)
	$(BIN)/python -m pytest tests/device

# All that needs a GPU, on a machine that has one; elsewhere it shows that it still runs.
gpu: $(STAMP)
	$(BIN)/python tools/gpu.py

# What the screen shows in which second, from a fresh clone to a first operator of one's own.
newcomer:
	$(PYTHON) tools/newcomer.py

# Both, with every combination of the tests of which `test` runs as many as hold all pairs of values,
# and with more generated examples.
test-all: $(STAMP)
	TORCHOP_EXAMPLES=300 TORCHOP_FUZZ_EXAMPLES=6000 $(PYTEST) --all-combinations

# The tests, or those that TESTS names, with another release of PyTorch. What PyPI has of them needs
# NVIDIA's libraries to be imported, some 5 GB, which are downloaded once for all releases.
RELEASE ?= 2.15.0
TESTS ?=
MATRIX := .matrix
matrix:
	$(PYTHON) tools/environment.py $(RELEASE) $(MATRIX)
	$(MATRIX)/torch-$(RELEASE)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(TESTS)

# The same with the newest PyTorch that can be had, whether it is released or not.
prerelease:
	$(MAKE) matrix RELEASE=$$($(PYTHON) -m pip index versions --pre torch | sed -n '1s/.*(\(.*\))/\1/p')

# The C++ sources, with the headers of every Python on the machine, and for a PyTorch to come; then
# the tests of the core with each Python, and the RELEASE of PyTorch that this environment has. With
# QUICK=--quick, no tests, and only the headers of the oldest and the newest.
interpreters: $(STAMP)
	$(BIN)/python tools/interpreters.py $(QUICK)

# Many threads that call operators while others change them, and how calls scale. PYTHON may name one
# without the GIL, with PyTorch installed; it is kept off there, although on some of these native
# calls ask for it. It says what fails, and with `--stock` whether torch.library does better.
SECONDS ?= 10
threads threads-sanitized: export PYTHONPATH = $(CURDIR)/src
threads threads-sanitized: export PYTHON_GIL = $(if $(filter command line,$(origin PYTHON)),0)
threads threads-sanitized: export TORCHOP_NATIVE = require
threads threads-sanitized: THREADS_PYTHON = \
	$(if $(filter command line,$(origin PYTHON)),$(PYTHON),$(BIN)/python)
threads: THREADS = $(THREADS_PYTHON) tools/threads.py
threads: $(STAMP)
	$(THREADS) --seconds $(SECONDS)
	$(THREADS) --scaling
	$(THREADS) --scaling --stock

# The same with ThreadSanitizer, which needs a Python without the GIL: it does not see that lock.
SANITIZED_THREADS := $(CURDIR)/.native_cache/threads
threads-sanitized: export TORCHOP_CACHE_DIR = $(SANITIZED_THREADS)
threads-sanitized: export CXX = g++ -g -fno-omit-frame-pointer -fsanitize=thread
threads-sanitized: $(STAMP)
	mkdir -p -m 700 $(SANITIZED_THREADS)
	TORCHOP_NATIVE=0 $(THREADS_PYTHON) -c "from torchop._native.extension import api; print(api.build())"
	LD_PRELOAD=$(shell g++ -print-file-name=libtsan.so) \
	TSAN_OPTIONS="ignore_noninstrumented_modules=1 history_size=7 suppressions=tools/threads.supp" \
	setarch -R $(THREADS_PYTHON) tools/threads.py --threads 4 --seconds $(SECONDS)

# Every check on every operator of the zoo, some wrong and some right, with the score.
zoo: $(STAMP)
	$(BIN)/python -m tests.testing.zoo

# Stock checks beside ours on every operator of the zoo, without the checks that compile programs.
comparison: $(STAMP)
	$(BIN)/python -m tests.testing.zoo.comparison

# Compares native calls with the dispatcher on N generated examples; a SEED repeats a run. With
# FUZZ=tests/device/test_differential.py, on a device that is not there.
N ?= 200000
FUZZ ?= tests/differential/test_differential.py
ifndef SEED
SEED := $(shell date +%s)
endif
fuzz: $(STAMP)
	@echo "N=$(N) SEED=$(SEED)"
	TORCHOP_FUZZ_EXAMPLES=$(N) TORCHOP_FUZZ_SEED=$(SEED) \
		$(BIN)/python -m pytest -s $(FUZZ)

# Puts the files of changes/ into CHANGELOG.md, for a release.
changelog: $(STAMP)
	$(BIN)/towncrier build --yes --version $(VERSION)

# Takes one condition after the other out of the native call path: a test has to fail each time.
mutants: $(STAMP)
	$(BIN)/python tools/mutants.py

# A million calls of each kind, and 100,000 backward passes; a test run has time for 20,000.
leaks: $(STAMP)
	TORCHOP_LEAK_CALLS=1000000 $(BIN)/python -m pytest tests/native/test_leaks.py

# The native call path, compiled with checks of every memory access and of undefined behaviour, in a
# cache of its own: a program that takes any build must not find it. Their libraries must be loaded
# before Python, and the C++ library before them, or they do not see that exceptions are thrown.
# There, each variable has a place of its own, so a call that is one function would fill the stack.
# PyTorch and Python leak on purpose, so leaks are the matter of `make leaks`.
NATIVE_TESTS := $(addprefix tests/native/test_,bypass.py handle.py switch.py overrides.py \
	later_registrations.py operator_end.py exceptions.py nested_calls.py changes_during_calls.py \
	processes.py unusual_arguments.py opaque_arguments.py overloads.py passed_arguments.py greenlets.py \
	dispatcher_calls.py reset_libraries.py thread_end.py deep_recursion.py autograd_fallback.py \
	optional_lists.py) \
	tests/native/gradients tests/accelerate \
	tests/rules/autograd/derived/test_native.py tests/rules/providers/test_choice.py \
	tests/inspect/explain tests/test_native.py
SANITIZED := $(CURDIR)/.native_cache/sanitized
sanitize: export TORCHOP_CACHE_DIR = $(SANITIZED)
sanitize: export CXX = g++ -g -fno-omit-frame-pointer -fsanitize=address,undefined \
	-fno-sanitize=vptr -fno-sanitize-recover=undefined -D__flatten__=
sanitize: $(STAMP)
	mkdir -p -m 700 $(SANITIZED)
	$(BIN)/python -c "from torchop._native.extension import api; print(api.build())"
	LD_PRELOAD="$(foreach name,libasan libubsan libstdc++,$(shell g++ -print-file-name=$(name).so))" \
	ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0:detect_stack_use_after_return=1 \
	UBSAN_OPTIONS=print_stacktrace=1 \
	PYTHONMALLOC=malloc $(BIN)/python -m pytest -p no:faulthandler $(NATIVE_TESTS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(SOURCES)
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python benchmarks/registration.py
	$(BIN)/python benchmarks/calls.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/compiling.py
	$(BIN)/python benchmarks/providers.py
	$(BIN)/python benchmarks/residuals.py

# What sharding rules cost, in calls and where DTensor decides anew; on a fake process group.
sharding: $(STAMP)
	$(BIN)/python benchmarks/sharding.py

# Operators of real packages, accelerated: the same results, the packages' own tests, what a call
# costs. The packages lie in a folder of their own, which Python searches first, so that they run
# with the PyTorch of $(VENV). Only optimum-quanto ships its tests.
REALWORLD := .realworld
QUANTO := optimum-quanto==0.2.7
QUANTO_TESTS := $(REALWORLD)/sources/optimum_quanto-0.2.7/test
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
QUICK :=
realworld%: export TORCHOP_NATIVE = require
realworld%: export TORCHOP_CACHE_DIR = $(CURDIR)/.native_cache
realworld%: export PYTHONPATH = $(CURDIR)/$(REALWORLD)/packages
realworld%: export WARP_CACHE_PATH = $(CURDIR)/$(REALWORLD)/warp
realworld: realworld-operators realworld-checks realworld-steps realworld-tests realworld-vllm

# For continuous integration, which does not judge speed: nothing is timed, so two things may run at
# once, most of which is compiling the kernels of two packages.
realworld-quick:
	$(MAKE) --jobs=2 --output-sync QUICK=--quick realworld-operators realworld-tests

realworld-operators: $(REALWORLD)/.installed
	$(BIN)/python benchmarks/realworld/operators.py $(QUICK)

# What torchop.testing.check finds in six packages, without the compilers of programs.
realworld-checks: $(REALWORLD)/.installed $(REALWORLD)/.installed-fbgemm $(REALWORLD)/.installed-vllm
	$(BIN)/python benchmarks/realworld/checks.py

realworld-steps: $(REALWORLD)/.installed
	$(BIN)/python benchmarks/realworld/steps.py

realworld-tests: $(REALWORLD)/.installed
	$(BIN)/python benchmarks/realworld/own_tests.py $(QUICK) $(QUANTO_TESTS)

# Tokens of vLLM, with its operators native, and what their calls cost.
realworld-vllm: export PYTHONPATH = $(CURDIR)/$(REALWORLD)/vllm
realworld-vllm: $(REALWORLD)/.installed-vllm
	$(BIN)/python benchmarks/realworld/vllm_decoding.py

$(REALWORLD)/.installed-fbgemm: $(STAMP) requirements/realworld-fbgemm.txt
	rm -rf $(REALWORLD)/fbgemm
	$(PIP) install --no-deps --no-compile --target $(REALWORLD)/fbgemm -r requirements/realworld-fbgemm.txt
	touch $@

$(REALWORLD)/.installed-vllm: $(STAMP) requirements/realworld-vllm.txt
	rm -rf $(REALWORLD)/vllm
	$(PIP) install --no-deps --no-compile --target $(REALWORLD)/vllm -r requirements/realworld-vllm.txt
	touch $@

$(REALWORLD)/.installed: $(STAMP) requirements/realworld.txt
	rm -rf $(REALWORLD)/packages $(REALWORLD)/sources $(REALWORLD)/warp
	$(PIP) install --no-deps --no-compile --target $(REALWORLD)/packages -r requirements/realworld.txt
	$(PIP) download --no-deps --no-binary :all: --no-build-isolation --dest $(REALWORLD)/sources $(QUANTO)
	cd $(REALWORLD)/sources && tar -xzf *.tar.gz
	touch $@

docs: $(STAMP)
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

# Runs the notebooks and stores what they show, and draws the trace of a tutorial.
notebooks: $(STAMP)
	$(BIN)/python tools/notebooks.py
	$(BIN)/python tools/trace_picture.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(SOURCES)

clean:
	rm -rf $(VENV) $(REALWORLD) $(MATRIX) .native_cache docs/_build docs/reference/api demo_output .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(STAMP): requirements/torch.txt requirements/dev.txt pyproject.toml
	@echo "Installing PyTorch and the tools of the tests into $(VENV), once: about a minute and 2 GB."
	@$(PYTHON) tools/install.py $(VENV)
	@touch $(STAMP)
