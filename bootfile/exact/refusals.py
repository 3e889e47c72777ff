"""What to do about a checkpoint, or a model, that is refused."""

import os

import torch
from torch.nn.parameter import is_lazy

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
