"""Fixtures for all tests."""

import contextlib
import gc
import importlib
import itertools
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Set these variables before torchop is imported. Unless TORCHOP_NATIVE=0 is set, the tests require
# the native extension. It is compiled once, and stored in the working tree.
os.environ.setdefault("TORCHOP_NATIVE", "require")
os.environ.setdefault("TORCHOP_CACHE_DIR", str(Path(__file__).parents[1] / ".native_cache"))
# Make idle OpenMP threads sleep. If they spun, they would take CPU time from the other workers.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Starting Inductor's pool of compiler processes takes longer than compiling the small programs of
# tests, so compile in this process.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Disable vector instructions, because detecting them takes a third of the compile time. Tests do
# not need them, because they compile calls to operators, and not the kernels of operators.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

import pytest
import torch
from torch._library import fake_impl

from tests._support import combinations, free_threads, releases
from tests._support.combinations import pytest_addoption, pytest_runtest_call  # noqa: F401  # hooks
from tests._support.common import outcome
from tests._support.forking import leave_guards_untimed
from torchop.testing.process_state import process_state

FOLDER = Path(__file__).parent
# Run these files first. They iterate over all operators or objects of the process, which would take
# ten times as long after the other tests.
FIRST = (
    "inspect/test_registrant.py",
    "rules/fake/test_declared.py",
    "rules/user/test_checkpoint_policy.py",
    "inspect/test_cache_key.py",
    "schema/structure/test_names.py",
    "native/test_leaks.py",
    "core/test_define.py",
    "core/test_end.py",
    "define/test_handle.py",
    "native/test_autograd_fallback.py",
    "native/test_opaque_arguments.py",
    "native/test_resolution.py",
    "accelerate/test_accelerate.py",
    "accelerate/test_gradients.py",
    "accelerate/test_kernels.py",
    "accelerate/test_operator.py",
    "accelerate/test_results.py",
    "cli/test_accelerate.py",
    "cli/test_record.py",
    "inspect/test_record.py",
)
# Run these files next, because each takes ten seconds of CPU time or more. If one of them ran last,
# a single worker would run it while the others are idle.
LONGEST = (
    "project/test_site.py",
    "project/test_benchmarks.py",
    "testing/check/test_zoo.py",
    "integration/test_device.py",
    "project/test_typing.py",  # it is slow if mypy's cache is empty
    "project/test_docs.py",
    "integration/compile/test_mutation.py",
    "define/test_out_op_compiled.py",
    "project/test_examples.py",
    "rules/user/sharding/test_processes.py",
    "export/test_aoti.py",
    "testing/test_pytest_plugin.py",
    "integration/compile/test_mutated_lists.py",
    "integration/compile/test_aliases.py",
    "integration/compile/test_compile.py",
    "cli/test_check.py",
    "integration/differential/test_differential.py",
    "project/test_notebooks.py",
    "native/test_notices.py",
    "integration/compile/test_derived.py",
    "rules/providers/test_choice.py",
    "testing/check/test_custom_op_db.py",
    "cli/test_main.py",
    "project/test_threads.py",
)

# Collect garbage less often. While a compiler runs, a collection frees nothing, because most
# objects live until the compilation ends, but collections take a twentieth of the time.
gc.set_threshold(10_000, 20, 10)

# pytest adds a handler to each logger that does not propagate. If this logger had a handler,
# PyTorch would format each compiled graph for it, which takes a tenth of the compile time.
logging.getLogger("torch.__trace").propagate = True

_numbers = itertools.count()


