"""Executes the notebook of the documentation. Its kernel survives a killed rank, and its outputs in the repository are
those of its cells.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import DOCS

nbformat = pytest.importorskip("nbformat", reason="pip install nbclient ipykernel")
nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
NOTEBOOK = DOCS / "notebook.ipynb"
KILLED_RANK = """
%env FRONTIER_LLM_FAILPOINTS=train.step@1#2=kill
lost = run.with_({"train.run_dir": f"{folder}/lost"})
try:
    frontier_llm.train(lost, show_progress=False)
except frontier_llm.RankFailure as failure:
    print(failure.why)
"""


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell: Any) -> list[object]:
    """Return the media types and streams of a cell's outputs. Log lines (stderr) are left out."""
    outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return [sorted(output.data) if "data" in output else output.get("name") for output in outputs]


def test_the_outputs_in_the_repository_name_no_machine() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    cells = code_cells(nbformat.reads(text, as_version=4))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "run scripts/notebook.py"
    assert re.findall(r"(?<![\w<])/(?:home|root|tmp|work|usr|var)/", text) == []
    assert "iopub" not in text and "stderr" not in text


@pytest.mark.thorough
def test_the_notebook_runs_and_its_kernel_survives_a_killed_rank(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    committed = [kinds(cell) for cell in code_cells(notebook)]
    notebook.cells.append(nbformat.v4.new_code_cell(KILLED_RANK))
    notebook.cells.append(nbformat.v4.new_code_cell("print(max(results['tensor'].losses))"))
    client = nbclient.NotebookClient(
        notebook, timeout=600, coalesce_streams=True, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    *executed, killed, afterwards = code_cells(notebook)
    assert [kinds(cell) for cell in executed] == committed, "run scripts/notebook.py"
    assert killed.outputs[-1].text.split()[-2:] == ["rank", "1"]
    assert afterwards.outputs[-1].text.strip() == "150"
