"""Callables of deregistered operators raise an error instead of reading freed memory."""

import copy
import gc
import pickle

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.devices import BACKEND, TYPE

T = torch.zeros(2)
LIBRARIES = pytest.mark.parametrize("make", [torchop.Library, torch.library.Library])


def packet(namespace):
    return getattr(torch.ops, namespace).op


def close(library):
    library._destroy()


def collect(library):
    # Do nothing. The library is freed when `callables_after_deregistration` returns, because it has
    # the only reference.
    pass


def define_in(library, namespace):
    torchop.define(f"{namespace}::op", "(Tensor x) -> Tensor", lib=library)
    torchop.impl(f"{namespace}::op", TYPE, lambda x: x + 1, lib=library)


def custom_op_in(library, namespace):
    def op(x: Tensor) -> Tensor:
        return x + 1

    return torchop.custom_op(f"{namespace}::op", op, mutates_args=(), lib=library)


def callables_after_deregistration(namespace, make, define, end):
    """Define `ns::op` in a library, end the library, and return the callables that remain."""
    library = make(namespace, "FRAGMENT")
    handle = define(library, namespace)
    held = [packet(namespace), packet(namespace).default, *([handle] if handle else [])]
    assert all(call(T).tolist() == [1, 1] for call in held)
    end(library)
    del library
    gc.collect()
    return held


EVERY_END = pytest.mark.parametrize("end", [close, collect])
EVERY_DEFINITION = pytest.mark.parametrize("define", [define_in, custom_op_in])


@LIBRARIES
@EVERY_DEFINITION
@EVERY_END
def test_operators_of_a_closed_library_raise(namespace, make, define, end):
    for held in callables_after_deregistration(namespace, make, define, end):
        with pytest.raises(
            torchop.OperatorGoneError, match=f"{namespace}::op was deregistered.* closed"
        ):
            held(T)
        assert namespace in repr(held)


@LIBRARIES
@EVERY_DEFINITION
@EVERY_END
def test_operator_of_a_closed_library_is_no_longer_in_torch_ops(namespace, make, define, end):
    callables_after_deregistration(namespace, make, define, end)
    with pytest.raises(AttributeError):
        packet(namespace)


@LIBRARIES
@EVERY_DEFINITION
@EVERY_END
def test_held_overload_raises_on_every_use(namespace, make, define, end):
    overload = callables_after_deregistration(namespace, make, define, end)[1]
    keys = torch._C.DispatchKeySet(BACKEND)
    with pytest.raises(torchop.OperatorGoneError):
        overload.redispatch(keys, T)
    with pytest.raises(torchop.OperatorGoneError):
        overload(T.clone().requires_grad_())
    assert str(overload._schema).startswith(f"{namespace}::op(Tensor x)")
    assert overload in {overload}


def test_collecting_a_closed_library_keeps_the_current_operator(namespace):
    closed = torchop.Library(namespace, "FRAGMENT")
    define_in(closed, namespace)
    closed.close()
    with torchop.Library(namespace, "FRAGMENT") as library:
        define_in(library, namespace)
        held = packet(namespace).default
        del closed
        gc.collect()
        assert packet(namespace).default is held
        assert f"{namespace}::op" in torch.library._defs
        assert held(T).tolist() == [1, 1]


@EVERY_END
def test_handle_of_a_closed_library_registers_nothing(namespace, end):
    handle = callables_after_deregistration(namespace, torchop.Library, custom_op_in, end)[2]
    registrations = [
        lambda: handle.register_kernel(TYPE),
        lambda: handle.register_fake(lambda x: x),
        lambda: handle.register_autograd(lambda ctx, grad: grad),
        lambda: handle.register_vmap(lambda info, in_dims, x: (x, 0)),
        lambda: handle.register_autocast(TYPE, torch.bfloat16),
        lambda: handle.register_torch_dispatch(Tensor, lambda *args: None),
        lambda: handle.register_effect(None),
        lambda: handle.set_kernel_enabled(TYPE),
        lambda: torchop.register_fake(handle, lambda x: x),
        lambda: torchop.get_kernel(handle, BACKEND),
        lambda: handle.overload,
        lambda: handle.schema,
        lambda: handle.tags,
    ]
    for register in registrations:
        with pytest.raises(torchop.OperatorGoneError, match=f"{namespace}::op was deregistered"):
            register()
    assert handle.name == f"{namespace}::op"
    assert repr(handle) == f"<torchop.CustomOp {namespace}::op, deregistered>"
    assert copy.deepcopy(handle) is handle
    with pytest.raises(torchop.OperatorNotFoundError):
        pickle.loads(pickle.dumps(handle))


