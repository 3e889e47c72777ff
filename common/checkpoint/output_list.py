"""The list of complete files that a job keeps at its URL, as .bootfile-outputs.json.

    {"format": 1, "files": [{"path", "size" in bytes, "sha256"}, ...], "step": of the newest checkpoint}

manifest.json of an upload has the same entries (launch/manifests.py).
"""

import json
import re
from typing import NamedTuple

NAME, FORMAT = ".bootfile-outputs.json", 1
_SHA256 = re.compile("[0-9a-f]{64}")


class File(NamedTuple):
    """A file in the list. size: bytes."""

    size: int
    sha256: str


def parse(content: bytes) -> tuple[object, dict[str, File]]:
    """Return the format of a list and its files by path. Raises ValueError if it is not a list of files."""
    try:
        table = json.loads(content)
        entries = [(each["path"], each["size"], each["sha256"]) for each in table["files"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("not a list of files") from error
    for path, size, sha256 in entries:
        if not (isinstance(path, str) and type(size) is int and size >= 0 and isinstance(sha256, str)):
            raise ValueError("not a list of files")
        if not _SHA256.fullmatch(sha256):
            raise ValueError("not a list of files")
    return table.get("format"), {path: File(size, sha256) for path, size, sha256 in entries}


def text(files: dict[str, File], step: int | None) -> bytes:
    """Return the list as it is stored. step: the step of the newest checkpoint in it."""
    entries = [{"path": path, **file._asdict()} for path, file in sorted(files.items())]
    return json.dumps({"format": FORMAT, "files": entries, "step": step}, indent=1).encode()
