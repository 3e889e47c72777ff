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


def test_the_page_and_precision_have_all_rules():
    assert HEAD == ["rule", "true_at_first_try", "findings_at_first_try", "in_found_csv", "a_hint_if"]
    assert {len(row) for row in ROWS} == {len(HEAD)}
    others = re.findall(r"R\d+", re.search(r"^R102 and .*$", PAGE, re.MULTILINE)[0])
    assert sorted([row[0] for row in ROWS] + others) == sorted([*RULES, *RETIRED])
    assert {row[0] for row in ROWS if row[4] == "always"} <= {rule for rule in RULES if RULES[rule].is_hint}


def sum_sets(first):
    """Return "43 of 57 (0.75)", of the sets from `first` to L."""
    chosen = [row for row in SETS if row["set"][0] >= first]
    findings = sum(int(row["findings_at_first_try"]) for row in chosen)
    true = sum(int(row["true_at_first_try"]) for row in chosen)
    return f"{true} of {findings} ({true / findings:.2f})"


def test_the_sums_of_the_page_agree():
    assert len(SETS) == 13
    assert f"All first tries: {sum_sets('A')}" in PAGE
    assert re.search(rf"\bJ, K and L\b.* {re.escape(sum_sets('J'))}", PAGE)
    assert f"A to D do not have: {sum_sets('E')}" in PAGE
    true = sum(int(row[1]) for row in ROWS)
    findings = sum(int(row[2]) for row in ROWS)
    assert sum_sets("A").startswith(f"{true} of {findings} ")
    shares = [int(row["true_at_first_try"]) / int(row["findings_at_first_try"]) for row in SETS]
    assert f"{min(shares):.2f} to {max(shares)} in a set" in PAGE
