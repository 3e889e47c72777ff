"""Continue a schedule, and find the hyperparameters and settings that were edited. Only a restart needs this.

A schedule of torch that depends only on the number of calls of step() repeats these calls: with other
settings (--lr, --epochs) it continues at the same step of the new schedule. The state of any other schedule
is loaded, if --lr, --epochs and its own settings are those of the checkpoint.
"""

import warnings
from typing import Any

import torch

from bootfile.exact.schedules import ScheduleState, calls, is_torchs, parts_of
from bootfile.ground.errors import BadInput

_OF_THE_STEP = {
    "LambdaLR", "MultiplicativeLR", "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR",
    "PolynomialLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "OneCycleLR",
}  # fmt: skip
_ARGUMENTS = ("lr", "epochs")
NAMES = "param_names"  # in a group of an optimizer that got named_parameters(): not a setting


def load(schedule: ScheduleState, saved: dict[str, Any]) -> None:
    """Load a result of state(). Raises BadInput, with both values, if it cannot continue exactly."""
    began = saved["began"]
    if len(began["groups"]) != len(schedule.first_groups):
        raise BadInput(
            f"the optimizer of the checkpoint began with {len(began['groups'])} parameter groups, this "
            f"run's with {len(schedule.first_groups)}: add the others in the same place, before Exact or in "
            "the loop"
        )
    schedule.change = _describe_change(schedule, saved)
    # a number of calls is all of their state: so they may continue with another --lr or --epochs
    of_the_step = all(is_torchs(part, _OF_THE_STEP) for part in parts_of(schedule.scheduler))
    if of_the_step and saved["calls"] is not None:
        _replay(schedule, saved)
    elif schedule.scheduler is not None:
        # the state of any other holds what followed from the old settings: new ones are refused
        if change := schedule.change or _changed_argument(schedule, began["settings"]):
            raise BadInput(
                f"its schedule {schedule.name} cannot be repeated up to this step, so it must be that of the "
                f"checkpoint: {change}"
            )
        schedule.scheduler.load_state_dict(saved["state"])
    # after the schedule, whose steps have changed the groups
    _load_groups(schedule, saved)


def _describe_change(schedule: ScheduleState, saved: dict[str, Any]) -> str:
    """Return how the schedule's beginning differs from the saved one; "" if it does not."""
    if saved["class"] != schedule.name:
        return f"it was {saved['class']}"
    began = saved["began"]
    # only what a schedule sets: other hyperparameters may change, and _find_edited() names them
    scheduled = [[*map(_scheduled_ones, groups)] for groups in (began["groups"], schedule.first_groups)]
    pairs = [*zip(*scheduled, strict=True), (began["state"], schedule.began)]
    if _calls_a_function(schedule.scheduler):  # it may depend on any option
        there = {name: began["settings"].get(name) for name in schedule.settings}
        pairs.append((there, schedule.settings))
    for there, here in pairs:
        for name in sorted(there.keys() | here.keys()):
            if not same(there.get(name), here.get(name)):
                return f"its {name} began as {there.get(name)}, this run's as {here.get(name)}"
    return ""


def _changed_argument(schedule: ScheduleState, there: dict[str, Any]) -> str:
    for name in _ARGUMENTS:
        if there.get(name) != schedule.settings.get(name):
            return f"its --{name} was {there.get(name)}, this run's is {schedule.settings.get(name)}"
    return ""


