"""Follow expressions: the abstract value of each. `_of_NODE()` returns that of a kind of syntax node."""

import ast
import builtins
import math
import sys
from typing import Any

from bootfile.lint import values
from bootfile.lint.calls import Calls
from bootfile.lint.functions import VAGUE_OR_OPTION
from bootfile.lint.record import MOST_STEPS, Class, Condition, Function, Module, TooLarge
from bootfile.lint.sources import is_property, unparse
from bootfile.lint.values import Value, root

# math.inf, numpy.Inf, sys.maxsize
_LARGEST = {"inf": math.inf, "infty": math.inf, "infinity": math.inf, "maxsize": sys.maxsize}


class Expressions(Calls):
    """Follows expressions."""

    def value(self, node: Any) -> Value:
        """Return the value of an expression."""
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise TooLarge
        if node is None:
            return Value("none")
        method = getattr(self, f"_of_{type(node).__name__.lower()}", self._of_other)
        result: Value = method(node)
        return result

    def _of_other(self, node: ast.AST) -> Value:
        """Return an unknown value of an expression without a method: what it is made of is followed."""
        inner = [self.value(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        return Value("unknown", deps=values.join_deps(inner))

    def _of_constant(self, node: ast.Constant) -> Value:
        if node.value is None:
            return Value("none", line=node.lineno, loops=tuple(self._loops))
        return Value("const", key=node.value, line=node.lineno, loops=tuple(self._loops))

    def _of_name(self, node: ast.Name) -> Value:
        frame = self.frames[-1]
        # as Python: the function, the function around it, the module, and then the builtins
        for names in (frame.names, frame.outer, frame.module.names):
            if names is not None and node.id in names:
                return names[node.id]
        if hasattr(builtins, node.id):
            return Value("module", node.id)
        return Value("unknown", node.id, flags={"undefined"})

    def _of_attribute(self, node: ast.Attribute) -> Value:
        owner = self.value(node.value)
        if owner.kind == "module" and isinstance(owner.cls, Module):
            return owner.cls.names.get(node.attr) or self._inner_module(owner, node)
        if owner.kind == "module" and node.attr.lower() in _LARGEST:
            return Value("const", key=_LARGEST[node.attr.lower()], line=node.lineno, loops=tuple(self._loops))
        if owner.kind == "module":
            return Value("module", f"{owner.label}.{node.attr}", owner.path, key=owner.key)
        # `ddp.module` is the bare model; a compiled model passes the attribute on to the wrapped one in it
        inner = owner
        while node.attr == "module" and inner.kind == "wrapped" and inner.key != "module." and inner.of:
            inner = inner.of
        owner = inner if inner.kind == "wrapped" else owner
        if owner.kind == "wrapped" and node.attr in ("module", "_orig_mod") and owner.of is not None:
            return owner.of
        base = root(owner)
        if node.attr in base.parts and base.kind not in ("dict", "list", "field", "checkpoint"):
            return base.parts[node.attr]
        method = self.find_method(base, node.attr)
        if method is not None:
            # a property is a call without brackets
            is_called = is_property(method.node)
            bound = Value("method", node.attr, of=owner, cls=method)
            return self._call_function(method, [owner], {}, node) if is_called else bound
        constant = self._find_class_value(base.cls, node.attr) if isinstance(base.cls, Class) else None
        return constant or self._unknown_attribute(owner, base, node)

    def _inner_module(self, owner: Value, node: ast.Attribute) -> Value:
        """Return a module in a package of the project: `import utils`, `utils.logging.save()`."""
        full = f"{owner.label}.{node.attr}"
        path = self.project.find(full, 0, self._path())
        module = self._load(path) if path else None
        return Value("unknown", node.attr) if module is None else Value("module", full, path, cls=module)

    def _unknown_attribute(self, owner: Value, base: Value, node: ast.Attribute) -> Value:
        if base.kind in ("checkpoint", "field"):
            return Value("field", node.attr, of=base, key=node.attr, deps=frozenset([owner]))
        is_open = base.kind in ("instance", "unknown", "self", "none", "attribute")
        is_open |= base.kind == "model" and "by_name" in base.flags
        kind = (values.kind_of_name(node.attr) if is_open else "") or "attribute"
        kind = "option" if base.kind in ("args", "option") else kind
        made = self._make(kind, node, label=node.attr, of=owner)
        made.deps = frozenset([owner])
        # kept: the next use of `self.optimizer` is the same object
        if kind != "attribute":
            base.parts[node.attr] = made
        if kind not in ("attribute", "option"):
            made.flags.add("by_name")
            made.of = None
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
                value.label = str(name.key) if value.kind in ("const", "none") else value.label
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

    def _of_starred(self, node: ast.Starred | ast.Await) -> Value:
        return self.value(node.value)

    _of_await = _of_starred

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
        # `new if new > best else best`
        if body is not orelse and {body, orelse} <= values.list_deps(test):
            return self._make("unknown", node, [body, orelse], key="max")
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
            if result.kind not in (*VAGUE_OR_OPTION, "compared", "modulo"):
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
            made = self._make("dict", node)
            self._merge_dict(made, left)
            self._merge_dict(made, right)
            return made
        # `epoch + 1`: the rules about epochs need the number and what was added
        sign = {ast.Add: 1, ast.Sub: -1}.get(type(operator), 0)
        if sign and _is_int(right):
            return _shift(left, sign * right.key)
        if sign == 1 and _is_int(left):
            return _shift(right, left.key)
        # `10**9`
        is_power = isinstance(operator, ast.Pow) and _is_int(left) and _is_int(right)
        if is_power and left.key <= 10 and 0 <= right.key <= 20:
            return Value("const", key=left.key**right.key, line=node.lineno, loops=tuple(self._loops))
        is_text = left.kind == "text" or (left.kind == "const" and isinstance(left.key, str))
        is_modulo = isinstance(operator, ast.Mod) and not is_text
        made = Value("modulo" if is_modulo else "unknown", line=node.lineno, node=node)
        made.deps = values.join_deps([left, right])
        made.key = right.key if is_modulo and right.kind == "const" else None
        made.options = {0: left, 1: right}  # the parts of a path, for file_names.py
        # `folder / name`, `folder + name` and `"%s/last.pt" % folder` are paths
        if isinstance(operator, ast.Div | ast.Add | ast.Mod) and "path" in (left.kind, right.kind):
            made.kind = "path"
        return made

    def _of_joinedstr(self, node: ast.JoinedStr) -> Value:
        inner = [self.value(part.value) for part in node.values if isinstance(part, ast.FormattedValue)]
        deps, parts = values.join_deps(inner), {**dict(enumerate(inner))}
        return Value("text", deps=deps, line=node.lineno, node=node, options=parts)

    def _of_lambda(self, node: ast.Lambda) -> Value:
        frame = self.frames[-1]
        outer = frame.names if frame.function else None
        return Value("function", "lambda", self._path(), node.lineno, cls=Function(node, frame.module, outer))


def _is_int(value: Value) -> bool:
    return value.kind == "const" and isinstance(value.key, int)


def _shift(value: Value, offset: int) -> Value:
    """Return a number plus a constant."""
    if value.kind in ("loop", "field", "shifted", "option", "counter"):
        of = value.of if value.kind == "shifted" else value
        total = offset + (value.offset if value.kind == "shifted" else 0)
        deps = frozenset([value])
        return Value("shifted", value.label, value.path, value.line, of=of, offset=total, deps=deps)
    if _is_int(value):
        return Value("const", value.label, value.path, value.line, key=value.key + offset, loops=value.loops)
    return Value("unknown", deps=values.join_deps([value]), line=value.line)
