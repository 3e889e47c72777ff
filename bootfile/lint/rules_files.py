"""Rules about the files of checkpoints: their names, who writes them, and what is in them."""

import ast
import re
from collections.abc import Iterator
from typing import Any

from bootfile.lint.checkpoints import Entry, Save
from bootfile.lint.facts import Facts
from bootfile.lint.known_defects import asks_for_less
from bootfile.lint.record import Event
from bootfile.lint.sources import unparse
from bootfile.lint.table import Finding, at, name_line
from bootfile.lint.values import Value, list_deps, root
from bootfile.lint.walk import describe, given_state, is_guarded

_RENAMES = re.compile(r"(^|\.)(replace|rename|renames|move|mkstemp|NamedTemporaryFile|safe_save|atomic_\w+)$")
_STEP_NAME = re.compile(r"epoch|step|iter|number|count|idx|index|^i$|^n$|^it$|time|date", re.IGNORECASE)
_COUNTS = re.compile(r"num|count|uuid|unique|next|version|stamp|now|^len$", re.IGNORECASE)
_OF_RANK = re.compile("rank|process|gpu|device", re.IGNORECASE)
_PADS = re.compile(r":0\d|%0\d|zfill|strftime|isoformat|timestamp")
_NUMBERED = re.compile(r"\{\w*(epoch|step|iter|number|n_iter|\bi\b)\w*\}|%d|%s|str\(\w*(epoch|step|iter)")
_CHANGES_ORDER = re.compile(r"^(int|float|natsorted|\w+_?sort\w*|sort_\w+)$")


def check(facts: Facts) -> Iterator[Finding]:
    """Yield the findings about the files of a script that continues."""
    if facts.loops and facts.saves and facts.intent:
        yield from _find_in_place(facts)
        yield from _find_newest(facts)
        yield from _find_all_ranks(facts)
        yield from _find_refused(facts)
        yield from _find_prefixes(facts)


def is_checkpoint(save: Save) -> bool:
    """Return whether a save is one for a restart: it has more than weights."""
    is_whole = any(root(entry.value).kind == "optimizer" for entry in save.entries)
    return is_whole or any(owner.kind in ("optimizer", "scheduler") for owner in save.owners())


def _path_of(event: Event) -> Value:
    """Return the path of a save: the argument that is not what it saves."""
    names = (0,) if event.name == "method" and 0 in event.args else (1, "f", "file", "path")
    return next((event.args[name] for name in names if name in event.args), Value())


def _path_node(event: Event) -> Any:
    arguments = getattr(event.node, "args", [])
    place = 0 if event.name == "method" and arguments else 1
    named = [keyword.value for keyword in getattr(event.node, "keywords", []) if keyword.arg == "f"]
    return arguments[place] if len(arguments) > place else next(iter(named), None)


def _path_nodes(event: Event) -> list[ast.AST]:
    """Return the syntax of a path, and of what it is made of."""
    nodes = [_path_node(event), *[dep.node for dep in list_deps(_path_of(event))]]
    return [node for node in nodes if isinstance(node, ast.AST)]


# R501: a checkpoint that is written over the only one before


def _find_in_place(facts: Facts) -> Iterator[Finding]:
    saves = [save for save in facts.training_saves if is_checkpoint(save)]
    # a script that renames files anywhere knows of this; replace() with two arguments is that of a text
    renames = facts.calls(_RENAMES.pattern)
    is_renamed = any(one.text != "replace" or one.name == "call" or len(one.args) != 2 for one in renames)
    if not saves or is_renamed or any(_varies(save) or _is_single(save) for save in saves):
        return
    # two files in turn would keep one whole checkpoint at any moment
    event = saves[0].event
    paths = [_path_of(save.event) for save in saves]
    is_one = len({(path.path, path.line, str(path.key)) for path in paths}) == 1
    if not is_one or any("open(" in condition.text for condition in event.conditions):
        return
    # a copy of the best one may still be there
    is_hint = bool(facts.calls(r"shutil\.copy\w*$"))
    name = unparse(_path_node(event)) or "the same file each time"
    text = f"the checkpoint is written over the one before it, which a kill during the write destroys: {name}"
    yield at(event, "R501", text, is_hint, save=event, value=paths[0])


