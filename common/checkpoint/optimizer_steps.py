"""Watch the steps of all optimizers of a process: a checkpoint must hold each of them, between two steps."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_LONGEST = 100  # batches without an optimizer step for which a save waits


class OptimizerSteps:
    """Watches optimizers from the first step on.

    optimizer: the one whose gradients a save must not lose.
    objects: what a checkpoint holds, name -> object.
    before_first: called before the first step of the optimizer.
    log: called with one line to print.
    """

    _hook: Any = None  # a process has one: it sees the steps of all optimizers

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        objects: dict[str, Any],
        before_first: Callable[[], object],
        log: Callable[[str], object],
    ):
        self.optimizer, self.log = optimizer, log
        self._before_first: Callable[[], object] | None = before_first
        self._saved = [
            each for own in find_optimizers(objects) for each in (own, *find_optimizers(vars(own)))
        ]
        self._unsaved: torch.optim.Optimizer | None = None  # that was named in a warning
        self._has_stepped, self._batches = False, 0  # since the last batch; batches without a step
        self._last: tuple[torch.Tensor | None, int] = (None, 0)  # a gradient and its version at the last step
        optimizer.register_step_pre_hook(self._before)
        if OptimizerSteps._hook:  # of an earlier run in this process, for example in a notebook
            OptimizerSteps._hook.remove()
        OptimizerSteps._hook = register_optimizer_step_post_hook(self._after)

    def end_batch(self) -> bool:
        """Return whether gradients wait for an optimizer step, as in an accumulation over several batches. A
        checkpoint would lose them. Call it after each batch; the answer is the same on every rank."""
        gradient, version = self._gradient()
        waits = gradient is not None and not self._has_stepped
        waits = waits and (gradient is not self._last[0] or version != self._last[1])
        self._has_stepped, self._batches = False, self._batches + 1 if waits else 0
        if self._batches == _LONGEST:
            self.log(
                f"warning: no step of {type(self.optimizer).__name__} for {_LONGEST} batches: checkpoints do "
                "not wait for it, and do not hold the gradients"
            )
        return waits and self._batches < _LONGEST

    def _before(self, *_: object) -> None:
        if self._before_first:
            before, self._before_first = self._before_first, None
            before()

    def _after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        is_saved = any(optimizer is each for each in self._saved)
        if optimizer is self.optimizer or not is_saved:
            self._has_stepped, self._last = True, self._gradient()
        if not is_saved and optimizer is not self._unsaved:
            self._unsaved = optimizer
            self.log(
                f"warning: {type(optimizer).__name__} takes steps, and no checkpoint holds it: a restart "
                "will not be exact. Add it before resume(): checkpoint.add(name=optimizer)"
            )

    def _gradient(self) -> tuple[torch.Tensor | None, int]:
        """Return the first gradient and the number of its changes; (None, 0) without gradients."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    return parameter.grad, parameter.grad._version
        return None, 0


def find_optimizers(parts: dict[str, Any]) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizers among these values, and in the lists and dictionaries among them."""
    for value in parts.values():
        several = value if isinstance(value, list | tuple) else [value]
        several = list(value.values()) if isinstance(value, dict) else several
        yield from (each for each in several if isinstance(each, torch.optim.Optimizer))
