"""The flow of a restart: what the loop changes, what the files have, what is read back, and whether the
script is meant to continue a training."""

import ast
import re
from collections.abc import Iterable, Iterator

from bootfile.lint import values
from bootfile.lint.checkpoints import LOAD_NAME, Checkpoints
from bootfile.lint.methods import IN_PLACE
from bootfile.lint.record import Event
from bootfile.lint.sources import unparse
from bootfile.lint.table import Finding
from bootfile.lint.trace import Tracer
from bootfile.lint.values import Value, list_deps, root
from bootfile.lint.walk import find_holder, given_state, is_followed, list_parameter_owners, split

_RESUME = re.compile(r"resum|restart|continue_(from|train)", re.IGNORECASE)
_WEIGHTS = re.compile(r"weights|pretrain|fine_?tun|lora|adapter", re.IGNORECASE)
_START = re.compile(r"resum|restart|start|begin|last|restor|offset|done|previous|pre_epoch", re.IGNORECASE)
_FIRST = re.compile(r"(start|begin|resume|initial|last)_?(epoch|step|iter)", re.IGNORECASE)
_COUNTER = re.compile(r"^(start_)?(epoch|step|iter|global_step|iteration|iter_num|n_iter)s?$")
_COUNTS = re.compile("epoch|step|iter", re.IGNORECASE)
_SHOWS = re.compile("print|log|info|write")
_UPDATES = ("update", "update_parameters", "step", "update_fn", "ema_update")
_AVERAGE_NAME = re.compile(r"ema|av(g|erage)|teacher|shadow|momentum|_k$|slow", re.IGNORECASE)
_READS_WEIGHTS = ("parameters", "named_parameters", "state_dict", "buffers")
_TRAINERS = (
    r"^(transformers\.(\w*Trainer)|trl\.\w+Trainer|(pytorch_)?lightning\.(pytorch\.)?Trainer|lightning\.Trainer"
    r"|fastai\.\S*Learner|ignite\.\S*Engine|mmcv\.\S*Runner|mmengine\.\S*Runner|catalyst\.\S*Runner"
    r"|detectron2\.\S*Trainer|accelerate\.Trainer|composer\.Trainer)$"
)
_TRAINER_BASES = re.compile(r"(^|\.)(Trainer|LightningModule|Seq2SeqTrainer|SFTTrainer)$")


