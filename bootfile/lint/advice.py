"""The command that shows what a finding means: which files to compare, and which options continue a run.

Both follow from the script: where it saves, and on what the load of a restart depends. What is not known is
a word in capitals, with a note that says what to put in its place.
"""

import ast
import itertools
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from bootfile.lint.facts import Facts
from bootfile.lint.file_names import OUT, UNKNOWN, Names, Option, find_options
from bootfile.lint.record import Condition, Event
from bootfile.lint.rules_files import path_of
from bootfile.lint.sources import unparse
from bootfile.lint.values import Value, list_deps, root

FILES, RESTART, OPTIONS = "FILES", "RESTART", "OPTIONS"
_RENAMES = r"(^|\.)(replace|rename|renames|move)$"
_TELLS_TIME = re.compile(r"time|datetime|now\b|uuid|getpid")
_ASKS = re.compile(r"resum|restart|continu|restor|load|check|ckpt|start|snapshot", re.IGNORECASE)
_ASKS_USER = re.compile(r"resum|restart|continu", re.IGNORECASE)
_IS_PLAIN = re.compile(
    r"exists|is_?file|is_?dir|glob|newest|latest|rank|master|main|cuda|gpu|device|^(with|except|case)\b|no_grad"
)
_EQUALS = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)
_SWITCHES = ("const", "none", "attribute", "option", "unknown")


class _NotKnown(Exception):
    """A word of the command is not known. Its text says where to look."""


def advise(facts: Facts) -> str:
    """Return the command that shows the effect of a restart of a script, with its notes in brackets."""
    return _Advisor(facts).advise()


