"""The actor that runs on the nodes of a Ray cluster.

The class is pickled by value and imports this project only after it has set sys.path. Every node needs this
project's files, at the same path or on the PYTHONPATH of `ray start`.
"""

import functools
import sys
from typing import Any


class Worker:
    """An actor that runs functions on tasks. paths: this project, then sys.path of the training process."""

    def __init__(self, paths: list[str]):
        sys.path.insert(0, paths[0])  # before another package `datasets`
        sys.path.extend(path for path in paths if path not in sys.path)
        import ray
        import torch

        torch.set_num_threads(1)  # as DataLoader's workers do
        self.get: Any = functools.lru_cache(2)(ray.get)  # two iterators of one loader may take turns

    def run(self, held: list, task: tuple) -> Any:
        """Return function(task). held: [reference to the function], which is read once. Pool.submit() asks
        for it from the training process."""
        return self.get(held[0])(task)
