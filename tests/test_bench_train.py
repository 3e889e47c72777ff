"""The benchmark `train` runs jobs in turns and ends all their processes."""

import json
import signal
import sys
import time

import psutil
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from common.exits import BadInput
from tests.benchmarks import peak
from tests.benchmarks import train as bench_train
from tests.benchmarks.turns import Runner
from tests.conftest import environment, finish, run, start

BENCH = ("-m", "tests.benchmarks.train")
PASSES = ("forward", "forward and backward")
QUICK = ("--rounds=1", "--report_every=1", "--batch_size=8", "--timeout=100", "--jobs=seed loop,train.py")

# A job of two processes. Both write heartbeats. The first also writes reports. A report that is delayed by a
# stop includes the time of the stop.
JOB = """
import json, os, sys, time
folder = sys.argv[1]
name = "child" if os.fork() == 0 else "parent"
beats, reports = (open(os.path.join(folder, f), "a", buffering=1) for f in (name, "metrics.jsonl"))
since = time.time()
while True:
    time.sleep(0.01)
    now = time.time()
    elapsed, since = now - since, now
    for _ in range(5):
        time.sleep(0.01)
        beats.write(f"{os.getpid()}\\n")
    if name == "parent":
        report = {"loss": 1, "images_per_s": 10 / elapsed, "data_time": 0, "compute_time": elapsed}
        for line in {"val_loss": 1}, report:
            reports.write(json.dumps(line | {"time": now}) + "\\n")
"""


def runner(folder, code: str = JOB) -> Runner:
    return Runner("the job", [sys.executable, "-c", code, str(folder)], str(folder))


def beats(folder) -> int:
    return sum(len((folder / name).read_text().splitlines()) for name in ("parent", "child"))


def living(mark) -> list[psutil.Process]:
    """Return the processes with `mark` in their command line, without zombies."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        named = str(mark) in " ".join(process.info["cmdline"] or ())
        if named and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def none_left(mark, seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while living(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not living(mark)


def stopped(mark) -> bool:
    """Return whether both processes are stopped. A process in a system call stops after the call."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if [process.status() for process in living(mark)] == [psutil.STATUS_STOPPED] * 2:
            return True
        time.sleep(0.05)
    return False


def test_a_job_runs_in_its_turns_only(tmp_path):
    with runner(tmp_path) as job:
        job.turn(images=10, timeout=60)
        for _ in range(4):
            assert stopped(tmp_path)
            before = beats(tmp_path)
            time.sleep(0.3)
            assert beats(tmp_path) == before
            begin = time.time()
            reports = job.turn(images=30, timeout=60)
            assert beats(tmp_path) > before
            assert len(reports) == 3 and all("loss" in report for report in reports)
            assert all(report["time"] - report["compute_time"] >= begin for report in reports)
        assert stopped(tmp_path)
    assert not living(tmp_path)


