"""Rules about state that the training loop changes: is it saved, and is it loaded?"""

import ast
import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from bootfile.lint import values
from bootfile.lint.facts import Entry, Facts, Save, describe, is_constant, reads_restored
from bootfile.lint.findings import Finding, at, name_line, of_a_restart
from bootfile.lint.record import Event
from bootfile.lint.syntax import unparse
from bootfile.lint.values import Value, kind_of, list_deps, root

RULES = {"optimizer": "R101", "scheduler": "R103", "scaler": "R104", "ema": "R105"}
WORDS = {"optimizer": "optimizer", "scheduler": "scheduler", "scaler": "GradScaler", "ema": "average"}
_AVERAGE_NAME = re.compile(r"ema|av(g|erage)|teacher|shadow|momentum|_k$|slow", re.IGNORECASE)
_BEST_NAME = re.compile(
    r"(^|_)(best|highest|lowest|top|record)|best(_|$)|^(min|max)_(\w*_)?(loss|acc|val)", re.IGNORECASE
)
_OFFSET = re.compile(
    r"resum|restart|start_(step|epoch|iter)|offset|restor|previous|step_start", re.IGNORECASE
)
_EPOCH_NAME = re.compile(r"(epoch|iter|iteration|step)s?\W*$", re.IGNORECASE)
_PATIENCE = re.compile(r"patien|not?_improv|wait|stop|bad_epoch|trigger|early", re.IGNORECASE)


def check(facts: Facts) -> Iterator[Finding]:
    """Yield the findings about state."""
    return of_a_restart(_find_all(facts), facts)


def _find_all(facts: Facts) -> Iterator[Finding]:
    yield from _find_missing(facts)
    yield from _find_not_loaded(facts)
    yield from _find_modules(facts)
    yield from _find_best(facts)
    yield from _find_counters(facts)
    yield from _find_parameters_only(facts)


def find_changed(facts: Facts) -> dict[Value, Event]:
    """Return the objects whose state the training loop changes, and the first event that changes them."""
    changed: dict[Value, Event] = {}
    for event in facts.events:
        if not facts.is_in_training(event):
            continue
        base = root(event.value)
        kind = base.kind
        # what a step or an update changes; what is only read needs no place in a checkpoint
        if event.name == "step" and kind in ("optimizer", "scheduler", "scaler"):
            changed.setdefault(base, event)
        is_update = event.text in ("update", "update_parameters", "step", "update_fn", "ema_update")
        if event.name in ("method", "call") and kind == "ema" and is_update:
            changed.setdefault(base, event)
    changed.update(_find_copies(facts))
    return changed


def _find_copies(facts: Facts) -> dict[Value, Event]:
    """Return the copies of a model that the training loop changes: averages of its weights."""
    copies: dict[Value, Event] = {}
    for event in facts.events:
        if not facts.is_in_training(event) or event.name not in ("method", "call"):
            continue
        for value in [event.value, *event.args.values()]:
            base = root(value)
            is_copy = base.kind == "copied" or (base.kind == "model" and "copy" in base.flags)
            is_use = event.text in ("parameters", "named_parameters", "state_dict", "buffers")
            # a copy may also be a frozen teacher: its name has to say that it is an average
            if is_copy and is_use and _AVERAGE_NAME.search(base.label):
                copies.setdefault(base, event)
    return copies


