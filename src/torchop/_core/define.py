"""Define an operator: completely, or not at all."""

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
from torchop._core.registry import deregister_existing

Result = TypeVar("Result")


# Creates the handle of a new operator and makes its calls native. Set by `_define`, because handles
# import all rules.
make_handle: Any = None


def define(declaration: Declaration, lib: torch.library.Library | None = None) -> Definition:
    """Define a validated operator, replacing an operator of `custom_op` with the same name.

    The operator is deregistered when `lib` closes.

    Raises:
        RuntimeError: the name belongs to an operator that `custom_op` did not make.
    """
    name = declaration.name

    def build() -> Definition:
        # Not a decorator, because warnings would report the decorator's frame as the caller.
        with deregistration.preserve_packet(name.namespace, name.name):
            return _define(declaration, lib)

    return all_or_nothing(name, build)


def _define(declaration: Declaration, lib: torch.library.Library | None) -> Definition:
    name, site = declaration.name, declaration.site
    assert site is not None  # every operator of `custom_op` has a site
    deregister_existing(name, site)
    deregistration.before_definition(*name)
    library = OwnLibrary(name.namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
    definition = Definition(declaration, library, lib)
    for definitions in _blocks:
        definitions.append(definition)
    # Before any rule registers something, so that closing the library always removes it: if the
    # definition fails, or if `torch.library.custom_op` replaces the operator.
    libraries.on_close(library, definition.library_closed)
    finishing = definition.install()
    # After the kernels are installed, because from here on other threads can call the operator.
    qualname = libraries.define(library, definition.schema.written, declaration.tags)
    deregistration.after_definition(*name)
    for finish in finishing:
        finish()
    registries.publish(qualname, make_handle(definition), library)
    definition.schema.forget_parsed()
    if lib is not None:
        reason = f"The operator {name} was deregistered: the library it was defined in was closed."
        deregister_with(lib, definition, lambda: reason)
    return definition


def all_or_nothing(what: object, build: Callable[[], Result]) -> Result:
    """Run `build`; if it raises, deregister every operator that it defined.

    Holds the registration lock, so no other thread registers meanwhile.

    Args:
        what: a description of the definitions, such as a name, for error messages.
        build: takes no arguments, defines operators, and registers rules for them.

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
    definitions: list[Definition] = []
    with registration_lock:
        _blocks.append(definitions)
        try:
            return build()
        except BaseException:
            with contextlib.ExitStack() as stack:  # in reverse, and even if one of them raises
                for definition in definitions:
                    stack.callback(definition.deregister, f"The definition of {what} failed.")
            raise
        finally:
            _blocks.pop()


# The definitions made by each running `all_or_nothing`. Guarded by `registration_lock`.
_blocks: list[list[Definition]] = []


def deregister_with(
    library: torch.library.Library, definition: Definition, reason: Callable[[], str]
) -> None:
    """Deregister an operator when a library closes, without keeping the operator alive."""
    reference = weakref.ref(definition)

    def deregister() -> None:
        if (alive := reference()) is not None:
            alive.deregister(reason())

    libraries.on_close(library, deregister)
