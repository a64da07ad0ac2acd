"""Native calls of operators that `Library.define` defined and that got their kernels later."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torchop
from tests._support.common import counting, needs_native, node_of, outcome
from tests._support.devices import AUTOGRAD, BACKEND, DEVICE, OTHER, TYPE

pytestmark = [
    needs_native,
    pytest.mark.filterwarnings("ignore:Warning only once for all operators"),
]

T = torch.arange(3.0)


@pytest.fixture
def library(namespace: str) -> Iterator[torchop.Library]:
    with torchop.Library(namespace, "FRAGMENT") as library:
        yield library


def leaf() -> Tensor:
    return T.clone().requires_grad_()


def described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist(), type(value), value.requires_grad, node_of(value)
    if isinstance(value, (list, tuple)):
        return [described(item) for item in value]
    return value


def assert_native(name: str, *calls: Callable[[], Any], native: int | None = None) -> None:
    """Check that every call is native and has the same outcome as through the dispatcher."""
    with torchop.native.disabled():
        expected = [described(outcome(call)) for call in calls]
    for call in calls:
        outcome(call)  # first calls are not native, but prepare the later ones
    with counting(name) as counted:
        assert [described(outcome(call)) for call in calls] == expected
    assert counted == {"native": len(calls) if native is None else native}


def gradients(call: Callable[..., Any], *inputs: Tensor) -> list[Any]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    result = call(*leaves)
    results = [result] if isinstance(result, Tensor) else list(result)
    total = sum(each.sum() for each in results if each.is_floating_point())
    first = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
    squares = [(each * each).sum() for each in first if each is not None and each.requires_grad]
    second = torch.autograd.grad(sum(squares), leaves, allow_unused=True) if squares else []
    return [None if each is None else each.tolist() for each in (*first, *second)]


# --------------------------------------------------------------------------------------------------
# Kernels


@pytest.mark.parametrize("device", [TYPE, None, "default", BACKEND, "CompositeExplicitAutograd"])
def test_a_registered_kernel_is_called_natively(namespace, library, device):
    name = f"{namespace}::op"
    library.define("op(Tensor x, float scale=2.0) -> Tensor")
    torchop.register_kernel(name, device, lambda x, scale: x * scale, lib=library)
    op = getattr(torch.ops, namespace).op
    calls = [lambda: op(T), lambda: op(T, 3), lambda: op(T, scale=2.0), lambda: op.default(T, 4.0)]
    assert_native(name, *calls)
    explanation = torchop.explain(op, T)
    assert explanation.native
    assert __file__ in explanation.kernels[-1]


def test_calls_of_operators_without_a_library_are_native(namespace):
    name = f"{namespace}::op"
    torchop.define(name, "(Tensor x) -> Tensor")
    torchop.register_kernel(name, TYPE, lambda x: x + 1)
    torchop.register_autograd(name, lambda ctx, grad: grad * 5)
    op = getattr(torch.ops, namespace).op
    assert_native(name, lambda: op(T), lambda: op(leaf()))
    with torchop.accelerate(f"{namespace}::*") as acceleration:
        (row,) = acceleration.operators
        assert not row.accelerated
        assert row.reason == "it was defined with torchop, so its calls are native already"


def test_a_kernel_gets_the_default_of_the_schema_as_with_impl(namespace, library):
    """A kernel from `register_kernel` gets the schema's defaults; one from `impl` uses its own.

    The dispatcher does not pass arguments that equal the schema's default, so the defaults of a
    kernel from `impl` apply.
    """
    name = f"{namespace}::op"
    library.define("op(Tensor x, float scale=2.0, *, int n=1) -> Tensor")
    op = getattr(torch.ops, namespace).op
    torchop.register_kernel(name, TYPE, lambda x, scale=7.0, *, n=9: x * scale + n, lib=library)
    library.impl("op", lambda x, scale=7.0, *, n=9: x, torch._C._dispatch_key_for_device(OTHER))
    calls = [lambda: op(T), lambda: op(T, 2.0), lambda: op(T, 3.0, n=1), lambda: op(T, n=4)]
    assert_native(name, *calls)
    assert op(T).tolist() == [1, 3, 5]
    library.impl("op", lambda x, scale=7.0, *, n=9: x * scale + n, BACKEND)
    assert_native(name, *calls)
    assert op(T).tolist() == [9, 16, 23]


def test_kernels_of_two_libraries(namespace, library):
    name = f"{namespace}::op"
    library.define("op(Tensor x, int n=1) -> Tensor")
    op = getattr(torch.ops, namespace).op
    torchop.register_kernel(name, TYPE, lambda x, n: x + n, lib=library)
    with torchop.Library(namespace, "IMPL") as other:
        torchop.register_kernel(name, OTHER, lambda x, n: x, lib=other)
        torchop.register_autograd(name, lambda ctx, grad: (grad * 3, None), lib=other)
        assert_native(name, lambda: op(T), lambda: op(T, 5), lambda: op(leaf(), 6))
    assert_native(name, lambda: op(T), lambda: op(T, 5))


def test_results_of_a_kernel_are_checked(namespace, library):
    name = f"{namespace}::op"
    results: list[Any] = [T, (T, T), None, 3, [T, T, T], [T, T]]
    library.define("op(Tensor x, int n) -> (Tensor, Tensor)")
    torchop.register_kernel(name, TYPE, lambda x, n: results[n], lib=library)
    op = getattr(torch.ops, namespace).op
    op(T, 1)
    calls = [lambda n=n: op(T, n) for n in range(len(results))]
    assert_native(name, *calls)


def test_a_kernel_that_is_replaced_or_switched_off(namespace, library):
    name = f"{namespace}::op"
    library.define("op(Tensor x) -> Tensor")
    op = getattr(torch.ops, namespace).op
    for amount in (1, 2, 3):
        torchop.register_kernel(name, TYPE, lambda x, amount=amount: x + amount, lib=library)
        assert_native(name, lambda: op(T))
        assert op(T).tolist() == [amount, 1 + amount, 2 + amount]
    with torchop.Library(namespace, "IMPL") as other:
        torchop.register_kernel(name, TYPE, lambda x: x * 10, lib=other)
        assert op(T).tolist() == [0, 10, 20]
        assert_native(name, lambda: op(T))
    assert op(T).tolist() == [3, 4, 5]
    assert_native(name, lambda: op(T))
    with torchop.native.disabled(), counting(name) as calls:
        assert op(T).tolist() == [3, 4, 5]
    assert calls == {"switched_off": 1}


# --------------------------------------------------------------------------------------------------
# Schemas


@pytest.mark.parametrize("device", [TYPE, None])
def test_mutable_schemas(namespace, library, device):
    def write(x, out):
        out.copy_(x + 1)

    library.define("write(Tensor x, Tensor(a!) out) -> ()")
    torchop.register_kernel(f"{namespace}::write", device, write, lib=library)
    library.define("add_(Tensor(a!) x, int n=1) -> Tensor(a!)", tags=(torch.Tag.inplace_view,) * 0)
    torchop.register_kernel(f"{namespace}::add_", device, lambda x, n: x.add_(n), lib=library)
    library.define("add.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
    torchop.register_kernel(
        f"{namespace}::add.out", device, lambda x, *, out: out.copy_(x + 1), lib=library
    )
    ops = getattr(torch.ops, namespace)

    def called(op: Callable[[Tensor], Any]) -> Callable[[], Any]:
        def call() -> Any:
            written = torch.zeros(3)
            result = op(written)
            return written, written._version, result is written

        return call

    assert_native(f"{namespace}::write", called(lambda out: ops.write(T, out)))
    assert_native(f"{namespace}::add_", called(ops.add_), called(lambda x: ops.add_(x, 5)))
    assert_native(f"{namespace}::add.out", called(lambda out: ops.add.out(T, out=out)))


@pytest.mark.parametrize("tag", ["inplace", "out"])
@pytest.mark.needs_torch("2.13", "torch.Tag.inplace and torch.Tag.out")
def test_conventional_forms(namespace, library, tag):
    schema = {"inplace": "Tensor(a!) x", "out": "Tensor y, *, Tensor(a!) x"}[tag]
    name = f"{namespace}::op"
    library.define(f"op({schema}) -> Tensor(a!)", tags=getattr(torch.Tag, tag))
    torchop.register_kernel(
        name, TYPE, lambda *args, x=None: (args[0] if x is None else x).add_(1), lib=library
    )
    op = getattr(torch.ops, namespace).op

    def call(x: Tensor) -> Any:
        result = op(x) if tag == "inplace" else op(T, x=x)
        return x, result is x

    assert_native(name, lambda: call(T.clone()))
    torchop.register_kernel(name, TYPE, lambda *args, **kwargs: T.clone(), lib=library)
    with pytest.raises(torchop.AliasError):
        call(T.clone())
    with torchop.native.disabled(), pytest.raises(torchop.AliasError):
        call(T.clone())


# --------------------------------------------------------------------------------------------------
# Gradients


def setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.n = inputs[-1]


FORMULAS: dict[str, Any] = {
    "without setup_context": ("Tensor x", "x", lambda ctx, grad: grad * 7, None),
    "with setup_context": (
        "Tensor x, float n=3.0",
        "x * x * n",
        lambda ctx, grad: (grad * ctx.saved_tensors[0] * ctx.n * 2, None),
        setup,
    ),
    "of a list": (
        "Tensor[] xs, float n=3.0",
        "xs[0] * n",
        lambda ctx, grad: ([grad * ctx.n, *[None] * (ctx.count - 1)], None),
        lambda ctx, inputs, output: vars(ctx).update(n=inputs[1], count=len(inputs[0])),
    ),
    "of two results": (
        "Tensor x, Tensor? y=None",
        "x * 2, x * 3",
        lambda ctx, first, second: (first * 2 + second * 3, None),
        None,
    ),
}


def made_with(namespace: str, library: torchop.Library, formula: str, way: str) -> Any:
    parameters, body, backward, setup_context = FORMULAS[formula]
    results = "(Tensor, Tensor)" if "," in body else "Tensor"
    name = f"{namespace}::op"
    library.define(f"op({parameters}) -> {results}")
    names = [part.split()[1].partition("=")[0] for part in parameters.split(", ")]
    function = eval(f"lambda {', '.join(names)}=3.0: ({body})")
    if way == "impl":
        library.impl("op", function, BACKEND)
    else:
        torchop.register_kernel(name, None if way == "default" else TYPE, function, lib=library)
    torchop.register_autograd(name, backward, setup_context=setup_context, lib=library)
    return getattr(torch.ops, namespace).op


@pytest.mark.parametrize("way", ["register_kernel", "default", "impl"])
@pytest.mark.parametrize("formula", FORMULAS)
def test_gradients_equal_the_dispatchers(namespace, library, formula, way):
    op = made_with(namespace, library, formula, way)

    def call(x: Tensor, *more: Any) -> Any:
        return op([x, T] if formula == "of a list" else x, *more)

    more = [3.0, 4.0] if "n=" in FORMULAS[formula][0] else []
    calls: list[Callable[[], Any]] = [lambda: call(leaf()), lambda: call(T)]
    calls += [lambda n=n: call(leaf(), n) for n in more]
    calls += [lambda n=n: gradients(lambda x: call(x, n), T) for n in more]
    calls.append(lambda: gradients(call, T))
    assert_native(f"{namespace}::op", *calls)
    with torch.no_grad():
        assert_native(f"{namespace}::op", lambda: call(leaf()))
    explained = torchop.explain(op, *([[leaf(), T]] if formula == "of a list" else [leaf()]))
    assert explained.kernels[0] == "autograd: records the gradient"


def test_a_kernel_that_returns_its_argument(namespace, library):
    name = f"{namespace}::op"
    library.define("op(Tensor x) -> Tensor")
    torchop.register_kernel(name, TYPE, lambda x: x, lib=library)
    torchop.register_autograd(name, lambda ctx, grad: grad * 5, lib=library)
    op = getattr(torch.ops, namespace).op
    assert_native(name, lambda: op(T), lambda: op(leaf()), lambda: gradients(op, T))


def test_an_autograd_kernel_of_another_library_runs(namespace, library):
    name = f"{namespace}::op"
    library.define("op(Tensor x) -> Tensor")
    torchop.register_kernel(name, TYPE, lambda x: x * 2, lib=library)
    torchop.register_autograd(name, lambda ctx, grad: grad * 5, lib=library)
    op = getattr(torch.ops, namespace).op
    assert_native(name, lambda: op(T))
    with torch.library._scoped_library(namespace, "IMPL") as other:
        other.impl("op", lambda x: x * 100, AUTOGRAD)
        assert op(T).tolist() == [0, 100, 200]
    assert op(T).tolist() == [0, 2, 4]


# --------------------------------------------------------------------------------------------------
# Subsystems


class Seeing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {})) + 100


def test_calls_from_subsystems_are_correct(namespace, library):
    name = f"{namespace}::op"
    library.define("op(Tensor x, int n=1) -> Tensor")
    torchop.register_kernel(name, TYPE, lambda x, n: x * 2, lib=library)
    torchop.register_autograd(name, lambda ctx, grad: (grad * 2, None), lib=library)
    torchop.register_fake(name, lambda x, n=1: torch.empty_like(x), lib=library)
    torchop.register_vmap(
        name, lambda info, in_dims, x, n=1: (x * 2 + 1000, in_dims[0]), lib=library
    )
    torchop.register_autocast(name, TYPE, torch.bfloat16, lib=library)
    op = getattr(torch.ops, namespace).op
    assert_native(name, lambda: op(T), lambda: op(leaf()), lambda: gradients(op, T))
    with Seeing():
        seen = op(T)
    # On a device other than the CPU, `tolist` copies the result, and the mode would change the
    # copy. So call `tolist` outside of the mode.
    assert seen.tolist() == [100, 102, 104]
    with torch.autocast(TYPE, torch.bfloat16):
        assert op(T).dtype is torch.bfloat16
    assert op(T.to("meta")).device.type == "meta"
    assert torch.vmap(op)(T).tolist() == [1000, 1002, 1004]
    assert torch.func.grad(lambda x: op(x).sum())(T).tolist() == [2, 2, 2]
    with torch.profiler.profile() as profile:
        op(T)
    assert any(event.name == name for event in profile.events())
    compiled = torch.compile(lambda x: op(x) + 1, backend="aot_eager", fullgraph=True)
    assert compiled(T).tolist() == [1, 3, 5]
    x = leaf()
    compiled(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]
    if DEVICE.type == "cpu":
        sparse = outcome(lambda: op(T.to_sparse()))
        with torchop.native.disabled():
            assert outcome(lambda: op(T.to_sparse())) == sparse


# --------------------------------------------------------------------------------------------------
# Lifetimes


def test_nothing_keeps_a_closed_library_alive(namespace):
    def used() -> Any:
        kernel = lambda x: x + 1  # noqa: E731  # a function, so that a weak reference can check that it is freed
        library = torchop.Library(namespace, "FRAGMENT")
        library.define("op(Tensor x) -> Tensor")
        torchop.register_kernel(f"{namespace}::op", TYPE, kernel, lib=library)
        torchop.register_autograd(f"{namespace}::op", lambda ctx, grad: grad, lib=library)
        op = getattr(torch.ops, namespace).op
        assert_native(f"{namespace}::op", lambda: op(T), lambda: op(leaf()))
        library.close()
        return weakref.ref(kernel)

    kernel = used()
    gc.collect()
    assert kernel() is None


# --------------------------------------------------------------------------------------------------
# Operators of other packages


@pytest.mark.parametrize("way", ["custom_op", "impl"])
def test_a_formula_for_an_accelerated_operator_of_another_package(namespace, way):
    name = f"{namespace}::op"
    with torch.library._scoped_library(namespace, "FRAGMENT") as library:
        if way == "custom_op":
            torch.library.custom_op(
                name, lambda x, n=7: x * n, mutates_args=(), schema="(Tensor x, int n=1) -> Tensor"
            )
        else:
            library.define("op(Tensor x, int n=1) -> Tensor")
            library.impl("op", lambda x, n=7: x * n, BACKEND)
        op = getattr(torch.ops, namespace).op
        seen: list[Any] = []

        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            seen.append(inputs[1])
            ctx.save_for_backward(inputs[0])

        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad * ctx.saved_tensors[0] * 5, None

        with torchop.accelerate(name), torchop.Library(namespace, "IMPL") as ours:
            torchop.register_autograd(name, backward, setup_context=setup_context, lib=ours)
            calls = [lambda: op(T), lambda: op(leaf()), lambda: gradients(lambda x: op(x, 3), T)]
            assert_native(name, *calls)
            assert set(seen) == {1, 3}
            assert op(T).tolist() == [0, 7, 14]
