"""Follow expressions: the abstract value of each."""

import ast
import builtins
import contextlib
from typing import Any

from bootfile.lint import values
from bootfile.lint.calls import VAGUE_OR_OPTION, Calls
from bootfile.lint.record import MOST_STEPS, Class, Condition, Function, Module, TooLarge
from bootfile.lint.syntax import is_property, unparse
from bootfile.lint.values import Loop, Value, root

MOST_ENTRIES = 12  # entries of a dict or a list over which a loop is walked one by one


class Expressions(Calls):
    """Follows expressions."""

    def value(self, node: Any) -> Value:
        """Return the value of an expression."""
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise TooLarge
        if node is None:
            return Value("none")
        kind = type(node)
        if kind not in self._methods:
            self._methods[kind] = getattr(self, f"_of_{kind.__name__.lower()}", None)
        method = self._methods[kind]
        if method:
            result: Value = method(node)
            return result
        # an expression without a method: what it is made of is followed, what it is stays unknown
        inner = [self.value(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        return Value("unknown", deps=values.join_deps(inner))

    def _of_constant(self, node: ast.Constant) -> Value:
        if node.value is None:
            return Value("none", line=node.lineno)
        return Value("const", key=node.value, line=node.lineno, loops=tuple(self._loops))

    def _of_name(self, node: ast.Name) -> Value:
        frame = self._frames[-1]
        # as Python: the function, the function around it, the module, and then the builtins
        for names in (frame.names, frame.outer, frame.module.names):
            if names is not None and node.id in names:
                return names[node.id]
        if hasattr(builtins, node.id):
            return Value("module", node.id)
        return Value("unknown", node.id, flags={"undefined"})

    def _of_attribute(self, node: ast.Attribute) -> Value:
        owner = self.value(node.value)
        if owner.kind == "module":
            if isinstance(owner.cls, Module):
                if node.attr in owner.cls.names:
                    return owner.cls.names[node.attr]
                return Value("unknown", node.attr)
            return Value("module", f"{owner.label}.{node.attr}", owner.path, key=owner.key)
        # `ddp.module` is the bare model
        if owner.kind == "wrapped" and node.attr == "module" and owner.key != "module.":
            # a compiled model passes the attribute on to the wrapped one in it
            inner = owner
            while inner.kind == "wrapped" and inner.key != "module." and inner.of is not None:
                inner = inner.of
            owner = inner if inner.kind == "wrapped" else owner
        if owner.kind == "wrapped" and node.attr in ("module", "_orig_mod") and owner.of is not None:
            return owner.of
        base = root(owner)
        if node.attr in base.parts and base.kind not in ("dict", "list", "field", "checkpoint"):
            return base.parts[node.attr]
        if isinstance(base.cls, Class):
            method = self._find_method(base.cls, node.attr)
            if method:
                # a property is a call without brackets
                if is_property(method.node):
                    return self._call_function(method, [owner], {}, node)
                return Value("method", node.attr, of=owner, cls=method)
            constant = self._find_class_value(base.cls, node.attr)
            if constant is not None:
                return constant
        return self._unknown_attribute(owner, base, node)

    def _unknown_attribute(self, owner: Value, base: Value, node: ast.Attribute) -> Value:
        if base.kind in ("checkpoint", "field"):
            return Value("field", node.attr, of=base, key=node.attr, deps=frozenset([owner]))
        kind = "attribute"
        if base.kind in ("instance", "unknown", "self", "none", "attribute"):
            kind = values.kind_of_name(node.attr) or "attribute"
        if base.kind in ("args", "option"):
            kind = "option"
        made = Value(kind, node.attr, self._path(), node.lineno, of=owner, deps=frozenset([owner]))
        # kept: the next use of `self.optimizer` is the same object
        if kind not in ("attribute", "option"):
            made.flags.add("by_name")
            made.of = None
            base.parts[node.attr] = made
        if kind == "option":
            base.parts[node.attr] = made
        return made

    def _of_subscript(self, node: ast.Subscript) -> Value:
        owner = self.value(node.value)
        key = self.value(node.slice)
        return self._item(owner, key, node)

    def _of_dict(self, node: ast.Dict) -> Value:
        made = Value("dict", "", self._path(), node.lineno)
        for key, item in zip(node.keys, node.values, strict=True):
            value = self.value(item)
            # `{**state, ...}`
            if key is None:
                self._merge_dict(made, value)
                continue
            name = self.value(key)
            if name.kind == "const":
                made.parts[name.key] = value
            else:
                made.is_open = True
                made.deps |= values.join_deps([value])
        return made

    def _of_list(self, node: Any) -> Value:
        made = Value("list", "", self._path(), node.lineno)
        for number, item in enumerate(node.elts):
            value = self.value(item)
            if isinstance(item, ast.Starred):
                made.is_open = True
                made.deps |= values.join_deps([value])
            made.parts[number] = value
        return made

    _of_tuple = _of_list

    def _of_set(self, node: Any) -> Value:
        made = self._of_list(node)
        made.flags.add("set")
        return made

    def _of_starred(self, node: ast.Starred) -> Value:
        return self.value(node.value)

    def _of_await(self, node: ast.Await) -> Value:
        return self.value(node.value)

    def _of_namedexpr(self, node: ast.NamedExpr) -> Value:
        value = self.value(node.value)
        self._assign(node.target, value, node)
        return value

    def _of_ifexp(self, node: ast.IfExp) -> Value:
        test = self.value(node.test)
        text = unparse(node.test)
        self._conditions.append(Condition(text, test, True, node))
        body = self.value(node.body)
        self._conditions[-1] = Condition(text, test, False, node)
        orelse = self.value(node.orelse)
        self._conditions.pop()
        # the branch that says more; a rule must not depend on which one would run
        chosen = self._either(body, orelse)
        other = orelse if chosen is body else body
        if chosen.kind in ("state", "const", "none") or values.is_vague(other) or values.is_vague(chosen):
            return chosen
        # it is the one or the other: a wrapper without a prefix keeps both
        return Value(
            "wrapped", chosen.label, chosen.path, chosen.line, of=chosen, key="", deps=frozenset([other])
        )

    def _of_boolop(self, node: ast.BoolOp) -> Value:
        first = node.values[0]
        # `True or rand() > 0.5`: the rest is not reached
        if isinstance(first, ast.Constant) and bool(first.value) is isinstance(node.op, ast.Or):
            return self.value(first)
        inner = [self.value(part) for part in node.values]
        # `scheduler or default`
        if isinstance(node.op, ast.Or):
            result = inner[0]
            for value in inner[1:]:
                result = self._either(result, value)
            if result.kind not in VAGUE_OR_OPTION:
                return result
        return Value("unknown", deps=values.join_deps(inner))

    def _of_compare(self, node: ast.Compare) -> Value:
        inner = [self.value(node.left), *map(self.value, node.comparators)]
        return Value("compared", deps=values.join_deps(inner), line=node.lineno, node=node)

    def _of_unaryop(self, node: ast.UnaryOp) -> Value:
        inner = self.value(node.operand)
        if isinstance(node.op, ast.USub) and inner.kind == "const" and isinstance(inner.key, int | float):
            return Value("const", key=-inner.key, line=node.lineno, loops=tuple(self._loops))
        return Value("unknown", deps=values.join_deps([inner]))

    def _of_binop(self, node: ast.BinOp) -> Value:
        return self._combine(node.op, self.value(node.left), self.value(node.right), node)

    def _combine(self, operator: ast.operator, left: Value, right: Value, node: Any) -> Value:
        if isinstance(operator, ast.BitOr) and left.kind == "dict":
            made = Value("dict", "", self._path(), node.lineno)
            self._merge_dict(made, left)
            self._merge_dict(made, right)
            return made
        # `epoch + 1`: the rules about epochs need the number and what was added
        sign = {ast.Add: 1, ast.Sub: -1}.get(type(operator), 0)
        if sign and right.kind == "const" and isinstance(right.key, int):
            return _shift(left, sign * right.key)
        if sign == 1 and left.kind == "const" and isinstance(left.key, int):
            return _shift(right, left.key)
        kind = "unknown"
        is_text = left.kind == "text" or (left.kind == "const" and isinstance(left.key, str))
        if isinstance(operator, ast.Mod) and not is_text:
            kind = "modulo"
        made = Value(kind, deps=values.join_deps([left, right]), line=node.lineno, node=node)
        if kind == "modulo" and right.kind == "const":
            made.key = right.key
        # `folder / name`, `folder + name` and `"%s/last.pt" % folder` are paths
        if isinstance(operator, ast.Div | ast.Add | ast.Mod) and "path" in (left.kind, right.kind):
            made.kind = "path"
        return made

    def _of_joinedstr(self, node: ast.JoinedStr) -> Value:
        inner = [self.value(part.value) for part in node.values if isinstance(part, ast.FormattedValue)]
        return Value("text", deps=values.join_deps(inner), line=node.lineno, node=node)

    def _of_lambda(self, node: ast.Lambda) -> Value:
        frame = self._frames[-1]
        outer = frame.names if frame.function else None
        return Value("function", "lambda", self._path(), node.lineno, cls=Function(node, frame.module, outer))

    def _of_listcomp(self, node: Any) -> Value:
        made = Value("list", "", self._path(), node.lineno)
        # `[f(x) for x in (a, b)]` has two known entries; one over unknown data is open
        entries = self._comprehend(node)
        made.is_open = entries is None
        for number, names in enumerate(entries or [{}]):
            with self._bound(names):
                made.parts[number] = self.value(node.elt)
        if entries is None:
            made.deps = values.join_deps([*made.parts.values(), *self._iterated(node)])
            if made.parts[0].kind not in values.STATEFUL:
                made.parts = {}
        made.node = node
        return made

    _of_generatorexp = _of_listcomp

    def _of_setcomp(self, node: Any) -> Value:
        made = self._of_listcomp(node)
        made.flags.add("set")
        return made

    def _of_dictcomp(self, node: ast.DictComp) -> Value:
        made = Value("dict", "", self._path(), node.lineno, node=node)
        entries = self._comprehend(node)
        made.is_open = entries is None
        made.flags.add("comprehension")
        for names in entries or [{}]:
            with self._bound(names):
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

    def _comprehend(self, node: Any) -> list[dict[str, Value]] | None:
        """Bind the targets of a comprehension, and return the names of each of its entries; None if the
        entries are not known."""
        generator = node.generators[0]
        iterated = self.value(generator.iter)
        entries = self._list_entries(iterated)
        # two loops in one, or with an `if`: the entries are not known
        if entries is None or len(node.generators) > 1 or generator.ifs:
            for part in node.generators:
                source = self.value(part.iter)
                # a comprehension reads a loader as a loop does
                self._assign(part.target, self._element(source, part.iter, None), part.iter, keep=True)
            return None
        bound = []
        for entry in entries:
            names: dict[str, Value] = {}
            _bind(generator.target, entry, names)
            bound.append(names)
        return bound

    @contextlib.contextmanager
    def _bound(self, names: dict[str, Value]) -> Any:
        frame = self._frames[-1]
        before = {name: frame.names.get(name) for name in names}
        frame.names.update(names)
        yield
        for name, value in before.items():
            if value is not None:
                frame.names[name] = value

    def _list_entries(self, iterated: Value) -> list[Value] | None:
        """Return what a loop over a dict or list gets if its entries are known and few."""
        iterated = root(iterated)
        if iterated.kind not in ("list", "dict") or iterated.is_open or "set" in iterated.flags:
            return None
        # a table of hundreds of entries is data: walking the body for each would take long
        if not 0 < len(iterated.parts) <= MOST_ENTRIES:
            return None
        entries = []
        for key, value in iterated.parts.items():
            if "items" in iterated.flags:
                pair = Value("list", parts={0: Value("const", key=key), 1: value})
                entries.append(pair)
            elif iterated.kind == "list" or "values" in iterated.flags:
                entries.append(value)
            else:
                entries.append(Value("const", key=key))
        return entries

    def _element(self, iterated: Value, node: Any, loop: Loop | None) -> Value:
        """Return what the target of a loop gets."""
        base = root(iterated)
        made = Value("unknown", "", self._path(), node.lineno, deps=values.join_deps([iterated]))
        made.loops = tuple(self._loops)
        made.flags.add("element")
        # what rules ask of the target: the number of the loop, the pair of enumerate(), a parameter group
        if base.kind == "range" and loop is not None:
            made.kind = "loop"
            made.of = None
            loop.value = made
            loop.start = base.parts.get("start")
        elif base.kind == "enumerated":
            number = Value("loop", "", self._path(), node.lineno)
            if loop is not None:
                loop.value = number
                loop.start = base.parts.get("start")
            made.kind = "list"
            made.parts = {0: number, 1: Value(deps=values.join_deps([iterated]), loops=tuple(self._loops))}
            made.parts[1].flags.add("element")
        elif base.kind == "attribute" and base.label in ("param_groups", "parameters"):
            made.kind = "group"
            made.of = base.of
        elif base.kind == "list" and base.parts and base.is_open:
            if len(base.parts) == 1:
                return next(iter(base.parts.values()))
            made.deps |= frozenset(base.parts.values())
        elif base.kind in ("checkpoint", "field"):
            return Value("field", "", self._path(), node.lineno, of=base)
        return made


def _shift(value: Value, offset: int) -> Value:
    """Return a number plus a constant."""
    if value.kind in ("loop", "field", "shifted", "option", "counter"):
        of = value.of if value.kind == "shifted" else value
        made = Value("shifted", value.label, value.path, value.line, of=of, deps=frozenset([value]))
        made.offset = value.offset + offset if value.kind == "shifted" else offset
        return made
    if value.kind == "const" and isinstance(value.key, int):
        return Value("const", value.label, value.path, value.line, key=value.key + offset, loops=value.loops)
    return Value("unknown", deps=values.join_deps([value]), line=value.line)


def _bind(target: Any, value: Value, names: dict[str, Value]) -> None:
    if isinstance(target, ast.Name):
        names[target.id] = value
    elif isinstance(target, ast.Tuple | ast.List):
        for number, part in enumerate(target.elts):
            _bind(part, value.parts.get(number, Value()), names)
