"""Return the entries of a folder in the reverse order. Python imports this file at each start if its folder
is in PYTHONPATH: `launch prove` shows with it whether results depend on the order of the file system."""

import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_listdir, _scandir = os.listdir, os.scandir


class _Entries:
    """The entries of os.scandir(), an iterator and a context manager."""

    def __init__(self, path: Any):
        with _scandir(path) as entries:
            self._entries = iter(list(entries)[::-1])

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._entries)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._entries = iter(())


def listdir(path: Any = ".") -> list:
    return _listdir(path)[::-1]


def scandir(path: Any = ".") -> _Entries:
    return _Entries(path)


os.listdir, os.scandir = listdir, scandir  # type: ignore[assignment]
_others = [path for path in sys.path if os.path.abspath(path) != _HERE]
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _spec and _spec.loader:  # that of this machine
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
