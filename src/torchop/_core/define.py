"""Defining an operator of which everything was checked: all of it, or nothing."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch.library

from torchop._compat import handles, libraries, retirement, torch_ops
from torchop._core.declaration import Declaration
from torchop._core.definition import Definition
from torchop._core.library import OwnLibrary
from torchop._core.lock import registration_lock
from torchop._core.registry import end_older


def _no_handles(definition: Definition) -> Any:
    raise RuntimeError(f"{definition} cannot be defined before torchop is imported.")


# Makes the handle of a new operator, and its calls native. Handles need all rules, so the module of
# handles puts its function here.
make_handle: Callable[[Definition], Any] = _no_handles


def define(declaration: Declaration, lib: torch.library.Library | None = None) -> Definition:
    """Defines an operator of which everything was checked, in place of what has the name now.

    It ends with the caller's library. A name that `end_older` does not free is refused.
    """
    name = declaration.name
    assert declaration.site is not None  # operators of ours have one
    with all_or_nothing(name), retirement.replacing(name.namespace, name.name):
        end_older(name, declaration.site)
        library = OwnLibrary(name.namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
        definition = Definition(declaration, library, lib)
        for definitions in _blocks:
            definitions.append(definition)
        # First, so that what the rules register is taken back whenever the library goes: when the
        # definition fails, or torch.library's own custom_op destroys what is published for a name.
        libraries.on_close(library, definition.library_closed)
        for rule in definition.rules.values():
            rule.install()
        # With all its kernels there already, because now other threads can find and call it.
        libraries.define(library, definition.schema.written, declaration.tags)
        torch_ops.refresh_packet(name.namespace, name.name)
        for rule in definition.rules.values():
            rule.install_on_defined()
        handles.publish(str(name), make_handle(definition), library)
        if lib is not None:
            reason = f"The operator {name} is gone: the library it was defined in was closed."
            end_with(lib, definition, lambda: reason)
    return definition


@contextlib.contextmanager
def all_or_nothing(what: object) -> Iterator[None]:
    """Ends every operator that the body defines if it raises; nobody else registers meanwhile.

    Those that already hold one of the operators are told `what` the body defines.
    """
    definitions: list[Definition] = []
    with registration_lock:
        _blocks.append(definitions)
        try:
            yield
        except BaseException:
            for definition in reversed(definitions):
                definition.end(f"The definition of {what} failed.")
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
