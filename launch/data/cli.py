"""Show the samples of a step of a run, or the steps of a sample.

    python -m launch data RUN --step 4711                  rank, id, label, crop, flip and file of each sample
    python -m launch data RUN --step 4711 --count 4        those of the 4 steps up to this one
    python -m launch data RUN --step 4711 --ids            rank and id only: this reads no data
    python -m launch data RUN --step 4711 --to step.png    draw the images as the model got them
    python -m launch data RUN --around 4711                the samples with the largest losses up to step 4711
    python -m launch data RUN --sample FILE_OR_ID          every epoch, step and rank that had the sample

RUN is the output folder of a job: it is only read. Of a Dataset of your own only the ids are known. Images
are read from the files, on the CPU, without a `transform` of your own. Every answer is compared with the
receipt. Exit codes: 0; 2 bad input, or other data: another fingerprint, or another digest than the receipt's.
"""

import argparse
import contextlib
import os

import numpy as np

from common.console.arguments import Parser, positive_int
from common.ground.exits import BadInput, print_line
from launch import confirm
from launch.data import losses, samples, sheet
from launch.data.run import Run
from launch.explain import align


def main(arguments: list[str]) -> int:
    """Print the answer and return 0. Raises BadInput."""
    parser = Parser(__doc__, "python -m launch data")
    add = parser.add_argument
    add("run", metavar="RUN", help="output folder of a run")
    add("--step", type=positive_int, metavar="N", help="print the samples of step N, counted from 1")
    add("--count", type=positive_int, default=1, metavar="N", help="steps up to --step (default: 1)")
    help = f"print the {losses.SHOWN} largest losses in the {losses.STEPS} steps up to N (--sample_losses)"
    add("--around", type=positive_int, metavar="N", help=help)
    add("--ids", action="store_true", help="print rank and id only: this reads no data")
    add("--to", metavar="FILE.png", help="also draw the images of the steps")
    add("--force", action="store_true", help="replace FILE.png even if it was not made by this command")
    add("--sample", metavar="FILE_OR_ID", help="print the steps that had this sample")
    add("--data_url", metavar="FOLDER", help="where the data are now (default: as in the run)")
    args = parser.parse_args(arguments)
    if [args.step, args.sample, args.around].count(None) != 2:
        raise BadInput("expected one of --step N, --around N and --sample FILE_OR_ID")
    if args.to and (not args.step or args.ids or not args.to.endswith(".png")):
        raise BadInput(f"--to {args.to}: expected a name that ends in .png, with --step and without --ids")
    if args.to:
        confirm.check_replaceable(args.to, sheet.MARK, args.force)
    for line in (_list_losses if args.around else _list_steps if args.step else _find_sample)(
        Run(args.run), args
    ):
        print_line(line)
    return 0


def _list_steps(run: Run, args: argparse.Namespace) -> list[str]:
    numbers = range(max(1, args.step - args.count + 1), args.step + 1)
    run.check(args.step, np.zeros(0, np.int64))  # whether it exists, before the data are read
    with contextlib.nullcontext() if args.ids else samples.open_data(run, args.data_url) as data:
        steps = [samples.read_step(run, number, data, bool(args.to)) for number in numbers]
    lines = []
    for step in steps:
        rows = zip(*([name, *map(str, values)] for name, values in step.columns.items()), strict=True)
        lines += ["", step.title, *align(rows)]
    return lines + ([sheet.save(steps, args.to)] if args.to else [])


def _list_losses(run: Run, args: argparse.Namespace) -> list[str]:
    run.check(args.around, np.zeros(0, np.int64))
    with contextlib.nullcontext() if args.ids else samples.open_data(run, args.data_url) as data:
        steps, columns = losses.largest(run, args.around, data)
    rows = zip(*([name, *values] for name, values in columns.items()), strict=True)
    return [*steps, "", *align(rows)]


def _find_sample(run: Run, args: argparse.Namespace) -> list[str]:
    sampler, name, id = run.sampler(run.last), "", args.sample
    if not id.isdecimal():
        with samples.open_data(run, args.data_url) as data:
            paths = (id, os.path.abspath(id)) if hasattr(data, "find") else ()
            ids = [own for path in paths if (own := data.find(path)) is not None]
            if not ids:
                raise BadInput(f"--sample {id} is neither an id in 0..{sampler.size - 1} nor an image")
            id, name = ids[0], f" ({data.path(ids[0])})"
    epochs = np.arange(1, -(-run.last // len(sampler)) + 1)
    rows, count = [["epoch", "step", "rank"]], 0
    for epoch, step in zip(epochs.tolist(), (sampler.find(int(id), epochs) + 1).tolist(), strict=True):
        if not step:
            rows.append([str(epoch), "-", "skipped: it is in the rest that is smaller than a batch"])
        elif step <= run.last:
            batch, count = run.ids(sampler, step), count + 1
            rows.append([str(epoch), str(step), str(run.ranks(step, len(batch))[batch == int(id)][0])])
    run.ids(sampler, run.last)  # also if no step had the sample
    times = f"{count} time{'s' * (count != 1)} in the steps 1-{run.last}, equal to the receipt"
    return [f"sample {id}{name}: {times}", *align(rows)]
