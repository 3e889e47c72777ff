"""The steps and ends of epochs that a proof covered, from the records of its runs."""

import contextlib

from bootfile.ground.errors import BadInput
from bootfile.prove.cases import REFERENCE
from bootfile.prove.job import Job
from bootfile.prove.verdict import Row
from bootfile.receipt import records, starts
from bootfile.receipt.reading import find_receipt
from bootfile.receipt.recorded_run import Run


def describe(job: Job, rows: list[Row]) -> tuple[str, list[str]]:
    """Return (what the reference covered, in words; lines on what was not checked); ("", []) for a script
    that does not use Bootfile. Raises BadInput if a record cannot be read."""
    folder = job.folder(REFERENCE)
    if not starts.read(folder) or find_receipt(folder) != records.FILE:
        return "", []
    run, per_epoch, whole = Run(folder), 0, 0
    with contextlib.suppress(BadInput):  # not known: weighted samples, or a loader of the user's own
        sampler = run.sampler(run.first)
        per_epoch, sampler.epoch_steps = len(sampler), None
        whole = len(sampler)
    epochs = dict(zip(run.records["step"].tolist(), run.records["epoch"].tolist(), strict=True))
    last = epochs[run.last]
    ends = last if run.last == last * per_epoch else last - 1  # the epochs 1..ends are complete
    steps = f"steps {run.first}-{run.last}"
    if last > 1:
        steps += f" of epochs 1-{last}" + (f", {per_epoch} steps each" if per_epoch else "")
    else:
        steps += (f" of {per_epoch}" if per_epoch else "") + " of epoch 1"
    unchecked = [f"the steps after {per_epoch} of an epoch of {whole}"] if whole > per_epoch else []
    if not ends:
        hint = f": give --max_steps {per_epoch} or more" if per_epoch else ""
        unchecked.append(f"the end of an epoch{hint}")
    killed = [starts.read(job.folder(row.case.name)) for row in rows if row.case.kills]
    if not any(epochs.get(start["step"] + 1, 0) > 1 for restarts in killed for start in restarts[1:]):
        unchecked.append("a restart in a later epoch than 1")
    return f"{steps}; {f'ends of epochs: {ends}' if ends else 'no end of an epoch'}", unchecked
