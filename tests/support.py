"""What several test files need: one scenario, run on torchop and on torch.library."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import torchop


class Both(NamedTuple):
    """What a scenario returned, or the exception it raised."""

    ours: Any
    stock: Any


def on_both(scenario: Callable[[Any, str], Any], namespace: str) -> Both:
    """Runs `scenario(library, namespace)` with torchop, and with torch.library.

    A test that asserts on both halves shows that its scenario can tell right from wrong.
    """
    ours = _outcome(scenario, torchop, namespace)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock = _outcome(scenario, torch.library, f"{namespace}_stock")
    return Both(ours, stock)


def _outcome(scenario: Callable[[Any, str], Any], library: Any, namespace: str) -> Any:
    try:
        return scenario(library, namespace)
    except Exception as error:
        return error
