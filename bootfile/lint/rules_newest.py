"""The rule about the newest checkpoint: is it chosen by a name, in which 10 comes before 9?"""

import ast
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from bootfile.lint.facts import Facts, Save
from bootfile.lint.findings import Finding
from bootfile.lint.record import Event
from bootfile.lint.rules_text import FUNCTIONS, SORTS, find_candidates, is_listing, list_above, list_modules
from bootfile.lint.sources import Source
from bootfile.lint.syntax import unparse, walk_loop
from bootfile.lint.values import Value, list_deps

_CHECKPOINT = re.compile(
    r"check_?po|ckpt|model|\.pth?\b|weights|resume|snapshot|save|restore|torch\.load\(", re.IGNORECASE
)
_OF_LOGS = re.compile(r"\.(csv|log|json|txt|png|jpe?g|ya?ml)\b|tfevents")
# what the names of listed files begin with: "epoch_*.pt", name.startswith("epoch_")
_BEGINNINGS = (re.compile(r"([\w-]+)\*"), re.compile(r"startswith\(['\"]([\w-]+)['\"]"))
_MAY_MATCH = re.compile(rb"listdir|scandir|glob\(|iterdir")
_PADS = re.compile(r":0\d|%0\d|zfill|strftime|isoformat|timestamp")
_NUMBER = re.compile(r"\{\w*(epoch|step|iter|number|n_iter|\bi\b)\w*\}|%d|%s|str\(\w*(epoch|step|iter)")
_RENAMES = ("os.replace", "os.rename", "os.renames", "shutil.move")
_CHANGES = ("append", "extend", "insert", "reverse")


class _Named(NamedTuple):
    """A list of files with a name. values: what the name gets."""

    values: list[Any]
    is_sorted: bool


class _Rename(NamedTuple):
    """A call that gives a file another name."""

    event: Event
    source: ast.expr
    target: Value


def check(facts: Facts) -> Iterator[Finding]:
    """Yield where the newest checkpoint is chosen by its name."""
    if not facts.loops or not facts.intent:
        return
    names = _list_numbered(facts)
    if not names:
        return
    walked = {event.path for event in facts.events}
    for source in list_modules(facts):
        if source.path in walked and _MAY_MATCH.search(source.data):
            yield from _check_module(source, names)


def _check_module(source: Source, names: list[str]) -> Iterator[Finding]:
    path = source.path
    nodes, parents = find_candidates(source.tree)
    # of several uses of one list, the first
    named: dict[tuple[ast.AST, str], Finding] = {}
    for node in nodes:
        files, is_sorted = _find_chosen(node)
        if files is None:
            continue
        above = list_above(node, parents)
        if not isinstance(files, ast.Name):
            listing = _find_inner_listing(files)
            if listing is not None and _is_checkpoint(node, [listing], above, names):
                yield _make_finding(path, node, unparse(node))
            continue
        place = (_find_scope(above, source.tree), files.id)
        listings = _follow_name(*place)
        if listings is None or not (listings.is_sorted or is_sorted) or _is_compared(above):
            continue
        if _is_checkpoint(node, listings.values, above, names):
            finding = _make_finding(path, node, f"{unparse(node)} of {unparse(listings.values[0])}")
            named[place] = min(finding, named.get(place, finding))
    yield from named.values()


def _make_finding(path: str, node: Any, text: str) -> Finding:
    message = f"the newest checkpoint is chosen by its name, in which 10 comes before 9: {text}"
    return Finding(path, node.lineno, "R502", message)


def _find_chosen(node: Any) -> tuple[Any, bool]:
    """Return (the list from which a node takes the last name, whether the node sorts it); (None, False) for
    other nodes: `sorted(files)[-1]`, `max(files)` or `files[-1]`, without a key."""
    if isinstance(node, ast.Subscript) and unparse(node.slice) == "-1":
        if isinstance(node.value, ast.Name):
            return node.value, False
        inner = _find_sorted(node.value)
        return inner, inner is not None
    is_max = isinstance(node, ast.Call) and unparse(node.func) == "max"
    if is_max and len(node.args) == 1 and not node.keywords:
        return node.args[0], True
    return None, False