def _replay(schedule: ScheduleState, saved: dict[str, Any]) -> None:
    """Call step() as often as the old schedule was called: 3 us each. The program may have begun before
    Exact."""
    began = saved["began"]
    done = calls(schedule.scheduler) or 0
    if done > saved["calls"]:
        raise BadInput(
            f"its schedule {schedule.name} was called {saved['calls']} times, and that of this program "
            f"{done} times: it cannot go back. Make the model, the optimizer and the schedule again"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns if a scheduler steps before its optimizer
            # the steps of the schedule only, in a moment at the start: no batch is read for it
            for _ in range(saved["calls"] - done):
                schedule.scheduler.step()
    except ValueError as error:  # OneCycleLR after its last step
        raise BadInput(f"its schedule {schedule.name} does not reach its step: {error}") from error
    # the replay may be right and the rates still others, if the user's function was edited: compare them
    bases_there = [group.get("initial_lr") for group in began["groups"]]
    bases_here = [group.get("initial_lr") for group in schedule.first_groups]
    is_same = began["settings"] == schedule.settings and same(bases_there, bases_here)
    there = [float(group["lr"]) for group in saved["groups"]]
    here = [float(group["lr"]) for group in schedule.optimizer.param_groups]
    if there != here and is_same and _calls_a_function(schedule.scheduler):
        raise BadInput(
            f"its schedule {schedule.name} had the learning rates {there} and now gives {here} for "
            "the same step: it is another function, or depends on more than the step"
        )


def _load_groups(schedule: ScheduleState, saved: dict[str, Any]) -> None:
    """Load the saved hyperparameters, except edited ones and those that another schedule has set."""
    groups = schedule.optimizer.param_groups
    count = len(schedule.first_groups)
    # groups added by the loop have no beginning in this program: they take all saved values
    for group, values in zip(groups[count:], saved["groups"][count:], strict=True):
        _set(group, values)
    schedule.edited = _find_edited(schedule, saved)
    rows = zip(groups, saved["groups"], saved["began"]["groups"], schedule.first_groups, strict=False)
    for group, values, saved_initial_values, initial_values in rows:
        taken = {}  # set together: lr and initial_lr may be the same tensor
        for name, value in values.items():
            initial = initial_values.get(name)
            is_edited = not same(saved_initial_values.get(name), initial)
            # the new schedule has set it in the replay: the value of the old schedule is not taken
            is_set = may_be_scheduled(name) or not same(group.get(name), initial)
            if not is_edited and not (schedule.change and is_set):
                taken[name] = value
        _set(group, taken)


def _find_edited(schedule: ScheduleState, saved: dict[str, Any]) -> list[str]:
    """Return a line for each hyperparameter that no schedule sets, and that has another initial value
    here."""
    lines = []
    for number, (there, here) in enumerate(
        zip(saved["began"]["groups"], schedule.first_groups, strict=False)
    ):
        for name in sorted(there.keys() | here.keys()):
            is_setting = not may_be_scheduled(name) and name != NAMES
            if is_setting and not same(there.get(name), here.get(name)):
                lines.append(
                    f"{name} of the optimizer, group {number}, was {there.get(name)} before this start "
                    f"and is {here.get(name)} from here on"
                )
    return lines


def _calls_a_function(scheduler: Any) -> bool:
    """Return whether a function of the user sets the rates: a state_dict does not contain it."""
    return any(
        is_torchs(part, {"LambdaLR", "MultiplicativeLR"})
        or (is_torchs(part, {"CyclicLR"}) and part._scale_fn_custom is not None)
        for part in parts_of(scheduler)
    )


def compare_groups(name: str, saved: list[dict[str, Any]], present: list[dict[str, Any]]) -> list[str]:
    """Return a line for each hyperparameter of an optimizer that differs from the checkpoint's groups."""
    lines = []
    for number, (saved_group, group) in enumerate(zip(saved, present, strict=True)):
        rate = "initial_lr" if "initial_lr" in saved_group else "lr"
        for key in sorted(saved_group.keys() & group.keys() - {"params", NAMES}):
            # a schedule has changed the rate of the checkpoint, but not its initial rate
            is_setting = key == rate or not may_be_scheduled(key)
            if is_setting and not same(saved_group[key], group[key]):
                lines.append(
                    f"{key} of {name}, group {number}, is {saved_group[key]} in the checkpoint, which is "
                    f"used; this program has {group[key]}"
                )
    return lines


def compare_schedules(saved: dict[str, dict[str, Any]], present: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line for each setting of a schedule that differs. saved, present: name -> its first state."""
    lines = []
    for name, began in saved.items():
        begins = present.get(name, {})
        lines += [
            f"{key} of {name} began as {began[key]}, which is used; this program has {begins[key]}"
            for key in sorted(began.keys() & begins.keys())
            if not same(began[key], begins[key])
        ]
    return lines


def _set(group: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if name == "lr" and isinstance(group[name], torch.Tensor):  # a captured CUDA graph reads this tensor
            group[name].copy_(torch.as_tensor(value))
        else:  # old versions of torch have the same tensor as lr and initial_lr
            group[name] = value.clone() if isinstance(value, torch.Tensor) else value


def may_be_scheduled(name: str) -> bool:
    """Return whether a schedule may set this hyperparameter."""
    return name == "lr" or name.endswith(("_lr", "_momentum"))


def _scheduled_ones(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if may_be_scheduled(name)}


def same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
