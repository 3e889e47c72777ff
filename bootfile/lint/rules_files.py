"""Rules about the files of checkpoints, about ranks, and about accumulation."""

import ast
import re
from collections.abc import Iterator
from typing import Any

from bootfile.lint.facts import Entry, Facts, Save, describe, is_guarded
from bootfile.lint.findings import Finding, at, name_line
from bootfile.lint.record import Condition, Event
from bootfile.lint.rules_packages import asks_for_less
from bootfile.lint.syntax import is_modulo, unparse
from bootfile.lint.values import Value, list_deps, root

_RENAMES = re.compile(r"(^|\.)(replace|rename|renames|move|mkstemp|NamedTemporaryFile|safe_save|atomic_\w+)$")
_STEP_NAME = re.compile(r"epoch|step|iter|number|count|idx|index|^i$|^n$|^it$|time|date", re.IGNORECASE)
_COUNTS = re.compile(r"num|count|uuid|unique|next|version|stamp|now|^len$", re.IGNORECASE)
_AT_ANY_TIME = re.compile(r"time|signal|sigterm|preempt|interrupt|terminat", re.IGNORECASE)
_OBJECTS = ("model", "optimizer", "scheduler", "instance", "wrapped", "criterion")


def check(facts: Facts) -> Iterator[Finding]:
    """Yield the findings about files, ranks and accumulation."""
    if not facts.loops or not facts.saves:
        return
    yield from _find_whole_objects(facts)
    if not facts.intent:
        return
    yield from _find_all_ranks(facts)
    yield from _find_in_place(facts)
    yield from _find_random_of_rank_0(facts)
    yield from _find_refused(facts)
    yield from _find_prefixes(facts)
    yield from _find_lost_gradients(facts)


def _path_of(event: Event) -> Value:
    """Return the path of a save: the argument that is not what it saves."""
    if event.name == "method" and 0 in event.args:
        return event.args[0]
    for name in (1, "f", "file", "path"):
        if name in event.args:
            return event.args[name]
    return Value()


def _path_node(event: Event) -> Any:
    arguments = getattr(event.node, "args", [])
    if event.name == "method" and arguments:
        return arguments[0]
    if len(arguments) > 1:
        return arguments[1]
    for keyword in getattr(event.node, "keywords", []):
        if keyword.arg == "f":
            return keyword.value
    return None


def _describe_path(event: Event) -> str:
    """Return the text of a path, and of what it is made of."""
    parts = [unparse(_path_node(event))] if _path_node(event) is not None else []
    for dep in list_deps(_path_of(event)):
        parts.append(dep.label)
        if isinstance(dep.node, ast.AST):
            parts.append(unparse(dep.node))
    return " ".join(parts)


def _is_checkpoint(save: Save) -> bool:
    """Return whether a save is one for a restart: it has more than weights."""
    for entry in save.entries:
        state = root(entry.value)
        if (
            state.kind == "state"
            and state.of is not None
            and root(state.of).kind in ("optimizer", "scheduler")
        ):
            return True
        if state.kind == "optimizer":
            return True
    return False


def _varies(facts: Facts, save: Save) -> bool:
    """Return whether each save of a run has another file, as far as that is known."""
    path = _path_of(save.event)
    # a path that is not known, or a call that may choose the name of the file itself
    if path.kind == "none" or save.event.text not in ("torch.save", "save"):
        return True
    for dep in [path, *list_deps(path)]:
        if dep.kind in ("loop", "counter", "shifted", "field") or "element" in dep.flags:
            return True
        if dep.kind == "unknown" and not dep.deps and "fixed" not in dep.flags:
            return True
    for node in [_path_node(save.event), *[dep.node for dep in list_deps(path)]]:
        if isinstance(node, ast.AST) and _names_step(node):
            return True
    return path.kind not in ("const", "text", "unknown", "path", "option") and not path.deps


