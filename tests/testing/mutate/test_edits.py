"""edits: which changes there are of a function's text, and what stays as it is."""

from __future__ import annotations

import ast
import textwrap

import pytest

from torchop.testing._mutate.edits import edits_of


def changed(source: str, role: str = "kernel") -> dict[str, str]:
    """The line that is different after each change of `def f`, by what the change is called."""
    text = textwrap.dedent(source).strip().encode()
    (function,) = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef))
    found = {}
    for edit in edits_of(text, function, role):
        after = edit.apply(text)
        ast.parse(after)
        lines = zip(text.splitlines(), after.splitlines(), strict=True)
        (line,) = [new.decode().strip() for old, new in lines if old != new]
        found[edit.what] = line
    return found


@pytest.mark.parametrize(
    ("line", "what", "expected"),
    [
        ("return x + y", "+ to -", "return x - y"),
        ("return x @ y * z", "* to /", "return x @ y / z"),
        ("x += 1", "statement left out", "pass"),
        ("x += 1", "+ to -", "x -= 1"),
        ("return x < y", "< to <=", "return x <= y"),
        ("return (x) >= (y)", ">= to >", "return (x) > (y)"),
        ("return x == y", "== to !=", "return x != y"),
        ("return x and y", "and to or", "return x or y"),
        ("return x.sum(-1)", "-1 to 0", "return x.sum(0)"),
        ("return x.sum(-2)", "-2 to -1", "return x.sum(-1)"),
        ("return x.size(1)", "1 to 2", "return x.size(2)"),
        ("return 0.5", "0.5 to 1.5", "return 1.5"),
        ("return -(x + y)", "- left out", "return (x + y)"),
        ("return not x", "not left out", "return x"),
        ("return x.sum(0, keepdim=True)", "True to False", "return x.sum(0, keepdim=False)"),
        ("return x.sum(0, keepdim=True)", "keepdim= left out", "return x.sum(0)"),
        ("return x.sum(0)", "sum to mean", "return x.mean(0)"),
        ("return x.contiguous() + é", ".contiguous() left out", "return x + é"),
        ("return (x * y).sum_to_size(z)", ".sum_to_size() left out", "return (x * y)"),
        ("return g(x, y)", "arguments swapped", "return g(y, x)"),
        ("return x.new_empty(s, dtype=d)", "dtype= left out", "return x.new_empty(s)"),
        ("return h(dtype=d, out=o)", "dtype= left out", "return h(out=o)"),
        ("out[0] = x", "statement left out", "pass"),
        ("ctx.k = x", "statement left out", "pass"),
        ("x.mul_(y)", "statement left out", "pass"),
        ("return x if y else z", "condition always true", "return x if True else z"),
        ("return x if y else z", "condition always false", "return x if False else z"),
        ("return x, y", "results swapped", "return y, x"),
    ],
)
def test_each_kind_of_change(line: str, what: str, expected: str) -> None:
    assert changed(f"def f(x, y):\n    {line}")[what] == expected


def test_returned_gradients_become_none_and_zero_in_a_formula_alone() -> None:
    source = "def f(ctx, grad):\n    return grad * ctx.k, None"
    assert changed(source, "backward") == {
        "* to /": "return grad / ctx.k, None",
        "results swapped": "return None, grad * ctx.k",
        "gradient None": "return None, None",
        "gradient zero": "return 0 * (grad * ctx.k), None",
    }
    assert "gradient None" not in changed(source)


def test_messages_docstrings_and_annotations_stay() -> None:
    source = '''
    def f(x: int = 1 + 1) -> "1 < 2":
        """1 + 1"""
        y: list[1] = x
        if x:
            raise ValueError("wrong " + f"{x + 1}")
        assert x < 2
        return isinstance(x, y)
    '''
    assert set(changed(source)) == {"condition always true", "condition always false"}


def test_a_loop_is_not_made_endless() -> None:
    assert "condition always true" not in changed("def f(x):\n    while x: x -= 1\n    return x")
