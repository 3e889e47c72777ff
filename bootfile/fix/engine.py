"""Repair the findings of a script one after another, and withdraw a repair that lint does not confirm."""

import contextlib
import dataclasses
import os
import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from bootfile.fix import repairs_epochs, repairs_files, repairs_numbers, repairs_state
from bootfile.fix.checkpoint import Job
from bootfile.fix.edits import CannotEdit, Script, require
from bootfile.fix.scope import Scope
from bootfile.ground.errors import BadInput
from bootfile.lint import engine, sources
from bootfile.lint.facts import Facts
from bootfile.lint.table import Finding

_ROOTS = (
    ".git", "pyproject.toml", "setup.py", "setup.cfg", "requirements.txt", "environment.yml", "LICENSE",
    "README.md",
)  # fmt: skip
# a repair plans edits, or raises CannotEdit. In this order: what is written, then what is in it, then when
REPAIRS: dict[str, Callable[[Job], None]] = {
    "R503": repairs_files.write_on_rank_0,
    "R501": repairs_files.write_whole,
    "R502": repairs_files.choose_by_number,
    "R506": repairs_files.read_whole,
    "R601": repairs_files.rename_entries,
    "R101": repairs_state.save_object,
    "R103": repairs_state.save_object,
    "R104": repairs_state.save_object,
    "R105": repairs_state.save_object,
    "R109": repairs_state.save_object,
    "R106": repairs_state.save_object,
    "R201": repairs_state.load_object,
    "R303": repairs_epochs.skip_batches,
    "R301": repairs_epochs.shift_start,
    "R302": repairs_epochs.restore_start,
    "R107": repairs_numbers.save_number,
    "R108": repairs_numbers.save_number,
    "R305": repairs_epochs.seed_order,
    "R307": repairs_epochs.set_epoch,
    "R308": repairs_epochs.vary_epoch,
    "R402": repairs_epochs.sort_listing,
    "R401": repairs_state.save_random,
    "R602": repairs_epochs.save_after_step,
    "R801": repairs_epochs.save_at_sigterm,
}
_Described = tuple[str, str, str]
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
        self._parsed = {path: source for path, source in parsed.items() if path not in changed}
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


def _describe(finding: Finding) -> _Described:
    """Return what stays of a finding when its lines move."""
    return finding.rule, os.path.abspath(finding.path), re.sub(r"line \d+", "line", finding.message)


def repair(path: str, only: Collection[str] = (), is_hint_repaired: bool = True) -> Result:
    """Repair the findings of a script. only: rules, all if empty. Raises BadInput if it cannot be read."""
    project, result = Project(path), Result()
    reasons: dict[_Described, str] = {}
    order = list(REPAIRS)
    # the user knows the lines of the old text
    first: dict[_Described, Finding] = {}
    while True:
        findings, facts = project.lint(project.contents)
        first = first or {_describe(finding): finding for finding in findings}
        asked = [finding for finding in findings if not only or finding.rule in only]
        chosen = [finding for finding in asked if is_hint_repaired or not finding.is_hint]
        todo = [
            finding for finding in chosen if finding.rule in REPAIRS and _describe(finding) not in reasons
        ]
        if not todo or facts is None:
            break
        finding = min(todo, key=lambda finding: (order.index(finding.rule), finding))
        try:
            job = _attempt(project, finding, facts, findings)
            shown = _show(first.get(_describe(finding), finding), path)
            result.repaired.append((shown, job.notes))
            project.contents.update({name: script.render() for name, script in job.scripts.items()})
        except CannotEdit as error:
            reasons[_describe(finding)] = str(error)
    for finding in chosen:
        reason = reasons.get(_describe(finding), "there is no repair of this rule")
        shown = _show(first.get(_describe(finding), finding), path)
        result.left.append((dataclasses.replace(shown, is_hint=finding.is_hint), reason))
    for name, data in project.contents.items():
        result.old[name], result.new[name] = sources.read(name).data, data
    return result


def change(path: str, make: Callable[[Script], list[str]]) -> tuple[Result, list[str]]:
    """Return (the new text of a script, notes for the user). make: plans the edits. Raises CannotEdit, and
    BadInput if the script cannot be read."""
    data = sources.read(path).data
    script = Script(path, data)
    notes = make(script)
    new = script.render()
    try:
        compile(new, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise CannotEdit(f"the new text cannot be compiled: {error}") from error
    return Result({path: data}, {path: new}), notes


def _show(finding: Finding, script: str) -> Finding:
    """Return a finding with the paths that the user sees."""
    return dataclasses.replace(finding, path=os.path.relpath(finding.path), script=os.path.relpath(script))


def _attempt(project: Project, finding: Finding, facts: Facts, findings: list[Finding]) -> Job:
    """Plan a repair, and return it if lint finds it right. Raises CannotEdit."""
    needed = [other.rule for other in findings if finding.rule == "R302" and other.rule in ("R101", "R103")]
    reason = "is left: later epochs need the optimizer and its learning rate"
    require(not needed, f"{', '.join(needed)} {reason}")
    job = Job(finding, facts, Scope(facts), {})
    REPAIRS[finding.rule](job)
    outside = [path for path in job.scripts if not project.is_inside(path)]
    require(not outside, f"{', '.join(outside)} is outside of the project {project.root}")
    contents = {**project.contents, **{name: script.render() for name, script in job.scripts.items()}}
    try:
        after, _ = project.lint(contents)
        for name in job.scripts:
            compile(contents[name], name, "exec", dont_inherit=True)
    except (BadInput, SyntaxError) as error:
        raise CannotEdit(f"not safe: the new text cannot be compiled: {error}") from error
    before, later = Counter(map(_describe, findings)), Counter(map(_describe, after))
    is_gone = later[_describe(finding)] < before[_describe(finding)]
    require(is_gone, "not safe: lint still has the finding after the repair")
    # of most rules lint tells the first finding only: the next one is not new
    counts = [sum(found[key] for key in found if key[0] == finding.rule) for found in (before, later)]
    is_more = counts[1] > counts[0]
    new = [described for described in later - before if described[0] != finding.rule or is_more]
    require(not new, f"not safe: the repair leads to {': '.join(min(new)[::2]) if new else ''}")
    _check_others(project, contents, set(job.scripts) - {project.path})
    return job


def _check_others(project: Project, contents: dict[str, bytes], modules: set[str]) -> None:
    """Raise CannotEdit if the new text of a module leads to a finding in another script of the project."""
    names = [os.path.splitext(os.path.basename(path))[0].encode() for path in modules]
    paths = [path for path in engine.find_files(project.root) if engine.may_train(path)] if modules else []
    same = os.path.realpath(project.path)
    for path in [path for path in paths if os.path.realpath(path) not in (same, *modules)][:MOST_OTHERS]:
        with contextlib.suppress(BadInput):
            data = sources.read(path).data
            other = Project(path)
            if any(name in data for name in names):
                before = Counter(map(_describe, other.lint(project.contents)[0]))
                new = Counter(map(_describe, other.lint(contents)[0])) - before
                rules = ", ".join({rule for rule, _, _ in new})
                require(not new, f"not safe: {os.path.relpath(path)} uses this file, and would have {rules}")
