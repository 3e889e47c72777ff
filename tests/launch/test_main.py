"""`python -m launch` lists its verbs, and names the replacement of what was removed."""

import argparse
import os
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from bootfile.ground.errors import BadInput
from bootfile.receipt import receipt
from bootfile.records import write_state
from common.run import starts
from launch.__main__ import VERBS, main
from tests.conftest import ROOT, environment, run

PATH = os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize(("verb", "said"), [
    ([], "usage: "),
    (["chekc"], "error: .*'chekc': .*mean check"),
    (["train"], "error: .*'train': expected new, check, "),
])  # fmt: skip
def test_no_verb_or_an_unknown_one(verb, said):
    script = "import atexit, runpy, sys; atexit.register(lambda: print('torch' in sys.modules))\n"
    script += "runpy.run_module('launch', run_name='__main__', alter_sys=True)"
    result = run("-c", script, *verb, code=2, fresh=True)
    assert re.match(said, result.stderr)
    if verb:
        assert len(result.stderr.splitlines()) == 1
    else:
        assert re.findall(r"^  (\w+) +\S", result.stderr, re.MULTILINE) == [*VERBS]
    assert result.stdout == "False\n", "a verb's module is imported only if the verb runs"


WITHOUT = """
import runpy, sys
for name in {names!r}:
    sys.modules[name] = None  # its import raises ModuleNotFoundError
runpy.run_module("launch", run_name="__main__", alter_sys=True)
"""
BARE = WITHOUT.format(names=("torch", "numpy", "boto3", "torchvision"))
NO_TORCH = WITHOUT.format(names=("torch", "pandas", "pyarrow", "datasets.run_installed"))


@pytest.mark.thorough
def test_a_python_without_torch(tmp_path):
    """Verbs that need it end in one line, with the file that imports it; the others work."""
    for words in (["check"], ["receipt", "x", "y"], ["report", "x"], ["prove", "x"]):
        (line,) = run("-c", BARE, *words, code=2, fresh=True).stderr.splitlines()
        assert re.match(r"error: .*\b(torch|numpy)\b.*\.py:\d+ .*: pip install -r requirements", line)
    run("-c", BARE, "pack", "jobs/train_ddp.py", "--to", tmp_path, fresh=True)
    request = ("jobs/train_ddp.py", "--config", "launch/job.example.toml", "--platform", "slurm", "--dry_run")
    assert "srun" in run("-c", BARE, "submit", *request, fresh=True).stdout


@pytest.mark.thorough
def test_help_and_the_records_of_runs_need_neither_torch_nor_hugging_face(tmp_path):
    """The import of torch takes two seconds, that of Hugging Face's package one."""
    for name in ("a", "b"):
        chain = receipt.Receipt()
        chain.add(np.arange(4), np.zeros(4))
        chain.chain(1, 2, chain.take(), str(tmp_path / name))
        starts.write(str(tmp_path / name), argparse.Namespace(seed=0), {"world size": 1}, time=1.0, step=0)
        parts = {"model.bias": "1"}
        write_state(str(tmp_path / name), {"step": 1, "format": 2, "digest": "0", "parts": parts})
    compared = run("-c", NO_TORCH, "receipt", "a", "b", cwd=tmp_path, env=PATH, fresh=True).stdout
    assert "data equal for 1 steps" in compared and "state equal at step 1" in compared
    run("-c", NO_TORCH, "report", "a", "b", cwd=tmp_path, env=PATH, fresh=True)
    assert "equal for 1 steps" in (tmp_path / "report.html").read_text(encoding="utf-8")
    helps = "import contextlib, importlib, sys; from launch.__main__ import VERBS\n"
    helps += "for verb, (module, _) in VERBS.items():\n"
    helps += "    with contextlib.suppress(SystemExit): "
    helps += "importlib.import_module(module).main(['--help'])\n"
    helps += "print('imported:', {'torch', 'pandas', 'matplotlib'} & sys.modules.keys())"
    assert run("-c", helps, fresh=True).stdout.endswith("imported: set()\n")


@pytest.mark.parametrize(("error", "said"), [
    (PermissionError(13, "Permission denied", "/x/y"), "stub: /x/y: Permission denied"),
    (OSError(28, "No space left on device"), "stub: No space left on device"),
    (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "stub: .*not UTF-8"),
])  # fmt: skip
def test_files_that_cannot_be_used_are_one_line(error, said, monkeypatch):
    def fail(arguments: list[str]) -> int:
        raise error

    monkeypatch.setitem(VERBS, "stub", ("launch.stub", ""))
    monkeypatch.setitem(sys.modules, "launch.stub", SimpleNamespace(main=fail))
    monkeypatch.setattr(sys, "argv", ["launch", "stub"])
    with pytest.raises(BadInput, match=said):
        main.__wrapped__()


@pytest.mark.thorough
def test_python_that_does_not_look_in_the_current_folder():
    """With PYTHONSAFEPATH or -P, Python finds a folder by its path only: `python launch`."""
    safe = environment(PYTHONSAFEPATH="1")
    assert "RUN" in run("launch", "report", code=2, env=safe, fresh=True).stderr
    assert "--data_url" in run("jobs/train.py", "--help", env=safe, fresh=True).stdout