def _names_step(node: ast.AST) -> bool:
    """Return whether a name in the expression of a path is that of an epoch or step."""
    for part in ast.walk(node):
        name = getattr(part, "id", None) or getattr(part, "attr", None) or getattr(part, "arg", None)
        if isinstance(name, str) and _STEP_NAME.search(name):
            return True
        # `f"{name}_{self.num_checkpoints()}"`
        if isinstance(part, ast.Call) and _COUNTS.search(unparse(part.func).rpartition(".")[2]):
            return True
    return False


def _find_in_place(facts: Facts) -> Iterator[Finding]:
    """Find a checkpoint that is written over the only one before."""
    for event in facts.events:
        # a script that renames files anywhere knows of this: no finding at all
        is_call = event.name in ("call", "method") and _RENAMES.search(event.text) is not None
        if is_call and not (event.text == "replace" and _is_text_method(event)):
            return
    saves = [save for save in facts.training_saves() if _is_checkpoint(save)]
    if not saves or any(_varies(facts, save) or _is_single(save) for save in saves):
        return
    # two files in turn would keep one whole checkpoint at any moment
    paths = {
        (_path_of(save.event).path, _path_of(save.event).line, str(_path_of(save.event).key))
        for save in saves
    }
    if len(paths) != 1 or any("open(" in condition.text for condition in saves[0].event.conditions):
        return
    # a copy of the best one may still be there
    is_hint = any(True for _ in facts.calls(r"shutil\.copy\w*$"))
    name = unparse(_path_node(saves[0].event)) or "the same file each time"
    text = f"the checkpoint is written over the one before it, which a kill during the write destroys: {name}"
    yield at(saves[0].event, "R501", text, is_hint)


def _is_single(save: Save) -> bool:
    """Return whether a checkpoint is saved at a step that is given, and not again and again."""
    for condition in save.event.conditions:
        for test in ast.walk(getattr(condition.node, "test", None) or ast.Pass()):
            # `if epoch == last:` is one save; `if epoch % 5 == 0:` is one again and again
            is_choice = isinstance(test, ast.Compare) and isinstance(
                test.ops[0], ast.Eq | ast.NotEq | ast.In | ast.NotIn
            )
            if is_choice and "%" not in unparse(test) and _names_step(test):
                return True
    return False


def _is_text_method(event: Event) -> bool:
    """Return whether replace() is that of a string."""
    return event.name == "method" and len(event.args) == 2


def _find_all_ranks(facts: Facts) -> Iterator[Finding]:
    """Find a file that all ranks write at the same time."""
    if not facts.is_distributed():
        return
    training = {step.functions for step in facts.select("step")}
    guarded = {(save.event.path, save.event.functions[-1:]) for save in facts.saves if is_guarded(save.event)}
    for save in facts.training_saves():
        event = save.event
        # accelerate's and Fabric's save() write on rank 0 only
        if event.text != "torch.save" or is_guarded(event):
            continue
        # another call of the function that saves is guarded: this one may be that of a single process
        if event.functions not in training and (event.path, event.functions[-1:]) in guarded:
            continue
        if _is_of_one_process(save):
            continue
        path = _path_node(event)
        names = unparse(path) if path is not None else ""
        # the names of its parts and of the functions that made them, such as get_rank()
        labels = " ".join(f"{dep.label} {dep.key}" for dep in list_deps(_path_of(event)))
        if re.search("rank|process|gpu|device", f"{names} {labels}", re.IGNORECASE) or _depends_on_rank(
            event
        ):
            continue
        # no other rank has this name
        if "uuid" in _describe_path(event):
            continue
        # a file without the state of a model may be a batch or a figure, for which a rank has its reason
        is_hint = not any(root(entry.value).kind in ("state", "model") for entry in save.entries)
        yield at(event, "R503", f"all ranks write the same file at the same time: {names}", is_hint)
        if not is_hint:
            return


def _is_of_one_process(save: Save) -> bool:
    """Return whether a checkpoint has a model of DataParallel, with which one process has all GPUs."""
    flags: set[str] = set()
    for entry in save.entries:
        state = root(entry.value)
        if state.kind == "state" and state.of is not None:
            flags |= root(state.of).flags
    return "DataParallel" in flags and not flags & {"DistributedDataParallel", "DDP"}


