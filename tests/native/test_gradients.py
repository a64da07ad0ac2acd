"""What autograd offers, on graphs that native calls recorded: the same as by the dispatcher."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.compiled_autograd
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import torchop
from tests.support import counting, needs_native
from torchop._rules.autograd.rule import AutogradRule

pytestmark = needs_native


def differentiable(
    namespace: str,
    kernel: Callable[..., Any],
    schema: str,
    backward: Callable[..., Any],
    setup_context: Callable[..., Any] | None = None,
) -> Any:
    """An operator whose next call is native: the first one that records a gradient is not."""
    op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args=(), schema=schema)
    op.register_autograd(backward, setup_context=setup_context)
    assert op._definition.rule(AutogradRule).function  # makes it
    return op


def save_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


@pytest.fixture
def cube(namespace):
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * grad * x.square()

    return differentiable(namespace, lambda x: x**3, "(Tensor x) -> Tensor", backward, save_inputs)


def leaf(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values or (2.0,), requires_grad=True, dtype=dtype)


@contextlib.contextmanager
def all_native(op: Any) -> Iterator[None]:
    """Every call of the block is native, and there is one."""
    with counting(op) as calls:
        yield
    assert set(calls) == {"native"}, calls


def on_both_ways(op: Any, scenario: Callable[[], Any]) -> Any:
    """What a scenario returns with native calls, and that it returns the same by the dispatcher."""
    with all_native(op):
        native = outcome(scenario)
    with counting(op) as calls, torchop.native.disabled():
        dispatched = outcome(scenario)
    assert set(calls) == {"switched_off"}
    assert native == dispatched
    if isinstance(native, Raised):
        raise AssertionError(f"{native}")
    return native


class Raised(tuple[type[BaseException], str]):
    """An exception, as a value that can be compared."""


def outcome(scenario: Callable[[], Any]) -> Any:
    try:
        return scenario()
    except Exception as error:
        return Raised((type(error), str(error)))


def error_on_both_ways(op: Any, scenario: Callable[[], Any]) -> tuple[type, str]:
    """The exception of a scenario, which is the same on both ways."""
    with all_native(op):
        native = outcome(scenario)
    with torchop.native.disabled():
        dispatched = outcome(scenario)
    assert isinstance(dispatched, Raised), dispatched
    assert native == dispatched
    return native


# --------------------------------------------------------------------------------------------------
# Differentiating once and more


def test_gradient(cube):
    def scenario():
        x = leaf(2.0, -1.0)
        cube(x).sum().backward()
        return x.grad.tolist()

    assert on_both_ways(cube, scenario) == [12, 3]


def test_gradient_of_an_input_that_is_no_leaf(cube):
    def scenario():
        x = leaf(2.0)
        cube(cube(x * 1) * 1).sum().backward()
        return x.grad.item()

    assert on_both_ways(cube, scenario) == 9 * 2.0**8


def test_second_and_third_derivative(cube):
    def scenario():
        x = leaf(2.0)
        (first,) = torch.autograd.grad(cube(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        (third,) = torch.autograd.grad(second.sum(), x)
        return [first.item(), second.item(), third.item()]

    assert on_both_ways(cube, scenario) == [12, 12, 6]


def test_gradcheck_and_gradgradcheck(cube):
    with all_native(cube):
        assert torch.autograd.gradcheck(cube, leaf(0.5, -1.5))
        assert torch.autograd.gradgradcheck(cube, leaf(0.5, -1.5))


def test_gradcheck_fails_for_a_wrong_formula(cube):
    cube.register_autograd(lambda ctx, grad: grad)
    with all_native(cube), pytest.raises(RuntimeError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(cube, leaf(0.5))


def test_first_call_that_records_a_gradient_is_the_only_one_that_is_not_native(namespace):
    op = torchop.custom_op(
        f"{namespace}::op", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    op.register_autograd(lambda ctx, grad: grad)
    x = leaf()
    with counting(op) as calls:
        first, second = op(x), op(x)
    assert calls == {"gradient": 1, "native": 1}
    assert type(first.grad_fn) is type(second.grad_fn)


# --------------------------------------------------------------------------------------------------
# The graph


def test_nodes_look_the_same(cube, namespace):
    def scenario():
        y = cube(leaf())
        node = y.grad_fn
        return (
            node.name(),
            type(node),
            isinstance(node, torch.autograd.graph.Node),
            [(type(edge), index) for edge, index in node.next_functions],
            node.needs_input_grad,
            node.saved_tensors[0].tolist(),
            node.metadata,
            y.requires_grad,
            y.is_leaf,
            y.output_nr,
            y._version,
            node._input_metadata[0].shape,
            node._input_metadata[0].dtype,
        )

    name, *_ = on_both_ways(cube, scenario)
    assert name == f"{namespace}_opBackward"


def test_sequence_numbers_rise(cube):
    """Autograd runs the newest node first."""
    x = leaf()
    with all_native(cube):
        results = [cube(x) for _ in range(3)]  # until 2.12, a node lives as long as they do
    numbers = [result.grad_fn._sequence_nr() for result in results]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == 3


@pytest.mark.needs_torch("2.14", "hooks for new nodes")
def test_hook_for_new_nodes_sees_one_that_has_everything(cube):
    def scenario():
        x = leaf()
        seen = []

        def hook(node):
            if node.name().endswith("AccumulateGrad"):
                return
            seen.append(
                (
                    node.name().rpartition("_")[2],
                    [tensor.item() for tensor in node.saved_tensors],
                    [edge[0].name() for edge in node.next_functions],
                    [tuple(metadata.shape) for metadata in node._input_metadata],
                    node.needs_input_grad,
                )
            )

        with torch.autograd.graph.node_creation_hook(hook):
            y = cube(x)
        return seen, y.requires_grad

    ((name, saved, edges, shapes, needed),), _ = on_both_ways(cube, scenario)
    assert (name, saved, shapes) == ("opBackward", [2.0], [(1,)])
    assert edges[0].endswith("AccumulateGrad")
    assert needed[0] is True


@pytest.mark.needs_torch("2.14", "hooks for new nodes")
def test_hook_for_new_nodes_that_raises(cube):
    def refuse(node):
        raise ValueError("no nodes today")

    def scenario():
        with torch.autograd.graph.node_creation_hook(refuse):
            cube(leaf())

    assert error_on_both_ways(cube, scenario)[1] == "no nodes today"


def test_graph_that_is_used_up_is_refused(cube):
    def scenario():
        y = cube(leaf()).sum()
        y.backward()
        y.backward()

    kind, message = error_on_both_ways(cube, scenario)
    assert kind is RuntimeError
    assert "backward through the graph a second time" in message


def test_graph_that_is_retained_serves_again(cube):
    def scenario():
        x = leaf()
        y = cube(x).sum()
        y.backward(retain_graph=True)
        y.backward(retain_graph=True)
        y.backward()
        return x.grad.item()

    assert on_both_ways(cube, scenario) == 36


def test_saved_tensors_of_a_graph_that_is_used_up_are_refused(cube):
    def scenario():
        y = cube(leaf())
        y.sum().backward()
        return y.grad_fn.saved_tensors

    _, message = error_on_both_ways(cube, scenario)
    assert "after they have already been freed" in message


def test_change_of_a_saved_tensor_is_noticed(cube):
    def scenario():
        x = leaf()
        y = x * 1
        result = cube(y)
        y.add_(1)
        result.sum().backward()

    _, message = error_on_both_ways(cube, scenario)
    assert "modified by an inplace operation" in message


def test_result_may_be_changed_in_place(cube):
    def scenario():
        x = leaf()
        y = cube(x)
        y.mul_(5)
        y.sum().backward()
        return x.grad.item()

    assert on_both_ways(cube, scenario) == 60


def test_needs_input_grad_and_gradients_that_nobody_asks_for(namespace):
    seen = []

    def backward(ctx, grad):
        seen.append(ctx.needs_input_grad)
        return grad, None, grad * 2, None

    op = differentiable(
        namespace,
        lambda x, n, y, z: x + n + 2 * y,
        "(Tensor x, int n, Tensor y, Tensor? z) -> Tensor",
        backward,
    )

    def scenario():
        x, y = leaf(), torch.ones(1, dtype=torch.float64)
        seen.clear()
        op(x, 3, y, None).sum().backward()
        op(y, 3, x, y).sum().backward()
        op(x, 3, x, x).sum().backward()
        return list(seen), x.grad.item(), y.grad

    needed, *_ = on_both_ways(op, scenario)
    assert needed[0] == (True, False, False, False)
    assert needed[1] == (False, False, True, False)
    assert needed[2] == (True, False, True, True)


def test_lists_of_tensors(namespace):
    seen = []

    def backward(ctx, grad):
        seen.append(ctx.needs_input_grad)
        return [grad * n for n in range(ctx.count)], None, None, grad * 100

    def setup_context(ctx, inputs, output):
        ctx.count = len(inputs[0])

    op = differentiable(
        namespace,
        lambda xs, ys, ns, z: sum(xs) + sum(y for y in ys if y is not None) + z,
        "(Tensor[] xs, Tensor?[] ys, int[] ns, Tensor z) -> Tensor",
        backward,
        setup_context,
    )

    def scenario():
        seen.clear()
        xs = [leaf(), torch.ones(1, dtype=torch.float64), leaf(), leaf()]
        z = leaf()
        for arguments in (xs, tuple(xs)):
            op(arguments, [None, torch.ones(1, dtype=torch.float64)], [1, 2], z).sum().backward()
        empty = op([], [], [], z)
        empty.sum().backward()
        return list(seen), [x.grad and x.grad.item() for x in xs], z.grad.item()

    needed, grads, z = on_both_ways(op, scenario)
    assert grads == [0, None, 4, 6]
    assert z == 300
    assert needed[0] == ([True, False, True, True], [False, False], False, True)
    assert needed[2] == ([], [], False, True)


# --------------------------------------------------------------------------------------------------
# Outputs


def test_integer_outputs_have_no_gradient(namespace):
    op = differentiable(
        namespace,
        lambda x: (x * 2, x.long()),
        "(Tensor x) -> (Tensor, Tensor)",
        lambda ctx, grad, index: grad * 2 if index is None else grad * 2 + index,
    )

    def scenario():
        x = leaf(3.0)
        doubled, index = op(x)
        doubled.sum().backward()
        return doubled.requires_grad, index.requires_grad, index.grad_fn, x.grad.item()

    assert on_both_ways(op, scenario) == (True, False, None, 2)


def test_single_integer_output(namespace):
    op = differentiable(
        namespace, lambda x: x.long(), "(Tensor x) -> Tensor", lambda ctx, grad: grad
    )
    assert on_both_ways(op, lambda: (op(leaf()).requires_grad, op(leaf()).grad_fn)) == (False, None)


def test_outputs_that_are_marked_non_differentiable(namespace):
    op = differentiable(
        namespace,
        lambda x: (x * 2, x * 3),
        "(Tensor x) -> (Tensor, Tensor)",
        lambda ctx, first, second: first * 2,
        lambda ctx, inputs, output: ctx.mark_non_differentiable(output[1]),
    )

    def scenario():
        x = leaf()
        first, second = op(x)
        first.sum().backward()
        return first.requires_grad, second.requires_grad, second.grad_fn, x.grad.item()

    assert on_both_ways(op, scenario) == (True, False, None, 2)


@pytest.mark.parametrize("materialize", [True, False])
def test_gradient_of_an_output_that_is_not_used(namespace, materialize):
    seen = []

    def backward(ctx, first, second):
        seen.append([None if grad is None else grad.tolist() for grad in (first, second)])
        return first

    op = differentiable(
        namespace,
        lambda x: (x * 1, x * 2),
        "(Tensor x) -> (Tensor, Tensor)",
        backward,
        lambda ctx, inputs, output: ctx.set_materialize_grads(materialize),
    )

    def scenario():
        seen.clear()
        op(leaf(1.0, 2.0))[0].sum().backward()
        return list(seen)

    assert on_both_ways(op, scenario) == [[[1, 1], [0, 0] if materialize else None]]


def test_many_outputs_share_a_node(namespace):
    op = differentiable(
        namespace,
        lambda x: (x * 1, x * 2, x * 3),
        "(Tensor x) -> (Tensor, Tensor, Tensor)",
        lambda ctx, a, b, c: a + 2 * b + 3 * c,
    )

    def scenario():
        x = leaf()
        outputs = op(x)
        (outputs[0] * outputs[2]).sum().backward()
        same = all(item.grad_fn is outputs[0].grad_fn for item in outputs)
        return type(outputs), same, [item.output_nr for item in outputs], x.grad.item()

    assert on_both_ways(op, scenario) == (tuple, True, [0, 1, 2], 12)


def test_output_that_carries_a_gradient_of_its_own_is_cut_off(namespace):
    """What a kernel computes is below autograd, even from a tensor of the outside."""
    outside = leaf(5.0)
    op = differentiable(
        namespace, lambda x: x + outside, "(Tensor x) -> Tensor", lambda ctx, grad: grad
    )

    def scenario():
        x = leaf()
        outside.grad = None
        op(x).sum().backward()
        return x.grad.item(), outside.grad

    assert on_both_ways(op, scenario) == (1, None)


CACHED = torch.ones(1, dtype=torch.float64)


def with_grad_inside(x: Tensor) -> Tensor:
    with torch.enable_grad():
        return x.detach().requires_grad_() * 2


RESULTS = {
    "a view of something new": lambda x: torch.cat([x, x])[1:],
    "a tensor that was returned before": lambda x: CACHED,
    "a leaf that requires grad": lambda x: (x * 2).detach().requires_grad_(),
    "a parameter": lambda x: torch.nn.Parameter(x * 2),
    "a tensor with a graph of its own": with_grad_inside,
    "an inference tensor": lambda x: torch.inference_mode()(lambda: torch.ones(1))(),
    "a conjugated tensor": lambda x: (x * 2j).conj(),
    "a sparse tensor": lambda x: x.to_sparse(),
    "a meta tensor": lambda x: x.to("meta"),
    "a scalar": lambda x: x.sum(),
    "an expanded tensor": lambda x: x.clone().expand(3, 1),
    "an empty tensor": lambda x: x.new_empty(0),
    "a subclass": lambda x: (x * 2).as_subclass(OwnTensor),
}


class OwnTensor(Tensor):
    pass


@pytest.mark.parametrize("kind", RESULTS)
def test_unusual_results_are_treated_the_same(namespace, kind):
    op = differentiable(
        namespace,
        RESULTS[kind],
        "(Tensor x) -> Tensor",
        lambda ctx, grad: torch.ones(1, dtype=torch.float64),
    )

    def scenario():
        log = []
        x = leaf()
        for argument in (x, x * 1, x.detach()):
            y = op(argument)
            log += [type(y), y.shape, y.layout, y.device.type, y.is_conj(), y.is_leaf]
            log += [y.requires_grad, y.is_inference(), y.grad_fn and y.grad_fn.name(), y._is_view()]
            if y.requires_grad and not y.is_leaf:
                (y.to_dense() if y.is_sparse else y).abs().sum().backward()
        return log, x.grad and x.grad.item()

    with all_native(op):
        native = outcome(scenario)
    CACHED.detach_()
    with torchop.native.disabled():
        dispatched = outcome(scenario)
    CACHED.detach_()
    assert native == dispatched


def modes() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("with_grad", [True, False])
def test_kernel_runs_without_grad_and_below_autograd(namespace, with_grad, fails):
    seen = []

    def kernel(x):
        inner = x * 1
        seen.append((modes(), x.requires_grad, inner.requires_grad))
        if fails:
            raise ValueError("the kernel fails")
        return inner + 1

    def setup_context(ctx, inputs, output):
        seen.append((modes(), inputs[0].requires_grad, output.requires_grad))

    op = differentiable(
        namespace, kernel, "(Tensor x) -> Tensor", lambda ctx, grad: grad, setup_context
    )

    def scenario():
        seen.clear()
        before = modes()
        with contextlib.suppress(ValueError):
            op(leaf().requires_grad_(with_grad))
        assert modes() == before == (True, True)
        return list(seen)

    on_both_ways(op, scenario)


# --------------------------------------------------------------------------------------------------
# Results that are lists

LISTS = {
    "a list": ("Tensor[]", lambda x, ys: [x * 2, ys[0] * x]),
    "a list of one": ("Tensor[]", lambda x, ys: [x * 2]),
    "an empty list": ("Tensor[]", lambda x, ys: []),
    "a tuple for a list": ("Tensor[]", lambda x, ys: (x * 2, ys[0] * x)),
    "a tensor and a list": ("(Tensor, Tensor[])", lambda x, ys: (x * 2, [ys[0] * x, x + 1])),
    "two lists": ("(Tensor[], Tensor[])", lambda x, ys: ([x * 2], [ys[0] * x, x + 1])),
    "a list and a number": ("(Tensor[], int)", lambda x, ys: ([x * 2, ys[0] * x], 7)),
    "a list with integers": ("Tensor[]", lambda x, ys: [x.long(), x * 2]),
    "a tensor and None": ("(Tensor, Tensor?)", lambda x, ys: (x * 2, None)),
    "a number and a tensor": ("(float, Tensor)", lambda x, ys: (0.5, x * 2)),
}


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("result", LISTS)
def test_results_that_are_lists(namespace, result, saves):
    returns, kernel = LISTS[result]
    seen = []

    def setup_context(ctx, inputs, output):
        seen.append((type(output), [type(item) for item in flat(output)], ctx.needs_input_grad))
        ctx.save_for_backward(*[item for item in flat(output) if isinstance(item, Tensor)])

    def backward(ctx, *grads):
        seen.append([[None if g is None else g.tolist() for g in flat(grad)] for grad in grads])
        if saves:
            seen.append([tensor.tolist() for tensor in ctx.saved_tensors])
        total = sum(
            g for grad in grads for g in flat(grad) if g is not None and g.is_floating_point()
        )
        return total * 2, [total * 3]

    op = differentiable(
        namespace,
        kernel,
        f"(Tensor x, Tensor[] ys) -> {returns}",
        backward,
        setup_context if saves else None,
    )

    def scenario():
        seen.clear()
        x, y = leaf(2.0, 3.0), leaf(5.0, 7.0)
        results = op(x, [y])
        tensors = [item for item in flat(results) if isinstance(item, Tensor)]
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        if wanted:
            sum(tensor.sum() * n for n, tensor in enumerate(wanted, 1)).backward()
        return (
            structure_of(results),
            [(tensor.tolist(), tensor.output_nr, tensor.requires_grad) for tensor in tensors],
            [x.grad is None or x.grad.tolist(), y.grad is None or y.grad.tolist()],
            list(seen),
        )

    structure, tensors, *_ = on_both_ways(op, scenario)
    assert structure != [] or tensors == []


def flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [item for part in value for item in flat(part)]
    return [value]


def structure_of(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(structure_of(item) for item in value)
    return type(value).__name__


def test_second_derivative_through_a_list(namespace):
    def backward(ctx, grads):
        (x,) = ctx.saved_tensors
        return 2 * x * grads[0] + 3 * x**2 * grads[1]

    op = differentiable(
        namespace, lambda x: [x**2, x**3], "(Tensor x) -> Tensor[]", backward, save_inputs
    )

    def scenario():
        x = leaf(2.0)
        square, cube = op(x)
        (first,) = torch.autograd.grad(square + cube, x, create_graph=True)
        (second,) = torch.autograd.grad(first, x)
        return first.item(), second.item()

    assert on_both_ways(op, scenario) == (16, 14)


def test_a_list_is_not_the_one_that_the_kernel_keeps(namespace):
    kept = []

    def kernel(x):
        kept.append([x + 1])
        return kept[-1]

    op = differentiable(namespace, kernel, "(Tensor x) -> Tensor[]", lambda ctx, grads: grads[0])

    def scenario():
        with_grad, without = op(leaf()), op(leaf().detach())
        return with_grad is kept[-2], without is kept[-1], kept[-2][0].requires_grad

    assert on_both_ways(op, scenario) == (False, False, True)


def test_a_list_with_the_same_tensor_twice_is_refused(namespace):
    op = differentiable(
        namespace,
        lambda x: (lambda y: [y, y])(x + 1),
        "(Tensor x) -> Tensor[]",
        lambda ctx, grads: grads[0],
    )
    for x in (leaf(), leaf().detach()):
        with all_native(op):
            native = outcome(functools.partial(op, x))
        with torchop.native.disabled():
            dispatched = outcome(functools.partial(op, x))
        assert native == dispatched
        assert native[0] is torchop.AliasError


# --------------------------------------------------------------------------------------------------
# ctx

MARKS = {
    "an input dirty": lambda ctx, inputs, output: ctx.mark_dirty(inputs[0]),
    "the output dirty": lambda ctx, inputs, output: ctx.mark_dirty(output),
    "another tensor dirty": lambda ctx, inputs, output: ctx.mark_dirty(torch.ones(1)),
    "an input non-differentiable": lambda ctx, inputs, output: ctx.mark_non_differentiable(
        inputs[0]
    ),
    "the output non-differentiable": lambda ctx, inputs, output: ctx.mark_non_differentiable(
        output
    ),
}


@pytest.mark.parametrize("mark", MARKS)
def test_marks_have_the_same_effect(namespace, mark):
    op = differentiable(
        namespace, lambda x: x + 1, "(Tensor x) -> Tensor", lambda ctx, grad: grad, MARKS[mark]
    )

    def scenario():
        x = leaf() * 1
        x.retain_grad()
        y = op(x)
        if y.requires_grad:
            y.sum().backward()
        return y.requires_grad, x._version, y._version, x.grad and x.grad.item()

    with all_native(op):
        native = outcome(scenario)
    with torchop.native.disabled():
        dispatched = outcome(scenario)
    assert native == dispatched


DECLARATIONS = {
    "another dtype": lambda ctx, outputs: ctx.set_output_grad_dtype(torch.float32, None),
    "any dtype": lambda ctx, outputs: ctx.set_output_grad_dtype(None, None),
    "its own dtype": lambda ctx, outputs: ctx.set_output_grad_dtype(torch.float64, None),
    "no dtype": lambda ctx, outputs: ctx.set_output_grad_dtype(3, None),
    "too few": lambda ctx, outputs: ctx.set_output_grad_dtype(None),
    "no tuple": lambda ctx, outputs: setattr(ctx, "output_grad_dtypes", [None, None]),
    "of an integer": lambda ctx, outputs: ctx.set_output_grad_dtype(None, torch.float32),
    "of what has no gradient": lambda ctx, outputs: (
        ctx.mark_non_differentiable(outputs[0]),
        ctx.set_output_grad_dtype(torch.float32, None),
    ),
    "after a wrong mark": lambda ctx, outputs: (
        ctx.mark_dirty(3),
        ctx.set_output_grad_dtype(3, None),
    ),
}


@pytest.mark.needs_torch("2.14", "formulas that declare the dtypes of gradients")
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("declaration", DECLARATIONS)
def test_declared_dtypes_of_gradients_have_the_same_effect(namespace, declaration, count):
    assert hasattr(torch.autograd.function.FunctionCtx, "set_output_grad_dtype")
    seen = []

    def backward(ctx, *grads):
        seen.append([None if grad is None else grad.dtype for grad in grads])
        return grads[0].double()

    def setup_context(ctx, inputs, output):
        DECLARATIONS[declaration](ctx, output if count == 2 else (output,))
        if count == 1 and len(ctx.output_grad_dtypes) == 2:
            ctx.output_grad_dtypes = ctx.output_grad_dtypes[:1]

    op = differentiable(
        namespace,
        (lambda x: (x + 1, x.long())) if count == 2 else lambda x: x + 1,
        "(Tensor x) -> (Tensor, Tensor)" if count == 2 else "(Tensor x) -> Tensor",
        backward,
        setup_context,
    )

    def scenario():
        seen.clear()
        y = op(leaf())
        first = y[0] if count == 2 else y
        if first.requires_grad:
            first.sum().backward()
        return list(seen), first.requires_grad

    with all_native(op):
        native = outcome(scenario)
    with torchop.native.disabled():
        dispatched = outcome(scenario)
    assert native == dispatched


def test_attributes_of_ctx_reach_the_backward(namespace):
    def setup_context(ctx, inputs, output):
        ctx.note, ctx.list = "note", [output.shape]
        assert not hasattr(ctx, "absent")

    seen = []
    op = differentiable(
        namespace,
        lambda x: x + 1,
        "(Tensor x) -> Tensor",
        lambda ctx, grad: seen.append((ctx.note, ctx.list, type(ctx).__name__)) or grad,
        setup_context,
    )

    def scenario():
        seen.clear()
        op(leaf()).sum().backward()
        return list(seen)

    on_both_ways(op, scenario)


def test_keyword_only_arguments_reach_the_setup_context(namespace):
    def setup_context(ctx, inputs, keyword_only_inputs, output):
        ctx.seen = len(inputs), dict(keyword_only_inputs)

    op = differentiable(
        namespace,
        lambda x, *, scale, shift=0: x * scale + shift,
        "(Tensor x, *, float scale, int shift=0) -> Tensor",
        lambda ctx, grad: grad * ctx.seen[1]["scale"],
        setup_context,
    )

    def scenario():
        x = leaf()
        y = op(x, scale=5.0)
        seen = y.grad_fn.seen
        y.sum().backward()
        return seen, x.grad.item()

    assert on_both_ways(op, scenario) == ((1, {"scale": 5.0, "shift": 0}), 5)


def test_saved_output_keeps_nobody_alive(namespace):
    """Saved with its node, an output would be a cycle that no collector sees."""
    op = differentiable(
        namespace,
        lambda x: x.exp(),
        "(Tensor x) -> Tensor",
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        lambda ctx, inputs, output: ctx.save_for_backward(output, None, output),
    )

    def scenario():
        x = leaf(0.0)
        y = op(x)
        same = y.grad_fn.saved_tensors[0].grad_fn is y.grad_fn
        nothing = y.grad_fn.saved_tensors[1]
        y.sum().backward(retain_graph=True)
        references = weakref.ref(y), weakref.ref(y.grad_fn)
        del y
        return same, nothing, x.grad.item(), [reference() for reference in references]

    assert on_both_ways(op, scenario) == (True, None, 1, [None, None])


def test_cycle_through_ctx_is_collected(namespace):
    op = differentiable(
        namespace,
        lambda x: x + 1,
        "(Tensor x) -> Tensor",
        lambda ctx, grad: grad,
        lambda ctx, inputs, output: setattr(ctx, "output", output),
    )

    def scenario():
        y = op(leaf())
        y.grad_fn.myself = y.grad_fn
        reference = weakref.ref(y.grad_fn)
        del y
        gc.collect()
        return reference() is None

    on_both_ways(op, scenario)


def test_intermediate_that_is_saved_reaches_the_backward(namespace):
    op = differentiable(
        namespace,
        lambda x: x.sin(),
        "(Tensor x) -> Tensor",
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        lambda ctx, inputs, output: ctx.save_for_backward(inputs[0].cos()),
    )

    def scenario():
        x = leaf(0.0)
        op(x).sum().backward()
        return x.grad.item()

    assert on_both_ways(op, scenario) == 1


def test_wrong_number_of_gradients_is_refused_in_the_same_words(cube):
    cube.register_autograd(lambda ctx, grad: (grad, grad, grad))
    error_on_both_ways(cube, lambda: cube(leaf()).sum().backward())


def test_wrong_shape_of_a_gradient_is_refused_in_the_same_words(cube):
    cube.register_autograd(lambda ctx, grad: torch.ones(7, dtype=torch.float64))
    error_on_both_ways(cube, lambda: cube(leaf(1.0, 2.0)).sum().backward())


def test_exception_of_a_formula_is_the_callers(cube):
    def backward(ctx, grad):
        raise ZeroDivisionError("in the formula")

    cube.register_autograd(backward)
    assert error_on_both_ways(cube, lambda: cube(leaf()).sum().backward())[0] is ZeroDivisionError


# --------------------------------------------------------------------------------------------------
# Hooks


def test_hooks_on_saved_tensors(cube):
    def scenario():
        log = []

        def pack(tensor):
            log.append("pack")
            return tensor.tolist()

        def unpack(values):
            log.append("unpack")
            return torch.tensor(values, dtype=torch.float64)

        x = leaf()
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            y = cube(x)
        y.sum().backward()
        return log, x.grad.item()

    assert on_both_ways(cube, scenario) == (["pack", "unpack"], 12)


def test_hooks_on_saved_tensors_that_raise(cube):
    def pack(tensor):
        raise ZeroDivisionError("in the hook")

    def scenario():
        with torch.autograd.graph.saved_tensors_hooks(pack, pack):
            cube(leaf())

    assert error_on_both_ways(cube, scenario)[0] is ZeroDivisionError
    with all_native(cube):
        assert cube(leaf()).item() == 8


def test_saved_tensors_on_the_cpu(cube):
    def scenario():
        x = leaf()
        with torch.autograd.graph.save_on_cpu():
            y = cube(x)
        y.sum().backward()
        return x.grad.item()

    assert on_both_ways(cube, scenario) == 12


def test_hooks_on_tensors_and_nodes(cube):
    def scenario():
        log = []
        x = leaf()
        y = cube(x)
        y.register_hook(lambda grad: log.append(("tensor", grad.item())) or grad * 2)
        y.grad_fn.register_prehook(lambda grads: log.append(("before", grads[0].item())))
        y.grad_fn.register_hook(lambda into, out: log.append(("after", into[0].item())))
        y.retain_grad()
        y.sum().backward()
        return log, y.grad.item(), x.grad.item()

    on_both_ways(cube, scenario)


def test_hooks_for_several_gradients(cube):
    def scenario():
        x, log = leaf(), []
        y, z = cube(x), cube(x * 2)
        torch.autograd.graph.register_multi_grad_hook(
            (y, z), lambda grads: log.append([grad.item() for grad in grads])
        )
        (y * z).sum().backward()
        return log, x.grad.item()

    on_both_ways(cube, scenario)


# --------------------------------------------------------------------------------------------------
# Checkpoints, anomalies, compiled autograd, threads


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(cube, use_reentrant):
    def scenario():
        x = leaf()
        checkpoint(lambda x: cube(x).sin(), x, use_reentrant=use_reentrant).sum().backward()
        return x.grad.item()

    with counting(cube) as calls:
        result = scenario()
    assert calls["native"] == 2, calls
    with torchop.native.disabled():
        assert scenario() == result


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode_names_the_call(cube):
    """The dispatcher has the trace; and it is the same for a graph that was recorded before."""
    cube.register_autograd(lambda ctx, grad: grad * float("nan"))
    x = leaf()
    with counting(cube) as calls, torch.autograd.detect_anomaly(check_nan=True):
        y = cube(x).sum()
        with pytest.warns(UserWarning, match="test_anomaly_mode_names_the_call"):  # noqa: SIM117
            with pytest.raises(RuntimeError, match="returned nan values"):
                y.backward()
    assert calls == {"anomaly": 1}
    with all_native(cube):
        y = cube(x).sum()
    with (
        torch.autograd.detect_anomaly(check_nan=True),
        pytest.warns(UserWarning, match="No forward pass information"),
        pytest.raises(RuntimeError, match="returned nan values"),
    ):
        y.backward()


def test_compiled_autograd(namespace):
    op = differentiable(
        namespace,
        lambda xs, y: sum(xs) * y,
        "(Tensor[] xs, Tensor y) -> Tensor",
        lambda ctx, grad: (
            [grad * ctx.saved_tensors[-1]] * 2,
            grad * sum(ctx.saved_tensors[:-1]),
        ),
        lambda ctx, inputs, output: ctx.save_for_backward(*inputs[0], inputs[1]),
    )
    compiler = functools.partial(torch.compile, backend="eager", fullgraph=True)

    def scenario():
        xs, y = [leaf(2.0), leaf(3.0)], leaf(5.0)
        result = op(xs, y).sum()
        with torch._dynamo.compiled_autograd._enable(compiler()):
            result.backward()
        return [x.grad.item() for x in (*xs, y)]

    assert on_both_ways(op, scenario) == [5, 5, 5]


def test_backward_in_many_threads(cube):
    x = leaf(2.0)
    wrong = []

    def work():
        for _ in range(200):
            mine = leaf(3.0)
            (cube(mine).sum() + cube(x).sum() * 0).backward()
            if mine.grad.item() != 27:
                wrong.append(mine.grad.item())

    with all_native(cube):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert wrong == []
    assert x.grad.item() == 0


def test_graph_of_one_thread_is_followed_in_another(cube):
    x = leaf()
    with all_native(cube):
        y = cube(cube(x)).sum()
    thread = threading.Thread(target=y.backward)
    thread.start()
    thread.join(60)
    assert x.grad.item() == 9 * 2.0**8


# --------------------------------------------------------------------------------------------------
# Results as objects


def test_result_is_an_ordinary_tensor(cube):
    def scenario():
        y = cube(leaf(2.0, 3.0))
        refused = outcome(lambda: copy.deepcopy(y))
        detached = copy.deepcopy(y.detach())
        loaded = pickle.loads(pickle.dumps(y.detach()))
        return type(y), refused, detached.tolist(), loaded.tolist(), y[0].item()

    on_both_ways(cube, scenario)


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, lambda: torch.set_grad_enabled(False)]
)
def test_modes_without_grad(cube, mode):
    def scenario():
        x = leaf()
        with mode():
            y = cube(x)
        return y.requires_grad, y.grad_fn, y.is_inference(), y.item()

    on_both_ways(cube, scenario)


def test_parameter_of_a_module(cube):
    def scenario():
        parameter = torch.nn.Parameter(torch.full((2,), 2.0))
        y = cube(parameter)
        y.sum().backward()
        return type(y), parameter.grad.tolist()

    assert on_both_ways(cube, scenario) == (Tensor, [12, 12])


def test_view_of_a_tensor_that_requires_grad(cube):
    def scenario():
        x = leaf(1.0, 2.0)
        y = cube(x[1:])
        y.sum().backward()
        return x.grad.tolist()

    assert on_both_ways(cube, scenario) == [0, 12]


def test_view_whose_base_began_to_require_grad_later(cube):
    def scenario():
        base = torch.full((2,), 2.0, dtype=torch.float64)
        view = base[:1]
        base.mul_(leaf(3.0, 3.0))
        y = cube(view)
        return y.requires_grad, y.item()

    assert on_both_ways(cube, scenario) == (True, 216)


def test_view_made_without_grad_needs_one_if_its_base_does(namespace):
    seen = []

    def backward(ctx, grad):
        seen.append(ctx.needs_input_grad)
        return grad, grad

    op = differentiable(namespace, lambda x, y: x + y, "(Tensor x, Tensor y) -> Tensor", backward)

    def scenario():
        x, base = leaf(), leaf()
        with torch.no_grad():
            view = base[:]
        seen.clear()
        op(x, view).sum().backward()
        return list(seen), x.grad.item(), base.grad

    assert on_both_ways(op, scenario) == ([(True, True)], 1, None)


def test_input_that_refuses_a_gradient_leaves_versions_alone(namespace):
    op = torchop.custom_op(
        f"{namespace}::op",
        lambda x, y: y.clone(),
        mutates_args={"x"},
        schema="(Tensor(a!) x, Tensor y) -> Tensor",
    )
    op.register_autograd(lambda ctx, grad: (None, grad))
    assert op._definition.rule(AutogradRule).function  # makes it

    def scenario():
        x, base = torch.zeros(2), leaf(1.0, 2.0) * 1
        part, _ = base.split(1)
        base.mul_(2)
        with pytest.raises(RuntimeError, match="modified inplace"):
            op(x, part)
        return x._version

    assert on_both_ways(op, scenario) == 0


def test_dtypes_and_shapes(cube):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.complex64):
        x = torch.ones(2, 3, 4, dtype=dtype, requires_grad=True)
        with all_native(cube):
            y = cube(x)
        y.backward(torch.ones_like(y))
        assert_close(x.grad, torch.full_like(x, 3))
    x = torch.ones(0, 3, requires_grad=True)
    with all_native(cube):
        cube(x).sum().backward()
    assert x.grad.shape == (0, 3)
