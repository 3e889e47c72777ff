"""`make gpu` without a GPU is one error line, a failed stage is a row, and a rehearsal runs on the CPU."""

import gzip
import json
import os
import shutil
import types
import warnings

import pytest
import torch

from bootfile.ground.errors import BadInput
from tests.conftest import run
from tests.gpu import __main__, checks, figures, report, watch
from tests.gpu.lab import Setting, Stage, longest, run_stages

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


@pytest.mark.faults
def test_a_rehearsal_on_the_cpu(tmp_path):
    arguments = ("--device=cpu", "--stages=resident,checkpoint", f"--output_dir={tmp_path}")
    printed = run("-m", "tests.gpu", *arguments, timeout=300).stdout
    assert printed == (tmp_path / report.TABLE).read_text() and "**A rehearsal" in printed
    resident, saved = json.loads((tmp_path / report.JSON).read_text())["stages"]
    assert not resident["failed"] and not saved["failed"]
    figures = {row["figure"]: row for row in resident["rows"] + saved["rows"]}
    gap = figures.pop("the step after a save, longer by")
    assert isinstance(gap["value"], float)  # on a busy CPU it may be negative
    assert len(figures) == 4 and all(row["value"] > 0 for row in figures.values())
    assert figures["resident_loader"]["aim"] == 2 and figures["resident_loader"]["met"] is None


def test_all_stages_fit_eight_minutes_and_those_of_correctness_are_first():
    stages = [*checks.STAGES, *figures.STAGES]
    assert longest(stages) <= 60 * __main__._MINUTES
    assert [stage.is_check for stage in stages] == [True] * len(checks.STAGES) + [False] * len(figures.STAGES)


def test_a_small_dev_shm_is_not_used(monkeypatch, tmp_path):
    """Docker gives containers 64 MB of it."""
    free = {__main__._MEMORY: 64e6, str(tmp_path): 9e9}
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=free[folder]))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert __main__.find_scratch(8e9) == str(tmp_path)
    with pytest.raises(BadInput, match="TMPDIR"):
        __main__.find_scratch(10e9)


def _event(name, start, end, **more):
    times = types.SimpleNamespace(start=start, end=end)
    return types.SimpleNamespace(name=name, time_range=times, device_type="DeviceType.CUDA", **more)


def test_waits_and_kernels_of_a_gpu_are_counted(monkeypatch):
    """Torch's notice of the debug mode is not a wait. A region is not a kernel. No kernels: an error."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5e9)
    seen = watch.Watch(1, 3, 5)
    seen.step, seen.is_gpu, seen.seconds = 5, True, 100e-6
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn(
            "Synchronization debug mode ... does not yet detect all synchronizing operations", stacklevel=1
        )
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    region = _event("Optimizer.step#SGD.step", 0, 100, is_user_annotation=True)
    kernels = [_event("a", 0, 30), _event("b", 10, 40), _event("a", 60, 70)]
    seen.profile = types.SimpleNamespace(events=lambda: [region, *kernels])
    found = seen.summary(caught)
    assert found["waits_per_step"] == 0.5 and found["busy"] == pytest.approx(0.5)
    assert found["kernels_per_step"] == 1.5 and found["memory_gb"] == 5
    assert [each["kernel"] for each in found["longest"]] == ["a", "b"]
    seen.profile = types.SimpleNamespace(events=lambda: [region])
    with pytest.raises(SystemExit, match="no kernel"):
        seen.summary(caught)


def test_a_job_is_watched_on_the_cpu(tmp_path):
    trace = tmp_path / "trace.json.gz"
    job = (
        "jobs/train.py",
        "--dataset=digits",
        "--width=8",
        "--max_steps=4",
        f"--output_dir={tmp_path / 'out'}",
    )
    found = json.loads(run("-m", "tests.gpu.watch", "1,2,3", trace, *job).stdout.splitlines()[-1])
    assert found["waits_per_step"] == 0 and 0 < len(found["longest"]) <= 15
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


@pytest.mark.faults
def test_limits_and_collectives_are_measured(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    for options, count in (((), 3), (launcher, 1)):
        printed = run(*options, "-m", "tests.gpu.probe", "cpu").stdout
        found = json.loads(printed.splitlines()[-1])
        assert len(found) == count and all(value > 0 for value in found.values())
