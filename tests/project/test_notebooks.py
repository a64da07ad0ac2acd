"""The notebooks run in Jupyter, and their outputs equal the stored ones."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests._support.common import load_tool, without_notes_of_pytorch

for package in ("ipykernel", "nbclient", "nbformat"):
    pytest.importorskip(package, reason=f"{package} is not installed")

pytestmark = pytest.mark.project

PICTURE = "image/jpeg"


notebooks = load_tool("notebooks")
NOTEBOOKS = sorted(notebooks.FOLDER.glob("*.ipynb"))


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with notebooks.kernel() as client:
        yield client


def shown(notebook: Any) -> list[tuple[str, list[list[str]]]]:
    """Return the text output of each cell, and the MIME types of its other results."""
    return [
        (
            # Join the outputs, because Jupyter may split the text that a cell prints.
            without_notes_of_pytorch("".join(out.get("text", "") for out in cell.outputs)),
            [sorted(output.data) for output in cell.outputs if "data" in output],
        )
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def pictures(notebook: Any) -> list[Image.Image]:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    texts = [output.data[PICTURE] for output in outputs if PICTURE in output.get("data", {})]
    return [Image.open(io.BytesIO(base64.b64decode(text))).convert("L") for text in texts]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_reproduces_its_stored_outputs(path: Path, client: Any) -> None:
    stored = notebooks.nbformat.read(path, as_version=4)
    notebooks.nbformat.validate(stored)
    run = notebooks.run(path, client)
    assert shown(run) == shown(stored)
    assert len(pictures(stored)) >= 3
    for now, before in zip(pictures(run), pictures(stored), strict=True):
        # Compare the pictures coarsely, because releases of matplotlib differ in a few pixels.
        assert now.resize((8, 8)).tobytes() == pytest.approx(
            before.resize((8, 8)).tobytes(), abs=12
        )
    assert path.stat().st_size < 150_000


def test_all_notebooks_exist() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["contracts", "crop_and_paste", "libraries"]


def test_cell_that_raises_fails(tmp_path: Path, client: Any) -> None:
    cell = notebooks.nbformat.v4.new_code_cell("photo")  # only another notebook defines `photo`
    path = tmp_path / "wrong.ipynb"
    notebooks.nbformat.write(notebooks.nbformat.v4.new_notebook(cells=[cell]), path)
    with pytest.raises(Exception, match="NameError"):
        notebooks.run(path, client)
