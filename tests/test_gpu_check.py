"""`make gpu` without a GPU is one error line, a failed stage is a row, and a rehearsal runs on the CPU."""

import json
import os

import pytest
import torch

from tests.conftest import run
from tests.gpu import report
from tests.gpu.lab import Setting, Stage, run_stages

MACHINE = report.describe(is_small=True)


@pytest.fixture
def setting(tmp_path):
    return Setting(False, None, str(tmp_path), str(tmp_path), dict(os.environ), 1)


def sleep(bench):
    bench.call("sleep", "-c", "import time; print('begun', flush=True); time.sleep(100)")


def fail(bench):
    bench.note("before", 5.0, "ms", aim=6, at_most=True)
    bench.call("fail", "-c", "import sys; print('no such kernel'); sys.exit(3)")


def measure(bench):
    figure = float(bench.call("measure", "-c", "print(1234.5)"))
    bench.note("images/s", figure, "images/s", aim=2000)
    bench.check("equal", True)


def test_without_a_gpu_it_is_one_line(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    result = run("-m", "tests.gpu", f"--output_dir={tmp_path / 'gpu'}", code=2)
    assert result.stderr.startswith("error: no GPU: torch ") and result.stderr.count("\n") == 1
    assert not result.stdout and not list(tmp_path.iterdir())


def test_a_stage_that_fails_is_a_row_and_the_rest_continues(setting, tmp_path):
    stages = [
        Stage("slow", 1, sleep, is_beside=True),
        Stage("broken", 50, fail, is_check=True, is_beside=True),
        Stage("fine", 50, measure),
    ]
    seen = []
    results = run_stages(stages, setting, 5, lambda found: seen.append(len(found)))
    reasons = {result["stage"]: result["failed"] for result in results}
    assert reasons["slow"] == "no end within 1 s" and reasons["broken"] == "exit code 3: no such kernel"
    assert reasons["fine"] == "" and seen == [2, 3]
    assert results[0]["log"] == ["begun"] and results[0]["seconds"] < 20

    report.write(str(tmp_path), MACHINE, results)
    assert json.loads((tmp_path / report.JSON).read_text()) == {"machine": MACHINE, "stages": results}
    assert (tmp_path / report.TABLE).read_text().count("**no**") == 3


def test_a_check_that_has_no_time_left_fails(tmp_path):
    arguments = ("--device=cpu", "--stages=restart,resident", "--minutes=0.01", f"--output_dir={tmp_path}")
    printed = run("-m", "tests.gpu", *arguments, code=1).stdout
    assert printed.count("| failed | skipped: no time is left | | **no** |") == 2


def test_a_rehearsal_on_the_cpu(tmp_path):
    arguments = ("--device=cpu", "--stages=resident,checkpoint", f"--output_dir={tmp_path}")
    printed = run("-m", "tests.gpu", *arguments, timeout=300).stdout
    assert printed == (tmp_path / report.TABLE).read_text() and "**A rehearsal" in printed
    resident, saved = json.loads((tmp_path / report.JSON).read_text())["stages"]
    assert not resident["failed"] and not saved["failed"]
    figures = {row["figure"]: row for row in resident["rows"] + saved["rows"]}
    assert len(figures) == 5 and all(row["value"] > 0 for row in figures.values())
    assert figures["resident_loader"]["aim"] == 2 and figures["resident_loader"]["met"] is None
