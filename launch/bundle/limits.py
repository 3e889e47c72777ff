"""Check the limits of ModelArts for a code folder (its documents, November 2026), and names for object
stores."""

import os
import re
from collections import Counter

from common.ground.exits import BadInput
from launch.explain import human_size

ENTRIES, SIZE, DEPTH = 1000, 5 * 10**9, 32  # files and folders; bytes; components of a path
ADVISED = 50 * 10**6  # bytes: every node downloads them before it starts
_OWN = 2  # files that pack adds: the dependency list and the manifest
_KEY = 1024 - 256  # bytes of an object's name, less the prefix in the bucket
# OBS and Windows refuse these in names of folders and files; control characters are refused below.
_REFUSED = '\\:*?"<>|'


def check(files: list[tuple[str, int]]) -> None:
    """Check the limits for files: (path with /, bytes). Raises BadInput with the excess and its largest
    part."""
    folders = Counter()  # folder -> files and folders directly in it
    seen = set()
    for path, _ in files:
        while path and path not in seen:
            seen.add(path)
            folders[path.rpartition("/")[0]] += 1
            path = path.rpartition("/")[0]
    if len(seen) + _OWN > ENTRIES:
        folder, count = folders.most_common(1)[0]
        raise BadInput(
            f"{len(seen) + _OWN} files and folders, and a code folder may have {ENTRIES}: most are in "
            f"{folder or '.'}/ ({count}); put data into an input, not into the code"
        )
    deepest = max((path for path, _ in files), key=lambda path: path.count("/"))
    if deepest.count("/") + 1 > DEPTH:
        raise BadInput(
            f"{deepest} is {deepest.count('/') + 1} levels deep, and a code folder may have {DEPTH}"
        )
    total = sum(size for _, size in files)
    if total > SIZE:
        biggest = sorted(files, key=lambda file: -file[1])[:3]
        raise BadInput(
            f"{human_size(total)}, and a code folder may have {human_size(SIZE)}; the biggest files: "
            + ", ".join(f"{path} ({human_size(size)})" for path, size in biggest)
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


def make_plain_name(path: str) -> str:
    """Return a path as one name that every shell, URL and object store accepts."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path).strip("-.") or "job"
