"""What a script saves, loads and changes: questions of the rules about the events of a trace."""

import ast
import re
from typing import Any, NamedTuple

from bootfile.lint import values
from bootfile.lint.record import Event
from bootfile.lint.syntax import unparse
from bootfile.lint.trace import Tracer
from bootfile.lint.values import Loop, Value, kind_of, list_deps, root

_SAVERS = (
    "torch.save",
    "torch_xla.core.xla_model.save",
    "pickle.dump",
    "joblib.dump",
    "dill.dump",
    "cloudpickle.dump",
)
_SAVE_NAME = re.compile(r"save|checkpoint|ckpt|snapshot|persist", re.IGNORECASE)
_LOAD_NAME = re.compile(r"load|resume|restore|checkpoint|ckpt|recover|continue", re.IGNORECASE)
# calls that write figures, tables and samples, not the state of a training
_OUTPUTS = re.compile(
    r"^(numpy|np|matplotlib|torchvision|wandb|PIL|cv2|imageio|scipy|soundfile|pandas)\.|^(savefig|save_image|savetxt)$"
)
_OF_DATA = re.compile(r"cache|label|dataset|annot|roidb", re.IGNORECASE)
_RESUME = re.compile(r"resum|restart|continue_(from|train)", re.IGNORECASE)
_WEIGHTS = re.compile(r"weights|pretrain|fine_?tun|lora|adapter", re.IGNORECASE)
_START = re.compile(r"resum|restart|start|begin|last|restor|offset|done|previous|pre_epoch", re.IGNORECASE)
_FIRST = re.compile(r"(start|begin|resume|initial|last)_?(epoch|step|iter)", re.IGNORECASE)
_RANK = re.compile(
    r"rank|save|logs|writer|master|\bmain|_main|main_|primary|chief|process|zero|gpu|is_root|device_id|_id\b|\bid\b",
    re.IGNORECASE,
)
_TRAINERS = re.compile(
    r"^(transformers\.(\w*Trainer)|trl\.\w+Trainer|(pytorch_)?lightning\.(pytorch\.)?Trainer|lightning\.Trainer"
    r"|fastai\.\S*Learner|ignite\.\S*Engine|mmcv\.\S*Runner|mmengine\.\S*Runner|catalyst\.\S*Runner"
    r"|detectron2\.\S*Trainer|accelerate\.Trainer|composer\.Trainer)$"
)
_HOLDS_ALL = re.compile(r"state|extra|other|misc|all|object|client|train|resume", re.IGNORECASE)
# a key of a checkpoint that may hold an object of a kind, if its value is not known
KEYS = {
    "optimizer": r"opt",
    "scheduler": r"sched|lr|opt",
    "scaler": r"scaler|amp|optim",
    "ema": r"ema|av(g|erage)|shadow|teacher|target",
    "generator": r"rng|gener|random|seed|sampler|loader",
    "model": r"model|net|state|weight|module|param",
    "counter": r"step|iter|epoch|count|batch|patience|progress|train|num|seen",
    "best": r"best|acc|loss|metric|score|map|psnr|min|max|val|fitness|perf",
}


class Entry(NamedTuple):
    """One thing in a checkpoint. key: its names from the outside, "model.state"."""

    key: str
    value: Value


class Save(NamedTuple):
    """A call that writes a checkpoint. is_open: it may have more than the entries."""

    event: Event
    entries: list[Entry]
    is_open: bool


