"""Calls whose meaning is known: methods of objects of torch, accelerate and Fabric, and of containers."""

from typing import Any

from bootfile.lint import values
from bootfile.lint.record import Recorder
from bootfile.lint.values import Value, kind_of, root

PASSED = (
    "cuda", "to", "cpu", "train", "eval", "half", "float", "double", "bfloat16", "requires_grad_", "copy",
    "items",
    "values", "tqdm", "enumerate", "list", "iter", "reversed", "prefetch", "__enter__", "unwrap_model",
    "setup_dataloaders", "setup", "convert_sync_batchnorm", "sync_batchnorm", "apply", "channels_last",
    "de_parallel",
    "unwrap", "get_model", "log_every", "track", "detach", "clone", "item", "int", "str",
)  # fmt: skip


# what these return has the order of a folder
LISTINGS = ("listdir", "scandir", "glob", "iglob", "rglob", "iterdir")


class Known(Recorder):
    """Follows calls whose meaning is known."""

    def _method_event(
        self, owner: Value, name: str, args: list[Value], named: dict[str, Value], node: Any
    ) -> None:
        """List what a method call means."""
        base = root(owner)
        arguments = number_arguments(args, named)
        if name == "load_state_dict" or (name in ("set_state", "setstate") and base.kind == "generator"):
            self._event("load_state", base, arguments, node, prefix_of(owner))
        elif name == "step" and base.kind == "scheduler" and len(args) > 1:
            # a noise scheduler of a diffusion model: `scheduler.step(noise, t, latents)`
            pass
        elif name == "step":
            # `scaler.step(optimizer)` is a step of both
            for value in args:
                if base.kind == "scaler" and kind_of(value) == "optimizer":
                    self._event("step", root(value), arguments, node)
            self._event("step", base, arguments, node)
        elif name == "backward" and base.kind != "module":
            self._event("backward", base, arguments, node)
        elif name == "step_update" and base.kind == "scheduler":
            self._event("step", base, arguments, node)
        elif name == "state_dict":
            self._event("state", base, arguments, node)
        elif name in ("sort", "reverse"):
            base.flags.add("by_text" if name == "sort" and not arguments else "keyed")
        self._event("method", base, arguments, node, name)

    def _known_result(
        self, owner: Value, name: str, args: list[Value], named: dict[str, Value], node: Any
    ) -> Value | None:
        """Return the result of a method whose meaning is known."""
        base = root(owner)
        if name == "state_dict" or (name in ("get_state", "bit_generator") and base.kind == "generator"):
            made = Value(
                "state", base.label, self._path(), node.lineno, of=base, deps=frozenset([base, owner])
            )
            prefix = prefix_of(owner)
            if prefix:
                made.flags.add(prefix)
            return made
        # `state.get("epoch", 0)`
        if base.kind in ("checkpoint", "field") and name in ("get", "pop", "setdefault") and args:
            made = self._item(base, args[0], node)
            made.flags.add("optional")
            return made
        if base.kind in ("dict", "list"):
            return self._container_method(base, name, args, node)
        if base.kind == "generator" and name == "manual_seed":
            return owner
        if name == "prepare" or (name == "setup" and base.key == "Fabric"):
            return self._prepare(args, node, name)
        if base.key == "Accelerator" and name == "load_state":
            self._restore_registered(node)
            return None
        if name in {"parse_args", "parse_known_args"}:
            return Value(
                "args",
                "args",
                self._path(),
                node.lineno,
                flags={"namespace"} if base.label != "self" else set(),
            )
        if name in ("parameters", "named_parameters", "param_groups"):
            return Value(
                "attribute", "parameters", self._path(), node.lineno, of=base, deps=frozenset([base])
            )
        if name == "load" and args and base.key == "Fabric":
            return self._load_fabric(args, node)
        # `model.cuda()`, `loss.item()`: it is still the same object
        if name in PASSED and not args and base.kind not in ("unknown", "attribute"):
            return owner
        if name in PASSED and base.kind in (*values.STATEFUL, "loader", "criterion", "wrapped"):
            return owner
        if (
            name in PASSED
            and len(args) >= 1
            and kind_of(args[0]) in (*values.STATEFUL, "loader", "criterion")
        ):
            return args[0]
        return None

    def _item(self, owner: Value, key: Value, node: Any) -> Value:
        base = root(owner)
        if key.kind == "const" and key.key in base.parts and base.kind != "instance":
            return base.parts[key.key]
        if base.kind in ("checkpoint", "field"):
            name = key.key if key.kind == "const" else None
            made = Value("field", str(name or ""), self._path(), node.lineno, of=base, key=name)
            self._event("read", made, {}, node)
            return made
        # one of several classes of the project: what they have in common is that of the first
        classes = list(base.parts.values()) if base.kind == "dict" and key.kind != "const" else []
        if classes and all(part.kind == "class" for part in classes):
            return classes[0]
        deps = values.join_deps([owner, key])
        return Value(
            "attribute", "", self._path(), node.lineno, of=owner, key=key.key, deps=deps, flags={"item"}
        )

    def _container_method(self, base: Value, name: str, args: list[Value], node: Any) -> Value | None:
        if name in ("items", "values", "keys"):
            # `state.items()` keeps its entries; _list_entries() reads the flag
            made = Value(base.kind, base.label, base.path, base.line, parts=base.parts, is_open=base.is_open)
            made.flags = {name}
            made.deps = base.deps
            return made
        if name == "update" and args:
            self._merge_dict(base, args[0])
            # numbers that a checkpoint replaces
            if root(args[0]).kind in ("field", "checkpoint"):
                for key, part in base.parts.items():
                    if part.kind in ("const", "none"):
                        made = Value("field", str(key), self._path(), node.lineno, of=root(args[0]), key=key)
                        base.parts[key] = made
        elif name == "append" and args:
            # one append() in a loop stands for many
            base.parts[len(base.parts)] = args[0]
            base.is_open = base.is_open or bool(self._loops)
            base.deps |= values.join_deps(args)
        elif name == "extend":
            base.is_open = True
            base.deps |= values.join_deps(args)
        elif name in ("get", "pop", "setdefault") and args and args[0].kind == "const":
            taken = base.parts.get(args[0].key)
            if name == "pop":
                base.parts.pop(args[0].key, None)
            return taken or Value(deps=values.join_deps([base]))
        elif name == "pop":
            return Value(deps=values.join_deps([base]))
        elif name == "copy":
            return base
        elif name == "sort":
            base.flags.add("sorted")
        else:
            return None
        return Value("none")

    def _merge_dict(self, made: Value, other: Value) -> None:
        other = root(other)
        if other.kind == "dict":
            made.parts.update(other.parts)
            made.is_open = made.is_open or other.is_open
        else:
            made.is_open = True
        made.deps |= values.join_deps([other])

    def _restore_registered(self, node: Any) -> None:
        """accelerator.load_state() restores what was registered: numbers in it come from the checkpoint."""
        for event in self.events:
            if event.name == "method" and event.text == "register_for_checkpointing":
                for value in event.args.values():
                    for key, part in root(value).parts.items():
                        if part.kind == "const":
                            made = Value("field", str(key), self._path(), node.lineno, key=key)
                            root(value).parts[key] = made

    def _prepare(self, args: list[Value], node: Any, name: str) -> Value:
        for value in args:
            if name == "prepare":
                root(value).flags.add("prepared")
        if len(args) == 1:
            return args[0]
        return Value("list", "", self._path(), node.lineno, parts=dict(enumerate(args)))

    def _load_fabric(self, args: list[Value], node: Any) -> Value:
        """fabric.load(path, state) restores what is in `state`; without it, it returns the checkpoint."""
        checkpoint = Value("checkpoint", "checkpoint", self._path(), node.lineno)
        self._event("load", checkpoint, {0: args[0]}, node)
        if len(args) > 1:
            state = root(args[1])
            # the objects in `state` get their states, and its numbers become those of the checkpoint
            for key, value in list(state.parts.items()):
                made = Value("field", str(key), self._path(), node.lineno, of=checkpoint, key=key)
                self._event("load_state", root(value), {0: made}, node)
                if root(value).kind not in values.STATEFUL:
                    state.parts[key] = made
        return checkpoint

    def _describe(self, made: Value, arguments: dict[Any, Value]) -> None:
        """Keep what a loader, sampler or scheduler is made of."""
        made.options = arguments
        if made.kind == "loader":
            dataset = arguments.get(0) or arguments.get("dataset")
            if dataset is not None:
                made.parts["dataset"] = dataset
            # the order of a loader comes from its sampler, whatever its name among the arguments
            if "sampler" in arguments:
                made.parts["sampler"] = arguments["sampler"]
            if "batch_sampler" in arguments:
                made.parts["sampler"] = arguments["batch_sampler"]
        if made.kind in ("scheduler", "optimizer", "sampler", "ema"):
            first = arguments.get(0) or arguments.get("optimizer")
            if first is not None:
                made.parts["first"] = first

    def _wrap(self, value: Value, name: str, node: Any) -> Value:
        # both branches of a condition wrap the same model
        if value.kind == "wrapped" and value.key == values.WRAPPERS[name]:
            return value
        made = Value("wrapped", "", self._path(), node.lineno, of=value, key=values.WRAPPERS[name])
        made.flags.add(name)
        root(value).flags.add(name)
        return made


def prefix_of(owner: Value) -> str:
    """Return what a wrapper writes before the names of a state: "prefix:module.", "" without one."""
    while owner.kind == "wrapped" and not owner.key and owner.of is not None:
        owner = owner.of
    return f"prefix:{owner.key}" if owner.kind == "wrapped" else ""


def number_arguments(args: list[Value], named: dict[str, Value]) -> dict[Any, Value]:
    arguments: dict[Any, Value] = dict(enumerate(args))
    arguments.update(named)
    return arguments