class _Advisor:
    """names: renders paths. exact: the objects of Exact. files: the name of each file that is saved."""

    def __init__(self, facts: Facts):
        self.facts = facts
        self.options = find_options(facts.sources)
        self.names = Names(self.options)
        self.exact = [root(event.value) for event in facts.select("method") if event.value.key == "Exact"]
        self.files = {save.event: self._find_name(save.event) for save in facts.saves}

    def advise(self) -> str:
        notes: list[str] = []
        compare = self._try(self._find_pattern, FILES, notes)
        resume_with = self._try(self._find_restart, RESTART, notes)
        words = [word for flag in self.names.given for word in (flag, OUT) if word]
        known = {*self.names.given, *resume_with.split()}
        needed = [one.flag for one in self.options.values() if one.is_required and one.flag not in known]
        if needed:
            words.append(OPTIONS)
            notes.append(f"{OPTIONS}: those of the script, which needs {', '.join(needed)}")
        options = f" -- {' '.join(words)}" if words else ""
        script = shlex.quote(os.path.relpath(self.facts.tracer.source.path))
        command = f'bootfile prove {script} --compare "{compare}" --resume_with "{resume_with}"{options}'
        return f"{command} ({'; '.join(notes)})" if notes else command

    def _try(self, find: Callable[[], str], word: str, notes: list[str]) -> str:
        """Return what `find` finds; the word in its place, with a note, if it is not known."""
        try:
            return find()
        except _NotKnown as reason:
            notes.append(f"{word}: {reason}")
            return word

    # Files

    def _find_name(self, event: Event) -> str:
        """Return the name that a file has in the end."""
        name = self.names.find(path_of(event))
        for call in self.facts.calls(_RENAMES):
            pair = [call.args[key] for key in (0, 1) if key in call.args]
            # `temporary.replace(final)`; with two arguments it is that of a text
            pair = [call.value, *pair] if call.name == "method" else pair
            if len(pair) == 2 and name != "*" and self.names.find(pair[0]) == name:
                return self.names.find(pair[1])
        return name

    def _find_pattern(self) -> str:
        """Return the pattern of the files, in a folder above all that the script saves. Raises _NotKnown."""
        fullest = self.facts.fullest_save
        files = [*self.files.values()]
        for exact in self.exact:
            # its checkpoints have the number of the run, which differs in each
            folder = self.names.find(exact.options.get(0, Value()))
            files = [file for file in files if os.path.dirname(file) == folder]
            if not files or "*" in folder:
                raise _NotKnown('let the script save its weights in the folder of Exact, as "OUT/last.pt"')
        if fullest is None:
            raise _NotKnown('the files that the script saves, as "OUT/*.pt"')
        place = self._name_place(fullest.event)
        deps = list_deps(path_of(fullest.event))
        if any(_TELLS_TIME.search(f"{dep.key} {dep.label}") for dep in deps):
            raise _NotKnown(f"{place} writes a name with the time: give each run the same one")
        name = files[0] if self.exact else self.files[fullest.event]
        ending = os.path.splitext(name)[1]
        is_known = all(not file.lstrip("/").startswith("*") for file in files)
        if "*" in ending or not ending or not is_known or name == "*":
            raise _NotKnown(f'the files that {place} writes, as "OUT/*.pt"')
        first = _find_common([os.path.dirname(file) for file in files])
        # a folder with a known name, which prove moves away after each run
        if not os.path.dirname(os.path.join(first, "").partition("*")[0]):
            raise _NotKnown(f"let {place} write below a folder, which prove moves away after each run")
        is_flat = all(os.path.dirname(file) == first for file in files)
        return f"{first}/{'' if is_flat else '**/'}*{ending}"

    def _name_place(self, event: Event) -> str:
        is_same = event.path == self.facts.tracer.source.path
        return f"line {event.line}" if is_same else f"line {event.line} of {os.path.basename(event.path)}"

    # Options of a restart

    def _find_restart(self) -> str:
        """Return the words that continue a run. Raises _NotKnown."""
        loads = [*self.facts.restart_loads(), *self.facts.calls("^load_state$")]
        if self.exact or not (loads or self.facts.restores_all or self.facts.trainers()):
            return ""
        if not loads:
            raise _NotKnown("the options that continue a run")
        load = loads[0]
        words: dict[str, list[str]] = {}
        for condition in load.conditions:
            for word in self._read_condition(condition, load):
                words[word[0]] = word
        file = load.args.get(0) or load.args.get("f") or Value()
        options = self._list_options(_list_parts(file))
        for option in options:
            if option.flag not in self.names.given and not option.default:
                newest = self._name_newest(option, file)
                is_positional = not option.flag.startswith("-")
                words[option.flag] = [newest] if is_positional else [option.flag, newest]
        # a function may look for the newest file
        is_found = any(dep.flags & {"from_call", "listing", "element"} for dep in list_deps(file))
        if "*" in self.names.find(file) and not options and not is_found:
            raise _NotKnown(f"the options with which {self._name_place(load)} loads the newest checkpoint")
        return " ".join(shlex.quote(word) for of_option in words.values() for word in of_option)

    def _list_options(self, values: Iterable[Value]) -> list[Option]:
        found = [self.names.option_of(value) for value in values]
        return list(dict.fromkeys(option for option in found if option is not None))

    def _read_condition(self, condition: Condition, load: Event) -> Iterator[list[str]]:
        """Yield the words with which a test leads to a load. Raises _NotKnown."""
        text = condition.text
        text = f"if {text}" if condition.is_true else f"unless {text}".replace("unless not ", "if ")
        reason = f"the options that continue a run: {self._name_place(load)} loads {text}"
        parts = _split(condition)
        for part in [part for part in parts if "argv" in unparse(part)]:
            is_listed = isinstance(part, ast.Compare) and isinstance(part.ops[0], ast.In)
            if not is_listed or not isinstance(part.left, ast.Constant) or not condition.is_true:
                raise _NotKnown(reason)
            yield [str(part.left.value)]
        asked = self._list_options(_list_read(condition.value))
        in_file = self._list_options(_list_parts(load.args.get(0) or Value()))
        is_asked = _ASKS_USER.search(condition.text) is not None
        for option in [one for one in asked if is_asked or one in in_file or _ASKS.search(one.name)]:
            for part in [part for part in parts if option.name in unparse(part)] or parts:
                value = _choose(option, part, condition.is_true)
                if value is None and option not in in_file:
                    raise _NotKnown(reason)
                if value:
                    yield value
        if parts and not asked and "argv" not in text and _is_switch(condition):
            raise _NotKnown(f"{reason}, not an option")

    def _name_newest(self, option: Option, file: Value) -> str:
        """Return the file that an option names. Raises _NotKnown if that is another one after each save."""
        fullest = self.facts.fullest_save
        name = self.files[fullest.event] if fullest is not None else "*"
        if self.names.option_of(root(file)) is not option or "*" in name:
            raise _NotKnown(f"the options that continue a run, as {option.flag} with the newest checkpoint")
        return name


