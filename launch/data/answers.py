"""Answer the questions of `launch data` from the records of a run and its data."""

import argparse
import contextlib
import os

import numpy as np

from bootfile.console import outputs
from bootfile.ground.errors import BadInput
from bootfile.receipt.recorded_run import Run
from common.run import sample_losses
from launch.data import samples, sheet
from launch.explain import align

STEPS, SHOWN = 5, 10  # --around: steps up to the one that was asked for, and samples that are shown
_COLUMNS = ("rank", "id", "label", "file")


def find(args: argparse.Namespace) -> list[str]:
    """Return the lines of the answer. args: those of the verb. Raises BadInput."""
    if args.to:
        outputs.check_replaceable(args.to, sheet.MARK, args.force)
    answer = _list_losses if args.around else _list_steps if args.step else _find_sample
    return answer(Run(args.run), args)


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
        return _find_largest(run, args.around, data)


def _find_largest(run: Run, around: int, data: object) -> list[str]:
    """Return a line about the loss of each step, and a table of the samples with the largest losses.

    Losses that are not a number are the largest. data: that of samples.open_data(). Raises BadInput if the
    losses were not kept, or are those of other samples than the receipt's.
    """
    lines, table = [], []
    known: dict[int, dict] = {}
    steps = range(max(run.first, around - STEPS + 1), around + 1)
    for number in steps:
        step = samples.read_step(run, number, data, False)
        ranks = range(max(step.columns["rank"]) + 1)
        known |= {rank: sample_losses.read(run.folder, rank, steps) for rank in ranks if rank not in known}
        parts = [known[rank][number] for rank in ranks if number in known[rank]]
        if len(parts) < len(ranks):
            lines.append(f"step {number}: its losses were not kept, which needs --sample_losses true")
            if number == around:
                raise BadInput(f"{run.folder}: {lines[-1]}")
            continue
        ids, losses = (np.concatenate(column) for column in zip(*parts, strict=True))
        if ids.tolist() != step.columns["id"]:
            raise BadInput(f"the losses of step {number} are those of other samples than the receipt's")
        lines.append(f"step {number}: mean loss {losses.mean():.6g} of {len(losses)} samples")
        shown = [name for name in _COLUMNS if name in step.columns]
        for place, loss in enumerate(losses.tolist()):
            own = {name: str(step.columns[name][place]) for name in shown}
            table.append((loss, {"step": str(number), "loss": f"{loss:.6g}", **own}))
    table.sort(key=lambda row: np.inf if np.isnan(row[0]) else row[0], reverse=True)
    rows = [row for _, row in table[:SHOWN]]
    return [*lines, "", *align([[*rows[0]], *([*row.values()] for row in rows)])]


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