def _find_missing(facts: Facts) -> Iterator[Finding]:
    save = facts.fullest_save()
    if save is None:
        return
    changed = find_changed(facts)
    for value, event in changed.items():
        kind = value.kind
        if kind == "copied":
            kind = "ema"
        if facts.is_own_state(value) or facts.is_saved(value, kind) or _ends_before_saves(facts, value):
            continue
        if kind == "scheduler" and follows_epoch(facts, value):
            continue
        # one that is saved with another one, or the same one that another branch of the script has made
        if kind == "optimizer" and (is_inside(value, changed) or _has_sibling(facts, value, save)):
            continue
        # GradScaler(enabled=False) keeps no scale
        if kind == "scaler" and is_constant(value.options.get("enabled"), False):
            continue
        name = describe(value, WORDS[kind])
        verb = "stepped"
        if kind == "ema":
            verb = "updated"
        if kind == "scaler":
            verb = "used"
        # the name alone may be as short as `s`: the message says what it is
        if WORDS[kind].lower() not in name.lower():
            name = f"{name} ({WORDS[kind]})"
        message = f"{name} is {verb}, but not in the checkpoint that {name_line(save.event, event)} saves"
        # the class of an average may be saved by its own means
        is_class = kind == "ema" and value.kind != "copied" and value.key != "AveragedModel"
        # a restart loads it: the save may only be one that is not followed
        is_loaded = kind == "optimizer" and value in facts.loaded
        # another file has it, as the one that is written after the last epoch
        is_elsewhere = kind == "optimizer" and any(_has_state(other, value) for other in facts.saves)
        is_hint = is_class or is_loaded or is_elsewhere or has_no_state(value)
        yield at(event, RULES[kind], message, is_hint)


def _has_state(save: Save, value: Value) -> bool:
    """Return whether a save has the state of an object."""
    states = [root(entry.value) for entry in save.entries]
    return any(state.kind == "state" and state.of is not None and root(state.of) is value for state in states)


def has_no_state(value: Value) -> bool:
    """Return whether an optimizer is SGD without momentum: its state has the learning rate only."""
    if value.key != "SGD":
        return False
    names = set(value.options)
    return not names & {"momentum", 2} and all(other.kind != "open" for other in value.options.values())


def _ends_before_saves(facts: Facts, value: Value) -> bool:
    """Return whether only another loop saves: that of a later stage, which does not change the object."""
    saving = {save.event.loops[0] for save in facts.training_saves()}
    # a stage that saves weights only
    fullest = facts.fullest_save()
    if fullest is not None and facts.is_in_training(fullest.event) and len(fullest.entries) > 1:
        saving = {fullest.event.loops[0]}
    for event in facts.events:
        if facts.is_in_training(event) and root(event.value) is value and event.loops[0] in saving:
            return False
    return bool(saving) and value.kind != "copied"


def _has_sibling(facts: Facts, value: Value, save: Save) -> bool:
    """Return whether the checkpoint has an optimizer of the same name, made at another place."""
    for entry in save.entries:
        base = root(entry.value)
        if base.kind == "state" and base.of is not None:
            other = root(base.of)
            if other is not value and other.kind == value.kind and other.label == value.label:
                return True
    return False


def is_inside(value: Value, changed: dict[Value, Event]) -> bool:
    """Return whether an object is a part of another one that is stepped, as the optimizer in a Lookahead."""
    for other in changed:
        if other is not value and root(other.options.get(0, Value())) is value and other.kind == value.kind:
            return True
    return False


def follows_epoch(facts: Facts, scheduler: Value) -> bool:
    """Return whether a scheduler does not need its state: it is told the epoch, or steps up to it again."""
    same = [event.value for event in facts.select("create") if event.value.kind == "scheduler"]
    for made in [scheduler, *same]:
        is_it = made is scheduler or (made.label and made.label == scheduler.label)
        # also if another branch of the script makes it
        if is_it and set(made.options) & {"last_epoch", "last_step", "start_step", "start_epoch"}:
            return True
    for number, argument in scheduler.options.items():
        # LambdaLR with a function of the restored epoch
        if number != 0 and reads_restored(argument):
            return True
    steps = [event for event in facts.select("step") if root(event.value) is scheduler]
    if scheduler.key == "ReduceLROnPlateau":
        # one of several schedulers, of which the others get the epoch
        return any(_gets_epoch(event) for event in steps)
    if any(_steps_to_epoch(facts, event) for event in steps):
        return True
    for event in facts.select("set_attribute"):
        # `scheduler.last_epoch = start_epoch - 1`
        if root(event.value) is scheduler and event.text in ("last_epoch", "_step_count", "last_step"):
            return True
    return False


