"""The content of a checkpoint: the state of a run, and the settings that identify the run.

restore.py loads one; program.py has what it notes of the program that has computed it.
"""

import functools
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from bootfile.exact import dtensors
from bootfile.exact.optimizer_steps import find_optimizers, keeps_own_state
from bootfile.exact.schedules import ScheduleState, plain
from bootfile.ground.errors import BadInput

if TYPE_CHECKING:
    from bootfile.exact.program import Order
    from bootfile.exact.protocols import Extras, LoopAttributes

FORMAT = 3
DATA = "training data"  # a name in the identity
COMPUTED = "items-"  # a fingerprint of samples that a program may have computed begins with this


class _WholeState(TypedDict):
    """The content of a checkpoint: tensors and plain types. Every field is there.

    format: FORMAT. step: optimizer steps so far. run: the name of the run, the same in all its checkpoints.
    identity, sampling: as for RunState. arguments: its settings.
    objects: name -> state_dict() of each object; that of "optimizer" also has its "class".
    schedule: of ScheduleState. frozen: names of the parameters that are not trained.
    machines: those that have computed it (machines.py).
    order: the names of what is kept by position. began: name -> state of each further schedule before the
        first step. code: the digests of the script and its modules (program.py).
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
    order: "Order"
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
    is plain (schedules.py). The `fingerprint` of "receipt" identifies the training data of the run.
    `pending`: loads what a restart could not load yet (restore.py). `notes`: lines of a restart to print.
    Raises BadInput if the scheduler cannot be resumed exactly.
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
        self.run = uuid.uuid4().hex[:16]
        self.bad_steps = 0  # steps that were skipped
        self.bad_in_a_row = 0
        self.extras: Extras | None = None
        self.attributes: LoopAttributes | None = None  # those of the data set that the loop changes
        self.is_other_machine = False  # the one of the checkpoint had another instruction set
        self.generators: list[str] = []  # names of those that were added, in their order
        self.pending: Callable[[], None] | None = None
        self.notes: list[str] = []
        self.began: dict[str, dict[str, Any]] = {}  # further schedules, see SavedState
        self.frozen_before: set[str] | None = None  # at the restored checkpoint, until the first step
        self.machines: list[dict[str, Any]] = []  # those that have computed it (machines.py)
        # the receipt reads the samples, so it knows when a run is started again on other data
        receipt = objects.get("receipt")
        if fingerprint := getattr(receipt, "fingerprint", ""):
            self.identity[DATA] = fingerprint
        self.further: dict[str, str] = getattr(receipt, "further", {})
        self.identity |= {name: COMPUTED + text for name, text in self.further.items()}
        # before a checkpoint is loaded: it records how the schedule began in this program
        self.schedule = ScheduleState(objects["optimizer"], objects.get("scheduler"), learned or {})

    def capture(self, step: int, epoch_ended: bool = False) -> SavedState:
        """Return the state after `step` optimizer steps. Tensors are not copied. epoch_ended: as in
        SavedState."""
        from bootfile.exact.program import order_of  # only a save needs it

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
            began=self.began,
            code=self.code,
            epoch_ended=epoch_ended,
            attributes=self.attributes.state() if self.attributes else {},
        )
        state.update(self.counts())  # type: ignore[typeddict-item]  # the extras have names of their own
        return state

    @functools.cached_property
    def code(self) -> dict[str, str]:
        """The digests of this program. A start asks before it compares a checkpoint, when its modules are
        imported and their files are most likely still those that were."""
        from bootfile.exact.program import digest_modules

        return digest_modules()

    def counts(self) -> dict[str, Any]:
        """Return the counts of bad steps, and the extras."""
        counts: dict[str, Any] = {"bad_steps": self.bad_steps, "bad_in_a_row": self.bad_in_a_row}
        if self.extras:
            counts |= self.extras.state_dict()
        return counts

    def before_step(self) -> None:
        """Load, before each optimizer step, the state of groups that the loop has added since the restart.
        Raises BadInput if groups are still missing at the first one."""
        if self.pending:
            self.pending()
            self.pending = None

    def take_notes(self) -> list[str]:
        """Return what a restart has to say; [] at the next call."""
        notes, self.notes = self.notes, []
        return notes

    def compare_frozen(self) -> None:
        """Note, after the first step of a restart, if other parameters are frozen than at the checkpoint."""
        if self.frozen_before is None:
            return
        changed = sorted(self.frozen_before ^ self._frozen())
        if changed:
            is_now = "trained" if changed[0] in self.frozen_before else "frozen"
            self.notes.append(
                f"warning: {changed[0]} is {is_now} now, unlike at the checkpoint ({len(changed)} in all): "
                "if the loop changes it at an epoch, write `epoch >= N`, not `epoch == N`"
            )
        self.frozen_before = None

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Name -> each optimizer among the objects."""
        return {
            name: value for name, value in self.objects.items() if isinstance(value, torch.optim.Optimizer)
        }

    def _frozen(self) -> set[str]:
        parameters = self.objects["model"].named_parameters()
        return {name for name, parameter in parameters if not parameter.requires_grad}

    def _objects(self) -> dict[str, dict[str, Any]]:
        # ScheduleState has the scheduler
        states = {name: value.state_dict() for name, value in self.objects.items() if name != "scheduler"}
        optimizer = states["optimizer"]
        groups = plain(optimizer["param_groups"], "a checkpoint cannot hold the optimizer's ")
        name = type(self.objects["optimizer"]).__name__
        return states | {"optimizer": optimizer | {"class": name, "param_groups": groups}}


def _inner_optimizers(optimizer: Any) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers that an optimizer holds, unless it defines what it saves. Raises BadInput
    if it is not an optimizer."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadInput(
            f"the optimizer {type(optimizer).__name__} is not a torch.optim.Optimizer: give one of its "
            "optimizers, and the others with add(name=optimizer)"
        )
    if keeps_own_state(optimizer):
        return {}
    return {f"optimizer.{place}": held for place, held in enumerate(find_optimizers(vars(optimizer)))}
