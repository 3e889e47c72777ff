"""--help of every job and verb prints its options, and a shell completes their names."""

import re
import runpy
import sys

import pytest

from jobs.imagenet import FIRST_OPTIONS
from tests.conftest import ROOT, environment, run

JOBS = [[f"jobs/{path.name}"] for path in sorted((ROOT / "jobs").glob("*.py"))]


@pytest.mark.parametrize("words", [*JOBS, ["launch/__main__.py", "bench", "loaders"]], ids=" ".join)
def test_help_prints_the_options(words, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [*words, "--help"])
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(words[0], run_name="__main__")
    printed = capsys.readouterr().out
    assert not end.value.code and printed.startswith("usage: ") and "--help" in printed


def test_completions_of_a_shell(tmp_path):
    line, found = "python jobs/train.py --dataset d", tmp_path / "completions"
    asked = {"_ARGCOMPLETE": "2", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    run("jobs/train.py", env=environment(_ARGCOMPLETE_STDOUT_FILENAME=str(found), **asked))
    assert found.read_text().split() == ["digits"]
    for path in (ROOT / "jobs").glob("*.py"):
        assert path.read_text().startswith("# PYTHON_ARGCOMPLETE_OK\n"), "the shell searches for this line"


def test_the_help_of_imagenet_begins_with_ten_options_and_has_each_once():
    """All options are on one page, so that `--help | grep NAME` finds each."""
    text = run("jobs/imagenet.py", "--help").stdout
    assert text.startswith("usage: imagenet.py [OPTION ...]\n")
    beginning, _, rest = text.partition("\noptions to begin with:\n")
    first, _, _ = rest.partition("\n\n")
    named = re.findall(r"^  (?:-\w[^,]*, )?--(\w+)", first, re.MULTILINE)
    assert named == [*FIRST_OPTIONS] and len(named) == 10
    assert len((beginning + first).splitlines()) < 60
    options = re.findall(r"^  (?:-\w[^,]*, )?--(\w+)", text, re.MULTILINE)
    assert len(options) == len(set(options)) > 80
