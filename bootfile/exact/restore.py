"""Load a state into the objects of a run, if it is one of this run. Only a restart needs this.

load() checks everything before it changes anything: another checkpoint may be tried after a refusal. Refused
are, with both values: other options that count, other data or samples, another model, optimizer or order of
parameters. What the user may change (hyperparameters, frozen layers, sizes of buffers) gets a line.
"""

import functools
import os
from collections.abc import Iterator
from typing import Any

import torch

from bootfile.exact import distributed_states, replay
from bootfile.exact.files import Refused
from bootfile.exact.optimizer_steps import parameters_of
from bootfile.exact.other_start import check_order
from bootfile.exact.program import order_of
from bootfile.exact.state import COMPUTED, DATA, FORMAT, RunState, SavedState
from bootfile.ground import accelerator
from bootfile.ground.errors import BadInput

_OPTIONAL = {"scheduler", "scaler"}  # not every job had a scaler


def load(run: RunState, state: SavedState, total_steps: int) -> None:
    """Check a state that was read from a file on rank 0, and restore it if the model is not sharded. The
    other ranks wait, and get the state by broadcast(); then each restores its parts of a sharded model.
    Raises Refused, with both values, if it belongs to another run, and BadInput if it has done more than
        total_steps; a file of another program may raise any exception. Nothing of the run has changed then.
    """
    check_format(state)
    _check_identity(run, state)
    _check_sampling(run, state)
    saved = state["objects"]
    notes = _check_shapes(run.objects["model"], saved["model"])
    # BadInput, not Refused: this is the right run, and no older checkpoint may be taken in its place
    if state["step"] > total_steps:
        raise BadInput(
            f"it is of step {state['step']}, and this run ends at step {total_steps}: raise epochs or "
            "max_steps, or use another output folder"
        )
    _check_objects(run, saved)
    check_order(state["order"], order_of(run.objects, run.generators))
    run.notes += notes
    if not run.is_sharded:
        restore(run, state)


def check_format(state: SavedState) -> None:
    """Raise Refused if a state is none of this format: its fields may be missing."""
    if state.get("format") != FORMAT:
        raise Refused(f"its format is {state.get('format')}, this program reads {FORMAT}")


def broadcast(run: RunState, of_first: SavedState | None) -> SavedState:
    """Return rank 0's state on every rank, with the tensors of a sharded model as this rank's parts.
    of_first: None on the other ranks."""
    # objects of this rank: they tell how each tensor of the state is sharded
    modules = {name: value for name, value in run.objects.items() if isinstance(value, torch.nn.Module)}
    objects: dict[str, Any] = {name: module.state_dict() for name, module in modules.items()}
    for name, optimizer in run.optimizers.items():
        # the state of an optimizer is sharded like its parameters
        objects[name] = {"state": dict(enumerate(parameters_of(optimizer)))}
    # whole tensors stay on rank 0: each rank gets only its part of a sharded one
    state: SavedState = distributed_states.broadcast(of_first, {"objects": objects})
    # the sharded tensors may be in files of their own: all ranks read their parts together
    if "shards" in state:
        from bootfile.exact import dtensor_files  # only a checkpoint in parts

        dtensor_files.load(state["shards"], state["objects"])
    return state


def restore(run: RunState, state: SavedState) -> None:
    """Load a state of this run into the objects. If the loop has still to add parameter groups, the
    optimizers and the schedule are loaded before the first step (RunState.before_step)."""
    saved = state["objects"]
    for name, value in run.objects.items():
        # a job without a scaler saves none, and a disabled scaler saves {}: then this run's begins again
        is_other = name not in saved or (name == "scaler" and not saved[name])
        if not is_other and not isinstance(value, torch.optim.Optimizer):
            if isinstance(value, torch.nn.Module):
                _resize(value, saved[name])
            value.load_state_dict(saved[name])
    began = {name: there for name, there in state["began"].items() if there}
    run.notes += replay.compare_schedules(began, run.began)
    run.began |= began
    run.pending = None
    if _find_missing_groups(run, state):
        run.pending = functools.partial(_restore_late, run, state)
    else:
        _restore_optimizers(run, state)
    # gradients are not a part of a state: a loop of this process may have failed between two steps
    for optimizer in run.optimizers.values():
        for parameter in parameters_of(optimizer):
            parameter.grad = None
    run.frozen_before = set(state["frozen"])
    run.bad_steps = state["bad_steps"]
    run.bad_in_a_row = state["bad_in_a_row"]
    if run.extras:
        run.extras.load_state_dict(state)