def _find_sorted(node: Any) -> Any:
    """Return what a call of sorted() without a key sorts; None for other nodes."""
    is_call = isinstance(node, ast.Call) and unparse(node.func) == "sorted"
    if is_call and len(node.args) == 1 and not node.keywords:
        return node.args[0]
    return None


def _is_checkpoint(node: ast.AST, listings: list[ast.AST], above: list[ast.AST], names: list[str]) -> bool:
    """Return whether a chosen file is a checkpoint, by the words of its statement and function. names: those
    that the script gives its checkpoints."""
    patterns = []
    for listing in listings:
        # `sorted(glob("*.csv"))[-1]` is a log
        if _OF_LOGS.search(unparse(listing)):
            return False
        for beginning in _BEGINNINGS:
            patterns += beginning.findall(unparse(listing))
    # `glob("captures_*.pt")` lists other files than those of `f"checkpoint_{epoch}.pt"`
    if patterns and not any(pattern in name for pattern in patterns for name in names):
        return False
    statement = next((part for part in above if isinstance(part, ast.stmt)), node)
    texts = [unparse(statement), *map(unparse, listings)]
    function: Any = next((part for part in above if isinstance(part, FUNCTIONS)), None)
    if function is not None:
        texts.append(unparse(function.args) + function.name)
    return any(_CHECKPOINT.search(text) for text in texts)


def _find_inner_listing(node: ast.expr) -> ast.AST | None:
    """Return the files of a folder, all or some of them; None for other nodes."""
    if is_listing(node):
        return node
    # `[path for path in os.listdir(folder) if ...]`
    if _keeps_names(node) and any(is_listing(part) for part in ast.walk(node)):
        return node
    if isinstance(node, ast.Call) and unparse(node.func) == "list" and node.args and is_listing(node.args[0]):
        return node
    return None


def _keeps_names(node: Any) -> bool:
    """Return whether a comprehension keeps names as they are, or puts a folder before them."""
    if not isinstance(node, ast.ListComp | ast.GeneratorExp):
        return False
    kept: Any = node.elt
    if isinstance(kept, ast.Call) and unparse(kept.func) == "os.path.join":
        kept = kept.args[-1]
    if isinstance(kept, ast.BinOp) and isinstance(kept.op, ast.Div):
        kept = kept.right
    return isinstance(kept, ast.Name) and unparse(kept) == unparse(node.generators[-1].target)


# A list with a name


def _find_scope(above: list[ast.AST], tree: ast.Module) -> ast.AST:
    return next((part for part in above if isinstance(part, FUNCTIONS)), tree)


def _is_compared(above: list[ast.AST]) -> bool:
    """Return whether a node only decides something: `path == files[-1]`."""
    for part in above:
        if isinstance(part, ast.Compare):
            return True
        if isinstance(part, ast.stmt):
            return False
    return False


def _follow_name(scope: Any, name: str) -> _Named | None:
    """Return the files that a function or module gives a name; None if the list may have another order."""
    arguments = getattr(scope, "args", None)
    if arguments is not None and any(
        isinstance(part, ast.arg) and part.arg == name for part in ast.walk(arguments)
    ):
        return None
    given = []
    stores = 0
    is_sorted = False
    for node in walk_loop(scope):
        if isinstance(node, ast.Global | ast.Nonlocal) and name in node.names:
            return None
        if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load):
            stores += 1
        value = _find_given(node, name)
        if value is not None:
            given.append(value)
        if isinstance(node, ast.Call):
            effect = _describe_call(node, name)
            if effect == "changed":
                return None
            is_sorted = is_sorted or effect == "sorted"
    listings = []
    for value in given:
        files = _find_sorted(value)
        if files is None:
            files = value
        else:
            is_sorted = True
        if _find_inner_listing(files) is not None:
            listings.append(files)
        elif not _is_same(files, name):
            return None
    # `for files in ...`, `files += ...`, `a, files = ...`
    if not listings or stores != len(given):
        return None
    return _Named(listings, is_sorted)


