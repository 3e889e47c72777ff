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

from bootfile.console import outputs
from bootfile.console.words import mask_words
from bootfile.ground import accelerator
from bootfile.ground.errors import BadInput, print_line
from bootfile.ground.exit_codes import DIFFERS
from bootfile.processes import signals
from bootfile.prove import proof, verdict
from bootfile.prove.cases import REFERENCE, SAME
from bootfile.prove.job import Job
from bootfile.prove.own_job import OwnJob
from bootfile.prove.proof import FindModules
from bootfile.prove.verdict import Row
from bootfile.records import read_starts

# why sums on a GPU round in another way each time, and what to do
_ANY_ORDER = "some operators add in any order: torch.use_deterministic_algorithms(True)"
_BENCHMARK = "torch.backends.cudnn.benchmark"
_SAME_ORDER = " R307 "  # a rule of lint for what no restart shows: each epoch has the same order
_UNWIND = 60.0  # seconds after Ctrl-C to end the job's processes, and delete its runs


def run(args: argparse.Namespace, options: list[str], find_modules: FindModules) -> int:
    """Run the job, print the verdict and return the exit code. The arguments are those of cli.main(), parsed.
    Raises BadInput."""
    limits = list[str]()
    if args.to:
        record = f"{os.path.splitext(args.to)[0]}.json"
        if record == args.to:
            raise BadInput(f"--to {args.to}: expected the name of the page, such as proof.html")
        outputs.check_replaceable(args.to, re.compile(proof.PAGE_MARK), args.force)
        outputs.check_replaceable(record, re.compile(proof.MARK, re.MULTILINE), args.force)
        importlib.import_module("bootfile.console.page")  # it is refused without jinja2 before the runs
        # before the runs: a change of the code while they run makes the proof invalid
        code, limits = proof.describe_code(args.job, find_modules)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # under nohup it stays ignored
            # it ends as an exception does: the blocks that it is in end the job's processes
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    signals.unwind_within(_UNWIND)
    with contextlib.ExitStack() as stack:
        folder = args.keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="bootfile-prove-"))
        outputs.make_empty(folder)
        root = os.path.abspath(folder)
        common = (args.job, options, root, args.kills)
        files = (args.compare, args.resume_with, args.stops or 0)
        job = Job(*common, *files) if args.compare else OwnJob(*common)
        # also after an error or a signal, and before the folder of the runs is deleted
        stack.callback(job.close)
        rows = _run_all(job)
        text, exit_code = verdict.conclude(job, rows, _find_cause(job, rows))
        covered, uncovered = job.describe_coverage([row.case.name for row in rows if row.case.kills])
        findings = _lint(args.job) if args.compare else []
        notes = [f"covered: {covered}"] if covered else []
        notes += [f"note: {line}" for line in verdict.find_notes(rows)]
        notes += [f"note: {line}" for line in findings if _SAME_ORDER in line]
        notes += [f"not checked: {line}" for line in (*job.unchecked, *uncovered)]
        notes += [f"note: {line}" for line in limits]
        lines = [text, *notes]
        if exit_code == DIFFERS and findings:
            lines += [f"lint: {line}" for line in findings]
            lines.append(f"lint: bootfile lint {shlex.quote(args.job)} shows the fixes")
        for line in lines:
            print_line(line)
        if args.to:
            facts = proof.describe(job, code, rows, (text, exit_code), notes)
            proof.write(args.to, record, facts)
            print_line(f"page: {args.to}")
            print_line(f"proof: {record}")
    return exit_code


def check(path: str, job: str | None, find_modules: FindModules) -> int:
    """Print what has changed since a proof, and return the exit code. job: the path of its job, if that was
    moved. Raises BadInput."""
    old_proof = proof.read(path)
    job = job or old_proof.job
    if not os.path.isfile(job):
        raise BadInput(f"{job}: no such file: use --check in the folder of the proof, or name JOB")
    changes = proof.find_changes(old_proof, job, find_modules)
    for line in changes or [f"still holds: {old_proof.verdict}", *old_proof.notes]:
        print_line(line)
    return DIFFERS if changes else 0


def _find_cause(job: Job, rows: list[Row]) -> str:
    """Return why a run differs, in words; "" if none differs, or if the reason is not known. Raises
    BadInput."""
    row = verdict.find_difference(rows)
    # an error, or other samples, are a cause themselves
    if not row or row.different[0].part in ("", "data"):
        return ""
    if row.case == SAME:
        return _explain_bits(job.folder(REFERENCE))
    return job.find_cause(row.case) if row.case.kills else ""


def _explain_bits(folder: str) -> str:
    """Return why two runs with the same samples have other bits on a GPU; "" if no reason is known. folder:
    of one of the runs."""
    starts = read_starts(folder)
    if not starts:  # only a job of Bootfile records what it computed with
        return f"if it computes on the GPU: {_ANY_ORDER}" if accelerator.count() else ""
    facts = starts[-1]["environment"]
    if "GPU" in facts and "deterministic" not in str(facts.get("settings")).split():
        return f"{facts['GPU']}: {_ANY_ORDER}"
    if "GPU" in facts and "benchmark" in str(facts.get("cuDNN")).split():
        return f"{facts['GPU']}: cuDNN takes the algorithm that is fastest by time: {_BENCHMARK} = False"
    return ""


def _lint(script: str) -> list[str]:
    """Return what `bootfile lint` finds in a script: it may explain a difference."""
    from bootfile.lint import engine  # only for a script without Bootfile

    with contextlib.suppress(BadInput):  # it is not Python, or cannot be read
        findings = [finding for finding in engine.lint(script) if not finding.is_hint]
        return [f"{finding.path}:{finding.line}: {finding.rule} {finding.message}" for finding in findings]
    return []


def _run_all(job: Job) -> list[Row]:
    """Make the reference and the other runs, print a result for each, and return their rows. Raises
    BadInput."""
    cases = job.plan()
    began = time.monotonic()
    words, _ = mask_words(job.command()[1:])
    print_line(f"{len(cases) + 1} runs of {shlex.join(words)}")
    print_line(f"[1/{len(cases) + 1}] {REFERENCE}")
    job.run_reference()
    seconds = time.monotonic() - began
    rows: list[Row] = []
    for number, case in enumerate(cases, 1):  # the list may grow
        # a killed run makes some steps twice
        left = seconds * sum(2 if each.kills or each.stops else 1 for each in cases[number - 1 :])
        print_line(f"[{number + 1}/{len(cases) + 1}] {case.name} (at most {left:.0f} s left)")
        row = verdict.run(job, case)
        rows.append(row)
        texts = [row.done, *(f"{line.part} {line.text}".strip() for line in row.lines), row.result]
        for text in filter(None, texts):
            print_line(f"      {text}")
        cases[number:number] = verdict.needs_more(row)  # they are next
    return rows
