import ctypes
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import in_threads, on_both
from tests.rules.support import assert_only_torchop_rejects, save_inputs


def define(namespace, library=torchop):
    @library.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x.sin()

    return op


def cosine(ctx, grad):
    (x,) = ctx.saved_tensors
    return grad * x.cos()


def differentiable(namespace, library=torchop):
    op = define(namespace, library)
    op.register_autograd(cosine, setup_context=save_inputs)
    return op


def gradient(op) -> float:
    x = torch.zeros(1, requires_grad=True)
    op(x).sum().backward()
    return x.grad.item()


# --------------------------------------------------------------------------------------------------
# Registration


def test_last_registered_formula_applies(namespace):
    op = differentiable(namespace)
    op.register_autograd(lambda ctx, grad: grad * 5)
    assert gradient(op) == 5


@pytest.mark.parametrize("backward", ["non-differentiable", 3, torch.ones(1)])
def test_formula_that_is_no_function_is_refused(namespace, backward):
    assert_only_torchop_rejects(
        namespace,
        lambda library, namespace: define(namespace, library).register_autograd(backward),
        TypeError,
        f"{namespace}::op: backward must be a function, got",
    )


@pytest.mark.parametrize(
    "backward", [lambda grad: grad, lambda ctx, a, b: a, lambda ctx, grad, *, scale: grad]
)
def test_backward_with_other_parameters_is_refused(namespace, backward):
    assert_only_torchop_rejects(
        namespace,
        lambda library, namespace: define(namespace, library).register_autograd(backward),
        torchop.RuleSignatureError,
        f"{namespace}::op: backward is called with (ctx, grad_0)",
    )


@pytest.mark.parametrize("setup_context", ["save", lambda ctx: None, lambda a, b, c, d: None])
def test_setup_context_with_other_parameters_is_refused(namespace, setup_context):
    assert_only_torchop_rejects(
        namespace,
        lambda library, namespace: define(namespace, library).register_autograd(
            cosine, setup_context=setup_context
        ),
        torchop.RuleSignatureError,
        f"{namespace}::op: setup_context ",
    )


def test_rejected_formula_keeps_the_old_one(namespace):
    op = differentiable(namespace)
    with pytest.raises(torchop.RuleSignatureError, match=r"called with \(ctx, inputs, output\)"):
        op.register_autograd(lambda ctx, grad: grad * 5, setup_context=lambda ctx: None)
    assert gradient(op) == 1


def in_place(x: Tensor) -> None:
    x.add_(1)


def nothing(x: Tensor) -> None:
    pass


@pytest.mark.parametrize(("function", "mutated"), [(in_place, ("x",)), (nothing, ())])
def test_operator_without_fresh_results_takes_no_formula(namespace, function, mutated):
    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=mutated, effects="none")
    with pytest.raises(RuntimeError, match="Cannot register autograd formula for non-functional"):
        op.register_autograd(lambda ctx: None)


def test_operator_with_keyword_only_tensors_takes_no_formula(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x, *, Tensor y) -> Tensor")
        with pytest.raises(NotImplementedError, match="kwarg-only Tensor args"):
            torchop.register_autograd(f"{namespace}::op", lambda ctx, grad: grad, lib=library)


