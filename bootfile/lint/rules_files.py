"""Rules about the files of checkpoints: their names, and who writes them."""

import ast
import re
from collections.abc import Iterator
from typing import Any

from bootfile.lint.checkpoints import Save
from bootfile.lint.facts import Facts
from bootfile.lint.record import Event
from bootfile.lint.sources import unparse
from bootfile.lint.table import Finding, at, name_line
from bootfile.lint.values import NUMBERS, Value, kind_of, list_deps, root
from bootfile.lint.walk import describe, is_guarded

_MOVES = ("replace", "rename", "renames", "move")
_RENAMES = r"(^|\.)(replace|rename|renames|move|mkstemp|NamedTemporaryFile|safe_save|atomic_\w+)$"
_STEP_NAME = re.compile(r"epoch|step|iter|number|count|idx|index|^i$|^n$|^it$", re.IGNORECASE)
_COUNTS = re.compile(r"num|count|uuid|unique|next|version|^len$", re.IGNORECASE)
_JOINS = re.compile(r"(^|\.)(join|abspath|normpath|dirname|expanduser|realpath|Path|str|open)$")
_OF_RANK = re.compile("rank|process|gpu|device", re.IGNORECASE)
_PADS = re.compile(r":0\d|%0\d|zfill|strftime|isoformat|timestamp")
_NUMBERED = re.compile(r"\{\w*(epoch|step|iter|number|n_iter|\bi\b)\w*\}|%d|%s|str\(\w*(epoch|step|iter)")
_CHOICES = ast.Eq | ast.NotEq | ast.In | ast.NotIn
_WRITES = ("torch.save", "pickle.dump")
_EXISTS = re.compile(r"exists\(|is_?file\(")
_CHANGES_ORDER = re.compile(r"^(int|float|natsorted|\w+_?sort\w*|sort_\w+)$")


def check(facts: Facts) -> Iterator[Finding]:
    """Yield the findings about the files of a script that continues."""
    for find in (_find_in_place, _find_newest, _find_all_ranks, _find_parts):
        yield from find(facts) if facts.is_continued else ()


def is_checkpoint(save: Save) -> bool:
    """Return whether a save is one for a restart: it has more than weights."""
    kinds = {root(entry.value).kind for entry in save.entries} | {owner.kind for owner in save.owners()}
    return bool(kinds & {"optimizer", "scheduler", *NUMBERS})


def path_of(event: Event) -> Value:
    """Return the path of a save: the argument that is not what it saves."""
    names = (0,) if event.name == "method" and 0 in event.args else (1, "f", "file", "path")
    return next((event.args[name] for name in names if name in event.args), Value())


def path_node(event: Event) -> Any:
    """Return the syntax of the path of a save; None if it has none."""
    arguments = getattr(event.node, "args", [])
    place = 0 if event.name == "method" and arguments else 1
    named = [keyword.value for keyword in getattr(event.node, "keywords", []) if keyword.arg == "f"]
    return arguments[place] if len(arguments) > place else next(iter(named), None)


def _path_nodes(event: Event) -> list[ast.AST]:
    """Return the syntax of a path, and of what it is made of."""
    nodes = [path_node(event), *[dep.node for dep in list_deps(path_of(event))]]
    return [node for node in nodes if isinstance(node, ast.AST)]


def is_file_of(save: Save, load: Event) -> bool:
    """Return whether a load may read the file of a save: not "optimizer.pt" instead of "arguments.bin"."""
    written = _list_names(path_of(save.event), path_node(save.event))
    read = _list_names(load.args.get(0, Value()), next(iter(load.node.args), None))
    return not written or not read or bool(written & read)


def _list_names(path: Value, node: ast.AST | None) -> set[str]:
    """Return the constant names of files in a path."""
    nodes = [one for one in [node, *[dep.node for dep in list_deps(path)]] if isinstance(one, ast.AST)]
    parts = [part for one in nodes for part in ast.walk(one) if isinstance(part, ast.Constant)]
    # also of a parameter: `os.path.join(folder, name)`
    given = [path, *[option for dep in list_deps(path) for option in dep.options.values()]]
    texts = [*[one.key for one in given if one.kind == "const"], *[part.value for part in parts]]
    return {text for text in texts if isinstance(text, str) and re.search(r"\w\.\w+$", text)}


# R501: a checkpoint that is written over the only one before


