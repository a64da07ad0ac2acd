"""Hooks, checkpoints, anomaly mode, compiled autograd and threads, on natively recorded graphs."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
import torch._dynamo.compiled_autograd
from torch.utils.checkpoint import checkpoint

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

    assert on_both_paths(cube, scenario) == (["pack", "unpack"], 12)


def test_hooks_on_saved_tensors_that_raise(cube):
    def pack(tensor):
        raise ZeroDivisionError("in the hook")

    def scenario():
        with torch.autograd.graph.saved_tensors_hooks(pack, pack):
            cube(leaf())

    assert error_on_both_paths(cube, scenario)[0] is ZeroDivisionError
    with all_native(cube):
        assert cube(leaf()).item() == 8


def test_saved_tensors_on_the_cpu(cube):
    def scenario():
        x = leaf()
        with torch.autograd.graph.save_on_cpu():
            y = cube(x)
        y.sum().backward()
        return x.grad.item()

    assert on_both_paths(cube, scenario) == 12


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

    on_both_paths(cube, scenario)


def test_hooks_for_several_gradients(cube):
    def scenario():
        x, log = leaf(), []
        y, z = cube(x), cube(x * 2)
        torch.autograd.graph.register_multi_grad_hook(
            (y, z), lambda grads: log.append([grad.item() for grad in grads])
        )
        (y * z).sum().backward()
        return log, x.grad.item()

    on_both_paths(cube, scenario)


# --------------------------------------------------------------------------------------------------
# Checkpoints, anomaly mode, compiled autograd, threads


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
    """Anomaly mode needs the stack trace of each call, which only dispatched calls store.

    So under anomaly mode, calls use the dispatcher, and the warning contains the name of this
    function. A call that was made before the mode was enabled has no stack trace.
    """
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

    assert on_both_paths(op, scenario) == [5, 5, 5]


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
