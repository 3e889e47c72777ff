"""The content of a checkpoint: the state of a run, and the settings that identify the run."""

import uuid
from collections.abc import Mapping
from typing import Any, Protocol, TypedDict

import torch

from bootfile.exact import digest, dtensors, files
from bootfile.exact.optimizer_steps import find_optimizers
from bootfile.exact.schedules import ScheduleState, plain
from bootfile.ground.errors import BadInput

FORMAT = 2


class Extras(Protocol):
    """Plain values of the program around a loop, such as the score of its best weights. Their names stand in
    the state beside those of SavedState."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values from a whole SavedState."""


class _WholeState(TypedDict):
    """The content of a checkpoint: tensors and plain types.

    format: FORMAT. step: optimizer steps so far. run: the name of the run, the same in all its checkpoints.
    identity, sampling: as for RunState. arguments: its settings.
    objects: name -> state_dict() of each object; that of "optimizer" also has its "class".
    schedule: of ScheduleState. frozen: names of the parameters that are not trained.
    machines: those that have computed it (machines.py); version 0.30 was the first that wrote it.
    bad_steps, bad_in_a_row: steps that were skipped, in all and since the last good one.
    """

    format: int
    step: int
    run: str
    identity: dict[str, Any]
    objects: dict[str, Any]
    schedule: dict[str, Any]
    frozen: list[str]
    arguments: dict[str, Any]
    sampling: dict[str, Any]
    machines: list[dict[str, Any]]
    bad_steps: int
    bad_in_a_row: int


class SavedState(_WholeState, total=False):
    """The content of a checkpoint.

    shards: if each rank has written its part, the files of the sharded tensors, or their path when it is read
        (dtensor_files.py). Then those in `objects` are meta tensors.
    """

    shards: Any


