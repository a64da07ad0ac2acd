"""`python -m torchop stubs`: what type checkers make of calls through `torch.ops`."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

OPERATORS = """
import torch, torchop

@torchop.custom_op("NAMESPACE::scale", mutates_args=())
def scale(x: torch.Tensor, factor: float = 2.0, *, dims: list[int] | None = None) -> torch.Tensor:
    return x * factor

library = torch.library.Library("NAMESPACE", "FRAGMENT")
library.define("two(Tensor x, str s='a\\"b') -> (Tensor, int)")
library.define("two.over(Tensor[] x, ScalarType? d=None) -> ()")
library.define("method(Tensor self, int[2] k=[1, 2]) -> Tensor[]")
library.define("_op(Tensor _op, Tensor __x) -> ()")
library.define("async(Tensor x) -> ()")
"""

SAMPLE = """
import torch
from torch._ops import ops

def check(x: torch.Tensor) -> None:
    scaled = ops.NAMESPACE.scale(x, 0.5, dims=[1])
    reveal_type(ops.NAMESPACE.two.default(x, s="b"))
    reveal_type(ops.NAMESPACE.two([x]))
    reveal_type(ops.NAMESPACE.method(x))
    ops.NAMESPACE._op(x, 3)
    ops.aten.sin(x)
    ops.somebody_elses.op(x)
    ops.NAMESPACE.scale(x, "a")  # ERROR
    ops.NAMESPACE.scale(x, 1.0, [1])  # ERROR
    ops.NAMESPACE.scales(x)  # ERROR
    ops.NAMESPACE.scale.default(x, of=3.0)  # ERROR
"""


@pytest.fixture
def stubs(run, write, namespace, tmp_path):
    """A folder with stubs, and a program that uses them."""
    module = write("operators", OPERATORS)
    outcome = run("stubs", module, "-o", str(tmp_path / "stubs"))
    assert outcome.code == 0
    assert outcome.err == f"left out, because its name is not a Python name: '{namespace}::async'\n"
    assert outcome.out == f"{tmp_path}/stubs/torch-stubs/_ops.pyi\n"
    (tmp_path / "sample.py").write_text(SAMPLE.replace("NAMESPACE", namespace))
    return tmp_path


def errors(folder: Path) -> set[int]:
    lines = (folder / "sample.py").read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith("# ERROR")}


@pytest.mark.project  # a type checker that starts from nothing
def test_mypy_checks_calls(stubs):
    pytest.importorskip("mypy")
    # PyTorch itself takes minutes to check, and is another's.
    (stubs / "mypy.ini").write_text(
        "[mypy]\nfollow_imports = skip\n[mypy-torch._ops]\nfollow_imports = normal\n"
    )
    site = stubs / "env" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", stubs / "env"], check=True)
    (site / "stubs.pth").write_text(f"{stubs}/stubs\n{Path(torch.__file__).parents[1]}\n")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--output=json"),
            *("--python-executable", str(stubs / "env" / "bin" / "python"), "sample.py"),
        ],
        cwd=stubs,
        capture_output=True,
        text=True,
        check=False,
    )
    messages = [json.loads(line) for line in done.stdout.splitlines()]
    found = {m["line"]: m["message"] for m in messages if m["severity"] == "error"}
    assert found.keys() == errors(stubs), done.stdout + done.stderr
    assert 'incompatible type "str"; expected "float"' in min(found.items())[1]
    revealed = [m["message"] for m in messages if m["message"].startswith("Revealed")]
    assert 'Revealed type is "tuple[Any, int]"' in revealed[0]  # of PyTorch's types it knows none


@pytest.mark.project
def test_pyright_checks_calls(stubs):
    pytest.importorskip("basedpyright")
    config = {"typeCheckingMode": "standard", "include": ["sample.py"], "extraPaths": ["stubs"]}
    (stubs / "pyrightconfig.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable],
        cwd=stubs,
        capture_output=True,
        text=True,
        check=False,
    )
    messages = json.loads(done.stdout)["generalDiagnostics"]
    found = {m["range"]["start"]["line"] + 1 for m in messages if m["severity"] == "error"}
    assert found == errors(stubs), messages
    types = [m["message"].rpartition(" is ")[2] for m in messages if "Type of" in m["message"]]
    assert types == ['"tuple[Tensor, int]"', '"None"', '"list[Tensor]"']


def test_only_names_reach_the_source(stubs, namespace):
    text = (stubs / "stubs" / "torch-stubs" / "_ops.pyi").read_text()
    assert (stubs / "stubs" / "torch-stubs" / "py.typed").read_text() == "partial\n"
    classes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    assert "OpOverloadPacket" in classes  # all that PyTorch has there
    # Nothing but attributes and calls: no default or docstring ends early.
    ours = [node for name, node in classes.items() if name.startswith("_Packet")]
    assert len(ours) == 9
    for node in ours:
        assert {type(part) for part in node.body} <= {ast.AnnAssign, ast.FunctionDef}
        docs = [ast.get_docstring(part) for part in node.body if isinstance(part, ast.FunctionDef)]
        assert all(doc.startswith(f"{namespace}::") for doc in docs)
    assert "k: _Sequence[int] = ...)" in text
    assert "(self, /, *args: Any, **kwargs: Any) -> None" in text  # `__x` is no parameter
