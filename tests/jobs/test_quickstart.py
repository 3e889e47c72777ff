"""All cells of jobs/quickstart.ipynb run, as in Jupyter; their stored outputs are those of a complete run."""

import json
import re

import pytest

from launch.bundle.code_folder import CodeFolder
from tests.conftest import ROOT, environment, run

NOTEBOOK = ROOT / "jobs" / "quickstart.ipynb"
PROOF = ("exit code -9\n", "data equal for 44 steps: ", "122 of 122 tensors are equal bit for bit\n")


def test_it_is_stored_with_outputs_and_not_uploaded():
    code = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    printed = ["".join(output["text"]) for cell in code for output in cell["outputs"]]
    assert len(printed) == len(code) - 1, "only the first cell prints nothing"
    assert all(line in "".join(printed) for line in PROOF)
    assert not re.search(r"/(home|tmp|root|work|usr|opt|var)/", "".join(printed))
    assert "jobs/quickstart.ipynb" not in CodeFolder("jobs/train.py").files


def test_its_cells_train_kill_resume_and_compare(tmp_path):
    """As one script, with a smaller network: Jupyter starts a new Python for each program, which the next
    test does."""
    pytest.importorskip("IPython", reason="IPython is not installed")
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    assert code.count("--width=16") == 1
    code = code.replace("--width=16", "--width=8")
    printed = run("-c", code, cwd=NOTEBOOK.parent, env=environment(TMPDIR=str(tmp_path))).stdout
    assert len(re.findall(r"step=24/44 .* loss=", printed)) == 3
    assert all(line in printed for line in PROOF)


@pytest.mark.thorough
def test_it_trains_kills_resumes_and_compares(monkeypatch, tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # tests share the cores
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert len(re.findall(r"step=24/44 .* loss=", printed)) == 3, (
        "a step after the checkpoint is trained again"
    )
    assert all(line in printed for line in PROOF)
    assert "<iframe srcdoc=" in outputs[-1].data["text/html"]
