"""Show findings: as text, as JSON, or as annotations of GitHub."""

import dataclasses
import json
import os
import shlex
from collections.abc import Iterator

from bootfile.lint.findings import Finding
from bootfile.lint.table import RULES

# the events and syntax nodes of a finding are for programs in the same process
_FIELDS = [field.name for field in dataclasses.fields(Finding) if field.name != "evidence"]


def as_text(findings: list[Finding]) -> Iterator[str]:
    """Yield the lines of a report."""
    for finding in findings:
        rule = RULES[finding.rule]
        word = "hint: " if finding.is_hint else ""
        yield f"{finding.path}:{finding.line}: {finding.rule} {word}{finding.message}"
        if finding.is_hint:
            continue
        yield f"    {rule.consequence}"
        yield f"    fix: {finding.fix or rule.fix}"
        yield f"    report: {rule.report}"
        yield f"    to see it happen: {prove_command(finding)}"


def prove_command(finding: Finding) -> str:
    """Return the command that shows what a finding means for its script."""
    script = shlex.quote(finding.script)
    return f'bootfile prove {script} --compare "OUT/*.pt" --resume_with "{finding.resume_with}"'


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
    """Yield the lines about a rule."""
    row = RULES[rule]
    yield f"{rule}: {row.title}"
    yield f"    {row.consequence}"
    yield f"    fix: {row.fix}"
    yield f"    report: {row.report}"
    yield f"    turn it off in a line: # bootfile: ignore {rule}"
