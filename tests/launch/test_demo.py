"""`make demo` runs all its steps, here with fewer images."""

import json
import re

import pytest

from tests.conftest import run


@pytest.mark.thorough
def test_from_the_folder_to_the_report(tmp_path):
    said = run("-m", "tests.demo", "--to", tmp_path, "--samples=400", "--epochs=2", timeout=1200).stdout
    assert re.search(r"^0 run 1 +137 .* ended by fault reschedule:step=5$", said, re.MULTILINE)
    line = r"^\[node 0\] restored step_(\d+)\.pt .*from s3://"
    restored = re.search(line, said, re.MULTILINE)
    # on a loaded machine the kill may come before the first checkpoint is at the URL
    starts = (tmp_path / "results" / "starts.jsonl").read_text().splitlines()
    assert json.loads(starts[-1])["step"] == (int(restored[1]) if restored else 0)
    assert re.search(r"^1 run 2 +0 ", said, re.MULTILINE)
    lines = (tmp_path / "results" / "metrics.jsonl").read_text().splitlines()
    steps = [line["step"] for line in map(json.loads, lines) if "loss" in line]
    assert steps == list(range(1, 11))  # each once, although some were lost and repeated
    assert (tmp_path / "results" / "checkpoints" / "step_10.pt").exists()
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Two nodes, killed once" in page and "http://" not in page.replace("http://www.w3.org", "")
