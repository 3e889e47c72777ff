"""Name what is not as in an old run when its steps are computed again: the causes of a difference that come
before an error of hardware."""

from collections.abc import Mapping
from typing import Any

from bootfile.exact import code
from bootfile.history.parent import Parent
from bootfile.machine.differences import find_differences, in_words

# between a difference and its causes, in the error of a program that computes steps again
NOT_THE_SAME = ". Not as in the run: "
# facts of a start on which no bit of a step depends; the processes are compared before the steps
_WITHOUT_EFFECT = {
    "job", "system", "device", "cores", "nodes", "processes per node", "world size", "backend",
}  # fmt: skip


def find(parent: Parent, now: Mapping[str, Any]) -> list[str]:
    """Return what differs between the start of the old run that made the steps and this start, in words, the
    first cause first; [] if all that is recorded is the same.

    now: "modules", as code.digest_modules(), and as in starts.jsonl: "code" (the commit), "training data",
    "data backend", "settings" (those that may change the training) and "environment".
    """
    before = parent.start
    found = []
    modules = parent.read_code()
    changes = code.describe_changes(modules, now["modules"])
    if changes:
        found.append(changes)
    elif not modules and before.get("code") != now["code"]:
        found.append(_in_words("commit", before.get("code"), now["code"]))
    for name in ("training data", "data backend"):
        if before.get(name) and before[name] != now[name]:
            found.append(_in_words(name, before[name], now[name]))
    for name, value in now["settings"].items():
        if parent.settings.get(name, value) != value:
            found.append(_in_words(f"--{name}", parent.settings[name], value))
    for name, there, here in find_differences(before["environment"], now["environment"]):
        if name not in _WITHOUT_EFFECT:
            found.append(f"{in_words(name, there)} in the run, {in_words(name, here)} here")
    return found


def _in_words(name: str, there: object, here: object) -> str:
    return f"{name} {there} in the run, {here} here"
