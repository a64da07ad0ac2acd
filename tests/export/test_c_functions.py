"""Functions in C as kernels of what compiled code in C++ calls: what they get, write and raise."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import torchop
import torchop.export
from tests.export.support import build, scaling, stand_in

pytest.importorskip("tvm_ffi")

# Without the library of tvm-ffi, which only errors and lists need.
PLAIN = """
#include <tvm/ffi/c_api.h>

extern "C" __attribute__((visibility("default"))) int __tvm_ffi_fill(
    void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  if (count != 3)
    return 7;
  const DLTensor* out = static_cast<const DLTensor*>(args[2].v_ptr);
  for (int64_t i = 0; i < out->shape[0]; ++i)
    static_cast<float*>(out->data)[i] = static_cast<float>(args[1].v_float64);
  return 0;
}
"""
INPUTS = {
    "plain": torch.randn(3, 4),
    "transposed": torch.randn(4, 3).t(),
    "with gaps": torch.randn(6, 8)[::2, 1::2],
    "expanded": torch.randn(3, 1).expand(3, 4),
    "empty": torch.randn(0, 4),
    "negative view": torch.randn(3, 4, dtype=torch.cfloat).conj().imag,
}


@pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS)
def test_a_function_gets_the_tensors_as_they_are(scale, x):
    out = torch.full(x.shape[::-1], 9.0).t()
    stand_in(scale)(x, 3.0, outs=(out,))
    torch.testing.assert_close(out, x * 3)
    stand_in(scale)(x, outs=(out,))
    torch.testing.assert_close(out, x * 2)


def test_a_function_writes_several_results_and_may_get_none(namespace, library):
    op = torchop.custom_op(
        f"{namespace}::sums",
        lambda x, start=None: (x.sum(1), x.sum(0)),
        schema="(Tensor x, Tensor? start=None) -> (Tensor, Tensor)",
        mutates_args=(),
    )
    torchop.export.register_c_function(op, library, "sums")
    x = torch.randn(3, 4)
    for start in (None, torch.full((1, 1), 5.0)):
        rows, columns = torch.empty(3), torch.empty(4)
        stand_in(op)(x, start, outs=(rows, columns))
        torch.testing.assert_close(rows, x.sum(1) + (0 if start is None else 5))
        torch.testing.assert_close(columns, x.sum(0))


def test_a_function_gets_numbers_text_lists_and_dtypes(namespace, library):
    op = torchop.custom_op(
        f"{namespace}::add",
        lambda *args: None,
        schema="(Tensor(a!) x, SymInt[] amounts, float[]? more=None, str how='give', "
        "bool twice=False, ScalarType? dtype=None) -> ()",
        mutates_args=("x",),
    )
    torchop.export.register_c_function(op, library, "add")
    for arguments, expected in (
        (([1, 2],), 3),
        (([],), 0),
        (([1, 2], [0.5, 0.25]), 3.75),
        (([1, 2], None, "take", True), -6),
        (([1, 2], None, "give", False, torch.float16), 19),
    ):
        x = torch.zeros(2, 2)
        stand_in(op)(x, *arguments)
        assert x.tolist() == [[expected, expected]] * 2


def test_a_function_gets_lists_of_tensors(namespace, library):
    op = torchop.custom_op(
        f"{namespace}::total",
        lambda *args: None,
        schema="(Tensor[] xs, Tensor?[]? more=None) -> Tensor",
        mutates_args=(),
    )
    torchop.export.register_c_function(op, library, "total")
    arrays = [np.full((1, 2), value, dtype=np.float32) for value in (1, 2, 4)]
    before = [sys.getrefcount(array) for array in arrays]
    for xs, more, expected in (
        ([0, 1], None, 3),
        ([], [2], 4),
        ([1, 1], [0, None, 2], 109),
    ):
        lists = [
            None
            if places is None
            else [p if p is None else torch.from_numpy(arrays[p]) for p in places]
            for places in (xs, more)
        ]
        out = torch.empty(())
        stand_in(op)(*lists, outs=(out,))
        assert out.item() == expected
    del lists
    assert [sys.getrefcount(array) for array in arrays] == before


def test_a_function_writes_into_lists_of_tensors(namespace, library):
    op = _fill(namespace, library)
    x, others = torch.zeros(2, 2), [torch.zeros(2, 2), torch.zeros(1, 2)]
    stand_in(op)(x, others, "four")
    assert [each[0, 0].item() for each in (x, *others)] == [4, 4, 4]


def _fill(namespace: str, library: Path) -> Any:
    """An operator with an argument `mode`, for which another one stands in compiled graphs."""

    def kernel(x: Tensor, others: list[Tensor], mode: str) -> None:
        raise AssertionError

    op = torchop.custom_op(f"{namespace}::fill", kernel, mutates_args=("x", "others"))
    torchop.export.register_c_function(op, library, "fill")
    return op


def test_what_stands_for_an_operator_in_graphs_has_its_function(namespace, library):
    _fill(namespace, library)
    x, space = torch.zeros(2, 2), getattr(torch.ops, namespace)
    space.fill__mutable__c_function(x, [], "four")
    assert x[0, 0].item() == 4
    # Where a list may hold None, that operator takes other arguments.
    listed = torchop.custom_op(
        f"{namespace}::listed",
        lambda xs: None,
        schema="(Tensor(a!)?[] xs) -> ()",
        mutates_args=("xs",),
    )
    torchop.export.register_c_function(listed, library, "fill")
    assert hasattr(space, "listed__mutable")
    assert not hasattr(space, "listed__mutable__c_function")


def test_text_with_a_null_character_is_refused(namespace, library):
    op = _fill(namespace, library)
    with pytest.raises(RuntimeError, match=rf"^{op.name}: no function takes a text with a null"):
        stand_in(op)(torch.zeros(2, 2), [], "fo\0ur")


def test_an_error_names_the_operator(scale):
    message = rf"^{scale.name}: ValueError: takes matrices of float32"
    for x in (torch.ones(2, 2, dtype=torch.double), torch.ones(2)):
        with pytest.raises(RuntimeError, match=message):
            stand_in(scale)(x, outs=(torch.empty(2, 2),))
    out = torch.empty(2, 2)
    stand_in(scale)(torch.ones(2, 2), outs=(out,))  # no error is left behind
    assert out.tolist() == [[2, 2], [2, 2]]


def test_an_error_names_the_overload(namespace, library):
    name = f"{namespace}::scale.by"
    op = torchop.custom_op(
        name, lambda x, by: x, schema="(Tensor x, float by) -> Tensor", mutates_args=()
    )
    torchop.export.register_c_function(op, library, "scale")
    call = getattr(torch.ops, namespace).scale__c_function.by
    with pytest.raises(RuntimeError, match=rf"^{name}: ValueError: takes matrices of float32"):
        call(torch.ones(2), 2.0, c_function_out0=torch.empty(2))


@pytest.mark.parametrize("function", ["count", "sizes"])
def test_a_value_that_no_caller_gets_is_refused(namespace, library, function):
    op = torchop.custom_op(
        f"{namespace}::f", lambda x: x, schema="(Tensor x) -> Tensor", mutates_args=()
    )
    torchop.export.register_c_function(op, library, function)
    with pytest.raises(RuntimeError, match=rf"^{op.name}: the function returns a value, which no"):
        stand_in(op)(torch.ones(2, 2), outs=(torch.empty(2, 2),))


def test_a_function_needs_no_library_of_tvm_ffi(namespace, tmp_path):
    plain = build(tmp_path, "plain", PLAIN, linked=False)
    ops = {}
    kinds = ("fill", ""), ("more", ", int n"), ("list", ", int[] n"), ("tensors", ", Tensor[] n")
    for name, more in kinds:
        ops[name] = torchop.custom_op(
            f"{namespace}::{name}",
            lambda x, value, *rest: x,
            schema=f"(Tensor x, float value{more}) -> Tensor",
            mutates_args=(),
        )
        torchop.export.register_c_function(ops[name], plain, "fill")
    x, out = torch.empty(2), torch.empty(2)
    stand_in(ops["fill"])(x, 3.0, outs=(out,))
    assert out.tolist() == [3, 3]
    with pytest.raises(RuntimeError, match=r"::more: the function failed with the code 7, and wi"):
        stand_in(ops["more"])(x, 3.0, 1, outs=(out,))
    with pytest.raises(RuntimeError, match=r"::list: its library has no tvm-ffi, which makes the"):
        stand_in(ops["list"])(x, 3.0, [1], outs=(out,))
    with pytest.raises(RuntimeError, match=r"::tensors: its library has no tvm-ffi, which makes "):
        stand_in(ops["tensors"])(x, 3.0, [x], outs=(out,))


def test_nothing_is_kept_of_a_call(scale):
    array = np.ones((2, 2), dtype=np.float32)
    before = sys.getrefcount(array)
    stand_in(scale)(torch.from_numpy(array), outs=(torch.empty(2, 2),))
    with pytest.raises(RuntimeError, match="takes matrices"):
        stand_in(scale)(torch.from_numpy(array)[0], outs=(torch.empty(2),))
    assert sys.getrefcount(array) == before


def test_threads_load_a_function_once(namespace, library):
    op = scaling(namespace, library)
    call, outs = stand_in(op), [torch.empty(2, 2) for _ in range(4)]
    threads = [
        threading.Thread(target=call, args=(torch.ones(2, 2), factor), kwargs={"outs": (out,)})
        for factor, out in enumerate(outs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [out[0, 0].item() for out in outs] == [0, 1, 2, 3]
