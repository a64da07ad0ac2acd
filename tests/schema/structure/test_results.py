from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import torchop
from torchop import ResultError, SchemaError


class Sorted(NamedTuple):
    values: Tensor
    order: Optional[Tensor]


@dataclasses.dataclass
class Split:
    whole: Tensor
    parts: tuple[Tensor, ...]


def optional(x: Tensor, given: bool = True) -> Optional[Tensor]:
    return x + 1 if given else None


def with_optional(x: Tensor, given: bool = True) -> tuple[Tensor, Optional[Tensor]]:
    return x + 1, x + 2 if given else None


def several(x: Tensor, given: bool = True) -> tuple[Tensor, ...]:
    return (x + 1, x + 2) if given else ()


def named(x: Tensor, given: bool = True) -> Sorted:
    return Sorted(x + 1, x + 2 if given else None)


def split(x: Tensor, given: bool = True) -> Split:
    return Split(x + 1, (x + 2, x + 3) if given else ())


def nested(x: Tensor, given: bool = True) -> tuple[Sorted, list[Tensor]]:
    return named(x, given), [x + 3]


FORMS: dict[str, tuple[Callable[..., Any], str]] = {
    "Optional[Tensor]": (optional, "Tensor?"),
    "optional entry": (with_optional, "(Tensor, Tensor?)"),
    "tuple[Tensor, ...]": (several, "Tensor[]"),
    "NamedTuple": (named, "(Tensor, Tensor?)"),
    "dataclass": (split, "(Tensor, Tensor[])"),
    "nested": (nested, "(Tensor, Tensor?, Tensor[])"),
}


def fake_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Use the function itself as its fake kernel, because the function does not read data."""
    return lambda x, given=True: function(torch.empty_like(x), given)


def define(namespace: str, form: str) -> tuple[Any, Callable[..., Any]]:
    function, returned = FORMS[form]
    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    assert op._schema.endswith(f") -> {returned}")
    op.register_fake(fake_of(function))
    return op, function


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if dataclasses.is_dataclass(expected):
        assert_same(tuple(vars(found).items()), tuple(vars(expected).items()))
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("form", list(FORMS))
def test_call_returns_the_functions_result(namespace: str, form: str, given: bool) -> None:
    op, function = define(namespace, form)
    x = torch.arange(3.0)
    for _ in range(2):
        assert_same(op(x, given), function(x, given))
    with torchop.native.disabled():
        assert_same(op(x, given=given), function(x, given))
    compiled = torch.compile(lambda x: op(x, given), fullgraph=True, backend="aot_eager")
    assert_same(compiled(x), function(x, given))
    with FakeTensorMode() as mode:
        fake = op(mode.from_tensor(x), given)
    assert isinstance(fake, type(function(x, given)))


def test_vmap_of_structures(namespace: str) -> None:
    op, function = define(namespace, "nested")

    @op.register_vmap
    def _(info: Any, in_dims: Any, x: Tensor, given: bool = True) -> Any:
        return function(x.movedim(in_dims[0], 0), given), 0

    x = torch.arange(6.0).reshape(3, 2)
    mapped = torch.vmap(op, in_dims=1)(x)
    assert_same(mapped, function(x.t()))


def test_a_rule_for_a_mode_gets_and_returns_structured_results(namespace: str) -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    op, function = define(namespace, "NamedTuple")
    seen = []

    @op.register_torch_dispatch(Mode)
    def _(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        seen.append((func == op.overload, func.namespace, args[1]))
        return func(*args, **kwargs)._replace(order=None)

    with Mode():
        result = op(torch.ones(2))
    assert_same(result, function(torch.ones(2), given=False))
    assert seen == [(True, namespace, True)]


@dataclasses.dataclass
class Scale:
    factor: float
    weight: Tensor


def scaled_size(config: Scale, *, times: int = 1) -> tuple[Tensor, int]:
    return config.weight * config.factor, times


def named_scaled(config: Scale) -> Sorted:
    return Sorted(config.weight * config.factor, None)


def scaled(config: Scale) -> Tensor:
    return config.weight * config.factor


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        (scaled, r"def _\(config\):\n.*\n *return torch\.empty_like\(config\.weight\)\n"),
        (scaled_size, r"def _\(config, \*, times\):\n.*\n *return torch.*weight\), \.\.\.\n"),
        (named_scaled, r"return \.\.\.  # .*Sorted, as the kernel does\n"),
    ],
)
def test_a_missing_fake_kernel_is_shown_as_its_author_has_to_write_it(
    namespace: str, function: Callable[..., Any], shown: str
) -> None:
    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    meta = torch.empty(2, device="meta")
    with pytest.raises(torchop.MissingFakeError, match=shown):
        op(Scale(2.0, meta))


# --------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ((torch.ones(1),), "the result: expected Sorted, but the function returned a tuple of 1"),
        (None, "the result: expected Sorted, but the function returned a NoneType"),
        (Sorted(1.0, None), r"must return 2 values \(Tensor, Optional\[Tensor\]\)"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_result_is_refused(namespace: str, result: Any, message: str) -> None:
    def function(x: Tensor) -> Sorted:
        return result  # type: ignore[no-any-return]

    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    with pytest.raises(ResultError, match=message):
        op(torch.ones(1))


@dataclasses.dataclass
class Validated:
    values: Tensor
    rows: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.rows = self.values.shape[0]


@dataclasses.dataclass
class Unmade:
    values: Tensor
    rows: int = dataclasses.field(init=False, default=3)


@dataclasses.dataclass
class Endless:
    values: Tensor
    rest: Endless


def test_result_class_with_custom_init_is_rebuilt_by_it(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Validated:
        return Validated(x * 3)

    # The formula gets the gradients as an instance of the same class, created without calling
    # `__post_init__`.
    op.register_autograd(lambda ctx, grad: grad.values * 3)
    x = torch.ones(2, requires_grad=True)
    result = op(x)
    assert result.rows == 2
    result.values.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Unmade, r"Unmade cannot be a result: __init__ does not take the field 'rows'"),
        (
            Endless,
            r"the result\.rest is a .*Endless inside a .*Endless, so the schema would",
        ),
    ],
)
def test_result_that_cannot_be_rebuilt_is_rejected(namespace: str, cls: type, message: str) -> None:
    def function(x: Tensor) -> Any: ...

    function.__annotations__["return"] = cls
    with pytest.raises(SchemaError, match=message):
        torchop.custom_op(f"{namespace}::op", function, mutates_args=())


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        (dict[int, Tensor], r"unsupported type dict\[int, torch.Tensor\]; supported are Tensor"),
        (list[set[int]], r"unsupported type set\[int\] at 'the result\[\*\]'; .* lists and dicts"),
        (tuple[Tensor, set[int]], r"unsupported type set\[int\] at 'the result\[1\]'; supported"),
        (Callable[[], int], "unsupported type Callable.*; supported"),
    ],
)
def test_other_results_are_refused(namespace: str, annotation: Any, message: str) -> None:
    def function(x: Tensor) -> Any: ...

    function.__annotations__["return"] = annotation
    with pytest.raises(SchemaError, match=message):
        torchop.custom_op(f"{namespace}::op", function, mutates_args=())
