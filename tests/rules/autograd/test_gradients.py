"""The gradients that a formula gets, and checks of the gradients that it returns.

Uses private names.
"""

import contextlib
import re
from typing import List, Optional

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import needs_native, on_both
from tests.rules.support import leaf
from tests.rules.support import with_formula as define
from torchop import _hooks
from torchop._rules.autograd import gradients


def one(x: Tensor) -> Tensor:
    return x.clone()


def two(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def listed(xs: List[Tensor]) -> Tensor:
    return torch.stack(xs).sum(0)


def counted(x: Tensor, n: int, flag: bool = True, y: Optional[Tensor] = None) -> Tensor:
    return x.clone()


# --------------------------------------------------------------------------------------------------
# Returned gradients


def test_too_few_gradients_are_counted_without_internal_inputs(namespace):
    def scenario(library, namespace):
        op = define(namespace, one, lambda ctx, grad: (), library=library)
        op(leaf()).sum().backward()

    both = on_both(scenario, namespace)
    assert "incorrect number of gradients (expected 1, got 0)" in str(both.ours)
    assert isinstance(both.ours, torchop.GradientError)
    assert isinstance(both.ours, TypeError)
    assert isinstance(both.ours, RuntimeError)


@pytest.mark.parametrize(("gradients", "got"), [((), 0), ((None,), 1), ((None,) * 4 + (0,), 5)])
def test_wrong_number_of_gradients_names_the_inputs(namespace, gradients, got):
    op = define(namespace, counted, lambda ctx, grad: gradients)
    with pytest.raises(torchop.GradientError) as caught:
        op(leaf(), 5).sum().backward()
    message = str(caught.value)
    assert message.startswith(f"{namespace}::op: backward returned an incorrect number")
    assert f"(expected 2 to 4, got {got})" in message
    assert "one for each input: x, n, flag, y" in message


def test_extra_none_gradients_are_ignored(namespace):
    def scenario(library, namespace):
        op = define(namespace, counted, lambda ctx, grad: (grad, *[None] * 6), library=library)
        x = leaf()
        op(x, 5).sum().backward()
        return x.grad.tolist()

    both = on_both(scenario, namespace)
    assert both.ours == [1, 1]
    # PyTorch raises an error since 2.15.
    assert both.stock == [1, 1] or "incorrect number of gradients" in str(both.stock)


@pytest.mark.parametrize("gradients", [2, 3, 4])
def test_inputs_that_the_caller_omitted_may_have_a_gradient_of_none(namespace, gradients):
    op = define(namespace, counted, lambda ctx, grad: (grad, None, None, None)[:gradients])
    x = leaf()
    op(x, 5).sum().backward()
    assert x.grad.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("function", "arguments", "gradients", "input_name", "expected", "got"),
    [
        (one, (leaf(),), "a string", "x", "a Tensor or None", "str"),
        (one, (leaf(),), [torch.ones(2)], "x", "a Tensor or None", "list of 1 (Tensor)"),
        (two, (leaf(), leaf()), (None, 3), "y", "a Tensor or None", "int"),
        (counted, (leaf(), 5), (None, 3), "n", "a Tensor or None", "int"),
        (counted, (leaf(), 5), (None, torch.ones(2)), "n", "it is not a tensor", "Tensor"),
        (counted, (leaf(), 5), (None, leaf(), None, None), "n", "it is not a tensor", "Tensor"),
        (listed, ([leaf(), leaf()],), torch.ones(2), "xs", "a list of 2", "Tensor"),
        (listed, ([leaf(), leaf()],), ([None],), "xs", "same structure", "list of 1"),
        (listed, ([leaf()],), (["x"],), "xs", "a list of Tensor or None", "list of 1 (str)"),
    ],
)
def test_wrong_gradient_names_the_input_and_both_types(
    namespace, function, arguments, gradients, input_name, expected, got
):
    op = define(namespace, function, lambda ctx, grad: gradients)
    with pytest.raises(torchop.GradientError) as caught:
        op(*arguments).sum().backward()
    message = str(caught.value)
    assert message.startswith(f"{namespace}::op: backward returned the wrong gradient for input")
    assert f"for input {input_name!r}: expected " in message
    assert expected in message.partition("expected")[2]
    assert f", got {got}" in message


@pytest.mark.parametrize("passed", [(), (False,), (False, None)])
def test_gradient_for_an_input_that_was_none_is_rejected(namespace, passed):
    op = define(namespace, counted, lambda ctx, grad: (None, None, None, torch.ones(2)))
    with pytest.raises(RuntimeError, match=r"at position 4, but .* was not a Variable"):
        op(leaf(), 5, *passed).sum().backward()


@pytest.mark.parametrize("requires_grad", [(True, False), (False, True)])
def test_unneeded_gradient_is_dropped(namespace, requires_grad):
    op = define(namespace, two, lambda ctx, grad: (grad, grad))
    x, y = (torch.ones(2, requires_grad=flag) for flag in requires_grad)
    op(x, y).sum().backward()
    assert (x.grad is not None, y.grad is not None) == requires_grad


def test_gradient_of_another_dtype_is_cast(namespace):
    op = define(namespace, one, lambda ctx, grad: grad.double())
    x = leaf()
    op(x).sum().backward()
    assert x.grad.dtype is torch.float32


# --------------------------------------------------------------------------------------------------
# Gradients whose shape, dtype or device differs from the input's


def quotient(x: Tensor, n: int, y: Tensor) -> Tensor:
    return x / y


