"""Make one page of runs: curves, speed, waiting, restarts, receipts, settings, environment.

    python -m launch report RUN [RUN...] [--to report.html] [--title TEXT] [--force]

RUN: output folder of a job (metrics.jsonl, starts.jsonl, receipt.bin, checkpoints/), finished, killed or
still running; or a folder of such folders, for example output_dir. The page is one file that loads nothing
and runs no script, for a phone or a desktop. Several runs share the charts; the others are compared with
the first. An earlier report is replaced; any other file only with --force. Exit codes: 0 written, 2 no run
there, or FILE cannot be written.
"""

import os
import re
import time

from bootfile.console import outputs
from bootfile.ground.errors import BadInput
from bootfile.ground.numbers import counted
from common.console.arguments import Parser
from launch.explain import format_time
from launch.report import runs as report_runs
from launch.report import tables
from launch.report.runs import Run

_MARK = "a page of launch report"


def main(arguments: list[str]) -> int:
    """Write the page and return 0: `python -m launch report` calls it. Raises BadInput."""
    parser = Parser(__doc__, "python -m launch report")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="output folder of a job, or a folder of them")
    parser.add_argument("--to", metavar="FILE", default="report.html", help="default: report.html")
    parser.add_argument("--force", action="store_true", help="replace FILE even if it is not a report")
    parser.add_argument("--title", help="default: the names of the runs")
    args = parser.parse_args(arguments)
    # a folder of runs and a run in it may both be named: each is shown once
    found = (path for named in args.runs for path in report_runs.find_runs(named))
    paths = [*dict.fromkeys(map(os.path.realpath, found))]
    if not args.to.endswith(".html"):  # the name of no result of a run
        raise BadInput(f"--to {args.to}: expected a name that ends in .html")
    outputs.check_replaceable(args.to, re.compile(_MARK), args.force)
    # below the folder that holds all runs; a run may be in the folder of another one
    parent = os.path.commonpath(list(map(os.path.dirname, paths)))
    runs = [report_runs.read(path, os.path.relpath(path, parent)) for path in paths]
    content = render_page(runs, args.title).encode("utf-8", "replace")  # a folder's name may not be UTF-8
    with outputs.open_result(args.to) as file:
        file.write(content)
    print(*(f"{run.path}: {note}\n" for run in runs for note in run.notes), sep="", end="")
    print(f"{args.to}: {counted(len(runs), 'run')}, {len(content) / 1e3:.0f} kB")
    return 0


def render_page(runs: list[Run], title: str | None = None) -> str:
    """Return the HTML of runs, whose names must differ: main() calls it, and the tests."""
    from bootfile.console import page
    from launch.report import charts  # imports matplotlib, which --help does not need

    settings = [run.settings for run in runs]
    return page.render(
        os.path.join(os.path.dirname(os.path.abspath(__file__)), "page.html"),
        title=title or tables.make_title(runs),
        made=format_time(time.time()),
        runs=runs,
        mark=_MARK,
        dashes=charts.DASHES,
        widths=[charts.width_of(place, len(runs)) for place in range(len(runs))],
        summaries=list(map(tables.summarize, runs)),
        classes=list(map(tables.make_class_table, runs)),
        final=tables.make_final_rows(runs),
        charts=charts.draw(runs),
        starts=tables.make_start_rows(runs),
        epochs=list(map(tables.make_epoch_table, runs)),
        receipts=tables.compare_receipts(runs),
        differing=tables.find_differences(settings),
        settings=tables.make_rows(settings),
        environment=tables.make_rows([run.environment for run in runs]),
    )
