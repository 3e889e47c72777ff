"""found.csv is well formed, the page gives its counts, and precision.csv and sets.csv have its sums."""

import csv
import re
from collections import Counter

from bootfile.lint.table import RETIRED, RULES
from tests.conftest import ROOT

FOLDER = ROOT / "tests" / "lint"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
FORMS = {
    "repository": r"[\w.-]+/[\w.-]+",
    "commit": r"[0-9a-f]{12}",
    "path": r"[\w./-]+\.py",
    "line": r"[1-9]\d*",
    "rule": r"R\d{3}",
    "finding": r"\S.*\S",
}
with (FOLDER / "sets.csv").open(encoding="utf-8", newline="") as sets:
    SETS = [*csv.DictReader(sets)]
with (FOLDER / "precision.csv").open(encoding="utf-8", newline="") as rules:
    HEAD, *ROWS = csv.reader(rules)


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


def test_the_page_gives_the_counts_of_the_file():
    rows = read_found()
    counts = Counter(row["rule"] for row in rows)
    assert counts == Counter({row[0]: int(row[3]) for row in ROWS})
    findings, repositories = re.search(r"(\d+) true findings in (\d+) public", PAGE).groups()
    assert int(findings) == len(rows)
    assert int(repositories) == len({row["repository"] for row in rows})


def test_precision_has_all_rules():
    assert HEAD == ["rule", "true_at_first_try", "findings_at_first_try", "in_found_csv", "a_hint_if"]
    assert {len(row) for row in ROWS} == {len(HEAD)}
    assert [row[0] for row in ROWS] == sorted([*RULES, *RETIRED])
    assert {row[0] for row in ROWS if row[4] == "always"} <= {rule for rule in RULES if RULES[rule].is_hint}


def sum_sets(first):
    """Return (43, 57): the true and all findings of the sets from `first` to L."""
    chosen = [row for row in SETS if row["set"][0] >= first]
    return tuple(sum(int(row[f"{kind}_at_first_try"]) for row in chosen) for kind in ("true", "findings"))


def test_the_sums_of_the_page_agree():
    assert len(SETS) == 13
    for words, first in (("all first tries:", "A"), ("J, K and L:", "J")):
        true, findings = sum_sets(first)
        share = re.search(rf"{words} {true} of {findings} \(\D*([\d.]+)", PAGE)[1]
        assert share == f"{true / findings:.2f}"
    assert sum_sets("A") == tuple(sum(int(row[column] or 0) for row in ROWS) for column in (1, 2))
