"""The content of a checkpoint: the state of a run, and the settings that identify the run."""

import argparse
import math
import platform
import uuid
from typing import Any

import numpy
import torch

from common import arguments
from common.checkpoint import files, resume
from common.checkpoint.schedules import ScheduleState, plain

# options that change the trained weights: a checkpoint of another value is refused
IDENTITY = (
    "dataset", "custom_data", "image_size", "first_image_size", "arch", "batch_size", "bn_weight_decay",
    "seed",
)  # fmt: skip
# options that may change at a restart: another value of one of these does not change the schedule
OPERATION = {
    "output_dir", "output_url", "resume", "save_every", "keep", "epoch_weights", "grace", "max_bad_steps",
    "report_every", "enable_gpu", "data_url", "stage", "scan", "cache_dir", "pack", "cache", "cache_mode",
    "workers", "data_backend", "ray_address", "init_method", "rank", "world_size", "local_rank",
    "processes_per_node", "rank_level", "timeout", "weights", "evaluate", "tracker", "early_stopping",
    "compile", "batch_size_per_gpu",
}  # fmt: skip
FORMAT = 2


class RunState:
    """The state of a run as one dictionary of tensors and plain types.

    objects: name -> object with state_dict(). "model" and "optimizer" are required; "scheduler", "scaler",
    "ema" and "receipt" are optional. "scheduler": any schedule of torch, or a class of your own whose state
    is plain (common/checkpoint/schedules.py). The `fingerprint` of "receipt" identifies the training data of
    the run. Raises BadInput if the scheduler cannot be resumed exactly.
    """

    def __init__(self, args: argparse.Namespace, objects: dict[str, Any]):
        self.args, self.objects = args, objects
        self.run = uuid.uuid4().hex[:16]
        self.best, self.best_of = -math.inf, ""  # score of best.pth, and Metrics.best_of
        self.highest, self.epochs_not_better = -math.inf, 0  # best score, evaluations since; on every rank
        self.bad_steps = self.bad_in_a_row = 0  # steps that were skipped
        self.initial_weights: str | None = getattr(args, "weights", None)
        self.identity = {f"--{name}": getattr(args, name) for name in IDENTITY if hasattr(args, name)}
        if fingerprint := getattr(objects.get("receipt"), "fingerprint", ""):
            self.identity["training data"] = fingerprint
        learned = {name: each for name, each in arguments.settings(args).items() if name not in OPERATION}
        self._schedule = ScheduleState(objects["optimizer"], objects.get("scheduler"), learned)

    def capture(self, step: int, steps_per_epoch: int) -> dict[str, Any]:
        """Return the state after `step` optimizer steps. Tensors are not copied."""
        random = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_initialized():  # a job on the CPU does not touch the GPUs
            random["cuda"] = torch.cuda.get_rng_state()
        return {
            "format": FORMAT,
            "step": step,
            "epoch": max(1, math.ceil(step / steps_per_epoch)),
            "step_of_epoch": (step - 1) % steps_per_epoch + 1,
            "run": self.run,
            "identity": self.identity,
            "objects": self._objects(),
            "schedule": self._schedule.state(),
            "random": random,
            "bad_steps": self.bad_steps,
            "bad_in_a_row": self.bad_in_a_row,
            "best": self.best,
            "best_of": self.best_of,
            "highest": self.highest,
            "epochs_not_better": self.epochs_not_better,
            "weights": self.initial_weights,
            "versions": {
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "numpy": numpy.__version__,
            },
            "arguments": arguments.settings(self.args),
        }

    def check_and_restore(self, state: dict, total_steps: int) -> None:
        """Restore a state that was read from a file.

        Raises Refused if it belongs to another run, and BadInput if it has done more than total_steps. A file
        of another program may make load_state_dict() raise any exception; another state can be restored then.
        """
        resume.check(state, FORMAT, self.identity, self.objects["model"].state_dict(), total_steps)
        self.restore(state)

    def restore(self, state: dict) -> None:
        """Load a state of this run into the objects and the random number generators."""
        for name, own in self.objects.items():
            if name == "scheduler":
                continue
            saved = state["objects"].get(name)
            if not saved and name == "scaler":  # only some jobs have one
                continue
            if not saved:
                raise files.Refused(f"it has no {name!r}: leave out --{name}")
            if name == "optimizer":  # its hyperparameters belong to the schedule
                _check_optimizer(own, saved)
                saved = own.state_dict() | {"state": saved["state"]}
            own.load_state_dict(saved)
        self._schedule.load(state["schedule"])
        torch.set_rng_state(state["random"]["cpu"])
        if "cuda" in state["random"] and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(state["random"]["cuda"])
        self.bad_steps, self.bad_in_a_row = state["bad_steps"], state["bad_in_a_row"]
        self.best, self.initial_weights = state["best"], state.get("weights")
        self.best_of, self.highest = state.get("best_of", ""), state.get("highest", state["best"])
        self.epochs_not_better = state.get("epochs_not_better", 0)

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


def _check_optimizer(own: torch.optim.Optimizer, saved: dict) -> None:
    """Raise Refused if the saved optimizer has another class or other groups: it is stored by position."""
    if saved["class"] != type(own).__name__:
        raise files.Refused(f"its optimizer is {saved['class']}, this run's is {type(own).__name__}")
    there, here = (
        [len(group["params"]) for group in groups] for groups in (saved["param_groups"], own.param_groups)
    )
    if there != here:
        raise files.Refused(f"its optimizer has groups of {there} parameters, this run's has {here}")
