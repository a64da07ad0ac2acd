"""Kernels get the same arguments in native and dispatched calls.

Kernels of torchop's operators also get the arguments that equal the schema's defaults. The
dispatcher does not pass these arguments to other kernels, so the kernels' own defaults apply.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import counting, needs_native
from tests._support.devices import BACKEND, TYPE

pytestmark = needs_native

T = torch.ones(1)
SCHEMA = "(Tensor x, *, float beta=2.0) -> Tensor"


def implementation(x: Tensor, *, beta: float = 2.0) -> Tensor:
    return x * beta


def wrapped() -> Callable[..., Any]:
    """Return a kernel whose signature shows the default 2.0, although the kernel uses 10.0."""

    @functools.wraps(implementation)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("beta", 10.0)
        return implementation(*args, **kwargs)

    return wrapper


def signed() -> Callable[..., Any]:
    def function(x: Tensor, **kwargs: Any) -> Tensor:
        return x * kwargs.get("beta", 10.0)

    function.__signature__ = inspect.signature(implementation)  # type: ignore[attr-defined]
    return function


class _Instance:
    __wrapped__ = staticmethod(implementation)

    def __call__(self, x: Tensor, *, beta: float = 10.0) -> Tensor:
        return x * beta


def partial() -> Callable[..., Any]:
    return functools.partial(implementation, beta=10.0)


KERNELS = [wrapped, signed, _Instance, partial]


def values(call: Callable[[], Tensor]) -> list[float]:
    native = [call().item() for _ in range(3)]
    with torchop.native.disabled():
        return [*native, call().item()]


@pytest.mark.parametrize("make", [wrapped, signed, _Instance])
def test_a_kernel_of_an_operator_is_given_the_default_of_the_schema(namespace, make):
    op = torchop.custom_op(f"{namespace}::op", make(), mutates_args=(), schema=SCHEMA)
    with counting(op) as calls:
        assert values(lambda: op(T)) == [2, 2, 2, 2]
    assert calls == {"native": 3, "switched_off": 1}


@pytest.mark.parametrize("make", [wrapped, signed, _Instance])
def test_a_kernel_for_a_device_is_given_the_default_of_the_schema(namespace, make):
    op = torchop.custom_op(f"{namespace}::op", implementation, mutates_args=())
    op.register_kernel(TYPE)(make())
    assert values(lambda: op(T)) == [2, 2, 2, 2]


def test_a_fake_kernel_is_given_the_default_of_the_schema(namespace):
    @functools.wraps(implementation)
    def fake(x: Tensor, **kwargs: Any) -> Tensor:
        return x.new_empty(int(kwargs.get("beta", 10.0)))

    op = torchop.custom_op(f"{namespace}::op", implementation, mutates_args=())
    op.register_fake(fake)
    assert op(T.to("meta")).shape == (2,)


@pytest.mark.parametrize("make", KERNELS)
def test_kernel_of_a_library_gets_the_dispatchers_arguments(namespace, make):
    library = torchop.Library(namespace, "FRAGMENT")
    library.define(f"op{SCHEMA}")
    library.impl("op", make(), BACKEND)
    op = getattr(torch.ops, namespace).op
    assert values(lambda: op(T)) == [10, 10, 10, 10]
    assert values(lambda: op(T, beta=2.0)) == [10, 10, 10, 10]
    assert values(lambda: op(T, beta=3.0)) == [3, 3, 3, 3]
    assert torchop.native.counters(f"{namespace}::op")["native"] == 8
    library.close()


@pytest.mark.parametrize("make", KERNELS)
@pytest.mark.parametrize("way", ["custom_op", "impl"])
def test_kernel_of_torch_library_gets_the_dispatchers_arguments(namespace, make, way):
    name = f"{namespace}::op"
    if way == "custom_op":
        torch.library.custom_op(name, make(), mutates_args=(), schema=SCHEMA)
    else:
        torch.library.define(name, SCHEMA)
        torch.library.impl(name, TYPE)(make())
    op = getattr(torch.ops, namespace).op
    stock = op(T).item(), op(T, beta=2.0).item(), op(T, beta=3.0).item()
    with torchop.accelerate(name):
        assert values(lambda: op(T)) == [stock[0]] * 4
        assert values(lambda: op(T, beta=2.0)) == [stock[1]] * 4
        assert values(lambda: op(T, beta=3.0)) == [stock[2]] * 4
        assert torchop.native.counters(name)["native"] == 9
    assert stock == (10, 10, 3)


# --------------------------------------------------------------------------------------------------
# Arguments that equal a default


DEFAULTS = "(Tensor x, int a=1, Scalar b=2, int[] c=[3], *, int d=4, Device? e='cpu', str f='g')"
CPU = torch.device("cpu")
CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((1, 2, [3]), {}),
    ((1, 2, (3,)), {}),
    ((1, 3, [3]), {}),
    ((1, 2, [3, 3]), {}),
    ((1, 2.0, [3]), {}),  # a float is not the same as the default, which is an int
    ((1, True), {}),
    ((), {"c": [4]}),
    ((), {"d": 5}),
    ((), {"d": 4, "f": "g"}),
    ((), {"f": "h"}),
    ((), {"e": CPU}),
    ((2, 2, [3]), {"e": None, "d": 6, "f": ""}),
]


@pytest.mark.parametrize("theirs", [True, False])
def test_trailing_arguments_that_equal_their_default_are_omitted(namespace, theirs):
    seen = []

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(repr((args[1:], kwargs)))
        return args[0].clone()

    maker: Any = torch.library if theirs else torchop
    library = maker.Library(namespace, "FRAGMENT")
    library.define(f"op{DEFAULTS} -> Tensor".replace("'", '"'))
    library.impl("op", kernel, BACKEND)
    op = getattr(torch.ops, namespace).op
    with torchop.accelerate(f"{namespace}::*"):
        for args, kwargs in CALLS:
            op(T, *args, **kwargs)
            with torchop.native.disabled():
                op(T, *args, **kwargs)
            assert seen[-2] == seen[-1]
        assert torchop.native.counters(f"{namespace}::op")["native"] >= len(CALLS) - 1
    assert seen[1] == "((), {})"
    library._destroy()


# --------------------------------------------------------------------------------------------------
# Defaults that are replaced or mutated


def scaling(x: Tensor, n: int = 2, *, beta: float = 1.0) -> Tensor:
    return x * n * beta


def copy_of(function: Callable[..., Any]) -> Any:
    copied = type(function)(function.__code__, globals(), "op", function.__defaults__)  # type: ignore[arg-type]
    copied.__kwdefaults__ = dict(function.__kwdefaults__ or {})
    return copied


@pytest.mark.parametrize("way", ["custom_op", "impl", "our impl"])
def test_replaced_defaults_of_a_function_are_noticed(namespace, way):
    kernel, name = copy_of(scaling), f"{namespace}::op"
    text = "(Tensor x, int n=2, *, float beta=1.0) -> Tensor"
    maker: Any = torchop if way == "our impl" else torch.library
    library = maker.Library(namespace, "FRAGMENT")
    if way == "custom_op":
        torch.library.custom_op(name, kernel, mutates_args=(), schema=text)
    else:
        library.define(f"op{text}")
        library.impl("op", kernel, BACKEND)
    op = getattr(torch.ops, namespace).op
    with torchop.accelerate(name):
        assert values(lambda: op(T)) == [2] * 4
        kernel.__defaults__ = (5,)
        assert values(lambda: op(T)) == [5] * 4
        kernel.__kwdefaults__["beta"] = 3.0
        assert values(lambda: op(T)) == [15] * 4
        kernel.__kwdefaults__ = {"beta": 0.5}
        assert values(lambda: op(T)) == [2.5] * 4
    assert torchop.native.counters(name).get("native", 0) >= (10 if way == "our impl" else 0)
    library._destroy()


def counting_calls(x: Tensor, d: list[int] = []) -> Tensor:  # noqa: B006  (the test is about mutable defaults)
    d.append(0)
    return x * len(d)


@pytest.mark.parametrize("schema", [None, "(Tensor x, int[] d=[]) -> Tensor"])
def test_a_list_that_is_a_default_is_a_new_one_for_each_call(namespace, schema):
    options = {} if schema is None else {"schema": schema}
    op = torchop.custom_op(f"{namespace}::op", counting_calls, mutates_args=(), **options)
    assert values(lambda: op(T)) == [1] * 4
    with torchop.native.disabled():
        assert values(lambda: op(T)) == [1] * 4


# --------------------------------------------------------------------------------------------------
# One function, registered in two ways


@pytest.fixture
def counted(namespace):
    """An operator, its library and kernel, and a list of the number of arguments in each call."""
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("op(Tensor x) -> Tensor")
    seen = []

    def kernel(*args: Any) -> Tensor:
        seen.append(len(args))
        return args[-1].detach().clone()

    library.impl("op", kernel, BACKEND)
    yield getattr(torch.ops, namespace).op, library, kernel, seen
    library._destroy()


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_function_gets_dispatch_keys_only_if_it_takes_them(namespace, counted):
    op, library, kernel, seen = counted
    with torchop.accelerate(f"{namespace}::*"):
        for _ in range(3):
            op(T)
        assert torchop.native.counters(f"{namespace}::op")["native"] == 3
        library.impl("op", kernel, BACKEND, with_keyset=True, allow_override=True)
        for _ in range(3):
            op(T)
        assert seen == [1] * 3 + [2] * 3
        library.impl("op", kernel, BACKEND, allow_override=True)
        for _ in range(3):
            op(T)
        assert seen == [1] * 3 + [2] * 3 + [1] * 3
