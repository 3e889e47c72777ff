"""Repair the findings of `bootfile lint` in a training script.

    bootfile fix train.py            print the repairs as a diff
    bootfile fix train.py --write    change the files; train.py.orig has the old text
    bootfile fix --exact train.py    make its loop one of bootfile.Exact, which continues exactly after a kill
    bootfile fix --ddp train.py      add blocks with which torchrun trains it on several processes
    bootfile fix --prove train.py --compare "OUT/*.pt" --resume_with "--resume OUT/last.pt" -- --out OUT

Nothing is executed without --prove. A repair changes what a restart does, and nothing else of the file:
comments, quotes and line ends stay. lint reads the new text: a repair is left out if the finding is still
there, or a new one is.
What cannot be repaired safely is listed with the reason. A line that says "note" tells what else changes.

--prove runs `bootfile prove` with the script as it is, and with the repairs in a copy of the working folder
that has links to everything else. It prints what differed before, the lines of the patch, what differs
afterwards, and whether an uninterrupted run has the same weights, bit for bit.

Exit codes: 0 no findings are left, or hints only; 1 findings are left, or --exact or --ddp cannot place a
change, and changes nothing; 2 bad input.
With --prove those of `bootfile prove`: 0 exact with the repairs, and the same weights without a restart; 20
something differs; 21 unverified; 2 bad input.
"""

import difflib
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bootfile.console.parser import Parser, positive_int
from bootfile.ground.errors import BadInput, print_line
from bootfile.lint.cli import as_text
from bootfile.lint.table import RULES
from bootfile.prove.cli import split_words

if TYPE_CHECKING:
    from bootfile.fix.engine import Result

LEFT = 1


def main(arguments: list[str]) -> int:
    """Print or write the repairs of a script, and return the exit code. Raises BadInput."""
    parser = Parser(__doc__, "bootfile fix")
    add = parser.add_argument
    add("script", metavar="FILE", help="a training script; the modules of its project are repaired, too")
    add("--exact", action="store_true", help="put in the lines of guides/own_loop.md")
    add("--ddp", action="store_true", help="put in the marked blocks of several processes")
    add("--write", action="store_true", help="change the files, and keep each old one as FILE.orig")
    add("--only", metavar="RULES", default="", help="repair these findings only; such as R103,R301")
    add("--no_hints", action="store_true", help="leave out what may be intended")
    add("--json", action="store_true", help="print one JSON object")
    add("--prove", action="store_true", help="run the script before and after, and compare")
    add("--compare", metavar="FILES", help='with --prove: its files of weights, as "OUT/*.pt"')
    add("--resume_with", metavar="OPTIONS", help="with --prove: the options of a restart")
    add("--kills", type=positive_int, default=3, help="with --prove: SIGKILLs of a run (default: 3)")
    words, options = split_words(arguments)
    args = parser.parse_args(words)
    if args.prove != (args.compare is not None) or args.prove != (args.resume_with is not None):
        raise BadInput("expected --prove together with --compare FILES and --resume_with OPTIONS")
    if options and not args.prove:
        raise BadInput("-- is before the options of the script, which only --prove runs")
    only = [rule for rule in args.only.replace(",", " ").split() if rule]
    if unknown := [rule for rule in only if rule not in RULES]:
        raise BadInput(f"--only {args.only}: {unknown[0]} is not a rule: expected some of {', '.join(RULES)}")
    if args.exact + args.ddp + args.prove > 1 or (args.prove and (args.write or args.json)):
        raise BadInput("--exact, --ddp and --prove, which changes no file: expected no other mode with it")
    if args.exact or args.ddp:
        return _change(args)
    from bootfile.fix import engine  # imports all of lint

    result = engine.repair(args.script, only, not args.no_hints)
    if args.prove:
        return _prove(args, result, options)
    names = ("rule", "path", "line", "message")
    rows = [{name: getattr(one, name) for name in names} | {"notes": notes} for one, notes in result.repaired]
    left = [
        {name: getattr(one, name) for name in (*names, "is_hint")}
        | {"reason": reason, "fix": one.fix or RULES[one.rule].fix}
        for one, reason in result.left
    ]
    lines = []
    for finding, notes in result.repaired:
        lines.append(f"{finding.path}:{finding.line}: {finding.rule} repaired: {finding.message}")
        lines += [f"    note: {note}" for note in notes]
    for finding, reason in result.left:
        first, *others = as_text([finding])
        lines += [first, f"    not repaired: {reason}", *others]
    lines.append(f"{len(result.repaired)} repaired, {len(result.left)} left")
    _finish(args, result, lines, {"repaired": rows, "left": left})
    return LEFT if any(not finding.is_hint for finding, _ in result.left) else 0


