"""Parse and validate the names of operators (`namespace::name[.overload]`) and of user rules."""

from __future__ import annotations

import fnmatch
import keyword
import re
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torchop._compat import schemas, torch_ops
from torchop._errors import OperatorNameError, short_repr, short_text

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_GOOD = 'a good name is "mylib::crop" or "mylib::crop.overload"'

# Users cannot define operators in these namespaces: PyTorch does not functionalize custom operators
# in `aten` and `prims`, `prim` belongs to TorchScript, and `torch.ops.higher_order` and
# `torch.ops._` are not meant for ordinary operators.
RESERVED_NAMESPACES = frozenset({"aten", "prim", "prims", "higher_order", "_"})


class OpName(NamedTuple):
    """The three parts of an operator's name.

    Attributes:
        namespace: the part before `::`, such as `"mylib"`.
        name: the part between `::` and the dot, such as `"crop"`.
        overload: the part after the dot. It is empty for the default overload.

    Example:
        >>> from torchop.extend import OpName
        >>> name = OpName.parse("aten::add.Tensor")
        >>> name.namespace, name.overload, name.packet, str(name)
        ('aten', 'Tensor', 'aten::add', 'aten::add.Tensor')
    """

    namespace: str
    name: str
    overload: str

    @staticmethod
    def parse(qualname: object) -> OpName:
        """Split a qualified name without checking the parts.

        Args:
            qualname: `"ns::name"` or `"ns::name.overload"`.

        Raises:
            OperatorNameError: `qualname` is not a string of this form. OperatorNameError is a
                subclass of `ValueError`.
        """
        if not isinstance(qualname, str):
            name = short_text(getattr(qualname, "__name__", "crop"))
            fix = f'pass it to the decorator: ("mylib::{name}", ...)'
            raise OperatorNameError(
                f"the name of an operator must be a string, got {type(qualname).__name__}; "
                f"{fix if callable(qualname) else _GOOD}."
            )
        namespace, separator, local = qualname.partition("::")
        if not separator or not namespace or not local or "::" in local:
            raise OperatorNameError(
                f"{short_repr(qualname)} does not have the form namespace::name (operators of "
                f"different packages need different namespaces); {_GOOD}."
            )
        name, _, overload = local.partition(".")
        return OpName(sys.intern(namespace), name, "" if overload == "default" else overload)

    @staticmethod
    def parse_new(qualname: object) -> OpName:
        """Split the name of a new operator, and check that PyTorch accepts each part.

        Args:
            qualname: `"ns::name"` or `"ns::name.overload"`.

        Raises:
            OperatorNameError: PyTorch does not support this name. OperatorNameError is a subclass
                of `ValueError`.
        """
        result = OpName.parse(qualname)
        assert isinstance(qualname, str)
        if qualname.endswith(".default"):
            raise OperatorNameError(
                f"{short_repr(qualname)}: PyTorch reserves the overload name 'default' for "
                f"operators without an overload name; write {short_repr(str(result))}."
            )
        if qualname.endswith("."):
            raise OperatorNameError(
                f"{short_repr(qualname)}: the overload name after '.' is empty; {_GOOD}."
            )
        for part, text, attributes in (
            ("namespace", result.namespace, torch_ops.OPS_ATTRIBUTES),
            ("name", result.name, torch_ops.NAMESPACE_ATTRIBUTES),
            ("overload", result.overload, torch_ops.PACKET_ATTRIBUTES),
        ):
            if (problem := _problem(part, text, attributes)) is not None:
                raise OperatorNameError(
                    f"{short_repr(qualname)}: the {part} {short_repr(text)} {problem}; {_GOOD}."
                )
        return result

    @property
    def local(self) -> str:
        """Return the name without the namespace: `crop` or `crop.overload`."""
        return f"{self.name}.{self.overload}" if self.overload else self.name

    @property
    def packet(self) -> str:
        """Return the name without the overload: `mylib::crop`."""
        return f"{self.namespace}::{self.name}"

    def __str__(self) -> str:
        return f"{self.namespace}::{self.local}"


def is_name(name: OpName, text: str) -> bool:
    return text in (name.packet, f"{name.packet}.{name.overload or 'default'}")


def is_match(name: OpName, pattern: str) -> bool:
    """Return whether an operator matches `pattern`, which is a name or a glob such as `mylib::*`.

    `mylib::f.*` matches every overload of `f` except the default overload, because its name has no
    dot.
    """
    texts = (str(name), name.packet)
    return is_name(name, pattern) or any(fnmatch.fnmatchcase(text, pattern) for text in texts)


def is_pattern(text: str) -> bool:
    """Return whether `text` looks like a pattern: it contains `::` or starts with `*`."""
    return "::" in text or text.startswith("*")


def _problem(part: str, text: str, attributes: frozenset[str]) -> str | None:
    if part == "overload" and not text:
        return None
    if not _IDENTIFIER.fullmatch(text):
        return "may hold only ASCII letters, digits and underscores, and may not start with a digit"
    if text.startswith("__"):
        return "may not start with two underscores, because Python and PyTorch reserve such names"
    # TorchScript's keywords consist of letters, so other names need no parser.
    if keyword.iskeyword(text) or (text.isalpha() and not schemas.is_identifier(text)):
        return "is a keyword of Python or TorchScript"
    if part == "namespace" and text in RESERVED_NAMESPACES:
        return (
            "is reserved by PyTorch, because it treats operators there differently; use the name "
            "of your package"
        )
    if text in attributes:
        return (
            "is already an attribute of the torch.ops object that would hold the operator, so "
            f"torch.ops could not look the operator up; choose another {part}"
        )
    return None


def check_rule_name(name: object, reserved: Iterable[Callable[[str], bool]]) -> None:
    """Raise ValueError if a new `torchop.Rule` cannot have this name.

    Each function in `reserved` returns True for names that are already in use.
    """
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(
            f"the name of a rule must be an identifier such as 'cost', because it is also a member "
            f"name in the class form; got {short_repr(name)}."
        )
    if name.startswith("_"):
        raise ValueError(
            f"the name of a rule must not start with an underscore, because the class form leaves "
            f"such members to the author; got {short_repr(name)}."
        )
    if any(is_reserved(name) for is_reserved in reserved):
        raise ValueError(
            f"{short_repr(name)} already has a meaning in the class form of an operator, or on "
            "the handle; choose another name for the rule."
        )
