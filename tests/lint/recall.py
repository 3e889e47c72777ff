"""Measure how many restart bugs `bootfile lint` names that readers found in scripts.

    python -m tests.lint.recall SCRIPTS TABLE [TABLE ...]

SCRIPTS is a folder with a folder for each script. A TABLE is a CSV file with the columns script (the name of
a folder), path, line, kind ("R103", or "-" for one that no rule looks for), where, in_list ("yes" if the
guide lists the kind), common ("yes" if the form is usual) and comment. A row is named if lint gives a finding
or a hint of its kind in its script. Rows of scripts that SCRIPTS lacks are left out.

It prints the recall, and the findings whose kind the table does not have in their script: they are true bugs
that the readers did not see, or false.
"""

import csv
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

from bootfile.lint import engine
from bootfile.lint.table import Finding

COLUMNS = ["script", "path", "line", "kind", "where", "in_list", "common", "comment"]
# hints about a whole script
WHOLE = ("R702", "R703", "R801")


class Named(NamedTuple):
    """A row of a table, and whether a finding and whether a finding or hint names it."""

    row: dict[str, str]
    by_finding: bool
    by_any: bool


def read_tables(paths: list[str], folder: str) -> list[dict[str, str]]:
    """Return the rows of tables about scripts that a folder has. Raises ValueError for other columns."""
    rows: list[dict[str, str]] = []
    for path in paths:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if reader.fieldnames != COLUMNS:
                raise ValueError(f"{path}: expected the columns {', '.join(COLUMNS)}")
            rows += [row for row in reader if os.path.isdir(os.path.join(folder, row["script"]))]
    return rows


def measure(folder: str, rows: list[dict[str, str]]) -> tuple[list[Named], dict[str, list[Finding]]]:
    """Return what lint names of the rows, and its findings and hints by script."""
    scripts = sorted(name for name in os.listdir(folder) if os.path.isdir(os.path.join(folder, name)))
    found = {name: engine.lint_all([os.path.join(folder, name)])[0] for name in scripts}
    named = []
    for row in rows:
        of_kind = [finding for finding in found[row["script"]] if finding.rule == row["kind"]]
        named.append(Named(row, any(not finding.is_hint for finding in of_kind), bool(of_kind)))
    return named, found


def describe(name: str, rows: list[Named]) -> str:
    """Return a line with the recall of some rows."""
    whole = max(len(rows), 1)
    count, sure = sum(row.by_any for row in rows), sum(row.by_finding for row in rows)
    return f"{name:34}{count} of {len(rows)} ({count / whole:.2f}), {sure} ({sure / whole:.2f}) by a finding"


def main(arguments: list[str]) -> int:
    """Print the recall, and the findings that the tables do not have."""
    folder, *tables = arguments
    rows, found = measure(folder, read_tables(tables, folder))
    own = [row for row in rows if row.row["kind"] not in WHOLE]
    sets: dict[str, Callable[[dict[str, str]], bool]] = {
        "all": lambda row: True,
        "of a listed kind": lambda row: row["in_list"] == "yes",
        "common": lambda row: row["common"] == "yes",
        "common, of a listed kind": lambda row: row["common"] == row["in_list"] == "yes",
    }
    for name, is_in in sets.items():
        print(describe(name, [row for row in rows if is_in(row.row)]))
        print(describe(f"  without {', '.join(WHOLE)}", [row for row in own if is_in(row.row)]))
    for kind in sorted({row.row["kind"] for row in rows}):
        print(describe(kind, [row for row in rows if row.row["kind"] == kind]))
    kinds = {(row.row["script"], row.row["kind"]) for row in rows}
    print("\nnot in the tables:")
    for script, findings in found.items():
        for finding in findings:
            if (script, finding.rule) not in kinds:
                word = "hint" if finding.is_hint else "finding"
                print(f"{script} {finding.path}:{finding.line} {finding.rule} {word}: {finding.message}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
