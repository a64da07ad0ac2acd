"""Calls of torch.ops objects do not run PyTorch's Python code. Uses private names."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

import torchop
from tests._support.common import assert_clean, needs_native
from tests._support.forking import run_forked
from torchop._native import switch

pytestmark = needs_native

T = torch.ones(2)


@pytest.fixture
def frames():
    return []


@pytest.fixture
def uncalled(namespace, frames):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, *, amount: float = 1.0) -> Tensor:
        frames[:] = []
        frame = sys._getframe(1)
        while frame is not None:
            frames.append(frame.f_code.co_qualname)
            frame = frame.f_back
        return x + amount

    return op


@pytest.fixture
def op(uncalled):
    uncalled(T)
    return uncalled


@pytest.fixture
def calls(op):
    return {OpOverload: op.overload, OpOverloadPacket: op.overload.overloadpacket}


CLASSES = (OpOverload, OpOverloadPacket)


@pytest.mark.parametrize("cls", CLASSES)
def test_there_is_no_frame_between_a_call_and_the_kernel(cls, calls, frames):
    assert torch.equal(calls[cls](T, amount=2.0), T + 2)
    assert frames[0].endswith("test_there_is_no_frame_between_a_call_and_the_kernel")
    assert not any("OpOverload" in name for name in frames)


def test_a_replaced_call_method_of_the_class_is_used():
    # Runs in a child process, because the replaced method of the class cannot be restored.
    script = """
        from unittest import mock
        import torch
        from torch import Tensor
        import torchop
        from torchop._compat import overload_functions

        @torchop.custom_op("others::op", mutates_args=())
        def op(x: Tensor) -> Tensor:
            return x + 1

        T = torch.ones(2)
        op(T)
        for called in (op.overload, op.overload.overloadpacket):
            cls, seen = type(called), []
            original = cls.__call__

            def observed(self, /, *args, **kwargs):
                seen.append(self)
                return original(self, *args, **kwargs)

            with mock.patch.object(cls, "__call__", observed):
                assert torch.equal(called(T), T + 1)
                assert seen == [called]
                assert cls not in overload_functions.forwarding_classes()
            assert torch.equal(called(T), T + 1)
            assert seen == [called]
        """
    assert_clean(run_forked(script))


@pytest.mark.parametrize("cls", CLASSES)
def test_errors_equal_the_dispatchers(cls, calls):
    with torchop.native.disabled(), pytest.raises(RuntimeError) as expected:
        calls[cls](T, volume=1.0)
    with pytest.raises(RuntimeError) as raised:
        calls[cls](T, volume=1.0)
    assert str(raised.value) == str(expected.value)


# PyTorch skips `__torch_function__` once by setting a flag, which the next check for torch
# functions resets. A native call must also reset the flag, or else the kernel's first operation on
# a subclass would skip `__torch_function__`.
@pytest.mark.needs_torch("2.13", "calls that skip torch functions")
@pytest.mark.parametrize("way", ["handle", "overload", "packet"])
def test_skipping_torch_functions_does_not_affect_the_kernel(namespace, way):
    class Noted(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    seen = []
    noted = T.as_subclass(Noted)

    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x + (noted * 2).as_subclass(Tensor)

    called = {"handle": op, "overload": op.overload, "packet": op.overload.overloadpacket}[way]

    def calls_seen():
        seen.clear()
        result = torch._C._skip_one_hop_torch_function(called, (), (T,), {})
        return result.tolist(), list(seen)

    with torchop.native.disabled():
        expected = calls_seen()
    assert Tensor.mul in expected[1] or torch.mul in expected[1], expected
    assert calls_seen() == expected


def overload(namespace, name, count, amount):
    arguments = ("x", "y")[:count]
    schema = f"({', '.join(f'Tensor {argument}' for argument in arguments)}) -> Tensor"
    body = (lambda x: x + amount) if count == 1 else (lambda x, y: x + amount)
    return torchop.custom_op(f"{namespace}::op{name}", body, mutates_args=(), schema=schema)


def test_a_packet_calls_redefined_overloads(namespace):
    for name, count in (("", 1), (".two", 2)):
        overload(namespace, name, count, count)
    packet, x = getattr(torch.ops, namespace).op, torch.zeros(2)
    assert [packet(x)[0], packet(x, x)[0]] == [1, 2]
    hashed = hash(packet)
    for name, count in ((".two", 2), ("", 1)):
        overload(namespace, name, count, 5 * count)
        assert hash(packet) == hashed

        def function(x: Tensor) -> Tensor:
            return packet(x)

        scripted = torch.jit.script(function)  # TorchScript's compiler reads `packet._op`
        assert str(scripted.graph).count(f"{namespace}::op(") == 1
    for _ in range(2):
        assert [packet(x)[0], packet(x, x)[0]] == [5, 10]
        with torchop.native.disabled():
            assert [packet(x)[0], packet(x, x)[0]] == [5, 10]


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated")
@pytest.mark.parametrize("defined_by", ["custom_op", "Library"])
@pytest.mark.parametrize("way", ["packet", "default"])
def test_a_first_call_may_be_in_a_trace(namespace, defined_by, way):
    """`torch.jit.trace` runs the function twice and compares the traces.

    The operator becomes native after the first of these runs, which must not change the trace.
    """
    library = torchop.Library(namespace, "FRAGMENT")
    if defined_by == "custom_op":
        overload(namespace, "", 1, 1)
    else:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", lambda x: x + 1, "CompositeExplicitAutograd")
    packet = getattr(torch.ops, namespace).op
    called = packet if way == "packet" else packet.default
    assert torch.jit.trace(lambda x: called(x), T)(T).tolist() == [2, 2]
    library.close()


@pytest.mark.parametrize("arguments", [(3, len), (None, len, len)])
def test_native_operator_checks_its_arguments(arguments):
    with pytest.raises(TypeError, match="entry expects an Entry or None"):
        switch.native_module().Operator(object(), *arguments)
