"""Valid names of operators, and error messages for invalid names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import torchop
from tests._support import strategies
from tests._support.common import is_defined
from torchop import OperatorNameError
from torchop.extend import OpName


def crop(x: Tensor, n: int = 1) -> Tensor:
    return x + n


@pytest.mark.parametrize(
    ("qualname", "parts", "local"),
    [
        ("mylib::crop", ("mylib", "crop", ""), "crop"),
        ("mylib::crop.small", ("mylib", "crop", "small"), "crop.small"),
        ("_m1::_C2.o3_", ("_m1", "_C2", "o3_"), "_C2.o3_"),
        ("match::case.type", ("match", "case", "type"), "case.type"),
    ],
)
def test_a_good_name_is_split_into_its_parts(
    qualname: str, parts: tuple[str, str, str], local: str
) -> None:
    name = OpName.parse_new(qualname)
    assert name == OpName.parse(qualname) == OpName(*parts)
    assert name.local == local
    assert str(name) == qualname


def test_the_overload_name_default_stands_for_no_overload() -> None:
    assert OpName.parse("mylib::crop.default") == OpName("mylib", "crop", "")


NO_NAMES: list[Any] = [None, 3, b"mylib::crop", ("mylib", "crop"), crop]
MALFORMED = ["", "crop", "mylib.crop", "mylib:crop", "::crop", "mylib::", "::", "a::b::c", "a::b::"]


@pytest.mark.parametrize("check", [OpName.parse, OpName.parse_new])
@pytest.mark.parametrize("qualname", NO_NAMES)
def test_non_string_is_rejected(check: Any, qualname: Any) -> None:
    with pytest.raises(OperatorNameError, match=r"must be a string, got .*\"mylib::crop\""):
        check(qualname)


@pytest.mark.parametrize("check", [OpName.parse, OpName.parse_new])
@pytest.mark.parametrize("qualname", MALFORMED)
def test_a_name_of_another_form_is_refused(check: Any, qualname: str) -> None:
    with pytest.raises(
        OperatorNameError, match=r"form namespace::name .*\"mylib::crop\""
    ) as caught:
        check(qualname)
    assert repr(qualname) in str(caught.value)


# Maps each invalid name to words that the error message must contain.
BAD = {
    # These names contain a part that is not an identifier.
    "my-lib::crop": "namespace 'my-lib' may hold only ASCII letters",
    "my.lib::crop": "namespace 'my.lib' may hold only",
    " mylib::crop": "namespace ' mylib' may hold only",
    "1lib::crop": "namespace '1lib' may hold only",
    "mylib::1crop": "name '1crop' may hold only",
    "mylib::größe": "name 'größe' may hold only",
    "mylib::crop ": "name 'crop ' may hold only",
    "mylib:::crop": "name ':crop' may hold only",
    "mylib::crop(Tensor x) -> Tensor": "name 'crop(Tensor x) -> Tensor' may hold only",
    "mylib::.small": "name '' may hold only",
    "mylib::crop.a-b": "overload 'a-b' may hold only",
    "mylib::crop.a.b": "overload 'a.b' may hold only",
    "mylib::crop.": "overload name after '.' is empty",
    "mylib::crop\n": "name 'crop\\n' may hold only",
    # These names contain a Python keyword, so, e.g., `torch.ops.mylib.for` is a syntax error.
    "mylib::for": "name 'for' is a keyword",
    "mylib::await": "name 'await' is a keyword",
    "mylib::NoneType": "name 'NoneType' is a keyword",
    "None::crop": "namespace 'None' is a keyword",
    "mylib::crop.return": "overload 'return' is a keyword",
    # PyTorch reserves these names.
    "aten::crop": "namespace 'aten' is reserved by PyTorch",
    "prim::crop": "namespace 'prim' is reserved by PyTorch",
    "prims::crop": "namespace 'prims' is reserved by PyTorch",
    "higher_order::crop": "namespace 'higher_order' is reserved by PyTorch",
    "_::crop": "namespace '_' is reserved by PyTorch",
    "mylib::crop.__small": "overload '__small' may not start with two underscores",
    "mylib::crop.default": "reserves the overload name 'default' for operators without",
    # torch.ops has an attribute with the name of the namespace already.
    "loaded_libraries::crop": "namespace 'loaded_libraries' is already an attribute",
    "load_library::crop": "namespace 'load_library' is already an attribute",
    "mylib::name": "name 'name' is already an attribute",
    "mylib::_dir": "name '_dir' is already an attribute",
    "mylib::__class__": "name '__class__' may not start with two underscores",
    "__main__::crop": "namespace '__main__' may not start with two underscores",
    "mylib::crop._op": "overload '_op' is already an attribute",
    "mylib::crop.overloads": "overload 'overloads' is already an attribute",
}


@pytest.mark.parametrize("qualname", BAD)
def test_a_bad_name_is_refused_with_its_rule_and_a_good_one(qualname: str) -> None:
    with pytest.raises(ValueError) as caught:
        OpName.parse_new(qualname)
    message = str(caught.value)
    assert isinstance(caught.value, OperatorNameError)
    assert message.startswith(repr(qualname))
    assert BAD[qualname] in message
    assert '"mylib::crop"' in message or "write 'mylib::crop'" in message
    assert len(message) < 400


@pytest.mark.parametrize("qualname", [*NO_NAMES, *MALFORMED, *BAD])
def test_nothing_is_defined_under_a_bad_name(qualname: Any) -> None:
    before = set(torch._C._dispatch_get_all_op_names())
    with pytest.raises(OperatorNameError):
        torchop.custom_op(qualname, crop, mutates_args=())
    assert set(torch._C._dispatch_get_all_op_names()) == before


def test_a_bad_overload_leaves_the_rest_of_the_name_free(namespace: str) -> None:
    with pytest.raises(OperatorNameError):
        torchop.custom_op(f"{namespace}::crop.1", crop, mutates_args=())
    assert not is_defined(f"{namespace}::crop")
    op = torchop.custom_op(f"{namespace}::crop", crop, mutates_args=())
    assert op(torch.zeros(())) == 1


@pytest.mark.parametrize(
    "local",
    ["inf", "nan", "print", "Tensor", "int", "match", "self", "_", "_crop", "x.name", "x._"],
)
def test_an_unusual_name_that_is_accepted_can_be_called(namespace: str, local: str) -> None:
    op = torchop.custom_op(f"{namespace}::{local}", crop, mutates_args=())
    name, _, overload = local.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    assert op(torch.zeros(())) == packet(torch.zeros(()), 1) == 1
    assert getattr(packet, overload or "default") is op.overload


# Texts that consist of parts of names are more often almost valid than random texts.
_pieces = st.sampled_from(
    ["::", ":", ".", "mylib", "crop", "for", "aten", "default", "1", "é", " ", "__"]
)
# The default alphabet of `st.text()`. Pass it explicitly, because Hypothesis checks its own default
# by encoding every character, which is slow.
_letters = st.characters(exclude_categories=["Cs"])
_texts = st.one_of(st.lists(_pieces, max_size=6).map("".join), st.text(_letters, max_size=12))


@strategies.stable
@given(_texts)
def test_any_text_is_refused_or_can_be_the_name_of_a_schema(text: str) -> None:
    try:
        name = OpName.parse_new(text)
    except OperatorNameError:
        return
    assert str(name) == text
    schema = torch._C.parse_schema(f"{text}(Tensor x) -> Tensor")
    assert (schema.name, schema.overload_name) == (f"{name.namespace}::{name.name}", name.overload)