def _depends_on_rank(event: Event) -> bool:
    for dep in list_deps(_path_of(event)):
        # memory of the process
        if "BytesIO" in str(dep.key):
            return True
        if dep.kind == "rank" or (dep.kind == "unknown" and not dep.deps and dep.path == ""):
            return True
    return False


def _find_random_of_rank_0(facts: Facts) -> Iterator[Finding]:
    """Find random numbers of rank 0 that all ranks load."""
    if not facts.is_distributed() or any(True for _ in facts.calls(r"gather")):
        return
    for save in facts.saves:
        # each rank has its file
        if not is_guarded(save.event) and any(_is_random_state(entry) for entry in save.entries):
            return
        if re.search("rank", _describe_path(save.event), re.IGNORECASE):
            return
    for save in facts.saves:
        guards = [condition.text for condition in save.event.conditions]
        if not any(re.search(r"rank|is_main|is_master|main_process", text) for text in guards):
            continue
        for entry in save.entries:
            if not _is_random_state(entry):
                continue
            for event in facts.calls(r"set_rng_state(_all)?$|random\.set_state$|random\.setstate$"):
                if not is_guarded(event):
                    text = (
                        f"all ranks load the random numbers of rank 0, which {name_line(save.event, event)} "
                        "saves"
                    )
                    yield at(event, "R504", text)
                    return


def _is_random_state(entry: Entry) -> bool:
    for dep in [entry.value, *list_deps(entry.value)]:
        if isinstance(dep.key, str) and re.search(r"get_rng_state|random\.get_?state", dep.key):
            return True
    return False


def _find_whole_objects(facts: Facts) -> Iterator[Finding]:
    """Find objects that are pickled whole, in place of their state."""
    for save in facts.training_saves():
        for entry in save.entries:
            base = root(entry.value)
            # known only by its name, it may be a state already
            if base.kind != "model" or save.event.text != "torch.save" or "by_name" in base.flags:
                continue
            text = (
                f"{describe(base, 'the model')} is pickled whole: the file needs the same classes in the "
                "same modules"
            )
            yield at(save.event, "R505", text, True)
            return


def _find_refused(facts: Facts) -> Iterator[Finding]:
    """Find a checkpoint that torch.load() refuses since PyTorch 2.6: it has more than tensors and numbers."""
    loads = []
    for event in facts.restart_loads():
        # weights_only=False reads all objects; a file that the script opens may be one of pickle
        is_plain = (
            event.text == "torch.load"
            and "weights_only" not in event.args
            and "pickle_module" not in event.args
        )
        if is_plain and not any(
            isinstance(value, Value) and value.kind == "open" for value in event.args.values()
        ):
            loads.append(event)
    if not loads:
        return
    # hint: with the release that a list of requirements asks for, all objects are read
    is_hint = asks_for_less(facts, "torch", "2.6")
    # the script allows the classes by itself
    if any(True for _ in facts.calls(r"add_safe_globals|safe_globals")):
        return
    for save in facts.saves:
        if not _is_checkpoint(save) or save.event.text != "torch.save":
            continue
        for entry in save.entries:
            what = _describe_object(entry)
            if what:
                where = name_line(save.event, loads[0])
                text = f"torch.load() refuses {what}, which {where} saves, since PyTorch 2.6"
                # an object that no dict of the script names may be saved as its state
                is_named = not what.startswith("the object") or _is_written(facts, save, entry)
                yield at(loads[0], "R506", text, is_hint or not is_named)
                return


def _is_written(facts: Facts, save: Save, entry: Entry) -> bool:
    """Return whether a dict of the module that saves has an entry as it stands: `{"model": model}`."""
    sources = [facts.tracer.source, *[module.source for module in facts.tracer.imported.values()]]
    last = entry.key.rpartition(".")[2]
    # `torch.save(model, path)`, `torch.save([model, optimizer], path)`
    if not last or last.isdigit():
        return True
    for source in sources:
        if source.path != save.event.path:
            continue
        for part in ast.walk(source.tree):
            pairs = zip(part.keys, part.values, strict=True) if isinstance(part, ast.Dict) else ()
            for key, value in pairs:
                is_name = isinstance(value, ast.Name | ast.Attribute)
                if is_name and isinstance(key, ast.Constant) and key.value == last:
                    return True
    return False


