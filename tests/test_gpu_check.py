"""`make gpu` without a GPU is one error line, a failed stage is a row, and a rehearsal runs on the CPU."""

import argparse
import gzip
import json
import os
import re
import shutil
import tarfile
import time
import types
import warnings

import pytest
import torch

from bootfile import __version__
from bootfile.ground.errors import BadInput
from tests.conftest import environment, run, write_program
from tests.gpu import __main__, checks, report, turns, watch
from tests.gpu.lab import Results, Run, Setting, Stage, longest, run_stages
from tests.support import on_gpu

MACHINE = report.describe(is_small=True)
STAGES = {
    name: [
        stage.name
        for stage in __main__.choose(
            argparse.Namespace(device="cpu", run=name, stages=None, minutes=None), 0
        )[0]
    ]
    for name in __main__.MINUTES
}


@pytest.fixture
def setting(tmp_path):
    return Setting(False, None, *[str(tmp_path)] * 3, dict(os.environ), 1)


def sleep(bench):
    process = bench.start("sleep", "-c", "import time; print('begun', flush=True); time.sleep(1000)")
    while "begun" not in bench.read(process):
        time.sleep(0.01)
    bench._begin = time.monotonic()  # the limit of the stage does not count the start of the process
    bench._deadline = bench._begin + 1
    bench.finish(process)


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
    result = run("-m", "tests.gpu", "right", f"--output_dir={tmp_path / 'gpu'}", code=2)
    assert result.stderr.startswith("error: no GPU: torch ") and result.stderr.count("\n") == 1
    assert not result.stdout and not list(tmp_path.iterdir())


def test_a_stage_that_fails_is_a_row_and_the_rest_continues(setting, tmp_path):
    """Each row is reported at once, so that a run that is killed has those before it."""
    stages = [
        Stage("slow", 1, sleep, is_beside=True),
        Stage("broken", 400, fail, is_check=True, is_beside=True),
        Stage("fine", 400, measure),
    ]
    seen = []

    def write(found):
        seen.append([(result["is_over"], len(result["rows"])) for result in found])
        report.write(str(tmp_path), MACHINE, found)
        if len(seen) == 1:
            assert (tmp_path / report.TABLE).read_text().count("has not ended") == 2

    results = run_stages(stages, setting, time.monotonic() + 900, write)
    reasons = {result["stage"]: result["failed"] for result in results}
    assert reasons["slow"] == "no end within 1 s" and reasons["broken"] == "exit code 3: no such kernel"
    assert reasons["fine"] == "" and seen[0] == [(False, 0), (False, 1)]
    assert seen[-3:] == [[(True, 0), (True, 1), end] for end in ((False, 1), (False, 2), (True, 2))]
    assert results[0]["log"] == ["begun"] and results[0]["seconds"] < 400
    assert json.loads((tmp_path / report.JSON).read_text()) == {"machine": MACHINE, "stages": results}
    assert (tmp_path / report.TABLE).read_text().count("**no**") == 3


def test_a_check_that_has_no_time_left_fails(tmp_path):
    arguments = ("right", "--device=cpu", "--stages=bits,prove", "--minutes=0.01", f"--output_dir={tmp_path}")
    printed = run("-m", "tests.gpu", *arguments, code=1).stdout
    assert len(re.findall(r"\| failed \| skipped: [^|]*time [^|]*\| \| \*\*no\*\* \|", printed)) == 2


def rehearse(name, stages, output):
    """Run stages on the CPU, and return {stage: its rows}. Each has one, and none failed."""
    options = (name, "--device=cpu", f"--stages={','.join(stages)}", "--commit=abc", f"--output_dir={output}")
    printed = run("-m", "tests.gpu", *options, timeout=3000, code=None).stdout
    assert printed == (output / report.TABLE).read_text() and "**A rehearsal" in printed, printed
    assert "commit abc" in printed
    results = json.loads((output / report.JSON).read_text())["stages"]
    assert {result["stage"]: result["failed"] for result in results} == dict.fromkeys(stages, ""), printed
    rows = {result["stage"]: {row["figure"]: row for row in result["rows"]} for result in results}
    assert all(rows[stage] for stage in stages), printed
    with tarfile.open(output / "logs.tar.gz") as logs:
        assert len(logs.getnames()) > 1
    assert len(list(output.iterdir())) <= 4  # few files can be fetched from a lent machine
    return rows


