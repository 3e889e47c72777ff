"""Repairs of the moment of a save: at SIGTERM, and not between two steps of the optimizer."""

import ast
from typing import Any

from bootfile.fix.checkpoint import Job
from bootfile.fix.places import CannotEdit
from bootfile.lint.record import Event
from bootfile.lint.sources import unparse


def save_at_sigterm(job: Job) -> None:
    """Save at the end of the epoch in which SIGTERM comes, and exit (R801)."""
    save: Event = job.find("save")
    scope, facts, loop = job.scope, job.facts, save.loops[0]
    if facts.is_distributed() or len(facts.loops) != 1:
        raise CannotEdit("the processes would have to agree on the epoch after which they exit")
    top: Any = scope.statement(save.path, save.node)
    while top not in loop.node.body and scope.parents[save.path].get(top) is not None:
        top = scope.parents[save.path][top]
    if save.path != loop.path or top not in loop.node.body:
        raise CannotEdit("the checkpoint is saved in another function than the loop")
    if any(
        one.is_true
        for one in save.conditions
        if isinstance(one.node, ast.If) and one.node in ast.walk(loop.node)
    ):
        raise CannotEdit("a condition decides whether an epoch is saved")
    block = loop.node.body
    last = block[-1]
    if (
        isinstance(last, ast.If | ast.For | ast.While | ast.Break | ast.Continue | ast.Return)
        and last is not top
    ):
        raise CannotEdit("the epoch does not end in one place")
    script = job.open(loop.path)
    signal, threading, system = (script.add_import(name) for name in ("signal", "threading", "sys"))
    if "sigterm" in script.find_bound():
        raise CannotEdit("the name sigterm has another meaning here")
    script.insert_before(
        loop.node,
        [
            "# SIGTERM: save at the end of the epoch, and exit",
            f"sigterm = {threading}.Event()",
            f"{signal}.signal({signal}.SIGTERM, lambda *_: sigterm.set())",
        ],
    )
    script.insert_after(last, ["if sigterm.is_set():", f"    {system}.exit(128 + {signal}.SIGTERM)"])


def save_after_step(job: Job) -> None:
    """Save after a step of the optimizer (R602)."""
    save, step = job.find("save"), job.find("step")
    scope = job.scope
    tests = [one for one in step.conditions if isinstance(one.node, ast.If)]
    around: Any = scope.parents[save.path][scope.statement(save.path, save.node)]
    if save.path != step.path or not tests or not isinstance(around, ast.If) or around.orelse:
        raise CannotEdit("the tests of the step and of the save are not in one loop")
    test = tests[-1]
    names = {part.id for part in ast.walk(test.node.test) if isinstance(part, ast.Name)}
    inner = save.loops[-1]
    body = inner.node.body
    changed = {
        one.id
        for part in body
        for one in ast.walk(part)
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
    }
    if (
        inner.node is not step.loops[-1].node
        or test.node not in body
        or around not in body
        or names & changed
    ):
        raise CannotEdit("the test of the step may have another result where the script saves")
    script = job.open(save.path)
    if "save_is_due" in script.find_bound():
        raise CannotEdit("the name save_is_due has another meaning here")
    text = unparse(test.node.test) if test.is_true else f"not ({unparse(test.node.test)})"
    text = f"({text})" if isinstance(test.node.test, ast.BoolOp) and test.is_true else text
    script.insert_before(inner.node, ["save_is_due = False"])
    script.insert_before(around, [f"save_is_due = save_is_due or {unparse(around.test)}"])
    script.replace(around.test, f"save_is_due and {text}")
    script.insert_first(around, ["save_is_due = False"])
    job.notes.append("the checkpoint is saved at the next step of the optimizer")
