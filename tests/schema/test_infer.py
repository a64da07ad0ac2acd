"""infer_schema reads schemas from annotations, and rejects unsupported functions.

Uses private names.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, List, Optional

import pytest
import torch
from hypothesis import assume, given
from torch import Tensor
from torch._library.infer_schema import SUPPORTED_PARAM_TYPES, SUPPORTED_RETURN_TYPES

import torchop
from tests._support import strategies
from tests._support.common import is_defined
from tests._support.releases import GENERATOR, needs_enums
from torchop import SchemaError
from torchop._schema.tree import FunctionTree
from torchop.extend import Schema


class Mode(enum.Enum):
    SUM = 1


NEGATE = "(Tensor x) -> Tensor"


def parse(text: str) -> Schema:
    return Schema(torch._C.parse_schema(f"f{text}"))


# --------------------------------------------------------------------------------------------------
# Supported signatures


def one_tensor(x: Tensor) -> Tensor: ...
def every_kind(a: Tensor, b: int, *, c: float = 1.5, d: Optional[str] = None) -> None: ...
def lists(a: List[Optional[Tensor]], b: list[int] | None = None) -> list[Tensor]: ...
def implicit_optional(x: Tensor, n: int = None) -> Tensor: ...  # noqa: RUF013  (as in PEP 484)
def objects(mode: Mode, generator: torch.Generator) -> Tensor: ...
def nothing() -> tuple[Tensor, int]: ...


@pytest.mark.parametrize(
    ("function", "schema"),
    [
        (one_tensor, "(Tensor x) -> Tensor"),
        (every_kind, "(Tensor a, SymInt b, *, float c=1.5, str? d=None) -> ()"),
        (lists, "(Tensor?[] a, SymInt[]? b=None) -> Tensor[]"),
        (implicit_optional, "(Tensor x, SymInt? n=None) -> Tensor"),
        pytest.param(
            objects, f"(enum.Enum mode, {GENERATOR} generator) -> Tensor", marks=needs_enums
        ),
        (nothing, "() -> (Tensor, SymInt)"),
    ],
)
def test_annotations_become_the_schema(function: Callable[..., Any], schema: str) -> None:
    assert torchop.infer_schema(function, mutates_args=()) == schema


def test_op_name_comes_before_the_schema() -> None:
    inferred = torchop.infer_schema(one_tensor, mutates_args=(), op_name="crop")
    assert inferred == "crop(Tensor x) -> Tensor"


def writes(
    a: Tensor, n: int, b: list[Tensor], c: Optional[Tensor], d: list[Optional[Tensor]]
) -> None: ...


@pytest.mark.parametrize(
    ("mutates_args", "schema"),
    [
        ((), "(Tensor a, SymInt n, Tensor[] b, Tensor? c, Tensor?[] d) -> ()"),
        (["a"], "(Tensor(a0!) a, SymInt n, Tensor[] b, Tensor? c, Tensor?[] d) -> ()"),
        (
            {"b", "d"},
            "(Tensor a, SymInt n, Tensor(a2!)[] b, Tensor? c, Tensor(a4!)?[] d) -> ()",
        ),
        (
            "unknown",
            "(Tensor(a0!) a, SymInt n, Tensor(a2!)[] b, Tensor(a3!)? c, Tensor(a4!)?[] d) -> ()",
        ),
    ],
)
def test_mutates_args_marks_the_tensors_it_names(mutates_args: Any, schema: str) -> None:
    assert torchop.infer_schema(writes, mutates_args=mutates_args) == schema


def test_mutates_args_may_be_an_iterator() -> None:
    inferred = torchop.infer_schema(writes, mutates_args=iter(["a", "c"]))
    assert parse(inferred).mutated == ("a", "c")


@strategies.stable
@given(strategies.signatures())
def test_every_supported_signature_survives_pytorchs_parser(
    signature: strategies.Signature,
) -> None:
    schema = parse(torchop.infer_schema(signature.function([]), mutates_args=()))
    assert len(schema.arguments) == len(signature.parameters)
    for argument, parameter in zip(schema.arguments, signature.parameters, strict=True):
        optional = "?" if parameter.default is None and not parameter.schema.endswith("?") else ""
        (expected,) = parse(f"({parameter.schema}{optional} x) -> ()").arguments
        assert argument.name == parameter.name
        assert argument.kind == expected.kind
        assert argument.keyword_only == parameter.keyword_only
        assert argument.has_default == parameter.has_default
        if parameter.has_default:
            assert same(argument.default, parameter.default)


@strategies.stable
@given(strategies.signatures())
def test_every_supported_signature_defines_an_operator_that_sees_its_arguments(
    namespace: str, signature: strategies.Signature
) -> None:
    seen: list[dict[str, Any]] = []
    given = {p.name: p.value for p in signature.parameters}
    required = {p.name: p.value for p in signature.parameters if not p.has_default}
    defaults = {p.name: p.default for p in signature.parameters if p.has_default}
    with torchop.Library(namespace, "FRAGMENT") as library:
        function = signature.function(seen)
        op = torchop.custom_op(
            f"{namespace}::f", function, mutates_args=(), effects="none", lib=library
        )
        op(**given)
        op(**required)
        # A kernel that has no defaults must get the schema's defaults.
        op.register_kernel(None)(signature.function_without_defaults(seen))
        op(**given)
        op(**required)
    assert len(seen) == 4
    for arguments, expected in zip(seen, [given, required | defaults] * 2, strict=True):
        assert arguments.keys() == expected.keys()
        for parameter, value in expected.items():
            assert same(arguments[parameter], value), parameter


def same(left: Any, right: Any) -> bool:
    """Compare two values like ==, but tell 0.0 from -0.0, and let a tuple equal a list."""
    if isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(right, Tensor):
        return left is right
    if isinstance(right, float):
        return repr(left) == repr(right)
    return type(left) is type(right) and left == right


# --------------------------------------------------------------------------------------------------
# Rejected signatures


@strategies.stable
@given(strategies.unsupported())
def test_every_unsupported_signature_is_refused_in_few_words(
    signature: strategies.Unsupported,
) -> None:
    with pytest.raises(SchemaError) as caught:
        torchop.infer_schema(signature.function(), mutates_args=())
    message = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert len(message) < 400
    for mention in signature.mentions:
        assert mention in message


def has_structure(name: str, function: Callable[..., Any]) -> bool:
    """Return whether the function has structured arguments, which only `custom_op` accepts."""
    try:
        return not FunctionTree(function, ()).is_plain
    except SchemaError:
        return False
    except NotImplementedError:
        return True  # it has a structure, rejected for another reason


@strategies.stable
@given(strategies.unsupported())
def test_a_refused_signature_leaves_its_name_free(
    namespace: str, signature: strategies.Unsupported
) -> None:
    name = f"{namespace}::f"
    assume(not has_structure(name, signature.function()))
    with torchop.Library(namespace, "FRAGMENT") as library:
        with pytest.raises(SchemaError):
            torchop.custom_op(name, signature.function(), mutates_args=(), lib=library)
        assert not is_defined(name)
        op = torchop.custom_op(name, torch.neg, schema=NEGATE, mutates_args=(), lib=library)
        assert op(torch.ones(())) == -1


@pytest.mark.parametrize("annotation", SUPPORTED_PARAM_TYPES, ids=str)
def test_each_parameter_type_of_torch_library_has_its_schema(annotation: Any) -> None:
    def function(x): ...

    function.__annotations__ = {"x": annotation, "return": None}
    ours = torchop.infer_schema(function, mutates_args=())
    assert ours == torch.library.infer_schema(function, mutates_args=())


@pytest.mark.parametrize("annotation", SUPPORTED_RETURN_TYPES, ids=str)
def test_each_result_type_of_torch_library_has_its_schema(annotation: Any) -> None:
    def function(x): ...

    function.__annotations__ = {"x": Tensor, "return": annotation}
    ours = torchop.infer_schema(function, mutates_args=())
    assert ours == torch.library.infer_schema(function, mutates_args=())


@pytest.mark.parametrize("annotation", strategies.UNSUPPORTED_TYPES)
def test_an_unsupported_type_is_refused_with_the_nearest_one(annotation: str) -> None:
    function = strategies.make_function(f"def crop(x: Tensor, box: {annotation}) -> Tensor: ...")
    near = strategies.UNSUPPORTED_TYPES[annotation]
    with pytest.raises(SchemaError, match=r"generated\.crop: parameter 'box' ") as caught:
        torchop.infer_schema(function, mutates_args=())
    found, _, suggested = str(caught.value).partition("; ")
    assert "unsupported type " in found
    assert suggested.startswith(strategies.start_of_suggestion(near))


@pytest.mark.parametrize(("annotation", "default", "problem"), strategies.UNSUPPORTED_DEFAULTS)
def test_an_unsupported_default_is_refused(annotation: str, default: Any, problem: str) -> None:
    source = f"def crop(box: {annotation} = default) -> Tensor: ..."
    function = strategies.make_function(source, default=default)
    with pytest.raises(SchemaError, match=r"parameter 'box' \(.*\) has the unsupp") as caught:
        torchop.infer_schema(function, mutates_args=())
    assert problem in str(caught.value)


@needs_enums
def test_an_enum_default_is_refused() -> None:
    def crop(x: Tensor, mode: Mode = Mode.SUM) -> Tensor: ...

    with pytest.raises(SchemaError, match=r"parameter 'mode' .*unsupported default <Mode.SUM: 1>"):
        torchop.infer_schema(crop, mutates_args=())


@pytest.mark.parametrize("name", ["größe", "NoneType", "é" * 300])
def test_a_parameter_name_that_a_schema_cannot_hold_is_refused(name: str) -> None:
    function = strategies.make_function(f"def crop({name}: int) -> Tensor: ...")
    with pytest.raises(SchemaError, match=r"ASCII letters, .* not a keyword") as caught:
        torchop.infer_schema(function, mutates_args=())
    assert f"parameter '{name}"[:40] in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_function_without_a_return_annotation_is_refused() -> None:
    def crop(x: Tensor): ...

    with pytest.raises(SchemaError, match=r"crop: No return type .* -> Tensor, or -> None"):
        torchop.infer_schema(crop, mutates_args=())


@pytest.mark.parametrize(
    ("mutates_args", "error", "words"),
    [
        ("y", SchemaError, ["mutates_args='y'", "string 'unknown'", "mutates_args=('y',)"]),
        ("", SchemaError, ["mutates_args=''", "that mutates nothing write mutates_args=()."]),
        (["y"], SchemaError, ["{'y'} in mutates_args were not found", "a, b, c, d"]),
        ({"z", "y", "a"}, SchemaError, ["{'y', 'z'} in mutates_args were not found"]),
        (["a", "n"], SchemaError, ["names 'n' of type int", "only tensors", "a, b, c, d"]),
        ([3], SchemaError, ["mutates_args holds 3", "as strings"]),
        (None, TypeError, ["mutates_args=None", "mutates_args=()"]),
    ],
)
@pytest.mark.parametrize("define", [torchop.infer_schema, torchop.custom_op])
def test_mutates_args_that_names_no_tensor_is_refused(
    namespace: str, define: Any, mutates_args: Any, error: type[Exception], words: list[str]
) -> None:
    arguments = (writes,) if define is torchop.infer_schema else (f"{namespace}::f", writes)
    with pytest.raises(error) as caught:
        define(*arguments, mutates_args=mutates_args)
    message = str(caught.value)
    assert [word for word in words if word not in message] == []
    assert message.startswith((f"{namespace}::f: ", f"{writes.__module__}.writes: "))
    assert len(message) < 400
    assert not is_defined(f"{namespace}::f")


def test_mutates_args_without_a_tensor_to_name_says_so() -> None:
    def count(n: int) -> None: ...

    with pytest.raises(SchemaError, match="the tensor arguments are none"):
        torchop.infer_schema(count, mutates_args=["n"])


@pytest.mark.parametrize("annotation", ["Tensor", "Optional[Tensor]", "list[Tensor]"])
def test_a_keyword_only_tensor_can_be_inferred_but_not_defined(
    namespace: str, annotation: str
) -> None:
    function = strategies.make_function(f"def f(x: Tensor, *, weight: {annotation}) -> Tensor: ...")
    assert ", *, Tensor" in torchop.infer_schema(function, mutates_args=())
    with pytest.raises(NotImplementedError, match=r"kwarg-only Tensor args \(weight\)"):
        torchop.custom_op(f"{namespace}::f", function, mutates_args=())
    assert not is_defined(f"{namespace}::f")


def test_an_iterator_and_a_string_reach_the_definition_of_an_operator(namespace: str) -> None:
    op = torchop.custom_op(f"{namespace}::f", writes, mutates_args=iter(["a"]))
    assert "Tensor(a0!) a" in str(op.schema)
    with pytest.raises(SchemaError, match=rf"^{namespace}::g: mutates_args='a': expected a seq"):
        torchop.custom_op(f"{namespace}::g", writes, mutates_args="a")
