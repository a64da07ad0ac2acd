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

# Set these before torchop is imported. Tests require native calls unless TORCHOP_NATIVE=0. The
# extension is compiled once, into the working tree.
os.environ.setdefault("TORCHOP_NATIVE", "require")
os.environ.setdefault("TORCHOP_CACHE_DIR", str(Path(__file__).parents[1] / ".native_cache"))
# Idle OpenMP threads must not spin, because they would take CPU time from the other workers.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Starting Inductor's pool of compiler processes takes longer than compiling the small programs of
# tests, so compile in this process.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Detecting vector instructions takes a third of the compile time, so disable them. Tests compile
# calls of operators, not their kernels.
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
# These files iterate over all operators or objects of the process. After the other tests, this
# would take ten times as long.
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
    "accelerate/test_overloads.py",
    "accelerate/test_results.py",
    "cli/test_accelerate.py",
    "cli/test_record.py",
    "inspect/test_record.py",
)
# Files that take ten CPU-seconds or more run next, so that no worker runs one of them alone at the
# end.
LONGEST = (
    "project/test_site.py",
    "project/test_benchmarks.py",
    "testing/check/test_zoo.py",
    "integration/test_device.py",
    "project/test_typing.py",  # if mypy's cache is empty
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

# Most objects of a compiler live until the compilation ends, so frequent garbage collection frees
# nothing, but takes a twentieth of the time.
gc.set_threshold(10_000, 20, 10)

# pytest adds a handler to loggers that do not propagate. With a handler on this logger, PyTorch
# formats each compiled graph, which takes a tenth of the compile time.
logging.getLogger("torch.__trace").propagate = True

_numbers = itertools.count()


def pytest_configure(config: pytest.Config) -> None:
    # A shell script starts background jobs with SIGINT ignored, and processes inherit this setting.
    # Tests need Python's default handler.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    free_threads.pytest_configure(config)
    releases.pytest_configure(config)
    combinations.pytest_configure(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Import all tests without garbage collection, which takes a quarter of the time."""
    # The first backward starts a thread for each accelerator. In a process forked after the first
    # fake tensor on a GPU, starting these threads fails, so run a backward first.
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
        # pytest imports failing files again, and reports the error.
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
    # torch.export searches every namespace in this list for decompositions. With the namespaces of
    # hundreds of tests, that takes longer than exporting.
    torch.ops._dir[:] = ["aten"]
    return f"t{next(_numbers)}"


@pytest.fixture(autouse=True, scope="module")
def frozen_objects() -> None:
    """Exclude existing objects from garbage collection during the tests of a file.

    A full collection takes a second, and some tests run hundreds of them.
    """
    gc.collect()
    gc.freeze()


_OF_OTHERS = re.compile(r"PYTEST_CURRENT_TEST|_?TORCHINDUCTOR_\w+|TRITON_\w+")


def _shared_state() -> dict[str, Any]:
    """Return process state that tests must not change. It does not include random numbers."""
    state = process_state(random_numbers=False)
    del state["warnings.filters"]  # pytest restores it, and imports change it
    for name, value in state.pop("os.environ").items():
        if not _OF_OTHERS.fullmatch(name):
            state[f"os.environ[{name!r}]"] = value
    # Inductor imports setuptools, which adds its own packages.
    path = [entry for entry in sys.path if not entry.endswith("_vendor")]
    return state | {
        "sys.path": path,
        "sys.argv": list(sys.argv),
        "torch.library.get_ctx()": outcome(torch.library.get_ctx),
    }


@pytest.fixture
def fake_kernels_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test run fake kernels in several threads at once.

    PyTorch sets `global_ctx_getter` for the whole process, and restores the previous value after
    each fake kernel. If fake kernels run at the same time, the value of one of them may remain.
    """
    monkeypatch.setattr(fake_impl, "global_ctx_getter", fake_impl.global_ctx_getter)


@pytest.fixture(autouse=True)
def unchanged_process() -> Iterator[None]:
    """Fail a test that changes the state of the process, because the order of tests varies."""
    before = _shared_state()
    yield
    after = _shared_state()
    names = list(before)  # excludes accelerators that the test uses first
    changes = [(n, before[n], after.get(n)) for n in names if before[n] != after.get(n)]
    added = [n for n in after if n not in before and "accelerator" not in n]
    assert (changes, added) == ([], [])


def pytest_runtest_setup(item: pytest.Item) -> None:
    leave_guards_untimed()
    if item.get_closest_marker("cuda") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
