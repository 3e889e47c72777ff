"""Import a package that only some jobs need."""

import importlib

from common.exits import BadInput


class Missing(BadInput):
    """A package cannot be imported. The message carries the reason and the command that installs it."""


def load(module: str, purpose: str, package: str | None = None):
    """Return a module, imported. Raises Missing.

    purpose: begins the message, for example "packs need Arrow". package: as pip knows it, default `module`.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:  # what was built for another NumPy, or has no library, raises other types, too
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise Missing(f"{purpose} ({reason}): pip install {package or module}") from error
