"""Each case of the zoo has a short program, a pinned release, and a row in the guide."""

import re

import pytest

from tests.conftest import ROOT
from tests.zoo.__main__ import judge
from tests.zoo.cases import CASES, STATES, State

FOLDER = ROOT / "tests" / "zoo"
ALL = [*CASES, *STATES]
GUIDES = {
    kind: (ROOT / "guides" / name).read_text(encoding="utf-8")
    for kind, name in ((False, "zoo.md"), (True, "zoo_state.md"))
}  # by whether a case is one of state
PINS = {
    *re.findall(r"^[\w-]+==[\w.]+", (FOLDER / "requirements.txt").read_text(), re.MULTILINE),
    *re.findall(r"^[\w-]+==[\w.]+", (FOLDER / "releases.txt").read_text(), re.MULTILINE),
}


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_case_is_complete(case):
    program = FOLDER / case.command.split()[0]
    assert len(program.read_text().splitlines()) <= 60
    assert case.package in PINS
    lines = GUIDES[isinstance(case, State)].splitlines()
    row = next(line for line in lines if line.startswith(f"- `{case.name}` "))
    assert case.package.replace("==", " ") in row
    if case.thread:
        repository, number = re.fullmatch(r"([\w.-]+/[\w.-]+)#(\d+)", case.thread).groups()
        assert f"github.com/{repository}/issues/{number}" in row and case.date in row
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", case.date)


def test_each_program_and_release_has_a_case():
    others = {"__init__.py", "__main__.py", "cases.py", "start.py"}
    programs = {path.name for path in FOLDER.glob("*.py")} - others
    assert programs == {case.command.split()[0] for case in ALL}
    releases = re.findall(r"^[\w-]+==[\w.]+", (FOLDER / "releases.txt").read_text(), re.MULTILINE)
    assert set(releases) <= {case.package for case in ALL}
    assert len({case.name for case in ALL}) == len(ALL)


@pytest.mark.parametrize("name", ["bootfile", "swift-fixed"])
def test_an_unusual_line_is_an_alarm(name):
    case = next(case for case in CASES if case.name == name)
    usual, unusual = "data equal for 32 steps", "data different from step 9 on: other samples"
    if case.one_run:
        usual, unusual = "undisturbed: 32 steps", "unusual: epochs 1 and 2 have the same order"
    defect = case._replace(thread="owner/repository#1")
    assert [judge(case, text) for text in (usual, unusual, "failed: ...")] == ["no alarm", "alarm", "failed"]
    assert [judge(defect, text) for text in (usual, unusual)] == ["not found", "found"]


@pytest.mark.parametrize("name", ["torch-sequential-before", "torch-batchnorm-mean"])
def test_a_state_that_differs_is_an_alarm(name):
    case = next(case for case in STATES if case.name == name)
    usual, unusual, failed = "exact: 2 runs equal the reference", "differs: the same again: ...", "error: ..."
    if case.other:
        usual, unusual, failed = "state equal at step 2", "state differs at 2: ...", "state not compared: ..."
    defect = case._replace(thread="owner/repository#1")
    assert [judge(case, text) for text in (usual, unusual, failed)] == ["no alarm", "alarm", "failed"]
    assert [judge(defect, text) for text in (usual, unusual)] == ["not found", "found"]
