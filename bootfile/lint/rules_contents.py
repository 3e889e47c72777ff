"""Rules about the contents of a checkpoint: objects that torch.load() refuses, and names of weights."""

import ast
import re
from collections.abc import Iterator

from bootfile.lint.checkpoints import Entry, Save
from bootfile.lint.facts import Facts
from bootfile.lint.known_defects import asks_for_less
from bootfile.lint.record import Event
from bootfile.lint.rules_files import is_checkpoint, is_file_of
from bootfile.lint.sources import unparse
from bootfile.lint.table import Finding, at, name_line
from bootfile.lint.values import Value, list_deps, root
from bootfile.lint.walk import describe, given_state

_NUMPY = re.compile(r"^numpy\.(nan)?(mean|average|median|array|sum|std|max|min|amax|amin|sqrt|exp|float\d+)$")

_WRITES = re.compile(r"^(write|writelines|writerow|append|print|log)$")
_IS_NEW = re.compile(r"resum|start|continu|exist|append|load|restor", re.IGNORECASE)
_TELLS_TIME = re.compile(r"time|datetime|now\b|stamp|\bdate|uuid")


def check(facts: Facts) -> Iterator[Finding]:
    """Yield the findings about the contents of the checkpoints of a script that continues."""
    for find in (_find_refused, _find_prefixes, _find_logs):
        yield from find(facts) if facts.is_continued else ()


# R506: a checkpoint that torch.load() refuses since PyTorch 2.6


def _find_refused(facts: Facts) -> Iterator[Finding]:
    """Find the first checkpoint with an object that a restart cannot load by default."""
    loads = [load for load in facts.restart_loads() if _may_refuse(load)]
    # the script allows the classes by itself
    if not loads or facts.calls("safe_globals"):
        return
    # then it is a hint: the release that the requirements ask for loads all objects
    is_old = asks_for_less(facts, "torch", "2.6")
    saves = [save for save in facts.saves if save.event.text == "torch.save"]
    for save in [save for save in saves if is_checkpoint(save) or is_file_of(save, loads[0])]:
        for entry in save.entries:
            if what := _describe_object(entry):
                where = name_line(save.event, loads[0])
                text = f"torch.load() refuses {what}, which {where} saves, since PyTorch 2.6"
                # an object that no dict of the script names may be saved as its state
                is_named = not what.startswith("the object") or _is_written(facts, save, entry)
                is_hint = is_old or not is_named
                yield at(loads[0], "R506", text, is_hint, value=entry.value, save=save.event)
                return


def _may_refuse(load: Event) -> bool:
    """Return whether a load is one of torch.load() with its default, which reads tensors and numbers only."""
    is_open = any(value.kind == "open" for value in load.args.values())  # `torch.load(path, **options)`
    is_told = is_open or load.args.keys() & {"weights_only", "pickle_module"}
    return load.text == "torch.load" and not is_told


def _describe_object(entry: Entry) -> str:
    """Return what an entry is that is more than tensors and numbers; "" for others."""
    value, base = entry.value, root(entry.value)
    if base.kind == "args" and "namespace" in base.flags and value.kind == "args":
        return f"the argparse.Namespace {base.label}"
    if value.key == "numpy.random.get_state":
        return "the state of numpy.random"
    number = _find_numpy(value)
    if number is not None:
        return f"a number of NumPy ({number.key}) as {entry.name}"
    made = next((dep for dep in (base, *value.deps) if dep.kind == "instance" and dep.cls is not None), None)
    if made is not None and value.kind in ("instance", "field"):
        return f"the object {made.label or entry.name}"
    is_settings = value.kind == "unknown" and re.search(r"^(config|cfg|conf)$", value.label)
    if is_settings and any(str(dep.key) == "yacs.config.CfgNode" for dep in list_deps(value)):
        return f"the CfgNode {value.label}"
    is_object = base.kind in ("model", "optimizer", "scheduler", "criterion") and "by_name" not in base.flags
    return f"the object {describe(base, base.kind)}" if is_object and value.kind != "state" else ""