class Facts(Checkpoints):
    """The facts that the rules ask for.

    changed: the objects whose state the training loop changes, with the first event that changes each.
    averaged: the weights beside the model that it changes tensor by tensor, also those within an object.
    saves: the checkpoints. loads: the loads of files before the training. loaded: the objects that get their
    state from a file before it. restores_all: a function that is not known restores objects. intent: how the
    script shows that it continues a training, "" if it does not. is_continued: it trains,
    saves and continues. is_sure: it does not only begin a new training with the weights of another.
    """

    def __init__(self, tracer: Tracer):
        super().__init__(tracer)
        # in this order: each of these questions needs the answers before it
        self.averaged: set[Value] = set()
        self.changed = self._find_changed()
        self.loads = [event for event in self.select("load") if event.order < self.first_step]
        self.loaded = self._find_loaded()
        restores = [event for event in self.select("missed", "method") if _restores(event)]
        self.restores_all = bool(restores)
        # what follows a load by accelerate is known; a function that was too deep may have been no load
        self.is_accelerated = any(event.value.key == "Accelerator" for event in restores[:1])
        self._is_missed = any(event.name == "missed" for event in restores[:1])
        self.intent = self._find_intent()
        self.is_continued = bool(self.loops and self.saves and self.intent)
        self.is_sure = self._is_sure()

    def _find_changed(self) -> dict[Value, Event]:
        changed: dict[Value, Event] = {}
        copies: dict[Value, Event] = {}
        for event in self.in_training("step", "method", "call"):
            base = root(event.value)
            is_step = event.name == "step"
            is_update = base.kind == "ema" and not is_step and event.text in _UPDATES
            if is_update or (is_step and base.kind in ("optimizer", "scheduler", "scaler")):
                changed.setdefault(base, event)
            # a copy of the model may be a frozen teacher: its name has to say that it is an average
            is_read = not is_step and event.text in _READS_WEIGHTS
            for value in map(root, [event.value, *event.args.values()] if is_read else ()):
                if value.kind == "copied" and _AVERAGE_NAME.search(value.label):
                    copies.setdefault(value, event)
        optimizers = [value for value in changed if value.kind == "optimizer"]
        trained = {module for one in optimizers for module in list_parameter_owners(one)}
        inside = {part for value in changed for part in value.parts.values()}
        events = self.in_training("method", "set_item", "set_attribute", "load_state")
        holders = {event: find_holder(event.value) for event in events}
        # sums that begin again in the loop
        emptied = {holder for event, holder in holders.items() if event.text in ("zero_", "fill_", "clear")}
        for event, holder in holders.items():
            is_known = holder.kind in ("dict", "list", "copied", "model")
            is_beside = is_known and holder not in trained | emptied
            if is_beside and self._averages(event, holder, trained):
                self.averaged.add(holder)
                copies.update({} if holder in inside else {holder: copies.get(holder, event)})
        return {**changed, **copies}

    def _averages(self, event: Event, holder: Value, trained: set[Value]) -> bool:
        """Return whether an event adds the weights of a model to those in `holder`, which keep what they were
        before: `average[name].mul_(0.9).add_(weight)`; or copies them at some steps, as to a target."""
        is_set = event.name in ("set_item", "set_attribute")  # the old value is one of its arguments
        values_given = [event.args[0]] if is_set else event.args.values()
        given = {dep for value in values_given for dep in self.list_deps(value)}
        kinds = ("state", "attribute", "group")
        owners = {root(one.of) for one in given if one.kind in kinds and one.of is not None}
        is_sum = event.text in IN_PLACE and event.text != "copy_"
        is_mean = holder in given and (event.name == "set_item" or event.text in ("copy_", "data"))
        tests = [test for test in event.conditions[event.loops[0].depth :] if isinstance(test.node, ast.If)]
        is_rare = any(one.kind == "modulo" for test in tests for one in self.list_deps(test.value))
        is_copy = event.name == "load_state" or event.text == "copy_"
        is_copy &= holder.kind in ("model", "copied") and is_rare
        return (is_sum or is_mean or is_copy) and bool(trained & owners)

    def _find_loaded(self) -> dict[Value, Event]:
        loaded: dict[Value, Event] = {}
        for event in self.select("load_state"):
            given = given_state(event)
            # target.load_state_dict(model.state_dict()) does not continue a run
            is_copy = root(given).kind == "state" and not values.is_restored(given)
            if not is_copy and not self._is_later(event):
                loaded[root(event.value)] = event
        return loaded

    def _is_later(self, event: Event) -> bool:
        """Return whether an event is in the training, or after all of it in a script that is started: nothing
        calls the functions of another one, and the training may come before what loads."""
        if self.is_in_training(event):
            return event.order > self.first_step
        steps = self.in_training("backward", "step")
        return self.tracer.is_script and steps != [] and event.order > steps[-1].order

    def list_trained_modules(self) -> list[Value]:
        """Return the modules whose parameters the optimizers of the training loop change."""
        optimizers = [value for value in self.changed if value.kind == "optimizer"]
        return [module for value in optimizers for module in list_parameter_owners(value)]

    def restart_loads(self) -> list[Event]:
        """Return the loads of the file that a restart continues from, and not those of pretrained weights."""
        # the file from which the optimizer is loaded is that of a restart
        loads = [event for value, event in self.loaded.items() if value.kind == "optimizer"]
        sources = {dep for load in loads for value in load.args.values() for dep in list_deps(value)}
        return [event for event in self.loads if root(event.value) in sources] or self.loads[-1:]

    def is_read(self, key: str) -> bool:
        """Return whether the script reads an entry of a checkpoint, such as "model.state", for whatever use;
        `checkpoint[name]` with a name that is not known may read any entry."""
        wanted = key.split(".")
        reads = [event.value for event in self.select("read") if not self._is_later(event)]
        for keys in map(_list_keys, reads):
            pairs = zip(keys, wanted[-len(keys) :], strict=False)
            if len(keys) <= len(wanted) and all(one in (None, other) for one, other in pairs):
                return True
        return False

    # Does the script continue a training?

    def _find_intent(self) -> str:
        """Return "optimizer" if the script loads the state of one, "counter" if it continues from an epoch or
        a step, "option" if an option such as --resume leads to the load."""
        # the surest sign first: weights alone may be those of another task
        is_loaded = any(value.kind == "optimizer" for value in self.loaded)
        if is_loaded or (self.restores_all and not self._is_missed):
            return "optimizer"
        starts = [loop.start for loop in self.loops if loop.start is not None]
        reads = [event for event in self.select("read") if event.order < self.first_step]
        counters = [event for event in reads if _COUNTER.search(str(event.value.key or ""))]
        is_counter = any(map(self._is_kept, counters))
        is_later = is_counter or self._begins_later()
        if any(map(values.is_restored, starts)) or (bool(self.loads) and is_later):
            return "counter"
        ways = [[*event.functions, *[test.text for test in event.conditions]] for event in self.loads]
        return "option" if any(_RESUME.search(name) for way in ways for name in way) else ""

    def _is_kept(self, event: Event) -> bool:
        """Return whether a statement keeps what it reads, and does not only print it."""
        nodes = [node for node in self.nodes(event.path, ast.Expr) if isinstance(node.value, ast.Call)]
        around = [node for node in nodes if node.lineno <= event.line <= node.end_lineno]
        return not any(_SHOWS.search(unparse(node.value.func)) for node in around)

    def _begins_later(self) -> bool:
        """Return whether an option, or the name of a file, gives the number of the first epoch or step."""
        starts = [loop.start for loop in self.loops if loop.start is not None and loop.value is not None]
        counted = [counter.of for counter in self.tracer.counters if counter.of is not None]
        parts = [part for number in counted for part in (number, *number.deps)]
        given = [part for part in parts if part.kind in ("option", "attribute", "unknown", "shifted")]
        is_given = any(split(start)[0].kind not in ("const", "none") for start in starts)
        return is_given or any(_FIRST.search(part.label) for part in given)

    def _is_sure(self) -> bool:
        """Return whether the script loads an optimizer or a counter, or whether its loop does not begin with
        the first epoch."""
        if self.intent == "counter" or (self.intent == "optimizer" and not self._loads_weights()):
            return True
        # `for epoch in range(start_epoch, ...)`: the script knows a start that is not the first epoch
        if self._begins_later():
            return True
        # a counter of steps that begins with an attribute or an option, not with a constant
        counters = [counter for counter in self.tracer.counters if _COUNTS.search(counter.label)]
        kinds = {counter.of.kind for counter in counters if counter.of is not None}
        if kinds & {"attribute", "field", "unknown", "shifted"}:
            return True
        # `if step < start_step: continue`
        tests = [event for event in self.in_training("test") if _START.search(event.text)]
        return any(isinstance(part, ast.Continue) for event in tests for part in event.node.body)

    def _loads_weights(self) -> bool:
        """Return whether all that leads to the load of the optimizer names weights, and no restart."""
        for event in [event for value, event in self.loaded.items() if value.kind == "optimizer"]:
            # the conditions, functions and options on the way to the load: --pretrained is not a restart
            options = [option for load in list_deps(given_state(event)) for option in load.options.values()]
            labels = [dep.label for option in options for dep in list_deps(option)]
            names = " ".join([event.describe_conditions(), *event.functions, *labels])
            if _RESUME.search(names) or not _WEIGHTS.search(names):
                return False
        return bool(self.loaded)

    def trainers(self) -> list[Event]:
        """Return where a trainer of another package is made, which saves and restores by itself."""
        made = [event for event in self.calls(_TRAINERS) if event.name == "call"]
        for event in [event for event in self.select("create") if event.value.kind != "model"]:
            bases = getattr(getattr(event.value.cls, "node", None), "bases", [])
            made += [event] if any(_TRAINER_BASES.search(unparse(base)) for base in bases) else []
        return sorted(made, key=lambda event: event.order)