def _gets_epoch(event: Event) -> bool:
    """Return whether the name of an argument is that of an epoch: `scheduler.step(self.state["epoch"])`."""
    given = [*getattr(event.node, "args", [])]
    given.extend(keyword.value for keyword in getattr(event.node, "keywords", []))
    return any(_EPOCH_NAME.search(unparse(value)) for value in given)


def _steps_to_epoch(facts: Facts, event: Event) -> bool:
    """Return whether a step of a scheduler does not depend on the steps before it."""
    if not facts.is_in_training(event):
        # steps before the training bring the schedule to its place
        return bool(event.loops) or event.order < facts.first_step()
    for argument in event.args.values():
        kinds = {dep.kind for dep in list_deps(argument)}
        if kinds & {"loop", "counter", "shifted"} or values.is_restored(argument):
            return True
    if _gets_epoch(event):
        return True
    # a warm-up that ends after the first epochs
    epoch = event.loops[0].value
    return epoch is not None and any(epoch in list_deps(condition.value) for condition in event.conditions)


def _find_not_loaded(facts: Facts) -> Iterator[Finding]:
    """Find objects that are in the checkpoint, but not loaded at a restart."""
    if facts.restores_all or not facts.loads or facts.trainers() or _loads_unknown(facts):
        return
    load = facts.loads[-1]
    changed = find_changed(facts)
    for save in facts.saves:
        for entry in save.entries:
            state = root(entry.value)
            if state.kind != "state" or state.of is None:
                continue
            value = root(state.of)
            # what the training does not change is the same at each start, and need not be loaded
            is_changed = value in changed or value.kind == "generator"
            if not is_changed or value in facts.loaded or value in facts.escaped:
                continue
            if value.kind == "scheduler" and follows_epoch(facts, value):
                continue
            if _is_any_read(facts, value) or _has_loaded_sibling(facts, value):
                continue
            kind = value.kind
            if kind == "copied":
                kind = "ema"
            message = (
                f"{describe(value, kind)} is in the checkpoint of {name_line(save.event, load)}, but "
                "is not loaded "
                "with it"
            )
            # weights that no loop continues from may be those of an evaluation
            is_restart = any(other.kind in ("optimizer", "scheduler") for other in facts.loaded)
            starts = [loop.start for loop in facts.loops if loop.start is not None]
            is_restart = is_restart or any(values.is_restored(start) for start in starts)
            way = load.describe_conditions() + " ".join(load.functions)
            is_restart = is_restart or re.search("resum|restart|continue", way, re.IGNORECASE) is not None
            yield at(load, "R201", message, not is_restart)
            # one finding for each object, in whatever many checkpoints it is
            changed.pop(value, None)


def _loads_unknown(facts: Facts) -> bool:
    """Return whether a loop over objects that are not known loads a state, which may be that of any."""
    for event in facts.select("load_state"):
        base = root(event.value)
        if event.order < facts.first_step() and event.loops and base.kind in ("unknown", "attribute"):
            return True
    return False


def _is_read(facts: Facts, entry: Entry) -> bool:
    """Return whether the script reads the entry of a checkpoint, for whatever use."""
    last = entry.key.rpartition(".")[2]
    for event in facts.select("read"):
        # `checkpoint[name]` with a name that is not known may read any entry
        if (last and str(event.value.key) == last) or event.value.key is None:
            return True
    return False


def _is_any_read(facts: Facts, value: Value) -> bool:
    """Return whether the script reads an entry of an object from any of its checkpoints."""
    for save in facts.saves:
        for entry in save.entries:
            state = root(entry.value)
            is_its = state.kind == "state" and state.of is not None and root(state.of) is value
            if is_its and _is_read(facts, entry):
                return True
    return False


def _has_loaded_sibling(facts: Facts, value: Value) -> bool:
    return any(other.kind == value.kind and other.label == value.label for other in facts.loaded)


