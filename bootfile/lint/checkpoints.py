"""What a script writes into its checkpoints, and what it may write there in a way that is not followed."""

import ast
import re
from functools import cached_property
from typing import NamedTuple

from bootfile.lint.record import Event
from bootfile.lint.sources import unparse
from bootfile.lint.trace import Tracer
from bootfile.lint.values import Value, kind_of, list_deps, root
from bootfile.lint.walk import Walk, is_followed

_SAVERS = (
    "torch.save", "torch_xla.core.xla_model.save", "pickle.dump", "joblib.dump", "dill.dump",
    "cloudpickle.dump",
)  # fmt: skip
_SAVES_WHOLE = re.compile(r"(safe|atomic)_(torch_)?save$")
_SAVE_NAME = re.compile(r"save|checkpoint|ckpt|snapshot|persist", re.IGNORECASE)
LOAD_NAME = re.compile(r"load|resume|restore|checkpoint|ckpt|recover|continue", re.IGNORECASE)
# calls that write weights only
_WRITES_WEIGHTS = re.compile(
    r"(^|\.)(save_pretrained|save_(model|weights|file|lora\w*)|push_to_hub|log_model|jit\.save|onnx\.export)$"
)
_MAY_WRITE = re.compile(rf"{_SAVE_NAME.pattern}|dump|export|to_disk|store|report|register_for", re.IGNORECASE)
_SAVE_METHOD = re.compile(r"save(_\w*(state|checkpoint|ckpt|model))?$")
_SAVER_NAME = re.compile("check|ckpt|saver|manager", re.IGNORECASE)
_GIVES_AWAY = re.compile(r"register|save_checkpoint|load_checkpoint|Checkpoint")
# calls that write figures, tables and samples, not the state of a training
_OUTPUTS = re.compile(
    r"^(os\.|torch\.(utils|jit|onnx)|logging)|^(savefig|save_image|savetxt)$"
    r"|^(numpy|np|matplotlib|torchvision|wandb|PIL|cv2|imageio|scipy|soundfile|pandas|json|yaml)\."
    r"|ima?ge?s?\b|(image|fig|figure|plot|picture|video|audio|wav|text|json|csv|log|pred\w*|result|sample|mesh)s?$"
    r"|Dataset$"
)
_REMOVES = r"^os\.(remove|unlink)$"
_OF_DATA = re.compile(r"cache|label|dataset|annot|roidb", re.IGNORECASE)
_HOLDS_ALL = re.compile(r"state|extra|other|misc|all|object|client|train|resume", re.IGNORECASE)
_RANDOM_STATE = re.compile(r"get_rng_state|get_?state")
# a key of a checkpoint that may hold an object of a kind, if its value is not known
KEYS = {
    "optimizer": r"opt",
    "scheduler": r"sched|lr|opt",
    "scaler": r"scaler|amp|optim",
    "ema": r"ema|av(g|erage)|shadow|teacher|target",
    "generator": r"rng|gener|random|seed|sampler|loader",
    "model": r"model|net|state|weight|module|param",
}
_REGISTERS = ("prepare", "register_for_checkpointing")
_AVERAGED = ("copied", "ema", "dict")
_UNKNOWN = ("unknown", "attribute", "option", "module", "list", "dict")
_UNKNOWN_OWNERS = ("unknown", "attribute", "none", "option")
_SAVER_KINDS = ("unknown", "instance", "attribute", "module")
_STATES = ("state", "model", "optimizer", "ema", "scheduler", "checkpoint", "field")


class Entry(NamedTuple):
    """One thing in a checkpoint. key: its names from the outside, "model.state"."""

    key: str
    value: Value

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]

    @property
    def owner(self) -> Value | None:
        """The object whose state it is; None for another value."""
        state = root(self.value)
        return root(state.of) if state.kind == "state" and state.of is not None else None


class Save(NamedTuple):
    """A call that writes a checkpoint. is_open: it may have more than the entries."""

    event: Event
    entries: list[Entry]
    is_open: bool

    def owners(self) -> list[Value]:
        """Return the objects whose states the checkpoint has."""
        return [entry.owner for entry in self.entries if entry.owner is not None]