class Facts:
    """The facts of a script. loop: the outermost loop that trains, None without one."""

    def __init__(self, tracer: Tracer):
        self.tracer = tracer
        self.events = tracer.events
        self._selected: dict[tuple[str, ...], list[Event]] = {}
        self._called: dict[str, list[Event]] = {}
        # in this order: each of these questions needs the answers before it
        self.loops = self._find_training_loops()
        self.saves = self._find_saves()
        self.loads = self._find_loads()
        self.loaded = self._find_loaded()
        self.is_accelerated = False
        self.is_missed = False
        self.restores_all = self._restores_all()
        self.escaped = self._find_escaped()
        self.owners = self._find_owners()
        self.intent = self._find_intent()
        self.is_sure = self._is_sure()
        self.texts = " ".join(sorted(tracer.externals))

    # Loops

    def _find_training_loops(self) -> list[Loop]:
        loops: list[Loop] = []
        stepped: set[Loop] = set()
        for event in self.events:
            is_step = event.name == "step" and kind_of(event.value) == "optimizer"
            # a training loop is the outermost one around a step of an optimizer or a backward pass
            if not event.loops or _reads_undefined(event) or not (is_step or event.name == "backward"):
                continue
            if is_step:
                stepped.add(event.loops[0])
            if event.loops[0] not in loops:
                loops.append(event.loops[0])
        # a loop that fills memory before the training has no step
        return [loop for loop in loops if loop in stepped] or loops

    def is_in_training(self, event: Event) -> bool:
        return bool(event.loops) and event.loops[0] in self.loops

    def is_own_state(self, value: Value) -> bool:
        """Return whether an object is made within the training loop, or is a part of another one."""
        return any(loop in self.loops for loop in value.loops)

    def first_step(self) -> int:
        """Return the place of the first training step in the order of events."""
        for event in self.events:
            if event.name in ("backward", "step") and self.is_in_training(event):
                return event.order
        return len(self.events)

    def select(self, *names: str) -> list[Event]:
        """Return the events with one of the names, in their order. Each question is answered once."""
        if names not in self._selected:
            self._selected[names] = [event for event in self.events if event.name in names]
        return self._selected[names]

    def calls(self, pattern: str) -> list[Event]:
        """Return the calls of other packages whose full name matches, and methods whose name does."""
        if pattern not in self._called:
            matches = re.compile(pattern).search
            is_called = {text: matches(text) is not None for text in self._texts()}
            self._called[pattern] = [
                event for event in self.select("call", "method") if is_called[event.text]
            ]
        return self._called[pattern]

    def _texts(self) -> set[str]:
        return {event.text for event in self.select("call", "method")}

    # Checkpoints

    def _find_saves(self) -> list[Save]:
        saves = []
        for event in self.events:
            if event.name == "call" and event.text in _SAVERS and 0 in event.args:
                saves.append(_read_save(event, event.args[0]))
            elif event.name == "call" and event.text in _SAVERS and "obj" in event.args:
                saves.append(_read_save(event, event.args["obj"]))
            elif event.name == "method" and event.text == "save" and len(event.args) >= 2:
                saves.append(self._read_method(event))
            elif event.name == "method" and event.text == "save_state" and event.value.key == "Accelerator":
                saves.append(Save(event, self._list_registered(), False))
        return [save for save in saves if not _is_of_data(save)]

    def _list_registered(self) -> list[Entry]:
        """Return what accelerator.save_state() writes."""
        entries = []
        for event in self.events:
            if event.name == "method" and event.text in ("prepare", "register_for_checkpointing"):
                entries.extend(Entry(value.label, value) for value in event.args.values())
        return entries

    def _read_method(self, event: Event) -> Save:
        """Read fabric.save(path, state) or accelerator.save(state, path)."""
        first = event.args.get(0, Value())
        second = event.args.get(1, Value())
        if root(second).kind == "dict":
            return _read_save(event, second)
        return _read_save(event, first)

    def training_saves(self) -> list[Save]:
        """Return the saves inside the training loop."""
        return [save for save in self.saves if self.is_in_training(save.event)]

    def is_saved(self, value: Value, kind: str) -> bool:
        """Return whether a checkpoint has an object, or may have it."""
        base = root(value)
        mine = self.list_saved_with(base)
        if mine & self.escaped or base.flags & {"prepared", "registered"}:
            return True
        # accelerate calls these before it saves: what they name is saved
        if base.label and re.search(rf"\b{re.escape(base.label)}\b", self._text_of_hooks()):
            return True
        # a file that is written after the last epoch is of no use to a restart
        for save in self.training_saves() or self.saves:
            if save.is_open:
                return True
            for entry in save.entries:
                # the object itself, or a value that was computed from it
                if mine & list_deps(entry.value) or root(entry.value) in mine:
                    return True
                # copy.deepcopy(average.model).half()
                is_copy = entry.value.kind == "copied" and entry.value.of is not None
                if is_copy and mine & list_deps(entry.value.of or Value()):
                    return True
                is_vague = kind_of(entry.value) in (
                    "unknown",
                    "attribute",
                    "option",
                    "module",
                    "list",
                    "dict",
                )
                # this is the state of a global generator, and not of another object
                if kind == "generator" and re.search(r"get_rng_state|get_?state", str(entry.value.key)):
                    is_vague = False
                if entry.value.kind == "state" and entry.value.of is not None:
                    is_vague = kind_of(entry.value.of) in ("unknown", "attribute", "none", "option")
                if is_vague and re.search(KEYS[kind], entry.key.rpartition(".")[2], re.IGNORECASE):
                    return True
        return self.saves_all()

    def list_saved_with(self, base: Value) -> set[Value]:
        """Return an object and those whose state has its state."""
        mine = {base}
        # an average is saved if the model in it is
        for part in base.parts.values():
            if kind_of(part) in ("copied", "ema", "dict"):
                mine.add(root(part))
        # a wrapper writes what it needs of the object in it
        for _ in range(3):
            for part in list(mine):
                mine |= self.owners.get(part, set())
        return mine

    def _text_of_hooks(self) -> str:
        """Return the text of the functions that accelerate calls before it saves."""
        texts = []
        for event in self.calls(r"^register_save_state_pre_hook$"):
            texts.extend(unparse(value.cls.node) for value in event.args.values() if value.kind == "function")
        return "\n".join(texts)

    def saves_all(self) -> bool:
        """Return whether the script saves by a function whose contents are not known."""
        for event in self.events:
            # a function such as save_checkpoint() that was too deep to enter
            if event.name == "missed" and _SAVE_NAME.search(event.text):
                return True
            if (
                (
                    event.name == "call"
                    and event.text not in _SAVERS
                    and _SAVE_NAME.search(event.text.rpartition(".")[2])
                )
                and event.value.kind == "module"
                and not event.text.startswith(("os.", "torch.utils", "logging"))
                and not _OUTPUTS.search(event.text)
            ):
                return True
            # what these save is followed
            if event.value.key in ("Accelerator", "Fabric"):
                continue
            # a method of an object that is not known, such as checkpointer.save()
            is_object = event.name == "method" and event.value.kind in (
                "unknown",
                "instance",
                "attribute",
                "module",
            )
            if is_object and re.match(r"save(_\w*(state|checkpoint|ckpt|model))?$", event.text):
                if event.text != "save" and not _is_followed(event):
                    return True
                is_saver = re.search("check|ckpt|saver|manager", event.value.label, re.IGNORECASE)
                is_unknown = event.value.kind in ("unknown", "attribute")
                if event.text == "save" and is_unknown and len(event.args) < 2 and is_saver:
                    return True
        return False

    def restart_loads(self) -> list[Event]:
        """Return the loads of the file that a restart continues from, and not those of pretrained weights."""
        sources: set[Value] = set()
        for value, event in self.loaded.items():
            if value.kind == "optimizer":
                # the file from which the optimizer is loaded is that of a restart
                for given in event.args.values():
                    sources |= list_deps(given)
        loads = [event for event in self.loads if root(event.value) in sources]
        return loads or self.loads[-1:]

    def fullest_save(self) -> Save | None:
        """Return the save with the most entries, those in the training loop first."""
        best: Save | None = None
        for save in self.training_saves() or self.saves:
            if best is None or len(save.entries) > len(best.entries):
                best = save
        return best

    # Restarts

    def _find_loads(self) -> list[Event]:
        first = self.first_step()
        return [event for event in self.events if event.name == "load" and event.order < first]

    def _find_loaded(self) -> dict[Value, Event]:
        """Return the objects whose state is loaded from a file before the training."""
        first = self.first_step()
        loaded: dict[Value, Event] = {}
        for event in self.select("load_state"):
            given = event.args.get(0) or event.args.get("state_dict") or Value()
            if event.order > first and self.is_in_training(event):
                continue
            # target.load_state_dict(model.state_dict()) does not continue a run
            if root(given).kind == "state" and not values.is_restored(given):
                continue
            loaded[root(event.value)] = event
        return loaded

    def _restores_all(self) -> bool:
        """Return whether a function restores objects that are not its arguments."""
        for event in self.events:
            if event.name == "missed" and _LOAD_NAME.search(event.text):
                self.is_missed = True
                return True
            # a method of an object whose class is not part of the project
            is_load = event.text in ("load_state", "load_checkpoint", "resume_or_load")
            if event.name == "method" and is_load and not _is_followed(event):
                self.is_accelerated = self.is_accelerated or event.value.key == "Accelerator"
                return True
        return False

    def _find_escaped(self) -> set[Value]:
        """Return the objects that are given to functions that may save or load them."""
        escaped: set[Value] = set()
        for event in self.events:
            last = event.text.rpartition(".")[2]
            is_unknown = (
                event.name in ("call", "missed") and event.text not in _SAVERS and event.text != "torch.load"
            )
            # DataLoader has "load" in its name, and loads no checkpoint
            if last.endswith(("Loader", "loader", "Sampler")):
                continue
            if is_unknown and (_SAVE_NAME.search(last) or _LOAD_NAME.search(last)):
                for value in event.args.values():
                    escaped.update(list_inside(value))
            is_method = event.name == "method" and not _is_followed(event)
            if is_method and re.search(r"register|save_checkpoint|load_checkpoint|Checkpoint", event.text):
                for value in event.args.values():
                    escaped.update(list_inside(value))
            if (
                event.name == "call"
                and re.search("Checkpoint", last)
                and event.text != "torch.utils.checkpoint"
            ):
                for value in event.args.values():
                    escaped.update(list_inside(value))
        return escaped

    def _find_owners(self) -> dict[Value, set[Value]]:
        """Return the objects of the project whose own state_dict() reads another object, by that one."""
        owners: dict[Value, set[Value]] = {}
        for event in self.select("set_attribute"):
            owner = root(event.value)
            cls = getattr(owner.cls, "node", None)
            if not isinstance(cls, ast.ClassDef):
                continue
            for part in cls.body:
                if getattr(part, "name", "") != "state_dict" or 0 not in event.args:
                    continue
                text = unparse(part)
                is_read = re.search(rf"\.{event.text}\b|__dict__", text) is not None
                # `for name in ("model", "optimizer"): getattr(self, name).state_dict()`
                is_named = "getattr(self" in text and re.search(rf"['\"]{event.text}['\"]", unparse(cls))
                if is_read or is_named:
                    owners.setdefault(root(event.args[0]), set()).add(owner)
        return owners

    def _find_intent(self) -> str:
        """Return how the script shows that it continues a training; "" if it does not.

        "optimizer": it loads the state of an optimizer. "counter": it continues from an epoch or a step.
        "option": an option with a name such as --resume leads to the load.
        """
        # the surest sign first: weights alone may be those of another task
        for value in self.loaded:
            if value.kind == "optimizer":
                return "optimizer"
        if self.restores_all and not self.is_missed:
            return "optimizer"
        for loop in self.loops:
            if loop.start is not None and values.is_restored(loop.start):
                return "counter"
        for event in self.select("read"):
            key = str(event.value.key or "")
            if (
                re.search(r"^(start_)?(epoch|step|iter|global_step|iteration|iter_num|n_iter)s?$", key)
                and self.loads
            ) and (event.order < self.first_step() and self._is_kept(event)):
                return "counter"
        if self.loads and self._begins_later():
            return "counter"
        for event in self.loads:
            if any(_RESUME.search(condition.text) for condition in event.conditions):
                return "option"
            if any(_RESUME.search(function) for function in event.functions):
                return "option"
        return ""

    def _is_kept(self, event: Event) -> bool:
        """Return whether a statement keeps what it reads, and does not only print it."""
        sources = [self.tracer.source, *[module.source for module in self.tracer.imported.values()]]
        for source in sources:
            if source.path != event.path:
                continue
            for node in ast.walk(source.tree):
                if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
                    continue
                is_around = node.lineno <= event.line <= (node.end_lineno or node.lineno)
                if is_around and re.search("print|log|info|write", unparse(node.value.func)):
                    return False
        return True

    def _begins_later(self) -> bool:
        """Return whether the number of the first epoch or step is an option such as --start_epoch, or is read
        from the name of a file."""
        numbers = [loop.start for loop in self.loops]
        numbers.extend(counter.of for counter in self.tracer.counters)
        for number in numbers:
            if number is None:
                continue
            for part in [number, *number.deps]:
                is_given = part.kind in ("option", "attribute", "unknown", "shifted")
                if is_given and _FIRST.search(part.label):
                    return True
        return False

    def _is_sure(self) -> bool:
        """Return whether the script continues a training, and does not only begin with the weights of
        another one: it loads an optimizer or a counter, or its loop does not begin with the first epoch."""
        if self.intent == "counter" or (self.intent == "optimizer" and not self._loads_weights()):
            return True
        for loop in self.loops:
            # `for epoch in range(start_epoch, ...)`: the script knows a start that is not the first epoch
            is_first = loop.start is None or loop.start.kind in ("const", "none")
            if loop.value is not None and not is_first:
                return True
        for counter in self.tracer.counters:
            first = counter.of
            # a counter of steps that begins with an attribute or an option, not with a constant
            is_read = first is not None and first.kind in ("attribute", "field", "unknown", "shifted")
            if is_read and re.search("epoch|step|iter", counter.label, re.IGNORECASE):
                return True
        for event in self.select("test"):
            # `if step < start_step: continue`
            skips = any(isinstance(part, ast.Continue) for part in getattr(event.node, "body", []))
            if self.is_in_training(event) and skips and _START.search(event.text):
                return True
        return False

    def _loads_weights(self) -> bool:
        """Return whether all that leads to the load of the optimizer names weights, and no restart."""
        for value, event in self.loaded.items():
            if value.kind != "optimizer":
                continue
            # the conditions, functions and options on the way to the load: --pretrained is not a restart
            names = " ".join([event.describe_conditions(), *event.functions])
            for dep in list_deps(event.args.get(0, Value())):
                for given in dep.options.values():
                    names += " " + " ".join(part.label for part in list_deps(given))
            if not _WEIGHTS.search(names) or _RESUME.search(names):
                return False
        return bool(self.loaded)

    # Others

    def is_distributed(self) -> bool:
        for event in self.events:
            if event.name == "call" and event.text.endswith(
                (".init_process_group", "DistributedDataParallel")
            ):
                return True
        return False

    def uses(self, pattern: str) -> bool:
        """Return whether the script or a module of it imports a package."""
        return re.search(pattern, self.texts) is not None

    def trainers(self) -> list[Event]:
        """Return where a trainer of another package is made, which saves and restores by itself."""
        trainers = []
        is_trainer = {text: _TRAINERS.search(text) is not None for text in self._texts()}
        for event in self.select("call", "create"):
            if event.name == "call" and is_trainer[event.text]:
                trainers.append(event)
            if (
                event.name == "create"
                and event.value.cls is not None
                and not isinstance(event.value.cls, str)
            ):
                # a class of the project that inherits a trainer
                trainers.extend(
                    event
                    for base in event.value.cls.node.bases
                    if re.search(r"(^|\.)(Trainer|LightningModule|Seq2SeqTrainer|SFTTrainer)$", unparse(base))
                    and event.value.kind != "model"
                )
        return trainers


