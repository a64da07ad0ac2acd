"""Fixtures for all tests."""

import itertools

import pytest
import torch

_numbers = itertools.count()


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test uses; operators live as long as the process.

    It is a number, not the name of the test: words of the name would turn up in error messages,
    and then match what the test expects to find there.
    """
    return f"t{next(_numbers)}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