@pytest.mark.thorough
def test_a_quick_rehearsal(tmp_path):
    rows = rehearse("right", ["facts"], tmp_path)["facts"]
    assert rows["memory"]["value"] > 0 and rows["import torch, torchvision"]["unit"] == "s"


@pytest.mark.thorough
@pytest.mark.parametrize("stage", STAGES["right"])
def test_a_rehearsal_of_what_must_be_right(stage, tmp_path):
    rows = rehearse("right", [stage], tmp_path)[stage]
    if stage == "bits":
        assert rows["train_exact.py: 2 processes, bits"]["value"] == "equal"
        assert rows["train_amp.py, float16: restarted, bits"]["value"] == "equal"
        for job in ("train_amp.py", "train_ddp.py"):
            assert rows[f"{job}, deterministic: restarted, bits"]["value"] == "equal"
        assert rows["train_fast.py: restarted, bits"]["value"] and len(rows) == 32
        assert rows["train_fast.py, deterministic: again, bits"]["value"] == "equal"
    if stage in ("marked", "on gpu"):
        assert rows["tests skipped" if stage == "marked" else "tests passed"]["value"] > 1


@pytest.mark.thorough
@pytest.mark.parametrize("stage", STAGES["fast"])
def test_a_rehearsal_of_the_figures(stage, tmp_path):
    rows = rehearse("fast", [stage], tmp_path)[stage]
    least = {"ResNet-18": 6, "ResNet-50": 6, "accuracy": 4, "waits": 12, "resident": 3, "limits": 3}
    assert len(rows) >= least[stage]
    assert (tmp_path / "traces.tar.gz").exists() == (stage == "waits")