def test_an_error_ends_the_job(tmp_path):
    with pytest.raises(ZeroDivisionError), runner(tmp_path) as job:
        job.turn(images=10, timeout=60)
        raise ZeroDivisionError
    assert not living(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_jobs_end_with_whoever_lets_them_run(tmp_path, number):
    folders = [tmp_path / name for name in ("stopped", "running")]
    for folder in folders:
        folder.mkdir()
    code = f"""
import sys
from tests.benchmarks.turns import Runner
stopped, running = (Runner(f, [sys.executable, "-c", {JOB!r}, f], f) for f in sys.argv[1:])
stopped.turn(10, 60)
print("ready", flush=True)
running.turn(10**9, 60)
"""
    driver = start("-c", code, *folders)
    assert driver.stdout.readline() == "ready\n"
    deadline = time.monotonic() + 60
    while not (folders[1] / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    jobs = [process for folder in folders for process in living(folder) if process.pid != driver.pid]
    assert len(jobs) == 4
    driver.send_signal(number)
    finish(driver, code=-number)
    assert none_left(tmp_path)


def test_a_job_that_dies_and_one_that_says_nothing(tmp_path):
    died = "import sys; sys.exit('first line\\nno such data\\n\\n')"
    said = r"^the job ended with exit code 1: no such data$"
    with pytest.raises(BadInput, match=said), runner(tmp_path, died) as job:
        job.turn(images=10, timeout=60)
    mute = "import sys, time; print('thinking', file=sys.stderr, flush=True); time.sleep(100)"
    said = r"^the job reported 0 of 10 images within 3 s: thinking$"
    with pytest.raises(BadInput, match=said), runner(tmp_path, mute) as job:
        job.turn(images=10, timeout=3)
    assert not living(tmp_path)


def test_a_job_that_is_killed_while_it_is_stopped(tmp_path):
    with runner(tmp_path) as job:
        job.turn(images=10, timeout=60)
        for process in living(tmp_path):
            process.kill()
        with pytest.raises(BadInput, match="the job ended with exit code -9"):
            job.turn(images=10, timeout=60)


def test_figures_of_the_jobs(tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    result = run(*BENCH, *QUICK, "--json", env=environment(TMPDIR=str(temporary)), timeout=300)
    found = json.loads(result.stdout)
    assert found["arch"] == "resnet18" and "load average" in found["machine"]
    assert found["gflop_per_image"] == pytest.approx(3.33, abs=0.005)
    assert {peak["dtype"] for peak in found["peaks"].values()} == {"float32", "bfloat16"}
    limit = found["peaks"]["float32"]["tflop_per_s"]
    assert all(each["source"] for each in found["peaks"].values())
    assert [row["name"] for row in found["rows"]] == ["seed loop", "train.py"]
    first, second = found["rows"]
    assert first["ratio"] == [1, 1, 1]
    assert second["ratio"][0] == pytest.approx(second["images_per_s"][0] / first["images_per_s"][0])
    for row in found["rows"]:
        rate, low, high = row["images_per_s"]
        assert 0 < low <= rate <= high and 0 <= row["waiting"] < 1 and row["memory_mb"] > 100
        assert row["tflop_per_s"][0] == pytest.approx(rate * found["gflop_per_image"] / 1000)
        assert row["share_of_peak"][0] == pytest.approx(row["tflop_per_s"][0] / limit)
        assert 0 < row["share_of_peak"][0] <= 1
        assert row["start_s"] > 0 and row["compile_s"] is None
    assert not list(temporary.glob("bootfile-*")) and none_left(temporary, 1)


def test_the_flop_of_a_convolution():
    operations = {each.name: each.flop for each in peak._operations(torch.device("cpu"), torch.float32, 8, 2)}
    images, layer = torch.randn(2, 64, 8, 8, requires_grad=True), torch.nn.Conv2d(64, 64, 3, padding=1)
    with FlopCounterMode(display=False) as counter:
        output = layer(images)
        forward = counter.get_total_flops()
        output.sum().backward()
    name = "3x3 convolution 64x8x8, batch 2, "
    assert [operations[name + each] for each in PASSES] == [forward, counter.get_total_flops()]


def test_no_share_of_the_peak_exceeds_one():
    def report(rate):
        return [{"images_per_s": rate, "data_time": 0.0, "compute_time": 1.0, "memory_mb": 1}]

    measured = [peak.Peak(0.3, "a product"), peak.Peak(0.2, "another")]
    rows = [
        {"name": name, "precision": precision, "devices": devices, "reports": [report(r) for r in rates]}
        for name, precision, devices, rates in (
            ("slow", "float32", 1, (100, 50)),
            ("two", "half", 2, (1000, 400)),
            ("one", "half", 1, (300, 200)),
        )
    ]  # fmt: skip
    found = {"rows": rows, "gflop_per_image": 1.0, "peaks": {
        "float32": {"dtype": "float32", "rounds": list(measured)},
        "half": {"dtype": "bfloat16", "rounds": list(measured)},
    }}  # fmt: skip
    bench_train._relate(found)
    assert found["peaks"]["float32"] == {"dtype": "float32", "tflop_per_s": 0.3, "source": "a product"}
    assert found["peaks"]["half"] == {"dtype": "bfloat16", "tflop_per_s": 0.5, "source": "two"}
    shares = [row["share_of_peak"] for row in found["rows"]]
    assert shares[0] == pytest.approx([0.25, 1 / 6, 1 / 3])
    assert shares[1] == pytest.approx([0.7, 0.4, 1]) and shares[2] == pytest.approx([0.5, 0.4, 0.6])


def test_ctrl_c_ends_the_jobs(tmp_path):
    bench = start(*BENCH, *QUICK, env=environment(TMPDIR=str(tmp_path)))
    said = []
    while not said or not said[-1].startswith("train.py: starting"):  # the seed loop is stopped by now
        said.append(bench.stderr.readline())
        assert said[-1], "".join(said)
    deadline = time.monotonic() + 60
    while len(living(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert psutil.STATUS_STOPPED in {process.status() for process in living(tmp_path)}
    bench.send_signal(signal.SIGINT)
    assert finish(bench, code=130).stderr.endswith("interrupted: the jobs were ended\n")
    assert not list(tmp_path.glob("bootfile-*")) and none_left(tmp_path, 1)


def test_a_table_of_images(tmp_path):
    printed = run(
        *BENCH, "--arch=resnet50", "--jobs=mixed from JPEG", "--rounds=1", "--report_every=1",
        "--batch_size=4", "--image_size=32", f"--cache_dir={tmp_path}", timeout=300,
    ).stdout  # fmt: skip
    head, row = printed.splitlines()[-2:]
    assert " ".join(head.split()) == "images/s ratio TFLOP/s of peak waiting MB compiling start"
    assert row.startswith("mixed from JPEG ") and " 1.00x (1.00-1.00) " in row and " - " in row


@pytest.mark.parametrize("arguments, message", [
    (["--jobs=train.py,speed"], "--jobs: 'speed' is not one of seed loop, train.py, train_amp.py"),
    (["--jobs=train.py,train.py"], "'train.py,train.py' has an empty or a repeated name"),
    (["--arch=resnet50", "--jobs=float32,mixed compiled", "--compile=false"], "--jobs: mixed compiled: "),
    (["--image_size=64"], "--image_size 64: expected 32"),
])  # fmt: skip
def test_bad_input(arguments, message):
    assert message in run(*BENCH, *arguments, code=2).stderr


def test_a_contestant_that_dies_is_one_line(tmp_path):
    arguments = ("--arch=resnet50", "--jobs=mixed from JPEG", "--data_url=/does/not/exist")
    failed = run(*BENCH, *arguments, f"--cache_dir={tmp_path}", code=2, env=environment(TMPDIR=str(tmp_path)))
    said = "error: mixed from JPEG ended with exit code 2: error: data_url /does/not/exist does not exist"
    assert failed.stderr.splitlines()[-1].startswith(said) and "Traceback" not in failed.stderr
    assert not failed.stdout and none_left(tmp_path, 1)
