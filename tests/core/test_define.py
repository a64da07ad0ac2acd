"""If a definition raises an exception at any point, it leaves nothing defined.

Uses private names.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import is_defined
from tests.core.operators import (
    all_names,
    family,
    inlined,
    names,
    of_a_class,
    plain,
    with_helpers,
)
from torchop._compat import libraries, registries, torch_ops
from torchop._core import define, registry
from torchop._native import switch
from torchop._rules import inlining
from torchop._rules.fake.rule import FakeRule
from torchop._rules.functionalization import rule as functionalization
from torchop._rules.helper_operators import HelperOperator
from torchop._rules.kernels.rule import KernelRule

T = torch.zeros(2)


class InjectedError(Exception):
    """The exception that tests raise before or after a step of a definition."""


# For each step of a definition, in order: the module or class that contains its function, and the
# name of the function. The steps that deregister the previous operator are left out, because they
# cannot be undone.
STEPS: dict[str, tuple[Any, str]] = {
    "warn": (registry, "warn"),
    "check the name": (registry, "find_replaceable"),
    "announce": (registry, "_announce"),
    "make a library": (define, "OwnLibrary"),
    "make the definition": (define, "Definition"),
    "follow the library": (libraries, "on_close"),
    "install the kernel": (KernelRule, "install"),
    "offer a rule for traces": (functionalization, "_install"),
    "implement a key": (libraries, "implement"),
    "define": (libraries, "define"),
    "refresh the packet": (torch_ops, "after_definition"),
    "install the fake kernel": (FakeRule, "replace"),
    "define the companions": (HelperOperator, "define"),
    "make the handle": (define, "make_handle"),
    "make calls native": (switch, "make_native"),
    "publish": (registries, "publish"),
    "inline": (inlining, "around"),
    "declare an effect": (registries, "register_effect"),
}


KINDS = {f.__name__: f for f in (plain, inlined, with_helpers, of_a_class, family)}


class Injection(NamedTuple):
    step: str
    after: bool
    call: int

    def into(self, action: Callable[[], Any]) -> bool:
        """Run an action, and raise an exception in one of its steps.

        Return whether the action reached the step, so that the exception was raised.
        """
        owner, attribute = STEPS[self.step]
        before, calls = getattr(owner, attribute), 0

        def raising(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == self.call and not self.after:
                raise InjectedError
            result = before(*args, **kwargs)
            if calls == self.call and self.after:
                raise InjectedError
            return result

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, attribute, raising)
            with contextlib.suppress(InjectedError):
                action()
                return False
        return calls >= self.call  # otherwise something else raised the error


def works(op: Any, namespace: str) -> None:
    assert op(T).tolist() == [1, 1]
    result = getattr(torch.ops, namespace).op.default(T)
    assert (result[0] if isinstance(result, list) else result).tolist() == [1, 1]
    assert registries.published_handle(f"{namespace}::op") is not None


def is_free(namespace: str, *older: Any) -> None:
    assert names(namespace) == set()
    for name in (f"{namespace}::op", f"{namespace}::op_", f"{namespace}::op.out"):
        assert registries.published_handle(name) is registries.published_library(name) is None
        assert registries.fake_source(name) is None
        assert registries.effect_of(name) is None
        assert not registries._rules_registry.find(name).torch_dispatch_rules._data
    with pytest.raises(AttributeError):
        _ = getattr(torch.ops, namespace).op
    for op in older:
        with pytest.raises(torchop.OperatorGoneError):
            op(T)


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_a_definition_that_raises_leaves_a_free_name(namespace, step, after, kind):
    make, call = KINDS[kind], 1
    while Injection(step, after, call).into(lambda: make(namespace)):
        is_free(namespace)
        call += 1
    works(make(namespace), namespace)
    assert all_names(namespace) == names(namespace)


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_a_redefinition_that_raises_leaves_the_older_one_or_a_free_name(
    namespace, step, after, kind
):
    make, call = KINDS[kind], 1
    older = make(namespace)
    before = names(namespace)
    while Injection(step, after, call).into(lambda: make(namespace)):
        if f"{namespace}::op" in names(namespace):
            assert names(namespace) == before
            works(older, namespace)
        else:
            is_free(namespace, older)
            older = make(namespace)
        call += 1
    works(make(namespace), namespace)
    assert all_names(namespace) == names(namespace) == before


def test_redefinition_reaches_every_step(namespace):
    # The tests above inject an exception into each step. This only tests something if a
    # redefinition calls the function of each step.
    def again() -> None:
        for make in (plain, inlined, plain, with_helpers):
            make(namespace)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again()
        assert [s for s in STEPS if not Injection(s, True, 1).into(again)] == []


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(KINDS, 2)))
def test_a_warning_that_is_an_error_leaves_the_older_one(namespace, first, second):
    older = KINDS[first](namespace)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(torchop.RedefinitionWarning):
            KINDS[second](namespace)
    works(older, namespace)


def test_a_warning_of_the_definition_that_is_an_error_leaves_a_free_name(namespace):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(torchop.SchemaWarning):
            torchop.custom_op(f"{namespace}::op", print, mutates_args=(), schema="(Tensor x) -> ()")
    is_free(namespace)
    assert not is_defined(f"{namespace}::op")


def stock(x: Tensor) -> Tensor:
    return x + 1


def test_stock_operator_is_replaced_completely_or_not_at_all(namespace):
    for step in ("check the name", "announce", "make a library"):
        for after in (False, True):
            torch.library.custom_op(f"{namespace}::op", stock, mutates_args=())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", torchop.RedefinitionWarning)
                assert Injection(step, after, 1).into(lambda: plain(namespace))
            if names(namespace):
                works(getattr(torch.ops, namespace).op, namespace)
            else:
                is_free(namespace)


def test_a_definition_leaves_no_reference_cycles(namespace):
    def make(name: str) -> Any:
        op = torchop.custom_op(f"{namespace}::{name}", stock, mutates_args=())
        op.register_fake(torch.empty_like)
        op.register_autograd(lambda ctx, grad: grad)
        return op

    first = make("first")  # fills caches
    gc.collect()
    gc.disable()
    try:
        second = make("second")
        assert gc.collect() == 0
    finally:
        gc.enable()
    assert first(T).tolist() == second(T).tolist() == [1, 1]
