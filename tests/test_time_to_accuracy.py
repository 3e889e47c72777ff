"""The benchmark time_to_accuracy makes a small real run, medians with censored runs, and the picture."""

import contextlib
import json
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import environment, finish, run, start

BENCHMARK = ("-m", "tests.benchmarks.time_to_accuracy")


def test_two_contestants_take_turns(tmp_path):
    stored = tmp_path / "curves.json"
    benchmark = start(
        *BENCHMARK, "--jobs=seed loop,train.py", "--seeds=1", "--limit=20", "--target=0.05",
        f"--json={stored}",
    )  # fmt: skip
    together = 0
    while benchmark.poll() is None:
        together = max(together, len(_children(benchmark.pid)))
        time.sleep(0.1)
    result = finish(benchmark)
    assert together == 1
    found = json.loads(stored.read_text())
    assert [(each["job"], each["seed"]) for each in found["runs"]] == [("seed loop", 0), ("train.py", 0)]
    loop, train = found["runs"]
    for each in (loop, train):
        times = [seconds for seconds, _ in each["curve"]]
        assert times == sorted(times) and all(0 < seconds <= 20 for seconds in times)
        assert all(0 < accuracy <= 1 for _, accuracy in each["curve"])
        assert each["seconds"] < 20 + 60 and (times[-1] if times else 0) < each["seconds"]
    # 5 % is reached after an epoch; the loop, with its constant learning rate, then ends
    assert loop["ended"] == "target" and len(loop["curve"]) == 1 and train["ended"] in ("limit", "schedule")
    assert train["laps"].keys() == {"set-up", "data loading", "model"}
    row = _rows(result.stdout)["seed loop"]
    assert row[:4] == ["1", "1", f"{loop['curve'][0][0]:.1f}", "{0:.1f} to {0:.1f}".format(*loop["curve"][0])]
    assert f"seed 0, seed loop: 0.05 in {loop['curve'][0][0]:.1f} s" in result.stderr
    again = run(*BENCHMARK, f"--from={stored}").stdout
    assert again == result.stdout


@pytest.fixture
def stored(tmp_path):
    """Return a file of --json, written by hand: 5 seeds, target 0.9, limit 100 s.

    The loop reached the target twice, train.py four times, and train_fast.py always, after 5 s of compiling.
    """

    def of(job, seed, curve, ended, compilation=0.0):
        facts = {"job": job, "seed": seed, "options": "--dataset digits", "curve": curve, "ended": ended}
        return facts | {"laps": {"set-up": 2.0, "compilation": compilation}, "seconds": 7 + curve[-1][0]}

    runs = []
    for seed, (slow, fast) in enumerate([(80, 10), (90, 20), (None, 30), (None, 40), (None, None)]):
        reached = [[slow, 0.91]] if slow else [[99, 0.85]]
        runs.append(of("seed loop", seed, [[5, 0.2], *reached], "target" if slow else "limit"))
        reached = [[fast, 0.92], [50, 0.95]] if fast else [[50, 0.89]]
        runs.append(of("train.py", seed, [[5, 0.3], *reached], "schedule"))
        runs.append(of("train_fast.py", seed, [[2, 0.5], [10, 0.9 + seed / 100]], "schedule", 5.0))
    found = {"dataset": "digits", "target": 0.9, "limit": 100, "date": "2026-11-21", "machine": "by hand"}
    path = tmp_path / "by_hand.json"
    path.write_text(json.dumps(found | {"load_average": 0.25, "runs": runs}))
    return path


def test_censored_runs_are_neither_left_out_nor_taken_for_reached(stored):
    printed = run(*BENCHMARK, f"--from={stored}").stdout
    rows = _rows(printed)
    assert rows["seed loop"][:6] == ["5", "2", "> 100", "80.0 to > 100", "> 100", "80.0 to > 100"]
    assert rows["train.py"][:6] == ["5", "4", "30.0", "10.0 to > 100", "30.0", "10.0 to > 100"]
    assert rows["train_fast.py"][:6] == ["5", "5", "10.0", "10.0 to 10.0", "15.0", "15.0 to 15.0"]
    assert rows["seed loop"][6:] == ["0.8500 (0.8500-0.9100)"] * 2 + ["99.0", "106.0"]
    assert rows["train_fast.py"][6:] == ["0.9200 (0.9000-0.9400)"] * 2 + ["10.0", "17.0"]
    assert "  - 3 of 5 ended at the limit\n  - 2 of 5 ended when the target was reached" in printed
    ratios = _rows(printed, 1)
    # if neither reached the target with a seed, its ratio is unknown
    assert ratios["train.py"] == ["> 3.33x", "unknown", "> 3.33x", "unknown"]
    assert ratios["train_fast.py"] == ["> 10.00x", "8.00x to > 10.00x", "> 6.67x", "5.33x to > 6.67x"]
    assert "seed loop" not in ratios and printed.endswith("load average at the end 0.25\n")