def _restores(event: Event) -> bool:
    """Return whether an event may restore objects that are not its arguments."""
    if event.name == "missed":
        return LOAD_NAME.search(event.text) is not None
    # a method of an object whose class is not part of the project
    return event.text in ("load_state", "load_checkpoint", "resume_or_load") and not is_followed(event)


def _list_keys(field: Value) -> list[str | None]:
    """Return the keys of an entry, from the outside: "model", "state" of `checkpoint["model"]["state"]`."""
    keys: list[str | None] = []
    while field.kind == "field" and field.of is not None:
        keys.insert(0, None if field.key is None else str(field.key))
        field = root(field.of)
    return keys


def of_a_restart(findings: Iterable[Finding], facts: Facts) -> Iterator[Finding]:
    """Yield the findings about restarts if the script trains, saves and continues. They are hints if it may
    only begin a new training with weights."""
    for finding in findings if facts.is_continued else ():
        yield finding if facts.is_sure else finding.as_hint()


def reads_restored(value: Value) -> bool:
    """Return whether a value comes from a checkpoint, or is a function that reads such a value."""
    # a function within a function, as the lambda of a LambdaLR, may read a restored epoch
    names = (getattr(value.cls, "names", None) or {}) if value.kind == "function" else {}
    nodes = [*ast.walk(value.cls.node)] if names else []
    own = {part.arg for part in nodes if isinstance(part, ast.arg)}
    read = {part.id for part in nodes if isinstance(part, ast.Name)} - own
    return values.is_restored(value) or any(values.is_restored(names[name]) for name in read & names.keys())
