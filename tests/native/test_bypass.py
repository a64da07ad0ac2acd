"""Calls through the dispatcher skip torchop's Python kernels that have nothing to do.

Uses private names.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwad
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torchop
from tests._support.common import assert_clean, needs_native, outcome
from tests._support.forking import run_forked
from tests._support.opaque_types import REFERENCE
from tests._support.releases import OUT, needs_tags
from torchop._rules.autograd import rule as autograd_rule
from torchop._rules.mutation import kernels as mutation_kernels

pytestmark = needs_native

# Maps the code object of each of torchop's Python kernels to the kernel's dispatch key.
KEYS = {
    autograd_rule.AutogradRule.kernel.__code__: "Autograd",
    mutation_kernels._MutationKernels.count_versions.__code__: "ADInplaceOrView",
}


def kernels_of(call: Callable[[], Any]) -> list[str]:
    """Return the keys of torchop's Python kernels that run in a call through the dispatcher."""
    keys: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code in KEYS:
            keys.append(KEYS[code])

    with torch.autograd.profiler.emit_itt():  # an active profiler makes the call use the dispatcher
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
    return keys


@pytest.fixture
def double(namespace):
    @torchop.custom_op(f"{namespace}::double", mutates_args=())
    def double(x: Tensor, others: list[Tensor]) -> Tensor:
        return x * 2

    double.register_autograd(lambda ctx, grad: (grad * 2, [None] * ctx.count), setup_context=_count)
    double.register_jvp(lambda ctx, x, others: x * 2)
    double(torch.ones(2), [])
    return double


def _count(ctx, inputs, output):
    ctx.count = len(inputs[1])


@pytest.fixture
def fill(namespace):
    @torchop.custom_op(f"{namespace}::fill", mutates_args=("x", "others"))
    def fill(x: Tensor, others: list[Tensor], y: Tensor) -> None:
        for tensor in (x, *others):
            tensor.copy_(y)

    fill(torch.ones(2), [], torch.ones(2))
    return fill


def dual(x: Tensor) -> Tensor:
    return fwad.make_dual(x, torch.ones(2))


def test_call_without_gradients_runs_no_python_kernel(double):
    assert kernels_of(lambda: double(torch.ones(2), [torch.ones(2)])) == []
    with torch.no_grad():
        x = torch.ones(2, requires_grad=True)
        assert kernels_of(lambda: double(x, [x])) == []


@pytest.mark.parametrize(
    "values",
    [
        lambda x: (x, []),
        lambda x: (torch.ones(2), [torch.ones(2), x]),
        lambda x: (x * 1, []),
        lambda x: (x.view(2), []),
    ],
    ids=["leaf", "list", "non-leaf", "view"],
)
def test_a_gradient_is_recorded(double, values):
    args = values(torch.ones(2, requires_grad=True))
    assert kernels_of(lambda: double(*args)) == ["Autograd"]
    with torch.autograd.profiler.emit_itt():
        result = double(*args)
    assert type(result.grad_fn).__name__.endswith("doubleBackward")


@pytest.mark.parametrize("kind", [REFERENCE, f"{REFERENCE}?", "Any"])
@pytest.mark.parametrize("pack", [lambda x: x, lambda x: [x], lambda x: (None, x), lambda x: None])
def test_tensors_inside_an_object_are_recorded_as_without_native_calls(namespace, kind, pack):
    schema = f"(Tensor x, {kind} y) -> Tensor"
    op = torchop.custom_op(f"{namespace}::f", lambda x, y: x * 2, mutates_args=(), schema=schema)
    value = pack(torch.ones(2, requires_grad=True))
    with torchop.native.disabled():
        expected = outcome(lambda: op(torch.ones(2), value).requires_grad)
    assert outcome(lambda: op(torch.ones(2), value).requires_grad) == expected
    assert outcome(lambda: op._opoverload(torch.ones(2), value).requires_grad) == expected
    assert expected is True or not isinstance(value, Tensor)


def test_view_whose_base_later_required_grad_is_recorded(double):
    base = torch.ones(2)
    view = base.view(2)
    base.mul_(torch.ones(2, requires_grad=True))
    assert view.requires_grad
    assert kernels_of(lambda: double(view, [])) == ["Autograd"]


def test_tangents_are_followed(double):
    with fwad.dual_level():
        x = dual(torch.ones(2))
        # The autograd kernel must not be skipped here, because the tensor has a tangent. The kernel
        # runs twice, because it removes the tangent and calls the operator again.
        assert kernels_of(lambda: double(x, [])) == ["Autograd"] * 2
        assert kernels_of(lambda: double(x.view(2), [])) == ["Autograd"] * 2
        with torch.no_grad(), torch.autograd.profiler.emit_itt():
            assert fwad.unpack_dual(double(x, [])).tangent.tolist() == [2, 2]


def test_without_native_calls_no_kernel_is_skipped(double, fill):
    with torchop.native.disabled():
        assert kernels_of(lambda: double(torch.ones(2), [])) == ["Autograd"]
        keys = kernels_of(lambda: fill(torch.ones(2), [], torch.ones(2)))
        assert keys == ["Autograd", "ADInplaceOrView"]