def _reads_undefined(event: Event) -> bool:
    """Return whether a loop reads a name that the script does not define: its training does not run."""
    for loop in event.loops:
        if loop.iterated is not None:
            iterated = [loop.iterated, *loop.iterated.deps]
            if any("undefined" in value.flags for value in iterated):
                return True
    return False


def is_guarded(event: Event) -> bool:
    """Return whether only some ranks reach a place."""
    return any(_RANK.search(condition.text) for condition in event.conditions)


def _is_of_data(save: Save) -> bool:
    """Return whether a save writes what a data set has read, such as its labels."""
    # a data set that keeps what it has computed for a sample
    if "__getitem__" in save.event.functions:
        return True
    return save.is_open and any(_OF_DATA.search(function) for function in save.event.functions)


def _is_followed(event: Event) -> bool:
    """Return whether a method is one of the project, which the trace has entered."""
    cls = root(event.value).cls
    return cls is not None and hasattr(cls, "node")


def _read_save(event: Event, value: Value) -> Save:
    entries: list[Entry] = []
    is_open = _flatten(value, "", entries, 0)
    return Save(event, entries, is_open)


def _flatten(value: Value, key: str, entries: list[Entry], depth: int) -> bool:
    """Append the entries of what is saved. Return whether there may be others."""
    base = root(value)
    if depth > 5 or len(entries) > 300:
        return True
    if base.kind in ("dict", "list"):
        # `state[name] = ...` with a name that is not known: something of it may be any object
        if base.is_open:
            entries.append(Entry(key, Value("unknown", deps=base.deps)))
        is_open = base.is_open and not _is_state_like(base)
        for name, part in base.parts.items():
            inner = f"{key}.{name}" if key else str(name)
            is_inner_open = _flatten(part, inner, entries, depth + 1)
            # what is open under a name such as "progress" has no other object in it
            is_open = is_open or (is_inner_open and _HOLDS_ALL.search(str(name)) is not None)
        return is_open
    if base.kind == "instance" and base.parts:
        for name, part in base.parts.items():
            entries.append(Entry(f"{key}.{name}", part))
        return not key
    entries.append(Entry(key, value))
    is_state = base.kind in ("state", "model", "optimizer", "ema", "scheduler", "checkpoint", "field")
    return not key and not is_state and not _is_state_like(base)


