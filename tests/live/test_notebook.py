"""The notebook among the examples runs as it is, on real services."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "python" / "first_kernel.ipynb"


@pytest.mark.services
def test_the_notebook_runs_and_shows_the_search_in_one_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(tmp_path)}}).execute()
    search, checks, report = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"][-3:]
    (table,) = [each.data["text/plain"] for each in search if each.output_type == "display_data"]
    assert "Activation" in table
    assert "Outcome(run=" in search[-1].data["text/plain"]
    assert checks[0].text.split() == ["True", "True"]
    assert report[0].text.startswith("warpsmith report ")


def test_the_notebook_is_kept_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert [cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")] == []
