"""What to do about a checkpoint, or a model, that is refused, and what a restart has to say."""

import os
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from bootfile.exact import files
from bootfile.ground.errors import BadInput


def hint_of_path(name: str, there: object, here: object) -> str:
    """Return what to do if an option is refused whose values are paths: the same files may be elsewhere."""
    if not name.startswith("--") or not isinstance(there, str) or not isinstance(here, str):
        return ""
    if not any(os.sep in value or os.path.exists(value) for value in (there, here)):
        return ""
    return f'; if {name} says only where files are, add it with role="operation", then it may change'


def refuse_tensor(name: str, tensor: torch.Tensor) -> None:
    """Raise BadInput for a tensor of a model that no checkpoint can hold."""
    if is_lazy(tensor):  # it gets its values in the first forward pass, and a checkpoint comes before
        raise BadInput(
            f"{name} has no shape yet: call the model once with a batch, before the optimizer is made and at "
            "each start, under torch.no_grad()"
        )
    raise BadInput(
        f"{name} is a sparse tensor, which no checkpoint can hold: register the buffer with "
        "persistent=False, and make it again at each start"
    )


def refuse_sampling(name: str, there: object, here: object) -> None:
    """Raise Refused for a checkpoint whose steps had other samples. name: of the value that differs."""
    if name == "processes":
        raise files.Refused(
            f"it is of {there} processes, this run has {here}: each process of a torch_loader has its own "
            "batches. map_style_loader continues on any number"
        )
    raise files.Refused(f"its samples have the {name} {there}, this run's the {name} {here}")


def check_names(there: dict[str, Any], here: dict[str, Any]) -> None:
    """Raise Refused if the objects of a checkpoint lack one of this run's, or have another optimizer."""
    optional = {"scheduler", "scaler"}  # not every job had a scaler
    missing = sorted(here.keys() - there.keys() - optional)
    if missing:
        raise files.Refused(f"it has no {missing[0]!r}, which this run saves: leave it out, as in that run")
    name_here = type(here["optimizer"]).__name__
    name_there = there["optimizer"]["class"]
    if name_there != name_here:
        raise files.Refused(f"its optimizer is {name_there}, this run's is {name_here}")


def describe_frozen(there: set[str], here: set[str]) -> str:
    """Return a warning if other parameters are frozen than at the checkpoint, or ""."""
    changed = sorted(there ^ here)
    if not changed:
        return ""
    is_now = "trained" if changed[0] in there else "frozen"
    return (
        f"warning: {changed[0]} is {is_now} now, unlike at the checkpoint ({len(changed)} in all): if "
        "the loop changes it at an epoch, write `epoch >= N`, not `epoch == N`"
    )
