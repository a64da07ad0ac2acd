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

# Before torchop is imported: tests run with native calls, as users' programs do. TORCHOP_NATIVE=0
# tests without them. The extension is compiled once, into the working tree.
os.environ.setdefault("TORCHOP_NATIVE", "require")
os.environ.setdefault("TORCHOP_CACHE_DIR", str(Path(__file__).parents[1] / ".native_cache"))
# Idle OpenMP threads must not spin, because they would take processor time from the other workers.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Inductor compiles in the process itself: starting its pool of processes takes longer than
# compiling the small programs of tests.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Without vector instructions, Inductor compiles no programs that detect them and no headers for
# them, which takes a third of the time. Operators are called, not compiled.
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
# These files iterate over all operators or objects of the process, which takes ten times as long
# after the other tests.
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
# Files that take ten CPU-seconds or more run next, so that no worker ends with one of them alone.
LONGEST = (
    "project/test_site.py",
    "project/test_benchmarks.py",
    "testing/check/test_zoo.py",
    "integration/test_device.py",
    "project/test_typing.py",  # where mypy has read nothing yet
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

# Objects of a compiler live until it has compiled, so frequent garbage collection is useless and
# takes a twentieth of the time.
gc.set_threshold(10_000, 20, 10)

# pytest adds a handler to loggers that do not propagate. With a handler on this logger, PyTorch
# formats each compiled graph, which takes a tenth of the compile time.
logging.getLogger("torch.__trace").propagate = True

_numbers = itertools.count()


def pytest_configure(config: pytest.Config) -> None:
    # A shell script starts background jobs with SIGINT ignored, and a process inherits that. Tests
    # need Python's usual handler.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    free_threads.pytest_configure(config)
    releases.pytest_configure(config)
    combinations.pytest_configure(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Import all tests without garbage collection, which would take a fourth of the time."""
    # The first backward starts a thread for each accelerator. After the first fake tensor on a GPU,
    # a forked process could not start them, so run a backward before any test.
    torch.ones(1, requires_grad=True).sum().backward()
    gc.disable()
    try:
        _import_in_turns(session.config)
        return (yield)
    finally:
        gc.enable()


def _import_in_turns(config: pytest.Config) -> None:
    """Import all tests, where several processes do, beginning with other files in each.

    pytest caches the rewritten asserts of a file. If all workers began with the same file, all of
    them would rewrite it.
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

    It has a number instead of the name of the test, whose words could match expected messages.
    """
    # torch.export searches every namespace in this list for decompositions. With the namespaces of
    # hundreds of tests, that takes longer than exporting.
    torch.ops._dir[:] = ["aten"]
    return f"t{next(_numbers)}"


@pytest.fixture(autouse=True, scope="module")
def frozen_objects() -> None:
    """Exclude existing objects from garbage collection during the tests of a file.

    Collecting all objects of PyTorch takes a second, and some tests collect hundreds of times.
    """
    gc.collect()
    gc.freeze()


# Environment variables that pytest and Inductor change.
_OF_OTHERS = re.compile(r"PYTEST_CURRENT_TEST|_?TORCHINDUCTOR_\w+|TRITON_\w+")


def _shared_state() -> dict[str, Any]:
    """Return the state that tests of a process share, except random numbers."""
    state = process_state(random_numbers=False)
    del state["warnings.filters"]  # pytest restores it, and imports add to it
    for name, value in state.pop("os.environ").items():
        if not _OF_OTHERS.fullmatch(name):
            state[f"os.environ[{name!r}]"] = value
    # setuptools, which Inductor imports, adds its own packages.
    path = [entry for entry in sys.path if not entry.endswith("_vendor")]
    return state | {
        "sys.path": path,
        "sys.argv": list(sys.argv),
        "torch.library.get_ctx()": outcome(torch.library.get_ctx),
    }


@pytest.fixture
def fake_kernels_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test run fake kernels in several threads at once.

    PyTorch sets what torch.library.get_ctx returns for the whole process, and puts back after each
    fake kernel what it found before. So the context of a thread may stay when all have ended.
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