def _finish(args: Any, result: "Result", lines: list[str], data: dict[str, Any]) -> None:
    """Write the files if --write asks for it; print the edits and the data with --json, or else the diff and
    the lines."""
    if args.write:
        write(result)
    if args.json:
        edits = [edit for path in sorted(result.new) for edit in list_edits(path, result)]
        print(json.dumps({"edits": edits} | data, indent=2))
    else:
        diff = [line for path in sorted(result.new) for line in make_diff(path, result)]
        for line in [*([] if args.write else diff), *lines]:
            print_line(line)


def _prove(args: Any, result: "Result", options: list[str]) -> int:
    """Run the script before and after the repairs, and return the exit code of the comparison."""
    from bootfile.fix import proved  # imports torch, which a repair does not need

    if not result.new:
        raise BadInput(f"{args.script}: nothing to prove: 0 repaired, {len(result.left)} left")
    lines = [line for path in sorted(result.new) for line in make_diff(path, result)]
    added, removed = (
        sum(line.startswith(sign) and not line.startswith(sign * 3) for line in lines) for sign in "+-"
    )
    rules = sorted({finding.rule for finding, _ in result.repaired})
    size = f"{added} lines added, {removed} removed in {', '.join(map(os.path.relpath, result.new))}"
    notes = [note for _, notes in result.repaired for note in notes]
    return proved.prove(args, options, result.new, f"{size} ({', '.join(rules)})", notes)


def _change(args: Any) -> int:
    """Print or write the script with a loop of Exact, or with the blocks of several processes."""
    from bootfile.fix import ddp, engine, exact_loop
    from bootfile.fix.edits import CannotEdit

    make = exact_loop.make_exact if args.exact else ddp.make_distributed
    result = engine.Result()
    notes, left = [], []
    try:
        result, notes = engine.change(args.script, make)
    except CannotEdit as error:
        left = error.lines
    lines = [f"{args.script}: note: {note}" for note in notes]
    lines += [f"{args.script}: not placed: {line}" for line in left]
    _finish(args, result, [*lines, *(["nothing is changed"] if left else [])], {"notes": notes, "left": left})
    return LEFT if left else 0


def make_diff(path: str, result: "Result") -> Iterator[str]:
    """Yield the lines of a unified diff of a file, without their line ends."""
    name = os.path.relpath(path)
    old, new = (_lines(data[path]) for data in (result.old, result.new))
    for line in difflib.unified_diff(old, new, f"a/{name}", f"b/{name}"):
        yield line.rstrip("\n")
        if not line.endswith("\n"):
            yield "\\ No newline at end of file"


def _lines(data: bytes) -> list[str]:
    # lines end with \n only, as for patch and git; a carriage return is a part of its line
    return data.decode("utf-8", "surrogateescape").replace("\n", "\n\0").removesuffix("\0").split("\0")


def write(result: "Result") -> None:
    """Change the files, and keep each old one as FILE.orig. Raises BadInput if such a copy exists, or if a
    file may not be written."""
    for path in result.new:
        if not os.stat(path).st_mode & 0o222:
            raise BadInput(f"{path}: read-only: nothing is changed")
        if os.path.lexists(f"{path}.orig"):
            raise BadInput(f"{path}.orig: exists already: move it away, it is not overwritten")
    for path, data in result.new.items():
        with open(f"{path}.orig", "xb") as file:
            file.write(result.old[path])
        # a link stays, and the file to which it leads changes
        target = os.path.realpath(path)
        temporary = f"{target}.new"
        with open(temporary, "xb") as file:
            file.write(data)
        os.chmod(temporary, os.stat(target).st_mode & 0o7777)
        os.replace(temporary, target)


def list_edits(path: str, result: "Result") -> Iterator[dict[str, Any]]:
    """Yield the ranges of lines that change: lines from 1, columns from 0; the end is not a part of it."""
    old, new = (_lines(data[path]) for data in (result.old, result.new))
    for tag, first, last, start, end in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            yield {
                "file": os.path.relpath(path),
                "start": {"line": first + 1, "column": 0},
                "end": {"line": last + 1, "column": 0},
                "text": "".join(new[start:end]),
            }
