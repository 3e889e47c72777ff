"""Name the cause of an error that torch raises in a loop: a worker that has ended, or a target."""

import re
from typing import Any

import torch

from bootfile.machine import process_limits
from bootfile.sampling.plan import Batch

_DEAD_WORKER = (
    "`Bus error`: /dev/shm is full, give the container more with --shm-size, or use --data_backend threads; "
    "`Killed`: the memory is full, use fewer --workers or a smaller batch; else the code of an item ended "
    "it: --workers 0 shows where"
)


def explain(error: Exception, batch: Batch | None, targets: Any, data_set: Any) -> str:
    """Return one line for an error if a worker has ended or cannot be started, or if the loss has refused a
    target; "" for another error.

    batch, targets: those that the loop has now, or None. data_set: of the batch, if it is known.
    """
    text = next(iter(str(error).splitlines()), "")
    if text.startswith("DataLoader worker (pid"):  # torch only says that it has ended
        return f"{text} {_DEAD_WORKER}"
    refused = re.match(r"Target (-?\d+) is out of bounds", text)  # a class that the model lacks
    has_rows = batch is not None and isinstance(targets, torch.Tensor) and len(targets) == len(batch.ids)
    if refused and batch and has_rows:
        has_target = (targets == int(refused[1])).reshape(len(targets), -1).any(1).tolist()
        for id in batch.ids[has_target][:1].tolist():
            return (
                f"{_name(id, data_set)} has the target {refused[1]}, for which the model has no output: "
                "expected 0 to its number of outputs - 1, or ignore_index of the loss"
            )
    return process_limits.explain(error)


def _name(id: int, data_set: Any) -> str:
    """Return a sample in words. The ids of a DataLoader are hashes, which say nothing to a user."""
    if data_set is None:
        return f"sample {id}"
    is_number = hasattr(data_set, "__len__") and 0 <= id < len(data_set)
    return f"{f'sample {id}' if is_number else 'a sample'} of {type(data_set).__name__}"
