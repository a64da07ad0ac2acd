"""Objects that stand for objects of opaque types in a trace."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any, Optional

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torchop

X = torch.ones(3)
subclasses: list[type] = []


@torchop.opaque
class Scale:
    def __init__(self, number: int) -> None:
        self.number = number

    def __init_subclass__(cls) -> None:
        subclasses.append(cls)

    def __len__(self) -> int:
        return self.number

    def read(self) -> int:
        return self.number


@dataclasses.dataclass
class Scaled:
    y: Tensor
    scale: Optional[Scale]


@pytest.fixture
def make(namespace: str) -> Any:
    @torchop.custom_op(f"{namespace}::make", mutates_args=())
    def make(x: Tensor, given: bool) -> Scaled:
        return Scaled(x + 1, Scale(int(x.sum())) if given else None)

    make.register_fake(lambda x, given: Scaled(torch.empty_like(x), Scale(0) if given else None))
    return make


@pytest.fixture
def use(namespace: str) -> Any:
    @torchop.custom_op(f"{namespace}::use", mutates_args=())
    def use(x: Tensor, scale: Scale) -> Tensor:
        return x * scale.number

    use.register_fake(lambda x, scale: torch.empty_like(x))
    return use


class Module(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def _compiled(backend: str) -> Any:
    return lambda f, *args: torch.compile(f, fullgraph=True, backend=backend)(*args)


def _exported(strict: bool) -> Any:
    return lambda f, *args: torch.export.export(Module(f), args, strict=strict).module()(*args)


TRACES: dict[str, Any] = {
    "aot_eager": _compiled("aot_eager"),
    "inductor": _compiled("inductor"),
    "export": _exported(False),
    "strict export": _exported(True),
    "make_fx": lambda f, *args: make_fx(f, tracing_mode="fake")(*args)(*args),
}
READERS: dict[str, Any] = {
    "attribute": lambda scale: scale.number,
    "method": lambda scale: scale.read(),
}


@pytest.mark.parametrize("trace", TRACES)
def test_a_graph_passes_the_result_of_the_kernel(make: Any, use: Any, trace: str) -> None:
    def function(x: Tensor) -> Tensor:
        scaled = make(x, True)
        return use(scaled.y, scaled.scale)

    assert torch.equal(TRACES[trace](function, X), torch.full((3,), 6.0))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_graph_returns_the_result_of_the_kernel(make: Any, backend: str) -> None:
    compiled = torch.compile(make, fullgraph=True, backend=backend)
    scaled = compiled(X, True)
    assert type(scaled.scale) is Scale
    assert scaled.scale.number == 3
    assert compiled(X, False).scale is None


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("how", READERS)
def test_traced_code_cannot_read_a_result(make: Any, trace: str, how: str) -> None:
    name = "number" if how == "attribute" else "read"
    # Since 2.15, Dynamo shows only the line of code.
    message = rf"attribute '{name}'|Member '{name}' is not registered|scale\.{name}"
    with pytest.raises(Exception, match=message):
        TRACES[trace](lambda x: x * READERS[how](make(x, True).scale), X)


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("source", ["argument", "result"])
def test_a_fake_kernel_cannot_read_an_object(
    namespace: str, make: Any, trace: str, source: str
) -> None:
    @torchop.custom_op(f"{namespace}::repeat", mutates_args=())
    def repeat(x: Tensor, scale: Scale) -> Tensor:
        return x.repeat(scale.number)

    repeat.register_fake(lambda x, scale: x.new_empty(x.shape[0] * scale.number))
    message = f"{namespace}::repeat: the fake kernel read the attribute 'number' of an opaque"
    function, args = repeat, (X, Scale(2))
    if source == "result":
        function, args = (lambda x: repeat(x, make(x, True).scale)), (X,)
    with pytest.raises(Exception, match=message):
        TRACES[trace](function, *args)


def test_a_fake_kernel_cannot_read_an_object_without_a_trace(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::repeat", mutates_args=())
    def repeat(x: Tensor, scale: Scale) -> Tensor:
        return x.repeat(scale.number)

    repeat.register_fake(lambda x, scale: x.new_empty(x.shape[0] * scale.number))
    with FakeTensorMode() as mode, pytest.raises(torchop.TracingError, match="'number'"):
        repeat(mode.from_tensor(X), Scale(2))


@pytest.mark.parametrize("trace", TRACES)
def test_an_operator_can_return_its_argument(namespace: str, use: Any, trace: str) -> None:
    @torchop.custom_op(f"{namespace}::same", mutates_args=())
    def same(x: Tensor, scale: Scale) -> Scale:
        return scale

    same.register_fake(lambda x, scale: scale)
    result = TRACES[trace](lambda x, scale: use(x, same(x, scale)), X, Scale(4))
    assert torch.equal(result, torch.full((3,), 4.0))


def test_an_object_shared_by_calls_of_a_fake_kernel_stands_for_two_results(
    namespace: str, use: Any
) -> None:
    shared = Scale(0)

    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, number: int) -> Scale:
        return Scale(number)

    op.register_fake(lambda x, number: shared)

    def function(x: Tensor) -> Tensor:
        one, other = op(x, 2), op(x, 3)
        return use(x, one) + 10 * use(x, other)

    assert TRACES["inductor"](function, X)[0].item() == 32


def test_hooks_of_the_class_do_not_run_for_traced_objects(make: Any) -> None:
    TRACES["aot_eager"](make, X, True)
    assert subclasses == []


# --------------------------------------------------------------------------------------------------
# Lifetimes


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("training", [False, True])
def test_an_object_dies_with_its_last_user(
    namespace: str, use: Any, backend: str, training: bool
) -> None:
    use.register_autograd(lambda ctx, grad: (grad, None))
    compiled = torch.compile(lambda x, scale: use(x, scale) + 1, fullgraph=True, backend=backend)
    x = X.clone().requires_grad_(training)

    def call() -> weakref.ref[Scale]:
        scale = Scale(2)
        result = compiled(x, scale)
        if training:
            result.sum().backward()
        return weakref.ref(scale)

    reference = call()
    gc.collect()
    assert reference() is None
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert call()() is None


def test_the_kernels_result_is_compared_without_keeping_objects(make: Any) -> None:
    scale = Scale(2)

    @torchop.custom_op(f"{make._namespace}::op", mutates_args=())
    def op(x: Tensor, scale: Scale) -> Scaled:
        return Scaled(x * 1, scale)

    op.register_fake(lambda x, scale: Scaled(torch.empty_like(x), None))
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    with pytest.raises(torchop.ResultError, match=r"the result\.scale is an object, but the fake"):
        compiled(X, scale)
    reference = weakref.ref(scale)
    del scale
    with contextlib.suppress(torchop.ResultError):
        compiled(X, Scale(3))
    gc.collect()
    assert reference() is None


def test_the_kernels_result_is_compared_for_a_call_with_a_result(make: Any) -> None:
    @torchop.custom_op(f"{make._namespace}::op", mutates_args=())
    def op(scale: Scale) -> tuple[Tensor, Optional[Scale]]:
        return X * 1, scale

    op.register_fake(lambda scale: (torch.empty(3), None))
    compiled = torch.compile(lambda x: op(make(x, True).scale), fullgraph=True, backend="aot_eager")
    with pytest.raises(torchop.ResultError, match=r"the result\[1\] is an object, but the fake"):
        compiled(X)
