"""Check the limits of ModelArts for a code folder (its documents, November 2026), and names for object
stores."""

import os
from collections import Counter
from pathlib import PurePosixPath

from common.ground.exits import BadInput
from launch.explain import human_size

ENTRIES, SIZE, DEPTH = 1000, 5 * 10**9, 32  # files and folders; bytes; components of a path
_OWN = 2  # files that pack adds: the dependency list and the manifest
_KEY = 1024 - 256  # bytes of an object's name, less the prefix in the bucket
_REFUSED = '\\:*?"<>|'  # by OBS and Windows, in names of folders and files


def check(files: list[tuple[str, int]]) -> None:
    """Check the limits for files: (path with /, bytes). Raises BadInput."""
    paths = [PurePosixPath(path) for path, _ in files]
    entries = {str(entry) for path in paths for entry in (path, *path.parents)} - {"."}
    if len(entries) + _OWN > ENTRIES:
        folder, count = Counter(path.rpartition("/")[0] for path in entries).most_common(1)[0]
        raise BadInput(
            f"{len(entries) + _OWN} files and folders, and a code folder may have {ENTRIES}: most are in "
            f"{folder or '.'}/ ({count}); put data into an input, not into the code"
        )
    deepest = max(paths, key=lambda path: len(path.parts))
    if (depth := len(deepest.parts)) > DEPTH:
        raise BadInput(f"{deepest} is {depth} levels deep, and a code folder may have {DEPTH}")
    total = sum(size for _, size in files)
    if total > SIZE:
        path, size = max(files, key=lambda file: file[1])
        most = f"a code folder may have {human_size(SIZE)}"
        raise BadInput(f"{human_size(total)}, and {most}; the biggest file is {path} ({human_size(size)})")


def check_name(path: str) -> None:
    """Raise BadInput if an object store may change or refuse a name."""
    name = path.rpartition("/")[2]
    is_plain = name.isprintable() and name == name.strip() and not {*name} & {*_REFUSED}
    if not is_plain or len(os.fsencode(path)) > _KEY:
        raise BadInput(
            f"{os.fsencode(path)!r} is not a name for every object store: expected at most {_KEY} bytes of "
            f"UTF-8 without control characters and {_REFUSED}, and no space at the begin or end"
        )
