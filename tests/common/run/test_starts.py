"""starts.jsonl has the settings of every start, and no secret."""

import json
import sys

import torchvision

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
