"""Defines an operator after all checks: completely, or not at all."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.library

from torchop._compat import deregistration, libraries, registries
from torchop._core.declaration import Declaration
from torchop._core.definition import Definition
from torchop._core.library import OwnLibrary
from torchop._core.lock import registration_lock
from torchop._core.registry import end_older

Result = TypeVar("Result")


# Makes the handle of a new operator, and its calls native. Handles need all rules, so the module of
# handles puts its function here.
make_handle: Any = None


def define(declaration: Declaration, lib: torch.library.Library | None = None) -> Definition:
    """Defines an operator of which everything was checked, in place of what has the name now.

    It ends with the caller's library. A name that `end_older` does not free is refused.
    """
    name = declaration.name

    def build() -> Definition:
        # A block, because a decorator's frame would be taken for that of the caller in warnings.
        with deregistration.kept_packet(name.namespace, name.name):
            return _define(declaration, lib)

    return all_or_nothing(name, build)


def _define(declaration: Declaration, lib: torch.library.Library | None) -> Definition:
    name, site = declaration.name, declaration.site
    assert site is not None  # operators of ours have one
    end_older(name, site)
    deregistration.before_definition(*name)
    library = OwnLibrary(name.namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
    definition = Definition(declaration, library, lib)
    for definitions in _blocks:
        definitions.append(definition)
    # First, so that the library always removes what the rules register: when the definition
    # fails, and when torch.library's custom_op destroys the published operator of this name.
    libraries.on_close(library, definition.library_closed)
    finishing = definition.install()
    # With all its kernels there already, because now other threads can find and call it.
    qualname = libraries.define(library, definition.schema.written, declaration.tags)
    deregistration.after_definition(*name)
    for finish in finishing:
        finish()
    registries.publish(qualname, make_handle(definition), library)
    definition.schema.forget_parsed()
    if lib is not None:
        reason = f"The operator {name} was deregistered: the library it was defined in was closed."
        end_with(lib, definition, lambda: reason)
    return definition


def all_or_nothing(what: object, build: Callable[[], Result]) -> Result:
    """Ends every operator that a function defines if it raises; nobody else registers meanwhile.

    Args:
        what: what it defines, such as a name, for those who hold one of the operators already.
        build: takes nothing, defines operators, and registers rules for them.

    Returns:
        What `build` returns.

    Raises:
        Exception: what `build` raises.

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
    definitions: list[Definition] = []
    with registration_lock:
        _blocks.append(definitions)
        try:
            return build()
        except BaseException:
            with contextlib.ExitStack() as stack:  # all of them, from the last on, if one raises
                for definition in definitions:
                    stack.callback(definition.end, f"The definition of {what} failed.")
            raise
        finally:
            _blocks.pop()


# For each block that is open, what it has defined; the registration lock guards it.
_blocks: list[list[Definition]] = []


def end_with(
    library: torch.library.Library, definition: Definition, reason: Callable[[], str]
) -> None:
    """Ends an operator when a library closes, which does not keep it alive."""
    reference = weakref.ref(definition)

    def end() -> None:
        if (alive := reference()) is not None:
            alive.end(reason())

    libraries.on_close(library, end)