def _find_modules(facts: Facts) -> Iterator[Finding]:
    """Find modules whose parameters an optimizer changes, and that no checkpoint has."""
    save = facts.fullest_save()
    if save is None or facts.saves_all():
        return
    stepped = [value for value in find_changed(facts) if value.kind == "optimizer"]
    seen: set[Value] = set()
    for optimizer in stepped:
        # the first argument of an optimizer: the parameters that it changes
        first = optimizer.options.get(0) or optimizer.options.get("params")
        if first is None:
            continue
        for value in _find_parameter_owners(first):
            if value in seen or facts.is_own_state(value):
                continue
            seen.add(value)
            if value.kind not in ("model", "criterion") or facts.is_saved(value, "model"):
                continue
            # known only by its name, or a part of another module, whose state has it
            if "by_name" in value.flags or value.of is not None:
                continue
            # a script that saves no module at all has its weights elsewhere, in a way that is not followed
            if not _saves_another_module(save, value) or _is_part(facts, value):
                continue
            # a class with the loss is made of the model, whose state a checkpoint has
            models = [part for part in value.options.values() if kind_of(part) == "model"]
            if any(facts.is_saved(part, "model") for part in models):
                continue
            message = (
                f"{describe(value, 'a module')} is trained by {describe(optimizer, 'the optimizer')}, "
                "but not in the "
                f"checkpoint that {name_line(save.event, optimizer)} saves"
            )
            yield at(optimizer, "R109", message)


def _is_part(facts: Facts, module: Value) -> bool:
    """Return whether a module is an attribute of another one, whose state has it."""
    for event in facts.select("set_attribute"):
        if root(event.args[0]) is module and root(event.value).kind not in ("instance", "args"):
            return True
    return False


def _saves_another_module(save: Save, value: Value) -> bool:
    for entry in save.entries:
        state = root(entry.value)
        if state.kind == "state" and state.of is not None and root(state.of).kind in ("model", "unknown"):
            return root(state.of) is not value
    return False


def _find_parameter_owners(value: Value) -> list[Value]:
    owners = []
    for dep in [value, *list_deps(value), *value.parts.values()]:
        if dep.kind == "attribute" and dep.label == "parameters" and dep.of is not None:
            owners.append(root(dep.of))
    return owners


def _find_best(facts: Facts) -> Iterator[Finding]:
    """Find a best result that begins again at each start, so that a worse one replaces the best file."""
    if facts.saves_all():
        return
    seen: set[str] = set()
    for event in facts.select("set_name", "set_attribute", "set_item"):
        if not facts.is_in_training(event):
            continue
        name = event.text
        if len(facts.loops) > 1 and _ends_before(facts, event):
            continue
        plain = re.sub(r"[\"'\]]", "", name.replace("[", "_"))
        old = _find_old(facts, event)
        if name in seen or old is None or not _BEST_NAME.search(plain.rpartition(".")[2]):
            continue
        # `if acc > best_acc: best_acc = acc`: without such a test the name holds something else
        if not _compares(facts, event, name):
            continue
        seen.add(name)
        # it has to begin with a number, before the training loop
        is_number = old.kind == "const" and not isinstance(old.key, str | bool)
        if not is_number or any(loop in facts.loops for loop in old.loops):
            continue
        if values.is_restored(old) or _is_value_restored(facts, name, is_best=True):
            continue
        # a best result that is only printed does no harm
        if not _decides_a_save(facts, event):
            continue
        where = "and not in the checkpoint"
        for save in facts.saves:
            if any(name.rpartition(".")[2] in entry.key for entry in save.entries):
                where = f"although the checkpoint of {name_line(save.event, event)} has it"
        yield at(event, "R108", f"{name} begins with {old.key} at each start, {where}")


def _ends_before(facts: Facts, event: Event) -> bool:
    """Return whether an event is in a stage before the one whose checkpoints a restart loads."""
    fullest = facts.fullest_save()
    if fullest is None or not facts.is_in_training(fullest.event) or len(fullest.entries) < 2:
        return False
    return fullest.event.loops[0] is not event.loops[0]


