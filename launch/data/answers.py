"""Answer the questions of `launch data` from the records of a run and its data. All of it runs in the one
process of the command, after the run: a sample is read again, on the CPU."""

import argparse
import contextlib
import functools
import os
import shlex
from typing import Any

import numpy as np

from bootfile.console import outputs
from bootfile.ground.errors import BadInput
from bootfile.ground.numbers import counted
from bootfile.receipt.recorded_run import Run
from bootfile.sampling.sampler import BatchSampler
from common.run import sample_losses
from launch.data import samples
from launch.explain import align

STEPS = 5  # --around: steps up to the one that was asked for
SHOWN = 10  # --around: samples that are shown
_COLUMNS = ("rank", "id", "label", "file")


def find(args: argparse.Namespace) -> list[str]:
    """Return the lines of the answer. args: those of the verb. Raises BadInput."""
    if args.to:
        outputs.check_replaceable(args.to, samples.MARK, args.force)
    run = Run(args.run)
    if args.sample:
        return _find_sample(run, args)
    run.check(args.step or args.around, np.zeros(0, np.int64))  # whether it exists, before the data are read
    # --ids reads no data
    opened = contextlib.nullcontext() if args.ids else samples.open_data(run, args.data_url)
    with opened as data:
        return _list_steps(run, args, data) if args.step else _list_losses(run, args.around, data)


def _list_steps(run: Run, args: argparse.Namespace, data: Any) -> list[str]:
    """Return a table of the samples of each of --count steps up to --step; with --to, also draw them."""
    numbers = range(max(1, args.step - args.count + 1), args.step + 1)
    # earlier steps that the run has left out are skipped; the last one was asked for, and then fails
    kept = [number for number in numbers if number == args.step or not run.is_left_out(number)]
    steps = [samples.read_step(run, number, data, bool(args.to)) for number in kept]
    lines = []
    for step in steps:
        columns = [[name, *map(str, values)] for name, values in step.columns.items()]
        lines += ["", step.title, *align(zip(*columns, strict=True))]
    if args.to:
        lines.append(samples.save_sheet(steps, args.to))
    return lines


def _list_losses(run: Run, around: int, data: Any) -> list[str]:
    """Return a line about the loss of each step up to --around, and the samples with the largest losses.
    Losses that are not a number are the largest. Raises BadInput if the losses of the last step were not
    kept, or are those of other samples than the receipt's."""
    steps = range(max(run.first, around - STEPS + 1), around + 1)

    @functools.cache  # the file of a rank is read once
    def read_rank(rank: int) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        return sample_losses.read(run.folder, rank, steps)

    lines = []
    table = []  # (loss, cells of the row)
    names: list[str] = []
    for number in steps:
        if run.is_left_out(number):
            lines.append(f"step {number}: {run.name_left_out()}")
            continue
        step = samples.read_step(run, number, data, False)
        kept = [read_rank(rank).get(number) for rank in sorted({*step.columns["rank"]})]
        parts = [part for part in kept if part is not None]
        if len(parts) < len(kept):
            lines.append(f"step {number}: its losses were not kept, which needs --sample_losses true")
            continue
        if np.concatenate([ids for ids, _ in parts]).tolist() != step.columns["id"]:
            raise BadInput(f"the losses of step {number} are those of other samples than the receipt's")
        losses = np.concatenate([losses_of_rank for _, losses_of_rank in parts])
        lines.append(f"step {number}: mean loss {losses.mean():.6g} of {len(losses)} samples")
        names = [name for name in _COLUMNS if name in step.columns]
        for place, loss in enumerate(losses.tolist()):
            cells = [str(step.columns[name][place]) for name in names]
            table.append((loss, [str(number), f"{loss:.6g}", *cells]))
        has_last = number == around
    # a step before it may lack them: the run may have begun to keep them later
    if not table or not has_last:
        raise BadInput(f"{run.folder}: {lines[-1]}")
    table.sort(key=lambda row: np.inf if np.isnan(row[0]) else row[0], reverse=True)
    rows = [["step", "loss", *names], *(cells for _, cells in table[:SHOWN])]
    words = ["python", str(run.starts[-1].get("script", "JOB")), "--from", run.folder]
    words += ["--at_step", str(around - 1), "--skip_steps", str(around), "--output_dir", "NEW"]
    return [*lines, "", *align(rows), "", f"to leave it out in a new run: {shlex.join(words)}"]


def _find_sample(run: Run, args: argparse.Namespace) -> list[str]:
    """Return the step and the rank that had --sample in each epoch of the run."""
    sampler = run.sampler(run.last)
    id, name = _find_id(run, sampler, args)
    epochs = np.arange(1, -(-run.last // len(sampler)) + 1)
    steps = (sampler.find(id, epochs) + 1).tolist()
    rows = [
        [str(epoch), str(step or "-"), _describe_use(run, sampler, id, step)]
        for epoch, step in zip(epochs.tolist(), steps, strict=True)
        if step <= run.last
    ]
    last = run.last
    while run.is_left_out(last):
        last -= 1
    # the ids were computed and not read: a step that the receipt has proves that they are those of the run
    run.ids(sampler, last)  # also if no step had the sample
    count = sum(rank.isdecimal() for _, _, rank in rows)
    title = f"sample {name}: {counted(count, 'time')} in the steps 1-{run.last}, equal to the receipt"
    return [title, *align([["epoch", "step", "rank"], *rows])]


def _find_id(run: Run, sampler: BatchSampler, args: argparse.Namespace) -> tuple[int, str]:
    """Return the id of --sample, which may be the path of an image, and its name. Raises BadInput."""
    text = args.sample
    if text.isdecimal():
        return int(text), text
    with samples.open_data(run, args.data_url) as data:
        find_image = getattr(data, "find", lambda path: None)  # only a folder of images has it
        for path in (text, os.path.abspath(text)):
            id = find_image(path)
            if id is not None:
                return id, f"{id} ({data.path(id)})"
    raise BadInput(f"--sample {text} is neither an id in 0..{sampler.size - 1} nor an image")


def _describe_use(run: Run, sampler: BatchSampler, id: int, step: int) -> str:
    """Return the rank that had a sample in a step, or why none had it. step: 0 in an epoch without it."""
    if not step:  # one of --epoch_steps, or with a rest that is smaller than a batch
        return "skipped: the epoch ends before it"
    if run.is_left_out(step):
        return run.name_left_out()
    if id in run.removed:
        return "removed (--without)"
    return str(run.ranks(sampler, step)[run.ids(sampler, step) == id][0])
