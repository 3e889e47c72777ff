"""Run a loop that begins at a step of another run: compare the steps on the way, and leave out steps. A step
is also left out if all its samples are removed from the run.

A step that is left out gets its batch, and the loop computes its loss and gradients. Nothing of it is kept:
accepts() is False, the buffers of all modules and waiting gradients are restored, and the receipt has the
sums 0 for it. The loop continues with its counters and its schedule: the learning rate of the step after it
is the one that this step has in every run. A digest of the state before and after shows whether the loop has
changed anything; then the run ends with the name of it.
"""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Collection
from typing import Any

import torch

from bootfile.exact import digest, dtensors
from bootfile.exact.due import Due
from bootfile.exact.optimizer_steps import find_optimizers, parameters_of
from bootfile.exact.plugins import Parts, Plugin
from bootfile.ground import exit_codes
from bootfile.ground.errors import BadInput
from bootfile.processes import ranks

_MAY_CHANGE = ("scheduler", "receipt")  # objects of a checkpoint that change in a step that is left out


class Differs(BadInput):
    """Steps of a run that were computed again are not what the run has recorded."""

    code = exit_codes.DIFFERS


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run does that begins at a step of another one; the same on all ranks."""

    step: int  # the last step that it has in common with the other run
    # the steps up to `step` after which the receipt and the state are compared with the other run's
    points: Collection[int] = ()
    skipped: Collection[int] = ()  # the steps that are left out
    # returns whether all samples of a step are removed (--without): then it is left out, too
    removes: Callable[[int], bool] | None = None
    stops: bool = False  # end the run after `step`, when its state is saved


class Forked(Plugin):
    """Runs by a Plan. Call follow() after restore() and before begin(); it is the first of the plugins.

    check: called on rank 0 with each step of `points` and the digest of its state (a line of state.jsonl),
        when the receipt has the steps up to it. It returns the first difference in words, or "".
    """

    def __init__(self, check: Callable[[int, dict[str, Any]], str] | None = None):
        self._check_point = check
        self._plan = Plan(0)
        self._before: _Before | None = None  # the state before the step that is left out now

    def follow(self, plan: Plan) -> None:
        """Run by this plan, on every rank."""
        self._plan = plan

    def begin(self, parts: Parts, step: int) -> None:
        self._parts = parts
        self._prepare(step + 1)

    def numbers(self) -> list[float]:
        """Take back what a step that is left out has changed so far, before the vote keeps the buffers."""
        if self._before:
            self._before.restore()
        # end_step() then asks the loop for a save, which ends the run
        if self._plan.stops and self._parts.loader.step >= self._plan.step:
            self._parts.position.is_stopping = True
            self._parts.position.stops_planned = True
        return []

    def ended(self, step: int, due: Due) -> None:
        if self._before:
            self._before.end()
            self._refuse_change(step, self._before)
        if step in self._plan.points:
            self._compare(step)
        # the state before the next step is the present one
        self._prepare(step + 1)

    def _prepare(self, step: int) -> None:
        """Keep what the next step may change, if it is left out. Called on every rank."""
        self._before = None
        self._parts.position.leaves_out = False
        removes = self._plan.removes
        is_empty = removes is not None and step <= self._parts.most_steps and removes(step)
        is_left_out = is_empty or step in self._plan.skipped
        # the batch of this step is not handed out yet: the receipt counts it as one without samples
        self._parts.loader.receipt.leaves_out = is_left_out
        if not is_left_out:
            return
        if is_empty:
            self._parts.say(f"step {step} is left out: all its samples are removed")
        # one line for several steps in a row, at the first one
        elif step - 1 not in self._plan.skipped:
            last = step
            while last + 1 in self._plan.skipped:
                last += 1
            name = f"steps {step}-{last} are" if last > step else f"step {step} is"
            self._parts.say(f"{name} left out: the batches are passed over, and nothing is updated")
        self._parts.position.leaves_out = True
        self._before = _Before(self._parts.state.objects, self._parts.position.waits)

    def _refuse_change(self, step: int, before: "_Before") -> None:
        """Raise BadInput, on every rank, if the step that was left out has changed a part of the state."""
        # rank 0 decides for all, so that no rank waits for one that has ended
        if changed := ranks.broadcast_object(before.find_change()):
            option = "--skip_steps" if step in self._plan.skipped else "--without"
            raise BadInput(
                f"{option}: step {step} is left out, and the loop changes {changed} in it: take the "
                "optimizer step, and update averages, only if accepts() returns True"
            )

    def _compare(self, step: int) -> None:
        """Compare the steps so far with the other run. Raises Differs on every rank if they differ."""
        # wait for the verdict: on a GPU the device may still decide whether this step counts
        self._parts.settle()
        if self._parts.loader.receipt.step != step:
            self._parts.loader.commit(step, self._parts.saver.folder)
        difference = ""
        # a sharded state is summed by all ranks together
        if ranks.is_first() or self._parts.state.is_sharded:
            line = digest.summarize(step, self._parts.state.capture(step)["objects"])
            if ranks.is_first() and self._check_point:
                difference = self._check_point(step, line)
        if difference := ranks.broadcast_object(difference):
            raise Differs(difference)


class _Before:
    """The state before a step that is left out. waits: gradients wait for an optimizer step."""

    def __init__(self, objects: dict[str, Any], waits: bool):
        self._objects = objects
        # a forward pass changes buffers (BatchNorm), also if its loss is never used
        modules = [value for value in objects.values() if isinstance(value, torch.nn.Module)]
        buffers = itertools.chain.from_iterable(module.buffers() for module in modules)
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in buffers]  # (the buffer, a copy)
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # (the parameter, a copy)
        # the gradients of earlier batches may wait for an optimizer step: this step must not add to them
        parameters = itertools.chain.from_iterable(map(parameters_of, find_optimizers(objects)))
        # several optimizers may train one tensor: it is kept once
        for parameter in {id(parameter): parameter for parameter in parameters}.values():
            kept = parameter.grad.clone() if waits and parameter.grad is not None else None
            self._gradients.append((parameter, kept))
        # (an object such as a gradient scaler, a copy of its state)
        self._others = [
            (value, copy.deepcopy(value.state_dict()))
            for name, value in objects.items()
            if name not in _MAY_CHANGE and not isinstance(value, torch.nn.Module | torch.optim.Optimizer)
        ]
        self._parts = self._summarize()

    def end(self) -> None:
        """Restore all that a step may change although it takes no optimizer step."""
        self.restore()
        for value, state in self._others:
            value.load_state_dict(copy.deepcopy(state))

    def restore(self) -> None:
        """Restore the buffers, and the gradients that waited for an optimizer step."""
        with torch.no_grad():
            for buffer, kept in self._buffers:
                # `.data`: autograd must not see it between two backward() calls
                dtensors.local(buffer).data.copy_(dtensors.local(kept))
        for parameter, gradient in self._gradients:
            # a copy: a further backward() of this step adds to it in place
            parameter.grad = None if gradient is None else gradient.clone()

    def find_change(self) -> str:
        """Return the name of a part of the state that has changed; "" if none has."""
        now = self._summarize().items()
        return next((name for name, value in now if self._parts.get(name, value) != value), "")

    def _summarize(self) -> dict[str, str]:
        states = {name: each.state_dict() for name, each in self._objects.items() if name not in _MAY_CHANGE}
        # the schedule continues, and sets the values of parameter groups: they may change
        parts = digest.summarize(0, states)["parts"]
        return {name: text for name, text in parts.items() if ".param_groups." not in name}
