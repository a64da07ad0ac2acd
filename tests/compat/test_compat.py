"""Private names of PyTorch appear only in `_compat`, which imports almost nothing from torchop.

Uses private names.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchop
from torchop import _compat

SOURCES = Path(torchop.__file__).parent
PACKAGE = Path(_compat.__file__).parent
# `_compat` may import only these modules of torchop: `_errors` for its exceptions, and the package
# itself for `torchop._hooks`.
OURS = {"torchop", "torchop._errors"}


def is_private(name: str) -> bool:
    return any(re.match(r"_(?!_)", part) for part in name.split("."))


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yield the private names of PyTorch that a module uses.

    The module may import a name, read it as an attribute of `torch`, or look it up by a string.
    """
    for node in ast.walk(tree):
        found = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            found = [ast.unparse(node)]
        elif isinstance(node, ast.Constant):
            found = [str(node.value)]
        for name in found:
            if re.fullmatch(r"torch(\.\w+)+", name) and is_private(name):
                yield name


def imported_modules(tree: ast.AST) -> set[str]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    plain = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    return {name for name in (*plain, *(n.module or "" for n in nodes)) if "torchop" in name}


def parsed(path: Path) -> ast.AST:
    return ast.parse(path.read_text())


def test_private_names_appear_only_in_compat() -> None:
    elsewhere = {
        f"{path.relative_to(SOURCES)}: {name}"
        for path in SOURCES.rglob("*.py")
        if PACKAGE not in path.parents
        for name in private_names(parsed(path))
    }
    assert elsewhere == set()


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "importlib.import_module('torch._dynamo')",
        "from torch._C import DispatchKey",
        "from torch.utils import _pytree",
        "torch.utils._pytree.tree_map(f, x)",
        "def f():\n    return torch._C._dispatch_keys",
    ],
)
def test_private_name_is_found(source: str) -> None:
    assert list(private_names(ast.parse(source))) != []


@pytest.mark.parametrize(
    "source", ["torch.__version__", "import torch.utils.data", "from torchop._errors import warn"]
)
def test_other_names_are_public(source: str) -> None:
    assert list(private_names(ast.parse(source))) == []


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_compat_file_imports_nothing_of_torchop(path: Path) -> None:
    modules = imported_modules(parsed(path))
    assert {name for name in modules if not name.startswith("torchop._compat")} <= OURS


def test_compat_package_exports_nothing() -> None:
    assert len(ast.parse((PACKAGE / "__init__.py").read_text()).body) == 1
