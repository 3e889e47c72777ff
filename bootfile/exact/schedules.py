"""Save and resume a learning-rate schedule and the hyperparameters of its optimizer, exactly.

A checkpoint holds the scheduler's state_dict and how the schedule began. There are two kinds of schedules:

- torch's schedules that depend only on the number of calls of step(). The schedule repeats these calls. If it
  began with other settings (--lr, --epochs), it continues at the same step of the new schedule.
- all others, such as ReduceLROnPlateau and classes of the user's own. Their state is loaded. It is an error
  if --lr, --epochs or the schedule's own settings are not those of the checkpoint.

A scheduler whose state a checkpoint cannot hold is refused by the name of its class, before training.
"""

import warnings
from typing import Any

import torch

from bootfile.exact.digest import without_kernels
from bootfile.ground.errors import BadInput

_TORCH = "torch.optim.lr_scheduler"
_OF_THE_STEP = {
    "LambdaLR", "MultiplicativeLR", "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR",
    "PolynomialLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "OneCycleLR",
}  # fmt: skip
_ARGUMENTS = ("lr", "epochs")
NAMES = "param_names"  # in a group of an optimizer that got named_parameters(): not a setting


class ScheduleState:
    """The state of one scheduler and of its optimizer's parameter groups.

    Make it before the first step: it records how the schedule began. scheduler: None if the job has none.
    settings: the options of the job that may change the schedule, name -> plain value. Raises BadInput with
    the name of the class if a checkpoint cannot hold the scheduler's state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Any, settings: dict[str, Any]):
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.settings = settings
        self.name = _name(scheduler)
        self.change = ""  # how the schedule of the checkpoint differs from this one
        self.edited: list[str] = []  # a line for each other hyperparameter that began with another value
        self._check()
        # before the first step, and before a checkpoint is loaded: a schedule changes these values
        self._groups = self._hyperparameters()
        self._began = plain(scheduler.state_dict()) if scheduler else {}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: plain types and tensors."""
        return {
            "class": self.name,
            "calls": _calls(self.scheduler),
            "began": {"state": self._began, "groups": self._groups, "settings": self.settings},
            "state": plain(self.scheduler.state_dict()) if self.scheduler else {},
            "groups": self._hyperparameters(),
        }

    def _hyperparameters(self) -> list[dict[str, Any]]:
        return [plain(without_kernels(group)) for group in self.optimizer.param_groups]

    def load(self, saved: dict[str, Any]) -> None:
        """Load a result of state(). Raises BadInput, with both values, if it cannot continue exactly."""
        began = saved["began"]
        if len(began["groups"]) != len(self._groups):
            raise BadInput(
                f"the optimizer of the checkpoint began with {len(began['groups'])} parameter groups, this "
                f"run's with {len(self._groups)}: add the others in the same place, before Exact or in the loop"
            )
        self.change = self._describe_change(saved)
        # a number of calls is all of their state: so they may continue with another --lr or --epochs
        if self.scheduler is not None and _of_the_step(self.scheduler) and saved["calls"] is not None:
            self._replay(saved)
        elif self.scheduler is not None:
            # the state of any other holds what followed from the old settings: new ones are refused
            if change := self.change or self._changed_argument(began["settings"]):
                raise BadInput(
                    f"its schedule {self.name} cannot be repeated up to this step, so it must be that of the "
                    f"checkpoint: {change}"
                )
            self.scheduler.load_state_dict(saved["state"])
        # after the schedule, whose steps have changed the groups
        self._load_groups(saved)

    def _check(self) -> None:
        """Raise BadInput if a checkpoint cannot hold the state of the scheduler."""
        if self.scheduler is None:
            return
        refusal = f"the schedule {self.name} cannot be resumed: "
        for method in ("step", "state_dict", "load_state_dict"):
            if not hasattr(self.scheduler, method):
                raise BadInput(f"{refusal}it has no {method}()")
        state = self.scheduler.state_dict()
        plain(state, f"{refusal}a checkpoint cannot hold its ")
        # torch's own leave out only functions, which the program gives them again
        if type(self.scheduler).__module__ == _TORCH:
            return
        # an attribute outside of state_dict() is lost at a restart: a counter would begin again
        for name, value in vars(self.scheduler).items():
            if name not in state and value is not self.optimizer and not callable(value):
                raise BadInput(f"{refusal}its state_dict() leaves out {name!r}")

    def _describe_change(self, saved: dict[str, Any]) -> str:
        """Return how the schedule's beginning differs from the saved one; "" if it does not."""
        if saved["class"] != self.name:
            return f"it was {saved['class']}"
        began = saved["began"]
        # only what a schedule sets: other hyperparameters may change, and _find_edited() names them
        scheduled = [[*map(_scheduled_ones, groups)] for groups in (began["groups"], self._groups)]
        pairs = [*zip(*scheduled, strict=True), (began["state"], self._began)]
        if _calls_a_function(self.scheduler):  # it may depend on any option
            there = {name: began["settings"].get(name) for name in self.settings}
            pairs.append((there, self.settings))
        for there, here in pairs:
            for name in sorted(there.keys() | here.keys()):
                if not same(there.get(name), here.get(name)):
                    return f"its {name} began as {there.get(name)}, this run's as {here.get(name)}"
        return ""

    def _changed_argument(self, there: dict[str, Any]) -> str:
        for name in _ARGUMENTS:
            if there.get(name) != self.settings.get(name):
                return f"its --{name} was {there.get(name)}, this run's is {self.settings.get(name)}"
        return ""

    def _replay(self, saved: dict[str, Any]) -> None:
        """Call step() as often as the old schedule was called: 3 us each. The program may have begun before
        Exact."""
        began = saved["began"]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns if a scheduler steps before its optimizer
                # the steps of the schedule only, in a moment at the start: no batch is read for it
                for _ in range(saved["calls"] - (_calls(self.scheduler) or 0)):
                    self.scheduler.step()
        except ValueError as error:  # OneCycleLR after its last step
            raise BadInput(f"its schedule {self.name} does not reach its step: {error}") from error
        # the replay may be right and the rates still others, if the user's function was edited: compare them
        bases_there = [group.get("initial_lr") for group in began["groups"]]
        bases_here = [group.get("initial_lr") for group in self._groups]
        is_same = began["settings"] == self.settings and same(bases_there, bases_here)
        there = [float(group["lr"]) for group in saved["groups"]]
        here = [float(group["lr"]) for group in self.optimizer.param_groups]
        if there != here and is_same and _calls_a_function(self.scheduler):
            raise BadInput(
                f"its schedule {self.name} had the learning rates {there} and now gives {here} for "
                "the same step: it is another function, or depends on more than the step"
            )

    def _load_groups(self, saved: dict[str, Any]) -> None:
        """Load the saved hyperparameters, except edited ones and those that another schedule has set."""
        groups = self.optimizer.param_groups
        count = len(self._groups)
        # groups added by the loop have no beginning in this program: they take all saved values
        for group, values in zip(groups[count:], saved["groups"][count:], strict=True):
            _set(group, values)
        self.edited = self._find_edited(saved)
        rows = zip(groups, saved["groups"], saved["began"]["groups"], self._groups, strict=False)
        for group, values, saved_initial_values, initial_values in rows:
            taken = {}  # set together: lr and initial_lr may be the same tensor
            for name, value in values.items():
                initial = initial_values.get(name)
                is_edited = not same(saved_initial_values.get(name), initial)
                # the new schedule has set it in the replay: the value of the old schedule is not taken
                is_set = may_be_scheduled(name) or not same(group.get(name), initial)
                if not is_edited and not (self.change and is_set):
                    taken[name] = value
            _set(group, taken)

    def _find_edited(self, saved: dict[str, Any]) -> list[str]:
        """Return a line for each hyperparameter that no schedule sets, and that has another initial value
        here."""
        lines = []
        for number, (there, here) in enumerate(zip(saved["began"]["groups"], self._groups, strict=False)):
            for name in sorted(there.keys() | here.keys()):
                is_setting = not may_be_scheduled(name) and name != NAMES
                if is_setting and not same(there.get(name), here.get(name)):
                    lines.append(
                        f"{name} of the optimizer, group {number}, was {there.get(name)} before this start "
                        f"and is {here.get(name)} from here on"
                    )
        return lines


