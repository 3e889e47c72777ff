"""Find the samples with the largest losses in the steps before a spike of the loss."""

import numpy as np

from common.ground.exits import BadInput
from common.run import sample_losses
from launch.data import samples
from launch.data.run import Run

STEPS, SHOWN = 5, 10  # steps up to the one that was asked for; samples that are shown
_COLUMNS = ("rank", "id", "label", "file")


def largest(run: Run, around: int, data: object) -> tuple[list[str], dict[str, list[str]]]:
    """Return a line about the loss of each step, and the columns of the samples with the largest losses.

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
    return lines, {name: [row[name] for row in rows] for name in rows[0]}
