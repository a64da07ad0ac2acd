"""Native calls of operators with derived formulas, and calls through the dispatcher.

Uses private names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Optional

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import torchop
from tests._support.common import counting, needs_native
from tests.rules.support import leaf_of
from torchop import GradientError
from torchop._rules.autograd.derived import replay

pytestmark = needs_native


def weigh(
    x: Tensor,
    others: list[Tensor],
    bias: Optional[Tensor] = None,
    power: int = 2,
    *,
    scale: float = 3.0,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    total = (x**power).cos() * scale + (0 if bias is None else bias)
    for index, other in enumerate(others):
        total = total * other.exp() + index
    return total, x.argmax(), [total.sin(), x * 2]


def drop(x: Tensor, p: float = 0.5, generator: Optional[torch.Generator] = None) -> Tensor:
    if generator is not None:
        return x * torch.rand(x.shape, generator=generator, dtype=x.dtype)
    return torch.nn.functional.dropout(x * 2, p)


def matmul(x: Tensor) -> Tensor:
    return x @ x


SCHEMAS = {drop: "(Tensor x, float p=0.5, Generator? generator=None) -> Tensor"}


def derived(
    namespace: str,
    body: Callable[..., Any],
    schema: str | None = None,
) -> Any:
    name = "f" if body.__name__ == "<lambda>" else body.__name__
    schema = schema or SCHEMAS.get(body)
    op = torchop.custom_op(f"{namespace}::{name}", body, mutates_args=(), schema=schema)
    op.derive_autograd()
    # The first call that records a gradient creates the class of the autograd nodes, and is not
    # native. Make this call here, so that the calls of the tests can be native.
    first = leaf_of([1.0, 2.0], [3.0, 4.0])
    op(first, [first]) if body is weigh else op(first)
    return op


def both_paths(op: Any, scenario: Callable[[Any], Any]) -> tuple[Any, Any]:
    torch.manual_seed(3)
    with counting(op) as calls:
        native = scenario(op)
    assert set(calls) == {"native"}
    torch.manual_seed(3)
    with torchop.native.disabled():
        dispatched = scenario(op)
    return native, dispatched


def assert_same(op: Any, scenario: Callable[[Any], Any]) -> Any:
    native, dispatched = both_paths(op, scenario)
    torch.testing.assert_close(native, dispatched, rtol=0, atol=0)
    return native


def message_of(run: Callable[[], Any]) -> str:
    with pytest.raises(RuntimeError) as caught:
        run()
    return str(caught.value)


# --------------------------------------------------------------------------------------------------
# Gradients and the graph


def tensors(*needs: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(3, generator=generator).requires_grad_(need) for need in needs]


CALLS = {
    "defaults": lambda op, x, y, z: op(x, [y]),
    "a list of several": lambda op, x, y, z: op(x, [y, z, x]),
    "an empty list": lambda op, x, y, z: op(x, []),
    "by name": lambda op, x, y, z: op(others=[z], x=x, scale=0.5, bias=y),
    "all": lambda op, x, y, z: op(x, [y], z, 3, scale=-1.0),
    "one tensor twice": lambda op, x, y, z: op(x, [x], x),
    "a view": lambda op, x, y, z: op(x.view(3, 1)[:, 0], [y[:1].expand(3)]),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("needs", [(True, True, True), (True, False, True), (False, True, False)])
def test_gradients_equal_the_dispatchers(namespace, call, needs):
    op = derived(namespace, weigh)

    def scenario(op: Any) -> Any:
        inputs = tensors(*needs)
        total, index, (sine, _) = CALLS[call](op, *inputs)
        node, described = total.grad_fn, None
        if node is not None:
            described = [node.name(), len(node.next_functions)]
            saved = [tensor is None for tensor in node.saved_tensors]
            described += [str(node.needs_input_grad), str(saved)]
            (total.sum() + sine.sum()).backward()
        return [total.detach(), index, [x.grad for x in inputs]], described, index.requires_grad

    native, dispatched = both_paths(op, scenario)
    torch.testing.assert_close(native[0], dispatched[0], rtol=0, atol=0)
    assert native[1:] == dispatched[1:]


def test_second_and_third_derivatives(namespace):
    op = derived(namespace, weigh)

    def scenario(op: Any) -> Any:
        x, y, _ = tensors(True, True, True)
        (first,) = torch.autograd.grad(op(x, [y])[0].sum(), x, create_graph=True)
        second = torch.autograd.grad(first.sum(), (x, y), create_graph=True)
        return first.detach(), second, torch.autograd.grad(second[0].sum(), x)

    first, second, third = assert_same(op, scenario)
    assert all(gradient.abs().sum() > 0 for gradient in (first, second[1], third[0]))


def _write_an_input(op: Any) -> Any:
    x, y, _ = (tensor * 1 for tensor in tensors(True, True, True))
    total = op(x, [y])[0].sum()
    x.mul_(2)
    return message_of(total.backward)


def _use_a_graph_twice(op: Any) -> Any:
    x, y, _ = tensors(True, True, True)
    total = op(x, [y])[0].sum()
    total.backward()
    return message_of(total.backward)


def _hooks(op: Any) -> Any:
    seen: list[Any] = []
    x, y, _ = tensors(True, False, False)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: seen.append(t.shape) or t.clone(), lambda t: seen.append("back") or t
    ):
        total, *_ = op(x, [y])
    total.register_hook(lambda grad: seen.append(grad.sum().item()) or grad * 2)
    total.grad_fn.register_prehook(lambda grads: seen.append(len(grads)))
    total.grad_fn.register_hook(lambda ins, outs: seen.append((len(ins), len(outs))))
    total.sum().backward()
    return seen, x.grad.tolist()


def _checkpoints(op: Any) -> Any:
    results = []
    for use_reentrant in (True, False):
        x, y, _ = tensors(True, True, False)
        checkpoint(lambda x, y: op(x, [y])[0], x, y, use_reentrant=use_reentrant).sum().backward()
        results.append((x.grad.tolist(), y.grad.tolist()))
    return results


@pytest.mark.parametrize(
    "scenario",
    [_write_an_input, _use_a_graph_twice, _hooks, _checkpoints],
    ids=lambda s: s.__name__,
)
def test_autograd_treats_native_and_dispatched_calls_alike(namespace, scenario):
    native, dispatched = both_paths(derived(namespace, weigh), scenario)
    assert native == dispatched


def test_kernel_changes_to_a_list_do_not_affect_the_backward(namespace):
    def body(x: Tensor, sizes: list[int]) -> Tensor:
        sizes.append(7)
        return x * len(sizes)

    op = torchop.custom_op(f"{namespace}::body", body, mutates_args=())
    op.derive_autograd()
    op(leaf_of(1.0), [])

    def scenario(op: Any) -> Any:
        x, sizes = leaf_of(1.0), [1, 2]
        y = op(x, sizes)
        sizes.append(3)
        y.backward()
        assert sizes == [1, 2, 3]
        return y.detach(), x.grad

    assert_same(op, scenario)


# --------------------------------------------------------------------------------------------------
# Random numbers and autocast


def _saves_state(y: Tensor) -> bool:
    return y.grad_fn.saved_tensors[-1] is not None


@pytest.mark.parametrize("p", [0.5, 0.0])
def test_backward_reuses_random_numbers_and_keeps_the_stream(namespace, p):
    op = derived(namespace, drop)

    def scenario(op: Any) -> Any:
        x = torch.ones(100, requires_grad=True)
        y = op(x, p)
        assert _saves_state(y)
        torch.rand(3)
        y.sum().backward()
        assert torch.equal(x.grad, y.detach())
        return y.detach(), x.grad, torch.rand(2)

    assert_same(op, scenario)


def test_call_is_dispatched_during_graph_capture(namespace, monkeypatch):
    op = derived(namespace, drop)
    current = replay.ambient_state
    monkeypatch.setattr(
        replay, "ambient_state", lambda *args: current(*args)._replace(is_captured=True)
    )
    x = torch.ones(100, requires_grad=True)
    with counting(op) as calls:
        op(x, 0.0).sum().backward()
    assert calls == {"capture": 1}
    assert torch.equal(x.grad, torch.full((100,), 2.0))
    with pytest.raises(
        GradientError,
        match=r"the body draws random numbers in aten\.(native_dropout|bernoulli)",
    ):
        op(x)


def test_backward_restores_the_forwards_autocast(namespace):
    op = derived(namespace, matmul)

    def scenario(op: Any) -> Any:
        x = torch.linspace(0, 1, 16).reshape(4, 4).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = op(x)
        assert y.dtype is torch.bfloat16
        assert _saves_state(y)
        y.float().sum().backward()
        with torch.autocast("cpu", torch.bfloat16):
            expected = x @ x
        assert torch.equal(x.grad, torch.autograd.grad(expected.float().sum(), x)[0])
        return y.detach(), x.grad

    assert_same(op, scenario)


# --------------------------------------------------------------------------------------------------
# Errors


def test_effect_declared_later_raises_before_the_kernel_runs(namespace):
    runs = []

    def body(x: Tensor) -> Tensor:
        runs.append(1)
        return x * 2

    op = derived(namespace, body)
    runs.clear()
    op.register_effect("ordered")
    for context in (contextlib.nullcontext(), torchop.native.disabled()):
        with (
            context,
            pytest.raises(GradientError, match="an effect was registered after the formula"),
        ):
            op(leaf_of(1.0))
    assert not runs


def test_error_of_the_kernel_leaves_no_state(namespace):
    def body(x: Tensor) -> Tensor:
        if x.sum() > 100:
            raise ValueError("too much")
        return x * 2

    op = derived(namespace, body)
    x = leaf_of(1000.0)
    with counting(op) as calls, pytest.raises(ValueError, match="too much"):
        op(x)
    assert calls == {"native": 1}
    y = op(leaf_of(1.0))
    y.backward()
    assert x.grad is None


def test_lists_returned_by_the_body_equal_the_dispatchers(namespace):
    parts: list[Tensor] = []

    def body(x: Tensor) -> list[Tensor]:
        parts[:] = [x.sin(), x.cos()]
        return parts

    op = derived(namespace, body)

    def scenario(op: Any) -> Any:
        result = op(leaf_of(1.0, 2.0))
        assert result is not parts
        assert type(result) is list
        return [part.grad_fn.name() for part in result]

    native, dispatched = both_paths(op, scenario)
    assert native == dispatched


def test_integers_and_unused_outputs(namespace):
    def body(x: Tensor) -> tuple[Tensor, Tensor, int]:
        return x.argmax(), torch.ones(3), 7

    op = derived(namespace, body, "(Tensor x) -> (Tensor, Tensor, SymInt)")

    def scenario(op: Any) -> Any:
        x = leaf_of(1.0, 2.0)
        index, constant, number = op(x)
        constant.sum().backward()
        return index.requires_grad, constant.grad_fn.name(), number, x.grad.tolist()

    native, dispatched = both_paths(op, scenario)
    assert native == dispatched


def test_a_number_that_is_a_tensor_is_not_one_of_the_outputs(namespace):
    def body(x: Tensor) -> tuple[float, Tensor]:
        return x.detach().sum(), torch.ones(3)

    op = derived(namespace, body, "(Tensor x) -> (float, Tensor)")

    def scenario(op: Any) -> Any:
        x = leaf_of(1.0, 2.0)
        total, constant = op(x)
        constant.sum().backward()
        return total, x.grad.tolist()

    assert both_paths(op, scenario) == ((3.0, [0.0, 0.0]), (3.0, [0.0, 0.0]))
