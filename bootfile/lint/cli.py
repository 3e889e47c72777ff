"""Find restart bugs in training scripts, in a second, without running them.

    bootfile lint train.py
    bootfile lint FOLDER --format github

The scripts need no change, and nothing is executed: lint reads Python files, and follows the values of a
script into the modules of its project. It reports state that the loop changes and the checkpoint lacks, state
that is saved but not loaded, wrong epochs, random numbers and orders that begin again, and
files that a kill or another rank destroys. What it cannot follow, it does not report. A line that says
"hint" may be intended. guides/lint.md is the list of rules.

A comment turns rules off in its line: `# bootfile: ignore R103`, or all of them: `# bootfile: ignore`.

Exit codes: 0 no findings, or hints only; 1 findings; 2 bad input.
"""

import dataclasses
import json
import os
from collections.abc import Iterator

from bootfile.console.parser import Parser
from bootfile.ground.errors import BAD_INPUT, BadInput, print_line, say_error
from bootfile.lint import engine
from bootfile.lint.table import RETIRED, RULES, Finding

FINDINGS = 1
# the events and syntax nodes of a finding are for programs in the same process
_FIELDS = [field.name for field in dataclasses.fields(Finding) if field.name != "evidence"]


def main(arguments: list[str]) -> int:
    """Print the findings in files and folders, and return the exit code. Raises BadInput."""
    parser = Parser(__doc__, "bootfile lint")
    add = parser.add_argument
    add("paths", metavar="FILE_OR_FOLDER", nargs="*", help="Python files, and folders with them")
    add("--explain", metavar="RULE", help="show what a rule finds, what happens, and the fix; such as R103")
    add("--json", action="store_true", help="print one JSON object")
    add("--format", default="text", metavar="text|github", help="github: annotations of a pull request")
    add("--no_hints", action="store_true", help="leave out what may be intended")
    args = parser.parse_args(arguments)
    if args.explain:
        for line in explain(args.explain):
            print_line(line)
        return 0
    if args.format not in ("text", "github"):
        raise BadInput(f"--format {args.format}: expected text or github")
    if not args.paths:
        parser.error("expected FILE_OR_FOLDER")
    findings, errors, count = engine.lint_all(args.paths)
    if args.no_hints:
        findings = [finding for finding in findings if not finding.is_hint]
    wrong = sum(not finding.is_hint for finding in findings)
    counts = [_count(wrong, "finding"), _count(len(findings) - wrong, "hint"), _count(count, "file")]
    lines = [*as_text(findings), "{} and {} in {}".format(*counts)]
    lines = [*as_annotations(findings)] if args.format == "github" else lines
    if args.json:
        print(as_json(findings, errors))
    for line in [] if args.json else lines:
        print_line(line)
    for error in errors:
        say_error(error)
    # a file that cannot be read counts more than findings in others: the check was not whole
    if errors:
        return BAD_INPUT
    return FINDINGS if wrong else 0


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def as_text(findings: list[Finding]) -> Iterator[str]:
    """Yield the lines of a report."""
    for finding in findings:
        rule = RULES[finding.rule]
        word = "hint: " if finding.is_hint else ""
        fix = f"; fix: {finding.fix}" if finding.is_hint and finding.fix else ""
        yield f"{finding.path}:{finding.line}: {finding.rule} {word}{finding.message}{fix}"
        if finding.is_hint:
            continue
        yield f"    {rule.consequence}"
        yield f"    fix: {finding.fix or rule.fix}"
        yield f"    report: {rule.report}"
        yield f"    to see it happen: {finding.prove}"


def as_json(findings: list[Finding], errors: list[str]) -> str:
    """Return the findings as one JSON object: {"findings": [...], "errors": [...]}."""
    rows = []
    for finding in findings:
        rule = RULES[finding.rule]
        row = {name: getattr(finding, name) for name in _FIELDS}
        row.update(consequence=rule.consequence, fix=finding.fix or rule.fix, report=rule.report)
        rows.append(row)
    return json.dumps({"findings": rows, "errors": errors}, indent=2)


def as_annotations(findings: list[Finding]) -> Iterator[str]:
    """Yield the findings as workflow commands of GitHub, which shows them at the lines of a pull request."""
    for finding in findings:
        rule = RULES[finding.rule]
        kind = "notice" if finding.is_hint else "error"
        text = f"{finding.message}. {rule.consequence}. fix: {finding.fix or rule.fix}"
        path = _escape(os.path.normpath(finding.path)).replace(":", "%3A").replace(",", "%2C")
        yield f"::{kind} file={path},line={finding.line},title={finding.rule}::{_escape(text)}"


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def explain(rule: str) -> Iterator[str]:
    """Yield the lines about a rule. Raises BadInput."""
    if rule in RETIRED:
        raise BadInput(f"--explain {rule}: a rule of earlier releases, which lint does not look for any more")
    if rule not in RULES:
        raise BadInput(f"--explain {rule}: unknown rule: expected one of {', '.join(RULES)}")
    row = RULES[rule]
    yield f"{rule}: {row.title}"
    yield f"    {row.consequence}"
    yield f"    fix: {row.fix}"
    yield f"    report: {row.report}"
    yield f"    turn it off in a line: # bootfile: ignore {rule}"
