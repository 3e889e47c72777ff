"""Find the images in a tree of folders, by their names."""

import functools
import os
from collections import Counter

from bootfile.ground.again import refusal
from bootfile.ground.files import read_again
from datasets.folders import images
from datasets.folders.messages import progress

_SYSTEM = {"__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "lost+found"}  # folders that systems add


def walk(base: str) -> tuple[list[str], str, set[str]]:
    """Return (relative paths of the images in a tree, count_endings() of its other files, the folders in it).
    Links are followed. Each start calls it, in the process of a node that indexes the images. Raises BadInput
    if a folder cannot be listed."""
    try:
        return read_again(functools.partial(_walk, base), base)
    except OSError as error:
        raise refusal(f"cannot list {error.filename or base}: {error.strerror}", error) from error


def _walk(base: str) -> tuple[list[str], str, set[str]]:
    """Do what walk() does, once."""

    def fail(error: OSError) -> None:
        raise error

    paths: list[str] = []
    others = Counter[str]()  # ending -> other files than images, and hidden folders
    first_folders: set[str] = set()
    # folder -> its real path and those of its parents
    real_parents: dict[str, tuple[str, ...]] = {base: (os.path.realpath(base),)}
    with progress(None, f"listing {base}") as bar:
        for folder, folders, names in os.walk(base, onerror=fail, followlinks=True):
            # without a call for each of a million names: is_image() takes half of the time
            selected = [name for name in names if name[0] != "." and name.lower().endswith(images.EXTENSIONS)]
            if len(selected) < len(names):
                others.update(map(ending, set(names).difference(selected)))
            others["hidden"] += sum(map(is_hidden, folders))
            prefix = os.path.join(folder[len(base) :].lstrip("/"), "")
            paths += [prefix + name for name in sorted(selected)]
            parents = real_parents.pop(folder)
            entered = []
            for name in folders:
                path = os.path.join(folder, name)
                real_path = os.path.realpath(path)
                # a link to a parent folder is an endless loop
                if not is_hidden(name) and real_path not in parents:
                    entered.append(name)
                    real_parents[path] = (*parents, real_path)
            folders[:] = entered  # os.walk() enters these next
            if folder == base:
                first_folders = set(entered)
            bar.update(len(selected))
    return paths, count_endings(others), first_folders


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is left out: it is hidden, or a system has added it."""
    return name[0] == "." or name in _SYSTEM


def is_image(name: str) -> bool:
    """Return whether a file has the ending of an image."""
    return name.lower().endswith(images.EXTENSIONS)


def ending(name: str) -> str:
    """Return the ending of a file that is left out, in small letters."""
    if is_hidden(name):
        return "hidden"
    return os.path.splitext(name)[1].lower() or "without ending"


def count_endings(endings: Counter[str]) -> str:
    """Return the endings of files with their numbers as text: ".gif 3, .heic 2"; "" without files."""
    return ", ".join(f"{ending} {count}" for ending, count in endings.most_common() if count)
