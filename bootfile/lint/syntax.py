"""Questions about the syntax tree of a script."""

import ast
import contextlib
import re
from typing import Any

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LISTINGS = re.compile(r"^(os\.listdir|os\.scandir|glob\.glob|glob\.iglob|glob|listdir|iglob)$")
_PATH_LISTINGS = ("iterdir", "glob", "rglob")


def unparse(node: ast.AST) -> str:
    """Return the text of a node; "" if it is nested too deeply. The node keeps its text: a function that is
    called often has the same conditions each time."""
    text = getattr(node, "bootfile_text", None)
    if text is None:
        try:
            text = ast.unparse(node)
        except (RecursionError, ValueError, AttributeError):
            text = ""
        with contextlib.suppress(AttributeError):
            node.bootfile_text = text  # type: ignore[attr-defined]
    return str(text)


def list_called(tree: ast.Module) -> set[str]:
    """Return the names of the functions that a module calls or gives to others."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            names.add(node.id)
    return names


def list_assigned(function: Any) -> set[str]:
    """Return the names to which a function assigns. The node keeps them."""
    names: set[str] | None = getattr(function, "bootfile_assigned", None)
    if names is None:
        names = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
        function.bootfile_assigned = names
    return names


def is_modulo(node: Any) -> bool:
    """Return whether an expression has the rest of a division in it; a text such as "%d" % step is none."""
    if node is None:
        return False
    for part in ast.walk(node):
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod):
            is_text = isinstance(part.left, ast.JoinedStr) or (
                isinstance(part.left, ast.Constant) and isinstance(part.left.value, str)
            )
            if not is_text:
                return True
    return False


def place_of_entry(node: Any) -> tuple[int, int]:
    if node.name in ("main", "main_worker", "train_net", "train_main", "run"):
        return 0, node.lineno
    return 1, node.lineno


def find_counted(node: Any) -> Any:
    """Return the target of `x += ...`, `x -= 1` or `x = x + 1`; None for other nodes."""
    if isinstance(node, ast.AugAssign):
        is_sum = isinstance(node.op, ast.Add | ast.Sub) and isinstance(node.target, ast.Name | ast.Attribute)
        return node.target if is_sum else None
    if not isinstance(node, ast.Assign) or len(node.targets) > 1 or not isinstance(node.value, ast.BinOp):
        return None
    target = node.targets[0]
    is_sum = isinstance(node.value.op, ast.Add) and isinstance(node.value.right, ast.Constant)
    if (
        is_sum
        and isinstance(target, ast.Name | ast.Attribute)
        and unparse(target) == unparse(node.value.left)
    ):
        return target
    return None


def walk_loop(node: Any) -> list[ast.AST]:
    """Return the nodes in the body of a loop, without those of inner functions."""
    nodes: list[ast.AST] = []
    todo: list[ast.AST] = list(node.body)
    while todo:
        current = todo.pop()
        if isinstance(current, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            continue
        nodes.append(current)
        todo += ast.iter_child_nodes(current)
    return nodes


def is_main_test(node: ast.expr) -> bool:
    if not isinstance(node, ast.Compare) or not isinstance(node.left, ast.Name):
        return False
    return node.left.id == "__name__" and isinstance(node.ops[0], ast.Eq)


def is_property(node: Any) -> bool:
    return any(unparse(decorator) in ("property", "cached_property") for decorator in node.decorator_list)


def trains_itself(node: ast.ClassDef) -> bool:
    """Return whether a module has its own optimizers, as those of GANs do."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr in ("backward", "optim", "Adam", "zero_grad"):
            return True
    return False


def list_above(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> list[Any]:
    """Return the nodes around a node, from the inside."""
    above = []
    while node in parents:
        node = parents[node]
        above.append(node)
    return above


def is_listing(node: ast.Call) -> bool:
    """Return whether a call lists the files of a folder."""
    name = unparse(node.func)
    is_method = isinstance(node.func, ast.Attribute) and node.func.attr in _PATH_LISTINGS
    return _LISTINGS.match(name) is not None or (is_method and "glob." not in name)


def ignores_index(function: Any) -> bool:
    """Return whether a __getitem__() does not read the number of the sample: it draws one."""
    arguments = function.args.args
    names = {part.id for part in ast.walk(function) if isinstance(part, ast.Name)}
    return len(arguments) > 1 and arguments[1].arg not in names
