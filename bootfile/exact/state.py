"""The content of a checkpoint: the state of a run, and the settings that identify the run."""

import functools
import uuid
from collections.abc import Mapping
from typing import Any, Protocol, TypedDict

import torch
from torch.nn.parameter import is_lazy

from bootfile.exact import code, digest, dtensors, files
from bootfile.exact.marks import read_mark
from bootfile.exact.optimizer_steps import find_optimizers, parameters_of
from bootfile.exact.order import Order, check_order, order_of
from bootfile.exact.schedules import ScheduleState, beginning, plain
from bootfile.ground.errors import BadInput

FORMAT = 3
_DATA = "training data"  # a name in the identity
COMPUTED = "items-"  # a fingerprint of samples that a program may have computed begins with this


class Extras(Protocol):
    """Plain values of the program around a loop, such as the score of its best weights. A state has their
    names in addition to those of SavedState."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values from a whole SavedState."""


class LoopAttributes(Protocol):
    """What a loop changes in its data set (bootfile/loaders/loop_attributes.py)."""

    def state(self) -> dict[str, Any]: ...

    def restore(self, values: dict[str, Any]) -> None: ...

    def end_epoch(self) -> None: ...


class _WholeState(TypedDict):
    """The content of a checkpoint: tensors and plain types. Every field is there.

    format: FORMAT. step: optimizer steps so far. run: the name of the run, the same in all its checkpoints.
    identity, sampling: as for RunState. arguments: its settings.
    objects: name -> state_dict() of each object; that of "optimizer" also has its "class".
    schedule: of ScheduleState. frozen: names of the parameters that are not trained.
    machines: those that have computed it (machines.py).
    order: the names of what is kept by position. began: name -> state of each further schedule before the
        first step. code: the digests of the script and its modules (code.py).
    epoch_ended: `step` ends an epoch, and the code of the loop after it has run.
    attributes: path -> value of what the loop has changed in its data set.
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
    order: Order
    began: dict[str, dict[str, Any]]
    code: dict[str, str]
    epoch_ended: bool
    attributes: dict[str, Any]
    bad_steps: int
    bad_in_a_row: int


class SavedState(_WholeState, total=False):
    """The content of a checkpoint of a model, which may be in parts.

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
        self.objects = objects
        self.identity = dict(identity or {})
        self.settings = settings or {}
        self.sampling = sampling or {}
        self.is_sharded = dtensors.is_sharded(objects["model"])
        # an optimizer around others saves its own state only; theirs become objects of the checkpoint
        self.objects |= _inner_optimizers(objects["optimizer"])
        self._later: SavedState | None = None  # a state whose parameter groups are not all added yet
        self.run = uuid.uuid4().hex[:16]
        self.bad_steps = 0  # steps that were skipped
        self.bad_in_a_row = 0
        self.extras: Extras | None = None
        self.attributes: LoopAttributes | None = None  # those of the data set that the loop changes
        self.is_other_machine = False  # the one of the checkpoint had another instruction set
        self.generators: list[str] = []  # names of those that were added, in their order
        self._notes: list[str] = []  # what restore() has to say
        self._began: dict[str, dict[str, Any]] = {}  # further schedules, see SavedState
        self._frozen_before: set[str] | None = None  # at the restored checkpoint, until the first step
        self.machines: list[dict[str, Any]] = []  # those that have computed it (machines.py)
        # the receipt reads the samples, so it knows when a run is started again on other data
        fingerprint = getattr(objects.get("receipt"), "fingerprint", "")
        if fingerprint:
            self.identity[_DATA] = fingerprint
        self.further: dict[str, str] = getattr(objects.get("receipt"), "further", {})
        for name, text in self.further.items():
            self.identity[name] = COMPUTED + text
        # before a checkpoint is loaded: it records how the schedule began in this program
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
            order=order_of(self.objects, self.generators),
            began=self._began,
            code=self.code,
            epoch_ended=False,
            attributes=self.attributes.state() if self.attributes else {},
        )
        state.update(self.counts())  # type: ignore[typeddict-item]  # the extras have names of their own
        return state

    def outline(self) -> list[tuple[str, str]]:
        """Return (name, text) of the calls of the schedule, and of each value of torch's objects. The text is
        another one if the value was changed in place. Of a tensor a few elements are read."""
        outline = [("the scheduler", repr(self.schedule.state()["calls"]))]
        # an object of the user may count seconds, or hold long lists
        parts = {name: value.state_dict() for name, value in self.objects.items() if _is_torchs(value)}
        for name, leaf in digest.leaves(parts):
            if "_extra_state" in name:  # the module's own, which may count seconds as well
                continue
            if not isinstance(leaf, torch.Tensor):
                outline.append((name, repr(leaf)))
            else:
                outline.append((name, read_mark(leaf)))
        return outline

    @functools.cached_property
    def code(self) -> dict[str, str]:
        """The digests of this program. A start asks before it compares a checkpoint, when its modules are
        imported and hardly anybody has changed their files since."""
        return code.digest_modules()

    def counts(self) -> dict[str, Any]:
        """Return the counts of bad steps, and the extras."""
        counts = {"bad_steps": self.bad_steps, "bad_in_a_row": self.bad_in_a_row}
        if self.extras:
            counts |= self.extras.state_dict()
        return counts

    def check_saveable(self) -> None:
        """Raise BadInput if a checkpoint cannot hold the present state. Tensors are not copied.

        Called before a checkpoint is read, so it also records how this program begins its further schedules.
        """
        try:
            for name, value in self.objects.items():
                if name != "scheduler":  # ScheduleState records how that begins
                    self._began[name] = beginning(value)
            objects = self.capture(0)["objects"]
            files.check_readable(objects)
        except Exception as error:  # the objects may be the user's own
            raise BadInput(f"a checkpoint cannot be saved: {error}") from error
        self._check_parameters(objects)

    def _check_parameters(self, objects: dict[str, Any]) -> None:
        """Raise BadInput if an optimizer trains a tensor that is in no module: a checkpoint does not hold it.
        objects: those of a checkpoint."""
        optimizers = self._optimizers()
        modules = {name: saved for name, saved in objects.items() if name not in optimizers}
        held = set()  # the addresses of the tensors that a checkpoint holds
        for name, leaf in digest.leaves(modules):
            if isinstance(leaf, torch.Tensor):
                if is_lazy(leaf) or leaf.layout != torch.strided:
                    from bootfile.exact.refusals import refuse_tensor

                    refuse_tensor(name, leaf)
                held.add(dtensors.local(leaf).data_ptr())
        lost = 0
        for optimizer in optimizers.values():
            for parameter in parameters_of(optimizer):
                part = dtensors.local(parameter)
                # a rank without elements of a sharded parameter has no address to compare
                if part.numel() and part.data_ptr() not in held:
                    lost += 1
        if lost:
            raise BadInput(
                f"the optimizer trains {lost} tensors that no checkpoint holds: put them into the model, or "
                "add their module before resume(): checkpoint.add(name=module)"
            )

    def load(self, state: SavedState, total_steps: int) -> None:
        """Check a state that was read from a file, and restore it if the model is not sharded.

        Called on rank 0 while it chooses a checkpoint; the other ranks wait, and get the state by
        broadcast(). The parts of a sharded model are restored after that, on every rank.

        Raises Refused, with both values, if it belongs to another run, and BadInput if it has done more than
        total_steps. A file of another program may raise any exception; another state can be loaded then.
        """
        self.check_format(state)
        self._check_identity(state)
        self._check_sampling(state)
        from bootfile.exact import resized  # a first start loads nothing

        self._notes += resized.check_shapes(self.objects["model"], state["objects"]["model"])
        # BadInput, not Refused: this is the right run, and no older checkpoint may be taken in its place
        if state["step"] > total_steps:
            raise BadInput(
                f"it is of step {state['step']}, and this run ends at step {total_steps}: raise epochs or "
                "max_steps, or use another output folder"
            )
        # nothing was changed so far: another checkpoint may be tried after a refusal
        self._check_objects(state["objects"])
        check_order(state["order"], order_of(self.objects, self.generators))
        if not self.is_sharded:
            self.restore(state)

    def check_format(self, state: SavedState) -> None:
        """Raise Refused if a state is none of this format: its fields may be missing."""
        if state.get("format") != FORMAT:
            raise files.Refused(f"its format is {state.get('format')}, this program reads {FORMAT}")

    def _check_identity(self, state: SavedState) -> None:
        """Raise Refused, with both values, if a state has other options or other training data."""
        # another version may have counted other options as identity
        values_there = _options(state["arguments"]) | state["identity"]
        values_here = _options(self.settings) | self.identity
        names = state["identity"].keys() | self.identity.keys()
        for name in sorted(names):
            there = values_there.get(name)
            here = values_here.get(name)
            # images may be decoded to other bits here, which cannot be told from other data: a warning
            is_data = name == _DATA or name in self.further
            if is_data and there != here and self._may_compute_other_data(there, here):
                self._notes.append(
                    f"warning: its {name} is {there}, this run's is {here}: this machine has other "
                    "instructions, and samples that a program computes may have other bits. If the data are "
                    "others, stop it now"
                )
            elif there != here and not self._may_change(name):
                from bootfile.exact.refusals import hint_of_path  # only a refusal needs it

                hint = hint_of_path(name, there, here)
                raise files.Refused(f"its {name} is {there}, this run's is {here}{hint}")

    def _check_sampling(self, state: SavedState) -> None:
        """Raise Refused if the steps of a state had other samples than those of this run."""
        from bootfile.exact.refusals import refuse_sampling

        for name, there in state["sampling"].items():
            if there != self.sampling.get(name):
                refuse_sampling(name, there, self.sampling.get(name))

    def _may_change(self, name: str) -> bool:
        """Return whether an option, which counts as identity in the checkpoint, may change at a restart in
        this program: the user, or a new version, has changed its role."""
        option = name.removeprefix("--")
        is_operation = option in self.settings and option not in self.schedule.settings
        return is_operation and name not in self.identity

    def _may_compute_other_data(self, there: Any, here: Any) -> bool:
        """Return whether two fingerprints may differ only because another machine computed the samples."""
        are_computed = str(there).startswith(COMPUTED) and str(here).startswith(COMPUTED)
        return self.is_other_machine and are_computed

    def broadcast(self, state: SavedState | None) -> SavedState | None:
        """Return rank 0's state on every rank, with the tensors of a sharded model as this rank's parts."""
        # objects of this rank: they tell how each tensor of the state is sharded
        objects: dict[str, Any] = {}
        for name, value in self.objects.items():
            if isinstance(value, torch.nn.Module):
                objects[name] = value.state_dict()
        for name, optimizer in self._optimizers().items():
            # the state of an optimizer is sharded like its parameters
            objects[name] = {"state": dict(enumerate(parameters_of(optimizer)))}
        # whole tensors stay on rank 0: each rank gets only its part of a sharded one
        state = dtensors.broadcast(state, {"objects": objects})
        # the sharded tensors may be in files of their own: all ranks read their parts together
        if state and "shards" in state:
            from bootfile.exact import dtensor_files

            dtensor_files.load(state["shards"], state["objects"])
        return state

    def _check_objects(self, saved: dict[str, Any]) -> None:
        """Raise Refused if the objects of a state cannot be loaded into those of this run."""
        # before any load_state_dict(): one that fails in the middle would leave some objects changed
        from bootfile.exact.refusals import check_names

        check_names(saved, self.objects)
        for name, optimizer in self._optimizers().items():
            there = _sizes(saved[name])
            here = _sizes(optimizer)
            if there[: len(here)] != here:  # the loop may add the last groups later
                raise files.Refused(f"its {name} has groups of {there} parameters, this run's has {here}")

    def restore(self, state: SavedState) -> None:
        """Load a state of this run into the objects.

        If its optimizer has parameter groups that the loop has still to add, the state of the optimizers and
        of the schedule is loaded before the first step (before_step).
        """
        saved = state["objects"]
        self._later = None
        if self._find_missing_groups(state):
            self._later = state
        for name, value in self.objects.items():
            # a job without a scaler saves none, and a disabled scaler saves {}: then this run's begins again
            is_other = name not in saved or (name == "scaler" and not saved[name])
            if not is_other and not isinstance(value, torch.optim.Optimizer):
                if isinstance(value, torch.nn.Module):
                    from bootfile.exact import resized

                    resized.resize(value, saved[name])
                value.load_state_dict(saved[name])
        if began := {name: there for name, there in state["began"].items() if there}:
            from bootfile.exact import further

            self._notes += further.compare_schedules(began, self._began)
            self._began |= began
        if not self._later:
            self._restore_optimizers(state)
        # compared after the first step of the loop, which may freeze layers by its epoch
        self._frozen_before = set(state["frozen"])
        self.bad_steps = state["bad_steps"]
        self.bad_in_a_row = state["bad_in_a_row"]
        if self.extras:
            self.extras.load_state_dict(state)

    def before_step(self) -> None:
        """Load the state of parameter groups that the loop has added since restore(). Call it before each
        optimizer step. Raises BadInput if groups are still missing at the first one."""
        # in nearly all runs restore() has loaded everything, and nothing is left for this
        if self._later:
            missing = self._find_missing_groups(self._later)
            if missing:
                raise BadInput(
                    f"{missing} at its first step: add them again, if `epoch >= N`, not only if `epoch == N`"
                )
            try:
                check_order(self._later["order"], order_of(self.objects, self.generators))
            except files.Refused as reason:
                raise BadInput(f"the checkpoint cannot be continued: {reason}") from None
            self._restore_optimizers(self._later)
            self._later = None

    def take_notes(self) -> list[str]:
        """Return what the last restore() has to say; [] at the next call."""
        notes = self._notes
        self._notes = []
        return notes

    def take_change_of_frozen(self) -> str:
        """Return a warning if other parameters are frozen than at the checkpoint, or "". After the first call
        it is ""."""
        saved = self._frozen_before
        self._frozen_before = None
        if saved is None:
            return ""
        from bootfile.exact.refusals import describe_frozen  # after a restart only

        return describe_frozen(saved, self._frozen())

    def _frozen(self) -> set[str]:
        parameters = self.objects["model"].named_parameters()
        return {name for name, parameter in parameters if not parameter.requires_grad}

    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {
            name: value for name, value in self.objects.items() if isinstance(value, torch.optim.Optimizer)
        }

    def _find_missing_groups(self, state: SavedState) -> str:
        """Return which optimizer has fewer groups than in the state; "" if none has."""
        for name, optimizer in self._optimizers().items():
            there = _sizes(state["objects"][name])
            here = _sizes(optimizer)
            if there != here:
                return f"the {name} of the checkpoint has groups of {there} parameters, this run's has {here}"
        return ""

    def _restore_optimizers(self, state: SavedState) -> None:
        """Load the states of the optimizers and of the schedule.

        An optimizer keeps its list of groups, because another one may share it: load_state_dict() makes a
        new list.
        """
        optimizers = self._optimizers()
        # the lists before the load: a wrapper and the optimizer inside it may have the same one
        groups = {name: optimizer.param_groups for name, optimizer in optimizers.items()}
        for name, optimizer in optimizers.items():
            saved = state["objects"][name]
            if name == "optimizer":  # its hyperparameters belong to the schedule
                saved = saved | {"param_groups": optimizer.state_dict()["param_groups"]}
                del saved["class"]
            else:
                from bootfile.exact import further  # most runs have one optimizer

                self._notes += further.compare_groups(name, saved["param_groups"], optimizer.param_groups)
            optimizer.load_state_dict(saved)
        for name, optimizer in optimizers.items():
            # the loaded values go into the old lists and dictionaries, which another optimizer may share
            for kept, loaded in zip(groups[name], optimizer.param_groups, strict=True):
                kept.update(loaded)
            optimizer.param_groups = groups[name]
        # last: the schedule sets values in the groups that were just loaded
        self.schedule.load(state["schedule"])
        self._notes += self.schedule.edited

    def _objects(self) -> dict[str, dict[str, Any]]:
        states = {}
        for name, value in self.objects.items():
            if name != "scheduler":  # ScheduleState has it
                states[name] = value.state_dict()
        optimizer = states["optimizer"]
        groups = plain(optimizer["param_groups"], "a checkpoint cannot hold the optimizer's ")
        name = type(self.objects["optimizer"]).__name__
        return states | {"optimizer": optimizer | {"class": name, "param_groups": groups}}


def _is_torchs(value: Any) -> bool:
    return isinstance(value, torch.nn.Module | torch.optim.Optimizer)


def _options(settings: dict[str, Any]) -> dict[str, Any]:
    return {f"--{name}": value for name, value in settings.items()}


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
    # one that defines state_dict() itself says there what it needs, also of the optimizers in it
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        return {}
    inner = enumerate(find_optimizers(vars(optimizer)))
    return {f"optimizer.{place}": held for place, held in inner}
