"""Answer the questions of `launch data` from the records of a run and its data.

All of it runs in the one process of the command, after the run: a sample is read again, on the CPU.
"""

import argparse
import contextlib
import os
import shlex
from typing import Any

import numpy as np

from bootfile.console import outputs
from bootfile.ground.errors import BadInput
from bootfile.receipt.recorded_run import Run
from common.run import sample_losses
from launch.data import samples, sheet
from launch.explain import align

STEPS = 5  # --around: steps up to the one that was asked for
SHOWN = 10  # --around: samples that are shown
_COLUMNS = ("rank", "id", "label", "file")


def find(args: argparse.Namespace) -> list[str]:
    """Return the lines of the answer. args: those of the verb. Raises BadInput."""
    if args.to:
        outputs.check_replaceable(args.to, sheet.MARK, args.force)
    run = Run(args.run)
    if args.around:
        return _list_losses(run, args)
    if args.step:
        return _list_steps(run, args)
    return _find_sample(run, args)


def _open(run: Run, args: argparse.Namespace) -> contextlib.AbstractContextManager:
    """Return the context of the run's data, or of None with --ids, which reads no data."""
    if args.ids:
        return contextlib.nullcontext()
    return samples.open_data(run, args.data_url)


def _list_steps(run: Run, args: argparse.Namespace) -> list[str]:
    """Return a table of the samples of each of --count steps up to --step; with --to, also draw them."""
    # earlier steps that the run has left out have no samples; the last one is asked for, and may fail
    numbers = []
    for number in range(max(1, args.step - args.count + 1), args.step + 1):
        if number == args.step or not run.is_left_out(number):
            numbers.append(number)
    run.check(args.step, np.zeros(0, np.int64))  # whether it exists, before the data are read
    steps = []
    with _open(run, args) as data:
        steps.extend(samples.read_step(run, number, data, bool(args.to)) for number in numbers)
    lines = []
    for step in steps:
        columns = [[name, *map(str, values)] for name, values in step.columns.items()]
        lines += ["", step.title, *align(zip(*columns, strict=True))]
    if args.to:
        lines.append(sheet.save(steps, args.to))
    return lines


def _list_losses(run: Run, args: argparse.Namespace) -> list[str]:
    """Return the samples with the largest losses up to step --around."""
    run.check(args.around, np.zeros(0, np.int64))  # whether it exists, before the data are read
    with _open(run, args) as data:
        return _find_largest(run, args.around, data)


def _find_largest(run: Run, around: int, data: object) -> list[str]:
    """Return a line about the loss of each step, and a table of the samples with the largest losses.

    Losses that are not a number are the largest. data: that of samples.open_data(). Raises BadInput if the
    losses were not kept, or are those of other samples than the receipt's.
    """
    lines = []
    table = []  # (loss, cells of the row)
    known: dict[int, dict] = {}  # rank -> step -> (ids, losses), of the ranks so far
    steps = range(max(run.first, around - STEPS + 1), around + 1)
    for number in steps:
        if run.is_left_out(number):
            lines.append(f"step {number}: {run.name_left_out()}")
            continue
        step = samples.read_step(run, number, data, False)
        losses = _read_losses(run, step, steps, known)
        if losses is None:
            lines.append(f"step {number}: its losses were not kept, which needs --sample_losses true")
            # a step before it may lack them: the run may have begun to keep them later
            if number == around:
                raise BadInput(f"{run.folder}: {lines[-1]}")
            continue
        lines.append(f"step {number}: mean loss {losses.mean():.6g} of {len(losses)} samples")
        for place, loss in enumerate(losses.tolist()):
            row = {"step": str(number), "loss": f"{loss:.6g}"}
            for name in _COLUMNS:
                if name in step.columns:
                    row[name] = str(step.columns[name][place])
            table.append((loss, row))
    table.sort(key=_rank_loss, reverse=True)
    rows = []
    for _, row in table[:SHOWN]:
        if not rows:
            rows.append([*row])  # the names of the columns
        rows.append([*row.values()])
    return [*lines, "", *align(rows), "", _skip(run, around)]


