"""Fixtures for all tests."""

import gc
import itertools
import os
from pathlib import Path

# Before torchop is imported: every test sees the operators that users get, with native calls. Set
# TORCHOP_NATIVE=0 to test without. The extension is compiled once, and kept in the working tree.
os.environ.setdefault("TORCHOP_NATIVE", "require")
os.environ.setdefault("TORCHOP_CACHE_DIR", str(Path(__file__).parents[1] / ".native_cache"))

import pytest
import torch

from tests.releases import pytest_collection_modifyitems, pytest_configure  # noqa: F401  # hooks

_numbers = itertools.count()


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test uses; operators live as long as the process.

    It is a number, not the name of the test: words of the name would turn up in error messages,
    and then match what the test expects to find there.
    """
    return f"t{next(_numbers)}"


@pytest.fixture(autouse=True, scope="module")
def frozen_objects() -> None:
    """Keeps collections from looking at what is there before the tests of a file.

    That is all of PyTorch: a collection would take a second, and some tests make hundreds.
    """
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
