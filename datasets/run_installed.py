"""Run the `__init__` of Hugging Face's package in the namespace of `datasets`. A module, for Python's lock:
other threads wait for it. If it fails, the next import runs it again."""

import importlib.machinery
import os
import sys
from typing import Any

_ours: Any = sys.modules["datasets"]
_installed = _ours._Installed
_installed.folder = os.path.dirname(_installed.file)  # before `__init__` runs: it imports its modules
_ours.__path__.append(_installed.folder)
try:
    importlib.machinery.SourceFileLoader("datasets", _installed.file).exec_module(_ours)
except BaseException:
    _ours.__path__.remove(_installed.folder)
    _installed.folder = ""
    raise