def _restore_late(run: RunState, state: SavedState) -> None:
    """Load what restore() could not, before the first step. Raises BadInput if groups are still missing."""
    if missing := _find_missing_groups(run, state):
        raise BadInput(
            f"{missing} at its first step: add them again, if `epoch >= N`, not only if `epoch == N`"
        )
    try:
        check_order(state["order"], order_of(run.objects, run.generators))
    except Refused as reason:
        raise BadInput(f"the checkpoint cannot be continued: {reason}") from None
    _restore_optimizers(run, state)


def _restore_optimizers(run: RunState, state: SavedState) -> None:
    """Load the optimizers and the schedule. An optimizer keeps its list of groups: another may share it."""
    # the lists before the load: a wrapper and the optimizer inside it may have the same one
    groups = {name: optimizer.param_groups for name, optimizer in run.optimizers.items()}
    for name, optimizer in run.optimizers.items():
        saved = state["objects"][name]
        if name == "optimizer":  # its hyperparameters belong to the schedule
            saved = saved | {"param_groups": optimizer.state_dict()["param_groups"]}
            del saved["class"]
        elif not name.startswith("optimizer."):  # one inside the optimizer shares its groups
            run.notes += replay.compare_groups(name, saved["param_groups"], optimizer.param_groups)
        optimizer.load_state_dict(saved)
    for name, optimizer in run.optimizers.items():
        # the loaded values go into the old lists and dictionaries, which another optimizer may share
        for kept, loaded in zip(groups[name], optimizer.param_groups, strict=True):
            kept.update(loaded)
        optimizer.param_groups = groups[name]
    # last: the schedule sets values in the groups that were just loaded
    replay.load(run.schedule, state["schedule"])
    run.notes += run.schedule.edited


def _check_identity(run: RunState, state: SavedState) -> None:
    """Raise Refused, with both values, if a state has other options or other training data."""
    # another version may have counted other options as identity
    values_there = _options(state["arguments"]) | state["identity"]
    values_here = _options(run.settings) | run.identity
    for name in sorted(state["identity"].keys() | run.identity.keys()):
        there = values_there.get(name)
        here = values_here.get(name)
        # images may be decoded to other bits here, which cannot be told from other data: a warning
        is_data = name == DATA or name in run.further
        are_computed = str(there).startswith(COMPUTED) and str(here).startswith(COMPUTED)
        if there == here or _may_change(run, name):
            continue
        if not (is_data and are_computed and run.is_other_machine):
            raise Refused(f"its {name} is {there}, this run's is {here}{_hint_of_path(name, there, here)}")
        run.notes.append(
            f"warning: its {name} is {there}, this run's is {here}: this machine has other instructions, and "
            "samples that a program computes may have other bits. If the data are others, stop it now"
        )


def _options(settings: dict[str, Any]) -> dict[str, Any]:
    return {f"--{name}": value for name, value in settings.items()}


def _may_change(run: RunState, name: str) -> bool:
    """Return whether the user, or a new version, has changed the role of an option so that it may change."""
    option = name.removeprefix("--")
    return option in run.settings and option not in run.schedule.settings and name not in run.identity


def _hint_of_path(name: str, *values: object) -> str:
    """Return what to do if an option is refused whose values are paths: the same files may be elsewhere."""
    texts = [value for value in values if isinstance(value, str)]
    if name.startswith("--") and len(texts) == 2 and any(os.sep in text for text in texts):
        return f'; if {name} says only where files are, add it with role="operation", then it may change'
    return ""


