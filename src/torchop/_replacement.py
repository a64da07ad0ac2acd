"""Whose name an operator takes: where both were defined, and whether that may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchop._compat import handles, libraries, operators, retirement
from torchop._definition import Place
from torchop._errors import RedefinitionWarning
from torchop._naming import OpName
from torchop._resolve import own_definition
from torchop._warn import warn


def place_of(function: Callable[..., Any], module: str, file: str, line: int) -> Place:
    """Where an operator is defined: at its function, or else in the line that makes it one."""
    code = getattr(function, "__code__", None)
    if code is not None:
        file, line = code.co_filename, code.co_firstlineno
    qualname = getattr(function, "__qualname__", None)
    if qualname is None:
        # A partial or a callable object: its module is that of its class, and says nothing of it.
        return Place(module, f"line {line}", file, line)
    return Place(getattr(function, "__module__", None) or module, qualname, file, line)


def end_older(name: OpName, place: Place) -> None:
    """Ends the operator that has the name now, if `custom_op` made it.

    Raises:
        RuntimeError: it was made by other means, which may not expect it to disappear.
    """
    check_free(name, place)
    qualname = str(name)
    old = own_definition(None, name)
    library = handles.published_library(qualname)
    if old is not None and old.place is not None:
        if old.place.origin != place.origin:
            warn(
                f"{qualname} was defined at {old.place} and is defined again at {place}, which "
                "replaces it. Give one of them another name.",
                RedefinitionWarning,
            )
        old.close(
            f"This is a handle of the {qualname} that was defined at {old.place}. It was replaced "
            f"by the definition at {place}; use that one."
        )
    elif library is not None and library.m is not None:
        warn(
            f"{qualname} was defined with torch.library.custom_op and is defined again at {place}, "
            "which replaces it. Give one of them another name.",
            RedefinitionWarning,
        )
        replaced = f"{qualname} was replaced by the definition at {place}; use that one."
        with retirement.emptied([name], lambda qualname: replaced):
            handles.unpublish(qualname, library)
            libraries.forget_definitions(library)
            library._destroy()


def check_free(name: OpName, place: Place) -> None:
    """Refuses a name whose operator was not made by `custom_op`, which may not expect its end.

    Raises:
        RuntimeError: naming where it was defined.
    """
    own = own_definition(None, name)
    library = handles.published_library(str(name))
    replaceable = (own is not None and own.place is not None) or (
        library is not None and library.m is not None
    )
    if not replaceable and operators.is_registered(name.packet, name.overload):
        site = operators.registration_site(name.packet, name.overload)
        raise RuntimeError(
            f"{name} cannot be defined at {place}: it exists already, registered at {site}. Give "
            "one of them another name."
        )
