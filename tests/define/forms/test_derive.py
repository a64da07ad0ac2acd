from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.combinations import BACKENDS
from tests._support.devices import OTHER, TYPE
from tests.core.operators import all_names
from tests.define.families import SAMPLES


@pytest.fixture
def scale(namespace: str) -> torchop.CustomOp[..., Tensor]:
    @torchop.custom_op(f"{namespace}::scale", mutates_args=())
    def scale(x: Tensor, factor: float = 2.0, *, offset: float = 0.0) -> Tensor:
        """Scales."""
        return x * factor + offset

    scale.register_fake(lambda x, factor=2.0, *, offset=0.0: torch.empty_like(x))

    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.factor, None

    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]
        ctx.save_for_backward(inputs[0])

    scale.register_autograd(backward, setup_context=setup_context)
    return scale


def split(x: Tensor, text: str = 'a->"b"\n(') -> tuple[Tensor, Tensor]:
    assert text == 'a->"b"\n('
    return x + 1, x.sum(0)


@pytest.fixture
def two(namespace: str) -> torchop.CustomOp[..., tuple[Tensor, Tensor]]:
    op = torchop.custom_op(f"{namespace}::split", split, mutates_args=())
    op.register_fake(lambda x, text="": (torch.empty_like(x), x.new_empty(x.shape[1:])))
    return op


def test_forms_call_the_functional_operator(scale: Any, namespace: str) -> None:
    inplace, out = scale.derive_inplace(), scale.derive_out()
    assert str(inplace.schema) == (
        f"{namespace}::scale_(Tensor(a!) x, float factor=2., *, float offset=0.) -> Tensor(a!)"
    )
    assert str(out.schema) == (
        f"{namespace}::scale.out(Tensor x, float factor=2., *, float offset=0., Tensor(a!) out)"
        " -> Tensor(a!)"
    )
    x, buffer = torch.ones(3), torch.empty(3)
    assert out(x, 3.0, offset=1.0, out=buffer) is buffer
    assert buffer.tolist() == [4, 4, 4]
    assert inplace(x) is x
    assert x.tolist() == [2, 2, 2]


def test_forms_need_no_helper_operators(scale: Any, namespace: str) -> None:
    scale.derive_inplace(), scale.derive_out()
    assert all_names(namespace) == {f"{namespace}::{n}" for n in ("scale", "scale_", "scale.out")}


def test_several_results_and_names_of_outputs(two: Any, namespace: str) -> None:
    out = two.derive_out()
    assert str(out.schema).endswith(
        ", *, Tensor(a!) out0, Tensor(b!) out1) -> (Tensor(a!), Tensor(b!))"
    )
    x, buffers = torch.ones(3, 2), (torch.empty(3, 2), torch.empty(2))
    results = out(x, out0=buffers[0], out1=buffers[1])
    assert all(result is buffer for result, buffer in zip(results, buffers, strict=True))
    assert buffers[1].tolist() == [3, 3]
    named = two.derive_out(f"{namespace}::split_into", outputs=("more", "sum"))
    assert named(x, more=buffers[0], sum=buffers[1])[0] is buffers[0]


def test_forms_of_a_functional_operator_without_arguments(namespace: str) -> None:
    op = torchop.custom_op(
        f"{namespace}::one", lambda: torch.ones(1), mutates_args=(), schema="() -> Tensor"
    )
    out = op.derive_out()
    assert out(out=torch.zeros(1)).tolist() == [1]