@pytest.mark.thorough
def test_a_rehearsal_of_what_a_user_gets(tmp_path):
    """All stages in the order of their rows. 80 CPU seconds."""
    rows = rehearse("users", STAGES["users"], tmp_path)
    assert list(rows) == ["files", "own loop", "saves", "text", "memory", "elastic"]
    assert {name: len(figures) for name, figures in rows.items()} == {
        "files": 23, "own loop": 9, "saves": 5, "text": 7, "memory": 4, "elastic": 6,
    }  # fmt: skip
    cores = max(1, __main__.available_cores() // 3)
    assert rows["files"][f"bench loaders, {cores} workers: threads, predicted waiting"]["unit"] == "%"
    assert rows["files"][f"imagenet.py, files, {cores} workers, not compiled"]["n"] == 1
    assert rows["elastic"]["bits of the killed run and of a whole one"]["met"]


TRAINING = """import json, os, sys, time
os.makedirs(sys.argv[-1])
with open(os.path.join(sys.argv[-1], "metrics.jsonl"), "w") as file:
    while True:
        time.sleep(0.01)
        line = {"loss": 1, "tokens_per_s": 50, "data_time": 0.005, "compute_time": 0.005, "memory_mb": 2000}
        print(json.dumps(line | {"at": time.monotonic()}), file=file, flush=True)
"""


def test_trainings_run_in_turns(setting, tmp_path):
    """One that fails is a row, and the others are compared. Only one runs at a time."""
    setting = setting._replace(is_small=True)
    bench = Run(
        Stage("turns", 400, turns.compare), setting, time.monotonic() + 400, Results(lambda found: None)
    )
    commands = {"a": ("-c", TRAINING), "b": ("-c", TRAINING), "c": ("-c", "raise SystemExit('no memory')")}
    found = turns.compare(bench, commands, 3)
    assert {name: len(each) for name, each in found.items()} == {"a": 3, "b": 3}
    assert found["a"][0] == (pytest.approx(50), pytest.approx(0.5), 2)
    [row] = bench.result["rows"]
    assert row["figure"] == "c" and "no memory" in row["value"]
    bench.close()
    lines = {name: turns.jobs.read_metrics(bench.folder(name)) for name in "ab"}
    begun = max(own[1]["at"] for own in lines.values())
    order = sorted(
        (line["at"], name) for name, own in lines.items() for line in own if line["at"] > begun + 0.1
    )
    names = "".join(name for _, name in order)
    assert len(re.sub(r"(.)\1+", r"\1", names)) <= 6  # at most three turns of each


def test_figures_of_several_rounds_have_a_range(setting, tmp_path):
    bench = Run(Stage("rounds", 400, measure), setting, time.monotonic() + 400, Results(lambda found: None))
    bench.note("step", [1.5, 3.5, 2.5], "ms", aim=3, at_most=True)
    report.write(str(tmp_path), MACHINE, [bench.result])
    assert "| step | 2.5 ms (1.5-3.5), n=3 | at most 3 | yes |" in (tmp_path / report.TABLE).read_text()


def test_all_stages_fit_the_time_limits():
    arguments = {"device": "cuda", "stages": None, "minutes": None}
    for name in __main__.MINUTES:
        for gpus in (1, 2):
            stages, minutes = __main__.choose(argparse.Namespace(run=name, **arguments), gpus)
            assert longest(stages) <= 60 * minutes - __main__._CLOSING


def test_tests_that_are_not_made_for_a_gpu_exist():
    for name in checks.NOT_FOR_A_GPU:
        file, _, start = name.partition("::")
        text = (checks.ROOT / f"{checks._JOB_TESTS}{file}").read_text()
        assert f"\ndef {start.partition('[')[0]}" in text, name


def test_a_copy_without_git_is_named_by_its_version_and_digest(monkeypatch, tmp_path):
    """A lent machine gets the files only."""
    monkeypatch.setattr(report, "ROOT", str(tmp_path))
    names = []
    for text in ("A = 1", "A = 2", "A = 1"):
        (tmp_path / "jobs").mkdir(exist_ok=True)
        (tmp_path / "jobs" / "job.py").write_text(text)
        names.append(report.describe(is_small=True)["commit"])
    assert names[0] == names[2] != names[1]
    assert names[0].startswith(f"{__version__}, digest ")
    assert report.describe(is_small=True, commit="abc")["commit"] == "abc"


SEES = """
import os
from tests.conftest import environment, run
def test_environment():
    code = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ.get('PYTHONPATH'))"
    assert run("-c", code).stdout.strip() == f"3 {os.environ['PYTHONPATH']}"
def test_failure():
    assert 1 + 1 == 3
"""


def test_jobs_of_tests_see_the_gpu_and_the_packages(tmp_path):
    """A failure is printed when it happens, with the name of the test."""
    (tmp_path / "test_sees.py").write_text(SEES)
    env = environment(PYTHONPATH=os.pathsep.join(["/packages", str(checks.ROOT)]), CUDA_VISIBLE_DEVICES="3")
    options = ("-m", "pytest", "-vv", "-n", "1", "-p", "no:cacheprovider", "-p", on_gpu.__name__)
    printed = run(*options, tmp_path / "test_sees.py", env=env, code=1).stdout
    [(name, reason)] = checks._FAILURE.findall(printed)
    assert name.endswith("test_sees.py::test_failure") and "assert (1 + 1) == 3" in reason
    assert "1 failed, 1 passed" in printed


NVIDIA_SMI = """import sys
names = sys.argv[1].partition("=")[2].split(",")
if "clocks_event_reasons.active" in names:
    sys.exit("Field is not a valid field to query.")
print(", ".join(name.upper() for name in names))
"""


def test_a_field_that_the_driver_does_not_have_costs_no_other(monkeypatch, tmp_path):
    """The reasons of lower clocks have another name since driver 535."""
    write_program(tmp_path / "nvidia-smi", NVIDIA_SMI)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert report.query("name", "clocks_event_reasons.active") == ["NAME", "unknown"]
    state = report.gpu_state()
    assert state["clocks.sm"] == "CLOCKS.SM" and len(state) == 6
    assert state["clocks_throttle_reasons.active"] == "CLOCKS_THROTTLE_REASONS.ACTIVE"


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


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_limits_and_collectives_are_measured(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    for options, count in (((), 3), (launcher, 1)):
        printed = run(*options, "-m", "tests.gpu.probe", "cpu").stdout
        found = json.loads(printed.splitlines()[-1])
        assert len(found) == count and all(value > 0 for value in found.values())
