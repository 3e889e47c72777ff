"""Repairs of numbers that the loop carries from one epoch to the next: counters and best results."""

import ast
import re
from typing import Any, NamedTuple

from bootfile.fix.checkpoint import (
    Job,
    add_entry,
    check_order,
    find_checkpoint,
    find_moment,
    list_calls,
    load_before_loop,
    load_entry,
)
from bootfile.fix.places import CannotEdit
from bootfile.fix.scope import PLAIN, Reach, list_local
from bootfile.lint.sources import unparse
from bootfile.lint.values import root

_COMPUTED = (*PLAIN, ast.IfExp, ast.BinOp, ast.operator, ast.Subscript, ast.Call)
_FUNCTIONS = ("float", "int", "max", "min", "abs")


class Number(NamedTuple):
    """A number. home: the function whose name it is; None for a name of the module. key: in the checkpoint.
    form: how it is written there, a text with {}."""

    name: str
    path: str
    home: Any
    key: str
    form: str


class Test(NamedTuple):
    """A test around a statement. is_true: which branch of `if` has it."""

    node: Any
    is_true: bool


def save_number(job: Job) -> None:
    """Save and load a counter or a best result (R107, R108)."""
    event = job.find("event")
    targets = getattr(event.node, "targets", None) or [getattr(event.node, "target", None)]
    name = unparse(targets[0]) if targets[0] is not None else getattr(event, "label", "")
    is_best = job.finding.rule == "R108"
    is_set = is_best and isinstance(event.node, ast.Assign)
    if not name.replace(".", "").isidentifier():
        raise CannotEdit("it is not a number that a statement of the loop sets")
    if root(job.find("value")).kind not in ("const", "counter") and not is_set:
        raise CannotEdit("it is not a number that a statement of the loop sets")
    checkpoint = find_checkpoint(job)
    is_shared = any(name in node.names for node in job.facts.nodes(event.path, ast.Global))
    home = None if is_shared else job.scope.function(event.path, event.node)
    # a number of NumPy is more than torch.load() accepts
    number = Number(name, event.path, home, name.rpartition(".")[2], "float({})" if is_best else "{}")
    parts = job.facts.nodes(event.path, ast.Attribute)
    if is_best and any(unparse(part.value) == name for part in parts):
        raise CannotEdit(f"{name} is more than a number")
    later: list[ast.AST] = []
    for place in checkpoint.dicts:
        later += _save(job, number, place)
    moment = find_moment(job, checkpoint)
    last = max(other.order for other in job.facts.events if job.facts.is_in_training(other))
    bound = [one for one in job.facts.tracer.bound if one.name == name and one.path == event.path]
    same = [one for one in bound if is_shared or "." in name or one.function is home]
    left = [one.node for one in same if moment < one.order <= last and one.node not in later]
    if left:
        raise CannotEdit(f"{name} changes in line {left[0].lineno}, after the checkpoint is saved")
    # an earlier value is in the file, and loaded
    has_it = all(number.key in saved.parts for _, _, saved in checkpoint.dicts)
    if later and has_it and job.facts.is_read(number.key):
        return
    path, anchor = checkpoint.path, checkpoint.anchor
    try:
        check_order(job, checkpoint, same)
        _check_written(job, number, path, anchor)
        load_entry(job, checkpoint, Reach(name), number.key, f"{name} = {{}}")
    except CannotEdit:
        loop = job.facts.loops[0]
        _check_written(job, number, loop.path, loop.node)
        load_before_loop(job, checkpoint, "", number.key, [f"{name} = {{}}"])


def _check_written(job: Job, number: Number, path: str, node: Any) -> None:
    """Raise CannotEdit if a statement at a place does not set the number, or if it is not bound there."""
    here = job.scope.function(path, node)
    is_shared = number.home is None and here is not None and number.name not in _list_set(here)
    is_same = here is number.home or "." in number.name
    if path != number.path or is_shared or not (is_same or number.home is None):
        raise CannotEdit(f"{number.name} is not a name of the function with line {node.lineno}")
    if not job.scope.is_bound(number.name, path, node, number.home):
        raise CannotEdit(f"{number.name} may not be bound in line {node.lineno}")