def _read_losses(run: Run, step: samples.Step, steps: range, known: dict[int, dict]) -> np.ndarray | None:
    """Return the losses of a step's samples in the order of its columns, float32 [n]; None if a rank has not
    kept them. Raises BadInput if they are those of other samples than the receipt's.

    steps: all that are wanted: the file of a rank is read once. known: rank -> step -> (ids, losses) of the
    files so far; it is changed.
    """
    ids: list[int] = []
    losses = []
    for rank in sorted({*step.columns["rank"]}):
        if rank not in known:
            known[rank] = sample_losses.read(run.folder, rank, steps)
        if step.step not in known[rank]:
            return None
        ids_of_rank, losses_of_rank = known[rank][step.step]
        ids += ids_of_rank.tolist()
        losses.append(losses_of_rank)
    if ids != step.columns["id"]:
        raise BadInput(f"the losses of step {step.step} are those of other samples than the receipt's")
    return np.concatenate(losses)


def _skip(run: Run, step: int) -> str:
    """Return a line with the command that begins a run before a step and leaves it out."""
    script = str(run.starts[-1].get("script", "JOB"))
    words = ["python", script, "--from", run.folder, "--at_step", str(step - 1), "--skip_steps", str(step)]
    return f"to leave it out in a new run: {shlex.join([*words, '--output_dir', 'NEW'])}"


def _rank_loss(row: tuple[float, dict]) -> float:
    """Return the key of a row of the table of losses: a loss that is not a number is the largest."""
    loss = row[0]
    return np.inf if np.isnan(loss) else loss


def _find_sample(run: Run, args: argparse.Namespace) -> list[str]:
    """Return the step and the rank that had --sample in each epoch of the run."""
    sampler = run.sampler(run.last)
    if args.sample.isdecimal():
        id = int(args.sample)
        shown = args.sample
    else:
        with samples.open_data(run, args.data_url) as data:
            image = _find_image(args.sample, data)
            if image is None:
                raise BadInput(
                    f"--sample {args.sample} is neither an id in 0..{sampler.size - 1} nor an image"
                )
            id = int(image)
            shown = f"{image} ({data.path(image)})"
    epochs = np.arange(1, -(-run.last // len(sampler)) + 1)
    steps = (sampler.find(id, epochs) + 1).tolist()
    rows = [["epoch", "step", "rank"]]
    count = 0
    for epoch, step in zip(epochs.tolist(), steps, strict=True):
        if not step:
            rows.append([str(epoch), "-", "skipped: it is in the rest that is smaller than a batch"])
        elif run.is_left_out(step):
            rows.append([str(epoch), str(step), run.name_left_out()])
        elif id in run.removed and step <= run.last:
            rows.append([str(epoch), str(step), "removed (--without)"])
        elif step <= run.last:
            batch = run.ids(sampler, step)
            count += 1
            rank = run.ranks(sampler, step)[batch == id][0]
            rows.append([str(epoch), str(step), str(rank)])
    last = run.last
    while run.is_left_out(last):
        last -= 1
    # the ids were computed and not read: a step that the receipt has proves that they are those of the run
    run.ids(sampler, last)  # also if no step had the sample
    times = "time" if count == 1 else "times"
    title = f"sample {shown}: {count} {times} in the steps 1-{run.last}, equal to the receipt"
    return [title, *align(rows)]


def _find_image(text: str, data: Any) -> int | None:
    """Return the id of an image by its path, relative or absolute; None if no image has that path."""
    if not hasattr(data, "find"):  # not a folder of images
        return None
    for path in (text, os.path.abspath(text)):
        id: int | None = data.find(path)
        if id is not None:
            return id
    return None
