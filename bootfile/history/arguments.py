"""The command line of the verbs that start the job of an old run again: audit and replay."""

import argparse
import os

from bootfile.console.parser import Parser, positive_int
from bootfile.ground.errors import BadInput


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
