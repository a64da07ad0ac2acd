"""Define an operator. If any step fails, nothing remains registered."""

from __future__ import annotations

import contextlib
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.library

from torchop._compat import libraries, registries, torch_ops
from torchop._core.declaration import Declaration
from torchop._core.definition import Definition
from torchop._core.library import OwnLibrary
from torchop._core.lock import registration_lock, run_waiting_hooks
from torchop._core.registered import registrations_of
from torchop._core.registry import check_owner, replace

Result = TypeVar("Result")


# Creates the handle of a new operator, i.e. the object that users call. The package `_define` sets
# this variable, because an import would be circular: `_define` imports `_rules`, and `_rules`
# imports `_core`.
make_handle: Any = None


def define(declaration: Declaration, lib: torch.library.Library | None = None) -> Definition:
    """Register a validated operator with PyTorch.

    If `custom_op` created an operator with the same name, the new operator replaces it. If any
    other operator has this name, raise RuntimeError. Closing `lib` deregisters the new operator.
    """
    return all_or_nothing(declaration.name, lambda: _replace(declaration, lib))


def _replace(declaration: Declaration, lib: torch.library.Library | None) -> Definition:
    """Define an operator once no other operator has its name, and set its priority order."""
    name, site = declaration.name, declaration.site
    assert site is not None  # it is None only for operators of other packages
    check_owner(name, lib)
    definition = replace(name, site, lambda: _define(declaration, lib))
    if declaration.priority:
        definition.handle.set_priority(declaration.priority)
    return definition


def _define(declaration: Declaration, lib: torch.library.Library | None) -> Definition:
    name = declaration.name
    library = OwnLibrary(name.namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
    definition = Definition(declaration, library, lib)
    torch_ops.before_definition(*name)
    for definitions in _definitions_to_undo():
        definitions.append(definition)
    # Add this callback before any rule, such as a fake kernel, is registered. If the definition
    # fails halfway, or if `torch.library.custom_op` replaces the operator later, closing the
    # library then still removes all rules.
    libraries.on_close(library, definition.library_closed)
    finishing = definition.install()
    # Install the kernels before defining the schema, because other threads can call the operator as
    # soon as its schema is defined.
    qualname = libraries.define(library, definition.schema.written, declaration.tags)
    torch_ops.after_definition(*name)
    for finish in finishing:
        finish()
    registries.publish(qualname, make_handle(definition), library)
    definition.schema.forget_parsed()
    if lib is not None:
        reason = f"The operator {name} was deregistered: the library it was defined in was closed."
        deregister_with(lib, definition, lambda: reason)
    return definition


def all_or_nothing(what: object, build: Callable[[], Result]) -> Result:
    """Run `build`, and deregister all operators that it defined if it raises an exception.

    If `build` imports a module, the operators of that module stay registered, because the module
    stays imported. Operators defined by a method of a `torchop.Rule` stay registered too.

    Args:
        what: the name or a description of the new operators, for error messages.
        build: a function without parameters that defines operators and registers rules.

    Returns:
        The result of `build`.

    Raises:
        Exception: any exception of `build`.

    Example:
        >>> import torch, torchop
        >>> from torchop.extend import all_or_nothing
        >>> def build():
        ...     op = torchop.custom_op("docs::incomplete", lambda x: x.clone(),
        ...                            schema="(Tensor x) -> Tensor", mutates_args=())
        ...     op.register_fake(lambda: None)
        >>> try:
        ...     all_or_nothing("docs::incomplete", build)
        ... except torchop.RuleSignatureError:
        ...     print(hasattr(torch.ops.docs, "incomplete"))
        False
    """
    run_waiting_hooks()
    before, definitions = _running.blocks, list[Definition]()
    _running.blocks = (*before, definitions)
    try:
        return build()
    except BaseException:
        # ExitStack runs all callbacks, in reverse order, even if one of them raises.
        with contextlib.ExitStack() as stack:
            for definition in definitions:
                stack.callback(definition.deregister, f"The definition of {what} failed.")
        raise
    finally:
        _running.blocks = before


class _Running(threading.local):
    # For each running call of `all_or_nothing`, the definitions to undo if it fails
    blocks: tuple[list[Definition], ...] = ()


_running = _Running()


@contextlib.contextmanager
def user_code() -> Iterator[None]:
    """Exempt the operators that user code defines in this block from any rollback."""
    before, _running.blocks = _running.blocks, ()
    try:
        yield
    finally:
        _running.blocks = before


def _definitions_to_undo() -> list[list[Definition]]:
    """Return the lists that a new operator belongs to, one for each call of `all_or_nothing`.

    If a module is being imported, calls that started before the import are left out, because the
    module stays imported. This function finds the running calls by walking the Python stack. If
    each call stored its frame instead, the frame and its variables would form a reference cycle,
    which only the garbage collector could free.
    """
    found: list[list[Definition]] = []
    frame: types.FrameType | None = sys._getframe()
    for definitions in reversed(_running.blocks):
        while frame is not None and frame.f_code is not _ALL_OR_NOTHING:
            if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
                return found
            frame = frame.f_back
        found.append(definitions)
        frame = frame and frame.f_back
    return found


_ALL_OR_NOTHING = all_or_nothing.__code__


def deregister_with(
    library: torch.library.Library, definition: Definition, reason: Callable[[], str]
) -> None:
    """Deregister the operator when `library` is closed.

    The library only gets a weak reference, so it does not keep the definition alive.
    """
    reference = weakref.ref(definition)

    def deregister() -> None:
        if (alive := reference()) is not None:
            alive.deregister(reason())

    with registration_lock:
        # If the operator is redefined, `add` replaces the row of the old operator in the library's
        # table of registrations.
        registrations_of(library, definition.name).add("operator", None, deregister)
