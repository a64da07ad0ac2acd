"""`python -m torchop schema dump` and `compare`."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("click")
from torchop.cli.schema import changes_between  # it needs click
from torchop.extend import Schema

BREAKING = {
    "a new argument without a default": (
        "(Tensor x) -> Tensor",
        "(Tensor x, int k) -> Tensor",
        "argument 'k' is new, without a default: calls without it fail",
    ),
    "a new argument in front": (
        "(Tensor x, int k=1) -> Tensor",
        "(Tensor x, int j=0, int k=1) -> Tensor",
        "argument 'j' is new, and stands before older ones: put it after them",
    ),
    "an argument that is gone": (
        "(Tensor x, int k) -> Tensor",
        "(Tensor x) -> Tensor",
        "argument 'k' is gone: calls that pass it fail",
    ),
    "another name": (
        "(Tensor x) -> Tensor",
        "(Tensor y) -> Tensor",
        "argument 'x' is called 'y' now: calls that name it fail",
    ),
    "another order": (
        "(Tensor x, Tensor y) -> Tensor",
        "(Tensor y, Tensor x) -> Tensor",
        "the arguments are in another order: those passed by position move",
    ),
    "keyword-only": (
        "(Tensor x, int k) -> Tensor",
        "(Tensor x, *, int k) -> Tensor",
        "argument 'k' is keyword-only now: calls that pass it by position fail",
    ),
    "no default": (
        "(Tensor x, int k=1) -> Tensor",
        "(Tensor x, int k) -> Tensor",
        "argument 'k' has no default any more: calls without it fail",
    ),
    "another default": (
        "(Tensor x, int k=1) -> Tensor",
        "(Tensor x, int k=2) -> Tensor",
        "argument 'k' is 2 by default, and was 1: calls without it, which exported programs hold "
        "too, mean something else",
    ),
    "a narrower type": (
        "(Tensor? x) -> Tensor",
        "(Tensor x) -> Tensor",
        "argument 'x' is of type Tensor, and was of type Tensor?",
    ),
    "a list without a size": (
        "(Tensor x, int[2] k) -> Tensor",
        "(Tensor x, int[] k) -> Tensor",
        "argument 'k' is of type int[], and was of type int[2]: calls that pass one number for the "
        "whole list fail",
    ),
    "a list of another size": (
        "(Tensor x, int[2] k) -> Tensor",
        "(Tensor x, int[3] k) -> Tensor",
        "argument 'k' is of type int[3], and was of type int[2]",
    ),
    "a write": (
        "(Tensor x) -> Tensor",
        "(Tensor(a!) x) -> Tensor",
        "argument 'x' is written now: the tensors of callers change",
    ),
    "no write": (
        "(Tensor(a!) x) -> ()",
        "(Tensor x) -> ()",
        "argument 'x' is not written any more: callers read what was there before",
    ),
    "another result": (
        "(Tensor x) -> Tensor",
        "(Tensor x) -> (Tensor, Tensor)",
        "it returns Tensor, Tensor, and returned Tensor",
    ),
    "an alias": (
        "(Tensor(a) x) -> Tensor",
        "(Tensor(a) x) -> Tensor(a)",
        "it returns Tensor(a), and returned Tensor",
    ),
}
HARMLESS = {
    "a new argument with a default": (
        "(Tensor x) -> Tensor",
        "(Tensor x, int k=1) -> Tensor",
        "argument 'k' is new; calls without it get 1",
    ),
    "a default": (
        "(Tensor x, int k) -> Tensor",
        "(Tensor x, int k=3) -> Tensor",
        "argument 'k' may be left out now, and is 3 then",
    ),
    "a wider type": (
        "(Tensor x) -> Tensor",
        "(Tensor? x) -> Tensor",
        "argument 'x' is of type Tensor?, and was of type Tensor",
    ),
    "a number that was a symbol": (
        "(Tensor x, SymInt k) -> Tensor",
        "(Tensor x, int k) -> Tensor",
        "argument 'k' is of type int, and was of type SymInt: compilers make a graph for one value "
        "of it, so a dynamic size that is passed there becomes fixed",
    ),
    "a symbol that was a number": (
        "(Tensor x, int[2] k) -> Tensor",
        "(Tensor x, SymInt[2] k) -> Tensor",
        "argument 'k' is of type SymInt[2], and was of type int[2]",
    ),
    "a new argument in front of out": (
        "(Tensor x, *, Tensor(a!) out) -> Tensor(a!)",
        "(Tensor x, *, int k=2, Tensor(a!) out) -> Tensor(a!)",
        "argument 'k' is new; calls without it get 2",
    ),
    "by position": (
        "(Tensor x, *, int k) -> Tensor",
        "(Tensor x, int k) -> Tensor",
        "argument 'k' may be passed by position now",
    ),
}


def change_of(old, new):
    before, after = ({"ns::f": Schema.parse(f"ns::f{text}")} for text in (old, new))
    (change,) = changes_between(before, after)
    return change


@pytest.mark.parametrize(("old", "new", "message"), BREAKING.values(), ids=BREAKING)
def test_what_breaks_is_told(old, new, message):
    change = change_of(old, new)
    assert (change.kind, change.breaks, change.notes) == ("changed", (message,), ())


@pytest.mark.parametrize(("old", "new", "message"), HARMLESS.values(), ids=HARMLESS)
def test_what_breaks_nothing_is_told(old, new, message):
    change = change_of(old, new)
    assert (change.kind, change.breaks, change.notes) == ("changed", (), (message,))


def test_what_is_harmless_beside_what_breaks():
    change = change_of("(Tensor x, int k) -> Tensor", "(Tensor x, int k=1, int j=2) -> ()")
    assert change.breaks == ("it returns nothing, and returned Tensor",)
    assert len(change.notes) == 2


def test_only_pytorch_decides():
    # Names of results, of which PyTorch is strict.
    change = change_of("(Tensor x) -> Tensor a", "(Tensor x) -> Tensor b")
    assert change.breaks == ("it returns Tensor b, and returned Tensor a",)


OPERATORS = """
import torch
library = torch.library.Library("NAMESPACE", "FRAGMENT")
library.define("kept(Tensor x, str mode='a\\"b') -> Tensor")
library.define("changed.two(Tensor x, int k=1) -> Tensor")
library.define("removed(Tensor x) -> Tensor")
"""


def test_files_are_written_and_compared(run, write, namespace, tmp_path):
    module = write("operators", OPERATORS)
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    assert run("schema", "dump", module, "-o", str(old)).code == 0
    text = run("schema", "dump", f"{namespace}::*", "--import", module).out
    assert text == old.read_text()
    assert run("schema", "compare", str(old), str(old)).out.startswith("operators: 0 removed, 0 ch")
    values = json.loads(text)
    assert set(values["versions"]) == {"torchop", "torch"}
    table = values["schemas"]
    del table[f"{namespace}::removed"]
    table[f"{namespace}::added"] = f"{namespace}::added(Tensor x) -> Tensor"
    new.write_text(json.dumps(values))
    outcome = run("schema", "compare", str(new), str(old))
    assert outcome.code == 1
    table[f"{namespace}::removed"] = f"{namespace}::removed(Tensor x) -> Tensor"
    table[f"{namespace}::changed.two"] = f"{namespace}::changed.two(Tensor x, int k=2) -> Tensor"
    new.write_text(json.dumps(values))
    outcome = run("schema", "compare", str(old), str(new))
    assert outcome.code == 1
    assert outcome.out.splitlines() == [
        f"{namespace}::added: added",
        f"  + {namespace}::added(Tensor x) -> Tensor",
        f"{namespace}::changed.two: changed, which breaks exported programs and callers",
        f"  - {namespace}::changed.two(Tensor x, int k=1) -> Tensor",
        f"  + {namespace}::changed.two(Tensor x, int k=2) -> Tensor",
        "    argument 'k' is 2 by default, and was 1: calls without it, which exported programs "
        "hold too, mean something else",
        "operators: 0 removed, 1 changed, 1 added; 1 of these break what was written before",
    ]
    (added, changed) = json.loads(run("schema", "compare", str(old), str(new), "--json").out)
    assert (added["kind"], changed["kind"]) == ("added", "changed")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": 2, "schemas": {}}',
        '{"format": 1, "schemas": {"a::f": "f("}}',
        '{"format": 1, "schemas": {"a::f": "a::g() -> ()"}}',
        '{"format": 1, "schemas": {"f": 3}}',
    ],
)
def test_other_files_are_refused(run, tmp_path, text):
    path = tmp_path / "file.json"
    path.write_text(text)
    outcome = run("schema", "compare", str(path), str(path))
    assert outcome.code == 1
    assert f"{path} is not a file of `schema dump`: " in outcome.err
