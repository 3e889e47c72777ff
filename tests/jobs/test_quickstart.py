"""All cells of jobs/quickstart.ipynb run, as in Jupyter."""

import pytest

from launch.bundle.code_folder import CodeFolder
from tests.conftest import ROOT

NOTEBOOK = ROOT / "jobs" / "quickstart.ipynb"
nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")


def test_it_is_stored_without_output_and_not_uploaded():
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
    assert "jobs/quickstart.ipynb" not in CodeFolder("jobs/train.py").files


def test_it_trains_kills_resumes_and_compares(monkeypatch, tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # tests share the cores
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "exit code -9\n" in printed
    assert "data equal for 44 steps: the same ids, labels and augmentation" in printed
    assert printed.count("step=24 loss=") == 3, "a step after the checkpoint is trained again"
    assert "122 of 122 tensors are equal bit for bit" in printed
    assert "<iframe srcdoc=" in outputs[-1].data["text/html"]
