"""Rules about the batches of an epoch: does a restart from within it read the others, and only those?"""

import ast
from collections.abc import Iterator
from typing import Any

from bootfile.lint import values
from bootfile.lint.carried import conditions_within, is_result
from bootfile.lint.facts import Facts, of_a_restart
from bootfile.lint.record import Event
from bootfile.lint.rules_files import is_checkpoint, varies
from bootfile.lint.table import Finding, at
from bootfile.lint.values import Value, kind_of, list_deps, root
from bootfile.lint.walk import describe, is_constant, split

_ORDERS = ast.Lt | ast.Gt | ast.LtE | ast.GtE
_CHOSEN = ("option", "args", "loop")
_SETS_ORDER = r"manual_seed|seed_everything|set_seed|set_rng_state|set_epoch|random\.seed"


def check(facts: Facts) -> Iterator[Finding]:
    """Yield the findings about the batches that a restart reads or skips."""
    yield from of_a_restart(_find_within(facts), facts)
    yield from of_a_restart(_find_skips(facts), facts)


# R303: a checkpoint within an epoch


def _find_within(facts: Facts) -> Iterator[Finding]:
    """Find a checkpoint between two batches, with which a restart begins an epoch at its first batch."""
    skips: list[Any] = [*_list_skips(facts)]
    skips += facts.calls(r"islice$|skip|fast_forward|advance|state_dict_loader")
    skips += [event for event in facts.in_training("test") if _skips_by_number(facts, event)]
    loaded = {value.kind for value in facts.loaded} & {"loader", "sampler", "dataset"}
    if facts.restores_all or skips or loaded or facts.imports(r"(^| )(torchdata|bootfile)\b"):
        return
    for save in facts.training_saves:
        event = save.event
        steps = [step for step in facts.in_training("step", "backward") if step.loops[:2] == event.loops[:2]]
        # the last batch of an epoch is its end
        is_last = any("len(" in test.text or "last" in test.text for test in event.conditions)
        is_between = bool(steps) and not is_last and _is_in_data_loop(facts, event)
        # the file that is loaded has one name, and this one has others
        is_other = varies(facts, save) and not _chooses_file(facts)
        # the file of the best result is not that of a restart
        if not is_between or is_other or _is_of_best(facts, event) or not is_checkpoint(save):
            continue
        start, added = split(event.loops[0].start or Value())
        begins = "an epoch with its first batch"
        if start is not None and start.kind == "field" and added == 1:
            begins = "with the next one: the rest is left out"
        message = f"a restart from a checkpoint within an epoch begins {begins}"
        yield at(event, "R303", message, save=event)
        return


def _skips_by_number(facts: Facts, event: Event) -> bool:
    """Return whether a test skips a batch by a counter: `if waiting > 0: waiting -= 1; continue`."""
    if not isinstance(getattr(event.node, "body", [None])[-1], ast.Continue):
        return False
    deps = facts.list_deps(event.value)
    is_counted = any(dep.kind in ("counter", "field") or "restored" in dep.flags for dep in deps)
    return is_counted and not any(dep.kind == "modulo" for dep in deps)


def _is_in_data_loop(facts: Facts, event: Event) -> bool:
    """Return whether the second loop around an event reads data."""
    iterated = event.loops[1].iterated if len(event.loops) > 1 else None
    read = facts.list_deps(iterated) if iterated is not None else set()
    return any(kind_of(value) in ("loader", "dataset") for value in read)


def _chooses_file(facts: Facts) -> bool:
    """Return whether a restart loads a file of any name: one of an option, or of a list of files."""
    for load in facts.restart_loads():
        deps = facts.list_deps(load.args.get(0, Value()))
        if any(dep.kind in _CHOSEN or "listing" in dep.flags for dep in deps):
            return True
    return False


def _is_of_best(facts: Facts, event: Event) -> bool:
    """Return whether a test in the loop compares a result before an event."""
    for test in conditions_within(event):
        for compared in facts.list_deps(test.value):
            is_ordered = compared.kind == "compared" and isinstance(compared.node.ops[0], _ORDERS)
            if is_ordered and is_result(facts, compared):
                return True
    return False


# R305: batches that are skipped in an order that is not the one before the restart


def _find_skips(facts: Facts) -> Iterator[Finding]:
    orders = facts.calls(_SETS_ORDER)
    is_kept = any(facts.is_in_training(event) or event.text.endswith("set_rng_state") for event in orders)
    # accelerate restores the order of the first epoch, unless set_epoch() tells it the number
    is_kept = is_kept or (facts.restores_all and not facts.is_accelerated)
    for event, loader in _list_skips(facts) if not is_kept else ():
        options = root(loader).options
        # torch draws a new order at the restart: the skipped batches are other ones
        if is_constant(options.get("shuffle"), True) and "generator" not in options:
            message = "batches are skipped in an order that is not the one before the restart: "
            message += f"{describe(loader)} shuffles"
            yield at(event, "R305", message, value=loader)


def _list_skips(facts: Facts) -> Iterator[tuple[Event, Value]]:
    """Yield where batches are skipped by a number of the checkpoint, and the loader."""
    for event in facts.in_training("test"):
        # `if number < start: continue`
        inner = event.loops[-1]
        is_skip = isinstance(event.node, ast.If) and isinstance(event.node.body[-1], ast.Continue)
        is_of_loop = inner.value is not None and inner.value in list_deps(event.value)
        if is_skip and is_of_loop and inner.iterated is not None and values.is_restored(event.value):
            read = [inner.iterated, *list_deps(inner.iterated)]
            loader = next((value for value in read if kind_of(value) == "loader"), None)
            if loader is not None:
                yield event, loader
    # `for batch in islice(loader, start, None)`, accelerate's skip_first_batches(loader, start)
    for event in facts.calls(r"itertools\.islice$|skip_first_batches$"):
        loader, start = event.args.get(0, Value()), event.args.get(1, Value())
        is_restored = facts.is_in_training(event) and values.is_restored(start)
        if is_restored and kind_of(loader) == "loader":
            yield event, loader