def _describe_object(entry: Entry) -> str:
    base = root(entry.value)
    if base.kind == "args" and "namespace" in base.flags and entry.value.kind == "args":
        return f"the argparse.Namespace {base.label}"
    if isinstance(entry.value.key, str) and entry.value.key == "numpy.random.get_state":
        return "the state of numpy.random"
    is_settings = entry.value.kind == "unknown" and re.search(r"^(config|cfg|conf)$", entry.value.label)
    if is_settings and any(str(dep.key) == "yacs.config.CfgNode" for dep in list_deps(entry.value)):
        return f"the CfgNode {entry.value.label}"
    if (
        base.kind in ("model", "optimizer", "scheduler")
        and "by_name" not in base.flags
        and entry.value.kind != "state"
    ):
        return f"the object {describe(base, base.kind)}"
    return ""


def _find_prefixes(facts: Facts) -> Iterator[Finding]:
    """Find a state of a wrapped model that is loaded into the bare one, or the other way round."""
    first = facts.first_step()
    for event in facts.select("load_state"):
        model = root(event.value)
        given = event.args.get(0) or event.args.get("state_dict") or Value()
        # only a state that comes from a file, before the training, and as it was saved
        if event.order > first or given.kind not in ("field", "checkpoint") or _is_changed(facts, given):
            continue
        if any(root(other.value) is model and other is not event for other in facts.select("load_state")):
            continue
        saves = _list_prefixes(facts, model, given)
        # one of several branches saves the names that are loaded
        if not saves or any(prefix == event.text for _, prefix in saves):
            continue
        # an option often decides whether the model is wrapped, and what is saved
        yield _describe_prefix(event, *saves[0])._replace(is_hint=True)
        return


def _list_prefixes(facts: Facts, model: Value, given: Value) -> list[tuple[Event, str]]:
    """Return the saves of the state of a model that is loaded, and what the names in it begin with."""
    saves = []
    for save in facts.training_saves():
        for entry in save.entries:
            state = root(entry.value)
            if state.kind != "state" or state.of is None or root(state.of) is not model:
                continue
            name = entry.key.rpartition(".")[2]
            if given.kind == "field" and str(given.key) != name:
                continue
            if (given.kind == "checkpoint" and name) or "either" in state.flags:
                continue
            prefix = "".join(sorted(flag for flag in state.flags if flag.startswith("prefix:")))
            saves.append((save.event, prefix))
    return saves


def _is_changed(facts: Facts, state: Value) -> bool:
    """Return whether the script changes the names of a state before it loads it."""
    for event in facts.select("set_item", "method"):
        if root(event.value) is root(state) and event.text not in ("get", "keys", "items", "values"):
            return True
    return False


def _describe_prefix(event: Event, save: Event, saved: str) -> Finding:
    if saved:
        prefix = saved.partition(":")[2]
        text = (
            f"{name_line(save, event)} saves names that begin with {prefix}, and this loads them into "
            "the bare model"
        )
    else:
        prefix = event.text.partition(":")[2]
        text = (
            f"{name_line(save, event)} saves names of the bare model, and this loads them into one with "
            f"{prefix}"
        )
    return at(event, "R601", text)


