"""installing: the code of a function with a change, of every kind of function, and its end."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from tests.testing.mutate import operators
from torchop._inspect.authored import _authored
from torchop.testing._mutate.installing import CannotChangeError, installed, mutants_of

THREE = torch.full((1,), 3.0)


def first(function: Any) -> tuple[Any, types.CodeType, Any]:
    (function, *_) = [f for f in _authored(function, set()) if f is not operators.wrapped]
    mutant, code = next(mutants_of(function, "kernel"))
    return mutant, code, function


@pytest.mark.parametrize(
    ("function", "before", "after"),
    [
        (operators.helper, 6, 1.5),
        (operators.Kernels().method, 4, 2),
        (operators.closing_over(2.0), 5, 1),
        (operators.adding, 4, 2),
        (operators.subtracting, 2, 4),
    ],
    ids=["function", "method", "closure", "lambda", "lambda beside it"],
)
def test_a_function_gets_other_code_for_a_while(function: Any, before: float, after: float) -> None:
    mutant, code, authored = first(function)
    assert function(THREE).item() == before
    with installed(authored, code):
        assert function(THREE).item() == after
    assert function(THREE).item() == before
    assert mutant.file == operators.__file__
    assert mutant.diff.startswith("--- operators.py\n+++ operators.py, changed\n@@")


def test_below_a_decorator_the_authors_function_is_changed() -> None:
    names = [f.__name__ for f in _authored(operators.decorated, set())]
    assert names == ["decorated", "decorated"]  # what the decorator returns, and the author's
    _, inner = _authored(operators.decorated, set())
    mutants = {mutant.change: code for mutant, code in mutants_of(inner, "kernel")}
    with installed(inner, mutants["- to +"]):
        assert operators.decorated(THREE).item() == 7
    assert operators.decorated(THREE).item() == 5


def test_a_change_that_no_longer_uses_a_variable_of_the_closure() -> None:
    """Otherwise the function would close over one variable fewer, which Python refuses."""
    function = operators.make_scale("unused_closure")._backward_fn
    for _, code in mutants_of(function, "backward"):
        with installed(function, code):
            pass
    inner = operators.wrapped(operators.helper)
    codes = {mutant.change: code for mutant, code in mutants_of(inner, "backward")}
    with installed(inner, codes["gradient None"]):
        assert inner(THREE) is None
    assert inner(THREE).item() == 6


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_the_code_comes_back_however_the_block_ends(error: type[BaseException]) -> None:
    _, code, function = first(operators.helper)
    before = function.__code__
    with pytest.raises(error), installed(function, code):
        raise error
    assert function.__code__ is before


def test_no_source_and_another_source_are_refused(tmp_path: Any) -> None:
    scope: dict[str, Any] = {}
    exec("def f(x):\n    return x + 1\n", scope)
    with pytest.raises(CannotChangeError, match=r"the source is not to be found \(<string>\)"):
        next(mutants_of(scope["f"], "kernel"))
    file = tmp_path / "edited.py"
    file.write_text("def f(x):\n    return x + 2\n")
    exec(compile("def f(x):\n    return x + 1\n", str(file), "exec"), scope)
    with pytest.raises(CannotChangeError, match="its source is not what runs: it changed after"):
        next(mutants_of(scope["f"], "kernel"))
