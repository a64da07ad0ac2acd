"""The Python functions that an operator consists of, as their authors wrote them."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

from torchop._compat import registries, stock_kernels
from torchop._inspect.registrant import functions_of
from torchop._rules.providers import providers_of
from torchop._schema.signatures import closure_of, names_in, package_of
from torchop.extend import Operator

# Their functions stand between those of authors, such as what a decorator returns.
_OF_OTHERS = {"torch", "torchop", *sys.stdlib_module_names}
_FUNCTIONS = (functools.partial, types.MethodType, types.FunctionType)


def authored_functions(operator: Operator) -> dict[types.FunctionType, str]:
    """The functions of kernels and rules, and of their helpers in the same file, with their roles.

    A function with two roles has the first one: a fake kernel that runs the kernel is a kernel.
    """
    found: dict[types.FunctionType, str] = {}
    for role, registered in _registered(operator):
        for function in _authored(registered, set()):
            found.setdefault(function, role)
    helpers = list(found)
    for function in helpers:
        for helper in _called_by(function):
            if helper not in found:
                found[helper] = f"called by the {found[function]}"
                helpers.append(helper)  # which may have helpers, too
    return found


def _registered(operator: Operator) -> Iterator[tuple[str, Any]]:
    handle = registries.published_handle(str(operator))
    for provider in providers_of(str(operator)):
        yield from ((f"kernel of {provider.name}", kernel) for kernel in provider.kernels)
    if handle is None:
        yield from (("kernel", function) for function in functions_of(operator.name))
        return
    yield from stock_kernels.registered_functions(handle)
    definition = getattr(handle, "_definition", None)
    for rule in () if definition is None else definition.rules.values():
        yield from (("rule", part) for part in rule.cache_parts())


def _authored(value: Any, seen: set[int]) -> Iterator[types.FunctionType]:
    """The functions of authors that a function is, or that it holds on to."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        parts = (value.__func__,)
    elif isinstance(value, types.FunctionType):
        # A doctest has the name of its module.
        if package_of(value) not in _OF_OTHERS or value.__code__.co_filename.startswith("<doctest"):
            yield value
        kept = closure_of(value).values()
        parts = tuple(each for each in kept if isinstance(each, _FUNCTIONS))
    elif isinstance(value, tuple):
        parts = value
    else:
        call = vars(type(value)).get("__call__")
        parts = (call,) if isinstance(call, types.FunctionType) else ()
    for part in parts:
        if callable(part) or isinstance(part, tuple):
            yield from _authored(part, seen)


def _called_by(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """The functions of the same file that a function names."""
    for name in names_in(function.__code__):
        value = function.__globals__.get(name)
        if (
            isinstance(value, types.FunctionType)
            and value.__code__.co_filename == function.__code__.co_filename
        ):
            yield value
