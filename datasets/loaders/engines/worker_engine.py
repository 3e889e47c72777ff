"""An engine whose batches are made by workers, or by this process in their place."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from datasets.loaders.loader import Engine, Images
from datasets.sampling.sampler import Batch, Plan


class WorkerEngine(Engine):
    """An engine for Loader.

    workers: a Workers, or an object with its methods. function: called by the workers with (batch, size of
    the images); it returns the images, uint8 [n, H, W, C].
    """

    def __init__(self, workers: Any, function: Callable[[Batch, int], Any]):
        self._workers, self._function = workers, function

    def run(self, plan: Plan) -> Images:
        for batch, images in self._workers.load(plan, self._function):
            yield batch, torch.as_tensor(images)

    def close(self) -> None:
        self._workers.close()


class ThisProcess:
    """A Workers without processes. pinned: return batches in pinned memory."""

    count, forks = 0, False

    def __init__(self, pinned: bool = False):
        self.pinned = pinned

    def load(self, plan: Plan, function: Callable[[Batch, int], Any]) -> Iterator[tuple[Batch, Any]]:
        """Yield (batch, function(batch, plan.size)) for each batch of a plan."""
        for batch in plan:
            result = function(batch, plan.size)
            pinned = tree_map_only(torch.Tensor, torch.Tensor.pin_memory, result) if self.pinned else result
            yield batch, pinned

    def call(self, function: Callable[..., Any], count: int = 1) -> list[Any]:
        """Return [function(None, 0)]. count: not used."""
        return [function(None, 0)]

    def close(self) -> None:
        """Do nothing."""
