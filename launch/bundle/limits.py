"""Check the limits of ModelArts for a code folder (its documents, November 2026)."""

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import PurePosixPath

from common.ground.exits import BadInput
from launch.explain import human_size

ENTRIES, SIZE, DEPTH = 1000, 5 * 10**9, 32  # files and folders; bytes; components of a path
_OWN = 2  # files that pack adds: the dependency list and the manifest


def check(files: Mapping[str, str]) -> None:
    """Check the limits. files: path in the code folder, with / -> file. Raises BadInput."""
    paths = [PurePosixPath(path) for path in files]
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
    sizes = {path: os.path.getsize(source) for path, source in files.items()}
    if (total := sum(sizes.values())) > SIZE:
        path, size = max(sizes.items(), key=lambda file: file[1])
        most = f"a code folder may have {human_size(SIZE)}"
        raise BadInput(f"{human_size(total)}, and {most}; the biggest file is {path} ({human_size(size)})")
