"""The names of what a checkpoint keeps by position.

An optimizer keeps its state by the place of each parameter in its groups, and other objects may keep a list
of tensors in the order of model.parameters(), as some moving averages do. A line that is moved in a model
changes these places, but no name and no shape. So a checkpoint also holds the names in their order: the state
of an optimizer is given to the parameters by name, and what has no names is refused.
"""

from typing import Any, TypedDict

import torch

from bootfile.exact.files import Refused


class Order(TypedDict):
    """Names in the order of their places.

    parameters: of the model.
    groups: optimizer -> group -> names of its parameters; "" for a tensor that no module has.
    generators: that were given to add().
    """

    parameters: list[str]
    groups: dict[str, list[list[str]]]
    generators: list[str]


def order_of(objects: dict[str, Any], generators: list[str]) -> Order:
    """Return the present order. objects: those of a checkpoint. generators: names, in the order of add()."""
    names = _names(objects)
    groups = {}
    for name, value in objects.items():
        if isinstance(value, torch.optim.Optimizer):
            of_groups = []
            for group in value.param_groups:
                of_groups.append([names.get(id(parameter), "") for parameter in group["params"]])
            groups[name] = of_groups
    parameters = [names[id(parameter)] for parameter in objects["model"].parameters()]
    return Order(parameters=parameters, groups=groups, generators=list(generators))


def follow(
    saved: Order, here: Order, objects: dict[str, Any], states: dict[str, Any], is_sharded: bool
) -> None:
    """Give the states of the optimizers the order of this run. Called on rank 0 before a state is restored.

    saved, here: the order of the checkpoint and of this run. objects: of this run. states: of the checkpoint,
    by the same names; those of the optimizers are changed. is_sharded: the model is, and the files of its
    checkpoint keep the places. Raises Refused with the first name, if a state cannot be given by name.
    """
    _check_generators(saved["generators"], here["generators"])
    for name, groups_here in here["groups"].items():
        groups_there = saved["groups"].get(name, groups_here)
        # the number of each parameter in the checkpoint; equal to 0, 1, 2, ... if no line was moved
        places = _places(name, groups_there, groups_here)
        if places == list(range(len(places))):
            continue
        optimizer = type(objects[name])
        keeps_places = (
            is_sharded
            or issubclass(optimizer, torch.optim.LBFGS)  # its state is of all parameters together
            or optimizer.state_dict is not torch.optim.Optimizer.state_dict
        )
        if keeps_places:
            raise Refused(_other_order(name, groups_there, groups_here))
        state = states[name]["state"]
        moved = {}
        for place, old in enumerate(places):
            if old in state:  # one without a gradient so far has none
                moved[place] = state[old]
        states[name]["state"] = moved
    # other objects cannot be given by name: they may stay only if no parameter has moved
    if saved["parameters"] == here["parameters"]:
        return
    for name, value in objects.items():
        is_named = isinstance(value, torch.nn.Module | torch.optim.Optimizer)
        if not is_named and name in states and _has_places(states[name]):
            raise Refused(_other_order(name, [saved["parameters"]], [here["parameters"]]))


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


def _places(name: str, there: list[list[str]], here: list[list[str]]) -> list[int]:
    """Return for each parameter of an optimizer its place in the checkpoint. Raises Refused if a group has
    other parameters. Groups that the loop has still to add are not in `here`."""
    places = []
    first = 0  # the place of the first parameter of the group
    for number, (names_there, names_here) in enumerate(zip(there, here, strict=False)):
        # a list of places: tensors of no module all have the name "", and keep their order
        left: dict[str, list[int]] = {}
        for place, parameter in enumerate(names_there, first):
            left.setdefault(parameter, []).append(place)
        for parameter in names_here:
            if not left.get(parameter):
                group_there = _group_with(parameter, there)
                raise Refused(
                    f"its {name} has {parameter or 'a tensor that no module has'} {group_there}, this run's "
                    f"has it in group {number}"
                )
            places.append(left[parameter].pop(0))
        first += len(names_there)
    return places


def _group_with(parameter: str, groups: list[list[str]]) -> str:
    for number, names in enumerate(groups):
        if parameter in names:
            return f"in group {number}"
    return "in no group"


def _other_order(name: str, there: list[list[str]], here: list[list[str]]) -> str:
    """Return the reason with the first parameter that has another place."""
    for names_there, names_here in zip(there, here, strict=False):
        for was, now in zip(names_there, names_here, strict=False):
            if was != now:
                return (
                    f"its {name} keeps tensors by position, and the parameters have another order: {was} is "
                    f"where this run has {now}; restore the order of that run"
                )
    return f"its {name} keeps tensors by position, and this run has other parameters"


def _has_places(state: Any) -> bool:
    """Return whether a state has several tensors in a list, or under numbers."""
    if isinstance(state, dict):
        # numbers as keys are positions, as in the state of an optimizer
        numbered = [value for key, value in state.items() if isinstance(key, int)]
        return _are_tensors(numbered) or any(map(_has_places, state.values()))
    if isinstance(state, list | tuple):
        return _are_tensors(state) or any(map(_has_places, state))
    return False


def _are_tensors(values: list[Any] | tuple[Any, ...]) -> bool:
    return sum(isinstance(value, torch.Tensor) for value in values) > 1


def _check_generators(there: list[str], here: list[str]) -> None:
    """Raise Refused if generators have other places: a seed depends on the place. More may follow."""
    for was, now in zip(there, here, strict=False):
        if was != now:
            raise Refused(
                f"its generators were added in the order {', '.join(there)}, this run's in the order "
                f"{', '.join(here)}: each gets a seed by its place"
            )
