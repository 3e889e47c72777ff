"""Continue a checkpoint whose order of parameters is not that of this run: by name, or with a refusal.

Loaded only if a line of the program was moved since the checkpoint (order.py).
"""

from typing import Any

import torch

from bootfile.exact import digest
from bootfile.exact.files import Refused
from bootfile.exact.order import Order, keeps_own_state


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
        optimizer = objects[name]
        keeps_places = (
            is_sharded
            or isinstance(optimizer, torch.optim.LBFGS)  # its state is of all parameters together
            or keeps_own_state(optimizer)
            or _has_places_in_groups(states[name])
        )
        if keeps_places:
            raise Refused(_other_order(name, groups_there, groups_here))
        states[name]["state"] = _move(states[name]["state"], places)
    _check_held(saved["held"], here["held"], states)
    parameters = here["parameters"]
    # other objects cannot be given by name: they may stay only if no parameter has moved
    if saved["parameters"] == parameters:
        return
    for name, value in objects.items():
        if name in states and _may_be_by_position(name, value, objects, states):
            raise Refused(_other_order(name, [saved["parameters"]], [parameters]))


def _move(state: dict[Any, Any], places: list[int]) -> dict[Any, Any]:
    """Return the state of an optimizer with the state of each parameter in its new place."""
    # what it keeps under a name belongs to no parameter
    moved = {key: value for key, value in state.items() if not isinstance(key, int)}
    for place, old in enumerate(places):
        if old in state:  # one without a gradient so far has none
            moved[place] = state[old]
    return moved


def _has_places_in_groups(state: dict[str, Any]) -> bool:
    """Return whether an optimizer keeps lists of tensors in its groups, one for each parameter."""
    for group in state["param_groups"]:
        # betas may be tensors
        if any(_has_places(value) for key, value in group.items() if key not in ("params", "betas")):
            return True
    return False


def _check_held(
    there: dict[str, list[list[str]]], here: dict[str, list[list[str]]], states: dict[str, Any]
) -> None:
    """Raise Refused if optimizers that other objects hold were exchanged, or their parameters moved."""
    for path, groups_here in here.items():
        owner = path.rpartition(".")[0]
        if owner not in states:  # the schedule of the run, whose optimizer is that of the run
            continue
        groups_there = there.get(path, groups_here)
        places = _places(path, groups_there, groups_here)
        if places != list(range(len(places))) and _has_places(states[owner]):
            raise Refused(_other_order(path, groups_there, groups_here))


def _may_be_by_position(name: str, value: Any, objects: dict[str, Any], states: dict[str, Any]) -> bool:
    """Return whether the state of an object has tensors in the order of the parameters of a module."""
    if isinstance(value, torch.optim.Optimizer):
        return False
    modules = [module for module in objects.values() if isinstance(module, torch.nn.Module)]
    shapes = []  # the parameters of each module, then the trained ones
    for module in modules:
        parameters = list(module.parameters())
        shapes.append(sorted(tuple(part.shape) for part in parameters))
        shapes.append(sorted(tuple(part.shape) for part in parameters if part.requires_grad))
    if isinstance(value, torch.nn.Module):
        # copies in a ParameterList, or in buffers with a number at the end
        series: dict[str, list[tuple[int, ...]]] = {}
        for path, part in states[name].items():
            stem = path.rstrip("0123456789")
            if stem != path and isinstance(part, torch.Tensor):
                series.setdefault(stem, []).append(tuple(part.shape))
        return any(len(copies) > 1 and sorted(copies) in shapes for copies in series.values())
    # one tensor of all of them, as of parameters_to_vector()
    sizes = set()
    for of_module in shapes:
        sizes.add(sum(torch.Size(shape).numel() for shape in of_module))
    for _, leaf in digest.leaves({name: states[name]}):
        if isinstance(leaf, torch.Tensor) and leaf.numel() in sizes:
            return True
    return _has_places(states[name])


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
    """Return whether a state has several parts with tensors in a list, or under numbers."""
    if isinstance(state, dict):
        parts = list(state.values())
        # numbers as keys are positions, as in the state of an optimizer
        numbered = [value for key, value in state.items() if str(key).isdigit()]
    elif isinstance(state, list | tuple):
        parts = list(state)
        numbered = parts
    else:
        return False
    return sum(map(_has_tensor, numbered)) > 1 or any(map(_has_places, parts))


def _has_tensor(state: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for _, leaf in digest.leaves({"": state}))


def _check_generators(there: list[str], here: list[str]) -> None:
    """Raise Refused if generators have other places: a seed depends on the place. More may follow."""
    for was, now in zip(there, here, strict=False):
        if was != now:
            raise Refused(
                f"its generators were added in the order {', '.join(there)}, this run's in the order "
                f"{', '.join(here)}: each gets a seed by its place"
            )
