"""Repairs of numbers that the loop carries from one epoch to the next: counters and best results."""

import ast
from typing import Any, NamedTuple

from bootfile.fix.checkpoint import (
    Job,
    find_checkpoint,
    find_moment,
    list_calls,
    pass_argument,
    restore,
)
from bootfile.fix.edits import CannotEdit, require
from bootfile.fix.scope import PLAIN, Reach, list_local
from bootfile.lint.carried import last_part
from bootfile.lint.rules_files import is_checkpoint
from bootfile.lint.sources import unparse
from bootfile.lint.values import root

_COMPUTED = (*PLAIN, ast.IfExp, ast.BinOp, ast.operator, ast.Subscript, ast.Call)
_FUNCTIONS = ("float", "int", "max", "min", "abs")


class Number(NamedTuple):
    """A number. home: the function whose name it is; None for a name of the module. key: in the checkpoint.
    is_best: whether it is a result, which may be a tensor. may_be_none: until the first result."""

    name: str
    path: str
    home: Any
    key: str
    is_best: bool
    may_be_none: bool

    def write(self, text: str) -> str:
        """Return the entry of the checkpoint for an expression. Raises CannotEdit if it may fail."""
        # a number of NumPy is more than torch.load() accepts
        if not self.is_best:
            return text
        is_first = self.may_be_none and text == self.name
        require(is_first or not self.may_be_none or "is None" in text, f"{self.name} may be None")
        return f"None if {text} is None else float({text})" if is_first else f"float({text})"


class Test(NamedTuple):
    """A test around a statement. is_true: which branch of `if` has it."""

    node: Any
    is_true: bool


def save_number(job: Job) -> None:
    """Save and load a counter or a best result (R107, R108)."""
    event = job.find("event")
    targets = getattr(event.node, "targets", None) or [getattr(event.node, "target", None)]
    # `best, bad = loss, 0`
    parts = [part for target in targets for part in getattr(target, "elts", [target])]
    names = [unparse(part) for part in parts if part is not None]
    text = getattr(event, "text", "") or last_part(getattr(event, "label", ""))
    name = next(
        (one for one in names if last_part(one) == text), "" if names else getattr(event, "label", "")
    )
    is_best = job.finding.rule == "R108"
    is_set = is_best and isinstance(event.node, ast.Assign)
    start = root(job.find("value"))
    is_number = start.kind in ("const", "counter", "option") or is_set
    is_name = name.replace(".", "").isidentifier()
    require(is_name and is_number, "it is not a number that a statement of the loop sets")
    checkpoint = find_checkpoint(job)
    is_shared = name in job.scope.shared(event.path)
    home = None if is_shared else job.scope.function(event.path, event.node)
    number = Number(name, event.path, home, name.rpartition(".")[2], is_best, start.kind == "none")
    parts = job.facts.nodes(event.path, (ast.Attribute, ast.Subscript))
    is_more = is_best and any(unparse(part.value) == name for part in parts)
    require(not is_more, f"{name} is more than a number")
    later = [node for place in checkpoint.dicts for node in _save(job, number, place)]
    moment = find_moment(job, checkpoint)
    last = max(other.order for other in job.facts.events if job.facts.is_in_training(other))
    bound = [one for one in job.facts.tracer.bound if one.name == name and one.path == event.path]
    same = [one for one in bound if is_shared or "." in name or one.function is home]
    # a restart within an epoch comes to its end again
    ends = [
        event.node for event in job.facts.in_training("set_name", "set_attribute") if len(event.loops) == 1
    ]
    again = {*later, *(ends if _is_within(job) else ())}
    for one in same:
        is_late = moment < one.order <= last and one.node not in again
        require(not is_late, f"{name} changes in line {one.node.lineno}, after the checkpoint is saved")
    # an earlier value is in the file, and loaded
    has_it = all(number.key in saved.parts for _, _, saved in checkpoint.dicts)
    if later and has_it and job.facts.is_read(number.key):
        return

    def find(path: str, node: Any) -> Reach:
        _check_place(job, number, path, node, sets=True)
        return Reach(name)

    restore(job, checkpoint, same, find, number.key, "{0} = {1}")


def _is_within(job: Job) -> bool:
    """Return whether all checkpoints are saved in a loop over batches."""
    return all(len(save.event.loops) > 1 for save in job.facts.training_saves if is_checkpoint(save))


def _check_place(job: Job, number: Number, path: str, node: Any, sets: bool = False) -> None:
    """Raise CannotEdit if the name of a number may not be bound to it at a node of a module. sets: a
    statement that sets the number is added there."""
    is_visible = path == number.path and _is_visible(number, job.scope.function(path, node), sets)
    is_bound = is_visible and job.scope.is_bound(number.name, path, node, number.home)
    require(is_bound, f"{number.name} may not be bound in line {node.lineno}")


