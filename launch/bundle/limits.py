"""Check the limits of ModelArts for a code folder (its documents, November 2026), and names for object
stores."""

import os
from collections import Counter

from common.ground.exits import BadInput
from launch.explain import human_size

ENTRIES, SIZE, DEPTH = 1000, 5 * 10**9, 32  # files and folders; bytes; components of a path
_OWN = 2  # files that pack adds: the dependency list and the manifest
_KEY = 1024 - 256  # bytes of an object's name, less the prefix in the bucket
# OBS and Windows refuse these in names of folders and files; control characters are refused below.
_REFUSED = '\\:*?"<>|'


def check(files: list[tuple[str, int]]) -> None:
    """Check the limits for files: (path with /, bytes). Raises BadInput."""
    entries = {path for path, _ in files}
    for path, _ in files:
        while path := path.rpartition("/")[0]:
            entries.add(path)
    if len(entries) + _OWN > ENTRIES:
        folder, count = Counter(path.rpartition("/")[0] for path in entries).most_common(1)[0]
        raise BadInput(
            f"{len(entries) + _OWN} files and folders, and a code folder may have {ENTRIES}: most are in "
            f"{folder or '.'}/ ({count}); put data into an input, not into the code"
        )
    deepest = max(entries, key=lambda path: path.count("/"))
    if (depth := deepest.count("/") + 1) > DEPTH:
        raise BadInput(f"{deepest} is {depth} levels deep, and a code folder may have {DEPTH}")
    total = sum(size for _, size in files)
    if total > SIZE:
        path, size = max(files, key=lambda file: file[1])
        raise BadInput(
            f"{human_size(total)}, and a code folder may have {human_size(SIZE)}; the biggest file is "
            f"{path} ({human_size(size)})"
        )


def check_name(path: str) -> None:
    """Raise BadInput if an object store may change or refuse a name."""
    name = path.rpartition("/")[2]
    try:
        length = len(path.encode())
    except UnicodeEncodeError as error:
        raise BadInput(f"{os.fsencode(path)!r}: the name is not UTF-8") from error
    bad = sorted({character for character in name if character in _REFUSED or not character.isprintable()})
    if bad:
        raise BadInput(f"{path!r}: an object store may not take {''.join(bad)!r} in a name")
    if name != name.strip():
        raise BadInput(f"{path!r}: an object store may not take a name that begins or ends with a space")
    if length > _KEY:
        raise BadInput(f"{path}: the name has {length} bytes, and an object store takes {_KEY}")
