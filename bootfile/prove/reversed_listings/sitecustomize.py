"""Return the entries of a folder in the reverse order. Python imports this file at each start if its folder
is in PYTHONPATH: `bootfile prove` shows with it whether results depend on the order of the file system."""

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_listdir = os.listdir
_scandir = os.scandir


class _Entries(Iterator[Any], contextlib.AbstractContextManager[Any]):
    """The entries of os.scandir()."""

    def __init__(self, path: Any = "."):
        with _scandir(path) as entries:
            self._entries: Iterator[Any] = iter(list(entries)[::-1])

    def __next__(self) -> Any:
        return next(self._entries)

    def close(self, *_: object) -> None:
        self._entries = iter(())

    __exit__ = close


def listdir(path: Any = ".") -> list[Any]:
    return _listdir(path)[::-1]


os.listdir = listdir
os.scandir = _Entries  # type: ignore[assignment]
_others = [path for path in sys.path if os.path.abspath(path) != _HERE]
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _spec and _spec.loader:  # that of this machine
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