def _list_set(function: Any) -> set[str]:
    """Return the names of the module that a function sets."""
    return {name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names}


def _save(job: Job, number: Number, place: Any) -> list[ast.AST]:
    """Add a number to a dict that is saved, or its value of this epoch if the dict has an earlier one. Return
    the statements that set it later in the epoch."""
    path, node, saved = place
    here = job.scope.function(path, node)
    if number.key in saved.parts:
        pairs = zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ()
        values = [value for key, value in pairs if getattr(key, "value", None) == number.key]
        if [unparse(value) for value in values] != [number.name]:
            return []
        text, later = _read(job, number, path, node)
        if text != number.name:
            job.open(path).replace(values[0], number.form.format(text))
        return later
    is_same = here is number.home or "." in number.name
    is_of_module = number.home is None and (here is None or number.name not in list_local(here))
    is_here = path == number.path and (is_same or is_of_module)
    if not is_here or not job.scope.is_bound(number.name, path, node, number.home):
        return _pass(job, number, place)
    text, later = _read(job, number, path, node)
    add_entry(job, place, number.key, number.form.format(text))
    return later


def _pass(job: Job, number: Number, place: Any) -> list[ast.AST]:
    """Give a number to the function that saves, as a further argument of each call."""
    path, node, _ = place
    function, key = job.scope.function(path, node), number.key
    if function is None or key in list_local(function):
        raise CannotEdit(f"{number.name} may not be bound in line {node.lineno}")
    later = []
    for caller, call in list_calls(job, function):
        is_home = job.scope.function(caller, call) is number.home or "." in number.name
        is_bound = is_home and job.scope.is_bound(number.name, caller, call, number.home)
        if caller != number.path or not is_bound:
            raise CannotEdit(f"{number.name} may not be bound in line {call.lineno}, which saves")
        text, stores = _read(job, number, caller, call)
        later += stores
        job.open(caller).add_argument(call, f"{key}={number.form.format(text)}")
    if (function, key) not in job.passed:
        job.passed.add((function, key))
        job.open(path).add_parameter(function, f"{key}=None")
    add_entry(job, place, key, key)
    return later


def _read(job: Job, number: Number, path: str, node: Any) -> tuple[str, list[ast.AST]]:
    """Return (an expression at a place for what a number is at the end of the epoch, the statements that set
    it between). Raises CannotEdit if it is not known there."""
    scope, here = job.scope, job.scope.function(path, node)
    statement = scope.statement(path, node)
    around = [statement, *scope.above(path, statement)]
    around = around[: around.index(here) + 1] if here is not None else around
    loops = [part for part in around if isinstance(part, ast.For | ast.While)]
    inside = [part for part in ast.walk(loops[-1] if loops else around[-1]) if hasattr(part, "lineno")]
    after = [part for part in inside if part.lineno > statement.end_lineno]
    stores: list[tuple[Any, list[Test]]] = []
    others: list[ast.AST] = []  # in other branches
    for store in after:
        is_set = isinstance(store, ast.Assign | ast.AugAssign | ast.AnnAssign)
        target = (getattr(store, "targets", None) or [getattr(store, "target", None)])[0]
        if is_set and unparse(target) == number.name and scope.function(path, store) is here:
            tests = _list_tests(job, path, store, around)
            stores += [(store, tests)] if tests is not None else []
            others += [store] if tests is None else []
    if not stores:
        return number.name, others
    problem = CannotEdit(
        f"{number.name} changes in line {stores[0][0].lineno}, after the checkpoint is saved"
    )
    news = [unparse(store.value) for store, _ in stores]
    for place, (store, _) in enumerate(stores):
        if isinstance(store.value, ast.IfExp):
            raise problem
        if isinstance(store, ast.AugAssign):
            news[place] = unparse(ast.BinOp(store.target, store.op, store.value))
    tests, last = stores[0][1], stores[-1][0].lineno
    otherwise = number.name
    if len(stores) == 2 and len(tests) == 1 and stores[1][1] == [Test(tests[0].node, not tests[0].is_true)]:
        otherwise = news.pop()
    asked = " and ".join(f"{'' if one.is_true else 'not '}({unparse(one.node.test)})" for one in tests)
    asked = unparse(tests[0].node.test) if len(tests) == 1 and tests[0].is_true else asked
    # what the test needs may change below it
    line = tests[0].node.lineno if len(tests) == 1 else last
    is_left = any(isinstance(part, ast.Continue | ast.Return) and part.lineno < last for part in after)
    is_known = _is_known(job, path, node, asked, [part for part in after if part.lineno < line], number)
    between = [part for part in after if part.lineno < last]
    is_known &= all(_is_known(job, path, node, text, between, number) for text in (*news, otherwise))
    if len(news) != 1 or is_left or not is_known:
        raise problem
    text = f"{news[0]} if {asked} else {otherwise}" if tests else news[0]
    return text, [*others, *[store for store, _ in stores]]


