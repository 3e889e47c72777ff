"""The methods whose meaning is known: of objects of torch, accelerate and Fabric, and of containers.

A row of MEANINGS is what a method does as an event. A row of RESULTS or ENTRIES names what returns its
result.
"""

from typing import Any, NamedTuple

from bootfile.lint import values
from bootfile.lint.record import Call, Recorder
from bootfile.lint.values import Value, kind_of, root


class Meaning(NamedTuple):
    """A method of objects of a kind ("" for any) and the event that it is."""

    method: str
    kind: str
    event: str


MEANINGS = [
    Meaning("load_state_dict", "", "load_state"),
    Meaning("set_state", "generator", "load_state"),
    Meaning("setstate", "generator", "load_state"),
    Meaning("step", "", "step"),
    Meaning("step_update", "scheduler", "step"),
    Meaning("backward", "", "backward"),
    Meaning("state_dict", "", "state"),
]
# method of an object -> what returns its result here; None if the object is of another kind
RESULTS = {
    "state_dict": "_make_state", "get_state": "_get_state", "bit_generator": "_get_state",
    "manual_seed": "_keep_generator", "parse_args": "_make_args", "parse_known_args": "_make_args",
    "parameters": "_list_parameters", "named_parameters": "_list_parameters",
    "param_groups": "_list_parameters", "prepare": "_prepare", "setup": "_set_up",
    "load_state": "_load_registered", "load": "_load_all",
}  # fmt: skip
# the same for a dict or list
ENTRIES = {
    "items": "_keep_entries", "values": "_keep_entries", "keys": "_keep_entries", "update": "_update",
    "append": "_append", "extend": "_extend", "get": "_get_entry", "setdefault": "_get_entry",
    "pop": "_pop_entry", "copy": "_keep_base",
}  # fmt: skip
# methods and functions that return the object itself
PASSED = (
    "cuda", "to", "cpu", "train", "eval", "half", "float", "double", "bfloat16", "requires_grad_", "copy",
    "items", "values", "tqdm", "enumerate", "list", "iter", "reversed", "prefetch", "__enter__",
    "unwrap_model", "setup_dataloaders", "setup", "convert_sync_batchnorm", "sync_batchnorm", "apply",
    "channels_last", "de_parallel", "unwrap", "get_model", "log_every", "track", "detach", "clone", "item",
    "int", "str",
)  # fmt: skip
# methods that change a tensor to a mean or a sum of it and others
IN_PLACE = ("mul_", "add_", "sub_", "lerp_", "copy_", "div_")
# what these return has the order of a folder
LISTINGS = ("listdir", "scandir", "glob", "iglob", "rglob", "iterdir")
_WITH_FIRST = ("scheduler", "optimizer", "sampler", "ema")
_KEPT = (*values.STATEFUL, "loader", "criterion")