def test_versions_are_counted_once(fill):
    x, other, y = torch.zeros(2), torch.zeros(2), torch.ones(2)
    assert kernels_of(lambda: fill(x, [other], y)) == []
    # The dispatcher increments the version once, and the in-place operation in the kernel does so a
    # second time.
    assert (x._version, other._version, y._version) == (1 + 1, 1 + 1, 0)
    assert x.tolist() == other.tolist() == [1, 1]


@pytest.mark.parametrize("kind", ["Device", "Device?"])
def test_a_mode_sees_a_device_by_default(namespace, kind):
    devices: list[Any] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            devices.extend(args[1:2] if func.namespace == namespace else ())
            return func(*args, **(kwargs or {}))

    for library in (torchop, torch.library):
        op = library.custom_op(
            f"{namespace}::{library.__name__.replace('.', '_')}",
            lambda x, to, n: x * n,
            mutates_args=(),
            schema=f'(Tensor x, {kind} to="cpu", int n=2) -> Tensor',
        )
        op(torch.ones(2), n=3)
        with Mode():
            op(torch.ones(2), n=3)
        with Mode(), torchop.native.disabled():
            op(torch.ones(2), n=3)
    assert devices == [torch.device("cpu")] * 4


@needs_tags
def test_subclasses_see_the_same_functions_with_and_without_it(namespace):
    names: list[str] = []

    class Seeing(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            names.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    op = torchop.custom_op(
        f"{namespace}::op",
        lambda x, *, out: out.fill_(1),
        mutates_args=("out",),
        schema="(Tensor?[] x, *, Tensor(a!) out) -> Tensor(a!)",
        tags=OUT,
    )
    op([torch.ones(2)], out=torch.zeros(2))
    seen = {}
    for is_native in (True, False):
        native = contextlib.nullcontext() if is_native else torchop.native.disabled()
        out = torch.zeros(2).as_subclass(Seeing)
        names.clear()
        with native:
            torch.func.grad(lambda x, out: op([None, x], out=out).sum())(torch.ones(2), out)
        seen[is_native] = list(names)
    assert seen[True] == seen[False]
    assert "fill_" in seen[True]
    assert "is_inference" not in seen[True]


@pytest.mark.parametrize("in_list", [False, True])
def test_tensors_of_inference_mode_are_refused(fill, in_list):
    with torch.inference_mode():
        x = torch.zeros(2)
    args = (torch.zeros(2), [x]) if in_list else (x, [])
    with (
        torch.autograd.profiler.emit_itt(),
        pytest.raises(RuntimeError, match="Inplace update to inference tensor"),
    ):
        fill(*args, torch.ones(2))
    assert args[0]._version == 0 if in_list else True
    with torch.inference_mode():
        assert kernels_of(lambda: fill(*args, torch.ones(2))) in ([], ["ADInplaceOrView"])
        assert x.tolist() == [1, 1]


@contextlib.contextmanager
def registered(name: str, kernel: Callable[..., Any], calls: list[str]) -> Iterator[None]:
    namespace, _, local = name.partition("::")
    library = torch.library.Library(namespace, "FRAGMENT")

    def counting(*args: Any) -> Any:
        calls.append("theirs")
        return kernel(*args)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl(local, counting, "Autograd")
    try:
        yield
    finally:
        library._destroy()


@pytest.mark.needs_torch("2.13", "kernels of libraries for a key that has one of custom_op")
@pytest.mark.parametrize("is_called_before", [False, True])
def test_kernels_of_other_libraries_are_called(namespace, is_called_before):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x + 1

    calls: list[str] = []
    if is_called_before:
        op(torch.ones(2))
    with registered(op.name, lambda x: x + 10, calls):
        for _ in range(2):
            with torch.autograd.profiler.emit_itt():
                assert op(torch.ones(2)).tolist() == [11, 11]
    assert calls == ["theirs"] * 2
    assert op(torch.ones(2)).tolist() == [2, 2]
    with torch.autograd.profiler.emit_itt():
        assert op(torch.ones(2)).tolist() == [2, 2]


def test_deregistration_removes_the_bypass(namespace):
    for number in range(3):
        library = torchop.Library(namespace, "FRAGMENT")

        @torchop.custom_op(f"{namespace}::op", mutates_args=("x",), lib=library)
        def op(x: Tensor) -> None:
            x.add_(number)  # noqa: B023  (called in this iteration)

        x = torch.zeros(1)
        op(x)
        assert kernels_of(lambda: op(x)) == []  # noqa: B023  (called in this iteration)
        assert x.item() == 2 * number
        library.close()
        assert not torch._C._dispatch_has_kernel(f"{namespace}::op")


@pytest.mark.needs_torch("2.13", "a warning where a kernel is overridden", before="2.14")
def test_pytorchs_one_time_warning_is_still_shown():
    """PyTorch warns only once per process about overridden kernels.

    If torchop's registrations triggered the warning, users would not see it for their overrides.
    """
    done = run_forked("""
        import warnings
        import torch, torchop
        from torch import Tensor

        @torchop.custom_op("bypassed::op", mutates_args=())
        def op(x: Tensor) -> Tensor:
            return x + 1

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            op(torch.ones(2))
        assert torchop.native.counters(op)["native"] == 1
        library = torch.library.Library("bypassed", "FRAGMENT")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            library.impl("op", lambda x: x, "Autograd")
        assert "Overriding a previously registered kernel" in str(caught[0].message)
    """)
    assert_clean(done)