def _find_in_place(facts: Facts) -> Iterator[Finding]:
    # after the training only the files of a restart count
    later = [save for save in facts.saves if save.event.order > facts.first_step and is_checkpoint(save)]
    saves = facts.training_saves or later
    saves = [save for save in saves if "os.name" not in save.event.describe_conditions()]
    saves = [save for save in saves if not _is_single(save) and not is_renamed(facts, save)]
    fixed = [save for save in saves if not varies(facts, save)]
    others = [save for save in saves if save not in fixed]
    numbered = [save for save in others if is_checkpoint(save)]
    loads = [load for load in facts.restart_loads() if _takes_newest(facts, load)]
    # `copyfile(f"{epoch}.pt", "best.pt")`
    paths = [path_of(save.event) for save in numbered]
    copies = [event for event in facts.calls(r"(^|\.)copy(file|2)?$") if event.args.get(0) in paths]
    copies = [event for event in copies if not _moves(facts, event.args.get(1))]
    if fixed:
        event = max(fixed, key=lambda save: (is_checkpoint(save), len(save.entries))).event
        name = unparse(path_node(event)) or "the same file each time"
        text = "the checkpoint is written over the one before it, which a kill during the write destroys"
        # each epoch may have another file
        yield at(event, "R501", f"{text}: {name}", bool(numbered), save=event, value=path_of(event))
    elif copies:
        name = unparse(copies[0].node)
        text = f"a copy is written over the one before it, which a kill during the write destroys: {name}"
        yield at(copies[0], "R501", text, True, save=copies[0])
    elif others and loads and not any(_is_of_rank(save.event) for save in others):
        event = (numbered or others)[0].event
        where = name_line(loads[0], event)
        text = f"a kill during the write leaves a part of a file, which {where} takes as the newest one"
        yield at(event, "R501", text, save=event, load=loads[0])


def _takes_newest(facts: Facts, load: Event) -> bool:
    """Return whether a load chooses its file in a folder by itself, and expects that it is whole."""
    # what a part of a file raises may be handled here, or where the file is chosen
    listed = [load, *[other for other in facts.select("load") if _is_listed(facts, other)]]
    tries = [(other.line, node) for other in listed for node in facts.nodes(other.path, ast.Try)]
    if any(node.lineno <= line <= (node.end_lineno or 0) for line, node in tries):
        return False
    # `for number in range(999, 0, -1): if os.path.isfile(name): load(name)`
    is_found = bool(load.loops) and not facts.is_in_training(load)
    is_searched = is_found and any(_EXISTS.search(test.text) for test in load.conditions)
    return is_searched or _is_listed(facts, load)


def _is_listed(facts: Facts, load: Event) -> bool:
    return any("listing" in dep.flags for value in load.args.values() for dep in facts.list_deps(value))


def is_renamed(facts: Facts, save: Save) -> bool:
    """Return whether a file gets its name only after it was written."""
    path, paths = path_of(save.event), set(map(unparse, _path_nodes(save.event)))
    # `with open(new, "wb") as file: torch.save(state, file)`
    opened = save.event.describe_conditions()
    for event in facts.calls(_RENAMES):
        first = event.value if event.name == "method" else event.args.get(0, Value())
        texts = {unparse(node) for node in (first.node, *event.node.args[:1]) if node is not None}
        is_opened = any(f"open({text}," in opened for text in texts if text)
        # replace() with two arguments is that of a text
        is_text = event.name == "method" and event.text == "replace" and len(event.args) == 2
        # mkstemp() and others make the first name themselves
        is_open = event.text.rpartition(".")[2] not in _MOVES or root(first).kind == "unknown"
        is_same = path in facts.list_deps(first) or (first.kind == "const" and first.key == path.key)
        if not is_text and (is_open or is_same or is_opened or texts & paths):
            return True
    return False


def varies(facts: Facts, save: Save) -> bool:
    """Return whether each save of a run has another file, as far as that is known."""
    path = path_of(save.event)
    # a path that is not known, or a call that may choose the name of the file itself
    is_known = save.event.text in _WRITES or save.event.value.key in ("Accelerator", "Fabric")
    is_followed = path.kind in ("const", "text", "unknown", "path", "option", "checkpoint")
    is_open = path.kind == "none" or not is_known or not (is_followed or path.deps)
    return is_open or _moves(facts, path) or any(map(_names_step, _path_nodes(save.event)))


def _moves(facts: Facts, path: Value | None) -> bool:
    """Return whether a path is another one in each pass of the loop; it may be if it is not known."""
    return path is None or any(_changes(facts, dep) for dep in facts.list_deps(path))


def _changes(facts: Facts, value: Value) -> bool:
    """Return whether a part of a path is another one in each pass of the training loop."""
    is_here = any(loop in facts.loops for loop in value.loops)
    if value.kind in ("loop", "shifted", "counter"):
        return value.kind != "loop" or is_here
    # a function that is not known may return another name each time; join() does not
    is_call = "from_call" in value.flags and value.node is None
    is_plain = bool(value.flags & {"fixed", "joined"}) or _JOINS.search(str(value.key)) is not None
    return is_here and ("element" in value.flags or (is_call and not is_plain))


def _names_step(node: ast.AST) -> bool:
    """Return whether a name in the expression of a path is that of an epoch or step."""
    parts = [*ast.walk(node)]
    names = [getattr(part, "id", "") or getattr(part, "attr", "") for part in parts]
    # `f"{name}_{self.num_checkpoints()}"`
    called = [unparse(part.func).rpartition(".")[2] for part in parts if isinstance(part, ast.Call)]
    return any(map(_STEP_NAME.search, names)) or any(map(_COUNTS.search, called))