def _is_known(job: Job, path: str, node: Any, text: str, between: list[Any], number: Number) -> bool:
    """Return whether an expression has its value at a place already, before the nodes between."""
    here = job.scope.function(path, node)
    parts = [*ast.walk(ast.parse(text or "0", mode="eval").body)]
    names = {part.id for part in parts if isinstance(part, ast.Name)} - {number.name, *_FUNCTIONS}
    calls = {unparse(part.func) for part in parts if isinstance(part, ast.Call)}
    stored = [part for part in between if isinstance(getattr(part, "ctx", None), ast.Store)]
    changed = {unparse(part) for part in stored} - {number.name}
    is_plain = all(isinstance(part, _COMPUTED) for part in parts) and calls <= {*_FUNCTIONS}
    # a call may change an object that it gets, or whose method it is, and a global of its module
    made = [part for part in between if isinstance(part, ast.Call) and unparse(part.func) != "print"]
    named = {part.id for call in made for part in ast.walk(call) if isinstance(part, ast.Name)}
    named |= {re.split(r"[.\[]", unparse(part))[0] for part in stored if not isinstance(part, ast.Name)}
    held = [part for part in parts if isinstance(part, ast.Attribute | ast.Subscript)]
    held = [part for part in held if unparse(part) != number.name]
    read = {part.id for one in held for part in ast.walk(one) if isinstance(part, ast.Name)}
    shared = {name for one in job.facts.nodes(path, ast.Global) for name in one.names}
    is_plain &= not read & named and not (made and names & shared)
    local = names if here is None else names & list_local(here)
    is_bound = all(job.scope.is_bound(one, path, node, here) for one in local)
    return is_plain and is_bound and not changed & {unparse(part) for part in parts}


def _list_tests(job: Job, path: str, store: Any, around: list[Any]) -> list[Test] | None:
    """Return the tests of a statement that follows another one, whose blocks are `around`; None if it is in
    another branch. Raises CannotEdit if it is in a loop of its own."""
    tests: list[Test] = []
    inner: Any = store
    for outer in job.scope.above(path, store):
        if any(part in around for part in job.scope.block(path, inner)):
            before = around[: around.index(outer)] if outer in around else around
            if any(isinstance(part, ast.For | ast.While) for part in before):
                break
            return tests
        if outer in around:
            return None
        if not isinstance(outer, ast.If):
            break
        tests.insert(0, Test(outer, inner in outer.body))
        inner = outer
    raise CannotEdit(f"line {store.lineno} changes it after the checkpoint is saved")
