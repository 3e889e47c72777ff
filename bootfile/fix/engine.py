"""Repair the findings of a script one after another, and withdraw a repair that lint does not confirm."""

import contextlib
import dataclasses
import os
import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from bootfile.fix.checkpoint import Job
from bootfile.fix.edits import Script
from bootfile.fix.places import CannotEdit
from bootfile.fix.repairs import REPAIRS
from bootfile.fix.scope import Scope
from bootfile.fix.training import CannotPlace
from bootfile.ground.errors import BadInput
from bootfile.lint import engine, sources
from bootfile.lint.facts import Facts
from bootfile.lint.table import Finding

_ROOTS = (
    ".git", "pyproject.toml", "setup.py", "setup.cfg", "requirements.txt", "environment.yml", "LICENSE",
    "README.md",
)  # fmt: skip
MOST_OTHERS = 30  # other scripts that are read again because they use a module that changes


@dataclass
class Result:
    """What became of a script. old, new: the contents of the files that change, by path. repaired: (finding,
    notes). left: (finding, the reason)."""

    old: dict[str, bytes] = field(default_factory=dict)
    new: dict[str, bytes] = field(default_factory=dict)
    repaired: list[tuple[Finding, list[str]]] = field(default_factory=list)
    left: list[tuple[Finding, str]] = field(default_factory=list)


class Project:
    """A script and the contents of its files. A finding is known by its rule, file and text, because repairs
    move the lines."""

    def __init__(self, path: str):
        self.path = path
        self.root = find_root(path)
        self.contents: dict[str, bytes] = {}
        self._parsed: dict[str, sources.Source | None] = {}

    def lint(self, contents: dict[str, bytes]) -> tuple[list[Finding], Facts | None]:
        """Return the findings and facts of the script with these contents of files."""
        changed = {path: sources.parse(path, data) for path, data in contents.items()}
        script = changed.get(self.path) or sources.read(self.path)
        parsed = {**self._parsed, **changed}
        findings, facts = engine.examine(self.path, script, parsed)
        # without a mark: the folder of the script and of all that it imports
        if not self.root:
            files = [self.path, *[source.path for source in (facts.sources if facts else [])]]
            self.root = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in files])
        kept = {path: source for path, source in parsed.items() if path not in changed}
        self._parsed = kept
        return findings, facts

    def is_inside(self, path: str) -> bool:
        """Return whether a file may be changed: it is one of the project."""
        folder = os.path.realpath(self.root)
        return os.path.commonpath([folder, os.path.realpath(path)]) == folder


def find_root(path: str) -> str:
    """Return the folder of the project of a script: the nearest one with a repository or a package's
    settings, a licence or a README; "" if there is none."""
    folder = os.path.dirname(os.path.abspath(path))
    while folder != os.path.dirname(folder):
        if any(os.path.exists(os.path.join(folder, name)) for name in _ROOTS):
            return folder
        folder = os.path.dirname(folder)
    return ""


def describe(finding: Finding) -> tuple[str, str, str]:
    """Return what stays of a finding when its lines move."""
    return finding.rule, os.path.abspath(finding.path), re.sub(r"line \d+", "line", finding.message)


def repair(path: str, only: Collection[str] = (), is_hint_repaired: bool = True) -> Result:
    """Repair the findings of a script. only: rules, all if empty. Raises BadInput if it cannot be read."""
    project, result = Project(path), Result()
    reasons: dict[tuple[str, str, str], str] = {}
    order = list(REPAIRS)
    # the user knows the lines of the old text
    first: dict[tuple[str, str, str], Finding] = {}
    while True:
        findings, facts = project.lint(project.contents)
        first = first or {describe(finding): finding for finding in findings}
        asked = [finding for finding in findings if not only or finding.rule in only]
        chosen = [finding for finding in asked if is_hint_repaired or not finding.is_hint]
        todo = [finding for finding in chosen if finding.rule in REPAIRS and describe(finding) not in reasons]
        if not todo or facts is None:
            break
        finding = min(todo, key=lambda finding: (order.index(finding.rule), finding))
        try:
            _check_order(finding, findings)
            job = _attempt(project, finding, facts, findings)
            shown = _show(first.get(describe(finding), finding), path)
            result.repaired.append((shown, job.notes))
            project.contents.update({name: script.render() for name, script in job.scripts.items()})
        except CannotEdit as error:
            reasons[describe(finding)] = str(error)
    for finding in chosen:
        reason = reasons.get(describe(finding), "there is no repair of this rule")
        shown = _show(first.get(describe(finding), finding), path)
        result.left.append((dataclasses.replace(shown, is_hint=finding.is_hint), reason))
    for name, data in project.contents.items():
        result.old[name], result.new[name] = sources.read(name).data, data
    return result


