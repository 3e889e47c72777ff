"""The actor that runs on the nodes of a Ray cluster.

The class is pickled by value and imports this project only after it has set sys.path. Every node needs this
project's files, at the same path or on the PYTHONPATH of `ray start`.
"""

import sys
from typing import Any


class Worker:
    """An actor that runs functions on tasks. paths: sys.path of the training process."""

    def __init__(self, paths: list[str]):
        sys.path.extend(path for path in paths if path not in sys.path)
        self.functions: dict[Any, Any] = {}

    def run(self, held: list, task: tuple) -> Any:
        """Return function(task). held: [reference to the function], which is read once."""
        import ray
        import torch

        if held[0] not in self.functions:
            torch.set_num_threads(1)  # as DataLoader's workers do
            last = [*self.functions.items()][-1:]  # two iterators of one loader may take turns
            self.functions = {**dict(last), held[0]: ray.get(held[0])}
        return self.functions[held[0]](task)