def _varies(save: Save) -> bool:
    """Return whether each save of a run has another file, as far as that is known."""
    path = _path_of(save.event)
    # a path that is not known, or a call that may choose the name of the file itself
    if path.kind == "none" or save.event.text not in ("torch.save", "save"):
        return True
    deps = list_deps(path)
    is_counted = any(
        dep.kind in ("loop", "counter", "shifted", "field") or "element" in dep.flags for dep in deps
    )
    is_open = any(dep.kind == "unknown" and not dep.deps and "fixed" not in dep.flags for dep in deps)
    is_unknown = path.kind not in ("const", "text", "unknown", "path", "option") and not path.deps
    return is_counted or is_open or is_unknown or any(map(_names_step, _path_nodes(save.event)))


def _names_step(node: ast.AST) -> bool:
    """Return whether a name in the expression of a path is that of an epoch or step."""
    for part in ast.walk(node):
        name = getattr(part, "id", None) or getattr(part, "attr", None) or getattr(part, "arg", None)
        # `f"{name}_{self.num_checkpoints()}"`
        called = unparse(part.func).rpartition(".")[2] if isinstance(part, ast.Call) else ""
        if (isinstance(name, str) and _STEP_NAME.search(name)) or _COUNTS.search(called):
            return True
    return False


def _is_single(save: Save) -> bool:
    """Return whether a checkpoint is saved at a step that is given, and not again and again: `if epoch ==
    last`, but not `if epoch % 5 == 0`."""
    tests = [getattr(condition.node, "test", None) for condition in save.event.conditions]
    compared = [part for test in tests if test for part in ast.walk(test) if isinstance(part, ast.Compare)]
    choices = [part for part in compared if isinstance(part.ops[0], ast.Eq | ast.NotEq | ast.In | ast.NotIn)]
    return any("%" not in unparse(part) and _names_step(part) for part in choices)


# R502: the newest checkpoint, chosen by a name in which 10 comes before 9


def _find_newest(facts: Facts) -> Iterator[Finding]:
    writes = [
        *[save.event for save in facts.saves],
        *facts.calls(r"^os\.re(name|place)s?$|^(rename|replace)$"),
    ]
    deps = [dep for event in writes for value in event.args.values() for dep in list_deps(value)]
    nodes = [event.node for event in writes] + [dep.node for dep in deps if isinstance(dep.node, ast.AST)]
    names = " ".join(map(unparse, nodes))
    # `f"{step:06d}"`: the order of the names is that of the numbers
    if _PADS.search(names) or not _NUMBERED.search(names):
        return
    for load in facts.restart_loads():
        deps = [dep for value in load.args.values() for dep in list_deps(value)]
        lists = [dep for dep in deps if "listing" in dep.flags]
        called = [str(dep.key).rpartition(".")[2] for dep in deps]
        is_changed = any("keyed" in dep.flags for dep in deps) or any(map(_CHANGES_ORDER.search, called))
        is_last = "max" in called or any(dep.key == -1 and "item" in dep.flags for dep in deps)
        if lists and not is_changed and is_last and any("by_text" in dep.flags for dep in deps):
            how = unparse(load.node)
            text = f"the newest checkpoint is chosen by its name, in which 10 comes before 9: {how}"
            yield at(load, "R502", text, load=load, value=lists[0])
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
        if not is_everywhere or _is_of_one_process(save) or _is_of_rank(event):
            continue
        # a file without the state of a model may be a batch or a figure, for which a rank has its reason
        is_hint = not any(root(entry.value).kind in ("state", "model") for entry in save.entries)
        path = _path_node(event)
        names = unparse(path) if path is not None else ""
        message = f"all ranks write the same file at the same time: {names}"
        yield at(event, "R503", message, is_hint, save=event)
        if not is_hint:
            return


def _is_of_one_process(save: Save) -> bool:
    """Return whether a checkpoint has a model of DataParallel, with which one process has all GPUs."""
    flags: set[str] = set()
    flags = flags.union(*[owner.flags for owner in save.owners()])
    return "DataParallel" in flags and not flags & {"DistributedDataParallel", "DDP"}


def _is_of_rank(event: Event) -> bool:
    """Return whether a file is one of the rank, or memory of its process."""
    deps = list_deps(_path_of(event))
    # the names of the parts of the path and of the functions that made them, such as get_rank()
    names = [f"{dep.label} {dep.key}" for dep in deps] + [unparse(_path_node(event) or ast.Pass())]
    text = " ".join([*names, *map(unparse, _path_nodes(event))])
    is_unknown = any(dep.kind == "unknown" and not dep.deps and dep.path == "" for dep in deps)
    is_rank = is_unknown or any(dep.kind == "rank" for dep in deps) or "BytesIO" in text or "uuid" in text
    return is_rank or _OF_RANK.search(" ".join(names)) is not None


# R506: a checkpoint that torch.load() refuses since PyTorch 2.6


