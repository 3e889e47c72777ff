"""Lint files: trace each one, ask all rules, and leave out what comments turn off."""

import dataclasses
import gc
import os
import re
from collections.abc import Iterable, Iterator

from bootfile.ground.errors import BadInput
from bootfile.lint import (
    known_defects,
    rules_contents,
    rules_epochs,
    rules_files,
    rules_numbers,
    rules_random,
    rules_restart,
    rules_samples,
    rules_state,
    rules_steps,
    sources,
)
from bootfile.lint.advice import advise
from bootfile.lint.facts import Facts
from bootfile.lint.table import Finding
from bootfile.lint.trace import Tracer

_RULES = (
    rules_state, rules_numbers, rules_epochs, rules_steps, rules_random, rules_samples, rules_files,
    rules_contents, rules_restart, known_defects,
)  # fmt: skip
_HIDDEN = {"node_modules", "__pycache__", "build", "dist", "site-packages", ".git", ".venv", "venv"}
# a file without any of these words trains nothing: a script may leave the steps to a module
_TRAINS = re.compile(rb"backward|\bstep\(|Trainer|\.fit\(|train\w*\(")
MOST_OBJECTS = 2_000_000  # objects between two collections


def find_files(path: str) -> Iterator[str]:
    """Yield the Python files of a folder, or a file itself. Raises BadInput if there is no such path."""
    if os.path.isfile(path):
        yield path
        return
    if not os.path.isdir(path):
        raise BadInput(f"{path}: no such file or folder")
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if name not in _HIDDEN and not name.startswith("."))
        for name in sorted(names):
            if name.endswith(".py"):
                yield os.path.join(folder, name)


def may_train(path: str) -> bool:
    """Return whether a file of a folder is worth a look: most modules of a project train nothing."""
    try:
        with open(path, "rb") as file:
            return _TRAINS.search(file.read(sources.LARGEST)) is not None
    except OSError:
        return True


def lint(path: str, parsed: dict[str, sources.Source | None] | None = None) -> list[Finding]:
    """Return the findings of a script and of the modules of its project that it imports, by place. parsed:
    modules that were read for another script. Raises BadInput if the file cannot be read."""
    return examine(path, sources.read(path), parsed)[0]


def examine(
    path: str,
    source: sources.Source,
    parsed: dict[str, sources.Source | None] | None = None,
) -> tuple[list[Finding], Facts | None]:
    """Return the findings of a script, and the facts behind them; no facts if it was too large. source: the
    script, which may differ from the file; so may the modules in parsed."""
    project = sources.Project(path, parsed)
    tracer = Tracer(source, project)
    tracer.run()
    findings: list[Finding] = []
    facts = None
    try:
        # a script that was too large to be walked to its end gets no findings: they could be wrong
        if tracer.is_whole:
            facts = Facts(tracer)
            findings += [finding for rules in _RULES for finding in rules.check(facts)]
            if any(not finding.is_hint for finding in findings):
                command = advise(facts)
                findings = [dataclasses.replace(finding, prove=command) for finding in findings]
    except RecursionError:
        raise BadInput(f"{path}: nested too deeply to be checked") from None
    modules = [source, *[module.source for module in tracer.imported.values()]]
    ignored = {(one.path, line): rules for one in modules for line, rules in one.ignored.items()}
    kept = [one for one in findings if not ignored.get((one.path, one.line), set()) & {"all", one.rule}]
    return sorted(set(kept)), facts


def lint_all(paths: Iterable[str]) -> tuple[list[Finding], list[str], int]:
    """Lint files and folders. Return (the findings, one line for each file that cannot be read, the number of
    files that were read)."""
    findings: dict[tuple[str, int, str], list[Finding]] = {}
    parsed: dict[str, sources.Source | None] = {}
    errors, count = [], 0
    pairs = [(path, name) for path in paths for name in find_files(path)]
    # trees and values are many small objects that stay: the usual collections took half of the time
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for name in [name for path, name in pairs if name == path or may_train(name)]:
            try:
                _merge(findings, lint(name, parsed), os.path.relpath(name))
                count += 1
            except BadInput as error:
                errors.append(str(error))
            if gc.get_count()[0] > MOST_OBJECTS:
                gc.collect()
    finally:
        if was_enabled:
            gc.enable()
    return sorted(finding for of_place in findings.values() for finding in of_place), errors, count


def _merge(findings: dict[tuple[str, int, str], list[Finding]], new: list[Finding], script: str) -> None:
    """Add the findings of a script. A module that two scripts import gives its findings once: those of the
    first script in which they are findings."""
    places: dict[tuple[str, int, str], list[Finding]] = {}
    for finding in new:
        place = (os.path.relpath(finding.path), finding.line, finding.rule)
        places.setdefault(place, []).append(dataclasses.replace(finding, path=place[0], script=script))
    for place, of_place in places.items():
        known = findings.get(place)
        is_surer = known is not None and all(one.is_hint for one in known)
        if known is None or (is_surer and not all(finding.is_hint for finding in of_place)):
            findings[place] = of_place
