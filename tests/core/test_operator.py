from __future__ import annotations

import types
import warnings
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import torchop
from torchop.extend import Operator, warn


class Pair(NamedTuple):
    """A structure of two tensors, which becomes two arguments in a schema."""

    left: Tensor
    right: Tensor


def test_an_operator_lists_its_registrations(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::double", mutates_args=(), device_types="cpu")
    def double(x: Tensor) -> Tensor:
        return x * 2

    double.register_fake(lambda x: torch.empty_like(x))
    operator = Operator(f"{namespace}::double", "tool")
    assert (operator.handle, operator.overload) == (double, double.overload)
    assert operator.kernels == ["cpu"]
    assert any("fake" in text for text in operator.rules)
    assert operator.site is not None
    assert operator.site.file == __file__
    assert operator.exists
    assert operator.has_kernel("CPU")
    assert list(operator.signature.parameters) == ["x"]


def test_handle_arguments_become_schema_arguments(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::add", mutates_args=())
    def add(pair: Pair) -> Tensor:
        return pair.left + pair.right

    pair = Pair(torch.ones(1), torch.zeros(1))
    operator = Operator(add, "tool")
    assert operator.takes_structures
    args, kwargs = operator.flat_arguments((pair,), {})
    assert torch.equal(operator.overload(*args, **kwargs), add(pair))
    flat = operator.flat_function(lambda pair: pair.left - pair.right)
    assert torch.equal(flat(*args, **kwargs), torch.ones(1))
    by_name = Operator(f"{namespace}::add", "tool")
    assert by_name.flat_arguments(args, kwargs) == (args, kwargs)


def test_an_undefined_operator_is_reported_when_it_is_used(namespace: str) -> None:
    operator = Operator(f"{namespace}::nothing", "tool")
    assert not operator.exists
    with pytest.raises(torchop.OperatorNotFoundError, match=f"{namespace}::nothing does not exist"):
        operator.schema  # noqa: B018  # reading the attribute raises


@pytest.mark.parametrize("module", ["some_tool.checks", "some_tool"])
def test_tool_warning_points_at_the_users_line(module: str) -> None:
    tool = types.ModuleType(module)
    vars(tool)["warn"] = warn
    source = "def check():\n    warn('nothing was called', UserWarning)\n"
    exec(compile(source, "checks.py", "exec"), vars(tool))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tool.check()
    assert [each.filename for each in caught] == [__file__]


def test_a_warning_of_a_script_is_at_its_own_line() -> None:
    script = {"__name__": "__main__", "warn": warn}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile("warn('nothing was called', UserWarning)", "script.py", "exec"), script)
    assert [each.filename for each in caught] == ["script.py"]
