"""Watch the steps of all optimizers of a process: a checkpoint must hold each of them, between two steps."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

# torch before 2.3 calls no hooks of optimizers once a function was compiled; then a step shows in the weights
_MAY_SKIP_HOOKS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 3)
_LONGEST = 100  # batches without an optimizer step for which a save waits


class _Steps:
    """The steps of one optimizer. inner: the optimizers that it holds; their steps count as its own."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer, self.inner = optimizer, list(find_optimizers(vars(optimizer)))
        self.has_stepped = False  # since the last batch
        self._version = self._versions()  # after the last step

    def note(self) -> None:
        self.has_stepped, self._version = True, self._versions()

    def end_batch(self) -> bool:
        """Return whether a gradient has changed since the last step."""
        gradient, changes, weights = self._versions()
        kept, before, own = self._version
        if weights != own:
            self.note()
        is_open = (
            gradient is not None and not self.has_stepped and (gradient is not kept or changes != before)
        )
        self.has_stepped = False
        return is_open

    def _versions(self) -> tuple[torch.Tensor | None, int, int]:
        """Return a gradient, how often it was changed and, where hooks may be skipped, the same of all
        parameters; otherwise 0."""
        gradients = (each.grad for each in _parameters(self.optimizer) if each.grad is not None)
        changes = 0 if (gradient := next(gradients, None)) is None else gradient._version
        weights = sum(each._version for each in _parameters(self.optimizer)) if _MAY_SKIP_HOOKS else 0
        return gradient, changes, weights


class OptimizerSteps:
    """Watches optimizers from the first step on.

    objects: what a checkpoint holds, name -> object; "model" is the model.
    before_step: called before each step.
    warn: called with a line that is printed once.
    """

    _hooks: tuple[Any, ...] = ()  # a process has one pair: it sees the steps of all optimizers

    def __init__(
        self, objects: dict[str, Any], before_step: Callable[[], None], warn: Callable[[str], object]
    ):
        self.warn = warn
        self._saved = [_Steps(each) for each in find_optimizers(objects)]
        inner = {id(each) for steps in self._saved for each in steps.inner}
        self._saved = [steps for steps in self._saved if id(steps.optimizer) not in inner]
        self._trained = {id(each) for each in objects["model"].parameters()}
        self._trained |= {id(each) for steps in self._saved for each in _parameters(steps.optimizer)}
        self._batches = 0  # without a step
        for hook in OptimizerSteps._hooks:  # left by an earlier run in this process, as in a notebook
            hook.remove()
        OptimizerSteps._hooks = (
            register_optimizer_step_pre_hook(lambda *_: before_step()),
            register_optimizer_step_post_hook(self._after),
        )

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that a checkpoint holds, without those that another one holds."""
        return [each.optimizer for each in self._saved]

    def end_batch(self) -> bool:
        """Return whether gradients wait for an optimizer step, as in an accumulation over several batches. A
        checkpoint would lose them. Call it after each batch; the answer is the same on every rank."""
        is_open = any([each.end_batch() for each in self._saved])
        self._batches = self._batches + 1 if is_open else 0
        if self._batches == _LONGEST:
            self.warn(
                f"warning: no optimizer step for {_LONGEST} batches: checkpoints do not wait for it, and do "
                "not hold the gradients"
            )
        return is_open and self._batches < _LONGEST

    def _after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for each in self._saved:
            if any(optimizer is own for own in (each.optimizer, *each.inner)):
                each.note()
                return
        if self._trained.isdisjoint(map(id, _parameters(optimizer))):  # it trains the input, for example
            return
        for each in self._saved:
            each.note()
        self.warn(
            f"warning: {type(optimizer).__name__} takes steps, and no checkpoint holds it: a restart will "
            "not be exact. Add it before resume(): checkpoint.add(name=optimizer)"
        )


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (each for group in optimizer.param_groups for each in group["params"])


def find_optimizers(parts: dict[str, Any]) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizers among these values, and in the lists and dictionaries among them."""
    for value in parts.values():
        several = value if isinstance(value, list | tuple) else [value]
        several = list(value.values()) if isinstance(value, dict) else several
        yield from (each for each in several if isinstance(each, torch.optim.Optimizer))
