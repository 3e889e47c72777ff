"""What lint says about the cases of the zoo, and about the scripts of prove's tests.

    python -m tests.lint.zoo    prints a line for each case

usual_bugs.py and leaves_out.py have a switch for each bug. specialize() writes the script that a user would
have: without the switch, with the bug.
"""

import ast
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from bootfile.lint.engine import lint
from tests.conftest import ROOT
from tests.zoo.cases import CASES, STATES

PROVE = ROOT / "tests" / "bootfile" / "prove"
# bug of usual_bugs.py -> the rule that names it
USUAL = {
    "ema": "R105", "sgd_optimizer": "R101", "cosine": "R103", "scaler": "R104", "dropout": "R401",
    "augmentation": "R401", "shuffle": "R401", "loader_generator": "R106", "mask_generator": "R106",
    "numpy": "R401", "python": "R401", "epoch": "R302", "warmup": "R107", "best": "R108", "patience": "R107",
    "set_epoch": "R307", "repeated_step": "R301", "accumulation": "R602", "order": "R305",
    "scheduler": "R103",
}  # fmt: skip
LEAVES_OUT = {
    "optimizer": "R101", "schedule": "R103", "random": "R401", "position": "R107",
    "ema": "R105",
}  # fmt: skip


class Named(NamedTuple):
    """One case. rule: the one that names it; "" if the script does not show it, and why: the reason."""

    name: str
    text: str
    rule: str
    why: str = ""


class _Fold(ast.NodeTransformer):
    """Replaces names by constants, and removes the branches that they decide."""

    def __init__(self, values: dict[str, object]):
        self._values = values

    def visit_Name(self, node):
        if isinstance(node.ctx, ast.Load) and node.id in self._values:
            return ast.copy_location(ast.Constant(self._values[node.id]), node)
        return node

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if ast.unparse(node) in self._values:
            return ast.copy_location(ast.Constant(self._values[ast.unparse(node)]), node)
        return node

    def visit_If(self, node):
        self.generic_visit(node)
        value = _evaluate(node.test)
        if value is None:
            return node
        return (node.body if value[0] else node.orelse) or []

    def visit_IfExp(self, node):
        self.generic_visit(node)
        value = _evaluate(node.test)
        if value is None:
            return node
        return node.body if value[0] else node.orelse

    def visit_BoolOp(self, node):
        """Drop the parts that are constants: `sampler and True`."""
        self.generic_visit(node)
        known = [(part, _evaluate(part)) for part in node.values]
        is_and = isinstance(node.op, ast.And)
        for part, value in known:
            if value is not None and bool(value[0]) != is_and:
                return ast.copy_location(ast.Constant(not is_and), part)
        rest = [part for part, value in known if value is None]
        if not rest:
            return ast.copy_location(ast.Constant(is_and), node)
        if len(rest) == 1:
            return rest[0]
        node.values = rest
        return node


def _evaluate(node):
    """Return (the value,) of an expression of constants; None for others."""
    for part in ast.walk(node):
        if not isinstance(part, ast.Compare | ast.Constant | ast.Tuple | ast.cmpop | ast.expr_context):
            return None
    return (eval(compile(ast.Expression(node), "test", "eval")),)


def specialize(text: str, constants: dict[str, object], removed: dict[str, list[str]]) -> str:
    """Return a script whose names have constant values. removed: text of a statement -> what replaces it."""
    lines = text
    for old, new in removed.items():
        if old not in lines:
            raise ValueError(f"the script does not have {old!r}")
        lines = lines.replace(old, "\n".join(new))
    tree = _Fold(constants).visit(ast.parse(lines))
    for node in ast.walk(tree):
        if isinstance(getattr(node, "body", None), list) and not node.body:
            node.body = [ast.Pass()]
    return ast.unparse(ast.fix_missing_locations(tree))


def write_usual(bug: str) -> str:
    """Return usual_bugs.py with one bug."""
    text = (PROVE / "usual_bugs.py").read_text(encoding="utf-8")
    left_out = {
        "cosine": ["scheduler"], "sgd_optimizer": ["optimizer"], "all": ["optimizer", "scheduler", "random"],
        "dropout": ["random"], "augmentation": ["random"], "shuffle": ["random"],
        "loader_generator": ["generator"], "mask_generator": ["generator"],
    }.get(bug, [bug])  # fmt: skip
    in_progress = {
        "epoch": "epoch", "warmup": "step", "best": "best", "patience": "patience", "order": "batch",
    }.get(bug)  # fmt: skip
    pops = [f"    state.pop({name!r}, None)" for name in left_out]
    progress = [f'    state["progress"].pop({in_progress!r}, None)'] if in_progress else []
    removed = {
        "    for name in LEFT_OUT.get(BUG, [BUG]):\n        state.pop(name, None)\n": [*pops, ""],
        '    state["progress"].pop(IN_PROGRESS.get(BUG), None)\n': [*progress, ""],
        "BUG = args.bug\n": [""],
    }
    return specialize(text, {"BUG": bug}, removed)


def write_leaves_out(name: str) -> str:
    """Return leaves_out.py without one part of the checkpoint."""
    text = (PROVE / "leaves_out.py").read_text(encoding="utf-8")
    removed = {"        state.pop(args.leave_out, None)\n": [f"        state.pop({name!r}, None)", ""]}
    return specialize(text, {"args.leave_out": name}, removed)


def list_cases() -> list[Named]:
    """Return all cases with a defect."""
    cases = [Named(f"usual_bugs {bug}", write_usual(bug), rule) for bug, rule in USUAL.items()]
    cases += [Named(f"leaves_out {name}", write_leaves_out(name), rule) for name, rule in LEAVES_OUT.items()]
    for case in [*CASES, *STATES]:
        # the order in which a scheduler is made has no rule
        if not case.thread or case.name == "torch-sequential":
            continue
        program = case.command.split()[0]
        text = (ROOT / "tests" / "zoo" / program).read_text(encoding="utf-8")
        if case.command.split()[1:]:
            text = specialize(text.replace("OPTIONS[0]", repr(case.command.split()[1])), {}, {})
        cases.append(Named(case.name, text, "R701"))
    return cases


def find(case: Named) -> list[str]:
    """Return the rules that lint reports in the script of a case, hints with an h."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(case.text, encoding="utf-8")
        shutil.copy(ROOT / "tests" / "zoo" / "start.py", folder)
        return [finding.rule + "h" * finding.is_hint for finding in lint(str(path))]


def main() -> int:
    for case in list_cases():
        rules = find(case)
        is_named = case.rule in rules or f"{case.rule}h" in rules
        print(f"{'named ' if is_named else 'MISSED'} {case.rule} {case.name:32}{rules}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
