"""The options that earlier versions had, in the settings of their runs."""

from collections.abc import Callable, Mapping
from typing import Any

# Options that changed a training, and their defaults. common/console/arguments.py says what to use instead.
_DEFAULTS = {"antialias": True, "optimizer_kwargs": "{}", "gradient_compression": "none"}


def find_changed(settings: Mapping[str, Any]) -> list[str]:
    """Return "--name value" for each former option that had another value than its default.

    settings: those that a checkpoint of an earlier version holds.
    """
    changed = []
    for name, default in _DEFAULTS.items():
        value = settings.get(name, default)
        if value != default:
            changed.append(f"--{name} {value}")
    return changed


def warn(settings: Mapping[str, Any], log: Callable[[str], None]) -> None:
    """Log a line for each of find_changed(). A job calls it on rank 0 when it continues from a checkpoint."""
    for option in find_changed(settings):
        log(f"warning: the run had {option}, an option that was removed: a block of the job can do it")
