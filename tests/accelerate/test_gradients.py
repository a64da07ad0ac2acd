"""Formulas of accelerated operators get the same arguments and return the same gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import needs_native, outcome
from tests._support.devices import BACKEND
from tests.accelerate.support import T, counts_versions_once, stock, with_formula

pytestmark = needs_native


def test_without_a_formula_pytorch_raises_in_backward(namespace, accelerated, library):
    library.define("op(Tensor x) -> Tensor")
    library.impl("op", lambda x: x.detach() * 2, BACKEND)
    op = getattr(torch.ops, namespace).op
    accelerated()
    assert not op(T).requires_grad
    result = op(T.clone().requires_grad_())
    assert result.requires_grad
    with pytest.warns(UserWarning, match="an autograd kernel was not registered"):
        result.sum().backward()
    assert torchop.native.counters(op) == {"native": 2}


def test_formula_gets_the_same_arguments(namespace, accelerated, seen):
    handle = with_formula(namespace, seen)

    def calls():
        for args in ((3,), (3, None, 1.0), (3, T), (3, T.clone().requires_grad_(), 2.0)):
            x = T.clone().requires_grad_()
            first, second = handle(x, *args)
            first.sum().backward()
            yield x.grad, second.requires_grad, type(first.grad_fn).__name__, first.grad_fn.name()

    before = list(calls())
    told = seen[:]
    seen.clear()
    accelerated()
    after = list(calls())
    assert torchop.native.counters(handle) == {"native": 4}
    assert seen == told
    # `needs_input_grad` has an entry for each argument that was passed, and one for an argument
    # that PyTorch adds.
    assert told[0][1] == (True, False, False)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[0], new[0])
        assert old[1:] == new[1:]


def test_gradients_without_setup_context_and_of_higher_order(namespace, accelerated):
    def op(x: Tensor) -> Tensor:
        return x.sin()

    handle = stock(namespace, op)
    handle.register_autograd(lambda ctx, g: g * 2)
    accelerated()
    x = T.clone().double().requires_grad_()
    (grad,) = torch.autograd.grad(handle(x).sum(), x)
    assert torch.equal(grad, torch.full((4,), 2.0).double())

    def cube(x: Tensor) -> Tensor:
        return x**3

    cubed = stock(namespace, cube)
    cubed.register_autograd(
        lambda ctx, g: g * 3 * ctx.saved_tensors[0] ** 2,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    assert torch.autograd.gradcheck(cubed, x)
    assert torch.autograd.gradgradcheck(cubed, x)
    assert torchop.native.counters(cubed)["native"] > 2


def test_a_formula_registered_later_is_used(namespace, accelerated):
    def op(x: Tensor) -> Tensor:
        return x.clone()

    handle = stock(namespace, op)
    before = outcome(lambda: handle(T.clone().requires_grad_()).sum().backward())
    accelerated()
    x = T.clone().requires_grad_()
    assert outcome(lambda: handle(x).sum().backward()) == before
    assert "no autograd formula was registered" in before[1]
    for factor in (2, 3):
        handle.register_autograd(
            lambda ctx, g: g * ctx.factor,
            setup_context=lambda ctx, inputs, output, factor=factor: setattr(ctx, "factor", factor),
        )
        (grad,) = torch.autograd.grad(handle(x).sum(), x)
        assert torch.equal(grad, torch.full((4,), float(factor)))
    assert torchop.native.counters(handle) == {"native": 3}


def test_gradients_through_lists(namespace, accelerated, seen):
    def op(
        xs: Sequence[Tensor], sizes: Sequence[int], w: Tensor, rest: Sequence[Tensor], k: int = 2
    ) -> tuple[Tensor, Tensor]:
        return sum([*xs, *rest]) * w, w * k

    def setup_context(ctx, inputs, output):
        seen.append(("setup", [type(item).__name__ for item in inputs], ctx.needs_input_grad))
        ctx.save_for_backward(inputs[2], *inputs[0])
        ctx.count, ctx.k = len(inputs[3]), inputs[4]

    def backward(ctx, first, second):
        w, *xs = ctx.saved_tensors
        seen.append(("backward", ctx.needs_input_grad))
        grads = [first * w for _ in xs]
        inputs = grads, None, second * ctx.k, [first * w] * ctx.count, None
        # PyTorch drops arguments that equal their default, and expects no gradients for them.
        return inputs[: len(ctx.needs_input_grad)]

    handle = stock(namespace, op)
    handle.register_autograd(backward, setup_context=setup_context)
    x, y, w = (T.clone().requires_grad_() for _ in range(3))
    calls = [
        lambda: ([x, T, y], [1], w, []),
        lambda: ([x, x], [1, 2], T, [y, T], 3),
        lambda: ([], [1], w, [x]),
        lambda: ([T], [], T, [x], 2),  # for PyTorch, an empty list may contain tensors
    ]

    def gradients() -> list[Any]:
        def of(arguments: tuple[Any, ...]) -> Any:
            results = handle(*arguments)
            shown = [(r.requires_grad, type(r.grad_fn).__name__) for r in results]
            wanted = torch.autograd.grad(
                results[0].sum() + results[1].sum(), (x, y, w), allow_unused=True
            )
            return [[None if g is None else g.tolist() for g in wanted], shown]

        return [outcome(lambda call=call: of(call())) for call in calls]

    before = gradients()
    told = seen[:]
    seen.clear()
    accelerated()
    assert gradients() == before
    assert seen == told
    assert len(told) == 8
    assert torchop.native.counters(handle) == {"native": len(calls)}


@pytest.mark.parametrize("way", ["handle", "overload", "packet"])
@pytest.mark.parametrize(
    ("returns", "kernel"),
    [
        ("Tensor[]", lambda x, w: [x * 2, w * x]),
        ("Tensor[]", lambda x, w: []),
        ("Tensor[]", lambda x, w: [x.long(), w * x]),
        ("(Tensor, Tensor[])", lambda x, w: (x * 2, [w * x, x + 1])),
        ("(Tensor[], Tensor)", lambda x, w: ([w * x], x * 2)),
        ("(Tensor, Tensor?)", lambda x, w: (x * w, None)),
        ("(Tensor, int)", lambda x, w: (x * w, 3)),
        ("(Tensor[], float)", lambda x, w: ([x * w, x + 1], 0.5)),
    ],
)
def test_gradients_of_results_that_are_lists(namespace, accelerated, seen, returns, kernel, way):
    handle = torch.library.custom_op(
        f"{namespace}::op", kernel, mutates_args=(), schema=f"(Tensor x, Tensor w) -> {returns}"
    )

    def setup_context(ctx, inputs, output):
        seen.append(("setup", str(output), ctx.needs_input_grad))
        ctx.save_for_backward(*inputs)

    def backward(ctx, *grads):
        seen.append(("backward", str(grads), str(ctx.saved_tensors), ctx.needs_input_grad))
        (grad,) = [g for g in flat(grads) if g is not None and g.is_floating_point()][:1]
        return grad * 2, grad * 3

    def flat(value):
        return [i for v in value for i in flat(v)] if isinstance(value, list | tuple) else [value]

    handle.register_autograd(backward, setup_context=setup_context)
    overload = handle._opoverload
    op = {"handle": handle, "overload": overload, "packet": overload.overloadpacket}[way]

    def called():
        seen.clear()
        x, w = T.clone().requires_grad_(), (T + 1).requires_grad_()
        results = op(x, w)
        tensors = [item for item in flat([results]) if isinstance(item, Tensor)]
        wanted = [tensor.sum() * 2 for tensor in tensors if tensor.requires_grad]
        if wanted:
            sum(wanted).backward()
        return str(results), [t.output_nr for t in tensors], str((x.grad, w.grad)), list(seen)

    before = called()
    accelerated()
    assert called() == before
    assert torchop.native.counters(handle) == {"native": 1}


def leaf() -> Tensor:
    return T.clone().requires_grad_()


def fixed() -> Tensor:
    return T.clone()


@pytest.mark.pairwise
@pytest.mark.parametrize("make", [leaf, fixed])
@pytest.mark.parametrize("other", [leaf, fixed])
@pytest.mark.parametrize("shape", ["all", "none", "one", "first"])
def test_gradients_of_a_list_that_contains_none(namespace, accelerated, seen, make, other, shape):
    """If a list contains None, PyTorch computes no gradients for the tensors in the list."""

    def op(xs: Sequence[Tensor | None], w: Tensor) -> Tensor:
        return sum([x for x in xs if x is not None], w * 2)

    handle = stock(namespace, op)

    def setup_context(ctx, inputs, output):
        seen.append(ctx.needs_input_grad)
        ctx.count = len(inputs[0])

    handle.register_autograd(
        lambda ctx, g: ([g * 3] * ctx.count if shape == "all" else None, g * 2),
        setup_context=setup_context,
    )

    def called():
        seen.clear()
        x, w = make(), other()
        xs = {"all": [x, x], "none": [None], "one": [x, None], "first": [None, x]}[shape]
        result = handle(xs, w)
        if result.requires_grad:
            result.sum().backward()
        return str((result, x.grad, w.grad, seen, [n for n, _ in graph_of(result)]))

    before = outcome(called)
    accelerated()
    assert outcome(called) == before
    assert torchop.native.counters(handle) == {"native": 1}


def graph_of(result: Tensor) -> list[Any]:
    edges = () if result.grad_fn is None else result.grad_fn.next_functions
    return [(None if node is None else type(node).__name__, number) for node, number in edges]


@counts_versions_once
@pytest.mark.parametrize("make", [leaf, fixed])
@pytest.mark.parametrize("returns", ["()", "Tensor"])
def test_operators_that_mutate_something_else(namespace, accelerated, make, returns):
    def kernel(buffer, x):
        buffer.add_(x.detach())
        return None if returns == "()" else buffer * 2

    handle = torch.library.custom_op(
        f"{namespace}::op",
        kernel,
        mutates_args=("buffer",),
        schema=f"(Tensor(a!) buffer, Tensor x) -> {returns}",
    )

    def called():
        buffer, x = fixed(), make()
        result = handle(buffer, x)
        error = None
        if returns != "()" and result.requires_grad:
            error = outcome(lambda: result.sum().backward())
        return str((result, buffer, buffer._version, buffer.requires_grad, error)).replace("[]", "")

    before = called()
    accelerated()
    assert called() == before
    assert torchop.native.counters(handle) == {"native": 1}


@pytest.mark.parametrize("schema", ["(Tensor x, Tensor y)", "(Tensor[] x, Tensor y)"])
@pytest.mark.parametrize("count", [1, 2])
def test_kernel_that_returns_its_inputs_does_not_change_them(
    namespace, accelerated, library, schema, count
):
    library.define(f"op{schema} -> {'Tensor' if count == 1 else '(Tensor, Tensor)'}")

    def kernel(x, y):
        return y if count == 1 else (y, x[0] if isinstance(x, list) else x)

    library.impl("op", kernel, BACKEND)
    op = getattr(torch.ops, namespace).op.default

    def backward(ctx, *grads):
        return ([3 * grads[0]] if "[]" in schema else 3 * grads[0]), 5 * grads[0]

    torch.library.register_autograd(op, backward, lib=library)

    def called():
        x, y, leaf = (
            torch.ones(2, requires_grad=True),
            torch.ones(2),
            torch.ones(2).requires_grad_(),
        )
        found: list[Any] = []
        for second in (y, leaf):
            result = op([x] if "[]" in schema else x, second)
            outputs = [result] if count == 1 else list(result)
            found += [(out is x, out is second, out._is_view(), out.output_nr) for out in outputs]
            outputs[0].sum().backward()
            found += [x.is_leaf, second.is_leaf, second.requires_grad, x.grad, second.grad]
        return str(found)

    expected = called()
    accelerated()
    assert called() == expected
    assert torchop.native.counters(op) == {"native": 2}


def test_formula_gets_defaults_as_stored_in_the_schema(namespace, accelerated, library, seen):
    library.define(
        "op(Tensor x, int[] sizes=[1, 2], Device? device='cpu', float f=0.5, ScalarType? type=int, "
        "*, MemoryFormat layout=contiguous_format, float[] scales=[1.0]) -> Tensor"
    )
    library.impl("op", lambda x, *args, **kwargs: x * len(args), BACKEND)

    def setup_context(ctx, inputs, keyword_only_inputs, output):
        seen.append((ctx.needs_input_grad, inputs[1:], keyword_only_inputs))
        ctx.count = len(inputs)

    def backward(ctx, g):
        seen.append(ctx.needs_input_grad)
        return (g * ctx.count, *[None] * (len(ctx.needs_input_grad) - 1))

    torch.library.register_autograd(
        f"{namespace}::op", backward, setup_context=setup_context, lib=library
    )
    op = getattr(torch.ops, namespace).op
    cpu = torch.device("cpu")
    calls = [
        ((), {}),
        (([1, 2],), {"layout": torch.contiguous_format}),
        (([1, 2], cpu), {"scales": [1.0]}),
        (([3], cpu, 0.5, torch.int32), {"scales": [2.0]}),
        (([3], cpu, 0.25, torch.float32), {"layout": torch.channels_last}),
        (([1, 2], None, 0.5), {}),
    ]

    def gradients() -> list[Any]:
        x = T.clone().requires_grad_()
        return [torch.autograd.grad(op(x, *a, **k).sum(), x)[0].tolist() for a, k in calls]

    before = gradients()
    told = repr(seen)
    seen.clear()
    accelerated()
    assert gradients() == before
    assert repr(seen) == told
    assert "layout': 0" in told  # the schema stores this default as a number
    assert torchop.native.counters(op) == {"native": len(calls)}
