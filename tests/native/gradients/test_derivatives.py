from __future__ import annotations

import pytest
import torch

import torchop
from tests._support.common import counting, needs_native
from tests.native.gradients.recording import (
    all_native,
    differentiable,
    error_on_both_paths,
    leaf,
    on_both_paths,
)

pytestmark = needs_native


# --------------------------------------------------------------------------------------------------
# First and higher derivatives


def test_gradient_of_an_input_that_is_no_leaf(cube):
    def scenario():
        x = leaf(2.0)
        cube(cube(x * 1) * 1).sum().backward()
        return x.grad.item()

    assert on_both_paths(cube, scenario) == 9 * 2.0**8


def test_second_and_third_derivative(cube):
    def scenario():
        x = leaf(2.0)
        (first,) = torch.autograd.grad(cube(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        (third,) = torch.autograd.grad(second.sum(), x)
        return [first.item(), second.item(), third.item()]

    assert on_both_paths(cube, scenario) == [12, 12, 6]


def test_gradcheck_and_gradgradcheck(cube):
    with all_native(cube):
        assert torch.autograd.gradcheck(cube, leaf(0.5, -1.5))
        assert torch.autograd.gradgradcheck(cube, leaf(0.5, -1.5))


def test_only_the_first_gradient_call_is_not_native(namespace):
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

    name, *_ = on_both_paths(cube, scenario)
    assert name == f"{namespace}_opBackward"


def test_sequence_numbers_rise(cube):
    """Later calls must get higher numbers, because backward runs the highest number first."""
    x = leaf()
    with all_native(cube):
        # Keep the results, because up to 2.12 a node lives only as long as its result.
        results = [cube(x) for _ in range(3)]
    numbers = [result.grad_fn._sequence_nr() for result in results]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == 3


@pytest.mark.needs_torch("2.14", "hooks for new nodes")
def test_hook_for_new_nodes_gets_a_complete_node(cube):
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

    ((name, saved, edges, shapes, needed),), _ = on_both_paths(cube, scenario)
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

    assert error_on_both_paths(cube, scenario)[1] == "no nodes today"


def test_freed_graph_raises(cube):
    def scenario():
        y = cube(leaf()).sum()
        y.backward()
        y.backward()

    kind, message = error_on_both_paths(cube, scenario)
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

    assert on_both_paths(cube, scenario) == 36


def test_saved_tensors_of_a_freed_graph_raise(cube):
    def scenario():
        y = cube(leaf())
        y.sum().backward()
        return y.grad_fn.saved_tensors

    _, message = error_on_both_paths(cube, scenario)
    assert "after they have already been freed" in message


def test_mutation_of_a_saved_tensor_is_detected(cube):
    def scenario():
        x = leaf()
        y = x * 1
        result = cube(y)
        y.add_(1)
        result.sum().backward()

    _, message = error_on_both_paths(cube, scenario)
    assert "modified by an inplace operation" in message


def test_result_may_be_changed_in_place(cube):
    def scenario():
        x = leaf()
        y = cube(x)
        y.mul_(5)
        y.sum().backward()
        return x.grad.item()

    assert on_both_paths(cube, scenario) == 60


def test_needs_input_grad_and_unneeded_gradients(namespace):
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

    needed, *_ = on_both_paths(op, scenario)
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

    needed, grads, z = on_both_paths(op, scenario)
    assert grads == [0, None, 4, 6]
    assert z == 300
    assert needed[0] == ([True, False, True, True], [False, False], False, True)
    assert needed[2] == ([], [], False, True)