def plain(value: Any, refusal: str = "a checkpoint cannot hold ") -> Any:
    """Return a copy in types that torch.load(weights_only=True) reads on every supported version: None, bool,
    int, float, str, lists, tuples, dictionaries and tensors. Functions are left out: the job passes them to
    the scheduler again. Raises BadInput for another type: `refusal` and the type."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    for kind in (int, float, str):  # NumPy's float64 is a float, and weights_only refuses it
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, dict):
        parts = [(key, part) for key, part in value.items() if not callable(part)]
        return {plain(key, refusal): plain(part, f"{refusal}{key}, ") for key, part in parts}
    # exact types: a named tuple would need its class, which weights_only refuses
    if type(value) in (list, tuple):
        return type(value)(plain(part, refusal) for part in value if not callable(part))
    raise BadInput(f"{refusal}{type(value).__name__}")


def _name(scheduler: Any) -> str:
    """Return the classes of a scheduler: "StepLR", or "SequentialLR(LinearLR, StepLR)"."""
    if scheduler is None:
        return "none"
    inner = f"({', '.join(map(_name, scheduler._schedulers))})" if _is_composite(scheduler) else ""
    return f"{type(scheduler).__name__}{inner}"


def _parts(scheduler: Any) -> list[Any]:
    """Return the schedulers in a composite one, or the scheduler itself."""
    if not _is_composite(scheduler):
        return [scheduler]
    return [part for inner in scheduler._schedulers for part in _parts(inner)]


def _is_composite(scheduler: Any) -> bool:
    return _is_torchs(scheduler, {"SequentialLR", "ChainedScheduler"})


def _is_torchs(scheduler: Any, names: set[str]) -> bool:
    return type(scheduler).__module__ == _TORCH and type(scheduler).__name__ in names


def _of_the_step(scheduler: Any) -> bool:
    """Return whether the rates depend only on how often step() was called."""
    return all(_is_torchs(part, _OF_THE_STEP) for part in _parts(scheduler))


def _calls_a_function(scheduler: Any) -> bool:
    """Return whether a function of the user sets the rates: a state_dict does not contain it."""
    return any(
        _is_torchs(part, {"LambdaLR", "MultiplicativeLR"})
        or (_is_torchs(part, {"CyclicLR"}) and part._scale_fn_custom is not None)
        for part in _parts(scheduler)
    )


def _calls(scheduler: Any) -> int | None:
    """Return how often step() was called; None if it was called with fractions of an epoch."""
    if _is_torchs(scheduler, {"ChainedScheduler"}):
        return _calls(scheduler._schedulers[0])
    if scheduler is None or getattr(scheduler, "T_cur", 0) % 1:
        return None
    return getattr(scheduler, "last_epoch", None)


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


def beginning(value: Any) -> dict[str, Any]:
    """Return the state of a further schedule of torch before its first step; {} of any other object."""
    return plain(value.state_dict()) if type(value).__module__ == _TORCH else {}


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
