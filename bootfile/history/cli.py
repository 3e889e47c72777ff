"""Compute steps of an old run again, and compare them with what it has recorded.

    python -m launch audit RUN                     2% of its intervals, drawn by --seed, at least one
    python -m launch audit RUN --share all         all of them
    python -m launch audit RUN --steps 1200-1300   the intervals with these steps
    python -m launch audit RUN -- --data_url PLACE options of the job that may change at a restart

RUN: the output folder of a job: it is only read. An interval lies between two states that the run has kept
(--keep_every). Its steps are computed from the first state, by the same job with the same options and engine,
on this machine: the samples of each step and each recorded state are compared. If an interval differs, code,
data, engine, options, versions and machine are compared with those of the run. If all are the same, it is
computed twice: the same difference is an error of the hardware of the run, another one is an error of this
machine. Each kept state or file of weights that is not the one that the run recorded is named. A fault in a
share f of the intervals is in one of k drawn ones with 1 - (1 - f)^k.

Exit codes: 0 equal; 20 a step, a state or a file differs; 21 steps have no record, or nothing but samples
could be compared; 2 bad input.
"""

import argparse
import dataclasses
import json
import os
import re

from bootfile.console import outputs
from bootfile.console.parser import Parser, non_negative_int, positive_int
from bootfile.ground.errors import BadInput, print_line

_MARK = '"made by": "launch audit"'


def _share(text: str) -> float:
    """Parse a share in 0..1, or "all"."""
    value = float(text) if re.fullmatch(r"\d*\.?\d+", text) else float(text == "all")
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share such as 0.02, or all")
    return value


def make_parser(description: str | None, program: str) -> Parser:
    """Return a parser with RUN and what the start of its job needs. description: the docstring."""
    parser = Parser(description, program)
    add = parser.add_argument
    add("run", metavar="RUN", help="output folder of a job; options of the job follow --")
    help = "number of processes, for a job with --exact_shards (default: as in the run)"
    add("--processes", type=positive_int, metavar="N", help=help)
    add("--job", metavar="FILE", help="the script, if it is not where it was")
    return parser


def parse(parser: Parser, arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments before `--`, and the words for the job after it. Raises BadInput."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    args = parser.parse_args(arguments[:split])
    if not os.path.isdir(args.run):
        raise BadInput(f"{args.run}: no such folder")
    return args, arguments[split + 1 :]


def main(arguments: list[str]) -> int:
    """Compute the intervals, print the verdict and return the exit code. Raises BadInput."""
    parser = make_parser(__doc__, "python -m launch audit")
    add = parser.add_argument
    add("--steps", metavar="A-B", help="compute the intervals with these steps (default: --share)")
    help = "intervals to compute again (default: 0.02)"
    add("--share", type=_share, metavar="SHARE|all", default=0.02, help=help)
    add("--seed", type=non_negative_int, metavar="N", default=0, help="draws the intervals (default: 0)")
    add("--to", metavar="FILE", help="also write the result, such as audit.json")
    add("--force", action="store_true", help="replace FILE even if it is not a result of this command")
    add("--keep", metavar="FOLDER", help="keep what was computed in this new or empty folder")
    args, options = parse(parser, arguments)
    if args.to:
        outputs.check_replaceable(args.to, re.compile(re.escape(_MARK)), args.force)
    from bootfile.history import audit, parent  # they import torch, which --help does not need

    records = audit.read_records(args.run)
    for line in records.altered:
        print_line(f"altered: {line}")
    every = records.intervals
    if args.steps:
        chosen = audit.choose(every, parent.parse_steps("--steps", args.steps), args.run)
    else:
        chosen = audit.draw(every, args.share, args.seed)
    audit.audit(args.run, chosen, args.keep, args.job, args.processes, options)
    text, code = audit.conclude(chosen, records)
    print(text)
    if args.to:
        result = {
            "made by": "launch audit",
            "run": os.path.realpath(args.run),
            "verdict": text,
            "exit code": code,
            "seed": args.seed,
            "intervals": len(every),
            "altered": records.altered,
            "share of the steps": audit.find_share(chosen, every),
            "computed": [dataclasses.asdict(interval) | {"cause": interval.cause} for interval in chosen],
        }
        with outputs.open_result(args.to) as file:
            file.write((json.dumps(result, indent=1) + "\n").encode())
    return code
