"""Parse the options of the benchmarks of jobs, and shorten the output of a job that failed."""

from common import arguments


def make_parser(description: str | None, name: str) -> arguments.Parser:
    """Return a parser of `python -m tests.benchmarks.NAME` with --cache_dir and --json."""
    parser = arguments.Parser(description)
    parser.prog = f"python -m tests.benchmarks.{name}"
    parser.add_argument("--cache_dir", default="output_dir/index", help="for indexes (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def tail(text: str) -> str:
    """Return the end of a program's output as one line."""
    return " ".join(text.split())[-500:]
