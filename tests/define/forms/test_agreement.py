"""The functional, in-place and out= forms of an operator agree for any shape, dtype and strides."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor
from torch.testing import assert_close

import torchop
from tests._support.strategies import laid_out, number_dtypes, shapes, stable


class Call(NamedTuple):
    """Arguments for a call. The out= form writes to `out`, and the in-place form to `written`.

    The tensors have different memory layouts.
    """

    x: Tensor
    bias: Tensor
    out: Tensor
    written: Tensor
    scale: int


@st.composite
def calls(draw: DrawFn) -> Call:
    shape, dtype = draw(shapes), draw(number_dtypes)
    x, bias, out, written = (draw(laid_out(shape, dtype)) for _ in range(4))
    return Call(x, bias, out, written, draw(st.integers(0, 3)))


def affine(x: Tensor, bias: Tensor, scale: int = 2) -> Tensor:
    return x * scale + bias


def write_affine(x: Tensor, bias: Tensor, scale: int = 2, *, out: Tensor) -> None:
    out.copy_(affine(x, bias, scale))


@pytest.fixture(scope="module", params=["elementwise", "not elementwise", "derived"])
def forms(request: pytest.FixtureRequest) -> tuple[Any, Any, Any]:
    name = f"agreement::{request.param.replace(' ', '_')}"
    if request.param == "derived":
        op = torchop.custom_op(name, affine, mutates_args=())
        op.register_fake(lambda x, bias, scale=2: torch.empty_like(x))
        return op, op.derive_out(), op.derive_inplace()
    family = torchop.out_op(
        name, write_affine, like="x", inplace=True, elementwise=request.param == "elementwise"
    )
    return family.functional, family.out, family.inplace


@stable
@given(call=calls())
def test_forms_agree(forms: tuple[Any, Any, Any], call: Call) -> None:
    functional, out, inplace = forms
    expected = affine(call.x, call.bias, call.scale)
    inputs = call.x.clone(), call.bias.clone()
    assert_close(functional(call.x, call.bias, call.scale), expected, rtol=0, atol=0)

    assert out(call.x, call.bias, call.scale, out=call.out) is call.out
    assert_close(call.out, expected, rtol=0, atol=0)
    assert_close((call.x, call.bias), inputs, rtol=0, atol=0)

    strides = call.written.stride(), call.written.storage_offset()
    call.written.copy_(call.x)
    assert inplace(call.written, call.bias, call.scale) is call.written
    assert_close(call.written, expected, rtol=0, atol=0)
    assert (call.written.stride(), call.written.storage_offset()) == strides


@stable
@given(call=calls(), other=st.data())
def test_forms_refuse_alike(forms: tuple[Any, Any, Any], call: Call, other: st.DataObject) -> None:
    _, out, _ = forms
    buffer = other.draw(laid_out(other.draw(shapes), other.draw(number_dtypes)))
    before = buffer.clone()
    if (buffer.shape, buffer.dtype) == (call.x.shape, call.x.dtype):
        out(call.x, call.bias, call.scale, out=buffer)
        assert_close(buffer, affine(call.x, call.bias, call.scale), rtol=0, atol=0)
    else:
        with pytest.raises(torchop.MutationError, match="Expected out tensor 'out' to have"):
            out(call.x, call.bias, call.scale, out=buffer)
        assert_close(buffer, before, rtol=0, atol=0)
