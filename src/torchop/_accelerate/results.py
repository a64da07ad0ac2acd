"""Results of kernels that somebody else registered, converted as the dispatcher does."""

from __future__ import annotations

import functools
import itertools
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchop._compat import libraries, torch_ops
from torchop._core.library import process_library
from torchop._schema.schema import OBJECTS, Schema
from torchop._schema.text import results_of, without_aliases, write_results

_NAMESPACE = "_torchop_results"

_numbers = itertools.count()
_passing = threading.local()

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_ITEMS: dict[str, tuple[type, ...]] = {
    "Tensor": _PLAIN,
    "Optional[Tensor]": (*_PLAIN, type(None)),
    "float": (float,),
    "bool": (bool,),
    "str": (str,),
}


def conversion(name: str, schema: Schema) -> Callable[[Any], Any]:
    """The conversion that the dispatcher applies to results of a Python kernel of this operator.

    PyTorch converts or refuses results that do not have exactly the types of the schema.
    """
    kinds = schema.returns
    form = write_results([without_aliases(result) for result in results_of(schema.written)])

    def convert(result: Any) -> Any:
        if len(kinds) == 1 and _is_of(kinds[0], result):
            return list(result) if isinstance(result, list) else result
        is_tuple = len(kinds) > 1 and type(result) is tuple and len(result) == len(kinds)
        if is_tuple and all(map(_is_of, kinds, result)):
            return tuple(list(item) if type(item) is list else item for item in result)
        if len(kinds) > 1 and isinstance(result, Sequence) and len(result) > len(kinds):
            # PyTorch converts all of them, with types from behind the end of the schema's.
            _by_dispatcher(name, form, result[: len(kinds)])
            raise RuntimeError(
                f"{name}: the kernel returned {len(result)} values, expected the {len(kinds)} of "
                f"the schema, {form}."
            )
        return _by_dispatcher(name, form, result)

    return convert


def _is_of(kind: str, value: Any) -> bool:
    if kind in OBJECTS:
        return True
    if kind == "List[Tensor]":
        return type(value) is list and all(type(item) in _PLAIN for item in value)
    return type(value) in _ITEMS.get(kind, ())


def _by_dispatcher(name: str, form: str, result: Any) -> Any:
    """Lets PyTorch check and convert a result: an operator with the same results returns it."""
    identity = _identity(form)
    _passing.result = result
    try:
        return identity()
    except RuntimeError as error:
        # The message may name that operator, but the caller called another.
        message = re.sub(rf"{_NAMESPACE}::as_\d+", name, str(error))
        if message == str(error):
            raise
        raise type(error)(message) from None
    finally:
        del _passing.result


@functools.cache
def _identity(form: str) -> Callable[[], Any]:
    """An operator with results of one form, made for the first unusual result of that form."""
    library, local = process_library(_NAMESPACE), f"as_{next(_numbers)}"
    libraries.define(library, f"{local}() -> {form}", ())
    libraries.implement(library, local, "CompositeExplicitAutograd", lambda: _passing.result)
    return torch_ops.lookup_overload(_NAMESPACE, local, "")