def _is_visible(number: Number, here: Any, sets: bool) -> bool:
    """Return whether the name of a number means this number in a function; None: in the module itself."""
    if number.home is not None or here is None:
        return here is number.home or "." in number.name
    # a number of the module: a function that sets the name has one of its own, unless it says `global`
    shared = [part.names for part in ast.walk(here) if isinstance(part, ast.Global)]
    return any(number.name in names for names in shared) or not (sets or number.name in list_local(here))


def _save(job: Job, number: Number, place: Any) -> list[ast.AST]:
    """Add a number to a dict that is saved, or its value of this epoch if the dict has an earlier one. Return
    the statements that set it later in the epoch."""
    path, node, saved = place
    if number.key in saved.parts:
        pairs = zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ()
        values = [value for key, value in pairs if getattr(key, "value", None) == number.key]
        if [unparse(value) for value in values] != [number.name]:
            return []
        text, later = _read(job, number, path, node)
        if text != number.name:
            job.open(path).replace(values[0], number.write(text))
        return later
    try:
        _check_place(job, number, path, node)
    except CannotEdit:
        return _pass(job, number, path, node)
    text, later = _read(job, number, path, node)
    job.open(path).add_entry(node, number.key, number.write(text))
    return later


def _pass(job: Job, number: Number, path: str, node: Any) -> list[ast.AST]:
    """Give a number to the function that saves, as a further argument of each call."""
    function, key = job.scope.function(path, node), number.key
    is_free = function is not None and key not in list_local(function)
    require(is_free, f"{number.name} may not be bound in line {node.lineno}")
    later: list[ast.AST] = []
    texts = {}
    for caller, call in list_calls(job, function):
        _check_place(job, number, caller, call)
        text, stores = _read(job, number, caller, call)
        later += stores
        texts[caller, call] = number.write(text)
    pass_argument(job, path, function, key, texts)
    job.open(path).add_entry(node, key, key)
    return later


def _read(job: Job, number: Number, path: str, node: Any) -> tuple[str, list[ast.AST]]:
    """Return (an expression at a place for what a number is at the end of the epoch, the statements that set
    it between). Raises CannotEdit if it is not known there."""
    scope, here = job.scope, job.scope.function(path, node)
    statement = scope.statement(path, node)
    around = [statement, *scope.above(path, statement)]
    around = around[: around.index(here) + 1] if here is not None else around
    loops = [part for part in around if isinstance(part, ast.For | ast.While)]
    loops += [] if loops else around[-1:]
    inside = [part for part in ast.walk(loops[0 if _is_within(job) else -1]) if hasattr(part, "lineno")]
    after = [part for part in inside if part.lineno > statement.end_lineno]
    sets = [part for part in after if isinstance(part, ast.Assign | ast.AugAssign | ast.AnnAssign)]
    stores: list[tuple[Any, list[Test]]] = []
    others: list[ast.AST] = []  # in other branches
    for store in sets:
        target = store.targets[0] if isinstance(store, ast.Assign) else store.target
        if unparse(target) == number.name and scope.function(path, store) is here:
            tests = _list_tests(job, path, store, around)
            stores += [(store, tests)] if tests is not None else []
            others += [store] if tests is None else []
    if not stores:
        return number.name, others
    reason = f"{number.name} changes in line {stores[0][0].lineno}, after the checkpoint is saved"
    news = [_write_value(store) for store, _ in stores]
    is_plain = not any(isinstance(store.value, ast.IfExp) for store, _ in stores)
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
    require(len(news) == 1 and is_plain and is_known and not is_left, reason)
    text = f"{news[0]} if {asked} else {otherwise}" if tests else news[0]
    return text, [*others, *[store for store, _ in stores]]


def _write_value(store: Any) -> str:
    """Return the value that an assignment such as `a = b` or `a += b` sets."""
    is_sum = isinstance(store, ast.AugAssign)
    return unparse(ast.BinOp(store.target, store.op, store.value) if is_sum else store.value)


def _is_known(job: Job, path: str, node: Any, text: str, between: list[Any], number: Number) -> bool:
    """Return whether an expression has its value at a place already, before the nodes between."""
    here = job.scope.function(path, node)
    parts = [*ast.walk(ast.parse(text or "0", mode="eval").body)]
    calls = {unparse(part.func) for part in parts if isinstance(part, ast.Call)}
    is_plain = all(isinstance(part, _COMPUTED) for part in parts) and calls <= {*_FUNCTIONS}
    parts = [part for part in parts if unparse(part) not in (number.name, *_FUNCTIONS)]
    names = {part.id for part in parts if isinstance(part, ast.Name)}
    local = names if here is None else names & list_local(here)
    is_bound = all(job.scope.is_bound(one, path, node, here) for one in local)
    return is_plain and is_bound and not job.scope.may_change(path, parts, between)


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
