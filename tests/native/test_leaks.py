"""Calls leak no memory, references or objects.

By default, the tests make 10,000 calls of each kind. `nox -s leaks` makes a million.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import counting, needs_native
from tests._support.devices import DEVICE
from tests._support.opaque_types import REFERENCE, Overriding, Reference

pytestmark = [
    needs_native,
    pytest.mark.skipif(
        not Path("/proc/self/statm").exists(), reason="the memory of a process is read from /proc"
    ),
]

CALLS = int(os.environ.get("TORCHOP_LEAK_CALLS", "10000"))
SLOW_CALLS = CALLS // 10  # calls with a backward or an exception

# Growth in bytes that is not reported as a leak, because allocators also need some memory.
ALLOWANCE = 400_000


class _Statistics(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def memory_in_use() -> int:
    """Return the number of bytes that C and C++ code has allocated.

    If the C library does not report this number, return the memory of the process.
    """
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    mallinfo.restype = _Statistics
    found = mallinfo()
    return found.uordblks + found.hblkhd  # small blocks, and large blocks, which `mmap` allocates


def assert_flat(scenario: Callable[[], Any], calls: int) -> None:
    """Check that a scenario leaks nothing."""
    for _ in range(calls // 4 + 1):  # fill caches and let allocators grow
        scenario()
    # If fewer blocks remain than one per hundred calls, the calls themselves do not leak. Besides,
    # the autograd thread of a device may hold about 90 blocks of a backward at any time.
    most_blocks = max(calls // 100, min(calls // 2, 100))
    most_bytes = ALLOWANCE + calls // 2
    rounds: list[tuple[int, int]] = []
    # A leak grows in each of three rounds. Allocators and other threads grow only in some of them.
    for _ in range(3):
        rounds.append(_growth(scenario, calls))
        blocks, growth = (min(numbers) for numbers in zip(*rounds, strict=True))
        if blocks < most_blocks and growth < most_bytes:
            return
    raise AssertionError(f"{blocks} blocks in {calls} calls, and {growth} bytes")


def _growth(scenario: Callable[[], Any], calls: int) -> tuple[int, int]:
    gc.collect()
    memory, blocks = memory_in_use(), sys.getallocatedblocks()
    for _ in range(calls):
        scenario()
    gc.collect()
    return sys.getallocatedblocks() - blocks, memory_in_use() - memory


@contextlib.contextmanager
def same_references(*objects: Any):
    gc.collect()
    before = [sys.getrefcount(item) for item in objects]
    yield
    gc.collect()
    after = [sys.getrefcount(item) for item in objects]
    differences = [there - here for here, there in zip(before, after, strict=True)]
    # Allow small differences, because the interpreter itself creates references to None and True.
    assert all(abs(difference) < 20 for difference in differences), differences


def test_leak_is_detected():
    """Tests the checks of this file, which must detect leaked objects and leaked references."""
    kept = []
    with pytest.raises(AssertionError, match="blocks in"):
        assert_flat(lambda: kept.append(object()), 20_000)
    with pytest.raises(AssertionError), same_references(T):
        kept += [T] * 1000


T = torch.zeros(2, device=DEVICE)


class Operators:
    def __init__(self, namespace: str) -> None:
        def define(name, kernel, schema, **options):
            return torchop.custom_op(
                f"{namespace}::{name}", kernel, **{"mutates_args": (), **options}, schema=schema
            )

        self.plain = define("plain", lambda x: x + 1, "(Tensor x) -> Tensor")
        self.plain.register_autograd(lambda ctx, grad: grad)
        self.saving = define("saving", lambda x: x.sin(), "(Tensor x) -> Tensor")
        self.saving.register_autograd(
            lambda ctx, grad: grad * ctx.saved_tensors[0].cos() + 0 * ctx.saved_tensors[1],
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output),
        )
        self.lists = define(
            "lists",
            lambda xs, ns, s="text": xs[0] + ns[0],
            "(Tensor[] xs, int[] ns, str s='text') -> Tensor",
        )
        self.lists.register_autograd(lambda ctx, grad: ([grad] * 3, None, None))
        self.typed = define(
            "typed",
            lambda x, f, b, *, dtype=None, device=None, n=1: x + f + n,
            "(Tensor x, float f, bool b, *, ScalarType? dtype=None, Device? device=None, "
            "int n=1) -> Tensor",
        )
        self.mutating = define(
            "mutating",
            lambda x, ys: x.add_(1) and None,
            "(Tensor(a!) x, Tensor(b!)[] ys) -> ()",
            mutates_args={"x", "ys"},
        )
        self.mutating.register_kernel(DEVICE.type, lambda x, ys: None)
        self.many = define(
            "many", lambda x: (x + 1, x.long(), x * 2), "(Tensor x) -> (Tensor, Tensor, Tensor)"
        )
        self.many.register_autograd(
            lambda ctx, a, b, c: a,
            setup_context=lambda ctx, inputs, output: ctx.mark_non_differentiable(output[1]),
        )
        self.converted = define("converted", lambda x: [x + 1], "(Tensor x) -> Tensor[]")
        self.alias = define("alias", lambda x: x, "(Tensor x) -> Tensor")
        self.alias.register_autograd(lambda ctx, grad: grad)
        self.rerun = define("rerun", lambda x, n: x.sin() * n, "(Tensor x, int n) -> Tensor")
        self.rerun.derive_autograd()
        self.rerun_lists = define(
            "rerun_lists",
            lambda x, ys, *, n=2: ([x.sin() * n, x * 2], x.argmax()),
            "(Tensor x, Tensor[] ys, *, int n=2) -> (Tensor[], Tensor)",
        )
        self.rerun_lists.derive_autograd()
        self.objects = define(
            "objects",
            lambda x, a, b, c, d, *, e=None: (x + 1, a),
            f"(Tensor x, {REFERENCE} a, {REFERENCE}?[] b, Any c, NoneType d, *, "
            f"{REFERENCE}? e=None) -> (Tensor, {REFERENCE})",
        )
        self.objects.register_autograd(lambda ctx, grad, _: (grad, None, None, None, None))
        self.raising = define("raising", self.raise_error, "(Tensor x) -> Tensor")
        self.raising.register_autograd(lambda ctx, grad: grad)
        self.raising_rerun = define("raising_rerun", self.raise_error, "(Tensor x) -> Tensor")
        self.raising_rerun.derive_autograd()

    @staticmethod
    def raise_error(x: Tensor) -> Tensor:
        raise ZeroDivisionError("in the kernel")


@pytest.fixture
def ops(namespace):
    return Operators(namespace)


def refused(call: Callable[[], Any], kind: type[Exception]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError


X = torch.zeros(2, device=DEVICE, requires_grad=True)
XS = [X, X, T]
DTYPE = torch.float32
OBJECT, OWNER = Reference(1), Reference(2)
OWNER.__torch_function__ = lambda func, types, args=(), kwargs=None: None  # type: ignore[attr-defined]

FORWARD = {
    "no grad": lambda ops: ops.plain(T),
    "keyword": lambda ops: ops.plain(x=T),
    "overload": lambda ops: ops.plain.overload(T),
    "grad": lambda ops: ops.plain(X),
    "grad and saved": lambda ops: ops.saving(X),
    "grad and many outputs": lambda ops: ops.many(X),
    "many outputs": lambda ops: ops.many(T),
    "lists": lambda ops: ops.lists(XS, (1, 2), s="other"),
    "lists without grad": lambda ops: ops.lists([T, T], [1, 2]),
    "keyword-only": lambda ops: ops.typed(T, 1.5, True, dtype=DTYPE, device=DEVICE, n=12345),
    "defaults": lambda ops: ops.typed(T, 1.5, False),
    "mutation": lambda ops: ops.mutating(T, [T, T]),
    "conversion": lambda ops: ops.converted(T),
    "objects": lambda ops: ops.objects(T, OBJECT, [OBJECT, None], 2.5, None, e=OBJECT),
    "objects of one call": lambda ops: ops.objects(T, Reference(3), [Reference(4)], "text", None),
    "objects and grad": lambda ops: ops.objects(X, OBJECT, (OBJECT,), 2.5, None),
}
BACKWARD = {
    "backward": lambda ops: ops.plain(X).sum().backward(),
    "backward with saved": lambda ops: ops.saving(X).sum().backward(),
    "backward through a list": lambda ops: ops.lists(XS, (1, 2)).sum().backward(),
    "backward through many": lambda ops: ops.many(X)[0].sum().backward(),
    "backward of a derived formula": lambda ops: ops.rerun(X, 3).sum().backward(),
    "derived backward of lists": lambda ops: ops.rerun_lists(X, XS, n=3)[0][0].sum().backward(),
    "backward with objects": lambda ops: ops.objects(X, OBJECT, [], None, None)[0].sum().backward(),
    "double backward": lambda ops: torch.autograd.grad(
        torch.autograd.grad(ops.saving(X).sum(), X, create_graph=True)[0].sum(), X
    ),
}
ERRORS = {
    "alias": lambda ops: refused(lambda: ops.alias(T), torchop.AliasError),
    "alias with grad": lambda ops: refused(lambda: ops.alias(X), torchop.AliasError),
    "kernel raises": lambda ops: refused(lambda: ops.raising(T), ZeroDivisionError),
    "kernel raises with grad": lambda ops: refused(lambda: ops.raising(X), ZeroDivisionError),
    "body raises": lambda ops: refused(lambda: ops.raising_rerun(X), ZeroDivisionError),
}
# Native calls convert some arguments before they fall back to the dispatcher, which rejects most of
# these calls. The converted arguments must be freed.
REFUSED = {
    "wrong type": lambda ops: refused(lambda: ops.plain("text"), RuntimeError),
    "wrong type in a list": lambda ops: refused(lambda: ops.lists([T, 3], [1]), RuntimeError),
    "object for None": lambda ops: refused(
        lambda: ops.objects(T, OBJECT, [OBJECT], 3, OBJECT), RuntimeError
    ),
    "object that overrides": lambda ops: ops.objects(T, Overriding(), [OBJECT], 3, None),
    "object that overrides itself": lambda ops: ops.objects(T, OWNER, [OBJECT, OWNER], 3, None),
    "unknown keyword": lambda ops: refused(lambda: ops.plain(T, y=T), RuntimeError),
}


def run(ops: Operators, scenario: Callable[[Operators], Any], calls: int, *, native: bool) -> None:
    every = list(vars(ops).values())
    # The first call that records a gradient is never native, but prepares later calls.
    for _ in range(2):
        scenario(ops)
    # If X already has a gradient, backward adds to it in place, so it allocates no new tensor.
    X.grad = torch.zeros(2, device=DEVICE)
    with contextlib.ExitStack() as stack:
        counts = [stack.enter_context(counting(op)) for op in every]
        references = [T, X, XS, None, True, False, DTYPE, DEVICE, OBJECT, OWNER, *every]
        references += [op.__wrapped__ for op in every] + [type(every[0])]
        references += [op._definition.entry for op in every]
        stack.enter_context(same_references(*references))
        assert_flat(lambda: scenario(ops), calls)
    total = sum((Counter(count) for count in counts), Counter())
    if native:
        assert set(total) == {"native"}, total
    else:
        assert "native" not in total


@pytest.mark.parametrize("kind", FORWARD)
def test_calls(ops, kind):
    run(ops, FORWARD[kind], CALLS, native=True)


def test_objects_of_accelerated_operators(namespace):
    op = torch.library.custom_op(
        f"{namespace}::op",
        lambda x, a, b=None, *, c=None: x + 1,
        mutates_args=(),
        schema=f"(Tensor x, {REFERENCE}[] a, {REFERENCE}? b=None, *, {REFERENCE}? c=None) "
        "-> Tensor",
    )
    op.register_autograd(lambda ctx, grad: (grad, None, None))
    with torchop.accelerate(f"{namespace}::*"):
        op(X, [])
        with counting(op) as calls, same_references(T, X, OBJECT, None):
            assert_flat(lambda: op(T, [OBJECT, None], c=OBJECT), SLOW_CALLS)
            assert_flat(lambda: op(X, (OBJECT,), OBJECT), SLOW_CALLS)
    assert set(calls) == {"native"}


@pytest.mark.parametrize("kind", BACKWARD)
def test_backward_passes(ops, kind):
    run(ops, BACKWARD[kind], SLOW_CALLS, native=True)


@pytest.mark.parametrize("kind", ERRORS)
def test_calls_that_raise(ops, kind):
    run(ops, ERRORS[kind], SLOW_CALLS, native=True)


@pytest.mark.parametrize("kind", REFUSED)
def test_calls_that_the_dispatcher_refuses(ops, kind):
    run(ops, REFUSED[kind], SLOW_CALLS, native=False)


def live(*names: str) -> Counter:
    gc.collect()
    kinds = Counter(type(item).__name__ for item in gc.get_objects())
    return Counter({name: kinds[name] for name in names})


def test_replaced_plans_are_freed(ops):
    """A registration invalidates the plan, which is the data that is prepared for native calls.

    The next call creates a new plan, and the old one must be freed.
    """
    names = "Plan", "Entry", "Operator", "CallPlan"
    # PyTorch never frees kernels, so `refresh` must not register any. A new autograd formula uses
    # the kernel that the operator already has.
    ops.plain(X)

    def refresh():
        ops.plain.register_autograd(lambda ctx, grad: grad)
        ops.plain(T)
        ops.plain(X)

    refresh()
    before = live(*names)
    for _ in range(SLOW_CALLS):
        refresh()
    after = live(*names)
    assert before["Plan"] > 0
    assert before["Entry"] > 0
    assert after == before
    assert_flat(refresh, SLOW_CALLS)


def test_choices_for_ever_new_sizes_leak_nothing(namespace):
    """torchop caches the results of `supports` by argument, so every new size adds an entry.

    When the cache is full, it is cleared, so its size is limited.
    """
    op = torchop.custom_op(
        f"{namespace}::op",
        lambda x, n: x[:1].clone(),
        mutates_args=(),
        schema="(Tensor x, int n) -> Tensor",
    )
    op.register_kernel(
        None, lambda x, n: x[:1].clone(), provider="fast", supports=lambda x, n: n % 2 == 0
    )
    op.set_priority(["fast", "reference"])
    numbers = itertools.count()
    # Each new entry takes at least 20 us, so make only as many calls as fill the cache once or
    # twice.
    assert_flat(lambda: op(T, next(numbers)), max(4097, CALLS // 4))


def test_switching_kernels_leaks_no_plans(ops):
    def refresh():
        with ops.plain.set_kernel_enabled(DEVICE.type, enabled=False):
            ops.plain(T)
        ops.plain(T)

    ops.plain.register_kernel(DEVICE.type, lambda x: x + 1)
    refresh()
    before = live("Plan", "Entry", "Operator")
    for _ in range(SLOW_CALLS):
        refresh()
    assert live("Plan", "Entry", "Operator") == before


def test_explaining_leaks_nothing(ops):
    with same_references(T, X, XS):
        assert_flat(lambda: torchop.explain(ops.lists, XS, [1, 2]), min(SLOW_CALLS, 5000))


def test_counters_leak_nothing(ops):
    ops.plain(T)
    assert_flat(lambda: torchop.native.counters(ops.plain), SLOW_CALLS)


def closed_custom_op(namespace: str) -> None:
    with torchop.Library(namespace, "FRAGMENT") as library:
        op = torchop.custom_op(
            f"{namespace}::op",
            lambda x: x + 1,
            mutates_args=(),
            schema="(Tensor x) -> Tensor",
            lib=library,
        )
        op.register_kernel("cpu", lambda x: x + 2)
        op.register_fake(torch.empty_like)
        op.register_autograd(lambda ctx, grad: grad)
        op.register_vmap(lambda info, in_dims, x: (op(x), in_dims[0]))
        op(T)
        op(X).sum().backward()


def closed_low_level(namespace: str) -> None:
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", lambda x: x + 1, "CPU")
        packet = getattr(torch.ops, namespace).op
        packet(T)
        packet(T)


def redefined(namespace: str) -> None:
    op = torchop.custom_op(
        f"{namespace}::op", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    op(T)


@pytest.mark.needs_torch("2.13", "to look up an overload leaves two objects behind")
@pytest.mark.parametrize("define", [closed_custom_op, closed_low_level, redefined])
def test_deregistered_operators_leak_only_tables(namespace, define):
    """The dispatcher's tables of a deregistered operator are leaked, because calls may read them.

    Functions that raise an error, and their texts, are leaked too, but no other Python objects.
    """
    X.grad = torch.zeros(2)
    calls = SLOW_CALLS // 8
    for _ in range(calls // 4):
        define(namespace)
    with same_references(T, X):
        blocks, growth = _growth(lambda: define(namespace), calls)
    assert blocks < 12 * calls
    assert growth < 10_000 * calls


@pytest.mark.needs_gil("classes are freed, of which an operator that records a gradient has two")
def test_deregistered_operators_with_new_names_leak_no_objects(namespace):
    """Python objects of a deregistered operator are freed; PyTorch's C++ tables keep its name."""
    X.grad = torch.zeros(2)
    kinds = "Definition", "CustomOp", "OpOverload", "Entry", "Plan", "function", "cell"
    counts = []
    for start in (0, SLOW_CALLS // 10):
        for number in range(start, start + SLOW_CALLS // 10):
            closed_custom_op(f"{namespace}_{number}")
        counts.append(live(*kinds))
    grown = counts[1] - counts[0]
    assert all(count < SLOW_CALLS // 100 for count in grown.values()), grown


def test_cycles_through_ctx_are_collected(ops):
    """Here `ctx`, which is the autograd node, refers to the output, which refers to the node.

    The garbage collector must free such a reference cycle.
    """

    class Token:
        pass

    def setup_context(ctx, inputs, output):
        ctx.output, ctx.myself, ctx.token = output, ctx, Token()

    ops.plain.register_autograd(lambda ctx, grad: grad, setup_context=setup_context)
    ops.plain(X)
    with counting(ops.plain) as calls:
        for _ in range(SLOW_CALLS):
            ops.plain(X)
    assert calls == {"native": SLOW_CALLS}
    assert live("Token") == Counter({"Token": 0})
