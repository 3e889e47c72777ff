"""Find the images in a tree of folders, by their names."""

import functools
import os
from collections import Counter

from bootfile.ground.again import is_temporary, refusal
from bootfile.ground.files import read_again
from datasets import links
from datasets.folders import images
from datasets.folders.messages import progress

_SYSTEM = {"__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "lost+found"}  # folders that systems add


def walk(base: str) -> tuple[list[str], str, set[str]]:
    """Return (relative paths of the images in a tree, count_endings() of its other files, the folders in it).
    Links are followed. Each start calls it, in the process of a node that indexes the images. Raises BadInput
    if a folder cannot be listed, or if a link leads nowhere and may have been a folder."""
    try:
        return read_again(functools.partial(_walk, base), base)
    except OSError as error:
        raise refusal(f"cannot list {error.filename or base}: {error.strerror}", error) from error


def _walk(base: str) -> tuple[list[str], str, set[str]]:
    """Do what walk() does, once."""

    paths: list[str] = []
    others = Counter[str]()  # ending -> other files than images, and hidden folders
    first_folders: set[str] = set()
    # folders to list, each with its real path and those of its parents; the last one is next
    waiting: list[tuple[str, tuple[str, ...]]] = [(base, (os.path.realpath(base),))]
    with progress(None, f"listing {base}") as bar:
        while waiting:
            folder, parents = waiting.pop()
            images_here, folders = _list_folder(folder, others)
            prefix = os.path.join(folder[len(base) :].lstrip("/"), "")
            paths += [prefix + name for name in sorted(images_here)]
            for name in folders:
                path = os.path.join(folder, name)
                real_path = os.path.realpath(path)
                # a link to a parent folder is an endless loop
                if real_path not in parents:
                    waiting.append((path, (*parents, real_path)))
                    if folder == base:
                        first_folders.add(name)
            bar.update(len(images_here))
    return paths, count_endings(others), first_folders


def _list_folder(folder: str, others: Counter[str]) -> tuple[list[str], list[str]]:
    """Return (names of the images, names of the folders) directly in a folder, without hidden ones, and count
    its other files in `others`. Raises OSError, and BadInput for a link that leads nowhere."""
    names = []
    folders = []
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            if entry_is_folder(entry):
                if is_hidden(name):
                    others["hidden"] += 1
                else:
                    folders.append(name)
            elif name[0] != "." and name.lower().endswith(images.EXTENSIONS):
                names.append(name)  # without a call for each of a million names
            else:
                others[ending(name)] += 1
                # the scan names images that cannot be opened, and links to other files are left out
                if entry.is_symlink() and not is_hidden(name) and links.may_be_folder(name):
                    links.refuse(entry.path)
    return names, folders


def entry_is_folder(entry: os.DirEntry) -> bool:
    """Return whether an entry is a folder or leads to one; False for a link that leads nowhere. Raises
    OSError if its file system does not answer."""
    try:
        return entry.is_dir()
    except OSError as error:
        if is_temporary(error):
            raise
        return False


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