def _find_refused(facts: Facts) -> Iterator[Finding]:
    # weights_only=False reads all objects; a file that the script opens may be one of pickle
    loads = [event for event in facts.restart_loads() if event.text == "torch.load"]
    loads = [event for event in loads if not event.args.keys() & {"weights_only", "pickle_module"}]
    loads = [event for event in loads if all(value.kind != "open" for value in event.args.values())]
    # the script allows the classes by itself
    if not loads or facts.calls(r"add_safe_globals|safe_globals"):
        return
    # hint: with the release that a list of requirements asks for, all objects are read
    is_old = asks_for_less(facts, "torch", "2.6")
    for save in [save for save in facts.saves if is_checkpoint(save) and save.event.text == "torch.save"]:
        for entry in save.entries:
            what = _describe_object(entry)
            if what:
                where = name_line(save.event, loads[0])
                text = f"torch.load() refuses {what}, which {where} saves, since PyTorch 2.6"
                # an object that no dict of the script names may be saved as its state
                is_named = not what.startswith("the object") or _is_written(facts, save, entry)
                is_hint = is_old or not is_named
                yield at(loads[0], "R506", text, is_hint, value=entry.value, save=save.event)
                return


def _describe_object(entry: Entry) -> str:
    """Return what an entry is that is more than tensors and numbers; "" for others."""
    value, base = entry.value, root(entry.value)
    if base.kind == "args" and "namespace" in base.flags and value.kind == "args":
        return f"the argparse.Namespace {base.label}"
    if value.key == "numpy.random.get_state":
        return "the state of numpy.random"
    is_settings = value.kind == "unknown" and re.search(r"^(config|cfg|conf)$", value.label)
    if is_settings and any(str(dep.key) == "yacs.config.CfgNode" for dep in list_deps(value)):
        return f"the CfgNode {value.label}"
    is_object = base.kind in ("model", "optimizer", "scheduler") and "by_name" not in base.flags
    return f"the object {describe(base, base.kind)}" if is_object and value.kind != "state" else ""


def _is_written(facts: Facts, save: Save, entry: Entry) -> bool:
    """Return whether a dict of the module that saves has an entry as it stands: `{"model": model}`."""
    # `torch.save(model, path)`, `torch.save([model, optimizer], path)`
    if not entry.name or entry.name.isdigit():
        return True
    dicts = facts.nodes(save.event.path, ast.Dict)
    pairs = [pair for part in dicts for pair in zip(part.keys, part.values, strict=True)]
    named = [key for key, value in pairs if isinstance(value, ast.Name | ast.Attribute)]
    return any(isinstance(key, ast.Constant) and key.value == entry.name for key in named)


# R601: a state of a wrapped model that is loaded into the bare one, or the other way round


def _find_prefixes(facts: Facts) -> Iterator[Finding]:
    loads = facts.select("load_state")
    for event in [event for event in loads if event.order <= facts.first_step]:
        model, given = root(event.value), given_state(event)
        is_only = all(root(other.value) is not model or other is event for other in loads)
        # only a state that comes from a file, and as it was saved
        uses = [use for use in facts.select("set_item", "method") if root(use.value) is root(given)]
        is_changed = any(use.text not in ("get", "keys", "items", "values") for use in uses)
        if given.kind not in ("field", "checkpoint") or not is_only or is_changed:
            continue
        saves = _list_prefixes(facts, model, given)
        # one of several branches saves the names that are loaded
        if saves and all(prefix != event.text for _, prefix in saves):
            save, prefix = saves[0]
            where = name_line(save, event)
            saved, loaded = prefix.partition(":")[2], event.text.partition(":")[2]
            text = f"{where} saves names of the bare model, and this loads them into one with {loaded}"
            if saved:
                text = f"{where} saves names that begin with {saved}, and this loads them into the bare model"
            # an option often decides whether the model is wrapped, and what is saved
            yield at(event, "R601", text, value=model, save=save, load=event)
            return


def _list_prefixes(facts: Facts, model: Value, given: Value) -> list[tuple[Event, str]]:
    """Return the saves of the state of a model that is loaded, and what the names in it begin with."""
    saves = []
    for save in facts.training_saves:
        for entry in [entry for entry in save.entries if entry.owner is model]:
            flags = root(entry.value).flags
            is_it = entry.name == (str(given.key) if given.kind == "field" else "")
            if is_it and "either" not in flags:
                prefixes = sorted(flag for flag in flags if flag.startswith("prefix:"))
                saves.append((save.event, "".join(prefixes)))
    return saves