def _find_numpy(value: Value, depth: int = 0) -> Value | None:
    """Return the call of NumPy that gives a value, also through max() or a name that holds the best one."""
    if _NUMPY.search(str(value.key)):
        return value
    is_passed = value.key in ("max", "min") or (value.kind == "unknown" and value.of is not None)
    inner = [_find_numpy(dep, depth + 1) for dep in value.deps] if is_passed and depth < 4 else []
    return next((one for one in inner if one is not None), None)


def _is_written(facts: Facts, save: Save, entry: Entry) -> bool:
    """Return whether a dict of the module that saves has an entry as it stands: `{"model": model}`."""
    # `torch.save(model, path)`, `torch.save([model, optimizer], path)`
    if not entry.name or entry.name.isdigit():
        return True
    dicts = facts.nodes(save.event.path, ast.Dict)
    pairs = [pair for node in dicts for pair in zip(node.keys, node.values, strict=True)]
    given = [value for key, value in pairs if isinstance(key, ast.Constant) and key.value == entry.name]
    return any(isinstance(value, ast.Name | ast.Attribute) for value in given)


# R601: a state of a wrapped model that is loaded into the bare one, or the other way round


def _find_prefixes(facts: Facts) -> Iterator[Finding]:
    loads = facts.select("load_state")
    for event in loads:
        model, given = root(event.value), given_state(event)
        is_only = all(root(other.value) is not model or other is event for other in loads)
        # only a state that comes from a file, and as it was saved
        uses = [use for use in facts.select("set_item", "method") if root(use.value) is root(given)]
        is_changed = any(use.text not in ("get", "keys", "items", "values") for use in uses)
        is_saved = given.kind in ("field", "checkpoint") and not is_changed
        if event.order > facts.first_step or not is_saved or not is_only:
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
            yield at(event, "R601", text, value=model, save=save, load=event)
            return


def _list_prefixes(facts: Facts, model: Value, given: Value) -> list[tuple[Event, str]]:
    """Return the saves of the state of a model that is loaded, and what the names in it begin with."""
    name = str(given.key) if given.kind == "field" else ""
    pairs = [(save.event, entry) for save in facts.training_saves for entry in save.entries]
    states = [
        (event, root(entry.value)) for event, entry in pairs if (entry.owner, entry.name) == (model, name)
    ]
    flags = [(event, state.flags) for event, state in states if "either" not in state.flags]
    return [(event, next((one for one in of if one.startswith("prefix:")), "")) for event, of in flags]


# R507: a log that each start empties


def _find_logs(facts: Facts) -> Iterator[Finding]:
    writes = [event for event in facts.in_training("method", "call") if _WRITES.search(event.text)]
    written = {dep for event in writes for dep in facts.list_deps(event.value)}
    opened = facts.calls(r"(^|\.)(open|FileHandler|basicConfig)$")
    # the loop opens it again: `open("log.csv", "a")`
    inside = [event for event in opened if facts.is_in_training(event)]
    opened_again = {_path_text(event) for event in inside} - {""}
    for event in opened:
        is_path = event.name == "method"
        modes = [event.args.get(name, Value()) for name in (0 if is_path else 1, "mode", "filemode")]
        is_emptied = any(mode.kind == "const" and str(mode.key).startswith("w") for mode in modes)
        path = event.value if is_path else event.args.get(0) or event.args.get("filename") or Value()
        # a folder of each start, whose name has the time
        names = " ".join(f"{dep.key} {dep.label}" for dep in facts.list_deps(path))
        is_new = bool(_TELLS_TIME.search(names) or _IS_NEW.search(event.describe_conditions()))
        # basicConfig() without a file has none to empty
        is_logger = not event.text.endswith("open") and bool(event.args.keys() & {0, "filename"})
        is_again = _path_text(event) in opened_again
        is_written = any(dep.node is event.node for dep in written if dep.key == "open")
        is_log = (is_logger or is_again or is_written) and not facts.is_in_training(event)
        if is_emptied and is_log and not is_new:
            yield at(event, "R507", f"each start empties {unparse(event.node)}, to which the loop writes")
            return


def _path_text(event: Event) -> str:
    """Return the expression of the path that an event opens: of `path.open("w")` it is before the dot."""
    function = event.node.func
    if event.name == "method" and isinstance(function, ast.Attribute):
        return unparse(function.value)
    return unparse(event.node.args[0]) if event.node.args else ""
