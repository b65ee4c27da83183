#!/usr/bin/env python3
"""Executes docs/notebook.ipynb and writes its outputs into it, without times, paths and log lines of this machine.

python scripts/notebook.py
"""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parent.parent / "docs" / "notebook.ipynb"


def main() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=600, record_timing=False, coalesce_streams=True).execute()
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
