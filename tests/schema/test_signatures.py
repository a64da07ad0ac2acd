"""The annotations of a function are resolved, however they are written. Uses private names."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable
from typing import Any, Optional

import pytest
import torch
from torch import Tensor

from tests._support import strategies
from torchop import SchemaError
from torchop._schema import signatures

Alias = Optional[Tensor]


def annotations(function: Callable[..., Any]) -> list[Any]:
    signature = signatures.signature(function)
    return [p.annotation for p in signature.parameters.values()] + [signature.return_annotation]


@pytest.mark.parametrize(
    ("annotation", "resolved"),
    [
        ("'Tensor'", Tensor),
        ("'Optional[Tensor]'", Optional[Tensor]),
        ("Optional['Tensor']", Optional[Tensor]),
        ("'Optional[\"Tensor\"]'", Optional[Tensor]),
        ("list['Tensor']", list[Tensor]),
        ("Optional[list['Tensor']]", Optional[list[Tensor]]),
        ("list[Optional['Tensor']]", list[Optional[Tensor]]),
        ("typing.Annotated[Tensor, 'a note']", Tensor),
        ("'typing.Annotated[int, \"not a type\"]'", int),
        ("list[typing.Annotated['Tensor', 'n m']]", list[Tensor]),
        ("typing.Literal['Tensor']", typing.Literal["Tensor"]),
        ("tuple['Tensor', ...]", tuple[Tensor, ...]),
        ("typing.Callable[['int'], int]", typing.Callable[["int"], int]),
        ("int | None", Optional[int]),
    ],
)
@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
def test_strings_in_annotations_become_types(future: str, annotation: str, resolved: Any) -> None:
    function = strategies.make_function(f"{future}def f(x: {annotation}) -> {annotation}: ...")
    assert annotations(function) == [resolved, resolved]


@pytest.mark.parametrize(
    ("name", "resolved"),
    [
        ("Tensor", Tensor),
        ("device", torch.device),
        ("dtype", torch.dtype),
        ("types.Number", torch.types.Number),
        ("torch.dtype", torch.dtype),
        ("Optional[int]", Optional[int]),
        ("List[int]", typing.List[int]),
        ("Sequence[int]", typing.Sequence[int]),
        ("Union[int, float, bool]", torch.types.Number),
    ],
)
def test_implicit_names_need_no_import(name: str, resolved: Any) -> None:
    module: dict[str, Any] = {}
    exec(f"def f(x: {name!r}) -> None: ...", module)
    assert annotations(module["f"]) == [resolved, None]


def test_a_name_of_the_module_wins_over_an_implicit_one() -> None:
    module: dict[str, Any] = {"Tensor": int}
    exec("def f(x: 'Tensor') -> None: ...", module)
    assert annotations(module["f"]) == [int, None]


def test_a_name_that_the_body_closes_over_wins_over_one_of_the_module() -> None:
    Alias = int

    def crop(x: Alias) -> list[Alias]:
        return [Alias(x)]

    assert annotations(crop) == [int, list[int]]


def test_a_closure_that_is_not_filled_yet_is_skipped() -> None:
    def crop(x: Tensor) -> Tensor:
        return later(x)

    found = annotations(crop)

    def later(x: Tensor) -> Tensor: ...

    assert found == [Tensor, Tensor]


# --------------------------------------------------------------------------------------------------
# Kinds of functions


def crop(pic: Tensor, box: list[int], *, scale: Alias = None) -> Tensor: ...


class Cropper:
    def method(self, pic: Tensor, box: list[int], *, scale: Alias = None) -> Tensor: ...

    @classmethod
    def class_method(cls, pic: Tensor, box: list[int], *, scale: Alias = None) -> Tensor: ...

    @staticmethod
    def static(pic: Tensor, box: list[int], *, scale: Alias = None) -> Tensor: ...

    def __call__(self, pic: Tensor, box: list[int], *, scale: Alias = None) -> Tensor: ...


class InheritedCropper(Cropper):
    pass


def wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
    # Define the wrapper in a different module. The names of that module must not be used to resolve
    # the annotations of the wrapped function.
    module = {"functools": functools}
    exec(
        "def wrap(f):\n    @functools.wraps(f)\n    def inner(*a): return f(*a)\n    return inner",
        module,
    )
    return typing.cast("Callable[..., Any]", module["wrap"])(function)  # type: ignore[operator]


@pytest.mark.parametrize(
    "function",
    [
        crop,
        Cropper().method,
        Cropper.class_method,
        Cropper.static,
        Cropper(),
        InheritedCropper(),
        wrapper(crop),
        functools.partial(crop),
        functools.partial(wrapper(crop)),
        wrapper(functools.partial(crop)),
        functools.partial(functools.partial(Cropper().method)),
    ],
    ids=lambda function: str(signatures.spell_function(function)),
)
def test_annotations_are_looked_up_where_the_function_is_defined(
    function: Callable[..., Any],
) -> None:
    assert annotations(function) == [Tensor, list[int], Optional[Tensor], Tensor]


def test_a_partial_has_the_parameters_that_are_left() -> None:
    assert annotations(functools.partial(crop, torch.ones(1))) == [
        *(list[int], Optional[Tensor], Tensor)
    ]


@pytest.mark.parametrize("function", [torch.neg, torch.add, 3, "crop"])
def test_callable_without_a_signature_is_rejected(function: Any) -> None:
    with pytest.raises(SchemaError, match=r"no signature to infer .*pass schema=") as caught:
        signatures.signature(function)
    assert len(str(caught.value)) < 400


# --------------------------------------------------------------------------------------------------
# Annotations that are not types


@pytest.mark.parametrize(
    ("annotation", "reason"),
    [
        ("Tensr", "name 'Tensr' is not defined"),
        ("torch.Tensr", "has no attribute 'Tensr'"),
        ("Tensor[", "never closed"),
        ("1 / 0", "division by zero"),
        ("Optional['Tensr']", "name 'Tensr' is not defined"),
        ("raises('long ' * 1000)", "long long long"),
        ("a_long_name" * 100, "name 'a_long_namea_long_name"),
    ],
)
@pytest.mark.parametrize("place", ["parameter 'x'", "return"])
def test_an_annotation_that_is_no_type_is_refused(place: str, annotation: str, reason: str) -> None:
    x, result = (annotation, "int") if place != "return" else ("int", annotation)

    def raises(message: str) -> None:
        raise RuntimeError(message)

    source = f"def crop(x: {x!r}) -> {result!r}: ..."
    function = strategies.make_function(source, raises=raises)
    with pytest.raises(SchemaError, match="Unsupported type annotation") as caught:
        signatures.signature(function)
    message = str(caught.value)
    assert message.startswith("generated.crop: Unsupported type annotation ")
    assert f"It is not a type. Evaluating it for {place} raised: " in message
    assert reason in message
    assert len(message) < 400
