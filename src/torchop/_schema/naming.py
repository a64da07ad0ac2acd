"""Operator names: `namespace::name` or `namespace::name.overload`, checked before anything else."""

from __future__ import annotations

import keyword
import re
from typing import NamedTuple

from torchop._compat import schemas, torch_ops
from torchop._errors import OperatorNameError, short_repr, short_text

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_GOOD = 'a good name is "mylib::crop" or "mylib::crop.overload"'

# PyTorch treats what lives here as its own: `aten` and `prims` operators skip functionalization,
# `prim` belongs to TorchScript, `higher_order` and `_` are not namespaces of operators at all.
RESERVED_NAMESPACES = frozenset({"aten", "prim", "prims", "higher_order", "_"})


class OpName(NamedTuple):
    """The three parts of an operator's name; the default overload is the empty string."""

    namespace: str
    name: str
    overload: str

    @property
    def local(self) -> str:
        """The name inside its namespace, as a schema spells it: `crop` or `crop.overload`."""
        return f"{self.name}.{self.overload}" if self.overload else self.name

    @property
    def packet(self) -> str:
        """The name that all overloads share: `mylib::crop`."""
        return f"{self.namespace}::{self.name}"

    def __str__(self) -> str:
        return f"{self.namespace}::{self.local}"


def parse(qualname: object) -> OpName:
    """Splits a qualified name, without asking whether one could define it.

    Args:
        qualname: `"namespace::name"` or `"namespace::name.overload"`.

    Raises:
        OperatorNameError: `qualname` is not a string of that form.
    """
    if not isinstance(qualname, str):
        name = short_text(getattr(qualname, "__name__", "crop"))
        behind = f'write it first, in parentheses behind the decorator: ("mylib::{name}", ...)'
        raise OperatorNameError(
            f"the name of an operator is a string, got {type(qualname).__name__}; "
            f"{behind if callable(qualname) else _GOOD}."
        )
    namespace, separator, local = qualname.partition("::")
    if not separator or not namespace or not local or "::" in local:
        raise OperatorNameError(
            f"{short_repr(qualname)} does not have the form namespace::name (a namespace keeps the "
            f"operators of different packages apart); {_GOOD}."
        )
    name, _, overload = local.partition(".")
    return OpName(namespace, name, "" if overload == "default" else overload)


def check_new(qualname: object) -> OpName:
    """Splits the name of an operator about to be defined, and checks every rule it must keep.

    Raises:
        OperatorNameError: a part is not an identifier, or is taken by PyTorch.
    """
    result = parse(qualname)
    assert isinstance(qualname, str)
    if qualname.endswith(".default"):
        raise OperatorNameError(
            f"{short_repr(qualname)}: the overload name 'default' is how PyTorch spells an "
            f"operator without "
            f"one; write {short_repr(str(result))}."
        )
    if qualname.endswith("."):
        raise OperatorNameError(
            f"{short_repr(qualname)}: the overload name after '.' is empty; {_GOOD}."
        )
    parts = {"namespace": result.namespace, "name": result.name, "overload": result.overload}
    for part, text in parts.items():
        if part == "overload" and not text:
            continue
        if not _IDENTIFIER.fullmatch(text):
            raise OperatorNameError(
                f"{short_repr(qualname)}: the {part} {short_repr(text)} may hold only ASCII "
                f"letters, digits and "
                f"underscores, and may not start with a digit; {_GOOD}."
            )
        if text.startswith("__"):
            raise OperatorNameError(
                f"{short_repr(qualname)}: the {part} {short_repr(text)} may not start with two "
                f"underscores, which "
                f"Python and PyTorch keep for themselves; {_GOOD}."
            )
        if keyword.iskeyword(text) or not schemas.is_identifier(text):
            raise OperatorNameError(
                f"{short_repr(qualname)}: the {part} {short_repr(text)} is a keyword of Python "
                f"or TorchScript; {_GOOD}."
            )
    if result.namespace in RESERVED_NAMESPACES:
        raise OperatorNameError(
            f"{short_repr(qualname)}: the namespace {short_repr(result.namespace)} is reserved "
            f"by PyTorch, which gives "
            f"its operators another meaning; use the name of your package; {_GOOD}."
        )
    _check_shadowing(qualname, "namespace", result.namespace, torch_ops.OPS_ATTRIBUTES)
    _check_shadowing(qualname, "name", result.name, torch_ops.NAMESPACE_ATTRIBUTES)
    _check_shadowing(qualname, "overload", result.overload, torch_ops.PACKET_ATTRIBUTES)
    return result


def _check_shadowing(qualname: str, part: str, text: str, taken: frozenset[str]) -> None:
    if text in taken:
        raise OperatorNameError(
            f"{short_repr(qualname)}: the {part} {short_repr(text)} is an attribute of the "
            f"object that torch.ops would "
            f"hang the operator on, so it could never be reached there; choose another {part}. "
            f"For example, {_GOOD}."
        )
