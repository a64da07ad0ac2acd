"""`Schema`, a wrapper around `torch.FunctionSchema` that also stores the author's own text."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torchop._compat import dispatch, schemas
from torchop._compat.classes import FunctionSchema
from torchop._schema.forms import Form
from torchop._schema.kinds import is_by_reference
from torchop._schema.naming import OpName
from torchop._schema.text import arguments_alone, arguments_of, results_of, write, write_results


class Argument(NamedTuple):
    """One argument of a schema.

    Attributes:
        name: the name of the argument.
        kind: the type as PyTorch spells it, such as `Tensor`, `List[Optional[Tensor]]` or `int`.
        keyword_only: whether the argument cannot be passed by position.
        is_mutated: whether the operator mutates the argument.
        has_default: whether calls may omit the argument.
        default: the default value that the kernel receives.

    Example:
        >>> from torchop.extend import Operator
        >>> alpha = Operator("aten::add.Tensor", "my_tool").schema.arguments[-1]
        >>> alpha.kind, alpha.keyword_only, alpha.default
        ('number', True, 1)
    """

    name: str
    kind: str
    keyword_only: bool
    is_mutated: bool
    has_default: bool
    default: Any

    @property
    def is_tensor_list(self) -> bool:
        return self.kind in TENSOR_LISTS

    @property
    def holds_tensors(self) -> bool:
        return "Tensor" in self.kind


# The dispatcher ignores the tensors in lists of these types when it computes dispatch keys.
OPTIONAL_TENSOR_LISTS = frozenset({"Optional[List[Tensor]]", "Optional[List[Optional[Tensor]]]"})
# Start matching at the dot: a pattern for the whole name would take quadratic time.
_DOTTED_NAME = re.compile(r"\.[A-Za-z_]")
# Arguments of these types accept any object, because the dispatcher does not check them.
OBJECTS = frozenset({"PyObject", "Optional[PyObject]"})
# The dispatcher stores one bit per argument in a bit set of this size, so it rejects schemas with
# more arguments. We check the limit ourselves, before deregistering an existing operator of the
# same name. The dispatcher's error would come too late: the existing operator would already be
# lost.
MAX_ARGUMENTS = 64
_NUMBER = re.compile(r"(Optional\[)?(List\[)?(int|float|bool|complex|number)\]*")
TENSOR_LISTS = OPTIONAL_TENSOR_LISTS | {"List[Tensor]", "List[Optional[Tensor]]"}


class Schema:
    """A parsed schema: arguments, results, mutation and aliasing.

    Get the schema of an operator with `Operator(op, ...).schema`, wrap a `torch.FunctionSchema`
    with `Schema(op._schema)`, or parse text with `Schema.parse(text)`. The last two do not detect
    in-place and out= operators, so their `form` is `Form.PLAIN` by default.

    Args:
        parsed: a `torch.FunctionSchema`.
        written: the schema as the author wrote it, without the namespace, if known.
        form: the form of the operator: in-place, out=, or plain.

    Attributes:
        text: the schema as PyTorch spells it, with the name of the operator.
        name: the name of the operator, such as `mylib::crop.overload`.
        arguments: a tuple of `Argument`.
        positional: the arguments that can be passed by position.
        keyword_only: the keyword-only arguments.
        returns: the result types as PyTorch spells them.
        mutated: the names of the arguments that the operator mutates.
        written_types: the argument types by name, as the author wrote them, such as `int[2]?`.
        constants: the names of arguments of type `int` (not `SymInt`), or lists of these.
        written_arguments: the arguments as the author wrote them, such as `int n=1`, and `*`.
        form: the form of the operator: in-place, out=, or plain.
        places: for arguments that are fields of structures, maps the argument's name to its path,
            such as `config.weight`.
        result_places: the paths of the results, if they are fields of structures.
        is_mutable: whether the operator mutates arguments.
        is_view: whether a result aliases an argument.
        is_functional: whether the operator mutates nothing, and returns only fresh results.

    Example:
        >>> from torchop.extend import Schema
        >>> schema = Schema.parse("mylib::scale(Tensor x, float by=2.0) -> Tensor")
        >>> [argument.name for argument in schema.positional], schema.returns
        (['x', 'by'], ('Tensor',))
    """

    places: Mapping[str, str] = MappingProxyType({})
    result_places: Sequence[str] = ()

    # Most attributes are computed lazily, because a typical program calls only a few of the
    # operators that it imports.

    def __init__(
        self, parsed: FunctionSchema, written: str | None = None, form: Form = Form.PLAIN
    ) -> None:
        self._parsed = parsed
        self._namespace = sys.intern(parsed.name.partition("::")[0])
        self.form = form
        # Store a text that PyTorch can parse again. `str(parsed)` does not escape string defaults,
        # so prefer the author's own text.
        self.written = schemas.readable(str(parsed)) if written is None else written
        self.is_mutable = parsed.is_mutable
        results = parsed.returns
        self.returns = tuple(sys.intern(str(result.real_type)) for result in results)
        returns_aliases = any(result.alias_info is not None for result in results)
        self.is_view = returns_aliases and not self.is_mutable
        self.returns_written = returns_aliases and self.is_mutable

    @classmethod
    def parse(cls, text: str) -> Schema:
        """Parse a schema that starts with the name of the operator.

        Args:
            text: a schema, such as `"mylib::scale(Tensor x, float by) -> Tensor"`.

        Raises:
            RuntimeError: PyTorch's parser rejects the text.
        """
        return cls(schemas.parse(text))

    def __str__(self) -> str:
        return self.text

    def is_backward_compatible(self, older: Schema) -> bool:
        """Return whether every call that an older schema accepts is still valid.

        This applies the rules that PyTorch uses to check changes to ATen operators.

        Args:
            older: the previous `Schema` of the operator.
        """
        return schemas.is_backward_compatible(self._parsed, older._parsed)

    def forget_parsed(self) -> None:
        """Free the parsed schema to save memory. If it is needed later, it is parsed again."""
        vars(self).pop("_parsed", None)

    @functools.cached_property
    def _parsed(self) -> FunctionSchema:
        return schemas.parse(f"{self._namespace}::{self.written}")

    @functools.cached_property
    def text(self) -> str:
        return str(self._parsed)

    @property
    def name(self) -> str:
        return self.text.partition("(")[0]

    @functools.cached_property
    def arguments(self) -> tuple[Argument, ...]:
        return tuple(map(_argument, self._parsed.arguments))

    @property
    def written_types(self) -> dict[str, str]:
        return {a.name: schemas.written_type(a) for a in self._parsed.arguments}

    @functools.cached_property
    def constants(self) -> tuple[str, ...]:
        """Return the names of the `int` arguments. Compilers specialize on the values of these."""
        return tuple(n for n, kind in self.written_types.items() if kind.startswith("int"))

    @property
    def written_arguments(self) -> list[str]:
        return arguments_of(self.written)

    @functools.cached_property
    def keyword_only(self) -> tuple[Argument, ...]:
        return tuple(a for a in self.arguments if a.keyword_only)

    @functools.cached_property
    def positional(self) -> tuple[Argument, ...]:
        return self.arguments[: len(self.arguments) - len(self.keyword_only)]

    @functools.cached_property
    def numbers(self) -> tuple[Argument, ...]:
        """The arguments that are numbers or lists of numbers."""
        return tuple(a for a in self.arguments if _NUMBER.fullmatch(a.kind))

    @property
    def parameters(self) -> tuple[list[str], list[str]]:
        """The names of the positional and of the keyword-only arguments."""
        return [a.name for a in self.positional], [a.name for a in self.keyword_only]

    @functools.cached_property
    def has_defaults(self) -> bool:
        return any(a.has_default for a in self.arguments)

    @functools.cached_property
    def has_lists(self) -> bool:
        return any("List[" in a.kind for a in self.positional)

    @functools.cached_property
    def has_tensor_lists(self) -> bool:
        return any(a.is_tensor_list for a in self.positional)

    @functools.cached_property
    def lists_may_hold_none(self) -> bool:
        return any("List[Optional[Tensor]]" in a.kind for a in self.arguments)

    @functools.cached_property
    def required_tensors(self) -> tuple[int, ...]:
        return tuple(
            index
            for index, argument in enumerate(self.positional)
            if argument.kind == "Tensor" and not argument.has_default
        )

    @functools.cached_property
    def required_lists(self) -> tuple[int | str, ...]:
        """Return the positions, or the names if keyword-only, of the arguments that are lists."""
        places = (*range(len(self.positional)), *(a.name for a in self.keyword_only))
        arguments = (*self.positional, *self.keyword_only)
        return tuple(
            place
            for place, argument in zip(places, arguments, strict=True)
            if argument.kind.startswith("List[")
        )

    @property
    def has_optional_tensor_lists(self) -> bool:
        # Test the text first, because computing `arguments` is slow.
        return "]?" in self.written.replace(" ", "") and any(
            a.kind in OPTIONAL_TENSOR_LISTS for a in self.arguments
        )

    @property
    def keyword_only_tensors(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.keyword_only if a.holds_tensors)

    @property
    def returns_nothing(self) -> bool:
        return not self.returns

    @property
    def is_functional(self) -> bool:
        return bool(self.returns) and not self.is_mutable and not self.is_view

    @property
    def mutated(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.arguments if a.is_mutated)

    @functools.cached_property
    def mutated_places(self) -> tuple[tuple[int, str], ...]:
        return tuple((i, a.name) for i, a in enumerate(self.arguments) if a.is_mutated)

    @property
    def raw_defaults(self) -> dict[str, Any]:
        """The defaults as `torch.FunctionSchema` represents them, for example a dtype as an int."""
        return {a.name: a.default_value for a in self._parsed.arguments if a.has_default_value()}

    @functools.cached_property
    def spelled_devices(self) -> frozenset[str]:
        """The names of device arguments with a default, which the dispatcher passes as a str."""
        return frozenset(
            argument.name
            for argument in self._parsed.arguments
            if argument.has_default_value()
            and isinstance(argument.default_value, str)
            and "Device" in str(argument.real_type)
        )

    @functools.cached_property
    def object_types(self) -> frozenset[str]:
        """The types of arguments, results and list items that are passed by reference."""
        if _DOTTED_NAME.search(self.written) is None:
            return frozenset()  # test the text first, because splitting it is slow
        arguments = (argument.split()[0] for argument in arguments_alone(self.written))
        kinds = (kind.rstrip("?[]") for kind in (*arguments, *results_of(self.written)))
        return frozenset(filter(is_by_reference, kinds))

    @functools.cached_property
    def objects(self) -> frozenset[str]:
        """The names of the arguments that hold objects passed by reference."""
        if not self.object_types:
            return frozenset()
        parts = (argument.split() for argument in arguments_alone(self.written))
        return frozenset(p[1].partition("=")[0] for p in parts if is_by_reference(p[0]))

    def fill_defaults(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Add back the arguments that the dispatcher dropped because they equal the default.

        `kwargs` may contain positional arguments too: the dispatcher passes only keyword-only
        arguments by name, but other callers may pass any argument by name.
        """

        def value(argument: Argument) -> Any:
            name = argument.name
            return kwargs[name] if name in kwargs else _fresh(argument.default)

        filled = (*args, *map(value, self.positional[len(args) :]))
        keywords = {argument.name: value(argument) for argument in self.keyword_only}
        if not self.spelled_devices:
            return filled, keywords
        return tuple(map(self._with_device, self.positional, filled)), {
            a.name: self._with_device(a, keywords[a.name]) for a in self.keyword_only
        }

    def _with_device(self, argument: Argument, value: Any) -> Any:
        is_spelled = argument.name in self.spelled_devices and isinstance(value, str)
        return dispatch.device(value) if is_spelled else value