def _is_single(save: Save) -> bool:
    """Return whether a checkpoint is saved at a step that is given, and not again and again: `if epoch ==
    last`, but not `if epoch % 5 == 0`."""
    tests = [getattr(condition.node, "test", None) for condition in save.event.conditions]
    chosen = [test for test in tests if isinstance(test, ast.Compare) and isinstance(test.ops[0], _CHOICES)]
    return any("%" not in unparse(test) and _names_step(test) for test in chosen)


# R502: the newest checkpoint, chosen by a name in which 10 comes before 9


def _find_newest(facts: Facts) -> Iterator[Finding]:
    writes = [save.event for save in facts.saves]
    writes += facts.calls(r"^os\.re(name|place)s?$|^(rename|replace)$")
    deps = [dep for event in writes for value in event.args.values() for dep in list_deps(value)]
    nodes = [event.node for event in writes] + [dep.node for dep in deps if isinstance(dep.node, ast.AST)]
    names = " ".join(map(unparse, nodes))
    # `f"{step:06d}"`: the order of the names is that of the numbers
    if _PADS.search(names) or not _NUMBERED.search(names):
        return
    for load in facts.restart_loads():
        deps = [dep for value in load.args.values() for dep in list_deps(value)]
        flags: set[str] = set().union(*[dep.flags for dep in deps])
        called = [str(dep.key).rpartition(".")[2] for dep in deps]
        is_changed = "keyed" in flags or any(map(_CHANGES_ORDER.search, called))
        is_last = "max" in called or any(dep.key == -1 for dep in deps)
        if {"listing", "by_text"} <= flags and is_last and not is_changed:
            text = "the newest checkpoint is chosen by its name, in which 10 comes before 9: "
            lists = [dep for dep in deps if "listing" in dep.flags]
            yield at(load, "R502", text + unparse(load.node), load=load, value=lists[0])
            return


# R503: a file that all ranks write at the same time


def _find_all_ranks(facts: Facts) -> Iterator[Finding]:
    training = {step.functions for step in facts.select("step")}
    guarded = {(save.event.path, save.event.functions[-1:]) for save in facts.saves if is_guarded(save.event)}
    for save in facts.training_saves if facts.is_distributed() else ():
        event = save.event
        # another call of the function that saves is guarded: this one may be that of a single process
        is_called = event.functions in training or (event.path, event.functions[-1:]) not in guarded
        # accelerate's and Fabric's save() write on rank 0 only
        is_everywhere = event.text == "torch.save" and not is_guarded(event) and is_called
        # with a model of DataParallel, one process has all GPUs
        is_single = any("DataParallel" in owner.flags for owner in save.owners())
        if not is_everywhere or is_single or _is_of_rank(event):
            continue
        # a file without the state of a model may be a batch or a figure, for which a rank has its reason
        is_hint = not any(root(entry.value).kind in ("state", "model") for entry in save.entries)
        message = f"all ranks write the same file at the same time: {unparse(path_node(event) or ast.Pass())}"
        yield at(event, "R503", message, is_hint, save=event)
        if not is_hint:
            return


def _is_of_rank(event: Event) -> bool:
    """Return whether a file is one of the rank, or memory of its process."""
    deps = list_deps(path_of(event))
    # the names of the parts of the path and of the functions that made them, such as get_rank()
    names = [f"{dep.label} {dep.key}" for dep in deps] + [unparse(path_node(event) or ast.Pass())]
    text = " ".join([*names, *map(unparse, _path_nodes(event))])
    is_unknown = any(dep.kind == "unknown" and not dep.deps and dep.path == "" for dep in deps)
    is_other = is_unknown or "BytesIO" in text or "uuid" in text
    return is_other or _OF_RANK.search(" ".join(names)) is not None


# R508: files that belong together


def _find_parts(facts: Facts) -> Iterator[Finding]:
    """Find states in two files that are written one after the other: a kill leaves two steps."""
    saves = [save for save in facts.training_saves if save.owners()]
    loaded = facts.loaded.keys() & {*facts.changed, *facts.list_trained_modules()}
    for number, save in enumerate(saves):
        for other in saves[:number]:
            tests = [[test.node for test in one.event.conditions] for one in (save, other)]
            is_together = save.event.loops == other.event.loops and tests[0] == tests[1]
            mine, others = ({*map(root, one.owners())} & loaded for one in (save, other))
            if is_together and mine and others and not mine & others:
                first, second = (describe(max(one, key=kind_of)) for one in (mine, others))
                where = name_line(other.event, save.event)
                text = f"{first} is in another file than {second}, which {where} saves"
                yield at(save.event, "R508", f"{text}: a kill leaves two steps", save=save.event)
                return
