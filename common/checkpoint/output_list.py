"""The list of complete files that a job keeps at its URL, as .bootfile-outputs.json.

    {"format": 1, "files": [{"path", "size" in bytes, "sha256"}, ...], "step": of the newest checkpoint}

manifest.json of an upload has the same entries (launch/manifests.py).
"""

import json
import re
from typing import NamedTuple

NAME = ".bootfile-outputs.json"
FORMAT = 1
_SHA256 = re.compile("[0-9a-f]{64}")


class File(NamedTuple):
    """A file in the list. size: bytes."""

    size: int
    sha256: str


def parse(content: bytes) -> dict[str, File]:
    """Return the files of a list by path. Raises ValueError if it is not a list of files of this format."""
    try:
        table = json.loads(content)
        if table["format"] != FORMAT:
            raise ValueError("another format")
        files = {entry["path"]: File(entry["size"], entry["sha256"]) for entry in table["files"]}
        # one entry that is wrong refuses the whole list: it decides which files of a run count
        for path, file in files.items():
            is_size = type(file.size) is int and file.size >= 0
            if not (isinstance(path, str) and is_size and _SHA256.fullmatch(file.sha256)):
                raise ValueError(f"{path!r} has no valid size and sha256")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("not a list of files") from error
    return files


def text(files: dict[str, File], step: int | None) -> bytes:
    """Return the list as it is stored. step: the step of the newest checkpoint in it."""
    entries = [{"path": path, **file._asdict()} for path, file in sorted(files.items())]
    return json.dumps({"format": FORMAT, "files": entries, "step": step}, indent=1).encode()
