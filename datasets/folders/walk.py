"""Find the images in a tree of folders, by their names."""

import os
from collections import Counter

from bootfile.ground.errors import BadInput
from datasets.folders import images
from datasets.folders.messages import progress

_SYSTEM = {"__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "lost+found"}  # folders that systems add


def walk(base: str) -> tuple[list[str], str, set[str]]:
    """Return (relative paths of the images in a tree, count_endings() of its other files, the folders in it).
    Raises BadInput if a folder cannot be listed."""

    def fail(error: OSError) -> None:
        raise BadInput(f"cannot list {error.filename}: {error.strerror}") from error

    paths, others, own = [], Counter[str](), set()
    above: dict[str, tuple[str, ...]] = {
        base: (os.path.realpath(base),)
    }  # folder -> its real path and those of its parents
    with progress(None, f"listing {base}") as bar:
        for folder, folders, names in os.walk(base, onerror=fail, followlinks=True):
            # without a call for each of a million names: is_image() takes half of the time
            found = [name for name in names if name[0] != "." and name.lower().endswith(images.EXTENSIONS)]
            if len(found) < len(names):
                others.update(map(ending, {*names}.difference(found)))
            others["hidden"] += sum(map(is_hidden, folders))
            prefix = os.path.join(folder[len(base) :].lstrip("/"), "")
            paths += [prefix + name for name in sorted(found)]
            parents = above.pop(folder)
            below = {name: os.path.realpath(os.path.join(folder, name)) for name in folders}
            # without links to a parent folder, which are endless loops
            folders[:] = [name for name in folders if not is_hidden(name) and below[name] not in parents]
            above |= {os.path.join(folder, name): (*parents, below[name]) for name in folders}
            own |= set(folders) if folder == base else set()
            bar.update(len(found))
    return paths, count_endings(others), own


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is left out: it is hidden, or a system has added it."""
    return name[0] == "." or name in _SYSTEM


def is_image(name: str) -> bool:
    """Return whether a file has the ending of an image."""
    return name.lower().endswith(images.EXTENSIONS)


def ending(name: str) -> str:
    """Return the ending of a file that is left out, in small letters."""
    return "hidden" if is_hidden(name) else os.path.splitext(name)[1].lower() or "without ending"


def count_endings(endings: Counter[str]) -> str:
    """Return the endings of files with their numbers as text: ".gif 3, .heic 2"; "" without files."""
    return ", ".join(f"{ending} {count}" for ending, count in endings.most_common() if count)
