"""The names of what a checkpoint keeps by position, in their order, and the comparison with those of a run.

An optimizer keeps its state by the place of each parameter in its groups, and other objects may keep a list
of tensors in the order of model.parameters(), as some moving averages do. A line that is moved in a model
changes these places, but no name and no shape. So a checkpoint also holds the names: a run with another
order is refused with the first name that differs.
"""

import itertools
from typing import Any, TypedDict

import torch

from bootfile.exact.files import Refused
from bootfile.exact.optimizer_steps import find_optimizers


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
        if isinstance(value, torch.optim.Optimizer):
            groups[owner] = _names_of_groups(value, names)
        for place, optimizer in enumerate(find_held(value)):
            held[f"{owner}.{place}"] = _names_of_groups(optimizer, names)
    return Order(parameters=parameters, groups=groups, held=held, generators=list(generators))


def check_order(saved: Order, present: Order) -> None:
    """Raise Refused, with the first names that differ, if a checkpoint has another order than this run.
    Groups and generators that only one of them has are not compared: the loop may add them later."""
    # zip() ends with the shorter list
    for old_name, name in zip(saved["generators"], present["generators"], strict=False):
        if old_name != name:
            raise Refused(
                f"its generators were added in the order {', '.join(saved['generators'])}, this run's in the "
                f"order {', '.join(present['generators'])}: each gets a seed by its place"
            )
    saved_groups = saved["groups"] | saved["held"]
    for owner, groups in (present["groups"] | present["held"]).items():
        if owner in saved_groups:
            _compare(owner, saved_groups[owner], groups)
    _compare("model", [saved["parameters"]], [present["parameters"]])


def _compare(owner: str, saved: list[list[str]], present: list[list[str]]) -> None:
    """Raise Refused if a group that both lists have has other names."""
    for number, (old_names, names) in enumerate(zip(saved, present, strict=False)):
        for old_name, name in itertools.zip_longest(old_names, names, fillvalue="nothing"):
            if old_name != name:
                raise Refused(
                    f"its {owner} has {old_name or 'a tensor'} where this run has {name or 'a tensor'} "
                    f"(group {number}), and keeps tensors by position: restore the order of that run, or "
                    "start a new run from its weights"
                )


def keeps_own_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer defines what it saves."""
    return type(optimizer).state_dict is not torch.optim.Optimizer.state_dict


def find_held(value: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that an object holds and may save, also those of the schedulers in it."""
    # those inside an optimizer are objects of the checkpoint (state.py), unless it saves them itself
    if isinstance(value, torch.optim.Optimizer) and not keeps_own_state(value):
        return []
    return list(find_optimizers(getattr(value, "__dict__", {}), through="optimizer"))


def _names_of_groups(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> list[list[str]]:
    groups = []
    for group in optimizer.param_groups:
        groups.append([names.get(id(parameter), "") for parameter in group["params"]])
    return groups


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