def write_schema(
    name: OpName, arguments: Iterable[str], results: Sequence[str], form: Form = Form.PLAIN
) -> Schema:
    """Create a schema from texts of arguments, such as `Tensor x` and `int n=1`, and of results."""
    text = write(arguments, write_results(results))
    return Schema(schemas.parse(f"{name}{text}"), f"{name.local}{text}", form)


def _fresh(default: Any) -> Any:
    """Copy a list default, as the dispatcher does, because the kernel may modify the list."""
    return list(default) if isinstance(default, list) else default


def _argument(argument: Any) -> Argument:
    kind = sys.intern(str(argument.real_type))
    has_default = argument.has_default_value()
    alias = argument.alias_info
    return Argument(
        argument.name,
        kind,
        argument.kwarg_only,
        alias is not None and alias.is_write,
        has_default,
        _python_default(kind, argument.default_value) if has_default else None,
    )


def _python_default(kind: str, value: Any) -> Any:
    """Convert a stored default to the value that the kernel receives, such as an int to a dtype."""
    if kind.startswith("Optional["):
        kind = kind[len("Optional[") : -1]
    if kind.startswith("List[") and isinstance(value, list):
        return [_python_default(kind[len("List[") : -1], item) for item in value]
    if kind == "Device" and isinstance(value, str):
        return dispatch.device(value)  # PyTorch does not convert the default of a `Device?`
    enumeration = schemas.enumeration(kind)
    return enumeration.get(value, value) if enumeration and value is not None else value
