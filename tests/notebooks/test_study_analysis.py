"""The notebook runs from its first cell to its last on the study that ships, and is kept without outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "study_analysis.ipynb"


def test_it_is_kept_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.timeout(180)
def test_it_runs_and_draws_the_reports_charts() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert sum("<svg" in output.get("data", {}).get("text/html", "") for output in outputs) >= 5
    said = "".join(output.get("text", "") for output in outputs)
    assert "keep the baseline" in said
    assert "2b34fbd98843 at 1: 1.369, t" in said, "the figure of the report"
