"""Functions in C as kernels of what compiled code calls: registering them, and their end."""

from __future__ import annotations

import warnings

import pytest
import torch

import torchop
import torchop.export
from tests.export.support import scaling, stand_in
from tests.forking import run_forked
from tests.support import assert_clean
from torchop._compat import planned_outputs
from torchop._inspect.cache_key import identify
from torchop.export.c_functions import functions_in
from torchop.extend import OpName

pytest.importorskip("tvm_ffi")

SCHEMAS = {
    "(Tensor x, int?[] ns) -> Tensor": "takes the argument 'ns'",
    "(Tensor x, Generator? g=None) -> Tensor": "takes the argument 'g'",
    "(Tensor x) -> Tensor[]": "Got .*Tensor\\[\\]",
    "(Tensor x) -> int": "In a family, that is the functional operator",
    "(Tensor(a!) x) -> Tensor": "returns fresh tensors alone, or writes",
    "(Tensor x) -> ()": "returns fresh tensors alone, or writes",
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_an_operator_that_no_function_fits_is_refused(namespace, library, schema):
    library_of_user = torchop.Library(namespace, "FRAGMENT")
    library_of_user.define(f"f{schema}")
    with pytest.raises(torchop.SchemaError, match=f"^{namespace}::f: .*{SCHEMAS[schema]}"):
        torchop.export.register_c_function(f"{namespace}::f", library, "scale")


def test_a_function_that_is_not_there_is_refused(namespace, library):
    op = scaling(namespace, library)
    message = rf"^{op.name}: .*functions.so has no function 'absent', because it exports no __tvm"
    with pytest.raises(torchop.ArgumentError, match=message):
        torchop.export.register_c_function(op, library, "absent")
    with pytest.raises(OSError, match=r"absent\.so"):
        torchop.export.register_c_function(op, "absent.so", "scale")
    with pytest.raises(RuntimeError, match="nonsense"):
        torchop.export.register_c_function(op, library, "scale", "nonsense")
    with pytest.raises(torchop.ArgumentError, match=r"runs on the device meta, because it has no"):
        torchop.export.register_c_function(op, library, "scale", "meta")
    with pytest.raises(RuntimeError), pytest.warns(UserWarning, match="mkldnn"):
        torchop.export.register_c_function(op, library, "scale", "mkldnn")
    name = OpName(namespace, "scale__c_function", "")
    assert functions_in([name], "mkldnn") == {}
    out = torch.empty(2, 2)
    stand_in(op)(torch.ones(2, 2), outs=(out,))  # the first registration is still there
    assert out.tolist() == [[2, 2], [2, 2]]


def test_a_function_takes_the_place_of_the_one_before(namespace, library):
    op, x, out = scaling(namespace, library), torch.ones(2, 2), torch.empty(2, 2)
    for function, expected in (("scale", 2), ("other_scale", -2), ("scale", 2)):
        torchop.export.register_c_function(op, library, function)
        for _ in range(2):  # the first call loads it
            stand_in(op)(x, outs=(out,))
            assert out.tolist() == [[expected] * 2] * 2


def test_a_function_goes_with_the_library_it_was_registered_through(namespace, library):
    op, x, out = scaling(namespace, library), torch.ones(2, 2), torch.empty(2, 2)
    call, forms = stand_in(op), planned_outputs.forms_in_graphs
    with torchop.Library(namespace, "FRAGMENT") as users:
        torchop.export.register_c_function(op, library, "other_scale", lib=users)
        torchop.export.register_c_function(op, library, "scale", "cuda", lib=users)
        call(x, outs=(out,))
        assert out[0, 0].item() == -2
        assert torchop.get_rule("c_function_cuda").has(op)
    call(x, outs=(out,))
    assert out[0, 0].item() == 2
    name = f"{op.name}__c_function"
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
    assert not torchop.get_rule("c_function_cuda").has(op)
    other = torchop.custom_op(
        f"{namespace}::g", lambda x: x, schema="(Tensor x) -> Tensor", mutates_args=()
    )
    for _ in range(2):
        with torchop.Library(namespace, "FRAGMENT") as users:
            torchop.export.register_c_function(other, library, "scale", lib=users)
            assert len(forms(other.name)) == 1
        assert forms(other.name) == []
        assert not hasattr(getattr(torch.ops, namespace), "g__c_function")


def test_nobody_is_warned_of_a_kernel_that_replaces_another(scale):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stand_in(scale)(torch.ones(2, 2), outs=(torch.empty(2, 2),))


def test_a_function_goes_with_its_operator(namespace, library):
    first = scaling(namespace, library)
    call, out = stand_in(first), torch.empty(2, 2)
    call(torch.ones(2, 2), outs=(out,))
    assert len(planned_outputs.forms_in_graphs(first.name)) == 1
    with pytest.warns(torchop.RedefinitionWarning):
        second = torchop.custom_op(
            first.name, lambda x: x.clone(), schema="(Tensor x) -> Tensor", mutates_args=()
        )
    assert planned_outputs.forms_in_graphs(first.name) == []
    assert not torchop.get_rule("c_function_cpu").has(second)
    with pytest.raises((torchop.OperatorGoneError, AttributeError)):
        call(torch.ones(2, 2), outs=(out,))
    with pytest.warns(torchop.RedefinitionWarning):
        third = scaling(namespace, library, "other_scale")
    stand_in(third)(torch.ones(2, 2), outs=(out,))
    assert out.tolist() == [[-2, -2], [-2, -2]]


def test_the_keys_of_compiled_graphs_depend_on_functions(namespace, library):
    """Another process would find a graph that calls what it has not registered."""
    with torch.library._scoped_library(namespace, "FRAGMENT") as stock:
        stock.define("f(Tensor x) -> Tensor")
        ours = torchop.custom_op(
            f"{namespace}::g", lambda x: x, schema="(Tensor x) -> Tensor", mutates_args=()
        )
        for op in (f"{namespace}::f", ours.name):
            without = identify([op])
            torchop.export.register_c_function(op, library, "scale")
            for_cpu = identify([op])
            torchop.export.register_c_function(op, library, "scale", "cuda")
            assert len({str(key) for key, _ in (without, for_cpu, identify([op]))}) == 3


def test_inductor_is_imported_when_an_operator_of_others_ended(namespace, library):
    program = f"""
        import torch, torchop.export, tvm_ffi
        with torch.library._scoped_library({namespace!r}, "FRAGMENT") as stock:
            stock.define("f(Tensor x) -> Tensor")
            torchop.export.register_c_function("{namespace}::f", {str(library)!r}, "scale")
        import torch._inductor.lowering
    """
    assert_clean(run_forked(program))