def test_operator_of_a_library_outlives_its_handle(namespace):
    library = torchop.Library(namespace, "FRAGMENT")
    custom_op_in(library, namespace)
    gc.collect()
    assert packet(namespace)(T).tolist() == [1, 1]
    torchop.register_kernel(f"{namespace}::op", TYPE, lambda x: x + 5)
    assert packet(namespace)(T).tolist() == [5, 5]
    close(library)


def test_deregistering_one_overload_keeps_the_other(namespace):
    with torchop.Library(namespace, "FRAGMENT") as home:
        home.define("op(Tensor x) -> Tensor")
        home.impl("op", lambda x: x + 1, BACKEND)
        with torchop.Library(namespace, "FRAGMENT") as library:
            library.define("op.two(Tensor x, Tensor y) -> Tensor")
            library.impl("op.two", lambda x, y: x + 2, BACKEND)
            held, overload = packet(namespace), packet(namespace).two
            assert held(T, T).tolist() == [2, 2]
        assert held(T).tolist() == [1, 1]
        assert packet(namespace).overloads() == ["default"]
        with pytest.raises(torchop.OperatorGoneError):
            overload(T, T)


def test_kernel_from_get_kernel_raises_after_deregistration(namespace):
    library = torchop.Library(namespace, "FRAGMENT")
    define_in(library, namespace)
    kernel = torchop.get_kernel(f"{namespace}::op", BACKEND)
    close(library)
    keys = torch._C.DispatchKeySet(BACKEND)
    with pytest.raises(torchop.OperatorGoneError, match=f"{namespace}::op, which was deregistered"):
        kernel.call_boxed(keys, T)
    with pytest.raises(torchop.OperatorGoneError):
        _ = kernel.op_handle


def test_a_compiled_function_with_a_deregistered_operator_raises(namespace):
    library = torchop.Library(namespace, "FRAGMENT")
    op = custom_op_in(library, namespace)
    op.register_fake(lambda x: torch.empty_like(x))
    compiled = torch.compile(lambda x: op(x) * 2, backend="eager")
    assert compiled(T).tolist() == [2, 2]
    close(library)
    with pytest.raises(torchop.OperatorGoneError, match=f"{namespace}::op was deregistered"):
        compiled(T)


def test_backward_of_a_deregistered_operator_still_runs(namespace):
    library = torchop.Library(namespace, "FRAGMENT")
    op = custom_op_in(library, namespace)
    op.register_autograd(lambda ctx, grad: grad * 3)
    x = torch.zeros(2, requires_grad=True)
    result = op(x).sum()
    close(library)
    result.backward()
    assert x.grad.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("{ns}", "IMPL"), ValueError, "kind IMPL, which cannot define"),
        (("{ns}_other", "FRAGMENT"), ValueError, "the library of the namespace"),
    ],
)
def test_library_that_cannot_hold_the_operator_is_refused(namespace, arguments, error, words):
    name, kind = arguments
    with (
        torchop.Library(name.format(ns=namespace), kind) as library,
        pytest.raises(error, match=words),
    ):
        custom_op_in(library, namespace)


def test_invalid_or_closed_library_is_rejected(namespace):
    with pytest.raises(TypeError, match="lib expects a Library, got str"):
        custom_op_in(namespace, namespace)
    library = torchop.Library(namespace, "FRAGMENT")
    library.close()
    with pytest.raises(torchop.OperatorGoneError, match="has been destroyed"):
        custom_op_in(library, namespace)