def _check_sampling(run: RunState, state: SavedState) -> None:
    """Raise Refused if the steps of a state had other samples than those of this run."""
    for name, there in state["sampling"].items():
        here = run.sampling.get(name)
        if there == here:
            continue
        if name == "processes":
            raise Refused(
                f"it is of {there} processes, this run has {here}: each process of a torch_loader has "
                "its own batches. map_style_loader continues on any number"
            )
        raise Refused(f"its samples have the {name} {there}, this run's the {name} {here}")


def _check_objects(run: RunState, saved: dict[str, Any]) -> None:
    """Raise Refused if the objects of a state cannot be loaded into those of this run."""
    # before any load_state_dict(): one that fails in the middle would leave some objects changed
    if missing := sorted(run.objects.keys() - saved.keys() - _OPTIONAL):
        raise Refused(f"it has no {missing[0]!r}, which this run saves: leave it out, as in that run")
    name_here = type(run.objects["optimizer"]).__name__
    name_there = saved["optimizer"]["class"]
    if name_there != name_here:
        raise Refused(f"its optimizer is {name_there}, this run's is {name_here}")
    for name, optimizer in run.optimizers.items():
        there = _sizes(saved[name]["param_groups"])
        here = _sizes(optimizer.param_groups)
        if there[: len(here)] != here:  # the loop may add the last groups later
            raise Refused(f"its {name} has groups of {there} parameters, this run's has {here}")


def _find_missing_groups(run: RunState, state: SavedState) -> str:
    """Return which optimizer has fewer groups than in the state; "" if none has."""
    for name, optimizer in run.optimizers.items():
        there = _sizes(state["objects"][name]["param_groups"])
        here = _sizes(optimizer.param_groups)
        if there != here:
            return f"the {name} of the checkpoint has groups of {there} parameters, this run's has {here}"
    return ""


def _sizes(groups: list[dict[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


# Buffers that the training has resized, or filled, if they were registered as None: load_state_dict() refuses
# both.


def _check_shapes(model: torch.nn.Module, saved: dict[str, Any]) -> list[str]:
    """Return a line for each buffer with another shape in a saved state. Raises Refused for other weights."""
    # here and not in load_state_dict(), which names all keys at once and would change a part of the model
    here = model.state_dict()
    buffers = {path for path, _, _ in _buffers(model)}
    notes = []
    for name in sorted(saved.keys() | here.keys()):
        shape_there = _shape(name, saved)
        shape_here = _shape(name, here)
        if shape_there == shape_here:
            continue
        if name not in saved or name not in buffers:
            raise Refused(f"its model is different: {name} is {shape_there}, this run's is {shape_here}")
        notes.append(f"{name} of the model is {shape_there} in the checkpoint, and was {shape_here} here")
    return notes


def _resize(model: torch.nn.Module, saved: dict[str, Any]) -> None:
    """Give the buffers of a model the sizes that they have in a saved state."""
    for path, part, name in _buffers(model):
        saved_buffer = saved.get(path)
        buffer = part._buffers[name]
        if not isinstance(saved_buffer, torch.Tensor):
            continue
        if buffer is None:  # the training makes it on the device of its inputs
            part._buffers[name] = torch.empty_like(saved_buffer, device=accelerator.device_of(model))
        elif buffer.shape != saved_buffer.shape:
            part._buffers[name] = buffer.new_empty(saved_buffer.shape)


def _buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str]]:
    """Yield (path in the state, module, name) of each buffer that a checkpoint has."""
    # a module that is there under two names is in the state under both
    for path, part in model.named_modules(remove_duplicate=False):
        for name in part._buffers.keys() - part._non_persistent_buffers_set:
            yield f"{path}.{name}".lstrip("."), part, name


def _shape(name: str, weights: dict[str, Any]) -> object:
    """Return the shape of a tensor in a state_dict; for the extra state of a module, that it has one."""
    if name not in weights:
        return "missing"
    value = weights[name]
    is_tensor = isinstance(value, torch.Tensor) and not name.endswith("_extra_state")
    return list(value.shape) if is_tensor else "present"
