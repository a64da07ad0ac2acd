"""With torchop.sphinx, `automodule` documents the operators of a module as functions."""

from __future__ import annotations

import io
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils

import torchop
from tests._support.common import close_operators

# Ignore a warning that Sphinx's extension napoleon causes.
pytestmark = pytest.mark.filterwarnings("ignore:The mapping interface for autodoc options")

MODULE = '''
"""Kernels."""

import torch
import torchop
from torch import Tensor


@torchop.custom_op("sphinx_kernels::shift", mutates_args=(), device_types="cpu")
def shift(x: Tensor, by: float = 1.0) -> Tensor:
    """Adds a number to each element.

    Args:
        x: any tensor.
        by: what to add.
    """
    return x + by


shift.register_fake(lambda x, by: x.new_empty(x.shape))
shift.register_examples(lambda: [(torch.ones(2),)])


@torchop.operator("sphinx_kernels::double")
class double:
    """Doubles each element."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x


@torchop.out_op("sphinx_kernels::cube", like="x")
def cube(x: Tensor, *, out: Tensor) -> None:
    """The third power of each element."""
    out.copy_(x**3)


def plain(x: Tensor) -> Tensor:
    """No operator."""
    return x
'''

PAGE = """
Kernels
=======

.. automodule:: sphinx_kernels
   :members:

.. autofunction:: sphinx_kernels.shift
   :no-index:
"""

SHIFT = """\
sphinx_kernels.shift(x: Tensor, by: float = 1.0) -> Tensor

   Adds a number to each element.

   Parameters:
      * **x** -- any tensor.

      * **by** -- what to add.

   Schema:
      "sphinx_kernels::shift(Tensor x, float by=1.) -> Tensor"

   Kernels:
      cpu

   Rules:
      fake; examples
"""


def build(folder: Path, configuration: str = "", extension: str = "torchop.sphinx") -> str:
    """Build the documentation of the module, and return the page as text."""
    (folder / "conf.py").write_text(
        f"extensions = ['sphinx.ext.autodoc', 'sphinx.ext.napoleon', {extension!r}]\n"
        + configuration
    )
    (folder / "index.rst").write_text(PAGE)
    warnings = io.StringIO()
    with patch_docutils(), docutils_namespace():
        app = Sphinx(
            folder, folder, folder / "out", folder / "trees", "text", status=None, warning=warnings
        )
        app.build(force_all=True)
    assert not warnings.getvalue()
    return (folder / "out" / "index.txt").read_text(encoding="utf-8")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "sphinx_kernels.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    module = sys.modules.pop("sphinx_kernels", None)
    if module is not None:
        cube = vars(module)["cube"]
        close_operators({**vars(module), "functional": cube.functional, "out": cube.out})


@pytest.mark.parametrize(
    "configuration", ["", "autodoc_use_legacy_class_based = True"], ids=["autodoc", "legacy"]
)
def test_operators_are_documented_as_functions(package: Path, configuration: str) -> None:
    text = build(package, configuration)
    assert text.count(SHIFT) == 2, text  # automodule and autofunction each list it
    assert 'Schema:\n      "sphinx_kernels::double(Tensor x) -> Tensor"' in text
    assert "cube(x: Tensor, *, out: Tensor | None = None) -> Tensor" in text
    assert '"sphinx_kernels::cube.out(Tensor x, *, Tensor(' in text
    assert "Schema" not in text[text.index("sphinx_kernels.plain") : text.index("No operator")]
    # Building the documentation must not change the module.
    module = sys.modules["sphinx_kernels"]
    assert isinstance(module.shift, torchop.CustomOp)
    assert isinstance(module.cube, torchop.OperatorFamily)


def test_automodule_skips_operators_without_the_extension(package: Path) -> None:
    text = build(package, extension="sphinx.ext.autosectionlabel")
    assert text.count("sphinx_kernels.shift(") == 1  # only autofunction lists it
    assert "Schema" not in text


def test_autodoc_reports_a_module_that_fails_to_import(package: Path) -> None:
    (package / "sphinx_kernels.py").write_text("raise RuntimeError('no driver')\n")
    with pytest.raises(AssertionError, match=r"failed to import[\s\S]*no driver"):
        build(package)
