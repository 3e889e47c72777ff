"""Open the files below a folder later. Python imports this file at each start if its folder is in PYTHONPATH:
`launch simulate` simulates a slow mount with it (slow_data.py)."""

import importlib.machinery
import importlib.util
import os
import sys
import time

_HERE = os.path.dirname(os.path.abspath(__file__))
_CONTROL, _, _INPUTS = os.environ.get("BOOTFILE_SLOW_DATA", "").partition(os.pathsep)


def _find_folders() -> tuple[str, ...]:
    """Return the folders whose files are slow: the inputs of the node, and what links in them name."""
    folders = [_INPUTS]
    if os.path.isdir(_INPUTS):
        folders.extend(os.path.realpath(os.path.join(_INPUTS, name)) for name in os.listdir(_INPUTS))
    return tuple(os.path.join(folder, "") for folder in folders)


def _read_delay() -> float:
    """Return the seconds that an open() of this process waits now."""
    seconds = 0.0
    for name in ("all", f"rank-{os.environ.get('RANK')}"):
        path = os.path.join(_CONTROL, name)
        if os.path.exists(path):
            with open(path, encoding="ascii") as file:
                seconds = max(seconds, float(file.read()))
    return seconds


def _wait(event: str, arguments: tuple[object, ...]) -> None:
    """Wait if a file of the data is opened: Python calls this function with each of its audit events."""
    if event != "open" or not isinstance(arguments[0], str | bytes):
        return
    path = os.path.abspath(os.fsdecode(arguments[0]))
    if path.startswith(_FOLDERS):
        time.sleep(_read_delay())


_FOLDERS = _find_folders()
if _CONTROL:
    sys.addaudithook(_wait)
_others = [path for path in sys.path if os.path.abspath(path) != _HERE]
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _spec and _spec.loader:  # that of this machine
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