def _split(condition: Condition) -> list[Any]:
    """Return the tests of `a and b`, of which each must be true; the test itself if it is another one."""
    tests = [condition.node.test] if hasattr(condition.node, "test") else []
    is_all = condition.is_true and any(isinstance(getattr(test, "op", None), ast.And) for test in tests)
    return [*tests[0].values] if is_all else tests


def _choose(option: Option, test: ast.expr, is_true: bool) -> list[str] | None:
    """Return the words with which a test of an option is true, [] if it is without them; None if they are
    not known."""
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, is_true = test.operand, not is_true
    wanted = None
    if isinstance(test, ast.Compare):
        other, operator = test.comparators[0], test.ops[0]
        if not isinstance(other, ast.Constant) or not isinstance(operator, _EQUALS):
            return None
        is_equal = isinstance(operator, ast.Eq | ast.Is)
        # `args.mode == "resume"`, `args.resume is not None`
        wanted = other.value or None
        is_true = is_true is (is_equal if wanted is not None else not is_equal)
    if option.default is UNKNOWN:
        return None
    is_set = option.default == wanted if wanted is not None else bool(option.default)
    if is_set is is_true:
        return []
    if not is_true or (option.has_value and wanted is None and option.default is not False):
        return None
    # an option of the type bool is true with any text
    return [option.flag, str(wanted or 1)] if option.has_value else [option.flag]


def _is_switch(condition: Condition) -> bool:
    """Return whether a test without an option may keep a restart from loading: it neither looks for a file
    nor asks for the rank, or it reads a value by which the user asks for a restart, such as a constant."""
    deps = list_deps(condition.value)
    for dep in deps:
        asks = _ASKS_USER if "from_call" in dep.flags else _ASKS
        is_off = dep.kind not in ("const", "none") or bool(dep.key) is not condition.is_true
        if dep.kind in _SWITCHES and is_off and asks.search(dep.label) and dep.label in condition.text:
            return "exists" not in condition.text
    is_found = any("listing" in dep.flags or _IS_PLAIN.search(str(dep.key)) for dep in deps)
    return not is_found and not _IS_PLAIN.search(condition.text)


def _list_read(value: Value, depth: int = 0) -> Iterator[Value]:
    """Yield a value and those from which it was computed here, and not by a function that is not known, such
    as one that reads a file of settings."""
    yield value
    is_call = bool("from_call" in value.flags and value.key) and not _IS_PLAIN.search(str(value.key))
    for part in value.deps if depth < 6 and not is_call else ():
        yield from _list_read(part, depth + 1)


def _list_parts(path: Value, depth: int = 0) -> Iterator[Value]:
    """Yield a path and its parts."""
    yield path
    for part in path.options.values() if depth < 6 else ():
        yield from _list_parts(root(part), depth + 1)


def _find_common(folders: list[str]) -> str:
    """Return the folder above all of these; "" if that is the working folder."""
    levels = zip(*[folder.split("/") for folder in folders], strict=False)
    return "/".join(level[0] for level in itertools.takewhile(lambda level: len(set(level)) == 1, levels))
