"""The content of a checkpoint: the state of a run, and the settings that identify the run."""

import argparse
import math
import platform
import uuid
from typing import Any

import numpy
import torch

from common.checkpoint import digest, files, resume
from common.checkpoint.optimizer_steps import find_optimizers
from common.checkpoint.schedules import ScheduleState, plain
from common.console import arguments
from common.ground.exits import BadInput

# options that change the trained weights: a checkpoint of another value is refused
IDENTITY = (
    "dataset", "custom_data", "image_size", "first_image_size", "arch", "batch_size", "bn_weight_decay",
    "seed", "exact_shards",
)  # fmt: skip
# options that may change at a restart: another value of one of these does not change the schedule
OPERATION = {
    "output_dir", "resume", "save_every", "keep", "epoch_weights", "grace", "max_bad_steps",
    "report_every", "enable_gpu", "data_url", "stage", "scan", "cache_dir", "pack", "cache", "cache_mode",
    "workers", "data_backend", "ray_address", "init_method", "rank", "world_size", "local_rank",
    "processes_per_node", "rank_level", "timeout", "weights", "evaluate", "tracker", "early_stopping",
    "compile", "batch_size_per_gpu", "data", "fp16", "use_dali", "dali_cpu", "gather_checkpoints",
}  # fmt: skip
FORMAT = 2
_COUNTS = ("bad_steps", "bad_in_a_row", "best", "best_of", "highest", "epochs_not_better")  # of a RunState


