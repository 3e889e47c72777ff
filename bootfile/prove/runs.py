"""Make the runs of a proof, or look up what has changed since one."""

import argparse
import contextlib
import importlib
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable

from bootfile.console import outputs
from bootfile.console.words import mask_words
from bootfile.ground.errors import BadInput, print_line
from bootfile.ground.exit_codes import DIFFERS
from bootfile.processes import signals
from bootfile.prove import coverage, proof, trial, verdict
from bootfile.prove.cases import REFERENCE
from bootfile.prove.job import Job
from bootfile.prove.modules import Modules, find_modules
from bootfile.prove.other_job import OtherJob
from bootfile.prove.own_job import OwnJob
from bootfile.prove.verdict import Row

_UNWIND = 60.0  # seconds after Ctrl-C to end the job's processes, and delete its runs


def run(
    args: argparse.Namespace,
    options: list[str],
    find_modules: Callable[[str], Modules] = find_modules,
) -> int:
    """Run the job, print the verdict and return the exit code.

    args: those of the verb.
    options: of the job.
    find_modules: finds the modules of a job whose digests are in the proof.
    Raises BadInput.
    """
    limits = list[str]()
    if args.to:
        record = f"{os.path.splitext(args.to)[0]}.json"
        if record == args.to:
            raise BadInput(f"--to {args.to}: expected the name of the page, such as proof.html")
        outputs.check_replaceable(args.to, re.compile(proof.PAGE_MARK), args.force)
        outputs.check_replaceable(record, re.compile(proof.MARK, re.MULTILINE), args.force)
        importlib.import_module("bootfile.console.page")  # it is refused without jinja2 before the runs
        code, limits = proof.describe_code(args.job, find_modules)  # before the runs: a later change counts
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # under nohup it stays ignored
            signal.signal(number, lambda number, frame: sys.exit(128 + number))  # and end the job's processes
    signals.unwind_within(_UNWIND)
    with contextlib.ExitStack() as stack:
        folder = args.keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="bootfile-prove-"))
        outputs.make_empty(folder)
        words = (args.job, options, os.path.abspath(folder), args.kills)
        job: Job
        if args.compare:
            job = OtherJob(*words, compare=args.compare, resume_with=args.resume_with)
        else:
            job = OwnJob(*words)
        stack.callback(job.close)
        rows = _run_all(job)
        text, exit_code = verdict.conclude(job, rows)
        covered, uncovered = coverage.describe(job, rows)
        notes = [f"covered: {covered}"] * bool(covered)
        notes += [f"note: {line}" for line in verdict.find_notes(rows)]
        notes += [f"not checked: {line}" for line in (*job.unchecked, *uncovered)]
        notes += [f"note: {line}" for line in limits]
        print(text, *notes, sep="\n")
        if args.to:
            facts = proof.describe(job, code, rows, (text, exit_code), notes)
            proof.write(args.to, record, facts)
            print(f"page: {args.to}", f"proof: {record}", sep="\n")
    return exit_code


def check(
    path: str,
    job: str | None,
    find_modules: Callable[[str], Modules] = find_modules,
) -> int:
    """Print what has changed since a proof. job: the one of the proof, if it is not where it was. Return the
    exit code. Raises BadInput."""
    known = proof.read(path)
    job = job or known.job
    if not os.path.isfile(job):
        raise BadInput(f"{job}: no such file: use --check in the folder of the proof, or name JOB")
    changes = proof.find_changes(known, job, find_modules)
    for line in changes or [f"still holds: {known.verdict}", *known.notes]:
        print_line(line)
    return DIFFERS if changes else 0


def _run_all(job: Job) -> list[Row]:
    cases, began = job.plan(), time.monotonic()
    print(f"{len(cases) + 1} runs of {shlex.join(mask_words(job.command()[1:])[0])}", flush=True)
    print(f"[1/{len(cases) + 1}] {REFERENCE}", flush=True)
    try:
        job.run_reference()
    except trial.Failed as error:
        raise BadInput(str(error)) from error
    seconds = time.monotonic() - began
    rows = list[Row]()
    for number, case in enumerate(cases, 2):
        left = seconds * sum(2 if each.kills else 1 for each in cases[number - 2 :])
        print(f"[{number}/{len(cases) + 1}] {case.name} (at most {left:.0f} s left)", flush=True)
        rows.append(verdict.run(job, case))
        lines = [f"{line.part} {line.text}".strip() for line in rows[-1].lines]
        for text in filter(None, (rows[-1].done, *lines, rows[-1].result)):
            print(f"      {text}", flush=True)
        cases[number - 1 : number - 1] = verdict.needs_more(rows[-1])  # the loop has them next
    return rows
