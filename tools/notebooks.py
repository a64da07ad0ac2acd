"""Run the notebooks of `examples/notebooks`, and store their outputs.

    python tools/notebooks.py

`tests/project/test_notebooks.py` calls `run` and compares the outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"


@contextmanager
def kernel() -> Iterator[NotebookClient]:
    """Start one Jupyter kernel for all notebooks, because importing PyTorch is slow."""
    empty = nbformat.v4.new_notebook()
    client = NotebookClient(empty, kernel_name="python3", timeout=300, record_timing=False)
    client.create_kernel_manager().transport = "ipc"  # not readable by other users, unlike TCP
    with client.setup_kernel():
        yield client


def run(path: Path, client: NotebookClient) -> nbformat.NotebookNode:
    """Execute a notebook, and return it with the new outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    notebook = nbformat.read(path, as_version=4)
    # Delete the variables of the previous notebook, because it ran in the same kernel.
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
    client.nb = notebook
    client.execute(cleanup_kc=False)
    del notebook.cells[0]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.execution_count = None  # otherwise each run would change the file
            for output in cell.outputs:
                if "execution_count" in output:
                    output["execution_count"] = None
    return notebook


def main() -> None:
    with kernel() as client:
        for path in sorted(FOLDER.glob("*.ipynb")):
            notebook = run(path, client)
            nbformat.write(notebook, path)
            print(f"{path.name}: {path.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main()
