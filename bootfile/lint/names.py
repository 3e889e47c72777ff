"""Follow what is bound: by assignments, by comprehensions, and by the targets of loops."""

import ast
import contextlib
from collections.abc import Iterator
from typing import Any

from bootfile.lint import values
from bootfile.lint.calls import unite
from bootfile.lint.expressions import Expressions
from bootfile.lint.sources import unparse
from bootfile.lint.values import Loop, Value, kind_of, root

MOST_ENTRIES = 12  # entries of a dict or a list over which a loop is walked one by one


class Names(Expressions):
    """Follows what is bound. `_set_NODE()` binds a kind of target."""

    def _assign(self, target: ast.expr, value: Value, node: Any, keep: bool = False) -> None:
        """Bind a target. keep: a loop or a counter binds it, whatever it was before."""
        if method := getattr(self, f"_set_{type(target).__name__.lower()}", None):
            method(target, value, node, keep)

    def _set_name(self, target: ast.Name, value: Value, node: Any, keep: bool) -> None:
        frame, name = self.frames[-1], target.id
        named = self._named(value, name, node)
        # `nonlocal`, or else `global`
        shared = frame.outer if frame.outer is not None and name in frame.outer else frame.module.names
        names = shared if name in frame.shared else frame.names
        old = names.get(name)
        chosen = self._chosen(old, named, keep, name)
        if old is not None and name in frame.shared:
            self._event("set_attribute", Value("module"), {0: named, 1: old}, node, name)
        elif old is not None or named.kind in ("field", "shifted"):
            self._event("set_name", chosen, {0: named, 1: old or Value()}, node, name)
        names[name] = chosen
        self._keep_binding(named, name, node)

    def _set_attribute(self, target: ast.Attribute, value: Value, node: Any, keep: bool) -> None:
        owner = self.value(target.value)
        named = self._named(value, target.attr, node)
        place = root(owner).parts
        old = place.get(target.attr, Value())
        self._event("set_attribute", owner, {0: named, 1: old}, node, target.attr)
        self._keep_binding(named, unparse(target), node)
        place[target.attr] = self._chosen(place.get(target.attr), named, keep, target.attr)

    def _set_tuple(self, target: ast.Tuple | ast.List, value: Value, node: Any, keep: bool) -> None:
        """`a, b = pair`, `first, *rest = items`"""
        for number, part in enumerate(target.elts):
            # `*rest` may be any of the items
            is_rest = isinstance(part, ast.Starred)
            given = Value(deps=values.join_deps([value])) if is_rest else self._unpack(value, number, node)
            self._assign(part, given, node, keep)

    _set_list = _set_tuple

    def _set_starred(self, target: ast.Starred, value: Value, node: Any, keep: bool) -> None:
        self._assign(target.value, value, node, keep)

    def _unpack(self, value: Value, number: int, node: Any) -> Value:
        made = self._make("unknown", node, [value], loops=tuple(self._loops))
        made.flags |= value.flags & {"from_call", "restored", "element"}
        made.of = value.of if value.kind == "attribute" else None
        return value.parts.get(number, made)

    def _set_subscript(self, target: ast.Subscript, value: Value, node: Any, keep: bool) -> None:
        owner = self.value(target.value)
        key = self.value(target.slice)
        place = root(owner).parts
        old = place.get(key.key)
        self._event("set_item", owner, {0: value, 1: old or Value()}, node, unparse(target))
        # `if hasattr(part, "load_state_dict"): ... else: parts[name] = saved[name]`
        is_object = old is not None and kind_of(old) in values.STATEFUL
        is_kept = is_object and value.kind == "field" and bool(self._conditions)
        if key.kind != "const":
            owner.is_open = True
            owner.deps |= values.join_deps([value])
        elif not is_kept:
            place[key.key] = self._chosen(old, value, False, str(key.key))

    def _chosen(self, old: Value | None, new: Value, keep: bool, name: str) -> Value:
        """Return the value of a name after an assignment, which a branch may leave out."""
        if old is None or keep or not self._conditions:
            return new
        if self._stays(old, new):
            return old
        # a loop changes it at some times only: it depends on both values, and on the test
        is_outer = set(old.loops) < set(self._loops)
        is_first = values.is_start(old) or old.kind == "field"
        if is_outer and is_first and new.kind in (*values.VAGUE, *values.NUMBERS, "attribute"):
            deps = [old, new, self._conditions[-1].value]
            return self._make("unknown", new.node, deps, label=name, of=old, loops=old.loops)
        if old.kind == "state" and new.kind == "state" and old.flags != new.flags:
            new.flags.add("either")
        # what is restored is what it was before
        new.deps |= {old} if new.kind == "field" and old.kind == "instance" else set()
        # two branches make the same thing in two ways: from here on they are one object
        if new.kind != "wrapped":
            unite(old, new)
        return new

    def _stays(self, old: Value, new: Value) -> bool:
        """Return whether a name keeps its value in a branch: the rules look at the way of a restart, and at
        the branch that tells more."""
        says_less = values.is_vague(new) and not values.is_restored(new)
        is_failed = self._conditions[-1].text == "except"
        return (
            # what `except` puts in its place is another one only if the block has failed
            (is_failed and kind_of(old) in (*values.STATEFUL, "copied"))
            # `if not resume: step = 0` leaves the restored value: a restart does not come here
            or (says_less and values.is_restored(old))
            # 0 for a new run, or what the name of a file tells
            or (new.kind == "const" and old.kind == "unknown" and "from_call" in old.flags)
            # without torchrun another sampler may be used, with which nothing has to be done
            or (kind_of(old) == kind_of(new) == "sampler" and root(old).key == "DistributedSampler")
            # one of two functions: the longer one does more than to be a stand-in
            or (old.kind == new.kind == "function" and _length(old) >= _length(new))
            # `scheduler = None` in one branch
            or (says_less and not values.is_vague(old) and (new.kind != "unknown" or old.kind != "field"))
        )

    def _named(self, value: Value, name: str, node: Any) -> Value:
        """Return a value with the name of the target, and with the kind that the name tells if nothing else
        does."""
        # `optimizer = build(cfg)`: nothing but the name tells what it is
        is_open = value.kind == "unknown" and not value.label and "from_call" in value.flags
        kind = values.kind_of_name(name)
        if kind and is_open and (kind != "checkpoint" or value.of is None):
            value.kind = kind
            value.flags.add("by_name")
        is_average = value.kind == "instance" and kind == "ema"
        if is_average and self.find_method(value, "update") is not None:
            value.kind = "ema"
        if value.label:
            return value
        # a constant is one object for each name
        if value.kind in ("const", "none"):
            return self._make(value.kind, node, label=name, key=value.key, loops=tuple(self._loops))
        value.label = name
        value.line = value.line or node.lineno
        value.loops = value.loops or tuple(self._loops)
        return value

    # Comprehensions, and the targets of loops

    def _of_listcomp(self, node: Any) -> Value:
        made = Value("list", "", self._path(), node.lineno)
        # `[f(x) for x in (a, b)]` has two known entries; one over unknown data is open
        with self._comprehend(node) as entries:
            made.is_open = entries is None
            for number, names in enumerate(entries or [{}]):
                self.frames[-1].names.update(names)
                made.parts[number] = self.value(node.elt)
            if entries is None:
                made.deps = values.join_deps([*made.parts.values(), *self._iterated(node)])
                made.parts = made.parts if made.parts[0].kind in values.STATEFUL else {}
        made.node = node
        return made

    _of_generatorexp = _of_listcomp

    def _of_setcomp(self, node: Any) -> Value:
        made = self._of_listcomp(node)
        made.flags.add("set")
        return made

    def _of_dictcomp(self, node: ast.DictComp) -> Value:
        made = Value("dict", "", self._path(), node.lineno, node=node)
        made.flags.add("comprehension")
        with self._comprehend(node) as entries:
            made.is_open = entries is None
            for names in entries or [{}]:
                self.frames[-1].names.update(names)
                key = self.value(node.key)
                value = self.value(node.value)
                made.deps |= values.join_deps([value])
                if key.kind == "const" and entries is not None:
                    made.parts[key.key] = value
                else:
                    # `{name + "_optimizer": ...}`: the values are known, their names are not
                    made.is_open = True
            if entries is None:
                made.deps |= values.join_deps(self._iterated(node))
        return made

    def _iterated(self, node: Any) -> list[Value]:
        return [self.value(part.iter) for part in node.generators]

    @contextlib.contextmanager
    def _comprehend(self, node: Any) -> Iterator[list[dict[str, Value]] | None]:
        """Give the block the values of the targets of a comprehension for each of its entries. None: they are
        not known, and the targets are bound. After the block they are what they were before."""
        frame = self.frames[-1]
        parts = [part for generator in node.generators for part in ast.walk(generator.target)]
        targets = {part.id for part in parts if isinstance(part, ast.Name)}
        before = {name: frame.names[name] for name in targets & frame.names.keys()}
        yield self._list_bindings(node)
        for name in targets:
            frame.names.pop(name, None)
        frame.names.update(before)

    def _list_bindings(self, node: Any) -> list[dict[str, Value]] | None:
        """Return the values of the targets of a comprehension for each of its entries. If these are not
        known, bind the targets, and return None."""
        generator = node.generators[0]
        iterated = self.value(generator.iter)
        entries = self._list_entries(iterated)
        # two loops in one, or with an `if`: the entries are not known
        if entries is None or len(node.generators) > 1 or generator.ifs:
            for part in node.generators:
                source = self.value(part.iter)
                # a comprehension reads a loader as a loop does
                self._read_loader(source, part.iter)
                self._assign(part.target, self._element(source, part.iter, None), part.iter, keep=True)
            return None
        return [dict(_bind(generator.target, entry)) for entry in entries]

    def _list_entries(self, iterated: Value) -> list[Value] | None:
        """Return what a loop over a dict or list gets if its entries are known and few."""
        iterated = root(iterated)
        is_known = iterated.kind in ("list", "dict") and not iterated.is_open and "set" not in iterated.flags
        # a table of hundreds of entries is data: walking the body for each would take long
        if not is_known or not 0 < len(iterated.parts) <= MOST_ENTRIES:
            return None
        keys, parts = [Value("const", key=key) for key in iterated.parts], [*iterated.parts.values()]
        if "items" in iterated.flags:
            return [Value("list", parts={0: key, 1: value}) for key, value in zip(keys, parts, strict=True)]
        return parts if iterated.kind == "list" or "values" in iterated.flags else keys

    def _element(self, iterated: Value, node: Any, loop: Loop | None) -> Value:
        """Return what the target of a loop gets."""
        base = root(iterated)
        made = self._make("unknown", node, [iterated], loops=tuple(self._loops), flags={"element"})
        # what rules ask of the target: the number of the loop, the pair of enumerate(), a parameter group
        number = made if base.kind == "range" and loop is not None else None
        if number is not None:
            made.kind = "loop"
        elif base.kind == "enumerated":
            number = self._make("loop", node)
            deps = values.join_deps([iterated])
            element = Value(deps=deps, loops=tuple(self._loops), flags={"element"})
            made.kind, made.parts = "list", {0: number, 1: element}
        elif base.key == "zip":
            made.parts = {key: self._element(part, node, None) for key, part in base.options.items()}
        elif base.kind == "attribute" and base.label in ("param_groups", "parameters"):
            made.kind, made.of = "group", base.of
        elif base.kind == "list" and base.is_open and len(base.parts) == 1:
            return next(iter(base.parts.values()))
        elif base.kind == "list" and base.is_open:
            made.deps |= frozenset(base.parts.values())
        elif base.kind in ("checkpoint", "field"):
            return self._make("field", node, of=base)
        if loop is not None and number is not None:
            loop.value, loop.start = number, base.parts.get("start")
        return made


def _length(function: Value) -> int:
    node = getattr(function.cls, "node", None)
    return 0 if node is None else (node.end_lineno or 0) - node.lineno


def _bind(target: Any, value: Value) -> Iterator[tuple[str, Value]]:
    """Yield the names of a target, with their values."""
    if isinstance(target, ast.Name):
        yield target.id, value
    for number, part in enumerate(getattr(target, "elts", ())):
        yield from _bind(part, value.parts.get(number, Value()))
