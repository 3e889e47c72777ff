"""Each promise of the pages has a test in `make test`: tests/promises.csv names it."""

import ast
import csv

import pytest

from tests.conftest import ROOT

with (ROOT / "tests" / "promises.csv").open(encoding="utf-8", newline="") as _file:
    ROWS = [(row["promise"], *row["test"].split("::")) for row in csv.DictReader(_file)]
LEFT_OUT = {"thorough", "real", "gpu"}  # marks of what `make test` leaves out


def marks_of(nodes):
    """Return the names of pytest's marks that are written in these expressions as a whole.

    A mark within parametrize() is one of some cases: the others are in `make test`.
    """
    marks = set()
    for node in nodes:
        each = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
        for mark in each:
            name = ast.unparse(mark.func if isinstance(mark, ast.Call) else mark)
            marks.add(name.rpartition("mark.")[2])
    return marks


def find_marks(path, function):
    """Return the marks of a test and of its file. Fail if the test is missing."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    assert len(tests) == 1, f"{path} has no test {function}"
    of_file = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    return marks_of(tests[0].decorator_list) | marks_of(of_file)


@pytest.mark.parametrize(("promise", "path", "function"), ROWS, ids=[row[0] for row in ROWS])
def test_the_test_of_a_promise_is_in_make_test(promise, path, function):
    assert not find_marks(path, function) & LEFT_OUT


def test_the_table_is_read():
    assert len(ROWS) >= 100


def test_a_mark_of_one_case_is_not_one_of_the_test():
    [listed, called, one_case] = map(
        ast.parse,
        (
            "[pytest.mark.thorough, x]",
            "pytest.mark.real()",
            "pytest.mark.parametrize('a', [pytest.param(1, marks=pytest.mark.thorough)])",
        ),
    )
    assert marks_of([listed.body[0].value]) == {"thorough", "x"}
    assert marks_of([called.body[0].value]) == {"real"}
    assert marks_of([one_case.body[0].value]) == {"parametrize"}
