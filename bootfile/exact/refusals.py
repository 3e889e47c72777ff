"""What to do about a checkpoint that is refused."""

import os


def hint_of_path(name: str, there: object, here: object) -> str:
    """Return what to do if an option is refused whose values are paths: the same files may be elsewhere."""
    if not name.startswith("--") or not isinstance(there, str) or not isinstance(here, str):
        return ""
    if not any(os.sep in value or os.path.exists(value) for value in (there, here)):
        return ""
    return f'; if {name} says only where files are, add it with role="operation", then it may change'
