"""Notice that the code of a run has changed between two starts: its script, and the modules that are not
installed as packages."""

import contextlib
import hashlib
import os
import sys
import sysconfig
from collections.abc import Mapping

_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def digest_modules() -> dict[str, str]:
    """Return name -> digest (16 hexadecimal digits) of the file of each module that is imported now. The name
    of the script is that of its file. Modules of Python and of installed packages are left out."""
    python = sysconfig.get_path("stdlib") + os.sep
    digests = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if name == "__mp_main__" or not isinstance(path, str) or not path.endswith(".py"):
            continue
        path = os.path.abspath(path)
        if not path.startswith(python) and not any(part in path for part in _INSTALLED):
            shown = os.path.basename(path) if name == "__main__" else name
            # there is no file for a module in an archive, or for code that was typed into a shell
            with contextlib.suppress(OSError), open(path, "rb") as file:
                digests[shown] = hashlib.blake2b(file.read(), digest_size=8).hexdigest()
    return digests


def describe_changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return in words which modules have another digest than before; "" if none has. A module that only one
    of the starts has imported is not compared."""
    changed = [name for name, digest in now.items() if before.get(name, digest) != digest]
    if not changed:
        return ""
    if len(changed) == 1:
        return f"{changed[0]} has changed"
    if len(changed) > 3:
        return f"{', '.join(changed[:2])} and {len(changed) - 2} more modules have changed"
    return f"{', '.join(changed)} have changed"