def _find_lost_gradients(facts: Facts) -> Iterator[Finding]:
    """Find a checkpoint in the middle of an accumulation."""
    for step in facts.select("step"):
        if root(step.value).kind != "optimizer" or not facts.is_in_training(step):
            continue
        tests = [condition for condition in step.conditions if _lets_step(condition)]
        if not tests:
            continue
        # the innermost test that lets the optimizer step, such as `if (i + 1) % 4 == 0`
        test = tests[-1]
        if _steps_each_time(facts, step, test):
            continue
        # each batch is a step
        if any(dep.kind == "modulo" and dep.key == 1 for dep in list_deps(test.value)):
            continue
        for save in facts.training_saves():
            if save.event.loops != step.loops or not _is_checkpoint(save):
                continue
            if any(_is_same(condition, test) for condition in save.event.conditions):
                continue
            if _saves_at_any_batch(step, save.event):
                where = name_line(step, save.event)
                text = f"a checkpoint can be saved between two steps of the optimizer ({where})"
                is_hint = bool(_list_tests(save.event)) or not _is_constant_number(facts, test)
                yield at(save.event, "R602", text, is_hint)
                return
            others = [
                condition
                for condition in save.event.conditions
                if condition.is_true and _counts_batches(condition)
            ]
            if (
                not others
                or others[-1].text == test.text
                or "sync_gradients" in save.event.describe_conditions()
                or _waits_for_step(save.event, test)
            ):
                continue
            # the save counts steps of the optimizer, and not batches
            if _counts_steps(step, others[-1].value, test):
                continue
            is_multiple = _is_multiple(_read_modulo(test), _read_modulo(others[-1]))
            if is_multiple:
                continue
            text = (
                "a checkpoint can be saved between two steps of the optimizer "
                f"({name_line(step, save.event)}): {others[-1].text}"
            )
            # the options decide
            is_hint = is_multiple is None or not _is_constant_number(facts, test)
            yield at(save.event, "R602", text, is_hint)
            return


def _is_same(condition: Condition, test: Condition) -> bool:
    return condition.node is test.node and condition.is_true == test.is_true


def _is_constant_number(facts: Facts, test: Condition) -> bool:
    """Return whether the script says how many batches a step has: an option may be 1."""
    if test.text.startswith("with "):
        for event in facts.calls(r"(^|\.)Accelerator$"):
            number = event.args.get("gradient_accumulation_steps")
            return number is not None and number.kind == "const"
        return False
    modulo = _read_modulo(test)
    if modulo is not None:
        return isinstance(modulo[1], int)
    node = getattr(test.node, "test", None)
    numbers = [part.value for part in ast.walk(node or ast.Pass()) if isinstance(part, ast.Constant)]
    return any(isinstance(number, int) and number > 1 for number in numbers)


def _list_tests(event: Event) -> list[Condition]:
    """Return the tests within the innermost loop that lead to an event."""
    first = event.loops[-1].line
    return [
        condition
        for condition in event.conditions
        if isinstance(condition.node, ast.If) and condition.node.lineno > first
    ]


def _saves_at_any_batch(step: Event, save: Event) -> bool:
    """Return whether a save in an accumulation depends on nothing, on the time or on a signal."""
    inner = save.loops[-1]
    if save.path != inner.path or step.path != inner.path:
        return False
    return all(_AT_ANY_TIME.search(condition.text) for condition in _list_tests(save))


def _steps_each_time(facts: Facts, step: Event, test: Condition) -> bool:
    """Return whether another step of the same optimizer, in the same loop, does not depend on the test."""
    for other in facts.select("step"):
        is_same = root(other.value) is root(step.value) and other.loops == step.loops
        if is_same and not any(condition.node is test.node for condition in other.conditions):
            return True
    return False


def _counts_batches(condition: Condition) -> bool:
    """Return whether a test has the rest of a division, or a name that was set to such a test before."""
    if not isinstance(condition.node, ast.If | ast.IfExp):
        return False
    return is_modulo(condition.node.test) or _find_modulo(condition.value) is not None


def _find_modulo(value: Value, depth: int = 0) -> Value | None:
    """Return the rest of a division that a test compares: `is_last = number % 4 == 0`, `if not is_last`."""
    if value.kind == "modulo":
        return value
    if depth > 3 or value.kind not in ("compared", "unknown") or "from_call" in value.flags:
        return None
    for dep in value.deps:
        modulo = _find_modulo(dep, depth + 1)
        if modulo is not None:
            return modulo
    return None


