"""Fixtures for all tests."""

import contextlib
import gc
import importlib
import itertools
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before torchop is imported: every test sees the operators that users get, with native calls. Set
# TORCHOP_NATIVE=0 to test without. The extension is compiled once, and kept in the working tree.
os.environ.setdefault("TORCHOP_NATIVE", "require")
os.environ.setdefault("TORCHOP_CACHE_DIR", str(Path(__file__).parents[1] / ".native_cache"))
# Each of two test processes has a thread of OpenMP for each processor. They would wait for the next
# piece of work by taking time of the processor, from the other process, and a test that needs large
# tensors would take twice as much of it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Inductor compiles in the process itself. Its pool, which each program of a test would start, has
# processes that import PyTorch, and takes longer than what tests let it compile.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Nor does it look for vector instructions, for which it compiles a program for each kind, and then
# headers that make each program of a test take half as long again. An operator is called, and not
# compiled.
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
# They look at all operators or objects of the process, which takes ten times as long when all of
# the other tests have defined theirs.
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
# Those that take ten seconds of a processor and more, so that no process is left with one of them
# at the end. A new file that does belongs here.
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

# What a compiler makes lives until it has compiled. Python would look for garbage among it after
# every 700 objects, which takes a twentieth of the time of such tests.
gc.set_threshold(10_000, 20, 10)

# pytest listens to all loggers that do not propagate. PyTorch writes each graph of a compile as
# text, which is a tenth of the compile, as soon as somebody listens to this one.
logging.getLogger("torch.__trace").propagate = True

_numbers = itertools.count()


def pytest_configure(config: pytest.Config) -> None:
    free_threads.pytest_configure(config)
    releases.pytest_configure(config)
    combinations.pytest_configure(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Imports all tests without looking for garbage among what stays, a fourth of the time."""
    # The first backward starts a thread for each accelerator there is, after which no fork of the
    # process can run one. So it is here, where the stand-in is there and no fake tensor was: after
    # one on a GPU, a build for CUDA counts that, too.
    torch.ones(1, requires_grad=True).sum().backward()
    gc.disable()
    try:
        _import_in_turns(session.config)
        return (yield)
    finally:
        gc.enable()


def _import_in_turns(config: pytest.Config) -> None:
    """Imports all tests, where several processes do, beginning with other files in each.

    pytest rewrites the asserts of a file that it has not met before, which takes as long as to
    import it, and keeps the result. All processes would do that for the same files at once.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or [Path(name).resolve() for name in config.args] != [FOLDER]:
        return
    files = sorted(
        {*FOLDER.rglob("test_*.py")} - {*(FOLDER / "integration" / "device").rglob("test_*.py")}
    )
    start = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for file in files[start:] + files[:start]:
        # What cannot be imported, pytest tries again, and tells.
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
    """A namespace that no other test uses; operators live as long as the process.

    It is a number, not the name of the test: words of the name would turn up in error messages,
    and then match what the test expects to find there.
    """
    # To export a program, PyTorch asks each namespace of this list for decompositions, and the
    # dispatcher for all operators each time, which took longer than the rest with those of hundreds
    # of tests. They stay attributes of torch.ops. Those of this test join the list.
    torch.ops._dir[:] = ["aten"]
    return f"t{next(_numbers)}"


@pytest.fixture(autouse=True, scope="module")
def frozen_objects() -> None:
    """Keeps collections from looking at what is there before the tests of a file.

    That is all of PyTorch: a collection would take a second, and some tests make hundreds.
    """
    gc.collect()
    gc.freeze()


# Variables that pytest and Inductor set for themselves.
_OF_OTHERS = re.compile(r"PYTEST_CURRENT_TEST|_?TORCHINDUCTOR_\w+|TRITON_\w+")


def _shared_state() -> dict[str, Any]:
    """What the tests of a process share, without random numbers, which change on purpose."""
    state = process_state(random_numbers=False)
    del state["warnings.filters"]  # which pytest puts back, and what is imported adds to
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
    """Lets a test run fake kernels in several threads at once.

    PyTorch sets what torch.library.get_ctx returns for the whole process, and puts back after each
    fake kernel what it found before. So the context of a thread may stay when all have ended.
    """
    monkeypatch.setattr(fake_impl, "global_ctx_getter", fake_impl.global_ctx_getter)


@pytest.fixture(autouse=True)
def unchanged_process() -> Iterator[None]:
    """Fails a test that leaves the process changed: which tests come after it is chance."""
    before = _shared_state()
    yield
    after = _shared_state()
    names = list(before)  # an accelerator that the test is the first to use is none of them
    changes = [(n, before[n], after.get(n)) for n in names if before[n] != after.get(n)]
    added = [n for n in after if n not in before and "accelerator" not in n]
    assert (changes, added) == ([], [])


def pytest_runtest_setup(item: pytest.Item) -> None:
    leave_guards_untimed()
    if item.get_closest_marker("cuda") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
