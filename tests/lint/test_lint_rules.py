"""Each rule finds its bad examples, and nothing in its good ones; and what lint finds in larger scripts."""

import re

import pytest

from bootfile.lint.engine import lint
from bootfile.lint.table import RETIRED, RULES
from tests.conftest import ROOT
from tests.lint import planted, zoo
from tests.lint.examples import EXAMPLES, write
from tests.lint.flows import FLOWS, SEARCHES

# hints about other packages and about whole scripts: tests/lint/zoo.py has their examples
OTHERS = {"R701", "R702", "R703", "R801"}
BAD = [(rule, number) for rule in EXAMPLES for number in range(len(EXAMPLES[rule][0]))]
GOOD = [(rule, number) for rule in EXAMPLES for number in range(len(EXAMPLES[rule][1]))]


def find_rules(text, folder):
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    compile(text, "script.py", "exec")
    return [finding.rule for finding in lint(str(path))]


def test_each_rule_has_examples():
    assert EXAMPLES.keys() | OTHERS == RULES.keys()
    assert all(len(bad) >= 2 and len(good) >= 2 for bad, good in EXAMPLES.values())


@pytest.mark.parametrize(("rule", "number"), BAD)
def test_a_bad_example_is_found(rule, number, tmp_path):
    assert rule in find_rules(write(EXAMPLES[rule][0][number]), tmp_path)


@pytest.mark.parametrize(("rule", "number"), GOOD)
def test_a_good_example_is_not_found(rule, number, tmp_path):
    assert rule not in find_rules(write(EXAMPLES[rule][1][number]), tmp_path)


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.rule)
def test_each_form_of_a_fault_is_found(flow, tmp_path):
    assert flow.rule in find_rules(write(flow.bad), tmp_path)
    assert flow.good is None or flow.rule not in find_rules(write(flow.good), tmp_path)


def test_a_loop_that_looks_for_the_newest_file_is_the_load_of_a_restart(tmp_path):
    assert {"R101", "R103", "R401", "R501"} <= set(find_rules(SEARCHES, tmp_path))


@pytest.mark.parametrize(("rule", "number"), BAD)
def test_a_finding_keeps_what_a_repair_needs(rule, number, tmp_path):
    """The event, loop, value or syntax node at its line; for a missing state, the object and the save."""
    path = tmp_path / "script.py"
    path.write_text(write(EXAMPLES[rule][0][number]), encoding="utf-8")
    findings = [finding for finding in lint(str(path)) if finding.rule == rule]
    for finding in findings:
        place = finding.evidence["event"]
        assert getattr(place, "line", getattr(place, "lineno", None)) == finding.line
        assert finding.is_hint or not RULES[rule].is_hint
    if rule in ("R101", "R103", "R104", "R105"):
        [finding] = findings
        assert finding.evidence["value"].kind in ("optimizer", "scheduler", "scaler", "ema", "copied")
        assert finding.evidence["save"].text == "torch.save"


def test_the_plain_example_has_no_finding(tmp_path):
    assert set(find_rules(write({}), tmp_path)) <= OTHERS


@pytest.mark.parametrize("path", sorted(planted.CORRECT.glob("*.py")), ids=lambda path: path.stem)
def test_a_correct_script_has_no_finding(path):
    assert [finding for finding in lint(str(path)) if not finding.is_hint] == []


def test_planted_faults_are_found():
    missed = [fault.name for fault in planted.FAULTS if not planted.find(fault)[0]]
    assert len(planted.FAULTS) == 34
    assert missed == []


@pytest.mark.thorough
def test_cases_of_the_zoo_are_named():
    named = [case.name for case in zoo.list_cases() if {case.rule, f"{case.rule}h"} & set(zoo.find(case))]
    assert len(named) >= 57


@pytest.mark.thorough
def test_loops_of_bootfile_have_no_finding():
    for folder in ("guides/own_loop", "jobs"):
        for path in sorted((ROOT / folder).glob("*.py")):
            assert [finding for finding in lint(str(path)) if not finding.is_hint] == [], path


@pytest.mark.parametrize("page", ["lint.md", "lint.zh-CN.md"])
def test_the_page_lists_the_rules_that_exist(page):
    """The retired rules stand under the heading of what lint does not see, and nowhere else."""
    text = (ROOT / "guides" / page).read_text(encoding="utf-8")
    heading = {"lint.md": "## What it does not see", "lint.zh-CN.md": "## 它看不到什么"}[page]
    listed, unseen = (set(re.findall(r"R\d{3}", part)) for part in text.split(heading))
    assert listed == RULES.keys()
    assert unseen == set(RETIRED)
