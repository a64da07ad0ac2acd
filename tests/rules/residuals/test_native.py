from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import needs_native
from tests._support.forking import run_forked
from tests.native.gradients.recording import all_native, leaf, make_formula

pytestmark = needs_native


def define(namespace, kernel, schema, setup_context, residuals=None):
    """Define x cubed with residuals, and call it once, so that the next call is native."""
    op = torchop.custom_op(
        f"{namespace}::op",
        kernel,
        schema=schema,
        mutates_args=(),
        residuals=residuals or {"slope": Tensor},
    )

    def backward(ctx, *grads):
        (grad, *_) = grads[0] if isinstance(grads[0], list) else grads
        return ctx.saved_tensors[0] * grad

    op.register_autograd(backward, setup_context=setup_context)
    make_formula(op)
    return op


def slope_of(inputs):
    return 3 * inputs[0] ** 2


def save(ctx, inputs, output, residuals):
    assert type(residuals).__name__ == "residuals"
    ctx.save_for_backward(residuals.slope)


CASES = {
    "one result": (
        lambda x: torchop.residuals(x**3, 3 * x**2),
        "(Tensor x) -> Tensor",
        save,
        {"slope": Tensor},
    ),
    "several": (
        lambda x: torchop.residuals((x**3, x + 1), x + 2, 3 * x**2),
        "(Tensor x) -> (Tensor, Tensor)",
        save,
        {"other": Tensor, "slope": Tensor},
    ),
    "lists": (
        lambda x: torchop.residuals([x**3, x + 1], 3 * x**2),
        "(Tensor x) -> Tensor[]",
        lambda ctx, inputs, output, residuals: ctx.save_for_backward(residuals.slope),
        {"slope": Tensor},
    ),
    "optional": (
        lambda x: torchop.residuals(x**3, None, 3 * x**2),
        "(Tensor x) -> Tensor",
        save,
        {"mask": Tensor | None, "slope": Tensor},
    ),
    "a keyword": (
        lambda x, *, n: torchop.residuals(x**n, n * x ** (n - 1)),
        "(Tensor x, *, int n=3) -> Tensor",
        lambda ctx, inputs, keyword_only_inputs, output, *, residuals: ctx.save_for_backward(
            residuals.slope
        ),
        {"slope": Tensor},
    ),
    "not recorded": (
        lambda x: torchop.residuals(x**3, 3 * x**2),
        "(Tensor x) -> Tensor",
        lambda ctx, inputs, output: ctx.save_for_backward(slope_of(inputs)),
        {"slope": Tensor},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_operator(namespace, case):
    op = define(namespace, *CASES[case])
    x = leaf(1.0, 2.0)
    with all_native(op):
        result = op(x)
        first = result[0] if isinstance(result, (tuple, list)) else result
        first.sum().backward()
    assert x.grad.tolist() == [3.0, 12.0]
    with all_native(op):
        alone = op(x.detach())
    assert type(alone) is type(result)
    assert torchop.testing.saved_bytes(op, x) == 16


def test_residuals_saved_at_other_positions_are_guarded(namespace):
    """Second derivatives raise, at whichever position `save_for_backward` gets the residual."""
    places = []

    def save_somewhere(ctx, inputs, output, residuals):
        tensors = [inputs[0].detach()] * 2
        tensors.insert(places[-1], residuals.slope)
        ctx.save_for_backward(*tensors)

    kernel, schema, *_ = CASES["one result"]
    op = define(namespace, kernel, schema, save_somewhere)

    def backward(ctx, grad):
        return grad * ctx.saved_tensors[places[-1]]

    op.register_autograd(backward, setup_context=save_somewhere)
    make_formula(op)
    for place in (1, 0, 2, 1):
        places.append(place)
        x = leaf()
        with all_native(op):
            (gradient,) = torch.autograd.grad(op(x), x, create_graph=True)
        assert gradient.item() == 12.0
        with pytest.raises(torchop.MissingFormulaError, match="depends on a residual"):
            gradient.backward()


def test_residuals_that_no_kernel_can_return_are_rejected(namespace):
    empty = type(torchop.residuals(1))
    op = define(namespace, lambda x: empty(), "(Tensor x) -> Tensor", save)
    with pytest.raises((torchop.ResultError, AttributeError), match=r"residuals\(\.\.\.\)|output"):
        op(leaf())


@pytest.mark.parametrize("returns", ["(Tensor, Tensor)", "Tensor[]"])
def test_another_result_is_no_residual(namespace, returns):
    def kernel(x):
        y = x + 1
        return torchop.residuals([x**3, y] if returns == "Tensor[]" else (x**3, y), y)

    op = define(namespace, kernel, f"(Tensor x) -> {returns}", save)
    with pytest.raises(torchop.AliasError, match=r"a residual shares memory with"):
        op(leaf())


def test_a_kernel_that_forgets_a_residual_that_is_no_tensor(namespace):
    def save_nothing(ctx, inputs, output, residuals):
        raise AssertionError("called without residuals")

    op = define(
        namespace,
        lambda x: torchop.residuals(x**3),
        "(Tensor x) -> Tensor",
        save_nothing,
        {"count": int},
    )
    with pytest.raises(torchop.ResultError, match="returned 0 of 1 residuals"):
        op(leaf())


def test_a_kernel_that_calls_itself_without_gradients(namespace):
    told = []

    def kernel(x):
        told.append(torchop.records_gradient())
        if x.numel() > 1:
            op(x[:1].clone())
            told.append(torchop.records_gradient())
        return torchop.residuals(x**3, 3 * x**2)

    op = define(namespace, kernel, "(Tensor x) -> Tensor", save)
    with all_native(op):
        op(leaf(1.0, 2.0)).sum().backward()
    assert told == [True, False, True]
    assert not torchop.records_gradient()


def test_thread_records_outlive_operators_with_residuals():
    """C++ keeps its reference to `_recording` after the last operator with residuals is freed.

    Calls to other operators still read this object.
    """
    done = run_forked("""
        import gc, sys
        import torch, torchop
        from torchop._rules.residuals import handover

        torchop.native.wait()
        before = sys.getrefcount(handover._recording)
        with torchop.Library("mylib", "FRAGMENT") as library:
            op = torchop.custom_op(
                "mylib::op",
                lambda x: torchop.residuals(x.clone(), x.clone()),
                schema="(Tensor x) -> Tensor",
                mutates_args=(),
                residuals={"copy": torch.Tensor},
                lib=library,
            )
            op.register_autograd(lambda ctx, grad: grad)
            op(torch.ones(2))
        del op, library
        gc.collect()
        print(sys.getrefcount(handover._recording) - before)
    """)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
