"""Show the samples of a step of a run, or the steps of a sample.

    python -m launch data RUN --step 4711                  file or id, label, crop, flip, rank of each sample
    python -m launch data RUN --step 4711 --to step.png    draw the images as the model got them
    python -m launch data RUN --sample FILE_OR_ID          every epoch, step and rank that had the sample
    python -m launch data RUN --around                     the steps up to the largest jump of the loss
    python -m launch data RUN --around 4711 --count 8      the 8 steps up to the report of step 4711
    python -m launch data RUN --step 1 -- --data_url DIR   with another option of the job than the run's

RUN is the output folder of a job. Its own job (--job, default: the file of this name in jobs/) reads the
steps again with the run's options, on the CPU and from the files, and writes nothing into RUN. So pixels may
differ a little if the run read a pack, a cache or images that a GPU had decoded. --sample needs neither the
job nor the data: it inverts the permutation of each epoch. Every answer is compared with the digests in the
receipt.

Exit codes: 0; 2 bad input, or the data changed: the receipt has another digest.
"""

import argparse
import os
from typing import Any

import numpy as np

from common.console.arguments import Parser, positive_int
from common.ground.exits import BadInput, print_line, printable
from datasets.sampling.receipt import batch_sums
from launch import confirm
from launch.data import job, sheet, table
from launch.data.run import Run
from launch.explain import align
from launch.simulate.commands import get_option


def main(arguments: list[str]) -> int:
    """Print the answer and return 0. Raises BadInput."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = Parser(__doc__, "python -m launch data")
    add = parser.add_argument
    add("run", metavar="RUN", help="output folder of a run")
    add("--step", type=positive_int, metavar="N", help="print the samples of step N, counted from 1")
    add("--sample", metavar="FILE_OR_ID", help="print the steps that had this sample")
    help = "print the steps up to a jump of the loss: that at step N (default: the largest)"
    add("--around", nargs="?", const=0, type=int, metavar="N", help=help)
    add("--count", type=positive_int, default=4, metavar="N", help="steps of --around (default: 4)")
    add("--to", metavar="FILE.png", help="also draw the images of the steps, as the model got them")
    add("--force", action="store_true", help="replace FILE.png even if it was not made by this command")
    add("--job", metavar="SCRIPT", help="the job of the run (default: the file of its name in jobs/)")
    args = parser.parse_args(arguments[:split])
    if sum(each is not None for each in (args.step, args.sample, args.around)) != 1:
        raise BadInput("expected one of --step N, --sample FILE_OR_ID and --around")
    if args.to and (args.sample is not None or not args.to.endswith(".png")):
        raise BadInput(f"--to {args.to}: expected a name that ends in .png, with --step or --around")
    if args.to:
        confirm.check_replaceable(args.to, sheet.MARK, args.force)
    run, options = Run(args.run), arguments[split + 1 :]
    if args.sample is not None:
        return _show_sample(run, args.sample, get_option(options, "--cache_dir"))
    steps = [args.step]
    if args.around is not None:
        line, steps = run.find_jump(args.around, args.count)
        print_line(line)
    return _show_steps(run, steps, args, options)


def _show_steps(run: Run, steps: list[int], args: argparse.Namespace, options: list[str]) -> int:
    script = job.find_script(run, args.job)
    answered = job.read_steps(run, script, steps, options, pixels=bool(args.to))
    drawn = sheet.draw(answered) if args.to else None
    for step in answered:
        size = f"{step.world_size} process{'es' * (step.world_size > 1)}"
        head = f"step {step.step}, epoch {step.epoch}, {len(step.ids)} samples, {size}: equal to the receipt"
        print("", head, *align(table.rows(step)), sep="\n")
    if drawn:
        picture, count = drawn
        sheet.save(picture, args.to)
        total = sum(len(step.pixels) for step in answered)
        print("", printable(f"{args.to}: {count} of {total} image{'s' * (total != 1)}"), sep="\n")
    return 0


def _show_sample(run: Run, given: str, cache_dir: str | None) -> int:
    sampler, views = run.sampler()
    id, name = _find_sample(run, given, sampler.size, cache_dir)
    epochs = np.arange(1, -(-run.last // len(sampler)) + 1)
    steps = sampler.find(id, epochs) + 1
    lines, count = [["epoch", "step", "rank"]], 0
    for epoch, step in zip(epochs.tolist(), steps.tolist(), strict=True):
        if not step:
            lines.append([str(epoch), "-", "skipped: it is in the rest that is smaller than a batch"])
        elif step <= run.last:
            ids, size = _check_ids(run, sampler, views, step), run.world_size(step)
            lines.append([str(epoch), str(step), str(int(np.flatnonzero(ids == id)[0]) * size // len(ids))])
            count += 1
    _check_ids(run, sampler, views, run.last)  # also if no step had the sample
    times = f"{count} time{'s' * (count != 1)}"
    print(printable(f"sample {id}{name}: {times} in the steps 1-{run.last}, equal to the receipt"))
    print(*align(lines), sep="\n")
    return 0


def _check_ids(run: Run, sampler: Any, views: int, step: int) -> np.ndarray:
    """Return the ids of a step over all ranks, after they were compared with the receipt."""
    ids = sampler.batch(step - 1)
    images = np.concatenate([ids + view * sampler.size for view in range(views)])
    sums = batch_sums(images, images, (), np.array([len(images)]))[0].view(np.uint64)
    run.check(step, sums[:1])
    return ids


def _find_sample(run: Run, given: str, size: int, cache_dir: str | None) -> tuple[int, str]:
    """Return (id, " (its file)" or ""). Raises BadInput if the sample does not exist."""
    if given.isdecimal():
        return int(given), ""
    index = run.find_index(cache_dir)
    if index is None:
        raise BadInput(
            f"--sample {given} is not an id in 0..{size - 1}, and no index of the run's files was found: "
            "add -- --cache_dir FOLDER, if the run had images in folders"
        )
    for path in (given, os.path.abspath(given)):
        if (id := index.find(path)) is not None:
            return id % size, f" ({index.path(id)})"
    raise BadInput(f"--sample {given}: no such file among the {len(index)} training images of {index.base}")
