"""What a script loads of ours: files, and their lines without blank lines and full-line comments.

A budget is met by moving what does not belong, not by deleting explanations. A new file of a room that every
run loads has to replace another one.
"""

import json
from pathlib import Path

import pytest

from tests.conftest import QUICK, ROOT, environment, free_port, run

PACKAGES = ("bootfile", "common", "datasets", "jobs", "launch")
ALONE = """
import torch
from bootfile import Exact
"""
# script and its words -> (files, lines)
# aims: 28 files and 3,300 lines; 42 and 4,800; 60 and 8,500
BUDGETS = {
    "exact.py OUT": (24, 3130),
    "guides/own_loop/after.py OUT": (62, 6820),
    f"jobs/train.py {' '.join(QUICK)} --max_steps=1 --output_dir=OUT": (103, 10310),
}
# It runs a script as __main__, and writes the paths of what it has loaded, also if the script ends itself.
LIST = """
import atexit, json, os, runpy, sys
def write():
    paths = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    with open("loaded.json", "w") as file:
        json.dump([os.path.abspath(path) for path in paths if path], file)
atexit.register(write)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def count_lines(text):
    """Return the lines of a file without blank lines and full-line comments."""
    count = 0
    for line in text.splitlines():
        line = line.strip()
        if line and not line.startswith("#"):
            count += 1
    return count


@pytest.mark.thorough
@pytest.mark.parametrize("command", BUDGETS, ids=lambda command: command.partition(" ")[0])
def test_what_a_script_loads_is_within_its_budget(command, tmp_path):
    (tmp_path / "exact.py").write_text(ALONE)
    script, *words = command.split()
    path = ROOT / script if "/" in script else tmp_path / script
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    settings = environment(**variables if "own_loop" in script else {}, PYTHONPATH=str(ROOT))
    run("-c", LIST, str(path), *words, cwd=tmp_path, env=settings, fresh=True)
    paths = {Path(each) for each in json.loads((tmp_path / "loaded.json").read_text())}
    ours = [each for each in paths if each.is_relative_to(ROOT)]
    ours = [each for each in ours if each.relative_to(ROOT).parts[0] in PACKAGES and each != path]
    lines = sum(count_lines(each.read_text(encoding="utf-8")) for each in ours)
    most_files, most_lines = BUDGETS[command]
    assert len(ours) <= most_files and lines <= most_lines, (len(ours), lines)
