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
    if refused and batch and isinstance(targets, torch.Tensor):
        has_target = (targets == int(refused[1])).reshape(len(batch.ids), -1).any(1).tolist()
        of = "" if data_set is None else f" of {type(data_set).__name__}"
        for id in batch.ids[has_target][:1]:
            return (
                f"sample {id}{of} has the target {refused[1]}, for which the model has no output: expected 0 "
                "to its number of outputs - 1, or ignore_index of the loss"
            )
    return process_limits.explain(error)