def _is_state_like(value: Value) -> bool:
    """Return whether an open value holds only the state of known objects, as {k: v.cpu() for k, v in ...}."""
    if "comprehension" not in value.flags and value.kind == "dict":
        return False
    for dep in list_deps(value):
        # the states of what a loop finds in an object are those of all that it has
        if dep.kind == "state" and dep.of is not None and kind_of(dep.of) not in ("unknown", "attribute"):
            return True
        if dep.kind == "attribute" and dep.label in ("parameters", "named_parameters"):
            return True
    return False


def list_inside(value: Value, depth: int = 0) -> set[Value]:
    """Return an object, and those in its entries or attributes."""
    base = root(value)
    inside = {base}
    if base.kind == "state" and base.of is not None:
        inside.add(root(base.of))
    if depth < 3:
        for part in base.parts.values():
            inside |= list_inside(part, depth + 1)
    return inside


def reads_restored(value: Value) -> bool:
    """Return whether a value comes from a checkpoint, or is a function that reads such a value."""
    if values.is_restored(value):
        return True
    # a function within a function, as the lambda of a LambdaLR, may read a restored epoch
    names = getattr(value.cls, "names", None)
    if value.kind != "function" or not names:
        return False
    for part in ast.walk(value.cls.node):
        if isinstance(part, ast.Name) and part.id in names and values.is_restored(names[part.id]):
            return True
    return False


def describe(value: Value, kind: str = "") -> str:
    """Return the name of an object for a message."""
    name = root(value).label or value.label
    return name or kind


def option(value: Value, name: Any) -> Value | None:
    """Return an argument of the call that made an object."""
    return root(value).options.get(name)


def is_constant(value: Value | None, constant: Any) -> bool:
    return value is not None and value.kind in ("const", "none") and value.key is constant
