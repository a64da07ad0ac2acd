"""Defines an operator after all checks: completely, or not at all."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.library

from torchop._compat import deregistration, libraries, registries
from torchop._compat.settings import run_with, undone
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
    name, site = declaration.name, declaration.site
    assert site is not None  # operators of ours have one

    def build() -> Definition:
        end_older(name, site)
        deregistration.before_definition(*name)
        library = OwnLibrary(name.namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
        definition = Definition(declaration, library, lib)
        for definitions in _blocks:
            definitions.append(definition)
        # First, so that the library always removes what the rules register: when the definition
        # fails, and when torch.library's custom_op destroys the published operator of this name.
        libraries.on_close(library, definition.library_closed)
        rules = definition.installed_rules()
        for rule in rules:
            rule.install()
        # With all its kernels there already, because now other threads can find and call it.
        qualname = libraries.define(library, definition.schema.written, declaration.tags)
        deregistration.after_definition(*name)
        for rule in rules:
            rule.install_on_defined()
        registries.publish(qualname, make_handle(definition), library)
        definition.schema.forget_parsed(name.namespace)
        if lib is not None:
            reason = f"The operator {name} is gone: the library it was defined in was closed."
            end_with(lib, definition, lambda: reason)
        return definition

    packet = deregistration.kept_packet(name.namespace, name.name)
    return all_or_nothing(name, lambda: run_with([packet], build))


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
    # A function, and no context manager: an interrupt that comes when one was entered, and before
    # its block, would find nobody who releases the lock.
    global _blocks
    definitions: list[Definition] = []

    def end_all() -> None:
        for definition in reversed(definitions):
            definition.end(f"The definition of {what} failed.")

    with registration_lock:
        outer = _blocks
        try:
            _blocks = (*outer, definitions)
            return undone(build, end_all)
        finally:
            _blocks = outer


# For each block that is open, what it has defined; the registration lock guards it.
_blocks: tuple[list[Definition], ...] = ()


def end_with(
    library: torch.library.Library, definition: Definition, reason: Callable[[], str]
) -> None:
    """Ends an operator when a library closes, which does not keep it alive."""
    reference = weakref.ref(definition)

    def end() -> None:
        if (alive := reference()) is not None:
            alive.end(reason())

    libraries.on_close(library, end)