def change(path: str, make: Callable[[Script], list[str]]) -> tuple[Result, list[str]]:
    """Return (the new text of a script, notes for the user). make: plans the edits. Raises CannotPlace, and
    BadInput if the script cannot be read."""
    data = sources.read(path).data
    try:
        script = Script(path, data)
        notes = make(script)
        new = script.render()
        compile(new, path, "exec", dont_inherit=True)
    except (CannotEdit, SyntaxError) as error:
        raise CannotPlace(f"the new text cannot be made: {error}") from error
    return Result({path: data}, {path: new}), notes


def _check_order(finding: Finding, findings: list[Finding]) -> None:
    """Raise CannotEdit if a repair needs one that was not possible or not chosen."""
    left = [other.rule for other in findings if other.rule in ("R101", "R103")]
    if finding.rule == "R302" and left:
        raise CannotEdit(f"{left[0]} is left: later epochs need the optimizer and its learning rate")


def _show(finding: Finding, script: str) -> Finding:
    """Return a finding with the paths that the user sees."""
    return dataclasses.replace(finding, path=os.path.relpath(finding.path), script=os.path.relpath(script))


def _attempt(project: Project, finding: Finding, facts: Facts, findings: list[Finding]) -> Job:
    """Plan a repair, and return it if lint finds it right. Raises CannotEdit."""
    job = Job(finding, facts, Scope(facts), {})
    REPAIRS[finding.rule](job)
    outside = [path for path in job.scripts if not project.is_inside(path)]
    if outside:
        raise CannotEdit(f"{outside[0]} is outside of the project {project.root}")
    contents = {**project.contents, **{name: script.render() for name, script in job.scripts.items()}}
    try:
        after, _ = project.lint(contents)
        for name in job.scripts:
            compile(contents[name], name, "exec", dont_inherit=True)
    except (BadInput, SyntaxError) as error:
        raise CannotEdit(f"not safe: the new text cannot be compiled: {error}") from error
    before, later = Counter(map(describe, findings)), Counter(map(describe, after))
    if later[describe(finding)] >= before[describe(finding)]:
        raise CannotEdit("not safe: lint still has the finding after the repair")
    # of most rules lint tells the first finding only: the next one is not new
    counts = [sum(found[key] for key in found if key[0] == finding.rule) for found in (before, later)]
    is_more = counts[1] > counts[0]
    new = [described for described in later - before if described[0] != finding.rule or is_more]
    if new:
        rule, _, message = min(new)
        raise CannotEdit(f"not safe: the repair leads to {rule}: {message}")
    _check_others(project, contents, set(job.scripts) - {project.path})
    return job


def _check_others(project: Project, contents: dict[str, bytes], modules: set[str]) -> None:
    """Raise CannotEdit if the new text of a module leads to a finding in another script of the project."""
    names = [os.path.splitext(os.path.basename(path))[0].encode() for path in modules]
    paths = [path for path in engine.find_files(project.root) if engine.may_train(path)] if modules else []
    same = os.path.realpath(project.path)
    for path in [path for path in paths if os.path.realpath(path) not in (same, *modules)][:MOST_OTHERS]:
        with contextlib.suppress(BadInput):
            source = sources.read(path)
            if not any(name in source.data for name in names):
                continue
            other = Project(path)
            before = Counter(map(describe, other.lint(project.contents)[0]))
            new = Counter(map(describe, other.lint(contents)[0])) - before
            if new:
                rule = min(new)[0]
                raise CannotEdit(f"not safe: {os.path.relpath(path)} uses this file, and would have {rule}")
