"""Under dispatch modes, a new operator replaces a deregistered operator of the same name.

If another library has registered a kernel, the dispatcher keeps its entry for the old operator. The
entry still refers to the Python overload that dispatch modes got before.

Uses private names.
"""

import gc

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import torchop
from tests._support.devices import BACKEND, OTHER, OTHER_BACKEND, TYPE
from torchop._compat import torch_ops

T = torch.ones(2)
SCHEMA = "op(Tensor x) -> Tensor"


class Recorded(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.overloads = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.overloads.append(func)
        return func(*args, **(kwargs or {}))


def packet(namespace):
    return getattr(torch.ops, namespace).op


def recorded(namespace, *args):
    with Recorded() as mode:
        result = packet(namespace)(*args)
    return result, mode.overloads


def defined_in_ours(namespace, schema, kernel):
    library = torchop.Library(namespace, "FRAGMENT")
    library.define(schema)
    library.impl("op", kernel, BACKEND)
    return library


def defined_in_stock(namespace, schema, kernel):
    library = torch.library.Library(namespace, "FRAGMENT")
    torchop.define(f"{namespace}::op", schema.removeprefix("op"), lib=library)
    torchop.impl(f"{namespace}::op", TYPE, kernel, lib=library)
    return library


def custom_op(namespace, schema, kernel):
    library = torchop.Library(namespace, "FRAGMENT")
    torchop.custom_op(f"{namespace}::op", kernel, mutates_args=(), schema=schema[2:], lib=library)
    return library


DEFINITIONS = pytest.mark.parametrize("define", [defined_in_ours, defined_in_stock, custom_op])


def kernel_in_another_library(namespace):
    """Register a kernel in another library, so that the dispatcher keeps the operator's entry."""
    library = torch.library.Library(namespace, "IMPL")
    library.impl("op", lambda x: x, OTHER_BACKEND)
    return library


RULES = {
    "kernel": lambda name: torchop.register_kernel(name, OTHER, lambda x: x),
    "impl": lambda name: torchop.impl(name, OTHER, lambda x: x),
    "fake": lambda name: torchop.register_fake(name, torch.empty_like),
    "vmap": lambda name: torchop.register_vmap(name, lambda info, dims, x: (x, dims[0])),
    "autograd": lambda name: torchop.register_autograd(name, lambda ctx, grad: grad),
    "autocast": lambda name: torchop.register_autocast(name, TYPE, torch.bfloat16),
    "effect": lambda name: torchop.register_effect(name, "ordered"),
}


# PyTorch warns when a kernel replaces an earlier kernel.
@pytest.mark.filterwarnings("ignore:Warning only once")
@pytest.mark.parametrize("register", RULES.values(), ids=RULES)
def test_rule_without_library_survives_and_modes_call_the_next_operator(namespace, register):
    for amount in (1, 2):
        with defined_in_ours(namespace, SCHEMA, lambda x, amount=amount: x + amount):
            register(f"{namespace}::op")
            result, overloads = recorded(namespace, T)
            assert result.tolist() == [1 + amount] * 2
            assert overloads == [packet(namespace).default]
            traced = make_fx(packet(namespace))(T)
            assert traced(T).tolist() == [1 + amount] * 2
        gc.collect()


@DEFINITIONS
def test_modes_get_the_overload_of_the_next_operator(namespace, define):
    def add_one(x: Tensor) -> Tensor:
        return x + 1

    def add(x: Tensor, n: int = 7) -> Tensor:
        return x + n

    library = None
    for kernel, schema, expected in (
        (add_one, SCHEMA, 2),
        (add, "op(Tensor x, int n=7) -> Tensor", 8),
        (add_one, SCHEMA, 2),
    ):
        first = define(namespace, schema, kernel)
        if library is None:
            library = kernel_in_another_library(namespace)
        result, overloads = recorded(namespace, T)
        assert result.tolist() == [expected] * 2
        assert overloads == [packet(namespace).default]
        assert str(overloads[0]._schema) == f"{namespace}::{schema}"
        first._destroy()
        with pytest.raises(torchop.OperatorGoneError):
            overloads[0](T)
        del first, result, overloads
        gc.collect()  # now only the dispatcher refers to the overload
    library._destroy()


def test_held_overload_calls_the_next_operator_if_the_dispatcher_kept_it(namespace):
    with defined_in_ours(namespace, SCHEMA, lambda x: x + 1):
        library, held = kernel_in_another_library(namespace), packet(namespace).default
    with pytest.raises(torchop.OperatorGoneError):
        held(T)
    with defined_in_ours(namespace, "op(Tensor x, Tensor y) -> Tensor", lambda x, y: x + y):
        assert held is packet(namespace).default
        assert held(T, T).tolist() == [2, 2]
        assert held.redispatch(torch._C.DispatchKeySet(BACKEND), T, T).tolist() == [2, 2]
        with pytest.raises(RuntimeError, match="missing value for argument 'y'"):
            held(T)
    with pytest.raises(torchop.OperatorGoneError):
        held(T, T)
    library._destroy()


@DEFINITIONS
def test_a_held_overload_stays_deregistered_without_an_entry(namespace, define):
    def plus_two(x: Tensor) -> Tensor:
        return x + 2

    first = define(namespace, SCHEMA, plus_two)
    library, held = kernel_in_another_library(namespace), packet(namespace).default
    first._destroy()
    library._destroy()
    second = define(namespace, SCHEMA, plus_two)
    assert recorded(namespace, T)[0].tolist() == [3, 3]
    with pytest.raises(torchop.OperatorGoneError):
        held(T)
    second._destroy()


def test_overload_looked_up_in_between_raises(namespace, monkeypatch):
    with defined_in_ours(namespace, SCHEMA, lambda x: x + 1):
        library, first = kernel_in_another_library(namespace), packet(namespace).default
    after_definition, held = torch_ops.after_definition, []

    def looked_up(*name):
        held.append(packet(namespace).default)
        after_definition(*name)

    monkeypatch.setattr(torch_ops, "after_definition", looked_up)
    with defined_in_ours(namespace, SCHEMA, lambda x: x + 2):
        (between,) = held
        assert between is not first
        assert packet(namespace).default is first
        assert between(T).tolist() == first(T).tolist() == [3, 3]
        assert between.py_kernels is first.py_kernels
    for overload in (first, between):
        with pytest.raises(torchop.OperatorGoneError):
            overload(T)
    library._destroy()
