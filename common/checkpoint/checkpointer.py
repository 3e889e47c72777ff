"""A restart loses nothing and repeats nothing: resuming, saving, stopping when asked, steps that went wrong.

Checkpoints are in checkpoints/ below the output folder (common/checkpoint/files.py says how), weights
beside it: epoch_<n>.pth after each epoch and best.pth after the best. Rank 0 reads and writes; the
processes agree before every optimizer step, in one all_reduce of three numbers, so all skip, save and stop
at the same step. A save that fails is reported and training goes on: the next one tries again, and the
older checkpoints stay. Only a run whose last save failed ends with an error.
"""

import argparse
import contextlib
import errno
import math
import os
import platform
import time
import uuid
from collections.abc import Callable

import numpy
import torch

from common import arguments, exits, interval, output_folder
from common.checkpoint import files as checkpoint
from common.checkpoint import mirror, resume, weights
from common.checkpoint.nonfinite import Guard, Verdict
from common.checkpoint.schedules import ScheduleState, plain
from common.checkpoint.writer import BackgroundWriter, describe, is_finite, size_of
from common.distributed import preemption
from common.exits import BadInput

FORMAT = 2
# arguments that decide what is learned
_IDENTITY = (
    "dataset", "custom_data", "image_size", "arch", "batch_size", "bn_weight_decay", "seed",
)  # fmt: skip
# arguments that decide where and how, and not what is learned
_OPERATION = {
    "output_dir", "output_url", "resume", "save_every", "keep", "grace", "max_bad_steps", "report_every",
    "print_freq", "enable_gpu", "data_url", "stage", "cache_dir", "pack", "cache", "cache_mode", "workers",
    "data_backend", "ray_address", "init_method", "rank", "world_size", "local_rank", "processes_per_node",
    "rank_level", "timeout", "weights", "evaluate",
}  # fmt: skip
_LAST_WRITE = 4.0  # seconds


class NotSaved(BadInput):
    """Results could not be written."""

    code = exits.NOT_SAVED


class Diverged(BadInput):
    """Too many steps in a row whose loss or gradient was not finite."""

    code = exits.DIVERGED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--resume",
        metavar="{auto,never,PATH}",
        help="checkpoint to go on from (default: auto, the newest in --output_dir; without one, never)",
    )
    parser.add_argument(
        "--weights",
        metavar="FILE",
        help="initial weights: best.pth, epoch_<n>.pth, step_<n>.pt (default: none)",
    )
    parser.add_argument(
        "--evaluate", action="store_true", help="only evaluate what --weights or --resume names"
    )
    parser.add_argument(
        "--save_every",
        type=interval.interval,
        default="1epoch",
        help="200 (steps), 90s or 1epoch (default: 1epoch)",
    )
    parser.add_argument(
        "--keep", type=arguments.positive_int, default=3, help="newest checkpoints that stay (default: 3)"
    )
    parser.add_argument(
        "--grace", type=arguments.positive_float, default=25,
        help="seconds from SIGTERM to the end at the latest (default: 25)",
    )  # fmt: skip
    parser.add_argument(
        "--max_bad_steps", type=arguments.positive_int, default=20,
        help="end after so many steps in a row without a finite loss and gradient (default: 20)",
    )  # fmt: skip


