"""The actor that runs on the nodes of a Ray cluster.

The class is pickled by value and imports this project only after it has set sys.path. Every node needs this
project's files, at the same path or on the PYTHONPATH of `ray start`.
"""

import os
import socket
import sys
from typing import Any


class Worker:
    """An actor that runs a function on one task after another.

    paths: sys.path of the training process.
    held: [reference to the packed function].
    number, count: the number of this worker, from 0, and of all workers.
    """

    def __init__(self, paths: list, held: list, number: int, count: int):
        sys.path.extend(path for path in paths if path not in sys.path)
        self.held, self.number, self.count = held, number, count
        self.function: Any = None

    def name(self) -> str:
        return f"{self.number} on {socket.gethostname()}, process {os.getpid()}"

    def run(self, task: tuple) -> tuple:
        """Return the packed (True, the function's result) or (False, its exception with the traceback)."""
        import ray
        from torch._utils import ExceptionWrapper

        from common.exits import BadInput
        from datasets.loaders.ray.wire import pack, unpack

        try:
            if self.function is None:
                function = unpack(ray.get(self.held[0]))
                function.begin(self.number, self.count)
                self.function = function
            return pack((True, self.function(unpack(task))))
        except BadInput as error:
            return pack((False, error))
        except Exception:
            return pack((False, ExceptionWrapper(where=f"in Ray worker {self.name()}")))
