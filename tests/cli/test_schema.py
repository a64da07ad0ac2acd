from __future__ import annotations

import json

import pytest

pytest.importorskip("click")
from torchop.cli.schema import changes_between  # needs click
from torchop.extend import Schema

# For each change: the old and the new schema, the reported changes, and whether they break callers.
CHANGED = {
    "a new argument": (
        "(Tensor x) -> Tensor",
        "(Tensor x, int k=1) -> Tensor",
        ("argument 'k' is new",),
        False,
    ),
    "a new argument without a default": (
        "(Tensor x) -> Tensor",
        "(Tensor x, int k) -> Tensor",
        ("argument 'k' is new",),
        True,
    ),
    "an argument that is removed": (
        "(Tensor x, int k) -> Tensor",
        "(Tensor x) -> Tensor",
        ("argument 'k' is removed",),
        True,
    ),
    "another name": (
        "(Tensor x) -> Tensor",
        "(Tensor y) -> Tensor",
        ("argument 'x' is removed", "argument 'y' is new"),
        True,
    ),
    "another order": (
        "(Tensor x, Tensor y) -> Tensor",
        "(Tensor y, Tensor x) -> Tensor",
        ("the arguments are in another order",),
        True,
    ),
    "keyword-only": (
        "(Tensor x, int k) -> Tensor",
        "(Tensor x, *, int k) -> Tensor",
        ("argument 'k': int k before, int k, keyword-only now",),
        True,
    ),
    "another default": (
        "(Tensor x, int k=1) -> Tensor",
        "(Tensor x, int k=2) -> Tensor",
        ("argument 'k': int k=1 before, int k=2 now",),
        True,
    ),
    "a wider type": (
        "(Tensor x) -> Tensor",
        "(Tensor? x) -> Tensor",
        ("argument 'x': Tensor x before, Tensor? x now",),
        False,
    ),
    "a list of another size": (
        "(Tensor x, int[2] k) -> Tensor",
        "(Tensor x, int[3] k) -> Tensor",
        ("argument 'k': int[2] k before, int[3] k now",),
        True,
    ),
    "a write, and another result": (
        "(Tensor x) -> Tensor",
        "(Tensor(a!) x) -> ()",
        ("argument 'x': Tensor x before, Tensor(a!) x now", "results: Tensor before, () now"),
        True,
    ),
    "a new argument in front of out": (
        "(Tensor x, *, Tensor(a!) out) -> Tensor(a!)",
        "(Tensor x, *, int k=2, Tensor(a!) out) -> Tensor(a!)",
        ("argument 'k' is new",),
        False,
    ),
    "names of results, of which PyTorch is strict": (
        "(Tensor x) -> Tensor a",
        "(Tensor x) -> Tensor b",
        ("results: Tensor a before, Tensor b now",),
        True,
    ),
}


@pytest.mark.parametrize(("old", "new", "differences", "breaks"), CHANGED.values(), ids=CHANGED)
def test_a_change_is_reported_with_the_verdict_of_pytorch(old, new, differences, breaks):
    before, after = ({"ns::f": Schema.parse(f"ns::f{text}")} for text in (old, new))
    (change,) = changes_between(before, after)
    assert (change.kind, change.differences, change.breaks) == ("changed", differences, breaks)


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
        f"{namespace}::changed.two: changed, and breaks exported programs and callers",
        f"  - {namespace}::changed.two(Tensor x, int k=1) -> Tensor",
        f"  + {namespace}::changed.two(Tensor x, int k=2) -> Tensor",
        "    argument 'k': int k=1 before, int k=2 now",
        "operators: 0 removed, 1 changed, 1 added; 1 of these break existing programs",
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