class Recovery:
    """What stands between a run and its loss.

    args: those of add_arguments(), output_dir, and what identifies the run. objects: name -> what has a
    state_dict() and belongs into a checkpoint; "model" and "optimizer" must be there. "scheduler": any
    schedule of torch, or a class of your own whose state is plain (common/checkpoint/schedules.py).
    "receipt": its `fingerprint` says which training data the run belongs to. Raises BadInput if the
    scheduler cannot be resumed exactly.
    """

    def __init__(self, args: argparse.Namespace, objects: dict):
        self.args, self.objects = args, objects
        self.folder = os.path.join(args.output_dir, "checkpoints")
        self.identity = {f"--{name}": getattr(args, name) for name in _IDENTITY if hasattr(args, name)}
        if fingerprint := getattr(objects.get("receipt"), "fingerprint", ""):
            self.identity["training data"] = fingerprint
        settings = arguments.settings(args)
        learned = {name: value for name, value in settings.items() if name not in _OPERATION}
        self._schedule = ScheduleState(objects["optimizer"], objects.get("scheduler"), learned)
        self._weights, self._evaluate = getattr(args, "weights", None), getattr(args, "evaluate", False)
        self._began = self._weights  # the file that gave the initial weights of the run
        self.run = uuid.uuid4().hex[:16]
        self.bad_steps = self.bad_in_a_row = 0
        self.best = -math.inf
        self._writer, self._mirror = BackgroundWriter(), None
        self._pending = ""  # what is being written: "step_400.pt"
        self._saved = 0  # the step of the last checkpoint that is on the disk or on its way
        self._durable = 0  # that of the last one known to be on the disk
        self._whole: dict[str, tuple] = {}  # checkpoints that were read or written by this process
        self._unsaved: dict[str, str] = {}  # kind of file -> why its last write failed
        self._since = time.monotonic()
        self._stop = self._save = False

    def resume(self, steps: int, steps_per_epoch: int) -> int:
        """Load the checkpoint that --resume asks for, on every process; the number of steps that it has done,
        0 without one. From here on, a signal that asks to stop is obeyed at the next step.

        Without a checkpoint, the file that --weights names gives the initial weights. With --evaluate only
        weights are loaded, and the result is `steps`: nothing is left to train.

        steps: of the whole training. Raises BadInput where there are checkpoints and none can be used.
        """
        self.steps, self.steps_per_epoch = steps, steps_per_epoch
        if self._evaluate:  # the batch size, the seed and the training data may be others
            self._load_weights(self._weights or resume.newest(self.args.resume), complete=True)
            preemption.watch(self.args.grace)
            return steps
        if not output_folder.writes_nothing(self.args):
            resume.claim(self.args, _first(), self._is_own)
            self._mirror = mirror.opened(self.args, _first())
        state, trouble = self._choose() if _first() else (None, None)
        if _world_size() > 1:
            found = [state, trouble]
            torch.distributed.broadcast_object_list(found)
            state, trouble = found
        if trouble:
            raise BadInput(trouble)
        if state and not _first():
            self._load(state)
        if state and self._weights:
            began = self._began or "random weights"
            _say(f"--weights {self._weights} is not used: the run continues, it began with {began}")
        elif self._weights:
            self._load_weights(self._weights)
        self._guard = Guard(self.objects["model"], self.objects["optimizer"])
        if not output_folder.writes_nothing(self.args):  # else a signal ends the process at once
            preemption.watch(self.args.grace)
        exits.before_leaving(lambda: self._writer.wait(_LAST_WRITE))  # what is in flight is not lost
        step = state["step"] if state else 0
        if self._mirror:
            self._mirror.start(step if self.args.resume == "auto" else 0)
        return step

    def finite(self, loss: torch.Tensor) -> bool:
        """After backward(), on every process: whether to take the optimizer's step. If not, BatchNorm's
        statistics are those of before the step, too. A fused optimizer leaves the step out by itself, and the
        answer is always yes.

        loss: scalar. Raises Diverged. Costs a pass over the gradients and, with an optimizer that is not
        fused, one synchronisation (common/checkpoint/nonfinite.py).
        """
        self._report()
        verdict = self._guard.check(loss, preemption.asked(), _first() and self._late())
        self._judge(verdict)
        return self._guard.ahead or not verdict.bad

    def due(self, step: int) -> bool:
        """Whether save() has something to do after this step; the same on every process."""
        every = self.args.save_every.steps(self.steps_per_epoch)
        return self._stop or self._save or step == self.steps or (every > 0 and step % every == 0)

    def save(self, step: int) -> None:
        """Save where it is due, and leave where the job was asked to stop. After a step that was skipped,
        what is there may be on its way down: it does not push out what was good."""
        if not self.due(step):
            return
        self._judge(self._guard.settle())
        if self.bad_in_a_row and not self._stop:
            return
        if _first() and self._stop:
            self._report(wait=True)  # one that failed is tried again
        if _first() and self._saved != step:
            self._saved = step
            self._submit(checkpoint.name_of(step), lambda: self._state(step), self._write_checkpoint)
        self._save, self._since = False, time.monotonic()
        if self._stop:
            self._leave(step)

    def leave_if_asked(self, step: int) -> None:
        """Outside the loop of steps, on every process: save and leave where any was asked to stop."""
        device = next(self.objects["model"].parameters()).device
        self._stop = _any_process(preemption.asked(), device)
        if self._stop and self._evaluate:
            self._leave(step)
        elif self._stop:
            self.save(step)

    def save_weights(self, epoch: int, totals: torch.Tensor, model: torch.nn.Module | None = None) -> None:
        """On rank 0, after an epoch: write epoch_<epoch>.pth, and best.pth if its accuracy is the highest so
        far; its loss the lowest if the job has no accuracy.

        totals: [loss_sum, correct, count] of the test set. model: what was evaluated, where it is not the one
        that is trained. With --evaluate nothing is written.
        """
        if self._evaluate:
            return
        loss_sum, correct, count = totals.tolist()
        score = (-loss_sum if math.isnan(correct) else correct) / (count or math.nan)

        def write(state: dict) -> None:
            self._ready(self.args.output_dir, state)
            checkpoint.sweep(self.args.output_dir)
            tensors = state["objects"]["model"]
            checkpoint.write_weights(os.path.join(self.args.output_dir, f"epoch_{epoch}.pth"), tensors)
            if score > self.best:
                checkpoint.write_weights(os.path.join(self.args.output_dir, "best.pth"), tensors)
                self.best = score  # once it is there

        own = {"objects": {"model": (model or self.objects["model"]).state_dict()}}
        self._submit(f"epoch_{epoch}.pth", lambda: own, write)

    def finish(self) -> None:
        """Wait for the last write and upload. Raises NotSaved where one failed."""
        self._report(wait=True)
        lost = [*self._unsaved.values(), self._mirror.finish() if self._mirror else ""]
        if any(lost):
            raise NotSaved("; ".join(filter(None, lost)))

    # resuming

    def _choose(self) -> tuple[dict | None, str | None]:
        """(state to go on from, or None; why there is none that could be used)."""
        if self._mirror and (trouble := resume.refusal(self.args, self._is_own, self._mirror.results())):
            return None, trouble
        wanted = self.args.resume
        if wanted == "never":
            return None, None
        try:
            path, state = resume.choose(wanted, self.folder, self._take)
        except BadInput as error:
            return None, str(error)
        if state:
            if wanted == "auto":
                self.run = state["run"]
            epoch = max(1, math.ceil(state["step"] / self.steps_per_epoch))
            if "training data" not in self.identity:
                _say("warning: the training data are not compared: the receipt has no fingerprint")
            _say(f"resumed from {path}: epoch {epoch}, step {state['step']} of {self.steps}")
        return state, None

    def _load_weights(self, path: str, complete: bool = False) -> None:
        _say(weights.load(path, self.objects["model"], complete))
        if "ema" in self.objects:  # the average begins at, or consists of, these weights
            self.objects["ema"].module.load_state_dict(self.objects["model"].state_dict())

    def _is_own(self, start: dict) -> bool:
        """Whether a start is of this run, which was killed before its first save. Weights of an epoch after
        that save belong to a run whose checkpoints were removed."""
        settings = {f"--{name}": start["settings"].get(name) for name in _IDENTITY}
        there = settings | {"training data": start.get("training data")}
        epoch = max(output_folder.epochs(self.args.output_dir), default=0)
        first_save = self.args.save_every.steps(self.steps_per_epoch) or self.steps
        is_before = epoch * self.steps_per_epoch < min(first_save, self.steps)
        return is_before and all(there[name] == value for name, value in self.identity.items())

    def _take(self, state: dict) -> None:
        """Load a checkpoint on rank 0. Raises Refused, or what a state that is not one of ours makes
        load_state_dict raise: then the next one is loaded over it."""
        resume.check(state, FORMAT, self.identity, self.objects["model"].state_dict(), self.steps)
        self._load(state)

    def _load(self, state: dict) -> None:
        for name, own in self.objects.items():
            if name == "scheduler":
                continue
            saved = state["objects"].get(name)
            if not saved and name == "scaler":  # only some jobs have one
                continue
            if not saved:
                raise checkpoint.Refused(f"it has no {name!r}: leave --{name} out")
            if name == "optimizer":  # its hyperparameters belong to the schedule
                _check_optimizer(own, saved)
                saved = own.state_dict() | {"state": saved["state"]}
            own.load_state_dict(saved)
        self._schedule.load(state["schedule"])
        torch.set_rng_state(state["random"]["cpu"])
        if "cuda" in state["random"] and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(state["random"]["cuda"])
        self.bad_steps, self.bad_in_a_row = state["bad_steps"], state["bad_in_a_row"]
        self.best, self._began = state["best"], state.get("weights")
        if self.args.resume == "auto":  # another's checkpoint is not in this run's folder
            self._saved = self._durable = state["step"]

    # saving

    def _late(self) -> bool:
        """Whether it is time to save, where seconds count."""
        every = self.args.save_every
        return every.unit == "s" and time.monotonic() - self._since >= every.count

    def _state(self, step: int) -> dict:
        random = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_initialized():  # a job on the CPU leaves the GPUs alone
            random["cuda"] = torch.cuda.get_rng_state()
        return {
            "format": FORMAT,
            "step": step,
            "epoch": max(1, math.ceil(step / self.steps_per_epoch)),
            "step_of_epoch": (step - 1) % self.steps_per_epoch + 1,
            "run": self.run,
            "identity": self.identity,
            "objects": self._objects(),
            "schedule": self._schedule.state(),
            "random": random,
            "bad_steps": self.bad_steps,
            "bad_in_a_row": self.bad_in_a_row,
            "best": self.best,
            "weights": self._began,
            "versions": {
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "numpy": numpy.__version__,
            },
            "arguments": arguments.settings(self.args),
        }

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

    def _submit(self, name: str, state: Callable[[], dict], write: Callable[[dict], None]) -> None:
        """state is called when the write before has ended: what that brought about belongs to it."""
        self._report(wait=True)
        self._pending = name
        try:
            self._writer.submit(state(), write)
        except (RuntimeError, MemoryError, OSError) as error:  # no memory for the copy, or no thread
            self._failed(error)

    def _write_checkpoint(self, state: dict) -> None:
        self._ready(self.folder, state)
        path = os.path.join(self.folder, checkpoint.name_of(state["step"]))
        checkpoint.write(path, state, step=state["step"], run=self.run)
        checkpoint.write_text(os.path.join(self.folder, checkpoint.LATEST), f"{os.path.basename(path)}\n")
        self._durable = state["step"]
        checkpoint.keep(self.folder, self.run, self.args.keep, self._whole)
        if self._mirror:
            self._mirror.saved()

    def _ready(self, folder: str, state: dict) -> None:
        """Refuse before anything is written: weights that are not finite, a disk without room."""
        if not is_finite(state["objects"]["model"]):
            raise ValueError("the weights are not finite")
        if not os.path.isdir(folder):
            if self._durable:
                _say(f"warning: {folder} is gone and made again; the older checkpoints went with it")
            os.makedirs(folder, exist_ok=True)
        space, size = os.statvfs(folder), size_of(state)
        if space.f_bavail * space.f_frsize < size:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {size / 1e6:.1f} MB are needed")

    def _report(self, wait: bool = False) -> None:
        """Say what went wrong in the background, once it has ended."""
        if not self._pending or not (wait or self._writer.idle()):
            return
        error = self._writer.wait()
        if error:
            self._failed(error)
        else:
            self._unsaved.pop(os.path.splitext(self._pending)[1], None)
        self._pending = ""

    def _failed(self, error: Exception) -> None:
        name, self._pending = self._pending, ""
        kind = os.path.splitext(name)[1]
        self._unsaved[kind] = f"{name} was not saved: {describe(error, self.args.output_dir)}"
        self._saved = self._durable
        _say(f"warning: {self._unsaved[kind]}; training goes on, older checkpoints are as they were")

    def _judge(self, verdict: Verdict | None) -> None:
        """Note what was said of a step; count one that was left out, and end a run that does not recover."""
        if verdict is None:
            return
        self._stop, self._save = self._stop or verdict.asked, verdict.late
        if not verdict.bad:
            self.bad_in_a_row = 0
            return
        self.bad_steps += 1
        self.bad_in_a_row += 1
        many = f"{self.bad_in_a_row} in a row, {self.bad_steps} in all"
        of_it = f"loss {verdict.loss.item():g}, gradient norm {verdict.norm.item():g} on rank 0"
        _say(f"skipped a step: {of_it}; {many}")
        if self.bad_in_a_row < self.args.max_bad_steps:
            return
        self._report(wait=True)
        durable = [self._durable]
        if _world_size() > 1:  # nobody leaves before rank 0 has saved, and all say the same
            torch.distributed.broadcast_object_list(durable)
        kept = f"the checkpoint of step {durable[0]} stays" if durable[0] else "there is no checkpoint"
        raise Diverged(
            f"{self.bad_in_a_row} steps in a row without a finite loss and gradient (--max_bad_steps): "
            f"{kept}; lower --lr, or look at the data"
        )

    def _leave(self, step: int) -> None:
        if _first() and not self._evaluate:
            self._report(wait=True)
            _say(f"stopped as asked after step {step}; the newest checkpoint is that of step {self._durable}")
            if self._mirror:  # as long as --grace lasts
                _say(self._mirror.finish() or f"all of it is at {self._mirror.url}")
        if _world_size() > 1:
            torch.distributed.barrier()  # rank 0 has saved: a parent ends the others when one has left
        output_folder.release(self.args.output_dir)
        exits.leave(preemption.exit_code())


def _check_optimizer(own: torch.optim.Optimizer, saved: dict) -> None:
    """Its state belongs to the parameters by their places in the groups."""
    if saved["class"] != type(own).__name__:
        raise checkpoint.Refused(f"its optimizer is {saved['class']}, this run's is {type(own).__name__}")
    there, here = (
        [len(group["params"]) for group in groups] for groups in (saved["param_groups"], own.param_groups)
    )
    if there != here:
        raise checkpoint.Refused(f"its optimizer has groups of {there} parameters, this run's has {here}")


def _any_process(sign: bool, device: torch.device) -> bool:
    """Whether it holds in any process. device: one that communicates."""
    signs = torch.tensor([float(sign)], device=device)
    if _world_size() > 1:
        torch.distributed.all_reduce(signs, torch.distributed.ReduceOp.MAX)
    return bool(signs.item())


def _world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _first() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def _say(line: str) -> None:
    if _first():
        with contextlib.suppress(OSError, ValueError):  # a log on a full disk does not end the training
            print(line, flush=True)