class RunState:
    """The state of a run as one dictionary of tensors and plain types.

    identity: name -> plain value; a state of another value is of another run.
    settings: name -> plain value, stored for later.
    learned: the settings that may change the training, see ScheduleState.
    sampling: Loader.sampling, what determines the samples of each step; a state with other values is refused.
    objects: name -> object with state_dict(). "model" and "optimizer" are required; "scheduler", "scaler",
    "ema" and "receipt" are optional. "scheduler": any schedule of torch, or a class of your own whose state
    is plain (bootfile/exact/schedules.py). The `fingerprint` of "receipt" identifies the training data of
    the run. Raises BadInput if the scheduler cannot be resumed exactly.
    """

    def __init__(
        self,
        objects: dict[str, Any],
        identity: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
        learned: dict[str, Any] | None = None,
        sampling: dict[str, Any] | None = None,
    ):
        self.objects, self.identity, self.settings = objects, {**(identity or {})}, settings or {}
        self.sampling = sampling or {}
        self.is_sharded = dtensors.is_sharded(objects["model"])
        self.objects |= _inner_optimizers(objects["optimizer"])
        self._later: SavedState | None = None  # a state whose parameter groups are not all added yet
        self.run = uuid.uuid4().hex[:16]
        self.bad_steps = 0  # steps that were skipped
        self.bad_in_a_row = 0
        self.extras: Extras | None = None
        self._frozen_before: set[str] | None = None  # at the restored checkpoint, until the first step
        self.machines: list[dict[str, Any]] = []  # those that have computed it (machines.py)
        if fingerprint := getattr(objects.get("receipt"), "fingerprint", ""):
            self.identity["training data"] = fingerprint
        self.schedule = ScheduleState(objects["optimizer"], objects.get("scheduler"), learned or {})

    def capture(self, step: int) -> SavedState:
        """Return the state after `step` optimizer steps. Tensors are not copied."""
        state = SavedState(
            format=FORMAT,
            step=step,
            run=self.run,
            identity=self.identity,
            objects=self._objects(),
            schedule=self.schedule.state(),
            frozen=sorted(self._frozen()),
            arguments=self.settings,
            sampling=self.sampling,
            machines=self.machines,
            bad_steps=self.bad_steps,
            bad_in_a_row=self.bad_in_a_row,
        )
        state.update(self.counts())  # type: ignore[typeddict-item]  # the extras have names of their own
        return state

    def counts(self) -> dict[str, Any]:
        """Return the counts of bad steps, and the extras."""
        counts = {"bad_steps": self.bad_steps, "bad_in_a_row": self.bad_in_a_row}
        if self.extras:
            counts |= self.extras.state_dict()
        return counts

    def check_saveable(self) -> None:
        """Raise BadInput if a checkpoint cannot hold the present state. Tensors are not copied."""
        try:
            objects = self.capture(0)["objects"]
            files.check_readable(objects)
        except Exception as error:  # the objects may be the user's own
            raise BadInput(f"a checkpoint cannot be saved: {error}") from error
        optimizers = self._optimizers().values()
        modules = {name: each for name, each in objects.items() if name not in self._optimizers()}
        tensors = (each for _, each in digest.leaves(modules) if isinstance(each, torch.Tensor))
        held = {dtensors.local(each).data_ptr() for each in tensors}
        groups = [group for own in optimizers for group in own.param_groups]
        trained = [dtensors.local(each) for group in groups for each in group["params"]]
        if lost := sum(each.numel() > 0 and each.data_ptr() not in held for each in trained):
            raise BadInput(
                f"the optimizer trains {lost} tensors that no checkpoint holds: put them into the model, or "
                "add their module before resume(): checkpoint.add(name=module)"
            )

    def load(self, state: SavedState, total_steps: int) -> None:
        """Check a state that was read from a file, and restore it if the model is not sharded.

        Raises Refused, with both values, if it belongs to another run, and BadInput if it has done more than
        total_steps. A file of another program may raise any exception; another state can be loaded then.
        """
        if state.get("format") != FORMAT:
            raise files.Refused(f"its format is {state.get('format')}, this program reads {FORMAT}")
        # another version may have counted other options as identity
        saved = _options(state["arguments"]) | state["identity"]
        own = _options(self.settings) | self.identity
        for name in sorted(state["identity"].keys() | self.identity.keys()):
            if saved.get(name) != own.get(name):
                raise files.Refused(f"its {name} is {saved.get(name)}, this run's is {own.get(name)}")
        for name, there in state.get("sampling", {}).items():  # version 0.21 did not write it
            if there != (here := self.sampling.get(name)):
                raise files.Refused(f"its samples have the {name} {there}, this run's the {name} {here}")
        models = state["objects"]["model"], self.objects["model"].state_dict()
        for name in sorted(models[0].keys() | models[1].keys()):
            there, here = (_shape(name, each[name]) if name in each else "missing" for each in models)
            if there != here:
                raise files.Refused(f"its model is different: {name} is {there}, this run's is {here}")
        if state["step"] > total_steps:
            raise BadInput(
                f"it is of step {state['step']}, and this run ends at step {total_steps}: raise --epochs or "
                "--max_steps, or use another --output_dir"
            )
        self._check_objects(state["objects"])
        if not self.is_sharded:
            self.restore(state)

    def broadcast(self, state: SavedState | None) -> SavedState | None:
        """Return rank 0's state on every rank, with the tensors of a sharded model as this rank's parts."""
        objects: dict[str, Any] = {
            name: own.state_dict() for name, own in self.objects.items() if isinstance(own, torch.nn.Module)
        }
        for name, own in self._optimizers().items():
            parameters = [each for group in own.param_groups for each in group["params"]]
            objects[name] = {"state": dict(enumerate(parameters))}
        state = dtensors.broadcast(state, {"objects": objects})
        if state and "shards" in state:
            from bootfile.exact import dtensor_files

            dtensor_files.load(state["shards"], state["objects"])
        return state

    def _check_objects(self, saved: dict[str, Any]) -> None:
        """Raise Refused if the objects of a state cannot be loaded into those of this run."""
        optional = {"scheduler", "scaler"}  # not every job had a scaler
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

    def restore(self, state: SavedState) -> None:
        """Load a state of this run into the objects.

        If its optimizer has parameter groups that the loop has still to add, the state of the optimizers and
        of the schedule is loaded before the first step (before_step).
        """
        saved = state["objects"]
        self._later = state if self._find_missing_groups(state) else None
        for name, own in self.objects.items():
            is_other = name not in saved or (name == "scaler" and not saved[name])
            if not is_other and not isinstance(own, torch.optim.Optimizer):
                own.load_state_dict(saved[name])
        if not self._later:
            self._restore_optimizers(state)
        self._frozen_before = set(state["frozen"])
        self.bad_steps = state["bad_steps"]
        self.bad_in_a_row = state["bad_in_a_row"]
        if self.extras:
            self.extras.load_state_dict(state)

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

    def take_change_of_frozen(self) -> str:
        """Return a warning if other parameters are frozen than at the checkpoint, or "". After the first call
        it is ""."""
        saved, self._frozen_before = self._frozen_before, None
        if saved is None or not (changed := sorted(saved ^ self._frozen())):
            return ""
        is_now = "trained" if changed[0] in saved else "frozen"
        return (
            f"warning: {changed[0]} is {is_now} now, unlike at the checkpoint ({len(changed)} in all): if "
            "the loop changes it at an epoch, write `epoch >= N`, not `epoch == N`"
        )

    def _frozen(self) -> set[str]:
        return {name for name, each in self.objects["model"].named_parameters() if not each.requires_grad}

    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {name: each for name, each in self.objects.items() if isinstance(each, torch.optim.Optimizer)}

    def _find_missing_groups(self, state: SavedState) -> str:
        """Return which optimizer has fewer groups than in the state; "" if none has."""
        for name, own in self._optimizers().items():
            there, here = _sizes(state["objects"][name]), _sizes(own)
            if there != here:
                return f"the {name} of the checkpoint has groups of {there} parameters, this run's has {here}"
        return ""

    def _restore_optimizers(self, state: SavedState) -> None:
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
        self.schedule.load(state["schedule"])

    def _objects(self) -> dict[str, dict[str, Any]]:
        states = {name: own.state_dict() for name, own in self.objects.items() if name != "scheduler"}
        optimizer = states["optimizer"]
        groups = plain(optimizer["param_groups"], "a checkpoint cannot hold the optimizer's ")
        name = type(self.objects["optimizer"]).__name__
        return states | {"optimizer": optimizer | {"class": name, "param_groups": groups}}


def _options(settings: dict[str, Any]) -> dict[str, Any]:
    return {f"--{name}": value for name, value in settings.items()}


def _shape(name: str, value: object) -> object:
    """Return the shape of a tensor; for the extra state of a module, that it has one."""
    if name.endswith("_extra_state") or not isinstance(value, torch.Tensor):
        return "present"
    return list(value.shape)


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