def test_another_target_and_other_seeds(stored):
    rows = _rows(run(*BENCHMARK, f"--from={stored}", "--target=0.95").stdout)
    assert rows["train.py"][1:3] == ["4", "50.0"] and rows["train_fast.py"][1:3] == ["0", "> 100"]
    assert rows["seed loop"][1:4] == ["0", "> 100", "> 80"]  # two were ended before the limit
    # half of an even number: the two middle values are 90 s and more than 100 s
    found = json.loads(stored.read_text())
    found["runs"] = [each for each in found["runs"] if each["seed"] < 4]
    stored.write_text(json.dumps(found))
    printed = run(*BENCHMARK, f"--from={stored}").stdout
    assert _rows(printed)["seed loop"][:4] == ["4", "2", "> 95", "80.0 to > 100"]
    assert _rows(printed, 1)["train.py"][:2] == ["> 3.80x", "> 2.50x"]


def test_the_picture_shows_every_contestant(stored, tmp_path):
    picture = tmp_path / "curves.png"
    printed = run(*BENCHMARK, f"--from={stored}", "--json", f"--plot={picture}").stdout
    assert json.loads(printed) == json.loads(stored.read_text())
    with Image.open(picture) as image:
        assert image.format == "PNG" and image.size == (800, 450)
        pixels = np.asarray(image.convert("RGB")).astype(int)
    for colour in [(0xD5, 0x5E, 0x00), (0x00, 0x72, 0xB2), (0x00, 0x9E, 0x73)]:
        assert (abs(pixels - colour).max(axis=2) < 3).sum() > 100


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--jobs=train.py,train_none.py"], "'train_none.py', expected some of seed loop, train.py, "),
        (["--target=98"], "--target 98 is not an accuracy"),
        (["--plot=curves.jpg"], "--plot curves.jpg: "),
        (["--json=/nowhere/curves.json"], "/nowhere/curves.json cannot be written"),
        (["--from=tests/support/marks.py"], "marks.py is not a file of --json: JSONDecodeError"),
        (["--jobs=train.py", "--data_url=/nowhere"], "exit code 2: "),
    ],
)  # fmt: skip
def test_bad_input(arguments, said):
    errors = run(*BENCHMARK, *arguments, code=2).stderr.splitlines()
    assert errors[-1].startswith("error: ") and said in errors[-1]
    assert "data_url" not in said or any("/nowhere" in line for line in errors[:-1])


@pytest.mark.parametrize("line", ['"curve": [[5, 0.2]', '"ended": "target"', '"target": 0.9'])
def test_a_file_that_says_too_little(stored, line):
    text = stored.read_text()
    assert line in text
    stored.write_text(text.replace(line, line.replace("5", "105").replace("target", "aim")))
    assert f"{stored} is not a file of --json: " in run(*BENCHMARK, f"--from={stored}", code=2).stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_running(tmp_path, number):
    benchmark = start(*BENCHMARK, "--jobs=seed loop", env=environment(TMPDIR=str(tmp_path)))
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("time_to_accuracy_*/output/starts.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.1)
    jobs = _children(benchmark.pid)
    benchmark.send_signal(number)
    result = finish(benchmark, {signal.SIGKILL: -9}.get(number, 128 + number))
    assert len(jobs) == 1 and "Traceback" not in result.stderr
    while Path(f"/proc/{jobs[0]}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{jobs[0]}").exists()
    assert number == signal.SIGKILL or not list(tmp_path.glob("time_to_accuracy_*"))


def _children(parent: int) -> list[int]:
    """Return the children of a process, but not the one that forks them, which has no environment."""
    found = []
    for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        with contextlib.suppress(OSError):  # it has just ended
            if Path(f"/proc/{pid}/environ").read_bytes().strip(b"\0"):
                found.append(int(pid))
    return found


def _rows(printed: str, number: int = 0) -> dict[str, list[str]]:
    """Return {first cell: other cells} of the table with this number."""
    tables = [part for part in printed.split("\n\n") if part.startswith("| ")]
    rows = [line.strip("| ").split(" | ") for line in tables[number].splitlines()[2:]]
    return {row[0]: row[1:] for row in rows}
