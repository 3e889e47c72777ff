"""--help of jobs and of `launch bench` imports no large package and prints the same text as with them."""

import runpy
import sys

import pytest
import torch  # noqa: F401  (--help in this process has the real packages)

from tests.conftest import ROOT, environment, run

JOBS = [[f"jobs/{path.name}"] for path in sorted((ROOT / "jobs").glob("*.py"))]
VERBS = [["launch/__main__.py", "bench", name] for name in ("loaders",)]
WITHOUT = """
import os, runpy, sys
os.execv = None  # starting again with the real packages is an error
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
OWN_JOB = """
import sys
sys.path.insert(0, {root!r})
from common.entry import entry
from common.arguments import JobParser
import torch

@entry
def main():
    parser = JobParser("mine")
    parser.add_argument("--size", default=torch.ones(3).sum().item() + 1, help="default: %(default)s")
    parser.parse_args()

main()
"""


@pytest.mark.parametrize("words", [*JOBS, *VERBS], ids=" ".join)
def test_help_without_the_packages_is_the_help_with_them(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    result = run("-c", WITHOUT, *words, "--help", env=environment(COLUMNS="100"))
    monkeypatch.setattr(sys, "argv", [*words, "--help"])
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        runpy.run_path(words[0], run_name="__main__")
    assert result.stdout == capsys.readouterr().out
    assert result.stdout.startswith("usage: ") and "--help" in result.stdout


def test_a_job_that_computes_an_option_with_torch_starts_again(tmp_path):
    job = tmp_path / "job.py"
    job.write_text(OWN_JOB.format(root=str(ROOT)))
    result = run(job, "--help")
    assert result.stdout.count("usage: ") == 1 and "default: 4.0" in result.stdout


def test_completions_of_a_shell(tmp_path):
    line, found = "python jobs/train.py --dataset d", tmp_path / "completions"
    asked = {"_ARGCOMPLETE": "2", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    run("-c", WITHOUT, "jobs/train.py", env=environment(_ARGCOMPLETE_STDOUT_FILENAME=str(found), **asked))
    assert found.read_text().split() == ["digits"]
    for path in (ROOT / "jobs").glob("*.py"):
        assert path.read_text().startswith("# PYTHON_ARGCOMPLETE_OK\n"), "the shell searches for this line"
