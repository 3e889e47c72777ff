"""Repairs of the moment of a save: at SIGTERM, and not between two steps of the optimizer."""

import ast
from typing import Any

from bootfile.fix.checkpoint import Job, is_distributed, list_in_body
from bootfile.fix.places import CannotEdit
from bootfile.lint.record import Event
from bootfile.lint.sources import is_modulo, unparse


def save_at_sigterm(job: Job) -> None:
    """Save at the end of the epoch in which SIGTERM comes, and exit (R801)."""
    facts = job.facts
    if is_distributed(facts) or len(facts.loops) != 1 or facts.fullest_save is None:
        raise CannotEdit("the processes would have to agree on the epoch after which they exit")
    # of the calls that write the whole checkpoint, the one that the fewest tests decide about
    whole = facts.fullest_save.event.node
    calls = [one.event for one in facts.training_saves if one.event.node is whole]
    save: Event = min(calls, key=lambda one: len(one.conditions))
    loop = save.loops[0]
    inside = list_in_body(job, loop, save)
    inside = [part for part in inside if isinstance(part, ast.Expr)] or inside
    last = loop.node.body[-1]
    if not inside or isinstance(last, ast.Break | ast.Continue | ast.Return | ast.Raise):
        raise CannotEdit("the place of the save in the loop is not known, or the epoch does not end there")
    # the tests between the loop and the save
    depth = min(len(one.conditions) for one in facts.events if one.loops[:1] == (loop,))
    tests = [one for one in save.conditions[depth:] if isinstance(one.node, ast.If)]
    script = job.open(loop.path)
    test = tests[0].node.test if len(tests) == 1 and tests[0].node in inside and tests[0].is_true else None
    # `if args.save and epoch % 5 == 0` may mean that nothing is to be saved
    is_rhythm = isinstance(test, ast.Compare) or isinstance(getattr(test, "op", None), ast.Or)
    must_stop = "sigterm.is_set()"
    if test is not None and is_rhythm and is_modulo(test):
        # the flag is read once in an epoch: a signal after the test waits for the next one
        script.wrap(test, "(", ") or must_stop")
        script.insert_before(tests[0].node, [f"must_stop = {must_stop}"])
        must_stop = "must_stop"
    elif tests:
        raise CannotEdit("a condition decides whether an epoch is saved")
    signal, system, threading = (script.add_import(name) for name in ("signal", "sys", "threading"))
    if {"sigterm", "must_stop"} & script.find_bound():
        raise CannotEdit("the names sigterm and must_stop have another meaning here")
    script.insert_before(
        loop.node,
        [
            "# SIGTERM: save at the end of the epoch, and exit",
            f"sigterm = {threading}.Event()",
            f"{signal}.signal({signal}.SIGTERM, lambda *_: sigterm.set())",
        ],
    )
    script.insert_after(last, [f"if {must_stop}:", f"    {system}.exit(128 + {signal}.SIGTERM)"])


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
    nodes = [node for statement in body for node in ast.walk(statement) if isinstance(node, ast.Name)]
    changed = {node.id for node in nodes if isinstance(node.ctx, ast.Store)}
    is_in_body = inner.node is step.loops[-1].node and test.node in body and around in body
    if not is_in_body or names & changed:
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
