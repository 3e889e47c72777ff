"""Save and resume a learning-rate schedule and the hyperparameters of its optimizer, exactly.

A checkpoint holds the scheduler's state_dict and how the schedule began. replay.py loads it.
A scheduler whose state a checkpoint cannot hold is refused by the name of its class, before training.
"""

from typing import Any

import torch

from bootfile.exact.optimizer_steps import without_kernels
from bootfile.ground.errors import BadInput

_TORCH = "torch.optim.lr_scheduler"


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
        self.first_groups = self._hyperparameters()
        self.began = plain(scheduler.state_dict()) if scheduler else {}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: plain types and tensors."""
        return {
            "class": self.name,
            "calls": calls(self.scheduler),
            "began": {"state": self.began, "groups": self.first_groups, "settings": self.settings},
            "state": plain(self.scheduler.state_dict()) if self.scheduler else {},
            "groups": self._hyperparameters(),
        }

    def _hyperparameters(self) -> list[dict[str, Any]]:
        return [plain(without_kernels(group)) for group in self.optimizer.param_groups]

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


def parts_of(scheduler: Any) -> list[Any]:
    """Return the schedulers in a composite one, or the scheduler itself."""
    if not _is_composite(scheduler):
        return [scheduler]
    return [part for inner in scheduler._schedulers for part in parts_of(inner)]


def _is_composite(scheduler: Any) -> bool:
    return is_torchs(scheduler, {"SequentialLR", "ChainedScheduler"})


def is_torchs(scheduler: Any, names: set[str]) -> bool:
    return type(scheduler).__module__ == _TORCH and type(scheduler).__name__ in names


def calls(scheduler: Any) -> int | None:
    """Return how often step() was called; None if it was called with fractions of an epoch."""
    if is_torchs(scheduler, {"ChainedScheduler"}):
        return calls(scheduler._schedulers[0])
    if scheduler is None or getattr(scheduler, "T_cur", 0) % 1:
        return None
    return getattr(scheduler, "last_epoch", None)


def beginning(value: Any) -> dict[str, Any]:
    """Return the state of a further schedule of torch before its first step; {} of any other object."""
    return plain(value.state_dict()) if type(value).__module__ == _TORCH else {}
