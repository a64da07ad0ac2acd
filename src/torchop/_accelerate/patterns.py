"""Match operator names with patterns, and explain why a pattern matches nothing."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import TypeVar

from torchop._compat import operators
from torchop._core.registry import own_definition
from torchop._schema import naming
from torchop.extend import OpName, short_repr, short_text

Value = TypeVar("Value")

# Namespaces that PyTorch and torchop use internally. Wildcards such as "*" do not match them.
_INTERNAL = naming.RESERVED_NAMESPACES | {"rngprims", "torchop", "_torchop_results"}


def check_patterns(caller: str, patterns: tuple[str, ...]) -> None:
    """Raise if `patterns` is empty or holds an invalid pattern. Messages start with `caller`."""
    if not patterns:
        raise ValueError(
            f'{caller}() got no pattern; name the operators, such as {caller}("mylib::*"), or '
            f'{caller}("*") for all.'
        )
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                f"{caller} expects patterns of operator names, such as 'mylib::*', got "
                f"{type(pattern).__name__}: {short_repr(pattern)}.{_instead_of(caller, pattern)}"
            )
        if not naming.is_pattern(pattern):
            # This may be a name in PyTorch's notation, such as torch.ops.mylib.crop, so suggest the
            # pattern that corresponds to it.
            namespace, *name = re.split("[.:]", pattern.removeprefix("torch.ops."), maxsplit=1)
            meant = f"{namespace or 'mylib'}::{''.join(name) or '*'}"
            raise ValueError(
                f"{caller}({short_repr(pattern)}): no operator name can match that, because "
                f"names have the form namespace::name. Write {short_repr(meant)}"
                + (" for a whole namespace." if meant.endswith("*") else ".")
            )


def is_match(name: OpName, pattern: str) -> bool:
    # A pattern matches operators in an internal namespace only if it starts with the namespace.
    if name.namespace in _INTERNAL and not pattern.startswith(name.namespace):
        return False
    if not naming.is_match(name, pattern):
        return False
    return naming.is_name(name, pattern) or not _is_helper(name)


def _is_helper(name: OpName) -> bool:
    definition = own_definition(None, name)
    return definition is not None and definition.declaration.is_helper


def value_for(name: OpName, by_pattern: Mapping[str, Value]) -> Value | None:
    return next((value for key, value in by_pattern.items() if is_match(name, key)), None)


def why_nothing_matches(caller: str, pattern: str) -> str | None:
    names = defined_names()

    def holds_match(names: Iterable[OpName]) -> bool:
        return any(is_match(name, pattern) for name in names)

    # Call `all_names` last, because it is slow.
    if pattern == "*" or holds_match(names) or holds_match(all_names()):
        return None
    hint = _nearest(pattern, names)
    return f"{caller}({short_repr(pattern)}): no registered operator matches{hint}."


def why_nothing_to_accelerate(patterns: tuple[str, ...]) -> Iterator[str]:
    """Yield a warning for each pattern that is probably a mistake.

    A pattern for an unknown namespace may be meant for a package that is imported later, so it is
    only reported if a registered namespace has a similar name.
    """
    names, matching = defined_names(), []
    for pattern in patterns:
        if (problem := why_nothing_matches("accelerate", pattern)) is None:
            matching.append(pattern)
            continue
        namespace = f"{pattern.partition('::')[0]}::"
        is_known = any(name.startswith(namespace) for name in operators.all_operators())
        if is_known or _nearest(pattern, names):
            yield f"{problem} Operators that are registered later will be accelerated."
    if "*" in matching or any(is_match(name, each) for each in matching for name in names):
        return
    if matching:
        of_cpp = all_names()
        count = sum(any(is_match(name, each) for each in matching) for name in of_cpp)
        shown = short_text(", ".join(map(repr, matching)))
        yield (
            f"accelerate({shown}) accelerates nothing, because all {count} matching operators "
            "were defined in C++."
        )


def all_names() -> Iterator[OpName]:
    return map(OpName.parse, operators.all_operators())


def defined_names() -> set[OpName]:
    return set(map(OpName.parse, operators.defined_in_python()))


def _instead_of(caller: str, value: object) -> str:
    if isinstance(value, ModuleType):
        return (
            " A module does not list the operators that it calls: record them with "
            f"torchop.record({value.__name__}) and call accelerate(*recorded), or pass the "
            "namespace of the package."
        )
    if isinstance(value, list | tuple | set | Mapping):
        return f" To pass several names, unpack them: {caller}(*names)."
    return ""


def _nearest(pattern: str, names: set[OpName]) -> str:
    meant = pattern.strip("^$").replace(".*", "*")
    is_meant = meant != pattern and any(is_match(name, meant) for name in all_names())
    if is_meant or not set("^$|()+{}\\").isdisjoint(pattern):
        example = repr(meant) if is_meant else "'mylib::*' or 'mylib::sca?e'"
        return f"; patterns use wildcards, not regular expressions: write {example}"
    namespace = pattern.partition("::")[0]
    namespaces = {name.namespace for name in names}
    if namespace in namespaces:
        kind, word = "names", pattern
        candidates = {str(name) for name in names if name.namespace == namespace}
    else:
        kind, word, candidates = "namespaces", namespace, namespaces
    near = difflib.get_close_matches(word, candidates, n=3, cutoff=0.5)
    return f"; the nearest {kind} are {', '.join(near)}" if near else ""
