"""The tables of options, environment variables and exit codes agree with the code."""

import re
from typing import Any

import pytest

from common.ground import exits
from tests.support.options import ROOT, documents, read_parsers, render, rewrite

# between processes that Bootfile starts itself: no user sets them
INTERNAL = {"ERROR_PIPE", "HELP_IMPORTS", "RUN_FOLDER", "SIMULATED_NODE"}
INTERNAL |= {"STARTED", "STARTED_BY", "STORE_IS_PARENTS"}
COMMON = (ROOT / "common" / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def parsers() -> dict[str, Any]:
    return read_parsers()


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_options_are_those_of_the_parsers(path, parsers):
    text = path.read_text(encoding="utf-8")
    assert rewrite(text, parsers) == text, "python -m tests.support.options rewrites the tables"


def test_every_job_and_verb_has_its_options_in_a_table(parsers):
    for job in ("train_dp", "train_amp"):
        assert parsers[f"jobs/{job}.py"] == parsers["jobs/train.py"]
    shown = {name for path in documents() for name in re.findall(r"\w+\.py", path.read_text())}
    assert {name.removeprefix("jobs/") for name in parsers if name.endswith(".py")} <= shown
    rows = render("launch", parsers).splitlines()[1:-1]
    assert len(rows) > 15 and all(re.fullmatch(r"[a-z ]+  +\S.*", row) for row in rows)


def test_a_path_may_begin_with_the_home_folder():
    """Each argument of text is one of the parser that expands ~, so none makes a folder of this name."""
    paths = read_parsers("--paths")
    assert {"data_url", "output_dir", "weights", "config"} <= {*paths["jobs/imagenet.py"]}
    assert {"to", "code_dir", "job"} <= {*paths["pack"]} and {"url", "to"} <= {*paths["fetch"]}
    assert [each for name in paths.keys() - {"verbs"} for each in paths[name] if " is ~" in each] == []


def test_environment_variables_are_all_in_the_table():
    code = [path for room in ("common", "datasets", "launch", "jobs") for path in (ROOT / room).rglob("*.py")]
    used = {name for path in code for name in re.findall(r"BOOTFILE_(\w+)", path.read_text(encoding="utf-8"))}
    told = set(re.findall(r"^- `BOOTFILE_(\w+)`", COMMON, re.MULTILINE))
    assert told == used - INTERNAL


def test_exit_codes_are_all_in_the_table():
    codes = {str(value) for name, value in vars(exits).items() if name.isupper() and isinstance(value, int)}
    assert codes <= set(re.findall(r"^- `(\d+)`", COMMON, re.MULTILINE)) and len(codes) == 6
