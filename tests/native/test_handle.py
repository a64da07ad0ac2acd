"""Handles make native calls in every way of calling, and still behave as Python objects.

A handle is the object that `custom_op` returns.

Uses private names.
"""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import sys
import threading
import weakref

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import adding, counting, needs_native
from tests._support.free_threads import HAS_GIL
from torchop._native import switch

pytestmark = needs_native

T = torch.zeros(2)


@pytest.fixture
def op(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, amount: float = 1.0) -> Tensor:
        """Add an amount."""
        return x + amount

    op.register_fake(lambda x, amount=1.0: torch.empty_like(x))
    return op


# --------------------------------------------------------------------------------------------------
# Ways of calling

WAYS = {
    "call": lambda op: op(T),
    "keywords": lambda op: op(x=T, amount=1.0),
    "unpacked": lambda op: op(*[T], amount=1.0),
    "partial": lambda op: functools.partial(op, T)(),
    "partial with a keyword": lambda op: functools.partial(op, amount=1.0)(T),
    "map": lambda op: next(map(op, [T])),
    "dunder call": lambda op: op.__call__(T),
    "unbound dunder call": lambda op: type(op).__call__(op, T),
    "reduce": lambda op: functools.reduce(op, [T, 1.0]),
    "overload": lambda op: op.overload(T),
    "packet": lambda op: op.overload.overloadpacket(T),
    "torch.ops": lambda op: getattr(torch.ops, op.name.split("::")[0]).op(T),
    "torch.ops default": lambda op: getattr(torch.ops, op.name.split("::")[0]).op.default(T),
    "torch.ops keywords": lambda op: op.overload(x=T, amount=1.0),
}


@pytest.mark.parametrize("way", WAYS)
def test_call_is_native_in_every_way(op, way):
    op(T)  # after the first call, calls through torch.ops are native as well
    with counting(op) as calls:
        assert WAYS[way](op).tolist() == [1, 1]
    assert calls == {"native": 1}


def test_first_call_is_native(op):
    with counting(op) as calls:
        op(T)
    assert calls == {"native": 1}


def test_call_stays_native_when_attributes_are_assigned(op):
    op.__doc__, op.__name__, op.note = "another", "other", 3
    # Python looks up `__call__` on the type, so this attribute must have no effect.
    op.__call__ = lambda x: x - 100
    with counting(op) as calls:
        assert op(T).tolist() == [1, 1]
    assert calls == {"native": 1}
    assert (op.__doc__, op.__name__, op.note) == ("another", "other", 3)


def test_attributes_survive_the_switch_to_native_calls(op):
    handle = torchop.CustomOp(op._definition)
    handle.note = "before"
    assert type(handle) is not type(op)
    switch.native_module().adopt(handle, op._definition.entry)
    assert type(handle) is type(op)
    assert handle.note == "before"
    handle.note = "after"
    del handle.__doc__
    assert vars(handle)["note"] == "after"
    assert "__doc__" not in vars(handle)
    assert handle(T).tolist() == [1, 1]


def test_adopting_a_handle_again_has_no_effect(op):
    before = sys.getrefcount(type(op))
    switch.native_module().adopt(op, op._definition.entry)
    after = sys.getrefcount(type(op))
    assert after == before
    assert op(T).tolist() == [1, 1]


@pytest.mark.parametrize("thing", [3, torch.add, T, object()])
def test_only_handles_can_be_adopted(op, thing):
    with pytest.raises(TypeError, match="adopt expects a handle, got"):
        switch.native_module().adopt(thing, op._definition.entry)


# --------------------------------------------------------------------------------------------------
# Dynamo


class Recorder:
    def __init__(self):
        self.targets = []

    def __call__(self, module, inputs):
        self.targets += [node.target for node in module.graph.nodes if node.op == "call_function"]
        return module.forward


COMPILED = {
    "handle": lambda op: op,
    "closure": lambda op: lambda x: op(x),
    "partial": lambda op: functools.partial(op, amount=1.0),
    "dunder call": lambda op: lambda x: op.__call__(x),
}