def test_overloads_keep_their_names(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::add.Scalar", mutates_args=())
    def add(x: Tensor, y: float) -> Tensor:
        return x + y

    assert add.derive_inplace().name == f"{namespace}::add_.Scalar"
    assert add.derive_out().name == f"{namespace}::add.Scalar_out"


def test_kernels_registered_later_run(scale: Any) -> None:
    inplace, out = scale.derive_inplace(), scale.derive_out()
    scale.register_kernel(TYPE, lambda x, factor, *, offset: torch.full_like(x, 7))
    assert inplace(torch.ones(2)).tolist() == [7, 7]
    assert out(torch.ones(2), out=torch.empty(2)).tolist() == [7, 7]
    with scale.set_kernel_enabled(TYPE, False):
        assert inplace(torch.ones(2)).tolist() == [2, 2]


def test_device_without_kernel_is_reported_by_the_functional_operator(namespace: str) -> None:
    op = torchop.custom_op(f"{namespace}::op", split, mutates_args=(), device_types=OTHER)
    x = torch.ones(2, 2)
    with pytest.raises(
        NotImplementedError, match=rf"{namespace}::op does not have a kernel.*{TYPE}"
    ):
        op.derive_out()(x, out0=torch.empty(2, 2), out1=torch.empty(2))


@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_inplace_form_differentiates_through_the_formula(scale: Any, backend: str | None) -> None:
    inplace = scale.derive_inplace()

    def function(x: Tensor) -> Tensor:
        y = x * x
        inplace(y, 3.0)
        return (y * x).sum()

    x = torch.randn(3, dtype=torch.double, requires_grad=True)
    (expected,) = torch.autograd.grad((3 * x**3).sum(), x)
    run = function if backend is None else torch.compile(function, backend=backend, fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(run(x), x)[0], expected)


def test_inplace_form_of_a_view_reaches_the_base(scale: Any) -> None:
    inplace = scale.derive_inplace()
    x = torch.ones(4, requires_grad=True)
    base = x * 1
    inplace(base[1:3], 5.0)
    base.sum().backward()
    assert base.tolist() == [1, 5, 5, 1]
    assert x.grad is not None
    assert x.grad.tolist() == [1, 5, 5, 1]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_equals_eager(scale: Any, two: Any, backend: str, dynamic: bool) -> None:
    inplace, out, outs = scale.derive_inplace(), scale.derive_out(), two.derive_out()

    def function(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        inplace(x, 3.0, offset=1.0)
        first = out(x * 2, out=a).cos()
        second, total = outs(first, out0=x, out1=b)
        return second + total + a

    def inputs() -> list[Tensor]:
        torch.manual_seed(0)
        return [torch.randn(3, 4), torch.empty(3, 4), torch.empty(4)]

    eager, compiled = inputs(), inputs()
    expected = function(*eager)
    run = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    torch.testing.assert_close(run(*compiled), expected)
    torch.testing.assert_close(compiled, eager)


def test_unsuitable_out_tensor_is_rejected_unchanged(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::mean", mutates_args=())
    def mean(x: Tensor) -> Tensor:
        return x.float().mean(0)

    inplace, out = mean.derive_inplace(), mean.derive_out()
    x = torch.ones(2, 3)
    with pytest.raises(torchop.MutationError, match=r"mean_: .*'x' to have shape \[3\].*\[2, 3\]"):
        inplace(x)
    buffer = torch.zeros(4)
    with pytest.raises(torchop.MutationError, match=r"mean\.out: .*'out' to have shape \[3\]"):
        out(x, out=buffer)
    with pytest.raises(torchop.MutationError, match="more than one element"):
        out(x, out=torch.zeros(1).expand(3))
    with pytest.raises(torchop.MutationError, match=r"dtype torch\.float32, but got torch\.int64"):
        out(x, out=torch.zeros(3, dtype=torch.int64))
    with torch.inference_mode():
        inference = torch.zeros(3)
    with pytest.raises(torchop.MutationError, match="InferenceMode"):
        out(x, out=inference)
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        out(x, out=torch.zeros(3, requires_grad=True))
    assert x.unique().tolist() == [1]
    assert buffer.unique().tolist() == [0]


REFUSED = {
    "mutates": ("(Tensor(a!) x) -> ()", ("x",), None, "forms need a functional operator"),
    "views": ("(Tensor(a) x) -> Tensor(a)", (), None, "returns fresh tensors"),
    "a list": ("(Tensor x) -> Tensor[]", (), None, "returns fresh tensors"),
    "a number": ("(Tensor x) -> int", (), None, "returns fresh tensors"),
    "two": ("(Tensor x) -> (Tensor, Tensor)", (), "inplace", "with one result"),
    "no tensor": ("(int n) -> Tensor", (), "inplace", "whose first argument is a Tensor"),
    "optional": ("(Tensor? x) -> Tensor", (), "inplace", "whose first argument is a Tensor"),
    "nothing": ("() -> Tensor", (), "inplace", "whose first argument is a Tensor"),
}


@pytest.mark.parametrize("reason", list(REFUSED))
def test_operator_without_such_a_form_is_refused(namespace: str, reason: str) -> None:
    schema, mutated, only, message = REFUSED[reason]
    op = torchop.custom_op(f"{namespace}::op", lambda *x: None, mutates_args=mutated, schema=schema)
    with pytest.raises(ValueError, match=message):
        op.derive_inplace()
    if only is None:
        with pytest.raises(ValueError, match=message):
            op.derive_out()
    assert not hasattr(getattr(torch.ops, namespace), "op_")


@pytest.mark.parametrize("outputs", [("low",), ("low", "low"), ("x", "low"), "low"])
def test_names_of_outputs_are_checked(two: Any, outputs: Any) -> None:
    with pytest.raises(ValueError, match="expected 2 names, one for each result"):
        two.derive_out(outputs=outputs)


def test_bad_or_taken_names_are_refused(scale: Any, namespace: str) -> None:
    with pytest.raises(ValueError, match="namespace::name"):
        scale.derive_inplace("scale_")
    torchop.define(f"{namespace}::scale_", "(Tensor x) -> Tensor")
    with pytest.raises(RuntimeError, match="exists already"):
        scale.derive_inplace()


def test_closing_the_functional_operators_library_deregisters_forms(namespace: str) -> None:
    with torchop.Library(namespace, "FRAGMENT") as library:
        op = torchop.custom_op(f"{namespace}::split", split, mutates_args=(), lib=library)
        out = op.derive_out()
    with pytest.raises(torchop.OperatorGoneError, match="closed"):
        out(torch.ones(2, 2), out0=torch.ones(2, 2), out1=torch.ones(2))
    with pytest.raises(torchop.OperatorGoneError, match="closed"):
        op.derive_out()


def test_form_of_a_replaced_operator_raises(namespace: str) -> None:
    op = torchop.custom_op(f"{namespace}::split", split, mutates_args=())
    out = op.derive_out()
    torchop.custom_op(f"{namespace}::split", split, mutates_args=())
    with pytest.raises(torchop.OperatorGoneError, match="was replaced"):
        out(torch.ones(2, 2), out0=torch.ones(2, 2), out1=torch.ones(2))


@pytest.mark.parametrize("sample", list(SAMPLES))
def test_opcheck_passes(scale: Any, sample: str) -> None:
    inplace, out = scale.derive_inplace(), scale.derive_out()
    x = SAMPLES[sample]()
    torchop.opcheck(inplace, (x, 3.0), {"offset": 1.0})
    torchop.opcheck(out, (x,), {"out": torch.empty_like(x)})


def test_an_output_is_not_named_like_an_argument(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, out: int = 1) -> Tensor:
        return x * out

    with pytest.raises(ValueError, match="expected 1 names, one for each result"):
        op.derive_out()
    assert op.derive_out(outputs="result")(torch.ones(1), result=torch.empty(1)).tolist() == [1]
