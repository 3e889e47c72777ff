"""found.csv is well formed."""

import csv
import re

from bootfile.lint.table import RULES
from tests.conftest import ROOT

FOLDER = ROOT / "tests" / "lint"
FORMS = {
    "repository": r"[\w.-]+/[\w.-]+",
    "commit": r"[0-9a-f]{12}",
    "path": r"[\w./-]+\.py",
    "line": r"[1-9]\d*",
    "rule": r"R\d{3}",
    "finding": r"\S.*\S",
}


def read_found():
    with (FOLDER / "found.csv").open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        assert reader.fieldnames == list(FORMS)
        return list(reader)


def test_each_row_has_a_place_and_a_known_rule():
    for row in read_found():
        assert row.keys() == FORMS.keys(), row
        for field, form in FORMS.items():
            assert re.fullmatch(form, row[field]), row
        assert row["rule"] in RULES, row


def test_no_row_comes_twice_and_each_repository_has_one_commit():
    rows = [tuple(row.values()) for row in read_found()]
    assert sorted(set(rows)) == sorted(rows)
    assert len({row[:2] for row in rows}) == len({row[0] for row in rows})
