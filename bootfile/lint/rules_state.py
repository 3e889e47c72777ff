"""Rules about the objects that the loop changes: does a checkpoint have their state, and is it read back?"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from bootfile.lint import values
from bootfile.lint.checkpoints import Entry, Save
from bootfile.lint.facts import Facts, of_a_restart, reads_restored
from bootfile.lint.record import Event
from bootfile.lint.rules_files import is_file_of
from bootfile.lint.sources import unparse
from bootfile.lint.table import Finding, at, name_line
from bootfile.lint.values import Value, kind_of, list_deps, root
from bootfile.lint.walk import describe, given_state, is_constant, list_parameter_owners, split

_EPOCH_NAME = re.compile(r"(epoch|iter|iteration|step)s?\W*$", re.IGNORECASE)
_CONTINUES = re.compile("resum|restart|continue", re.IGNORECASE)
_PLACE = {"last_epoch", "last_step", "start_step", "start_epoch"}
_SET_PLACE = ("last_epoch", "_step_count", "last_step")


class Kind(NamedTuple):
    """What is reported of the objects of a kind. word: what the object is. needs_none: whether an object is
    right after a restart without its state."""

    rule: str
    word: str
    verb: str
    needs_none: Callable[[Facts, Value], bool]


def check(facts: Facts) -> Iterator[Finding]:
    """Yield the findings about state."""
    for find in (_find_missing, _find_ahead, _find_apex, _find_not_loaded, _find_modules):
        yield from of_a_restart(find(facts), facts)


def _find_missing(facts: Facts) -> Iterator[Finding]:
    """Find objects that the loop changes, and that no checkpoint has."""
    save = facts.fullest_save
    if save is None:
        return
    for value, event in facts.changed.items():
        is_kept = facts.is_own_state(value) or facts.is_saved(value, get_kind(value))
        if is_kept or _ends_before_saves(facts, value) or KINDS[get_kind(value)].needs_none(facts, value):
            continue
        # a restart loads the optimizer, or another file has it, as the one after the last epoch
        is_elsewhere = value in facts.loaded or any(value in other.owners() for other in facts.saves)
        yield describe_missing(value, event, save.event, is_elsewhere and value.kind == "optimizer")


def _find_ahead(facts: Facts) -> Iterator[Finding]:
    """Find a schedule that gets the number of the epochs before the restart: its constructor steps, too."""
    starts = [split(loop.start or Value()) for loop in facts.loops]
    # `range(max(0, last_epoch), epochs)`
    starts += [split(dep) for start, _ in starts if start.key == "max" for dep in start.deps]
    for value in facts.changed:
        number, added = split(value.options.get("last_epoch") or Value())
        read = [(start, offset) for start, offset in starts if start.kind == number.kind == "field"]
        first = [offset for start, offset in read if (start.key, start.of) == (number.key, number.of)]
        steps = [step for step in facts.in_training("step") if root(step.value) is value]
        # what is loaded after it replaces what the constructor did
        is_ahead = value.kind == "scheduler" and value not in facts.loaded and first != []
        if is_ahead and added >= first[0] and all(len(step.loops) == 1 for step in steps):
            text = f"{describe(value, 'scheduler')} is made with last_epoch={number.label}, and steps"
            text = f"{text} once more: a restart is one epoch ahead"
            # its rate does not depend on the epoch, but earlier releases of torch multiply it once more
            yield at(value, "R103", text, value.key == "ExponentialLR", value=value)


def _find_apex(facts: Facts) -> Iterator[Finding]:
    """Find the loss scale of apex, which amp.state_dict() has."""
    scaled = facts.calls(r"(^|\.)scale_loss$") if facts.imports("apex") and not facts.saves_all else []
    if scaled and facts.fullest_save is not None and not facts.calls(r"amp\.state_dict$"):
        save = facts.fullest_save.event
        text = f"the loss scale of apex is not in the checkpoint that {name_line(save, scaled[0])} saves"
        yield at(scaled[0], "R104", text, save=save)


def describe_missing(value: Value, event: Event, save: Event, is_hint: bool = False) -> Finding:
    """Return the finding about an object that the loop changes and a checkpoint lacks."""
    kind = KINDS[get_kind(value)]
    word = "copy of the weights" if value.kind == "model" else kind.word
    name = describe(value, word)
    # the name alone may be as short as `s`: the message says what it is
    name = name if word.lower() in name.lower() else f"{name} ({word})"
    message = f"{name} is {kind.verb}, but not in the checkpoint that {name_line(save, event)} saves"
    return at(event, kind.rule, message, is_hint or _has_no_state(value), value=value, save=save)


def _has_no_state(value: Value) -> bool:
    """Return whether an optimizer is SGD without momentum: its state has the learning rate only."""
    is_open = any(other.kind == "open" for other in value.options.values())
    return value.key == "SGD" and not value.options.keys() & {"momentum", 2} and not is_open


def _ends_before_saves(facts: Facts, value: Value) -> bool:
    """Return whether only another loop saves: that of a later stage, which does not change the object."""
    fullest = facts.fullest_save
    saving = {save.event.loops[0] for save in facts.training_saves}
    # some of several stages save weights only
    if fullest is not None and facts.is_in_training(fullest.event) and len(fullest.entries) > 1:
        saving = {fullest.event.loops[0]}
    loops = {event.loops[0] for event in facts.events if event.loops and root(event.value) is value}
    return bool(saving) and not loops & saving and get_kind(value) != "ema"


# Objects that need no state


def _is_saved_with_another(facts: Facts, value: Value) -> bool:
    """Return whether an optimizer is a part of another one, as in a Lookahead, or the checkpoint has one of
    the same name, which another branch of the script makes."""
    outer = [root(other.options.get(0, Value())) for other in facts.changed if other.kind == value.kind]
    owners = facts.fullest_save.owners() if facts.fullest_save is not None else []
    others = [(other.kind, other.label) for other in owners if other is not value]
    return value in outer or (value.kind, value.label) in others


def _follows_epoch(facts: Facts, scheduler: Value) -> bool:
    """Return whether a scheduler is told the epoch, or steps up to it again."""
    made = [event.value for event in facts.select("create") if event.value.kind == "scheduler"]
    # also if another branch of the script makes it
    same = [other.options for other in made if other.label == scheduler.label != ""]
    places = [options[key] for options in (scheduler.options, *same) for key in options.keys() & _PLACE]
    # `last_epoch=-1` is a new schedule
    told = [place for place in places if not is_constant(place, -1)]
    is_placed = not all(_counts_epochs(facts, scheduler, place) for place in told)
    # LambdaLR with a function of the restored epoch
    others = [given for number, given in scheduler.options.items() if number not in (0, *_PLACE)]
    if is_placed or any(map(reads_restored, others)):
        return True
    steps = [event for event in facts.select("step") if root(event.value) is scheduler]
    # one of several schedulers, of which the others get the epoch
    if scheduler.key == "ReduceLROnPlateau":
        return any(map(_gets_epoch, steps))
    # `scheduler.last_epoch = start_epoch - 1`
    sets = [event for event in facts.select("set_attribute") if event.text in _SET_PLACE]
    is_set = any(root(event.value) is scheduler for event in sets)
    return is_set or any(_steps_to_epoch(facts, event) for event in steps)


def _counts_epochs(facts: Facts, scheduler: Value, place: Value) -> bool:
    """Return whether the place of a schedule is a number of epochs, although each batch steps it."""
    steps = [event for event in facts.in_training("step") if root(event.value) is scheduler]
    starts = [split(loop.start or Value())[0] for loop in facts.loops]
    return split(place)[0] in starts and steps != [] and all(len(event.loops) > 1 for event in steps)


def _gets_epoch(event: Event) -> bool:
    """Return whether the name of an argument is that of an epoch: `scheduler.step(self.state["epoch"])`."""
    named = [keyword.value for keyword in getattr(event.node, "keywords", [])]
    return any(_EPOCH_NAME.search(unparse(value)) for value in [*getattr(event.node, "args", []), *named])


def _steps_to_epoch(facts: Facts, event: Event) -> bool:
    """Return whether a step of a scheduler does not depend on the steps before it."""
    # steps before the training bring the schedule to its place
    if not facts.is_in_training(event):
        ends = [root(loop.iterated or Value()).parts.get("end", Value()) for loop in event.loops]
        is_other = any(_counts_epochs(facts, root(event.value), end) for end in ends)
        return not is_other and (bool(event.loops) or event.order < facts.first_step)
    given = {dep for argument in event.args.values() for dep in list_deps(argument)}
    is_told = any(dep.kind in (*values.NUMBERS, "field", "checkpoint") for dep in given)
    # a warm-up that ends after the first epochs
    epoch = event.loops[0].value
    is_early = epoch is not None and any(epoch in list_deps(test.value) for test in event.conditions)
    return is_told or is_early or _gets_epoch(event)


def _is_off(facts: Facts, value: Value) -> bool:
    """Return whether a GradScaler keeps no scale; never of an average."""
    enabled = value.options.get("enabled")
    # `config.amp = False` is a default, which a user changes
    is_default = any(one.value is enabled and "." in one.name for one in facts.tracer.bound)
    return is_constant(enabled, False) and not is_default


KINDS = {
    "optimizer": Kind("R101", "optimizer", "stepped", _is_saved_with_another),
    "scheduler": Kind("R103", "scheduler", "stepped", _follows_epoch),
    "scaler": Kind("R104", "GradScaler", "used", _is_off),
    "ema": Kind("R105", "average", "updated", _is_off),
}


def get_kind(value: Value) -> str:
    """Return the kind of an object that the loop changes, as KINDS has it: a dict of averages is one, too."""
    return value.kind if value.kind in KINDS else "ema"


# In the checkpoint, but not loaded


def _find_not_loaded(facts: Facts) -> Iterator[Finding]:
    if facts.restores_all or not facts.loads or facts.trainers():
        return
    # a loop over objects that are not known loads a state, which may be that of any
    looped = [one for one in facts.select("load_state") if one.loops and one.order < facts.first_step]
    if any(kind_of(event.value) in ("unknown", "attribute") for event in looped):
        return
    load = facts.loads[-1]
    kinds = {value.kind for value in facts.loaded}
    way = load.describe_conditions() + " ".join(load.functions)
    # weights that no loop continues from may be those of an evaluation
    is_continued = any(values.is_restored(loop.start or Value()) for loop in facts.loops)
    is_restart = bool(kinds & {"optimizer", "scheduler"} or is_continued or _CONTINUES.search(way))
    seen: set[Value] = set()
    # another model than the one that is loaded, such as a discriminator
    trained = {module for module in facts.list_trained_modules() if "model" in kinds}
    for save in facts.saves:
        # a file after the training has it for the user
        entries = save.entries if save in facts.restart_saves else []
        held = [value for value in facts.changed if any(_is_of(entry, value) for entry in entries)]
        for value in dict.fromkeys([*save.owners(), *held]):
            # R105 names it, too
            if save not in facts.restart_saves and value in facts.averaged:
                continue
            # what the training does not change is the same at each start, and need not be loaded
            is_changed = value in facts.changed or value.kind == "generator" or value in trained
            if not is_changed or value in seen or _comes_back(facts, value):
                continue
            seen.add(value)
            name = describe(value, get_kind(value) if value in facts.changed else value.kind)
            where = name_line(save.event, load)
            message = f"{name} is in the checkpoint of {where}, but is not loaded with it"
            yield at(load, "R201", message, not is_restart, value=value, save=save.event, load=load)
        for entry in save.entries if facts.select("read") else ():
            number, where = entry.value, name_line(save.event, load)
            start = number.of if number.kind == "counter" and number.of is not None else number
            is_lost = start.kind == "const" and number is not start and not facts.is_own_state(start)
            if is_lost and entry.key and number not in seen and not facts.is_read(entry.key):
                seen.add(number)
                message = f"{entry.key} is in the checkpoint of {where}, but is not loaded with it"
                event = next(one for one in facts.events if one.args.get(0) is number)
                found = at(load, "R201", message, not is_restart, value=number, load=load)
                yield dataclasses.replace(found, evidence=found.evidence | {"event": event})


def _comes_back(facts: Facts, value: Value) -> bool:
    """Return whether an object gets its state, needs none, or whether the script reads its entry."""
    pairs = [(save, entry) for save in facts.saves for entry in save.entries if _is_of(entry, value)]
    entries = [entry for _, entry in pairs]
    # a file that has only this dict
    if any(
        not entry.owner and not entry.key and is_file_of(save, load)
        for save, entry in pairs
        for load in facts.loads
    ):
        return True
    names = [entry.name for entry in entries]
    created = [event for event in facts.select("create") if event.value is value and not event.conditions]
    made = max((event.order for event in created), default=0)
    name = (value.kind, value.label)
    loads = [event.order for other, event in facts.loaded.items() if (other.kind, other.label) == name]
    if value in facts.escaped or (value.kind == "scheduler" and _follows_epoch(facts, value)):
        return True
    # it is made again after the object of its name was loaded, or loaded from an entry that no file has
    if made > max(loads, default=made) or (value in facts.loaded and _is_misread(facts, value, names)):
        return False
    return bool(loads) or value in facts.loaded or any(facts.is_read(entry.key) for entry in entries)


def _is_of(entry: Entry, value: Value) -> bool:
    """Return whether an entry is the state of an object, or a dict of averages."""
    is_part = value.kind in ("dict", "list") and value in entry.value.deps
    return value in (entry.owner, root(entry.value)) or is_part


def _is_misread(facts: Facts, value: Value, names: list[str]) -> bool:
    """Return whether an object is loaded from an entry that no checkpoint has, or from that of another object
    although it has one of its own, which nothing reads."""
    given = given_state(facts.loaded[value])
    written = {part for save in facts.saves for entry in save.entries for part in entry.key.split(".")}
    is_open = any(save.is_open for save in facts.saves) or facts.saves_all
    is_named = given.kind == "field" and isinstance(given.key, str) and all(names)
    is_other = given.key not in names and not any(map(facts.is_read, names))
    return is_named and not is_open and (given.key not in written or is_other)


# Modules that are trained, such as a criterion with weights


def _find_modules(facts: Facts) -> Iterator[Finding]:
    save = facts.fullest_save
    if save is None or facts.saves_all:
        return
    optimizers = [value for value in facts.changed if value.kind == "optimizer"]
    # each module with the first optimizer that has it
    trained = {module: one for one in reversed(optimizers) for module in list_parameter_owners(one)}
    for module, optimizer in trained.items():
        if _is_lost(facts, save, module):
            name, trainer = describe(module, "a module"), describe(optimizer, "the optimizer")
            where = name_line(save.event, optimizer)
            message = f"{name} is trained by {trainer}, but not in the checkpoint that {where} saves"
            yield at(optimizer, "R109", message, value=module, save=save.event)


def _is_lost(facts: Facts, save: Save, module: Value) -> bool:
    """Return whether a checkpoint has other modules, but neither this one nor one that it is made of."""
    is_known = module.kind in ("model", "criterion") and "by_name" not in module.flags
    inner = [part for part in module.options.values() if kind_of(part) == "model"]
    is_saved = any(facts.is_saved(part, "model") for part in (module, *inner))
    # an attribute of another module is in the state of that one
    sets = [event for event in facts.select("set_attribute") if root(event.args[0]) is module]
    is_saved |= any(kind_of(event.value) not in ("instance", "args") for event in sets)
    # a script that saves no module at all has its weights elsewhere, in a way that is not followed
    has_others = any(owner.kind in ("model", "unknown") for owner in save.owners())
    return is_known and has_others and not is_saved and not facts.is_own_state(module)