def _waits_for_step(save: Event, test: Condition) -> bool:
    """Return whether the test of a save has that of the optimizer's step in it."""
    modulo = _find_modulo(test.value)
    for condition in save.conditions:
        if condition.node is test.node:
            continue
        if test.text in condition.text or (modulo is not None and modulo in list_deps(condition.value)):
            return True
    return False


def _read_modulo(condition: Condition) -> tuple[str, Any, str] | None:
    """Return (number, divisor, rest) of a test such as `step % 4 == 0`; None for other tests."""
    test = getattr(condition.node, "test", None)
    for dep in [condition.value, *condition.value.deps]:
        # a name that was set to the test
        if not isinstance(test, ast.Compare) and dep.kind == "compared":
            test = dep.node
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return None
    if not isinstance(test.ops[0], ast.Eq | ast.NotEq):
        return None
    left = test.left
    if not isinstance(left, ast.BinOp) or not isinstance(left.op, ast.Mod):
        return None
    divisor: Any = left.right.value if isinstance(left.right, ast.Constant) else unparse(left.right)
    return unparse(left.left), divisor, unparse(test.comparators[0])


def _is_multiple(step: tuple[str, Any, str] | None, save: tuple[str, Any, str] | None) -> bool | None:
    """Return whether each checkpoint is at a step of the optimizer; None if that depends on options."""
    if step is None or save is None:
        return False
    if step[0] != save[0] or step[2] != save[2]:
        return False
    if isinstance(step[1], int) and isinstance(save[1], int):
        return step[1] != 0 and save[1] % step[1] == 0
    # a constant cannot follow an option
    if isinstance(save[1], int):
        return False
    return None


def _lets_step(condition: Condition) -> bool:
    """Return whether the optimizer is stepped once in several batches: `if number % 4 == 0`, the other branch
    of `if number % 4 != 0` with no_sync(), or accelerate's accumulate()."""
    # `% 4 != 0` lets the optimizer step in its `else`
    test = getattr(condition.node, "test", None)
    is_negative = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotEq)
    if is_modulo(test):
        return condition.is_true != is_negative
    if _resets_number(condition):
        return True
    if _counts_batches(condition):
        return True
    return re.match(r"with \w+\.accumulate\(", condition.text) is not None


def _resets_number(condition: Condition) -> bool:
    """Return whether a branch sets the number that its test compares to 0: `if waiting == 4: waiting = 0`."""
    test = getattr(condition.node, "test", None)
    branch = getattr(condition.node, "body" if condition.is_true else "orelse", None)
    if not isinstance(test, ast.Compare) or not branch or not isinstance(branch, list):
        return False
    for part in branch:
        is_zero = (
            isinstance(part, ast.Assign) and isinstance(part.value, ast.Constant) and part.value.value == 0
        )
        if is_zero and unparse(part.targets[0]) == unparse(test.left):
            return True
    return False


def _counts_steps(step: Event, value: Value, test: Condition) -> bool:
    """Return whether a number counts the steps of the optimizer, and not the batches."""
    # the branch of the step: the body of a test, or what follows its "else"
    attribute = "body" if test.is_true else "orelse"
    branch = getattr(test.node, attribute, None) or [test.node]
    first = branch[0].lineno
    last = branch[-1].end_lineno or 0
    is_accumulated = test.text.startswith("with ")
    for dep in list_deps(value):
        if dep.kind != "counter":
            continue
        if not is_accumulated and first <= dep.line <= last:
            return True
        for part in ast.walk(step.loops[0].node):
            if not isinstance(part, ast.If) or "sync_gradients" not in unparse(part.test):
                continue
            if part.lineno <= dep.line <= (part.end_lineno or 0):
                return True
    for dep in list_deps(value):
        # `trainer.global_step`: by its name it counts steps or updates
        is_opaque = dep.kind in ("unknown", "attribute", "option") and not dep.deps
        if is_opaque and re.search("step|update", dep.label):
            return True
    return False
