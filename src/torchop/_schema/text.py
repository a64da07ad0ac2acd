"""The text of a schema: read into its parts, and written.

PyTorch prints the arguments of a schema that it parsed, but with other escapes than its parser
reads. So a schema is derived from the text of another one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from string import ascii_lowercase

_ALIAS = re.compile(r"(?<=Tensor)\([^()]*\)")
_WRITE = re.compile(r"(?<=Tensor)\(\w+!\)")


def arguments_of(schema: str) -> list[str]:
    """The arguments of a schema, such as `Tensor x` and `int n=1`, with the `*` among them."""
    return _pieces(schema[schema.index("(") + 1 : _end_of_arguments(schema)])


def arguments_alone(schema: str) -> list[str]:
    """The same without the `*`, so that each has its place in a call."""
    return [argument for argument in arguments_of(schema) if argument != "*"]


def results_of(schema: str) -> list[str]:
    """The results of a schema, such as `Tensor` and `Tensor[]`."""
    results = schema[_end_of_arguments(schema) + 1 :].partition("->")[2].strip()
    return _pieces(results[1:-1]) if results.startswith("(") else [results]


def _end_of_arguments(schema: str) -> int:
    return next(position for position, character in _outside_brackets(schema) if character == ")")


def _pieces(text: str) -> list[str]:
    """What stands between commas, those in brackets and in strings left aside."""
    commas = [position for position, character in _outside_brackets(text) if character == ","]
    ends = zip([-1, *commas], [*commas, len(text)], strict=True)
    pieces = (text[before + 1 : end].strip() for before, end in ends)
    return [piece for piece in pieces if piece]


def _outside_brackets(text: str) -> Iterator[tuple[int, str]]:
    """The characters outside of brackets and strings, and the brackets that close."""
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
    """A schema without the name, of what `arguments_of` and `write_results` return."""
    return f"({', '.join(arguments)}) -> {results}"


def write_results(results: Sequence[str]) -> str:
    """The results behind the arrow of a schema; `()` for none."""
    if len(results) == 1 and not results[0].startswith("("):
        return results[0]
    # One result in parentheses means that result itself; a tuple of one takes two pairs.
    return f"({', '.join(results)})"


def numbered_alias(index: int) -> str:
    """The name of what an argument points to, as PyTorch infers it from mutates_args."""
    return f"a{index}"


def lettered_alias(index: int) -> str:
    """The name of what an argument points to, as PyTorch writes it in schemas of its own.

    Its code generator, with which ExecuTorch finds the form of an operator that writes, reads
    single letters alone.
    """
    return ascii_lowercase[index] if index < len(ascii_lowercase) else numbered_alias(index)


def written_tensor(alias: str) -> str:
    """The type of a tensor that the operator writes into, and of a result that is this tensor."""
    return f"Tensor({alias}!)"


def with_write(argument: str, alias: str) -> str:
    """An argument or type with tensors that the operator writes into."""
    return argument.replace("Tensor", written_tensor(alias), 1)


def without_writes(argument: str) -> str:
    """An argument or type that the operator does not write into."""
    return _WRITE.sub("", argument)


def without_aliases(result: str) -> str:
    """The type of a result of which nothing says that it shares memory."""
    return _ALIAS.sub("", result)
