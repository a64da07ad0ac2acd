"""Names of operators, `namespace::name` or `namespace::name.overload`; and those of rules."""

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

# PyTorch treats what lives here as its own: `aten` and `prims` operators skip functionalization,
# `prim` belongs to TorchScript, `higher_order` and `_` are not namespaces of operators at all.
RESERVED_NAMESPACES = frozenset({"aten", "prim", "prims", "higher_order", "_"})


class OpName(NamedTuple):
    """The three parts of an operator's name.

    Attributes:
        namespace: such as `"mylib"`.
        name: such as `"crop"`.
        overload: the empty string for the default overload.

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
        """Splits a qualified name, without asking whether one could define it.

        Args:
            qualname: `"ns::name"` or `"ns::name.overload"`.

        Raises:
            OperatorNameError: a `ValueError`: it is not such a string.
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
                f"{short_repr(qualname)} does not have the form namespace::name (a namespace keeps "
                f"the operators of different packages apart); {_GOOD}."
            )
        name, _, overload = local.partition(".")
        return OpName(sys.intern(namespace), name, "" if overload == "default" else overload)

    @staticmethod
    def parse_new(qualname: object) -> OpName:
        """Splits the name of an operator about to be defined, and checks every rule it must keep.

        Args:
            qualname: `"ns::name"` or `"ns::name.overload"`.

        Raises:
            OperatorNameError: a `ValueError`: no operator can have this name; says why.
        """
        result = OpName.parse(qualname)
        assert isinstance(qualname, str)
        if qualname.endswith(".default"):
            raise OperatorNameError(
                f"{short_repr(qualname)}: the overload name 'default' is how PyTorch spells an "
                f"operator without one; write {short_repr(str(result))}."
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
        """The name inside its namespace, as a schema spells it: `crop` or `crop.overload`."""
        return f"{self.name}.{self.overload}" if self.overload else self.name

    @property
    def packet(self) -> str:
        """The name that all overloads share: `mylib::crop`."""
        return f"{self.namespace}::{self.name}"

    def __str__(self) -> str:
        return f"{self.namespace}::{self.local}"


def is_name(name: OpName, text: str) -> bool:
    """Whether a text names an operator, or all overloads of which it is one."""
    return text in (name.packet, f"{name.packet}.{name.overload or 'default'}")


def is_match(name: OpName, pattern: str) -> bool:
    """Whether a pattern, as one of file names, matches an operator, or a name is its name.

    `f.*` matches the overloads of `f` that have a name.
    """
    texts = (str(name), name.packet)
    return is_name(name, pattern) or any(fnmatch.fnmatchcase(text, pattern) for text in texts)


def is_pattern(text: str) -> bool:
    """Whether a name of an operator could match."""
    return "::" in text or text.startswith("*")


def _problem(part: str, text: str, attributes: frozenset[str]) -> str | None:
    """Why a part of a name cannot be used; None if it can."""
    if part == "overload" and not text:
        return None  # the default overload
    if not _IDENTIFIER.fullmatch(text):
        return "may hold only ASCII letters, digits and underscores, and may not start with a digit"
    if text.startswith("__"):
        return "may not start with two underscores, which Python and PyTorch keep for themselves"
    if keyword.iskeyword(text) or not schemas.is_identifier(text):
        return "is a keyword of Python or TorchScript"
    if part == "namespace" and text in RESERVED_NAMESPACES:
        return (
            "is reserved by PyTorch, which gives its operators another meaning; use the name of "
            "your package"
        )
    if text in attributes:
        return (
            "is an attribute of the object of torch.ops that would hold the operator, so the "
            f"operator could not be reached there; choose another {part}"
        )
    return None


def check_rule_name(name: object, reserved: Iterable[Callable[[str], bool]]) -> None:
    """Refuses a name that no rule of `torchop.Rule` can have; `reserved` says which are taken."""
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(
            f"the name of a rule is an identifier such as 'cost', because it is also the name of "
            f"a member of classes; got {short_repr(name)}."
        )
    if name.startswith("_"):
        raise ValueError(
            f"the name of a rule does not start with an underscore, because the class form takes "
            f"such members for the author's own; got {short_repr(name)}."
        )
    if any(is_reserved(name) for is_reserved in reserved):
        raise ValueError(
            f"{short_repr(name)} means something else in the class form of an operator, or on its "
            "handle; choose another name for the rule."
        )
