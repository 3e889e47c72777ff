"""What runs on the nodes of a Ray cluster: an actor that is told what to compute, and does it.

The class travels by value, so that it can say where modules are before any is needed. Every node needs this
project's files, at the same path or on the PYTHONPATH of `ray start`.
"""

import os
import pickle
import socket
import sys
import threading
import time
import traceback

_LOOK = 1.0  # seconds


class Worker:
    """Runs a function on one task after the other.

    paths: what the process that asks has on sys.path. number, count: which worker this is of how many.
    """

    def __init__(self, paths: list[str], number: int, count: int):
        sys.path.extend(path for path in paths if path not in sys.path)
        self.number, self.count = number, count
        self._version, self._function = None, None
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()

    def here(self) -> str:
        return f"{socket.gethostname()}, process {os.getpid()}"

    def run(self, reference: list, version: int, task: bytes) -> tuple:
        """("done", form, buffers) of what the function returns, or ("failed", text, form of the exception).

        reference: of the packed function, in a list so that it is fetched when it is new only.
        """
        import ray

        try:
            if version != self._version:
                from datasets.loaders.ray.transport import unpack

                self._function = None
                form, buffers = ray.get(reference[0])
                self._function, self._version = unpack(form, buffers), version
                self._function.begin(self.number, self.count)
            from datasets.loaders.ray.transport import pack

            return ("done", *pack(self._function(pickle.loads(task))))
        except Exception as error:
            return failure(error, f"worker {self.number} ({self.here()})")


def _end_with(raylet: int) -> None:
    """A node that was killed leaves nobody behind: Ray's workers live on without their raylet."""
    while os.getppid() == raylet:
        time.sleep(_LOOK)
    os._exit(1)


def failure(error: Exception, where: str) -> tuple:
    """("failed", text with the traceback, the exception pickled or None)."""
    text = f"in {where}:\n{traceback.format_exc()}"
    try:
        form = pickle.dumps(error)
        pickle.loads(form)
    except Exception:  # what cannot travel is told as text
        form = None
    return "failed", text, form
