"""starts.jsonl has the settings of every start, and no secret."""

import json
import sys

import torchvision

from bootfile.ground.files import append_json_line
from bootfile.records import STARTS
from common.console import arguments
from common.run import environment, starts
from common.run.run import JobParser


def test_a_start_is_one_line_without_credentials(tmp_path, monkeypatch):
    parser = JobParser("")
    for name in ("--data_url", "--output_dir", "--secret_key", "--ak", "--pin", "--bearer"):
        parser.add_argument(name)
    parser.add_argument("--word", type=arguments.secret)
    parser.add_argument("--save_every", type=arguments.interval, default="1epoch")
    given = ["--data_url=redis://user:testing@host/0", f"--output_dir={tmp_path}", "--secret_key=testing"]
    given += ["--ak=testing1", "--pin", "testing", "--bearer=testing", "--word", "testing"]
    monkeypatch.setattr(sys, "argv", ["/folder/job.py", *given])
    args = parser.parse_args()
    for step in (0, 8):
        chosen = args.replaced({"backend": "threads"})  # values that the job has chosen are also written
        starts.write(str(tmp_path), chosen, environment.facts(), step=step)
    content = (tmp_path / STARTS).read_text()
    first, second = map(json.loads, content.splitlines())
    assert "testing" not in content and (first["step"], second["step"]) == (0, 8)
    assert first["settings"] == {
        "data_url": "redis://host/0", "output_dir": str(tmp_path), "save_every": "1epoch",
        "backend": "threads",
    }  # fmt: skip
    facts = first["environment"]
    assert facts["job"] == "job.py" and facts["world size"] == facts["nodes"] == 1
    assert f"torchvision {torchvision.__version__}" in facts["packages"]
    assert {"python", "torch", "numpy", "system", "device", "cores", "backend"} <= facts.keys()


def _begin(folder, time: float) -> None:
    starts.expect_end(str(folder), time)
    line = {"time": time, "step": 0, "settings": {}, "environment": {}}
    append_json_line(str(folder / STARTS), line)


def test_how_the_training_before_ended(tmp_path):
    told = []
    for time, end in ((1.0, (5, 143, "SIGTERM")), (2.0, None), (3.0, (9, 0, starts.DONE)), (4.0, None)):
        told.append(starts.describe_last_end(str(tmp_path)))
        _begin(tmp_path, time)
        if end:
            starts.write_end(str(tmp_path), time, *end)
    told.append(starts.describe_last_end(str(tmp_path)))
    assert told[0] == told[3] == "", "there was none, or it was done"
    assert told[1].endswith("SIGTERM at step 5 (exit code 143)")
    assert told[2].endswith(starts.KILLED) and told[4].endswith(starts.KILLED)
    assert starts.read_ends(str(tmp_path)) == {
        1.0: "SIGTERM at step 5 (exit code 143)", 2.0: starts.KILLED, 3.0: starts.DONE, 4.0: starts.KILLED,
    }  # fmt: skip
    starts.write_end(str(tmp_path), 3.0, 9, 2, "the last save has failed")  # the last line counts
    assert starts.read_ends(str(tmp_path))[3.0] == "the last save has failed at step 9 (exit code 2)"


def test_the_end_of_an_older_training_is_not_told(tmp_path):
    """A full disk may have kept the line of the newest one out."""
    _begin(tmp_path, 1.0)
    append_json_line(str(tmp_path / STARTS), {"time": 2.0, "step": 0, "settings": {}, "environment": {}})
    assert starts.describe_last_end(str(tmp_path)) == ""