@pytest.mark.parametrize("way", COMPILED)
def test_compiled_graph_holds_the_overload_and_eager_calls_stay_native(op, way):
    recorder = Recorder()
    compiled = torch.compile(COMPILED[way](op), backend=recorder, fullgraph=True)
    assert compiled(T).tolist() == [1, 1]
    assert recorder.targets == [op.overload]
    with counting(op) as calls:
        op(T)
        op.overload(T)
    assert calls == {"native": 2}


def test_compiled_graph_calls_the_operator_natively(op):
    compiled = torch.compile(op, backend="eager", fullgraph=True)
    compiled(T)
    with counting(op) as calls:
        assert compiled(T).tolist() == [1, 1]
    assert calls == {"native": 1}


# --------------------------------------------------------------------------------------------------
# Attributes and types of handles


def test_type_is_final_and_makes_no_handles(op):
    with pytest.raises(TypeError, match="not an acceptable base type"):
        type("Mine", (type(op),), {})
    handle = torchop.CustomOp(op._definition)
    handle.__class__ = type(op)
    with pytest.raises(TypeError, match="does not support vectorcall"):
        handle(T)


def test_handle_that_changes_back_is_called_as_before(op):
    native = type(op)
    op.__class__ = torchop.CustomOp
    assert op(T).tolist() == [1, 1]
    gc.collect()
    switch.native_module().adopt(op, op._definition.entry)
    assert type(op) is native
    assert op(T).tolist() == [1, 1]


# --------------------------------------------------------------------------------------------------
# Memory. PyTorch never frees an operator's kernels, which refer to its handle. So use a second
# handle of the same operator, which can be freed.


def second_handle(op):
    handle = torchop.CustomOp(op._definition)
    switch.native_module().adopt(handle, op._definition.entry)
    return handle


def test_handle_is_freed_with_its_last_reference(op):
    handle = second_handle(op)
    handle(T)
    reference = weakref.ref(handle)
    assert reference() is handle
    del handle
    assert reference() is None


@pytest.mark.skipif(
    HAS_GIL,
    reason="with a GIL, threads do not wait for each other to count references",
)
def test_objects_often_called_in_threads_become_immortal(namespace):
    kernel = lambda x: x + 1  # noqa: E731  # a nested function, because Python makes functions of modules immortal
    schema = "(Tensor x) -> Tensor"
    op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args=(), schema=schema)
    own = torchop.custom_op(f"{namespace}::own", lambda x: x + 1, mutates_args=(), schema=schema)
    op(T)  # create all objects in this thread, so that the calls below come from a different thread
    overload, immortal = op.overload, sys.getrefcount(None)

    def call(*callees):
        # Only one in 65,521 calls checks whether other threads also call the operator (see
        # `thread.h`), so make more calls than that.
        for _ in range(70_000 if len(callees) == 1 else 140_000):
            for callee in callees:
                callee(T)

    for callees in ((op,), (op, overload)):
        assert sys.getrefcount(callees[-1]) != immortal
        thread = threading.Thread(target=call, args=callees)
        thread.start()
        thread.join()
    for counted_no_more in (op, kernel, overload, overload._op):
        assert sys.getrefcount(counted_no_more) == immortal
    call(own)
    assert sys.getrefcount(own) != immortal
    gc.collect()
    assert op(T).tolist() == overload(T).tolist() == [1, 1]


def test_cycle_through_a_handle_is_collected(op):
    handle = second_handle(op)
    handle.myself = [handle]
    reference = weakref.ref(handle)
    del handle
    assert reference() is not None
    gc.collect()
    assert reference() is None


def test_weak_reference_calls_back(op):
    seen = []
    handle = second_handle(op)
    handle.myself = handle
    reference = weakref.ref(handle, seen.append)
    weakref.finalize(handle, seen.append, "finalized")
    del handle
    gc.collect()
    assert sorted(map(str, seen)) == sorted([str(reference), "finalized"])


