"""Each case of the zoo has a short program and a pinned release. The guide has their numbers and defects."""

import re

import pytest

from tests.conftest import ROOT
from tests.zoo import page
from tests.zoo.__main__ import judge
from tests.zoo.cases import CASES, STATES

FOLDER = ROOT / "tests" / "zoo"
ALL = [*CASES, *STATES]
GUIDE = (ROOT / "guides" / "zoo.md").read_text(encoding="utf-8")
PINS = {
    *re.findall(r"^[\w-]+==[\w.]+", (FOLDER / "requirements.txt").read_text(), re.MULTILINE),
    *re.findall(r"^[\w-]+==[\w.]+", (FOLDER / "releases.txt").read_text(), re.MULTILINE),
}


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_case_is_complete(case):
    program = FOLDER / case.command.split()[0]
    assert len(program.read_text().splitlines()) <= 60
    assert case.package in PINS
    assert case.text
    if case.thread:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", case.thread)
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", case.date)


def count(cases):
    """Return how many of the defects are found, as "8 of 9", and the number of correct set-ups."""
    defects = [case for case in cases if case.thread]
    return f"{sum(bool(case.expected) for case in defects)} of {len(defects)}", len(cases) - len(defects)


def test_the_guide_has_the_numbers_of_the_cases():
    for one_run, kind in ((False, "after a restart"), (True, "in each run")):
        found, others = count([case for case in CASES if case.one_run == one_run])
        assert re.search(rf"\| samples, {kind} .*\| {found} \| {others} correct", GUIDE)
    proofs = [case for case in STATES if not case.other and not case.name.endswith("-proof")]
    digests = [case for case in STATES if case.other]
    row = rf"\| state, after a restart .*\| {count(proofs)[0]} \| {count(STATES)[1]} correct"
    assert re.search(row, GUIDE)
    assert re.search(rf"\| state, in each run .*\| {count(digests)[0]} \|", GUIDE)


def test_the_page_lists_the_defects():
    text = page.PAGE.read_text(encoding="utf-8")
    assert text == page.write_page(), "python -m tests.zoo.page writes it"
    assert text.count(" | **no** |") == sum(bool(case.thread) and not case.expected for case in ALL) > 2


def test_each_program_and_release_has_a_case():
    others = {"__init__.py", "__main__.py", "cases.py", "page.py", "start.py"}
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