class Checkpoints(Walk):
    """The files that a script writes. escaped: objects that an unknown function may save or load. kept_by:
    objects of the project whose own state_dict() reads another object, by that one."""

    def __init__(self, tracer: Tracer):
        super().__init__(tracer)
        found = [self._read(event) for event in self.select("call", "method", "missed")]
        self.saves: list[Save] = [save for save in found if save is not None and not self._is_of_data(save)]
        self.training_saves = [save for save in self.saves if self.is_in_training(save.event)]
        # a file that is written after the last epoch is of no use to a restart
        self.restart_saves = self.training_saves or self.saves
        self.fullest_save = max(self.restart_saves, key=lambda save: len(save.entries), default=None)
        given = [event for event in self.select("call", "missed", "method") if _gives_away(event)]
        self.escaped: set[Value] = set()
        self.escaped.update(*[list_inside(value) for event in given for value in event.args.values()])
        self.kept_by = self._find_keepers()

    def _read(self, event: Event) -> Save | None:
        """Return the checkpoint that an event writes; None for other events."""
        args = event.args
        saved = args.get(0, args.get("obj"))
        if event.name == "call" and (event.text in _SAVERS or _SAVES_WHOLE.search(event.text)):
            return None if saved is None else _read_save(event, saved)
        # a function that is not known saves what it gets
        given = [value for value in args.values() if kind_of(value) == "dict" and root(value).parts]
        if given and _may_save(event):
            save = _read_save(event, given[0])
            # if it may hold more, it counts as a call with unknown contents (saves_all)
            return None if save.is_open else save
        # `net.save(path)` of a network that is not known
        if event.text == "save" and event.value.kind == "model" and len(args) == 1:
            return _read_save(event, event.value)
        # fabric.save(path, state), accelerator.save(state, path)
        if event.text == "save" and len(args) >= 2 and not is_followed(event):
            second = args.get(1, Value())
            return _read_save(event, second if kind_of(second) == "dict" else args.get(0, Value()))
        if event.text == "save_state" and event.value.key == "Accelerator":
            calls = [call for call in self.select("method") if call.text in _REGISTERS]
            registered = [Entry(value.label, value) for call in calls for value in call.args.values()]
            return Save(event, registered, is_open=False)
        return None

    def _is_of_data(self, save: Save) -> bool:
        """Return whether a save writes what a data set has read, such as its labels, or computed for a
        sample, or a file that the script removes, such as one whose size it reads."""
        functions = save.event.functions
        later = [event for event in self.calls(_REMOVES) if event.order > save.event.order]
        removed = {
            unparse(part) for event in later if event.functions == functions for part in event.node.args
        }
        is_removed = any(unparse(part) in removed for part in save.event.node.args[1:2])
        is_of_sample = "__getitem__" in functions or (save.is_open and any(map(_OF_DATA.search, functions)))
        return is_of_sample or is_removed

    def is_saved(self, value: Value, kind: str) -> bool:
        """Return whether a checkpoint has an object, or may have it."""
        is_registered = bool(root(value).flags & {"prepared", "registered"})
        return self.saves_all or is_registered or self.is_in_file(value, kind)

    def is_in_file(self, value: Value, kind: str) -> bool:
        """Return whether a checkpoint that is known has an object, or may have it."""
        base = root(value)
        mine = self.list_saved_with(base)
        # accelerate calls these functions before it saves: what they name is saved
        is_named = base.label and re.search(rf"\b{re.escape(base.label)}\b", self._text_of_hooks)
        may_have = mine & self.escaped or is_named or any(save.is_open for save in self.restart_saves)
        return bool(may_have) or any(
            _has(entry, mine, kind) for save in self.restart_saves for entry in save.entries
        )

    def list_saved_with(self, base: Value) -> set[Value]:
        """Return an object and those whose state has its state."""
        # an average is saved if the model in it is
        mine = {base, *[root(part) for part in base.parts.values() if kind_of(part) in _AVERAGED]}
        # a wrapper writes what it needs of the object in it
        for _ in range(3):
            mine = mine.union(*[self.kept_by.get(part, set()) for part in mine])
        return mine

    def _find_keepers(self) -> dict[Value, set[Value]]:
        keepers: dict[Value, set[Value]] = {}
        for event in self.select("set_attribute"):
            keeper = root(event.value)
            cls = getattr(keeper.cls, "node", None)
            methods = cls.body if isinstance(cls, ast.ClassDef) else []
            text = " ".join(unparse(part) for part in methods if getattr(part, "name", "") == "state_dict")
            is_read = re.search(rf"\.{event.text}\b|__dict__", text) is not None
            # `for name in ("model", "optimizer"): getattr(self, name).state_dict()`
            is_named = "getattr(self" in text and re.search(
                rf"['\"]{event.text}['\"]", unparse(keeper.cls.node)
            )
            if (is_read or is_named) and 0 in event.args:
                keepers.setdefault(root(event.args[0]), set()).add(keeper)
        return keepers

    @cached_property
    def _text_of_hooks(self) -> str:
        """The functions that accelerate calls before it saves, as text."""
        calls = self.calls(r"^register_save_state_pre_hook$")
        hooks = [value for call in calls for value in call.args.values()]
        return "\n".join(unparse(value.cls.node) for value in hooks if value.kind == "function")

    @cached_property
    def saves_all(self) -> bool:
        """Whether the script saves by a function whose contents are not known."""
        known = {save.event for save in self.saves}
        events = [event for event in self.select("call", "missed", "method") if event not in known]
        return any(map(_may_save, events))