def pytest_configure(config: pytest.Config) -> None:
    # Install Python's default handler of SIGINT, which some tests need. A shell script starts its
    # background jobs with SIGINT ignored, and their child processes inherit this setting.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    free_threads.pytest_configure(config)
    releases.pytest_configure(config)
    combinations.pytest_configure(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Import all tests without garbage collection, which takes a quarter of the time."""
    # Run a backward first, which starts a thread for each accelerator. If a test forked the process
    # after creating a fake tensor on a GPU, these threads could not be started in the child.
    torch.ones(1, requires_grad=True).sum().backward()
    gc.disable()
    try:
        _import_in_turns(session.config)
        return (yield)
    finally:
        gc.enable()


def _import_in_turns(config: pytest.Config) -> None:
    """In a pytest-xdist worker, import all test files, in a different order in each worker.

    pytest caches the rewritten asserts of a file. If all workers imported the same file first, all
    of them would rewrite it.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or [Path(name).resolve() for name in config.args] != [FOLDER]:
        return
    files = sorted(
        {*FOLDER.rglob("test_*.py")} - {*(FOLDER / "integration" / "device").rglob("test_*.py")}
    )
    start = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for file in files[start:] + files[:start]:
        # Ignore errors here, because pytest imports a failing file again and reports its error.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(file.relative_to(FOLDER.parent).with_suffix("").parts))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    free_threads.pytest_collection_modifyitems(items)
    releases.pytest_collection_modifyitems(items)
    combinations.pytest_collection_modifyitems(config, items)
    places = {FOLDER / name: place for place, name in enumerate((*FIRST, *LONGEST))}
    assert [file for file in places if not file.exists()] == []
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture
def namespace() -> str:
    """Return a namespace that no other test uses, because operators live as long as the process.

    It contains a number instead of the name of the test, which could match expected messages.
    """
    # Remove the namespaces of earlier tests from this list. torch.export searches every namespace
    # in it for decompositions, which takes longer than the export if there are hundreds.
    torch.ops._dir[:] = ["aten"]
    return f"t{next(_numbers)}"


@pytest.fixture(autouse=True, scope="module")
def frozen_objects() -> None:
    """Exclude existing objects from garbage collection during the tests of a file.

    Otherwise, a full collection takes a second, and some tests run hundreds of collections.
    """
    gc.collect()
    gc.freeze()


_OF_OTHERS = re.compile(r"PYTEST_CURRENT_TEST|_?TORCHINDUCTOR_\w+|TRITON_\w+")


def _shared_state() -> dict[str, Any]:
    """Return the process state that tests must not change, without the state of random numbers."""
    state = process_state(random_numbers=False)
    del state["warnings.filters"]  # imports change the filters, and pytest restores them
    del state["sys.getrecursionlimit()"]  # Inductor's first compilation raises the limit
    for name, value in state.pop("os.environ").items():
        if not _OF_OTHERS.fullmatch(name):
            state[f"os.environ[{name!r}]"] = value
    # Ignore the folders `_vendor` that setuptools adds when Inductor imports it.
    path = [entry for entry in sys.path if not entry.endswith("_vendor")]
    return state | {
        "sys.path": path,
        "sys.argv": list(sys.argv),
        "torch.library.get_ctx()": outcome(torch.library.get_ctx),
    }


@pytest.fixture
def fake_kernels_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test run fake kernels in several threads at once.

    For each fake kernel, PyTorch sets `global_ctx_getter` for the whole process, and then restores
    the previous value. If fake kernels run at the same time, the value of one of them may remain.
    Therefore this fixture restores the original value after the test.
    """
    monkeypatch.setattr(fake_impl, "global_ctx_getter", fake_impl.global_ctx_getter)


@pytest.fixture(autouse=True)
def unchanged_process() -> Iterator[None]:
    """Fail a test that changes the state of the process, because the order of tests varies."""
    before = _shared_state()
    yield
    after = _shared_state()
    names = list(before)  # without accelerators that this test is the first to use
    changes = [(n, before[n], after.get(n)) for n in names if before[n] != after.get(n)]
    added = [n for n in after if n not in before and "accelerator" not in n]
    assert (changes, added) == ([], [])


def pytest_runtest_setup(item: pytest.Item) -> None:
    leave_guards_untimed()
    # Dynamo compiles a function at most eight times, and then runs it without compiling it. Forget
    # the graphs of earlier tests, because parametrized tests compile the same function.
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    if item.get_closest_marker("cuda") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
