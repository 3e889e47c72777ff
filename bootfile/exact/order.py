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
    """Names in the order of their places.

    parameters: of the modules, those of the model first.
    groups: optimizer -> group -> names of its parameters; "" for a tensor that no module has.
    held: the same of optimizers that another object holds, as "object.0". The one of a scheduler counts, too.
    generators: that were given to add().
    """

    parameters: list[str]
    groups: dict[str, list[list[str]]]
    held: dict[str, list[list[str]]]
    generators: list[str]


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


def check_order(there: Order, here: Order) -> None:
    """Raise Refused, with the first names that differ, if a checkpoint has another order than this run. The
    loop may still add groups of parameters and generators: only what is here is compared."""
    for was, now in zip(there["generators"], here["generators"], strict=False):
        if was != now:
            raise Refused(
                f"its generators were added in the order {', '.join(there['generators'])}, this run's in the "
                f"order {', '.join(here['generators'])}: each gets a seed by its place"
            )
    for name, groups in (here["groups"] | here["held"]).items():
        _compare(name, (there["groups"] | there["held"]).get(name, groups), groups)
    _compare("model", [there["parameters"]], [here["parameters"]])


def _compare(owner: str, there: list[list[str]], here: list[list[str]]) -> None:
    for group, (names_there, names_here) in enumerate(zip(there, here, strict=False)):
        for was, now in itertools.zip_longest(names_there, names_here, fillvalue="nothing"):
            if was != now:
                raise Refused(
                    f"its {owner} has {was or 'a tensor'} where this run has {now or 'a tensor'} (group "
                    f"{group}), and keeps tensors by position: restore the order of that run, or start a new "
                    "run from its weights"
                )


def keeps_own_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer defines what it saves."""
    return type(optimizer).state_dict is not torch.optim.Optimizer.state_dict


def find_held(value: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that an object holds and may save, also those of the schedulers in it."""
    # the others inside an optimizer are objects of the checkpoint
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
