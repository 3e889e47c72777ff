"""Numbers that a training loop carries from one pass to the next: what they begin with, what they hold, and
whether a restart brings them back."""

import ast
import re
from typing import NamedTuple

from bootfile.lint import values
from bootfile.lint.facts import Facts
from bootfile.lint.record import Condition, Event
from bootfile.lint.sources import find_counted
from bootfile.lint.values import Value

SETS = ("set_name", "set_attribute", "set_item")
OFFSET = re.compile(
    r"resum|restart|start_(step|epoch|iter)|offset|restor|previous|step_start|begin", re.IGNORECASE
)
EXTREME = re.compile(r"(^|\.)(min|max|amin|amax)$")
_BEST_KEY = re.compile(r"best|highest|lowest|top|record", re.IGNORECASE)
_TELLS_TIME = re.compile(r"time|perf_counter|monotonic|datetime|now")
ORDERS = ast.Lt | ast.Gt | ast.LtE | ast.GtE


class Carried(NamedTuple):
    """A number that a training loop carries from one pass to the next. start: what it is before the loop.
    sets: the assignments in the loop."""

    start: Value
    sets: list[Event]

    @property
    def name(self) -> str:
        return self.sets[0].value.label if self.start.kind == "list" else self.sets[0].text

    @property
    def is_counter(self) -> bool:
        """Whether the loop adds constants to it."""
        return bool(self.counts) and not any("sum" in event.args[0].flags for event in self.counts)

    @property
    def counts(self) -> list[Event]:
        """The assignments that add a number to it."""
        return [event for event in self.sets if find_counted(event.node) is not None]


def list_carried(facts: Facts) -> list[Carried]:
    """Return the numbers that the training loops carry, and that begin again at each start."""
    of_start: dict[Value, list[Event]] = {}
    for event in facts.in_training(*SETS):
        start = first_of(event)
        # a name of a function that the loop calls is a new one at each call
        is_local = event.name == "set_name" and len(event.functions) > event.loops[0].calls
        is_before = values.is_start(start) and not any(loop in facts.loops for loop in start.loops)
        # an option such as --start_epoch is the number of the restart
        is_offset = start.kind == "option" and OFFSET.search(start.label)
        if is_before and not is_local and not is_offset:
            of_start.setdefault(start, []).append(event)
    # `history.append(loss)`, `if loss < min(history)`
    for event in facts.in_training("method"):
        is_list = event.text == "append" and event.value.kind == "list" and 0 in event.args
        if is_list and event.value.label and not any(loop in facts.loops for loop in event.value.loops):
            of_start.setdefault(event.value, []).append(event)
    return [Carried(start, sets) for start, sets in of_start.items()]


def first_of(event: Event) -> Value:
    """Return what a number was before the loops that change it."""
    value, name = event.args[1], last_part(event.text)
    while value.of and value.kind in ("counter", "shifted", "unknown") and last_part(value.label) == name:
        value = value.of
    return value


def conditions_within(event: Event) -> list[Condition]:
    """Return the tests around an event that are within its outermost loop."""
    return list(event.conditions[event.loops[0].depth :])


def is_branch(test: Condition) -> bool:
    """Return whether a test has an event in a branch: what follows `if ...: break` is in none of it."""
    return test.is_true or bool(getattr(test.node, "orelse", []))


def last_part(name: str) -> str:
    """Return the last name of `trainer.best`, or the key of `best["loss"]`."""
    return re.split(r"[.\[]", name.rstrip("]"))[-1].strip("'\"")


def is_compared(facts: Facts, start: Value, value: Value, is_equal: bool = False) -> bool:
    """Return whether a test compares a number, or the smallest or largest of a list, with another one.
    is_equal: `counter == limit` is such a test, too."""
    for compared in [dep for dep in facts.list_deps(value) if dep.kind == "compared"]:
        deps, operator = facts.list_deps(compared), compared.node.ops[0]
        # `if loss == min(losses)`
        is_extreme = any(EXTREME.search(str(dep.key)) for dep in deps)
        is_ordered = isinstance(operator, ORDERS) or (is_equal and isinstance(operator, ast.Eq))
        if start in deps and (is_extreme or (is_ordered and start.kind != "list")):
            return True
    return False


def is_result(facts: Facts, value: Value) -> bool:
    """Return whether a value comes from what the training computes, and not from counters, options or the
    clock."""
    deps = facts.list_deps(value)
    if any(_TELLS_TIME.search(f"{dep.key} {dep.label}") for dep in deps if "from_call" in dep.flags):
        return False
    plain = (
        "const", "none", "option", "args", "range", "module", "list", "compared", "field", "checkpoint",
        *values.NUMBERS,
    )  # fmt: skip
    is_computed = any(dep.flags & {"from_call", "sum"} for dep in deps)
    return is_computed or any(dep.kind not in plain and not dep.deps for dep in deps)


def is_restored(
    facts: Facts, number: Carried, is_best: bool = False, others: frozenset[str] = frozenset()
) -> bool:
    """Return whether a name gets a value of a checkpoint anywhere. is_best: the checkpoint may call it by
    another name for the best result. others: keys of other numbers."""
    name = last_part(number.name)
    here = [event.functions for event in number.sets if event.name == "set_name"]
    for event in facts.select(*SETS):
        # the same name in another function is another one
        is_same = event.name != "set_name" or not here or event.functions in here
        is_outside = last_part(event.text) == name and not facts.is_in_training(event)
        if is_same and is_outside and values.is_restored(event.args[0]):
            return True
    # the script reads an entry of nearly the same name, and what it does with it is not followed
    reads = {event.value for event in facts.select("read")}
    given = [event.args[0] for event in facts.select(*SETS)]
    given += [value for event in facts.select("load_state") for value in event.args.values()]
    followed = {dep for value in given for dep in facts.list_deps(value)}
    keys = {str(value.key or "") for value in reads - followed} - others.difference({name}) - {""}
    return any(key in name or name in key or (is_best and _BEST_KEY.search(key)) for key in keys)
