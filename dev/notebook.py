"""Make a notebook from its Markdown source and run it from top to bottom. Warnings on stderr are left out.

python dev/notebook.py examples/notebook.md
"""

import sys
import tempfile
from pathlib import Path

import jupytext
from nbclient import NotebookClient


def main(source: str) -> None:
    """Write the notebook beside its source."""
    notebook = jupytext.read(source)
    del notebook.metadata["jupytext"]
    with tempfile.TemporaryDirectory() as scratch:
        NotebookClient(notebook, resources={"metadata": {"path": scratch}}).execute()
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
        cell["metadata"] = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    jupytext.write(notebook, Path(source).with_suffix(".ipynb"), fmt="ipynb")


if __name__ == "__main__":
    main(sys.argv[1])