def test_formula_for_an_operator_of_a_library(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", lambda x: x.sin(), "CompositeExplicitAutograd")
        op = getattr(torch.ops, namespace).op
        torchop.register_autograd(op, cosine, setup_context=save_inputs, lib=library)
        assert gradient(op) == 1


def test_view_operator_takes_a_formula(namespace):
    op = torchop.custom_op(
        f"{namespace}::op",
        lambda x: x.view(-1),
        mutates_args=(),
        schema="(Tensor(a) x) -> Tensor(a)",
    )

    def setup_context(ctx, inputs, output):
        ctx.shape = inputs[0].shape

    op.register_autograd(lambda ctx, grad: grad.view(ctx.shape), setup_context=setup_context)
    x = torch.ones(2, 3, requires_grad=True)
    result = op(x)
    assert result._is_view()
    (result * torch.arange(6.0)).sum().backward()
    assert x.grad.tolist() == [[0, 1, 2], [3, 4, 5]]


# --------------------------------------------------------------------------------------------------
# Arguments of setup_context


def test_setup_context_may_name_its_parameters_freely(namespace):
    def scenario(library, namespace):
        op = define(namespace, library)
        op.register_autograd(cosine, setup_context=lambda c, i, o: c.save_for_backward(*i))
        return gradient(op)

    both = on_both(scenario, namespace)
    assert both.ours == 1
    assert isinstance(both.stock, TypeError)


def test_setup_context_sees_inputs_and_output_themselves(namespace):
    seen = []
    op = define(namespace)

    def setup_context(ctx, inputs, output):
        seen.append((inputs, output))

    op.register_autograd(lambda ctx, grad: grad, setup_context=setup_context)
    x = torch.ones(1, requires_grad=True)
    result = op(x)
    ((inputs, output),) = seen
    assert inputs[0] is x
    assert torch.equal(output, result)


def test_setup_context_runs_only_when_a_gradient_is_recorded(namespace):
    calls = []
    op = define(namespace)
    op.register_autograd(
        lambda ctx, grad: grad, setup_context=lambda ctx, inputs, output: calls.append(output)
    )
    x = torch.ones(1, requires_grad=True)
    op(x.detach())
    with torch.no_grad():
        op(x)
    with torch.inference_mode():
        op(x)
    assert calls == []
    op(x)
    assert len(calls) == 1


def thread_has_transforms() -> bool:
    """Return whether functorch has created its stack of transforms for this thread.

    The stack is never deleted. If it exists, each autograd node copies it in the backward, which
    takes a twentieth of the time. So training must not create the stack.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    accessor = library._ZN2at9functorch20functorchTLSAccessorEv
    accessor.restype = ctypes.POINTER(ctypes.c_void_p)
    return accessor()[0] is not None


@pytest.mark.skipif(sys.platform != "linux", reason="the name of the function is that on Linux")
def test_training_creates_no_functorch_stack(namespace):
    op = differentiable(namespace)

    def work(_):
        result = gradient(op), thread_has_transforms()
        torch.func.grad(torch.sin)(torch.zeros(()))
        return (*result, thread_has_transforms())

    assert in_threads(work, 1) == [(1, False, True)]


# --------------------------------------------------------------------------------------------------
# A missing or failing formula


@pytest.mark.parametrize("way", ["handle", "packet", "overload"])
def test_backward_without_a_formula_says_how_to_register_one(namespace, way):
    op = define(namespace)
    call = {"handle": op, "packet": getattr(torch.ops, namespace).op, "overload": op.overload}[way]
    result = call(torch.ones(1, requires_grad=True))
    assert result.requires_grad
    with pytest.raises(RuntimeError, match="no autograd formula was registered") as caught:
        result.backward()
    assert isinstance(caught.value, torchop.MissingFormulaError)
    assert f"register_autograd('{namespace}::op', backward, setup_context=...)" in str(caught.value)
    assert "call derive_autograd() on the handle instead" in str(caught.value)


@pytest.mark.parametrize("place", ["setup_context", "backward"])
def test_exception_of_a_formula_passes_through(namespace, place):
    op = define(namespace)

    def fail(*args, **kwargs):
        raise ZeroDivisionError("in the formula")

    if place == "backward":
        op.register_autograd(fail)
    else:
        op.register_autograd(cosine, setup_context=fail)
    with pytest.raises(ZeroDivisionError, match="in the formula"):
        gradient(op)
    op.register_autograd(cosine, setup_context=save_inputs)
    assert gradient(op) == 1


@pytest.mark.parametrize(
    "schema",
    ["(Tensor x) -> Tensor[][]", "(Tensor[][] x) -> Tensor", "(Tensor x) -> Dict(str, Tensor)"],
)
def test_operator_with_nested_tensors_takes_no_formula(namespace, schema):
    op = torchop.custom_op(f"{namespace}::op", lambda x: x, mutates_args=(), schema=schema)
    with pytest.raises(NotImplementedError, match="autograd does not see tensors in these types"):
        op.register_autograd(lambda ctx, grad: grad)