class Methods(Recorder):
    """Follows methods whose meaning is known."""

    def _list_method(self, call: Call) -> None:
        """List what a method call means."""
        base, name = call.base, call.name
        # `scaler.step(optimizer)` is a step of both
        given = call.args if name == "step" and base.kind == "scaler" else []
        for value in [root(value) for value in given if kind_of(value) == "optimizer"]:
            self._event("step", value, call.arguments, call.node)
        # `scheduler.step(noise, t, latents)` is one of a diffusion model
        is_of_diffusion = name == "step" and base.kind == "scheduler" and len(call.args) > 1
        is_other = is_of_diffusion or (name == "backward" and base.kind == "module")
        rows = [row for row in MEANINGS if row.method == name and row.kind in ("", base.kind)]
        for row in rows if not is_other else ():
            prefix = prefix_of(call.called) if row.event == "load_state" else ""
            self._event(row.event, base, call.arguments, call.node, prefix)
        # `net.load(path)` of a network that is not known
        if name == "load" and base.kind == "model" and base.cls is None and len(call.args) == 1:
            checkpoint = self._make("checkpoint", call.node, options=call.arguments)
            self._event("load", checkpoint, call.arguments, call.node, name)
            self._event("load_state", base, {0: checkpoint}, call.node, prefix_of(call.called))
        if name in ("sort", "reverse"):
            base.flags.add("by_text" if name == "sort" and not call.arguments else "keyed")
        self._event("method", base, call.arguments, call.node, name)

    def _known_result(self, call: Call) -> Value | None:
        """Return the result of a method whose meaning is known."""
        base = call.base
        # `state.get("epoch", 0)`
        if base.kind in ("checkpoint", "field") and call.name in ("get", "pop", "setdefault") and call.args:
            made = self._item(base, call.args[0], call.node)
            made.flags.add("optional")
            return made
        is_container = base.kind in ("dict", "list") and call.name != "state_dict"
        method = (ENTRIES if is_container else RESULTS).get(call.name)
        result: Value | None = getattr(self, method)(call) if method else None
        return result if result is not None or is_container else self._pass_on(call)

    def _pass_on(self, call: Call) -> Value | None:
        """Return the object of `model.cuda()`, or the argument of `helper.to_device(model)`."""
        kind = call.base.kind
        is_known = kind in (*_KEPT, "wrapped") or (not call.args and kind not in ("unknown", "attribute"))
        # `weights.mul_(0.9).add_(others)`: methods of tensors whose names end with "_" return the tensor
        if (call.name in PASSED and is_known) or (call.name in IN_PLACE and kind in ("unknown", "attribute")):
            return call.called
        is_given = call.name in PASSED and bool(call.args) and kind_of(call.args[0]) in _KEPT
        return call.args[0] if is_given else None

    # Methods of objects

    def _make_state(self, call: Call) -> Value:
        base, prefix = call.base, prefix_of(call.called)
        made = self._make("state", call.node, label=base.label, of=base, flags={prefix} - {""})
        made.deps = frozenset([base, call.called])
        return made

    def _get_state(self, call: Call) -> Value | None:
        return self._make_state(call) if call.base.kind == "generator" else None

    def _keep_generator(self, call: Call) -> Value | None:
        return call.called if call.base.kind == "generator" else None

    def _make_args(self, call: Call) -> Value:
        flags = {"namespace"} if call.base.label != "self" else set()
        made = self._make("args", call.node, label="args", flags=flags)
        is_pair = call.name == "parse_known_args"
        return self._make("list", call.node, parts={0: made}) if is_pair else made

    def _list_parameters(self, call: Call) -> Value:
        base = call.base
        made = self._make("attribute", call.node, label="parameters", of=base)
        made.deps = frozenset([base])
        return made

    def _prepare(self, call: Call) -> Value:
        """accelerator.prepare(model, optimizer) returns both."""
        for value in call.args:
            root(value).flags.add("prepared")
        return self._give_back(call)

    def _set_up(self, call: Call) -> Value | None:
        return self._give_back(call) if call.base.key == "Fabric" else None

    def _give_back(self, call: Call) -> Value:
        whole = self._make("list", call.node, parts=dict(enumerate(call.args)))
        return call.args[0] if len(call.args) == 1 else whole

    def _load_registered(self, call: Call) -> None:
        """accelerator.load_state() restores what was registered: numbers in it come from the checkpoint."""
        is_accelerator = call.base.key == "Accelerator"
        for event in [event for event in self.events if event.text == "register_for_checkpointing"]:
            for value in event.args.values() if is_accelerator and event.name == "method" else ():
                self._restore_numbers(root(value), None, ("const",), call.node)

    def _load_all(self, call: Call) -> Value | None:
        """fabric.load(path, state) restores what is in `state`; without it, it returns the checkpoint."""
        if call.base.key != "Fabric" or not call.args:
            return None
        checkpoint = self._make("checkpoint", call.node, label="checkpoint")
        self._event("load", checkpoint, {0: call.args[0]}, call.node)
        # the objects in `state` get their states, and its numbers become those of the checkpoint
        state = root(call.args[1]) if len(call.args) > 1 else Value()
        for key, value in list(state.parts.items()):
            made = self._make("field", call.node, label=str(key), of=checkpoint, key=key)
            self._event("load_state", root(value), {0: made}, call.node)
            if kind_of(value) not in values.STATEFUL:
                state.parts[key] = made
        return checkpoint

    # Dicts and lists

    def _item(self, owner: Value, key: Value, node: Any) -> Value:
        base = root(owner)
        if key.kind == "const" and key.key in base.parts and base.kind != "instance":
            return base.parts[key.key]
        if base.kind in ("checkpoint", "field"):
            name = key.key if key.kind == "const" else None
            made = self._make("field", node, label=str(name or ""), of=base, key=name)
            self._event("read", made, {}, node)
            return made
        # one of several classes of the project: what they have in common is that of the first
        classes = list(base.parts.values()) if base.kind == "dict" and key.kind != "const" else []
        if classes and all(part.kind == "class" for part in classes):
            return classes[0]
        return self._make("attribute", node, [owner, key], of=owner, key=key.key, flags={"item"})

    def _keep_entries(self, call: Call) -> Value:
        """`state.items()` keeps its entries; the loop over them reads the flag."""
        base = call.base
        made = Value(base.kind, base.label, base.path, base.line, parts=base.parts, is_open=base.is_open)
        made.flags, made.deps, made.of = {call.name}, base.deps, base
        return made

    def _keep_base(self, call: Call) -> Value:
        return call.base

    def _update(self, call: Call) -> Value:
        for given in call.args[:1]:
            self._merge_dict(call.base, given)
            # numbers that a checkpoint replaces
            if kind_of(given) in ("field", "checkpoint"):
                self._restore_numbers(call.base, root(given), ("const", "none"), call.node)
        return Value("none")

    def _restore_numbers(
        self, holder: Value, checkpoint: Value | None, kinds: tuple[str, ...], node: Any
    ) -> None:
        for key, part in holder.parts.items():
            if part.kind in kinds:
                holder.parts[key] = self._make("field", node, label=str(key), of=checkpoint, key=key)

    def _append(self, call: Call) -> Value:
        """One append() in a loop stands for many."""
        base = call.base
        base.parts[len(base.parts)] = call.args[0] if call.args else Value()
        base.is_open = base.is_open or bool(self._loops)
        base.deps |= values.join_deps(call.args)
        return Value("none")

    def _extend(self, call: Call) -> Value:
        call.base.is_open = True
        call.base.deps |= values.join_deps(call.args)
        return Value("none")

    def _get_entry(self, call: Call) -> Value | None:
        is_known = bool(call.args) and call.args[0].kind == "const"
        return call.base.parts.get(call.args[0].key) or self._part_of(call) if is_known else None

    def _pop_entry(self, call: Call) -> Value:
        is_known = bool(call.args) and call.args[0].kind == "const"
        taken = call.base.parts.pop(call.args[0].key, None) if is_known else None
        return taken or self._part_of(call)

    def _part_of(self, call: Call) -> Value:
        return Value(deps=values.join_deps([call.base]))

    def _merge_dict(self, made: Value, other: Value) -> None:
        other = root(other)
        parts = other.parts if other.kind == "dict" else {}
        made.parts.update(parts)
        made.is_open = made.is_open or other.is_open or other.kind != "dict"
        made.deps |= values.join_deps([other])

    # Objects of torch

    def _describe(self, made: Value, arguments: dict[Any, Value]) -> None:
        """Keep what a loader, sampler or scheduler is made of."""
        made.options = arguments
        dataset = arguments.get(0) or arguments.get("dataset")
        # the order of a loader comes from its sampler, whatever its name among the arguments
        sampler = arguments.get("batch_sampler") or arguments.get("sampler")
        first = arguments.get(0) or arguments.get("optimizer")
        parts = {"dataset": dataset, "sampler": sampler} if made.kind == "loader" else {}
        parts = {"first": first} if made.kind in _WITH_FIRST else parts
        made.parts.update({name: part for name, part in parts.items() if part is not None})

    def _wrap(self, value: Value, name: str, node: Any) -> Value:
        # both branches of a condition wrap the same model
        if value.kind == "wrapped" and value.key == values.WRAPPERS[name]:
            return value
        root(value).flags.add(name)
        return self._make("wrapped", node, of=value, key=values.WRAPPERS[name], flags={name})


def prefix_of(owner: Value) -> str:
    """Return what a wrapper writes before the names of a state: "prefix:module.", "" without one."""
    while owner.kind == "wrapped" and not owner.key and owner.of is not None:
        owner = owner.of
    return f"prefix:{owner.key}" if owner.kind == "wrapped" else ""
