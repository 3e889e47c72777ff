"""The expressions of guides/modelarts.md for a platform's console find the figures of a log."""

import re

from tests.conftest import QUICK, ROOT, run


def test_expressions_find_the_figures_of_a_log(tmp_path):
    page = (ROOT / "guides" / "modelarts.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]* \| `(\(\?<=[^`]*)` \| `( [^`]*)` \|$", page, re.MULTILINE)
    log = run("jobs/train.py", *QUICK, "--max_steps=1", "--output_dir", tmp_path).stdout
    shown = re.search(r"^    (epoch=.*)\n    (epoch=.* val_loss=.*)$", page, re.MULTILINE)
    reports = [line for line in log.splitlines() if line.startswith("epoch=")]
    for example, line in zip(shown.groups(), reports, strict=True):
        assert re.findall(r"(\w+)=", example) == re.findall(r"(\w+)=", line)
    assert len(rows) == 7
    for whole, group in rows:
        (found,) = re.findall(whole, log)
        assert re.findall(group, log) == [found] and float(found) >= 0
