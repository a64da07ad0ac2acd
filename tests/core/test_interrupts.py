"""Ctrl-C anywhere in a definition or a registration leaves an operator that works, or a free name.

Python looks for signals where a function begins and where one has returned. A profiler is told of
both, and can raise there what a signal handler would.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

import torchop
from tests import combinations
from tests.core.operators import inlined, names, of_a_class, on_one_device, plain
from tests.devices import BACKEND, TYPE
from tests.support import needs_native
from torchop._compat import deregistration, registries
from torchop._core import define
from torchop._core.lock import registration_lock
from torchop._native import switch

T = torch.zeros(2)
_PLACES = (str(Path(torchop.__file__).parent), "torch/library.py", "torch/_library", "torch/_ops")
_PLACES += ("contextlib.py",)


def is_watched(code: CodeType) -> bool:
    # What is raised in a generator that is being closed is lost, as Ctrl-C would be there.
    is_generator = code.co_flags & inspect.CO_GENERATOR
    return not is_generator and any(place in code.co_filename for place in _PLACES)


def interrupted(action: Callable[[], Any], number: int) -> BaseException | None:
    """Runs an action, and raises at one of the places where a signal may; returns the exception."""
    count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        # Not before functions of C: nothing looks for signals there.
        if event != "c_call" and argument is not sys.setprofile and is_watched(frame.f_code):
            count += 1
            if count == number:
                raise KeyboardInterrupt

    gc.disable()  # what is raised in a callback of the collector is lost, as in a generator
    sys.setprofile(profile)
    try:
        action()
    except KeyboardInterrupt as error:
        return error  # with its traceback, which keeps alive what was interrupted
    finally:
        sys.setprofile(None)
        gc.enable()
    return None


def interrupts(make: Callable[[], Callable[[], Any]], step: int) -> Iterator[BaseException]:
    """Interrupts an action, made anew each time, at every `step`th place until there is none."""
    for number in itertools.count(1, step):
        error = interrupted(make(), number)
        if error is None:
            assert number > 3 * step  # or nothing was interrupted
            return
        assert not registration_lock._is_owned()
        assert define._blocks == ()
        assert deregistration._replaced == set()
        yield error


@pytest.fixture
def places(request: pytest.FixtureRequest) -> int:
    """One of how many places is tried: all of them take as long as the tests of other files."""
    return 1 if request.config.getoption(combinations.OPTION) else 3


def works(op: Any, namespace: str) -> None:
    for call in (op, getattr(torch.ops, namespace).op):
        result = call(T)
        assert (result[0] if isinstance(result, list) else result).tolist() == [1, 1]


def is_gone(*ops: Any) -> None:
    for op in ops:
        with pytest.raises(torchop.OperatorGoneError):
            op(T)


def stock(namespace: str) -> Any:
    def op(x: Tensor) -> Tensor:
        return x + 1

    op = torch.library.custom_op(f"{namespace}::op", op, mutates_args=())
    op.register_fake(torch.empty_like)
    return op


@pytest.mark.parametrize(
    ("kind", "step"), [(plain, 29), (on_one_device, 7), (inlined, 31), (of_a_class, 331)]
)
def test_an_interrupted_definition_leaves_a_free_name_or_the_operator(namespace, kind, step):
    numbers = itertools.count()

    def fresh() -> Callable[[], Any]:
        nonlocal name
        name = f"{namespace}_{next(numbers)}"
        return lambda: kind(name)

    name = ""
    for _ in interrupts(fresh, step):
        if names(name):  # the interrupt came when all was done
            works(registries.published_handle(f"{name}::op"), name)
        works(kind(name), name)


@pytest.mark.filterwarnings("ignore::torchop.RedefinitionWarning")
@pytest.mark.parametrize(("kind", "step"), [(plain, 97), (stock, 211), (of_a_class, 997)])
def test_an_interrupted_redefinition_leaves_one_of_the_operators_or_a_free_name(
    namespace, places, kind, step
):
    step *= places
    again = plain if kind is stock else kind
    older: Any = None

    def anew() -> Callable[[], Any]:
        nonlocal older
        older = kind(namespace) if older is None else older
        return lambda: again(namespace)

    for _ in interrupts(anew, step):
        if names(namespace):
            works(registries.published_handle(f"{namespace}::op"), namespace)
        else:
            is_gone(older)
        older = again(namespace)
        works(older, namespace)
        if kind is stock:
            older._definition.end("for the next round")
            older = None


def test_an_interrupted_library_knows_what_it_defined(namespace):
    library: Any = None

    def fresh() -> Callable[[], Any]:
        nonlocal library
        library = torchop.Library(namespace, "DEF")
        return lambda: library.define("op(Tensor x) -> Tensor")

    for _ in interrupts(fresh, 2):
        if not names(namespace):
            library.define("op(Tensor x) -> Tensor")
        library.impl("op", lambda x: x + 1, BACKEND)
        overload = getattr(torch.ops, namespace).op.default
        works(overload, namespace)
        library.close()
        is_gone(overload)
        assert names(namespace) == set()


def test_an_interrupted_closing_can_be_repeated(namespace, places):
    held: Any = ()

    def fresh() -> Callable[[], Any]:
        nonlocal held
        library = torchop.Library(namespace, "FRAGMENT")
        library.define("low(Tensor x) -> Tensor")
        library.impl("low", lambda x: x + 1, BACKEND)
        torch.library.register_fake(f"{namespace}::low", torch.empty_like, lib=library)
        low = getattr(torch.ops, namespace).low.default
        op = plain(namespace, lib=library)
        held = library, {"op": op, "low": low}
        return library.close

    for _ in interrupts(fresh, 29 * places):
        library, ops = held
        for name, op in ops.items():
            if f"{namespace}::{name}" in names(namespace):
                assert op(T).tolist() == [1, 1]
            else:
                is_gone(op)
        library.close()
        assert names(namespace) == set()
        is_gone(*ops.values())


@dataclasses.dataclass
class Registration:
    register: Callable[[Any], Any]
    call: Callable[[Any], Any]


X = torch.ones(2, requires_grad=True)
REGISTRATIONS = {
    "kernel": Registration(
        lambda op: torchop.register_kernel(op, TYPE, lambda x: x + 1), lambda op: op(T)
    ),
    "fake": Registration(
        lambda op: torchop.register_fake(op, torch.empty_like),
        lambda op: op(torch.ones(2, device="meta")),
    ),
    "autograd": Registration(
        lambda op: torchop.register_autograd(op, lambda ctx, grad: grad),
        lambda op: torch.autograd.grad(op(X).sum(), X),
    ),
    "vmap": Registration(
        lambda op: torchop.register_vmap(op, lambda info, dims, x: (x + 1, dims[0])),
        lambda op: torch.vmap(op)(torch.zeros(2, 2)),
    ),
    "inverse": Registration(
        lambda op: torchop.get_rule("inverse").register(op, lambda out: out - 1),
        lambda op: torchop.inverse(op)(T),
    ),
}


@pytest.mark.parametrize("rule", REGISTRATIONS)
def test_an_interrupted_registration_is_there_or_not(namespace, rule):
    register, call = dataclasses.astuple(REGISTRATIONS[rule])
    numbers = itertools.count()
    op: Any = None

    def outcome() -> type | None:
        try:
            call(op)
        except Exception as error:
            return type(error)
        return None

    def fresh() -> Callable[[], Any]:
        nonlocal op
        op = plain(f"{namespace}_{next(numbers)}")
        return lambda: register(op)

    fresh()
    without = outcome()
    for _ in interrupts(fresh, 7):
        assert op(T).tolist() == [1, 1]
        assert outcome() in (None, without)
        register(op)
        assert outcome() is None
        assert op(T).tolist() == [1, 1]


@needs_native
def test_an_interrupted_first_call_can_be_repeated(namespace):
    library = torchop.Library(namespace, "FRAGMENT")
    numbers = itertools.count()
    packet: Any = None

    def fresh() -> Callable[[], Any]:
        nonlocal packet
        name = f"op{next(numbers)}"
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, torch.neg, "CompositeExplicitAutograd")
        packet = getattr(getattr(torch.ops, namespace), name)
        flop_registry[packet] = len
        return lambda: switch._before_first_call(packet)

    for _ in interrupts(fresh, 1):
        assert flop_registry.pop(packet) is len
        assert packet(T + 1).tolist() == [-1, -1]
        assert isinstance(packet._op, switch.native_module().Operator)
    del flop_registry[packet]
    library.close()


def test_an_interrupt_is_raised_where_it_is_asked_for():
    with warnings.catch_warnings():
        assert interrupted(lambda: None, 1) is None
        assert isinstance(interrupted(lambda: torchop.native.status(), 1), KeyboardInterrupt)
        assert interrupted(lambda: torchop.native.status(), 1000) is None
