"""out_op: all forms of an operator from one kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Optional

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._library._out_variant import to_out_variant
from torch._subclasses.fake_tensor import FakeTensorMode
from torchgen.model import FunctionSchema, SchemaKind

import torchop
from tests.define.families import SAMPLES, bounds, save_input, sine, sine_backward, write_sine
from tests.releases import INPLACE, OUT, needs_tags
from tests.support import counting, needs_native

BACKENDS = ["eager", "aot_eager", "inductor"]


@pytest.fixture
def family(namespace: str) -> torchop.OperatorFamily:
    return sine(namespace)


def exists(namespace: str, name: str) -> bool:
    return hasattr(getattr(torch.ops, namespace), name)


# --------------------------------------------------------------------------------------------------
# The forms


def test_all_forms_compute_the_same(family: torchop.OperatorFamily) -> None:
    x = torch.randn(3)
    expected, buffer, copy = x.sin(), torch.empty(3), x.clone()
    assert torch.allclose(family.functional(x), expected)
    assert family.out(x, out=buffer) is buffer
    assert torch.allclose(buffer, expected)
    assert family.inplace is not None
    assert family.inplace(copy) is copy
    assert torch.allclose(copy, expected)


def test_schemas_are_those_of_pytorchs_own_forms(
    family: torchop.OperatorFamily, namespace: str
) -> None:
    assert family.inplace is not None
    assert str(family.functional.schema) == f"{namespace}::sin(Tensor x) -> Tensor"
    assert str(family.out.schema) == (
        f"{namespace}::sin.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)"
    )
    assert str(family.inplace.schema) == f"{namespace}::sin_(Tensor(a!) x) -> Tensor(a!)"
    assert (INPLACE in family.inplace.tags) is hasattr(torch.Tag, "inplace")
    assert all(op.tags.count(torch.Tag.pt2_compliant_tag) == 1 for op in _forms(family))


def _forms(family: torchop.OperatorFamily) -> list[torchop.CustomOp[..., Any]]:
    return [op for op in (family.functional, family.out, family.inplace) if op is not None]


def test_several_outputs(namespace: str) -> None:
    family = bounds(namespace)
    x = torch.randn(3, 4)
    low, high = family(x, scale=2)
    assert torch.allclose(low, x * 2 - 1)
    assert torch.allclose(high, (x * 2).sum(-1) + 1)
    buffers = torch.empty(3, 4), torch.empty(3)
    results = family(x, 0.5, low=buffers[0], high=buffers[1])
    assert results[0] is buffers[0]
    assert results[1] is buffers[1]
    assert torch.allclose(buffers[0], x - 0.5)
    assert str(family.out.schema) == (
        f"{namespace}::bounds.out(Tensor x, float margin=1., *, int scale=1, Tensor(a!) low, "
        "Tensor(b!) high) -> (Tensor(a!), Tensor(b!))"
    ).replace("int scale", "SymInt scale")
    assert family.inplace is None


def test_family_looks_like_its_kernel(family: torchop.OperatorFamily, namespace: str) -> None:
    assert repr(family) == (
        f"<torchop.OperatorFamily {namespace}::sin, {namespace}::sin.out, {namespace}::sin_>"
    )
    assert family.__doc__ is not None
    assert family.__doc__.startswith("Sine, by NumPy.")
    assert str(inspect.signature(family.functional)) == "(x: torch.Tensor) -> torch.Tensor"
    assert list(inspect.signature(family).parameters) == ["x", "out"]
    assert list(inspect.signature(family.out).parameters) == ["x", "out"]
    assert inspect.signature(family).parameters["out"].default is None
    assert family.functional.__name__ == "write_sine"
    assert family.out.__name__ == "sin_out"
    assert family.out.__doc__ is not None
    assert family.out.__doc__.startswith("Writes the result of write_sine into out")
    assert family.inplace is not None
    assert family.inplace.__doc__ is not None
    assert family.inplace.__doc__.startswith("Overwrites x with the result of write_sine")


def test_decorator_and_overload(namespace: str) -> None:
    @torchop.out_op(f"{namespace}::add.Scalar", like="x", inplace=True)
    def add(x: Tensor, y: float = 2.0, *, out: Tensor) -> Tensor:
        return torch.add(x, y, out=out)

    assert [op.name for op in _forms(add)] == [
        f"{namespace}::add.Scalar",
        f"{namespace}::add.Scalar_out",
        f"{namespace}::add_.Scalar",
    ]
    x = torch.zeros(2)
    assert add(x).tolist() == [2, 2]
    assert add.inplace(x, 3.0).tolist() == [3, 3]


def test_kernel_that_is_not_elementwise_works_in_place_through_a_result_of_its_own(
    namespace: str,
) -> None:
    @torchop.out_op(f"{namespace}::reverse", like="x", inplace=True)
    def reverse(x: Tensor, *, out: Tensor) -> None:
        for index in range(len(x)):
            out[index] = x[len(x) - 1 - index]

    x = torch.arange(4.0)
    assert reverse.inplace(x) is x
    assert x.tolist() == [3, 2, 1, 0]
    with pytest.raises(torchop.MutationError, match="refer to a single memory location"):
        reverse(x, out=x)
    assert x.tolist() == [3, 2, 1, 0]


def test_packet_finds_the_form(family: torchop.OperatorFamily, namespace: str) -> None:
    x, out = torch.randn(3), torch.empty(3)
    packet = getattr(torch.ops, namespace).sin
    assert packet(x, out=out) is out
    torch.testing.assert_close(packet(x), out)
    with pytest.raises(torchop.MutationError, match="shape"):
        packet(x, out=torch.empty(4))


@needs_native
def test_native_calls_are_guarded_too(family: torchop.OperatorFamily) -> None:
    x, out = torch.randn(3), torch.empty(3)
    with counting(family.out) as calls:
        family.out(x, out=out)
        with pytest.raises(torchop.MutationError, match="shape"):
            family.out(x, out=torch.empty(4))
    assert calls == {"native": 2}
    explanation = torchop.explain(family.out, x, out=out)
    assert "write_sine" in explanation.kernels[-1]  # the user's, not what is around it


def test_elementwise_kernel_needs_no_memory_in_place(namespace: str) -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def kernel(x: Tensor, *, out: Tensor) -> None:
        seen.append((x, out))
        torch.neg(x, out=out)

    family = torchop.out_op(f"{namespace}::neg", kernel, like="x", inplace=True, elementwise=True)
    x = torch.ones(2)
    assert family.inplace is not None
    family.inplace(x)
    family(x, out=x)
    assert all(given is x and out is x for given, out in seen)
    assert x.tolist() == [1, 1]


def test_call_with_and_without_a_rule_that_needs_the_defaults(namespace: str) -> None:
    @torchop.out_op(f"{namespace}::repeat", allocate=lambda x, times: x.new_empty(times * len(x)))
    def repeat(x: Tensor, times: int = 2, *, out: Tensor) -> None:
        out.copy_(x.repeat(times))

    assert repeat(torch.ones(2)).shape == (4,)
    assert repeat(torch.ones(2), 3).shape == (6,)
    assert repeat(torch.ones(2), out=torch.empty(4)).shape == (4,)
    with pytest.raises(torchop.MutationError, match=r"shape \[6\], but got \[4\]"):
        repeat(torch.ones(2), 3, out=torch.empty(4))


def test_factory_without_tensors(namespace: str) -> None:
    @torchop.out_op(f"{namespace}::ramp", allocate=lambda n, device: torch.empty(n, device=device))
    def ramp(n: int, device: torch.device, *, out: Tensor) -> None:
        out.copy_(torch.arange(n))

    assert ramp(3, torch.device("cpu")).tolist() == [0, 1, 2]
    assert ramp(2, torch.device("cpu"), out=torch.empty(2)).tolist() == [0, 1]
    with pytest.raises(torchop.MutationError, match="device meta, but got cpu"):
        ramp(2, torch.device("meta"), out=torch.empty(2))


# --------------------------------------------------------------------------------------------------
# Kernels and formula


def test_kernel_for_a_device_serves_all_forms(namespace: str) -> None:
    family = sine(namespace, device_types="cuda")
    x = torch.randn(3)
    for op in _forms(family):
        with pytest.raises(NotImplementedError, match="kernels for: cuda"):
            op(x, **({"out": torch.empty(3)} if op is family.out else {}))
    assert family.register_kernel("cpu")(write_sine) is write_sine
    assert family.inplace is not None
    results = family(x), family(x, out=torch.empty(3)), family.inplace(x.clone())
    assert all(torch.allclose(result, x.sin()) for result in results)


def test_kernel_without_the_defaults_is_told_them(namespace: str) -> None:
    family = bounds(namespace)

    @family.register_kernel("cpu")
    def _(x, margin, *, scale, low, high):
        low.fill_(margin)
        high.fill_(scale)

    low, high = family(torch.randn(3, 4))
    assert low.unique().tolist() == [1]
    assert high.unique().tolist() == [1]
    assert family(torch.randn(2, 2), low=torch.empty(2, 2), high=torch.empty(2))[1].tolist() == [
        1,
        1,
    ]


def test_kernel_with_other_parameters_is_refused_for_all_forms(
    family: torchop.OperatorFamily,
) -> None:
    with pytest.raises(TypeError, match=r"sin\.out: a kernel is called with \(x, \*, out\)"):
        family.register_kernel("cpu", lambda x: None)
    with pytest.raises(RuntimeError, match="device type"):
        family.register_kernel("no_such_device", write_sine)
    assert torch.allclose(family(torch.ones(2)), torch.ones(2).sin())


def test_form_may_have_a_kernel_of_its_own_which_is_guarded_too(
    family: torchop.OperatorFamily,
) -> None:
    @family.out.register_kernel("cpu")
    def _(x: Tensor, *, out: Tensor) -> Tensor:
        return out.fill_(7)

    assert family(torch.ones(2), out=torch.empty(2)).tolist() == [7, 7]
    assert torch.allclose(family(torch.ones(2)), torch.ones(2).sin())
    with pytest.raises(torchop.MutationError, match="shape"):
        family(torch.ones(2), out=torch.empty(3))


def test_kernel_that_returns_something_else_is_refused(namespace: str) -> None:
    @torchop.out_op(f"{namespace}::lost", like="x", inplace=True)
    def lost(x: Tensor, *, out: Tensor) -> Tensor:
        return x.sin()

    assert lost.inplace is not None
    for call in (lambda x: lost(x), lambda x: lost(x, out=torch.empty(2)), lost.inplace):
        with pytest.raises(torchop.ResultError, match="must write into out and return that, or No"):
            call(torch.ones(2))


@pytest.mark.parametrize("results", ["None", "too many", "a number"])
def test_rule_that_allocates_something_else_is_refused(namespace: str, results: str) -> None:
    made = {"None": None, "too many": (torch.empty(2), torch.empty(2)), "a number": 3}[results]
    family = torchop.out_op(f"{namespace}::op", write_sine, allocate=lambda x: made)
    with pytest.raises(
        torchop.ResultError, match="the rule that allocates the results must return"
    ):
        family(torch.ones(2))


def test_rule_that_returns_an_input_does_not_let_it_be_overwritten(namespace: str) -> None:
    family = torchop.out_op(f"{namespace}::op", write_sine, allocate=lambda x: x)
    x = torch.ones(2)
    with pytest.raises(torchop.AliasError, match="output 0 is input 'x' itself"):
        family(x)
    assert x.tolist() == [1, 1]


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("inplace", [False, True])
def test_gradients_flow_through_the_functional_and_the_inplace_form(
    family: torchop.OperatorFamily, backend: str | None, inplace: bool
) -> None:
    torch._dynamo.reset()

    def function(x: Tensor) -> Tensor:
        y = x * 2
        result = family.inplace(y) if inplace and family.inplace is not None else family(y)
        return (result * x).sum()

    x = torch.randn(3, dtype=torch.double, requires_grad=True)
    (expected,) = torch.autograd.grad(((x * 2).sin() * x).sum(), x)
    if backend is not None:
        function = torch.compile(function, backend=backend, fullgraph=True)
    (found,) = torch.autograd.grad(function(x), x)
    torch.testing.assert_close(found, expected)


def test_gradcheck_of_the_inplace_form(family: torchop.OperatorFamily) -> None:
    x = torch.randn(4, dtype=torch.double, requires_grad=True)
    assert family.inplace is not None
    assert torch.autograd.gradcheck(lambda x: family.inplace(x.clone()), x)
    assert torch.autograd.gradcheck(lambda x: family.inplace(x.clone()[1:]), x)
    written = x.clone()
    result = family.inplace(written)
    assert result is written
    assert written.grad_fn is not None


def test_transforms_go_through_the_inplace_form(family: torchop.OperatorFamily) -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        assert family.inplace is not None
        return family.inplace(y)

    x = torch.randn(3, dtype=torch.double)
    gradient = 2 * (2 * x).cos()
    torch.testing.assert_close(torch.func.grad(lambda x: function(x).sum())(x), gradient)
    torch.testing.assert_close(torch.func.jacrev(function)(x), gradient.diag())
    with pytest.raises(torchop.ForwardModeError, match="sin does not support forward-mode"):
        torch.func.jvp(function, (x,), (x,))


def test_inplace_form_treats_a_leaf_as_pytorch_does(family: torchop.OperatorFamily) -> None:
    x = torch.ones(2, requires_grad=True)
    assert family.inplace is not None
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        family.inplace(x)
    assert x.tolist() == [1, 1]
    with torch.no_grad():
        family.inplace(x)
    assert torch.allclose(x, torch.ones(2).sin())


def test_formula_is_that_of_the_functional_operator(namespace: str) -> None:
    family = torchop.out_op(f"{namespace}::sin", write_sine, like="x", inplace=True)
    x = torch.ones(2, requires_grad=True)
    assert family.inplace is not None
    with pytest.raises(torchop.MissingFormulaError, match=rf"{namespace}::sin\b"):
        family.inplace(x.clone()).sum().backward()
    assert family.register_autograd(sine_backward, setup_context=save_input) is sine_backward
    family.inplace(x.clone()).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(2).cos())


# --------------------------------------------------------------------------------------------------
# Compilers


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_forms_equal_eager(namespace: str, backend: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    family, two = sine(namespace), bounds(namespace)

    def function(x: Tensor, out: Tensor, low: Tensor, high: Tensor) -> Tensor:
        first = family(x) + family(x * 2, out=out)
        assert family.inplace is not None
        family.inplace(x)
        lows, _ = two(x, scale=3)
        two(x, 2.0, low=low, high=high)
        return (first + out + lows * low).cos() + high[:, None]

    def inputs() -> list[Tensor]:
        torch.manual_seed(0)
        return [torch.randn(3, 4), torch.empty(3, 4), torch.empty(3, 4), torch.empty(3)]

    eager, compiled = inputs(), inputs()
    expected = function(*eager)
    result = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*compiled)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(compiled, eager)


# Where Inductor finds the form with out=, by its tag, it calls it in place of the functional one.
# It gets each of these signatures wrong on 2.13, those of tensors alone with dynamic shapes.
def _numbers_first(n: int, x: Tensor, *, out: Tensor) -> None:
    out.copy_(x * n)


def _default(x: Tensor, n: int = 3, *, out: Tensor) -> None:
    out.copy_(x * n)


def _keyword_only(x: Tensor, *, n: int = 3, out: Tensor) -> None:
    out.copy_(x * n)


def _list_of_numbers(x: Tensor, n: list[int], *, out: Tensor) -> None:
    out.copy_(x * n[0] * n[1])


def _list_of_tensors(xs: list[Tensor], n: int, *, out: Tensor) -> None:
    out.copy_(xs[0] * n + xs[1])


def _none_between(x: Tensor, b: Optional[Tensor], y: Tensor, *, out: Tensor) -> None:
    out.copy_(x - y if b is None else x - b)


INDUCTOR: dict[str, tuple[Callable[..., Any], Any, Callable[..., Any]]] = {
    "tensors": (write_sine, torch.empty_like, lambda f, x: f(x)),
    "numbers first": (_numbers_first, lambda n, x: torch.empty_like(x), lambda f, x: f(3, x)),
    "default": (_default, lambda x, n: torch.empty_like(x), lambda f, x: f(x) + f(x, 5)),
    "keyword": (_keyword_only, lambda x, *, n: torch.empty_like(x), lambda f, x: f(x, n=2)),
    "numbers": (_list_of_numbers, lambda x, n: torch.empty_like(x), lambda f, x: f(x, [2, 3])),
    "list": (_list_of_tensors, lambda xs, n: torch.empty_like(xs[0]), lambda f, x: f([x, x], 2)),
    "none": (_none_between, lambda x, b, y: torch.empty_like(x), lambda f, x: f(x, None, x * 3)),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("signature", list(INDUCTOR))
def test_inductor_calls_the_functional_operator(
    namespace: str, signature: str, dynamic: bool
) -> None:
    torch._dynamo.reset()
    kernel, allocate, call = INDUCTOR[signature]
    family = torchop.out_op(f"{namespace}::op", kernel, allocate=allocate)
    x = torch.randn(3)

    def function(x: Tensor) -> Tensor:
        return call(family, x * 2).cos()

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    torch.testing.assert_close(compiled(x), function(x))
    assert to_out_variant(family.functional.overload) is None


def test_exported_program_writes_into_the_buffer(family: torchop.OperatorFamily) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor, out: Tensor) -> Tensor:
            family(x, out=out)
            assert family.inplace is not None
            return family.inplace(x * 2) + out

    x, out = torch.randn(3), torch.empty(3)
    program = torch.export.export(Module(), (x, out))
    for exported in (program.module(), program.run_decompositions({}).module()):
        out.zero_()
        torch.testing.assert_close(exported(x, out), (x * 2).sin() + x.sin())
        torch.testing.assert_close(out, x.sin())


def test_fake_tensors_are_checked_too(family: torchop.OperatorFamily) -> None:
    assert family.inplace is not None
    with FakeTensorMode():
        x, out = torch.randn(3), torch.empty(3)
        assert family(x).shape == (3,)
        assert family(x, out=out) is out
        assert family.inplace(x) is x
        with pytest.raises(torchop.MutationError, match=r"shape \[3\], but got \[4\]"):
            family(x, out=torch.empty(4))
    meta = torch.empty(3, device="meta")
    assert family(meta, out=meta.clone()).is_meta
    with pytest.raises(torchop.MutationError, match="dtype"):
        family(meta, out=meta.double())


@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_buffer_is_refused_when_compiled(
    family: torchop.OperatorFamily, backend: str
) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, out: family(x, out=out), backend=backend, fullgraph=True)
    out = torch.zeros(4)
    with pytest.raises(Exception, match=r"Expected out tensor 'out' to have shape \[3\]"):
        compiled(torch.ones(3), out)
    assert out.tolist() == [0, 0, 0, 0]


# --------------------------------------------------------------------------------------------------
# What the caller may write into


def _inference() -> Tensor:
    with torch.inference_mode():
        return torch.full((3,), 5.0)


def _both(x: Tensor) -> dict[str, Tensor]:
    memory = torch.full((13,), 5.0)
    return {"low": memory[:12].view(3, 4), "high": memory[10:]}


WRONG: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "shape": (lambda x: torch.full((4,), 5.0), r"to have shape \[3\], but got \[4\] instead"),
    "rank": (lambda x: torch.full((1, 3), 5.0), r"shape \[3\], but got \[1, 3\]"),
    "dtype": (lambda x: torch.full((3,), 5), "dtype torch.float32, but got torch.int64 instead"),
    "device": (lambda x: torch.full((3,), 5.0, device="meta"), "device cpu, but got meta instead"),
    "layout": (lambda x: torch.full((3,), 5.0).to_sparse(), "layout torch.strided, but got torch"),
    "expanded": (lambda x: torch.full((1,), 5.0).expand(3), "more than one element of the written"),
    "windows": (lambda x: torch.full((9,), 5.0).as_strided((3,), (0,)), "single memory location"),
    "inference": (lambda x: _inference(), "Inplace update to inference tensor outside Inference"),
    "grad": (
        lambda x: torch.full((3,), 5.0, requires_grad=True),
        "functions with out=... arguments don't support automatic differentiation, but one of the "
        "arguments requires grad",
    ),
    "shifted": (lambda x: x._base[:3], "some elements of the input tensor and the written-to tens"),
}


@pytest.mark.parametrize("wrong", list(WRONG))
def test_buffer_that_does_not_fit_is_refused_untouched(
    family: torchop.OperatorFamily, wrong: str
) -> None:
    make, message = WRONG[wrong]
    x = torch.full((4,), 5.0)[1:]
    out = make(x)
    with pytest.raises(RuntimeError, match=rf"sin\.out: .*{message}"):
        family(x, out=out)
    if not out.is_meta:
        assert out.detach().to_dense().unique().tolist() == [5]


def test_buffer_of_none_is_refused(family: torchop.OperatorFamily) -> None:
    with pytest.raises(TypeError, match="argument 'out' is None"):
        family.out(torch.ones(2), out=None)


def test_outputs_must_not_overlap_each_other(namespace: str) -> None:
    family = bounds(namespace)
    x = torch.randn(3, 4)
    outputs = _both(x)
    with pytest.raises(torchop.MutationError, match=r"'low' and argument 'high'.*single memory"):
        family(x, **outputs)
    assert outputs["high"].tolist() == [5, 5, 5]


def test_outputs_may_be_interleaved_with_inputs(family: torchop.OperatorFamily) -> None:
    memory = torch.randn(3, 2)
    x, out = memory[:, 0], memory[:, 1]
    expected = x.sin()
    assert torch.allclose(family(x, out=out), expected)
    inside = torch.empty(5, 3)
    assert torch.allclose(family(memory.t(), out=inside[1:3]), memory.t().sin())


def test_buffers_in_inference_mode(family: torchop.OperatorFamily) -> None:
    out = _inference()
    with torch.inference_mode():
        family(torch.ones(3), out=out)
    assert torch.allclose(out, torch.ones(3).sin())


def test_read_only_memory_cannot_be_known(family: torchop.OperatorFamily) -> None:
    array = np.zeros(2, dtype=np.float32)
    array.flags.writeable = False
    with pytest.warns(UserWarning, match="not writable"):
        out = torch.from_numpy(array)
    # PyTorch warned; the tensor does not know any more, and neither does the array made of it.
    assert out.numpy().flags.writeable
    assert torch.allclose(family(torch.ones(2), out=out), torch.ones(2).sin())


def test_inplace_form_refuses_what_it_cannot_keep(namespace: str) -> None:
    for promise in (False, True):

        @torchop.out_op(
            f"{namespace}::half{int(promise)}",
            allocate=lambda x: torch.empty(x.shape, dtype=torch.get_default_dtype()),
            inplace=True,
            elementwise=promise,
        )
        def half(x: Tensor, *, out: Tensor) -> None:
            out.copy_(x / 2)

        numbers = torch.tensor([1, 2])
        assert half.inplace is not None
        with pytest.raises(
            torchop.MutationError, match=r"in-place tensor 'x' to have dtype torch.fl"
        ):
            half.inplace(numbers)
        assert numbers.tolist() == [1, 2]
        with pytest.raises(torchop.MutationError, match="more than one element"):
            half.inplace(torch.ones(1).expand(3))


# --------------------------------------------------------------------------------------------------
# Definitions that are refused, as a whole


def _no_output(x: Tensor) -> None: ...
def _default_output(x: Tensor, *, out: Optional[Tensor] = None) -> None: ...
def _listed_output(x: Tensor, *, out: list[Tensor]) -> None: ...
def _wrong_return(x: Tensor, *, out: Tensor) -> int: ...
def _no_return(x: Tensor, *, out: Tensor): ...  # type: ignore[no-untyped-def]
def _unknown_type(x: dict, *, out: Tensor) -> None: ...
def _number_first(n: int, x: Tensor, *, out: Tensor) -> None: ...
def _two(x: Tensor, *, low: Tensor, high: Tensor) -> None: ...


REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "no output": (_no_output, {"like": "x"}, r"has no output.*\(x: Tensor, \*, out: Tensor\)"),
    "default": (_default_output, {"like": "x"}, "'out' is an output, so it must be a Tensor"),
    "list": (_listed_output, {"like": "x"}, "'out' is an output, so it must be a Tensor"),
    "return": (_wrong_return, {"like": "x"}, "the return annotation must be None, or Tensor"),
    "no return": (_no_return, {"like": "x"}, "the return annotation must be None"),
    "type": (_unknown_type, {"like": "x"}, "parameter 'x' has unsupported type"),
    "no rule": (write_sine, {}, "needs either like"),
    "two rules": (write_sine, {"like": "x", "allocate": torch.empty_like}, "needs either like"),
    "like nothing": (write_sine, {"like": "y"}, "like='y' is not the name of a Tensor.*are x"),
    "rule": (write_sine, {"allocate": lambda: None}, "allocate is called with"),
    "in place": (_number_first, {"like": "x", "inplace": True}, "takes a Tensor first"),
    "in place of two": (_two, {"like": "x", "inplace": True}, "has one result"),
    "tag": (write_sine, {"like": "x", "tags": OUT}, "adds the tags of the forms itself"),
}


@pytest.mark.parametrize(
    "reason", [pytest.param(r, marks=needs_tags if r == "tag" else ()) for r in REFUSED]
)
def test_definition_is_refused_and_leaves_nothing(namespace: str, reason: str) -> None:
    kernel, options, message = REFUSED[reason]
    with pytest.raises((ValueError, TypeError), match=message):
        torchop.out_op(f"{namespace}::op", kernel, **options)
    assert not exists(namespace, "op")
    assert not exists(namespace, "op_")


def test_what_is_no_function_is_refused(namespace: str) -> None:
    with pytest.raises(TypeError, match="must be a function"):
        torchop.out_op(f"{namespace}::op", 3, like="x")  # type: ignore[call-overload]


@pytest.mark.parametrize("taken", ["op", "op.out", "op_"])
def test_name_that_somebody_else_has_is_refused_before_anything_is_defined(
    namespace: str, taken: str
) -> None:
    old = sine(namespace, inplace=False)
    torchop.define(f"{namespace}::{taken}", "(Tensor x) -> Tensor")
    with pytest.raises(RuntimeError, match="exists already"):
        torchop.out_op(f"{namespace}::op", write_sine, like="x", inplace=True)
    assert {name for name in ("op", "op_") if exists(namespace, name)} == {taken.split(".")[0]}
    assert torch.allclose(old(torch.ones(1)), torch.ones(1).sin())


def test_failure_of_a_later_form_ends_the_earlier_ones(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchop._define import out_op

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(out_op, "define_member", fail)
    with pytest.raises(MemoryError):
        torchop.out_op(f"{namespace}::op", write_sine, like="x")
    assert not exists(namespace, "op")


def test_defining_again_replaces_all_forms(namespace: str) -> None:
    old, new = sine(namespace), sine(namespace)
    for op in _forms(old):
        with pytest.raises(torchop.OperatorGoneError, match="replaced"):
            op(torch.ones(1))
    assert torch.allclose(new(torch.ones(1)), torch.ones(1).sin())


def test_forms_live_as_long_as_their_library(namespace: str) -> None:
    with torchop.Library(namespace, "FRAGMENT") as library:
        family = sine(namespace, lib=library)
        family(torch.ones(1), out=torch.empty(1))
    for op in _forms(family):
        with pytest.raises(torchop.OperatorGoneError, match="closed"):
            op(torch.ones(1))


def test_the_code_generator_of_pytorch_reads_the_schemas_and_ties_the_forms(namespace: str) -> None:
    # So ExecuTorch finds the form with out=.
    for family in (sine(namespace), bounds(namespace)):
        functional, out = (
            FunctionSchema.parse(str(op.schema).partition("::")[2])
            for op in (family.functional, family.out)
        )
        assert (functional.kind(), out.kind()) == (SchemaKind.functional, SchemaKind.out)
        assert out.signature() == functional.signature()
        assert str(out) == str(family.out.schema).partition("::")[2]


def test_more_outputs_than_letters_have_numbers(namespace: str) -> None:
    names = [f"out{index}" for index in range(27)]
    parameters = ", ".join(f"{name}: torch.Tensor" for name in names)
    scope: dict[str, Any] = {"torch": torch}
    exec(f"def write(x: torch.Tensor, *, {parameters}) -> None: ...", scope)
    family = torchop.out_op(
        f"{namespace}::op", scope["write"], allocate=lambda x: (torch.empty_like(x),) * 27
    )
    assert "Tensor(z!) out25, Tensor(a26!) out26) ->" in str(family.out.schema)


# --------------------------------------------------------------------------------------------------
# opcheck


@pytest.mark.parametrize("sample", list(SAMPLES))
def test_opcheck_passes_on_all_forms(family: torchop.OperatorFamily, sample: str) -> None:
    x = SAMPLES[sample]()
    torchop.opcheck(family.functional, (x,))
    torchop.opcheck(family.out, (x,), {"out": torch.empty_like(x)})
    torchop.opcheck(family.out, (x,), {"out": x.new_empty((*x.shape, 2))[..., 1]})
    assert family.inplace is not None
    torchop.opcheck(family.inplace, (x,))


def test_opcheck_passes_with_gradients(namespace: str, family: torchop.OperatorFamily) -> None:
    torchop.opcheck(family.functional, (torch.randn(3, requires_grad=True),))
    with torch.no_grad():
        x = torch.randn(3, requires_grad=True)
        torchop.opcheck(family.out, (x,), {"out": torch.empty(3)}, test_utils="test_schema")

    @torchop.out_op(f"{namespace}::mul", like="x", inplace=True, elementwise=True)
    def mul(x: Tensor, y: Tensor, *, out: Tensor) -> None:
        torch.mul(x, y, out=out)

    mul.register_autograd(
        lambda ctx, grad: (grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    # A leaf that requires grad cannot be written, so the gradient comes from the other argument.
    assert mul.inplace is not None
    torchop.opcheck(mul.inplace, (torch.randn(3), torch.randn(3, requires_grad=True)))


def test_forms_end_with_the_family_that_is_replaced(namespace: str) -> None:
    def write(x: Tensor, *, out: Tensor) -> None:
        out.copy_(x + 1)

    old = torchop.out_op(f"{namespace}::op", write, like="x", inplace=True)
    new = torchop.out_op(f"{namespace}::op", write, like="x")
    assert new(torch.zeros(1)).tolist() == [1]
    for call in (old, old.inplace, lambda x: old.out(x, out=torch.empty(1))):
        with pytest.raises(torchop.OperatorGoneError):
            call(torch.zeros(1))


def test_kernel_that_resizes_its_output_is_refused(namespace: str) -> None:
    def grow(x: Tensor, *, out: Tensor) -> None:
        out.resize_(2 * x.numel()).fill_(1)

    op = torchop.out_op(f"{namespace}::op", grow, like="x")
    with pytest.raises(
        torchop.ResultError,
        match=r"out without resizing it, but changed its shape from .* to \[4\]",
    ):
        op(torch.zeros(2))


def test_like_is_a_name(namespace: str) -> None:
    with pytest.raises(ValueError, match=r"like expects the name of an argument, got \['x'\]"):
        torchop.out_op(f"{namespace}::op", like=["x"])