def list_saving(checkpoints: Checkpoints) -> tuple[list[Event], list[Event]]:
    """Return (the calls that write weights for use, the others that may save something), without the saves
    that are known."""
    calls = checkpoints.select("call", "missed", "method")
    weights = [event for event in calls if _WRITES_WEIGHTS.search(event.text)]
    known = {*weights, *[save.event for save in checkpoints.saves]}
    others = [event for event in calls if event not in known and not _OUTPUTS.search(event.text)]
    others = [event for event in others if _MAY_WRITE.search(event.text.rpartition(".")[2])]
    return weights, [event for event in others if not is_followed(event)]


def _has(entry: Entry, mine: set[Value], kind: str) -> bool:
    """Return whether an entry is one of the objects, is computed from one, or may be one by its name."""
    value = entry.value
    # copy.deepcopy(average.model).half()
    copied = value.of if value.kind == "copied" and value.of is not None else value
    if mine & (list_deps(value) | list_deps(copied) | {root(value)}):
        return True
    # the state of a global generator is not that of another object
    is_global = kind == "generator" and _RANDOM_STATE.search(str(value.key)) is not None
    is_vague = kind_of(value) in _UNKNOWN and not is_global
    if value.kind == "state" and value.of is not None:
        is_vague = kind_of(value.of) in _UNKNOWN_OWNERS
    return is_vague and re.search(KEYS[kind], entry.name, re.IGNORECASE) is not None


def _may_save(event: Event) -> bool:
    """Return whether an event saves objects that are not known."""
    # a function such as save_checkpoint() that was too deep to enter
    last = event.text.rpartition(".")[2]
    if event.name != "method":
        is_other = event.name == "missed" or (event.text not in _SAVERS and event.value.kind == "module")
        return is_other and _SAVE_NAME.search(last) is not None and not _OUTPUTS.search(event.text)
    # a method of an object that is not known, such as checkpointer.save(); accelerate and Fabric are known
    value = event.value
    is_known = value.kind not in _SAVER_KINDS or value.key in ("Accelerator", "Fabric")
    if is_known or not _SAVE_METHOD.match(event.text):
        return False
    if event.text != "save":
        return not is_followed(event)
    is_saver = value.kind in ("unknown", "attribute") and _SAVER_NAME.search(value.label) is not None
    return is_saver and len(event.args) < 2


def _gives_away(event: Event) -> bool:
    """Return whether a call may save or load the objects that it gets."""
    last = event.text.rpartition(".")[2]
    # DataLoader has "load" in its name, and loads no checkpoint
    if last.endswith(("Loader", "loader", "Sampler")):
        return False
    if event.name == "method":
        return not is_followed(event) and _GIVES_AWAY.search(event.text) is not None
    is_followed_call = event.text in _SAVERS or event.text == "torch.load"
    return not is_followed_call and bool(_SAVE_NAME.search(last) or LOAD_NAME.search(last))


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
            entries.append(Entry(key, Value("unknown", deps=base.deps | {base})))
        is_open = base.is_open and not _is_state_like(base)
        for name, part in base.parts.items():
            is_inner_open = _flatten(part, f"{key}.{name}" if key else str(name), entries, depth + 1)
            # what is open under a name such as "progress" has no other object in it
            is_open = is_open or (is_inner_open and _HOLDS_ALL.search(str(name)) is not None)
        return is_open
    if base.kind == "instance" and base.parts:
        entries.extend([Entry(key, base)] if key else [])
        entries.extend(Entry(f"{key}.{name}", part) for name, part in base.parts.items())
        return not key
    entries.append(Entry(key, value))
    # a sample that a model makes holds no other object
    is_sample = base.kind == "unknown" and any("output" in dep.flags for dep in list_deps(base))
    source = base.of if base.kind == "copied" and base.of is not None else base
    return not key and source.kind not in _STATES and not is_sample and not _is_state_like(base)


def _is_state_like(value: Value) -> bool:
    """Return whether an open value holds only the state of known objects, as {k: v.cpu() for k, v in ...}."""
    if "comprehension" not in value.flags and value.kind == "dict":
        return False
    deps = list_deps(value)
    # the states of what a loop finds in an object are those of all that it has
    owners = {kind_of(dep.of) for dep in deps if dep.kind == "state" and dep.of is not None}
    read = {dep.label for dep in deps if dep.kind == "attribute"}
    return bool(owners - {"unknown", "attribute"} or read & {"parameters", "named_parameters"})


def list_inside(value: Value, depth: int = 0) -> set[Value]:
    """Return an object, and those in its entries or attributes."""
    base = root(value)
    inside = {base, root(base.of)} if base.kind == "state" and base.of is not None else {base}
    parts = base.parts.values() if depth < 3 else ()
    return inside.union(*[list_inside(part, depth + 1) for part in parts])
