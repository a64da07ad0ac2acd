"""Cache the outputs of fake kernels that depend only on the metadata of their arguments.

This saves time, because a compiler runs the fake kernel several times for each call in a graph, and
PyTorch's own cache skips all operators that are not built in.
"""

from __future__ import annotations

import dis
import math
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchop._compat import fake_cache
from torchop._core.definition import Definition
from torchop._schema.forms import Form
from torchop._schema.signatures import closure_of, names_in

# Returns a digest of functions, and of the code and constants that they use.
# torchop/__init__.py sets this variable, because `_rules` must not import `_inspect`.
digest_of: Callable[[Any], object] = NotImplemented


class FakeCache:
    """The cached outputs of one fake kernel in this process.

    `functions` are the user's functions that the fake kernel calls. If `is_pure` is true, the user
    has declared that these functions depend only on their arguments.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], *, is_pure: bool) -> None:
        self._functions, self._is_pure = functions, is_pure
        self._mode: Callable[[], Any] = lambda: None
        self._version: object = None
        self._entries: fake_cache.Cache = {}
        self._owner = object()  # entries in a ShapeEnv have the owner in their keys

    def outputs(self, mode: Any, op: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Return `run()` or, on a cache hit, outputs with the metadata of an earlier call."""
        if self._mode() is not mode:
            # A different FakeTensorMode means a new compilation, so check whether the code has
            # changed since the last one.
            version = self._current_version()
            if version != self._version:
                self._version, self._entries, self._owner = version, {}, object()
            self._mode = weakref.ref(mode)
        if self._version is None:
            return run()

        def run_and_update() -> Any:
            output = run()
            # The fake kernel itself may change a variable that is part of the version, such as a
            # list of its calls. Update the version. Otherwise the next call would treat this as
            # changed code and clear the cache.
            self._version = self._current_version()
            return output

        return fake_cache.cached_outputs(
            self._entries, self._owner, mode, op, args, kwargs, run_and_update
        )

    def _current_version(self) -> object:
        """Return a value that changes with the code, or None if the outputs must not be cached."""
        used = list(map(_constants, self._functions))
        if None not in used:
            return used, repr(used)  # `repr` distinguishes 1, 1.0 and True, which are equal
        if self._is_pure or all(map(_depends_on_arguments, self._functions)):
            return digest_of(self._functions)
        return None


def cache_for(
    definition: Definition, function: Callable[..., Any], *, is_pure: bool
) -> FakeCache | None:
    """Return a cache for a new fake kernel, or None if the outputs must not be cached.

    `is_pure` means that the user declared the outputs to depend only on metadata.
    """
    # If options of `register_fake`, such as `like`, declare the outputs, only a `shape` function is
    # worth caching. Without a `shape` function, running the fake kernel takes less time than a
    # lookup in the cache.
    functions = getattr(function, "shapes", (function,) if is_pure else ())
    schema, declaration = definition.schema, definition.declaration
    if (
        not functions
        or not definition.is_ours
        or declaration.is_lenient  # the outputs may be arguments
        or declaration.residuals is not None  # a call may request residuals from the fake kernel
        or schema.is_view
        or schema.form is not Form.PLAIN
        # Objects of custom classes and generators can be mutated, so equal arguments may differ
        # later.
        or any("__torch__" in a.kind or "Generator" in a.kind for a in schema.arguments)
    ):
        return None
    return FakeCache(functions, is_pure=is_pure)


_CONSTANTS = (bool, int, float, str, bytes, type(None), torch.dtype, torch.memory_format)
_MODULES = (torch, math)
_CONTAINERS = (list, dict, set, frozenset)


def _constants(function: Any) -> tuple[Any, ...] | None:
    """Return a function's code and variables, or None if the contents of a variable may change."""
    used = _variables(function)
    if used is None or not all(map(_is_constant, used.values())):
        return None
    return function.__code__, sorted(used.items())


def _is_constant(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return type(value) in _CONSTANTS or any(value is module for module in _MODULES)


def _depends_on_arguments(function: Any, seen: tuple[Any, ...] = ()) -> bool:
    """Return whether a function can only depend on its arguments and its code.

    Such a function uses constants, containers and similar functions, but no modules or other
    objects, which could give access to other state.
    """
    if function in seen:
        return True
    used = _variables(function)
    return used is not None and all(
        _is_constant(value)
        or type(value) in _CONTAINERS
        or _depends_on_arguments(value, (*seen, function))
        for value in used.values()
    )


def _variables(function: Any) -> dict[str, Any] | None:
    """Return the globals, closure variables and defaults of a function, or None if unknown."""
    if not isinstance(function, types.FunctionType) or _imports(function.__code__):
        return None
    around, names = function.__globals__, names_in(function.__code__)
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return (
        {name: around[name] for name in names if name in around}
        | closure_of(function)
        | {f"default {n}": value for n, value in enumerate(defaults)}
    )


def _imports(code: types.CodeType) -> bool:
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return dis.opmap["IMPORT_NAME"] in code.co_code[::2] or any(map(_imports, inner))