class RunState:
    """The state of a run as one dictionary of tensors and plain types.

    objects: name -> object with state_dict(). "model" and "optimizer" are required; "scheduler", "scaler",
    "ema" and "receipt" are optional. "scheduler": any schedule of torch, or a class of your own whose state
    is plain (common/checkpoint/schedules.py). The `fingerprint` of "receipt" identifies the training data of
    the run. Raises BadInput if the scheduler cannot be resumed exactly.
    """

    def __init__(self, args: argparse.Namespace, objects: dict[str, Any]):
        self.args, self.objects = args, objects
        self.objects |= _inner_optimizers(objects["optimizer"])
        self._later: dict | None = None  # a state whose parameter groups are not all added yet
        self.run = uuid.uuid4().hex[:16]
        self.best, self.best_of = -math.inf, ""  # score of best.pth, and Metrics.best_of
        self.highest, self.epochs_not_better = -math.inf, 0  # best score, evaluations since; on every rank
        self.bad_steps = self.bad_in_a_row = 0  # steps that were skipped
        self._restored: dict | None = None  # the state of restore(), until the first step
        self.initial_weights: str | None = getattr(args, "weights", None)
        self.identity = {f"--{name}": getattr(args, name) for name in IDENTITY if hasattr(args, name)}
        if fingerprint := getattr(objects.get("receipt"), "fingerprint", ""):
            self.identity["training data"] = fingerprint
        learned = {name: each for name, each in arguments.settings(args).items() if name not in OPERATION}
        self._schedule = ScheduleState(objects["optimizer"], objects.get("scheduler"), learned)

    @property
    def change(self) -> str:
        """Return how the schedule of the restored state differs from this run's; "" if it does not."""
        return self._schedule.change

    def capture(self, step: int, steps_per_epoch: int) -> dict[str, Any]:
        """Return the state after `step` optimizer steps. Tensors are not copied."""
        frozen = [name for name, each in self.objects["model"].named_parameters() if not each.requires_grad]
        return {
            "format": FORMAT,
            "step": step,
            "epoch": max(1, math.ceil(step / steps_per_epoch)),
            "step_of_epoch": (step - 1) % steps_per_epoch + 1,
            "run": self.run,
            "identity": self.identity,
            "objects": self._objects(),
            "schedule": self._schedule.state(),
            "frozen": frozen,
            "weights": self.initial_weights,
            "versions": {
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "numpy": numpy.__version__,
            },
            "arguments": arguments.settings(self.args),
        } | {name: getattr(self, name) for name in _COUNTS}

    def find_unsaveable(self) -> str:
        """Return why a checkpoint cannot hold the present state; "" if it can. Tensors are not copied."""
        try:
            state = self.capture(0, 1)
        except Exception as error:  # the objects may be the user's own
            return f"a checkpoint cannot be saved: {error}"
        held = {
            each.data_ptr()
            for name, own in state["objects"].items()
            if name not in self._optimizers()
            for _, each in digest.leaves({name: own})
            if isinstance(each, torch.Tensor)
        }
        trained = [
            each
            for own in self._optimizers().values()
            for group in own.param_groups
            for each in group["params"]
        ]
        if lost := sum(each.numel() > 0 and each.data_ptr() not in held for each in trained):
            return (
                f"the optimizer trains {lost} tensors that no checkpoint holds: put them into the model, or "
                "add their module before resume(): checkpoint.add(name=module)"
            )
        name = files.find_unreadable(state["objects"])
        return name and f"a checkpoint cannot hold {name}: use tensors, numbers, text, lists and dictionaries"

    def check_and_restore(self, state: dict, total_steps: int) -> None:
        """Restore a state that was read from a file.

        Raises Refused if it belongs to another run, and BadInput if it has done more than total_steps. A file
        of another program may make load_state_dict() raise any exception; another state can be restored then.
        """
        resume.check(state, FORMAT, self.identity, self.objects["model"].state_dict(), total_steps)
        self.restore(state)

    def restore(self, state: dict) -> None:
        """Load a state of this run into the objects.

        If its optimizer has parameter groups that the loop has still to add, the state of the optimizers and
        of the schedule is loaded before the first step (before_step).
        """
        self._restored = state
        saved = state["objects"]
        optional = {"scheduler", "scaler"}  # not every job had a scaler
        criterion = self.objects.get("criterion")
        if not isinstance(criterion, torch.nn.Module) or not list(criterion.parameters()):
            optional.add("criterion")  # earlier versions did not save its constants
        if missing := sorted(self.objects.keys() - saved.keys() - optional):
            raise files.Refused(
                f"it has no {missing[0]!r}, which this run saves: leave it out, as in that run"
            )
        if saved["optimizer"]["class"] != (name := type(self.objects["optimizer"]).__name__):
            raise files.Refused(f"its optimizer is {saved['optimizer']['class']}, this run's is {name}")
        for name, own in self._optimizers().items():
            there, here = _sizes(saved[name]), _sizes(own)
            if there[: len(here)] != here:  # the loop may add the last groups later
                raise files.Refused(f"its {name} has groups of {there} parameters, this run's has {here}")
        self._later = state if self._find_missing_groups(state) else None
        for name, own in self.objects.items():
            is_other = name not in saved or (name == "scaler" and not saved[name])
            if not is_other and not isinstance(own, torch.optim.Optimizer):
                own.load_state_dict(saved[name])
        if not self._later:
            self._restore_optimizers(state)
        self.initial_weights, self.highest = state.get("weights"), state["best"]  # if it is missing
        for name in _COUNTS:
            setattr(self, name, state.get(name, getattr(self, name)))

    def before_step(self) -> None:
        """Load the state of parameter groups that the loop has added since restore(). Call it before each
        optimizer step. Raises BadInput if groups are still missing at the first one."""
        if self._later:
            if missing := self._find_missing_groups(self._later):
                raise BadInput(
                    f"{missing} at its first step: add them again, if `epoch >= N`, not only if `epoch == N`"
                )
            self._restore_optimizers(self._later)
            self._later = None

    def check_frozen(self) -> str:
        """Return a warning if other parameters are frozen than at the checkpoint, or "". After the first call
        it is ""."""
        state, self._restored = self._restored, None
        if not state or "frozen" not in state:
            return ""
        frozen = {name for name, each in self.objects["model"].named_parameters() if not each.requires_grad}
        if not (changed := sorted(frozen ^ set(state["frozen"]))):
            return ""
        is_now = "frozen" if changed[0] in frozen else "trained"
        return (
            f"warning: {changed[0]} is {is_now} now, unlike at the checkpoint ({len(changed)} in all): if "
            "the loop changes it at an epoch, write `epoch >= N`, not `epoch == N`"
        )

    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {name: each for name, each in self.objects.items() if isinstance(each, torch.optim.Optimizer)}

    def _find_missing_groups(self, state: dict) -> str:
        """Return which optimizer has fewer groups than in the state; "" if none has."""
        for name, own in self._optimizers().items():
            there, here = _sizes(state["objects"][name]), _sizes(own)
            if there != here:
                return f"the {name} of the checkpoint has groups of {there} parameters, this run's has {here}"
        return ""

    def _restore_optimizers(self, state: dict) -> None:
        """Load the states of the optimizers and of the schedule.

        An optimizer keeps its list of groups, because another one may share it: load_state_dict() makes a
        new list.
        """
        own = self._optimizers()
        groups = {name: each.param_groups for name, each in own.items()}
        for name, each in own.items():
            saved = state["objects"][name]
            if name == "optimizer":  # its hyperparameters belong to the schedule
                saved = saved | {"param_groups": each.state_dict()["param_groups"]}
                del saved["class"]
            each.load_state_dict(saved)
        for name, each in own.items():
            for kept, loaded in zip(groups[name], each.param_groups, strict=True):
                kept.update(loaded)
            each.param_groups = groups[name]
        self._schedule.load(state["schedule"])

    def note(self, score: float, best_of: str) -> None:
        """Record the score of an evaluation, and count the evaluations since the best one.

        best_of: Metrics.best_of. If the job named another metric before the restart, the best score is reset.
        """
        if best_of != self.best_of:
            self.best, self.highest, self.best_of = -math.inf, -math.inf, best_of
        self.epochs_not_better = 0 if score > self.highest else self.epochs_not_better + 1
        self.highest = max(self.highest, score)

    def _objects(self) -> dict[str, dict]:
        states = {name: own.state_dict() for name, own in self.objects.items() if name != "scheduler"}
        optimizer = states["optimizer"]
        groups = [
            plain(group, "a checkpoint cannot hold the optimizer's ") for group in optimizer["param_groups"]
        ]
        states["optimizer"] = optimizer | {
            "class": type(self.objects["optimizer"]).__name__,
            "param_groups": groups,
        }
        return states


def _sizes(optimizer: Any) -> list[int]:
    """Return the number of parameters in each group of an optimizer or of its state."""
    groups = optimizer["param_groups"] if isinstance(optimizer, dict) else optimizer.param_groups
    return [len(group["params"]) for group in groups]


def _inner_optimizers(optimizer: Any) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers that an optimizer holds, unless it defines state_dict() itself. Raises BadInput
    if it is not an optimizer."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadInput(
            f"the optimizer {type(optimizer).__name__} is not a torch.optim.Optimizer: give one of its "
            "optimizers, and the others with checkpoint.add(name=optimizer)"
        )
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        return {}
    return {f"optimizer.{place}": each for place, each in enumerate(find_optimizers(vars(optimizer)))}
