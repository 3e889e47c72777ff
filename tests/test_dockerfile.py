"""The Dockerfile passes a linter, and its steps work when they are run without Docker."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, run

pathspec = pytest.importorskip("pathspec")
STEPS = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")


@pytest.fixture
def image(tmp_path):
    """Return a function that makes the image's folder after the COPY of these words."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    excluded = pathspec.GitIgnoreSpec.from_lines(lines)
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    context = [path for path in tracked if not excluded.match_file(path)]

    def copy(words: str) -> Path:
        *sources, target = words.split()
        for source in sources:
            found = [path for path in context if source in (".", path)]
            assert found, f"COPY {source}: not in the context"
            for path in found:
                place = tmp_path / path if source == "." else tmp_path / target / Path(path).name
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, place)
        return tmp_path

    return copy


def test_hadolint():
    program = shutil.which("hadolint", path=os.path.dirname(sys.executable)) or shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed")
    result = subprocess.run([program, str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.thorough
def test_what_is_copied_trains(image, tmp_path):
    packages, code = re.split(r"^RUN python .*$", STEPS, flags=re.MULTILINE)
    for words in re.findall(r"^COPY \S+ (.*)$", packages, re.MULTILINE):
        image(words)
    for requirements in ("requirements.txt", "tests/requirements.txt"):
        assert (tmp_path / requirements).is_file()
    assert (tmp_path / "tests" / "install.py").is_file() and not (tmp_path / "jobs").exists()
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "installed").touch()  # the step that follows
    for words in re.findall(r"^COPY \S+ (.*)$", code, re.MULTILINE):
        image(words)
    planned = subprocess.run(
        ["make", "--no-print-directory", "-n", "train"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    command = ".venv/bin/python jobs/train.py --dataset digits --batch_size 32 --epochs 5\n"
    assert planned == command, "nothing is installed again"
    result = run(*command.split()[1:], "--width=8", "--max_steps=1", cwd=tmp_path)
    assert "test_accuracy=" in result.stdout and (tmp_path / "output_dir" / "latest").exists()
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.py"))
    assert size < 6e6, "an environment was copied"  # the code is 3 MB, an environment has hundreds