def _find_given(node: Any, name: str) -> Any:
    """Return what `name = value` or `name := value` gives a name; None for other nodes."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and unparse(node.targets[0]) == name:
        return node.value
    if isinstance(node, ast.AnnAssign | ast.NamedExpr) and unparse(node.target) == name:
        return node.value
    return None


def _is_same(node: Any, name: str) -> bool:
    """Return whether a value is the list itself, or some of it: `files`, `[f for f in files if ...]`."""
    if isinstance(node, ast.Call) and unparse(node.func) == "list" and len(node.args) == 1:
        node = node.args[0]
    if _keeps_names(node):
        node = node.generators[0].iter
    return isinstance(node, ast.Name) and node.id == name


def _describe_call(node: ast.Call, name: str) -> str:
    """Return "sorted" if a call sorts a list by names, and "changed" if it may give it another order."""
    function = node.func
    if isinstance(function, ast.Attribute) and unparse(function.value) == name:
        if function.attr == "sort":
            return "changed" if node.args or node.keywords else "sorted"
        return "changed" if function.attr in _CHANGES else ""
    # natsorted(files), sort_by_number(files), sorted(files, key=...)
    is_sort = SORTS.search(unparse(function).rpartition(".")[2]) is not None
    is_given = any(unparse(argument) == name for argument in node.args)
    if is_sort and is_given and _find_sorted(node) is None:
        return "changed"
    return ""


# The names of checkpoints


def _list_numbered(facts: Facts) -> list[str]:
    """Return the texts of the names of checkpoints with numbers; none if there is a number of a fixed
    width."""
    renames = _list_renames(facts)
    texts = [_describe_names(rename.event, [rename.target]) for rename in renames]
    numbered = []
    for save in facts.saves:
        text = _describe_names(save.event, list(save.event.args.values()))
        texts.append(text)
        # the name after a rename is the one that a restart finds
        after = [rename for rename in renames if _is_renamed(save, rename)]
        if not after:
            numbered.append(text)
        numbered.extend(_describe_names(rename.event, [rename.target]) for rename in after)
    # `f"{step:06d}"`: the order of the names is that of the numbers
    if any(_PADS.search(text) for text in texts):
        return []
    return [text for text in numbered if _NUMBER.search(text)]


def _describe_names(event: Event, given: list[Value]) -> str:
    """Return the text of a call, and of values that it gets."""
    nodes = [event.node]
    for value in given:
        nodes += [inner.node for inner in [value, *list_deps(value)] if isinstance(inner.node, ast.AST)]
    return " ".join(map(unparse, nodes))


def _list_renames(facts: Facts) -> list[_Rename]:
    renames = []
    for event in facts.select("call", "method"):
        if not isinstance(event.node, ast.Call):
            continue
        if event.name == "call" and event.text in _RENAMES and len(event.node.args) == 2:
            renames.append(_Rename(event, event.node.args[0], event.args.get(1, Value())))
        # Path.rename(target); str.replace() gets two texts
        is_path = event.name == "method" and event.text in ("rename", "replace") and len(event.args) == 1
        target = event.args.get(0) or event.args.get("target")
        if is_path and target is not None and isinstance(event.node.func, ast.Attribute):
            renames.append(_Rename(event, event.node.func.value, target))
    return renames


def _is_renamed(save: Save, rename: _Rename) -> bool:
    """Return whether a function renames the file that it has saved: both calls have the same name of it."""
    if rename.event.order < save.event.order or rename.event.functions != save.event.functions:
        return False
    call = save.event.node
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    # `with open(path, "wb") as file`, `with path.open("wb") as file`
    for condition in save.event.conditions:
        for item in getattr(condition.node, "items", []):
            opened = item.context_expr
            if isinstance(opened, ast.Call):
                given += [getattr(opened.func, "value", opened.func), *opened.args]
    names = {unparse(part) for part in given}
    # `Path(path)` in `Path(path).rename(target)`
    return any(unparse(part) in names for part in ast.walk(rename.source) if isinstance(part, ast.expr))
