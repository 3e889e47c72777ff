"""Let a rank hang when `launch simulate` sends a signal, and open the files below a folder later. Python
imports this file at each start if its folder is in PYTHONPATH: the simulation puts it there if a fault needs
it (hang, hold: injector.py; slow_data: nodes.py)."""

import ctypes
import importlib.machinery
import importlib.util
import os
import signal
import sys
import time
from types import FrameType

_HERE = os.path.dirname(os.path.abspath(__file__))
_AT_A_TIME = 3600  # seconds
# free on Linux; launch/simulate/injector.py sends them
_HANG = signal.SIGRTMAX - 6
_HOLD = signal.SIGRTMAX - 7
_RELEASE = signal.SIGRTMAX - 8
_is_released = False


def hang(number: int, frame: FrameType | None) -> None:
    """Wait in the main thread, as for data that never come."""
    global _is_released
    _is_released = False
    while not _is_released:
        time.sleep(0.1)


def hold(number: int, frame: FrameType | None) -> None:
    """Wait in C code that holds the lock of Python, until any signal comes."""
    ctypes.PyDLL(None).sleep(_AT_A_TIME)  # any signal interrupts it, as _RELEASE


def release(number: int, frame: FrameType | None) -> None:
    """Let hang() end."""
    global _is_released
    _is_released = True


def _slow_down(control: str, inputs: str) -> None:
    """Let open() wait for files of a folder, and of what links in it name. control: Node.slow_data."""
    folders = [inputs]
    if os.path.isdir(inputs):
        folders.extend(os.path.realpath(os.path.join(inputs, name)) for name in os.listdir(inputs))
    slow = tuple(os.path.join(folder, "") for folder in folders)

    def wait(event: str, arguments: tuple[object, ...]) -> None:
        """Python calls it with each of its audit events."""
        if event != "open" or not isinstance(arguments[0], str | bytes):
            return
        if not os.path.abspath(os.fsdecode(arguments[0])).startswith(slow):
            return
        seconds = 0.0
        for name in ("all", f"rank-{os.environ.get('RANK')}"):
            path = os.path.join(control, name)
            if os.path.exists(path):
                with open(path, encoding="ascii") as file:
                    seconds = max(seconds, float(file.read()))
        time.sleep(seconds)

    sys.addaudithook(wait)


for _number, _function in ((_HANG, hang), (_HOLD, hold), (_RELEASE, release)):
    signal.signal(_number, _function)
if "BOOTFILE_SLOW_DATA" in os.environ:
    _slow_down(*os.environ["BOOTFILE_SLOW_DATA"].split(os.pathsep))
_others = [path for path in sys.path if os.path.abspath(path) != _HERE]
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _spec and _spec.loader:  # that of this machine
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
