"""What a checkpoint notes of its program. other_start.py compares it with the program that continues it.

The names of what it keeps by position: an optimizer keeps its state by the place of each parameter in its
groups, and some moving averages keep a list of tensors in the order of model.parameters(). A line that is
moved in a model changes these places, but no name and no shape. So another order is refused, with the first
name that differs.

The digests of its code: the script, and the modules that are not installed as packages. Other code is a
warning.
"""

import contextlib
import hashlib
import os
import sys
import sysconfig
from typing import Any, TypedDict

import torch
from torch.optim import Optimizer

from bootfile.exact.optimizer_steps import keeps_own_state, list_members

_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


class Order(TypedDict):
    """Names in the order of their places."""

    parameters: list[str]  # names of the parameters of all modules, those of the model first
    # optimizer -> group -> names of its parameters; "" for a tensor that no module has
    groups: dict[str, list[list[str]]]
    held: dict[str, list[list[str]]]  # the same of optimizers that another object holds, as "scheduler.0"
    generators: list[str]  # that were given to add()


def order_of(objects: dict[str, Any], generators: list[str]) -> Order:
    """Return the present order. objects: those of a checkpoint. generators: names, in the order of add()."""
    names = _names(objects)
    groups = {}
    held = {}
    parameters = []
    for owner, value in objects.items():
        if isinstance(value, torch.nn.Module):
            parameters += [names[id(parameter)] for parameter in value.parameters()]
            continue
        if owner == "receipt":  # it may have long lists, and this runs at each save
            continue
        if isinstance(value, Optimizer):
            groups[owner] = _names_of_groups(value, names)
        for place, optimizer in enumerate(find_held(value)):
            held[f"{owner}.{place}"] = _names_of_groups(optimizer, names)
    return Order(parameters=parameters, groups=groups, held=held, generators=list(generators))


def find_held(value: Any) -> list[Optimizer]:
    """Return the optimizers that an object holds and may save, also those of the schedulers in it."""
    # those inside an optimizer are objects of the checkpoint (state.py), unless it saves them itself
    if isinstance(value, Optimizer) and not keeps_own_state(value):
        return []
    members = list_members(getattr(value, "__dict__", {}))
    # a scheduler in the object has its optimizer in this attribute
    held = [one if isinstance(one, Optimizer) else getattr(one, "optimizer", None) for one in members]
    return [one for one in held if isinstance(one, Optimizer)]


def _names_of_groups(optimizer: Optimizer, names: dict[int, str]) -> list[list[str]]:
    return [
        [names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups
    ]


def _names(objects: dict[str, Any]) -> dict[int, str]:
    """Return the id of each parameter of the modules -> its name. One that several modules share has the
    first of its names in the alphabet, whatever the order of the modules."""
    names: dict[int, str] = {}
    for owner, value in objects.items():
        if not isinstance(value, torch.nn.Module):
            continue
        prefix = "" if owner == "model" else f"{owner}."
        for name, parameter in value.named_parameters(remove_duplicate=False):
            # the alphabet decides, not the order of the modules: a line that is moved must not change a name
            path = prefix + name
            names[id(parameter)] = min(path, names.get(id(parameter), path))
    return names


def digest_modules() -> dict[str, str]:
    """Return name -> digest (16 hexadecimal digits) of the file of each module that is imported now. The name
    of the script is that of its file. Modules of Python and of installed packages are left out."""
    python = sysconfig.get_path("stdlib") + os.sep
    digests = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if name == "__mp_main__" or not isinstance(path, str) or not path.endswith(".py"):
            continue
        path = os.path.abspath(path)
        if not path.startswith(python) and not any(part in path for part in _INSTALLED):
            shown = os.path.basename(path) if name == "__main__" else name
            # there is no file for a module in an archive, or for code that was typed into a shell
            with contextlib.suppress(OSError), open(path, "rb") as file:
                digests[shown] = hashlib.blake2b(file.read(), digest_size=8).hexdigest()
    return digests