def _find_old(facts: Facts, event: Event) -> Value | None:
    """Return the value that a name had before the training loop."""
    if event.name == "set_name":
        return event.args.get(0)
    # an attribute or an item has no old value in the event: it is the last assignment before the loop
    for earlier in facts.select(event.name):
        if earlier.order >= event.order:
            break
        is_same = earlier.text.rpartition(".")[2] == event.text.rpartition(".")[2]
        if not is_same or facts.is_in_training(earlier):
            continue
        old = earlier.args.get(0)
        if old is not None and values.is_restored(old):
            return None
        is_attribute = event.name == "set_attribute" and root(event.value) is root(earlier.value)
        if old is not None and is_attribute:
            return old
    return None


def _is_value_restored(
    facts: Facts, name: str, is_best: bool = False, others: AbstractSet[str] = frozenset()
) -> bool:
    """Return whether a name gets a value of a checkpoint anywhere. is_best: the checkpoint may call it by
    another name for the best result. others: keys of other numbers."""
    last = name.rpartition(".")[2]
    for event in facts.select("set_name", "set_attribute", "set_item"):
        if event.text.rpartition(".")[2] == last and values.is_restored(event.args.get(0, Value())):
            return True
        if event.name == "set_name" and event.text == last and values.is_restored(event.value):
            return True
    # the script reads an entry of nearly the same name: it may come back in a way that is not followed
    for event in facts.select("read"):
        key = str(event.value.key or "")
        if key in others and key != last:
            continue
        if key and (key in last or last in key or (is_best and _BEST_NAME.search(key))):
            return True
    return False


def _compares(facts: Facts, event: Event, name: str) -> bool:
    last = re.escape(name.rpartition(".")[2])
    for condition in event.conditions:
        if re.search(rf"(\b|_){last}", condition.text) or re.search(r"is_best|improved", condition.text):
            return True
    return False


def _decides_a_save(facts: Facts, event: Event) -> bool:
    """Return whether a file is written under the condition that also changes the best result."""
    nodes = {id(condition.node) for condition in event.conditions if condition.is_true}
    for save in facts.saves:
        if nodes & {id(condition.node) for condition in save.event.conditions if condition.is_true}:
            # the innermost condition of the best result has to be one of the save, too
            shared = [condition for condition in event.conditions if condition.is_true]
            last = shared[-1]
            if any(condition.node is last.node for condition in save.event.conditions):
                return True
    return False


def _find_counters(facts: Facts) -> Iterator[Finding]:
    """Find counters that begin again at each start, although the training depends on them."""
    if facts.saves_all() or facts.restores_all:
        return
    seen: set[tuple[str, int]] = set()
    for event in facts.select("test", "method", "set_item"):
        if not facts.is_in_training(event) and not _is_loop_test(facts, event):
            continue
        # a counter that is only printed may begin again: two uses change the training
        use = _describe_use(event)
        if not use:
            continue
        for counter in _list_counters(event):
            place = (counter.path, counter.line)
            if place in seen or not _begins_again(facts, counter) or _has_offset(event, counter):
                continue
            # `if step > max_steps: break` ends a run, too; only early stopping counts bad epochs
            if use == "stop" and not _PATIENCE.search(counter.label):
                continue
            seen.add(place)
            # a number that is read for the training loop is not that of a sampler of its own
            others = _list_starts(facts) if use == "order" else set()
            if _is_value_restored(facts, counter.label, others=others) or _is_entry(facts, counter):
                continue
            if _catches_up(facts, counter):
                continue
            what = {
                "stop": "early stopping depends",
                "rate": "the learning rate depends",
                "order": "the order of the samples depends",
            }[use]
            message = (
                f"{counter.label} begins again at each start and is not in the checkpoint, but {what} on it"
            )
            # a schedule may have another way to find its place
            yield at(counter, "R107", message, use == "rate")


def _list_starts(facts: Facts) -> set[str]:
    """Return the keys of the checkpoint with whose numbers the training loops begin."""
    keys = set()
    for loop in facts.loops:
        for dep in list_deps(loop.start or Value()):
            if dep.kind == "field" and dep.key is not None:
                keys.add(str(dep.key))
    return keys


