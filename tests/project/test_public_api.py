"""Public names are documented, and accept the same arguments as in torch.library.

Uses private names.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.library

import torchop
import torchop.compat
import torchop.export
import torchop.extend
import torchop.native
import torchop.testing
from tests._support.forking import run_forked
from torchop._define.registrations import Registrations

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "index.md"

PUBLIC = {
    "torchop": torchop.__all__,
    "torchop.testing": torchop.testing.__all__,
    "torchop.native": torchop.native.__all__,
    "torchop.export": torchop.export.__all__,
    "torchop.compat": torchop.compat.__all__,
    "torchop.extend": torchop.extend.__all__,
}
NAMES = [f"{module}.{name}" for module, names in PUBLIC.items() for name in names]
# torchop only re-exports these names from PyTorch, with PyTorch's docstrings.
PYTORCHS_OWN = {"CustomOpDef", "EffectType", "OpOverload", "fallthrough_kernel", "wrap_triton"}


def find(name: str) -> Any:
    return functools.reduce(getattr, name.split(".")[1:], torchop)  # imports the submodule


def is_function(name: str) -> bool:
    return isinstance(find(name), types.FunctionType) and name.split(".")[-1] not in PYTORCHS_OWN


FUNCTIONS = [name for name in NAMES if is_function(name)]
CLASSES = [
    name
    for name in NAMES
    if inspect.isclass(find(name)) and name.rpartition(".")[2] not in PYTORCHS_OWN
]


# --------------------------------------------------------------------------------------------------
# Existence and documentation


@pytest.mark.parametrize("name", NAMES)
def test_name_is_importable(name: str) -> None:
    assert find(name) is not None


def test_wrap_triton_is_pytorchs_function() -> None:
    assert torchop.wrap_triton is torch.library.wrap_triton


def test_all_contains_every_public_name_once() -> None:
    assert len(set(torchop.__all__)) == len(torchop.__all__)
    public = {
        name
        for name in dir(torchop)
        if not name.startswith("_") and not isinstance(getattr(torchop, name), types.ModuleType)
    }
    assert public == set(torchop.__all__)


def test_dir_lists_public_names() -> None:
    names = dir(torchop)
    assert not [n for n in names if n.startswith("_") and not n.startswith("__")]
    assert {"compat", "export", "native", "testing", "__version__", *torchop.__all__} <= set(names)
    assert not {"importlib", "typing"} & set(names)


def test_modules_are_available_without_importing_them() -> None:
    program = "import torchop; print(torchop.testing.check, torchop.export.save, torchop.compat)"
    assert run_forked(program).stdout.startswith("<function check at ")


def test_missing_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'torchop' has no attribute 'recod'"):
        torchop.recod  # noqa: B018  # reading the attribute raises


@pytest.mark.parametrize("name", CLASSES)
def test_class_has_its_own_docstring(name: str) -> None:
    cls = find(name)
    doc = vars(cls).get("__doc__") or ""
    assert re.match(r"[A-Z].*\.(\n|$)", doc, re.DOTALL), doc
    if not issubclass(cls, BaseException):
        assert ">>>" in doc


def sections(function: Callable[..., Any]) -> set[str]:
    return set(re.findall(r"^(\w+):", inspect.getdoc(function) or "", re.MULTILINE))


# These functions raise no errors, so their docstrings have no section `Raises`.
CANNOT_FAIL = {
    "torchop.cache_key_tag",
    "torchop.impl_abstract",
    "torchop.export.save",
    "torchop.extend.mutated_tensors",
    "torchop.extend.named_inputs",
    "torchop.extend.named_outputs",
    "torchop.extend.short_repr",
    "torchop.extend.short_text",
    "torchop.extend.values_by_name",
    "torchop.extend.warn",
    "torchop.native.disabled",
    "torchop.records_gradient",
    "torchop.residuals",
    "torchop.native.status",
}
# The first function is deprecated. The example of `torchop.export.save` shows the second one.
WITHOUT_EXAMPLE = {"torchop.impl_abstract", "torchop.export.load"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_is_documented(name: str) -> None:
    function = find(name)
    doc = inspect.getdoc(function) or ""
    first, _, rest = doc.partition("\n")
    assert first.endswith("."), "a docstring starts with a sentence, on one line"
    assert not rest or rest.startswith("\n")
    found = sections(function)
    parameters = [p for p in inspect.signature(function).parameters if not p.startswith("_")]
    if parameters and name != "torchop.impl_abstract":
        assert "Args" in found
        for parameter in parameters:
            explained = rf"^    {parameter}: \w*|`{parameter}`|\b{parameter}="
            assert re.search(explained, doc, re.MULTILINE), f"{parameter} is not explained"
    if name not in CANNOT_FAIL:
        assert "Raises" in found
    if name not in WITHOUT_EXAMPLE:
        assert "Example" in found
        assert ">>>" in doc or "Example: see `" in doc


def methods_of(cls: type, *bases: type) -> list[str]:
    """Return the public methods that a class and the given base classes define."""
    return [
        f"{cls.__name__}.{name}"
        for base in (cls, *bases)
        for name, value in vars(base).items()
        if isinstance(value, types.FunctionType) and not name.startswith("_")
    ]


@pytest.mark.parametrize(
    "method", methods_of(torchop.CustomOp, Registrations) + methods_of(torchop.Library)
)
def test_method_is_documented(method: str) -> None:
    cls, _, name = method.partition(".")
    assert inspect.getdoc(getattr(getattr(torchop, cls), name))


@pytest.mark.parametrize("name", sorted(n for n in torchop.__all__ if n.startswith("register_")))
def test_registration_function_and_method_are_the_same(name: str) -> None:
    assert getattr(torchop.CustomOp, name) is getattr(torchop, name)


def in_reference(text: str) -> set[str]:
    """Return the names that a page of the API reference describes."""
    directives = r"^\.\. (?:auto)?(?:function|class|exception|data):: (\w+)"
    tables = re.findall(r"^\.\. autosummary::\n(.*?)```", text, re.MULTILINE | re.DOTALL)
    entries = re.findall(r"^   ([a-zA-Z][\w.]*)$", "\n".join(tables), re.MULTILINE)
    names = {*re.findall(directives, text, re.MULTILINE), *entries}
    return {name.rpartition(".")[2] for name in names}


def test_reference_has_every_public_name() -> None:
    expected = {name.rpartition(".")[2] for name in NAMES}
    assert in_reference(REFERENCE.read_text(encoding="utf-8")) == expected


def test_missing_name_in_the_reference_is_detected() -> None:
    text = REFERENCE.read_text(encoding="utf-8")
    assert in_reference(text.replace("   opcheck\n", "")) == in_reference(text) - {"opcheck"}


def test_every_error_has_a_section_on_the_page() -> None:
    page = (REFERENCE.parent / "errors.md").read_text(encoding="utf-8")
    errors = {
        name.removeprefix("torchop.") for name in CLASSES if issubclass(find(name), BaseException)
    }
    named = {name.rpartition(".")[2] for name in errors}
    assert set(re.findall(r"^### (\w+)$", page, re.MULTILINE)) == named
    assert set(re.findall(r"^\| \[`([\w.]+)`\]", page, re.MULTILINE)) == errors


# --------------------------------------------------------------------------------------------------
# Functions accept the same arguments as in torch.library


def problems(ours: Callable[..., Any], stock: Callable[..., Any]) -> list[str]:
    """Return the differences that would make a valid call to `stock` invalid for `ours`.

    `ours` may have more optional parameters. It may also accept a positional-only parameter of
    `stock` by keyword.
    """
    mine = list(inspect.signature(ours).parameters.values())
    theirs = list(inspect.signature(stock).parameters.values())
    found = []
    for index, expected in enumerate(theirs):
        by_name = {p.name: p for p in mine}
        if expected.kind is expected.KEYWORD_ONLY:
            actual = by_name.get(expected.name)
        else:
            actual = mine[index] if index < len(mine) else None
        if actual is None:
            found.append(f"{expected.name} is missing")
            continue
        accepted = {expected.kind}
        if expected.kind is expected.POSITIONAL_ONLY:
            accepted.add(expected.POSITIONAL_OR_KEYWORD)
        if actual.kind not in accepted:
            found.append(f"{actual.name} is {actual.kind.description}")
        if actual.name != expected.name and expected.kind is not expected.POSITIONAL_ONLY:
            found.append(f"{expected.name} is called {actual.name}")
        if expected.default is not expected.empty and actual.default != expected.default:
            found.append(f"{expected.name} defaults to {actual.default!r}")
    added = [p for p in mine if p.name not in {q.name for q in theirs}]
    found += [
        f"{p.name} is new and required"
        for p in added
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    return found


# List opcheck explicitly, because its module is torch.testing._internal and not torch.library.
SHARED = sorted(
    {
        "custom_op",
        "define",
        "get_ctx",
        "get_kernel",
        "impl",
        "impl_abstract",
        "infer_schema",
        "opcheck",
        "register_autocast",
        "register_autograd",
        "register_fake",
        "register_kernel",
        "register_torch_dispatch",
        "register_vmap",
    }
)


def test_every_function_of_torch_library_exists() -> None:
    ours = set(torchop.__all__)
    public = {
        name
        for name, value in vars(torch.library).items()
        if name in torch.library.__all__ or name.startswith("register_") or name in SHARED
        if getattr(value, "__module__", "").startswith(("torch.library", "torch._library"))
    }
    assert public <= ours


overrides = pytest.mark.needs_torch("2.13", "registrations that override the one before")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=overrides if n == "register_fake" else ()) for n in SHARED]
)
def test_function_is_called_as_in_torch_library(name: str) -> None:
    assert problems(getattr(torchop, name), getattr(torch.library, name)) == []


METHODS = ["define", pytest.param("impl", marks=overrides), "fallback", "_destroy"]


@pytest.mark.parametrize("name", METHODS)
def test_library_is_called_as_in_torch_library(name: str) -> None:
    assert problems(getattr(torchop.Library, name), getattr(torch.library.Library, name)) == []


def test_library_is_constructed_as_in_torch_library() -> None:
    assert problems(torchop.Library, torch.library.Library) == []


HANDLE_METHODS = [
    name
    for name, value in vars(torchop.CustomOpDef).items()
    if isinstance(value, types.FunctionType) and not name.startswith("_")
]


def test_handle_has_methods_to_compare() -> None:
    assert {"register_fake", "register_autograd", "register_kernel"} <= set(HANDLE_METHODS)


@pytest.mark.parametrize("name", HANDLE_METHODS)
def test_handle_is_called_as_in_torch_library(name: str) -> None:
    ours, stock = (getattr(cls, name) for cls in (torchop.CustomOp, torchop.CustomOpDef))
    op = object()
    assert problems(types.MethodType(ours, op), types.MethodType(stock, op)) == []


def test_exceptions_derive_from_builtin_exceptions() -> None:
    for name in torchop.__all__:
        value = getattr(torchop, name)
        if inspect.isclass(value) and issubclass(value, BaseException):
            builtin = [base for base in value.__mro__ if base.__module__ == "builtins"]
            caught = set(builtin) - {Exception, BaseException, object}
            assert caught or name == "OpCheckError", name
    assert issubclass(torchop.testing.OpCheckError, Exception)


def test_comparison_detects_differences() -> None:
    def stock(op, func=None, /, key=None, *, lib=None):
        """The function with which the others are compared."""

    def renamed(op, func=None, /, dispatch_key=None, *, lib=None): ...
    def by_position(op, func=None, key=None, /, *, lib=None): ...
    def by_keyword(op, function=None, key=None, *, lib=None): ...
    def missing(op, func=None, /, key=None): ...
    def other_default(op, func=None, /, key=None, *, lib=0): ...
    def required(op, func=None, /, key=None, *, lib=None, extra): ...
    def required_between(op, func=None, /, key=None, *, extra, lib=None): ...
    def more(op, func=None, /, key=None, *, lib=None, extra=None): ...
    def more_by_position(op, func=None, /, key=None, extra=None, *, lib=None): ...

    assert problems(renamed, stock) == ["key is called dispatch_key"]
    assert problems(by_position, stock) == ["key is positional-only"]
    assert problems(stock, by_position) == []
    assert problems(by_keyword, stock) == []
    assert problems(missing, stock) == ["lib is missing"]
    assert problems(other_default, stock) == ["lib defaults to 0"]
    assert problems(required, stock) == ["extra is new and required"]
    assert problems(required_between, stock) == ["extra is new and required"]
    assert problems(more, stock) == []
    assert problems(more_by_position, stock) == []
    assert problems(stock, stock) == []