class CallsAtTheEnd:
    """Calls the handle that it is attached to, while both are being garbage-collected."""

    def __init__(self, handle, results):
        self.handle, self.results = handle, results

    def __del__(self):
        self.results.append(self.handle(T).tolist())


def test_handle_is_callable_until_it_is_collected(op):
    results = []
    handle = second_handle(op)
    handle.part = CallsAtTheEnd(handle, results)
    del handle
    gc.collect()
    assert results == [[1, 1]]


def test_garbage_collector_traverses_a_handle(op):
    held = gc.get_referents(op)
    assert any(item is op._definition.entry for item in held)
    assert any(item is vars(op) or item is op._definition for item in held)
    assert any(item is type(op) for item in held)
    assert not any(item is torchop.CustomOp for item in held)
    assert gc.is_tracked(op)
    assert any(item is op for item in gc.get_objects())
    for item in held:
        assert sys.getrefcount(item) > 0
        repr(item)


def test_every_handle_holds_one_reference_to_its_type(op):
    native, python = type(op), torchop.CustomOp
    before = sys.getrefcount(native), sys.getrefcount(python)
    handles = [second_handle(op) for _ in range(1000)]
    for handle in handles[::2]:
        handle.myself = handle
    with_handles = sys.getrefcount(native)
    del handle, handles
    gc.collect()
    after = sys.getrefcount(native), sys.getrefcount(python)
    assert with_handles == before[0] + 1000
    assert after == before
    assert op(T).tolist() == [1, 1]


def test_collections_during_calls_do_no_harm(op):
    handles = [second_handle(op) for _ in range(50)]
    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for handle in handles:
            handle.myself = handle
            assert handle(T).tolist() == [1, 1]
    finally:
        gc.set_threshold(*threshold)


def test_handle_may_be_created_dropped_and_created_in_closed_libraries(namespace):
    for number in range(20):
        with torchop.Library(f"{namespace}_{number}", "FRAGMENT") as library:
            op = adding(f"{namespace}_{number}", lib=library)
            assert op(T).tolist() == [1, 1]
        with pytest.raises(torchop.OperatorGoneError):
            op(T)
        del op
        gc.collect()


# --------------------------------------------------------------------------------------------------
# torch.ops


def test_identity_of_the_overload_does_not_change(namespace):
    op = torchop.custom_op(
        f"{namespace}::op", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    overload, packet = op.overload, op.overload.overloadpacket
    hashes, names = (hash(overload), hash(packet)), (overload.__name__, packet.__name__)
    table = {overload: "overload", packet: "packet"}
    op(T)
    assert op.overload is overload
    assert overload.overloadpacket is packet
    assert (hash(overload), hash(packet)) == hashes
    assert (overload.__name__, packet.__name__) == names
    assert table[op.overload] == "overload"
    assert table[packet] == "packet"
    assert overload.__module__ == f"torch._ops.{namespace}"
    assert copy.deepcopy(overload) is overload


def test_native_function_of_an_overload_has_the_original_attributes(op, namespace):
    op(T)
    native, function = op.overload._op, op.overload._op.dispatch
    assert type(native).__name__ == "Operator"
    assert native.__name__ == function.__name__
    assert hash(native) == hash(function)
    with pytest.raises(AttributeError):
        _ = native.absent


def test_torchscript_compiled_before_the_first_call_still_runs(op):
    packet = op.overload.overloadpacket

    def function(x: Tensor) -> Tensor:
        return packet(x, 2.0)

    scripted = torch.jit.script(function)
    op(T)
    assert scripted(T).tolist() == [2, 2]


def test_attributes_of_a_native_handle_can_be_listed(op):
    """Debuggers list all attributes. Listing them must not read the slot with a raw pointer."""
    op(T)
    names = dict(inspect.getmembers(op))
    assert names["__name__"] == op.__name__
    assert not {"_native_call", "_native_entry"} & set(dir(op))
    if sys.version_info >= (3, 11):
        op.__getstate__()
    with pytest.raises(AttributeError):
        del op._native_entry
    assert op(T).tolist() == op(T).tolist()
