"""Split the text of a schema into its parts, and put parts together into schemas.

In compiled graphs, helper operators replace some operators. The schemas of helper operators are
derived from the text that the author wrote. Deriving them from `str(schema)` would not work, since
PyTorch does not escape string defaults correctly in it, so its parser would reject the result.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from string import ascii_lowercase

_ALIAS = re.compile(r"(?<=Tensor)\([^()]*\)")
_WRITE = re.compile(r"(?<=Tensor)\(\w+!\)")


def arguments_of(schema: str) -> list[str]:
    """Return the text of each argument of a schema, such as `Tensor x`, `int n=1` or `*`."""
    return _pieces(schema[schema.index("(") + 1 : _end_of_arguments(schema)])


def arguments_alone(schema: str) -> list[str]:
    return [argument for argument in arguments_of(schema) if argument != "*"]


def results_of(schema: str) -> list[str]:
    """Return the text of each result of a schema, such as `Tensor` or `Tensor[]`."""
    results = schema[_end_of_arguments(schema) + 1 :].partition("->")[2].strip()
    return _pieces(results[1:-1]) if results.startswith("(") else [results]


def _end_of_arguments(schema: str) -> int:
    return next(position for position, character in _outside_brackets(schema) if character == ")")


def _pieces(text: str) -> list[str]:
    commas = [position for position, character in _outside_brackets(text) if character == ","]
    ends = zip([-1, *commas], [*commas, len(text)], strict=True)
    pieces = (text[before + 1 : end].strip() for before, end in ends)
    return [piece for piece in pieces if piece]


def _outside_brackets(text: str) -> Iterator[tuple[int, str]]:
    """Yield (position, character) for each character outside of brackets and strings.

    The closing bracket of each outermost pair counts as outside, but the opening one does not.
    """
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
    """Join arguments and results (formatted by `write_results`) into a schema without a name."""
    return f"({', '.join(arguments)}) -> {results}"


def with_keyword_only(arguments: Sequence[str], added: Sequence[str]) -> list[str]:
    """Append keyword-only arguments to the arguments of a schema."""
    marker = ["*"] if added and "*" not in arguments else []
    return [*arguments, *marker, *added]


def write_results(results: Sequence[str]) -> str:
    if len(results) == 1 and not results[0].startswith("("):
        return results[0]
    # The parser reads `(Tensor)` as `Tensor`, so a tuple with one item must be `((Tensor))`.
    return f"({', '.join(results)})"


def numbered_alias(index: int) -> str:
    """Return the alias set name, such as `a0`, that `infer_schema` gives to an argument."""
    return f"a{index}"


def lettered_alias(index: int) -> str:
    """Return a name for an alias set in the style of native_functions.yaml, such as `a`.

    ExecuTorch looks up out= variants with torchgen, which supports only single letters.
    """
    return ascii_lowercase[index] if index < len(ascii_lowercase) else numbered_alias(index)


def written_tensor(alias: str) -> str:
    return f"Tensor({alias}!)"


def with_write(argument: str, alias: str) -> str:
    """Mark the tensors in an argument or a type as mutated by adding `(alias!)`."""
    return argument.replace("Tensor", written_tensor(alias), 1)


def without_writes(argument: str) -> str:
    return _WRITE.sub("", argument)


def without_aliases(result: str) -> str:
    return _ALIAS.sub("", result)