def _catches_up(facts: Facts, counter: Value) -> bool:
    """Return whether a loop of its own adds to a counter until it has its value again, as in `while step >=
    milestones[index]: index += 1`."""
    for event in facts.select("test"):
        if not isinstance(event.node, ast.While) or not facts.is_in_training(event):
            continue
        # the training loop itself may be such a loop
        is_own = event.loops[0].node is not event.node and event.path == counter.path
        is_around = event.node.lineno <= counter.line <= (event.node.end_lineno or 0)
        if is_own and is_around and re.search(rf"\b{re.escape(counter.label)}\b", event.text):
            return True
    return False


def _is_entry(facts: Facts, counter: Value) -> bool:
    for save in facts.saves:
        for entry in save.entries:
            if counter in list_deps(entry.value) and facts.restores_all:
                return True
            same = entry.value.label == counter.label and _is_read(facts, entry)
            if same:
                return True
    return False


def _is_loop_test(facts: Facts, event: Event) -> bool:
    return bool(event.loops) and event.loops[-1] in facts.loops


def _describe_use(event: Event) -> str:
    if event.name == "test" and event.value.kind in ("compared", "unknown") and hasattr(event.node, "body"):
        # `if counter >= patience: break`
        for statement in getattr(event.node, "body", []):
            if type(statement).__name__ in ("Break", "Return") and event.value.kind == "compared":
                return "stop"
        return ""
    # `group["lr"] = rate * step / warmup`
    if event.name == "set_item" and re.search(r"\[['\"]lr['\"]\]$", event.text):
        return "rate"
    # `sampler.set_epoch(passes)`, with a number of its own
    if event.name == "method" and event.text == "set_epoch":
        return "order"
    return ""


def _list_counters(event: Event) -> list[Value]:
    value = event.value
    if event.name == "set_item":
        value = event.args[0]
    if event.name == "method":
        value = event.args.get(0) or event.args.get("epoch") or Value()
    counters = [dep for dep in list_deps(value) if dep.kind == "counter"]
    return sorted(counters, key=_line_of)


def _has_offset(event: Event, counter: Value) -> bool:
    """Return whether a use adds the number before the restart to a counter."""
    given = event.args[0] if event.name == "set_item" else event.value
    for dep in list_deps(given):
        is_other = dep is not counter and dep.kind not in ("state", "optimizer", "model", "scheduler")
        if is_other and _OFFSET.search(dep.label):
            return True
    return False


def _line_of(value: Value) -> int:
    return value.line


def _begins_again(facts: Facts, counter: Value) -> bool:
    """Return whether a counter is a constant at the start of the training."""
    first = counter.of
    if first is None or values.is_restored(counter):
        return False
    # a counter of a counter, as of nested loops: what it was before the outermost one
    for _ in range(5):
        if first.kind in ("counter", "shifted") and first.of is not None:
            first = first.of
    if first.kind != "const" or any(loop in facts.loops for loop in first.loops):
        return False
    return not isinstance(first.key, str | bool)


def _find_parameters_only(facts: Facts) -> Iterator[Finding]:
    """Find a checkpoint that has the parameters of a model, but not its buffers."""
    for save in facts.training_saves():
        for entry in save.entries:
            if entry.value.kind == "state":
                continue
            for dep in [entry.value, *entry.value.deps]:
                # `{"params": list(model.parameters())}`
                is_named = dep.kind == "attribute" and dep.label == "parameters" and dep.of is not None
                if (
                    is_named
                    and kind_of(dep.of or Value()) == "model"
                    and not _has_whole_state(save, root(dep.of or Value()))
                ):
                    name = describe(dep.of or Value(), "the model")
                    message = f"{name} is saved without its buffers, such as those of BatchNorm"
                    yield at(save.event, "R102", message)
                    return


def _has_whole_state(save: Save, model: Value) -> bool:
    for entry in save.entries:
        state = root(entry.value)
        if state.kind == "state" and state.of is not None and root(state.of) is model:
            return True
    return False
