"""Watch the steps of all optimizers of a process: a checkpoint must hold each of them, between two steps."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

# torch before 2.3 calls no hooks of optimizers once a function was compiled; then a step shows in the weights
_MAY_SKIP_HOOKS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 3)
KERNELS = {"params", "fused", "foreach", "capturable", "differentiable"}  # not hyperparameters
_MOST_BATCHES = 100  # batches without an optimizer step for which a save waits


class _Steps:
    """The steps of one optimizer. `inner`: the optimizers that it holds; their steps count as its own."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self.inner = list(find_optimizers(vars(optimizer)))
        self.has_stepped = False  # since the last batch
        self._at_last_step = self._versions()

    def note(self) -> None:
        """Note a step. Called after each step of the optimizer, by a hook of torch."""
        self.has_stepped = True
        self._at_last_step = self._versions()

    def end_batch(self) -> bool:
        """End a batch, and return whether a gradient waits for a step: a checkpoint would lose it."""
        # it waits if it is another tensor than at the last step, or was changed in place since then
        gradient, changes, weights = self._versions()
        gradient_before, changes_before, weights_before = self._at_last_step
        if weights != weights_before:  # a step that called no hook
            self.note()
        has_stepped = self.has_stepped
        self.has_stepped = False
        is_new = gradient is not gradient_before or changes != changes_before
        return gradient is not None and not has_stepped and is_new

    def _versions(self) -> tuple[torch.Tensor | None, int, int]:
        """Return (a gradient, how often it was changed in place, how often the parameters were: 0 if hooks
        tell)."""
        # the first gradient stands for all gradients of this optimizer
        gradient = next((one.grad for one in parameters_of(self.optimizer) if one.grad is not None), None)
        weights = sum(one._version for one in parameters_of(self.optimizer)) if _MAY_SKIP_HOOKS else 0
        return gradient, 0 if gradient is None else gradient._version, weights


class OptimizerSteps:
    """Watches optimizers from the first step on.

    objects: what a checkpoint holds, name -> object; "model" is the model.
    before_step: called before each step of any optimizer of the process.
    warn: called with a line that is printed once.
    """

    _hooks: tuple[Any, ...] = ()  # a process has one pair: it sees the steps of all optimizers

    def __init__(
        self, objects: dict[str, Any], before_step: Callable[[], None], warn: Callable[[str], object]
    ):
        self.warn = warn
        # the optimizers that a checkpoint holds; one inside another, as in Lookahead, steps with that
        all_steps = [_Steps(optimizer) for optimizer in find_optimizers(objects)]
        inner = {id(optimizer) for steps in all_steps for optimizer in steps.inner}
        self._steps = [steps for steps in all_steps if id(steps.optimizer) not in inner]
        # ids of the parameters of the model, and of those that these optimizers train
        self._trained = {id(parameter) for parameter in objects["model"].parameters()}
        for steps in self._steps:
            self._trained.update(map(id, parameters_of(steps.optimizer)))
        self._batches = 0  # batches in a row after which gradients waited for a step
        for hook in OptimizerSteps._hooks:  # left by an earlier run in this process, as in a notebook
            hook.remove()
        self._hooks = OptimizerSteps._hooks = (
            register_optimizer_step_pre_hook(lambda *_: before_step()),
            register_optimizer_step_post_hook(self._after),
        )

    def close(self) -> None:
        """Watch no steps any more: those after the run are not part of it."""
        for hook in self._hooks:
            hook.remove()

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that a checkpoint holds, without those that another one holds."""
        return [steps.optimizer for steps in self._steps]

    def end_batch(self) -> bool:
        """End a batch, and return, the same on every rank, whether gradients wait for an optimizer step, as
        in an accumulation over several batches. A checkpoint would lose them."""
        gradients_wait = [steps.end_batch() for steps in self._steps]
        if not any(gradients_wait):
            self._batches = 0
            return False
        self._batches += 1
        # a loop that never takes a step of an optimizer would otherwise never save
        if self._batches == _MOST_BATCHES:
            self.warn(
                f"warning: no optimizer step for {_MOST_BATCHES} batches: checkpoints do not wait for it, "
                "and do not hold the gradients"
            )
        return self._batches < _MOST_BATCHES

    def _after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Note a step of any optimizer of the process, and warn of one that no checkpoint would hold."""
        for steps in self._steps:
            if any(optimizer is known for known in (steps.optimizer, *steps.inner)):
                steps.note()
                return
        if self._trained.isdisjoint(map(id, parameters_of(optimizer))):  # it trains the input, for example
            return
        for steps in self._steps:  # it may have trained their parameters
            steps.note()
        self.warn(
            f"warning: {type(optimizer).__name__} takes steps, and no checkpoint holds it: a restart will "
            "not be exact. Add it before resume(): checkpoint.add(name=optimizer)"
        )


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def without_kernels(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters and the choice of the kernel, which is not state."""
    return {name: value for name, value in group.items() if name not in KERNELS}


def keeps_own_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer defines what it saves."""
    return type(optimizer).state_dict is not torch.optim.Optimizer.state_dict


def find_optimizers(parts: dict[str, Any]) -> list[torch.optim.Optimizer]:
    """Return the optimizers among these values, and in the lists and dictionaries among them."""
    return [member for member in list_members(parts) if isinstance(member, torch.optim.Optimizer)]


def list_members(parts: dict[str, Any]) -> list[Any]:
    """Return these values; in place of a list or a dictionary, what is in it."""
    members: list[Any] = []
    for value in parts.values():
        several = [*value.values()] if isinstance(value, dict) else value
        members += several if isinstance(several, list | tuple) else [several]
    return members
