"""The steps and ends of epochs that a proof covered, from the records of its runs."""

import contextlib

from bootfile.ground.errors import BadInput
from bootfile.prove.cases import REFERENCE
from bootfile.prove.job import Job
from bootfile.prove.verdict import Row
from bootfile.receipt import records
from bootfile.receipt.reading import find_receipt
from bootfile.receipt.recorded_run import Run
from bootfile.records import read_starts


def describe(job: Job, rows: list[Row]) -> tuple[str, list[str]]:
    """Return (what the reference covered, in words; lines on what was not checked); ("", []) for a script
    that does not use Bootfile. Raises BadInput if a record cannot be read."""
    folder = job.folder(REFERENCE)
    if not read_starts(folder) or find_receipt(folder) != records.FILE:
        return "", []
    run = Run(folder)
    per_epoch = 0  # steps of an epoch as the job cuts it; 0: not known
    whole = 0  # steps of an epoch that is not cut
    # a job of Bootfile describes its sampler in starts.jsonl, from which the length of an epoch follows
    with contextlib.suppress(BadInput):  # not known: weighted samples, or a loader of the user's own
        sampler = run.sampler(run.first)
        per_epoch = len(sampler)
        sampler.epoch_steps = None
        whole = len(sampler)
    epochs = dict(zip(run.records["step"].tolist(), run.records["epoch"].tolist(), strict=True))
    last = epochs[run.last]
    ends = last - 1  # the epochs 1..ends are complete
    if run.last == last * per_epoch:
        ends = last
    text = _describe_steps(run, last, per_epoch)
    if ends:
        text += f"; ends of epochs: {ends}"
    else:
        text += "; no end of an epoch"
    unchecked = []
    if whole > per_epoch:
        unchecked.append(f"the steps after {per_epoch} of an epoch of {whole}")
    if not ends:
        hint = f": give --max_steps {per_epoch} or more" if per_epoch else ""
        unchecked.append(f"the end of an epoch{hint}")
    if not _has_late_restart(job, rows, epochs):
        unchecked.append("a restart in a later epoch than 1")
    return text, unchecked


def _describe_steps(run: Run, last_epoch: int, per_epoch: int) -> str:
    """Return the steps of a run in words. per_epoch: steps of an epoch, 0 if it is not known."""
    steps = f"steps {run.first}-{run.last}"
    if last_epoch > 1:
        each_has = f", {per_epoch} steps each" if per_epoch else ""
        return f"{steps} of epochs 1-{last_epoch}{each_has}"
    of_all = f" of {per_epoch}" if per_epoch else ""
    return f"{steps}{of_all} of epoch 1"


def _has_late_restart(job: Job, rows: list[Row], epochs: dict[int, int]) -> bool:
    """Return whether a killed run continued in a later epoch than 1. epochs: step -> its epoch."""
    for row in rows:
        if not row.case.kills:
            continue
        for start in read_starts(job.folder(row.case.name))[1:]:
            if epochs.get(start["step"] + 1, 0) > 1:
                return True
    return False
