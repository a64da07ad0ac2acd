"""Split the text of a schema into parts, and write schemas from parts.

Schemas are derived from text, because `str()` of a parsed schema does not parse again: PyTorch
prints other escapes in string defaults than the parser reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from string import ascii_lowercase

_ALIAS = re.compile(r"(?<=Tensor)\([^()]*\)")
_WRITE = re.compile(r"(?<=Tensor)\(\w+!\)")


def arguments_of(schema: str) -> list[str]:
    """Return the arguments of a schema, such as `Tensor x` and `int n=1`, including `*`."""
    return _pieces(schema[schema.index("(") + 1 : _end_of_arguments(schema)])


def arguments_alone(schema: str) -> list[str]:
    """Return the arguments of a schema without `*`: indices are argument positions."""
    return [argument for argument in arguments_of(schema) if argument != "*"]


def results_of(schema: str) -> list[str]:
    """Return the results of a schema, such as `Tensor` and `Tensor[]`."""
    results = schema[_end_of_arguments(schema) + 1 :].partition("->")[2].strip()
    return _pieces(results[1:-1]) if results.startswith("(") else [results]


def _end_of_arguments(schema: str) -> int:
    return next(position for position, character in _outside_brackets(schema) if character == ")")


def _pieces(text: str) -> list[str]:
    """Split at commas, except inside brackets and strings."""
    commas = [position for position, character in _outside_brackets(text) if character == ","]
    ends = zip([-1, *commas], [*commas, len(text)], strict=True)
    pieces = (text[before + 1 : end].strip() for before, end in ends)
    return [piece for piece in pieces if piece]


def _outside_brackets(text: str) -> Iterator[tuple[int, str]]:
    """Yield the characters outside brackets and strings, and outermost closing brackets."""
    depth, quote, escaped = 0, "", False
    for position, character in enumerate(text):
        if quote:
            if character == quote and not escaped:
                quote = ""
            escaped = character == "\\" and not escaped
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "([") - (character in ")]")
            if depth == 0:
                yield position, character


def write(arguments: Iterable[str], results: str) -> str:
    """Write a schema without a name. `results` comes from `write_results`."""
    return f"({', '.join(arguments)}) -> {results}"


def write_results(results: Sequence[str]) -> str:
    """Write the results of a schema; `()` for none."""
    if len(results) == 1 and not results[0].startswith("("):
        return results[0]
    # The parser reads `(Tensor)` as `Tensor`; a tuple of one is `((Tensor))`.
    return f"({', '.join(results)})"


def numbered_alias(index: int) -> str:
    """Return an alias set name as PyTorch infers it from `mutates_args`."""
    return f"a{index}"


def lettered_alias(index: int) -> str:
    """Return an alias set name as in native_functions.yaml.

    ExecuTorch finds out= variants by torchgen, and torchgen only parses single letters.
    """
    return ascii_lowercase[index] if index < len(ascii_lowercase) else numbered_alias(index)


def written_tensor(alias: str) -> str:
    """Return the type of a mutated tensor, or of a result that aliases it."""
    return f"Tensor({alias}!)"


def with_write(argument: str, alias: str) -> str:
    """Mark the tensors of an argument or type as mutated."""
    return argument.replace("Tensor", written_tensor(alias), 1)


def without_writes(argument: str) -> str:
    """Remove the mutation marks from an argument or type."""
    return _WRITE.sub("", argument)


def without_aliases(result: str) -> str:
    """Remove the aliases from a result type."""
    return _ALIAS.sub("", result)