MISFITS = {
    "smaller": (lambda g: g.sum(0), r"expected the shape \(2, 3\), got \(3,\)"),
    "larger": (lambda g: g.new_ones(5, 3), r"expected the shape \(2, 3\), got \(5, 3\)"),
    "a number": (lambda g: g.sum(), r"expected the shape \(2, 3\), got \(\)"),
    "another device": (lambda g: g.to("meta"), "expected a tensor on cpu, got one on meta"),
    "complex": (lambda g: g * 1j, r"expected real numbers, got torch\.complex64"),
}
ACCEPTED = {
    "the same": lambda g: g,
    "of another dtype": lambda g: g.double(),
    "of integers": lambda g: g.int(),
    "broadcast": lambda g: g.expand(4, 2, 3),
    "of other strides": lambda g: g.t().contiguous().t(),
}


def fit(grads, count, node):
    """Return whether the gradients fit a node's inputs, without the check in C++."""
    return gradients.are_plain_in_python(grads, count, node) and not [
        *gradients._mismatches(grads, node)
    ]


# The check of gradients exists in C++ and in Python. Both must give the same answers.
LOOKS = pytest.mark.parametrize(
    "are_plain",
    [
        pytest.param(lambda *args: _hooks.extension.are_plain(*args), id="C++", marks=needs_native),
        pytest.param(fit, id="Python"),
    ],
)


@LOOKS
@pytest.mark.parametrize("change", [misfit[0] for misfit in MISFITS.values()], ids=MISFITS)
def test_gradients_with_other_metadata_than_the_inputs(namespace, are_plain, change):
    x, y = torch.ones(2, 2, 3, requires_grad=True)
    result = define(namespace, quotient, lambda ctx, g: (g, None, g))(x, 3, y)
    node = result.grad_fn  # keep `result`, because before 2.13, its node dies with it
    grad = torch.ones(2, 3)
    assert are_plain((grad, None, grad), 3, node)
    assert are_plain((grad, None, None), 3, node)
    assert not are_plain((grad, None, change(grad)), 3, node)
    assert not are_plain((change(grad), None, grad), 3, node)
    assert not are_plain((grad, None), 3, node)


@LOOKS
def test_unneeded_gradients_may_have_any_shape_and_dtype(namespace, are_plain):
    x, y = torch.ones(2, 3), torch.ones(2, 3, requires_grad=True)
    op = define(namespace, quotient, lambda ctx, g: (g.sum(), None, g))
    assert are_plain((torch.ones(5), None, torch.ones(2, 3)), 3, op(x, 3, y).grad_fn)
    op(x, 3, y).sum().backward()
    assert y.grad.shape == (2, 3)


@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize(
    ("schema", "arguments", "gradients", "input_name"),
    [
        ("(Tensor x, Tensor[] y) -> Tensor", lambda x: (x, [x + 1, x]), "xy", "y[1]"),
        ("(Tensor x, Tensor[] y) -> Tensor", lambda x: (x, [x, x + 1]), "x0", "x"),
        ("(Tensor x, Tensor[]? y=None) -> Tensor", lambda x: (x, None), "x0", "x"),
        ("(Tensor?[] x, Tensor y) -> Tensor", lambda x: ([None, x], x), "xy", "x[1]"),
    ],
)
def test_the_message_names_the_entry_of_a_list(
    namespace, is_native, schema, arguments, gradients, input_name
):
    wrong = torch.ones(())
    returned = {
        "x0": lambda g: (wrong, None),
        "xy": lambda g: (g, [g, wrong]) if "x, Tensor[] y" in schema else ([None, wrong], g),
    }[gradients]
    op = torchop.custom_op(
        f"{namespace}::op", lambda *arguments: torch.ones(2), mutates_args=(), schema=schema
    )
    op.register_autograd(lambda ctx, grad: returned(grad))
    for _ in range(2):  # the first call creates the call plan that the second uses
        with contextlib.nullcontext() if is_native else torchop.native.disabled():
            result = op(*arguments(leaf()))
        with pytest.raises(torchop.GradientError, match=re.escape(f"for input {input_name!r}: ")):
            result.sum().backward()


@pytest.mark.parametrize("change", ACCEPTED.values(), ids=ACCEPTED)
def test_gradients_that_autograd_can_convert_are_accepted(namespace, change):
    both = on_both(lambda library, n: _backward_of_quotient(library, n, change), namespace)
    assert both.ours.dtype is torch.float32
    assert torch.equal(both.ours, both.stock)


def _backward_of_quotient(library, namespace, change):
    op = library.custom_op(f"{namespace}::op", quotient, mutates_args=())
    op.register_autograd(lambda ctx, grad: (grad, None, change(grad)))
    x, y = torch.ones(2, 2, 3, requires_grad=True).unbind()
    y.retain_grad()
    op(x, 3, y).sum().backward()
    return y.grad


def test_shared_gradients_are_copied():
    """A gradient must be copied if it shares memory with another tensor involved in the call."""
    given, x = torch.ones(2, 2), torch.ones(2, 2)
    shared = torch.ones(2, 2)
    made = [given, x[:], shared, shared, torch.ones(()).expand(2, 2), shared + 1]
    fresh = gradients.in_fresh_memory(made, [x] * len(made), [[given], x])
    assert fresh[2] is shared
    assert fresh[5] is made[5]
    memory = {tensor.untyped_storage().data_ptr() for tensor in (given, x, *fresh)}
    assert len(memory) == 2 + len(made)
    for one_made, one_fresh in zip(made, fresh, strict=True):
        assert torch.equal(one_made, one_fresh)
        assert one_fresh.stride() == x.stride()
