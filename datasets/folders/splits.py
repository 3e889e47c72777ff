"""The splits of a root folder: their names, and a division by hashes if it has none."""

import functools
import hashlib
import os
import re

import numpy as np

from bootfile.ground.again import is_folder
from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained, read_again
from datasets.folders.messages import Log
from datasets.folders.walk import is_hidden

VAL_SHARE = 0.1  # of the images of a folder without splits
SPLITS = {  # the names that Hugging Face's imagefolder takes, as splits; the first that exists is used
    "train": ("train", "training"),
    "val": ("val", "validation", "valid", "dev", "test", "testing", "eval", "evaluation"),
}
NO_SPLITS = "none"  # --splits: every folder is a class, whatever its name is


def find_split(root: str, split: str, splits: str | None = None, log: Log | None = None) -> str:
    """Return the name of a split's folder, or of its list without .txt; "" if the root folder has none.

    splits: the names of both, as --splits gives them. log: gets one line for "val" if other folders are left
    out. The process of a node that indexes the images calls it at each start. Raises BadInput.
    """
    with explained(f"cannot list {root}"):
        folders, lists = read_again(functools.partial(_list_root, root), root)
    candidates = folders | lists
    for name in (splits or "").split(","):  # --splits may name a folder in a folder: photos/train
        if is_folder(os.path.join(root, name, "")):
            candidates.add(name)
    # --splits names one folder; the names in SPLITS may have any capitals
    chosen = {}
    for key, names in split_names(splits).items():
        chosen[key] = _choose(names, candidates, any_capitals=not splits)
    if splits not in (None, NO_SPLITS) and not chosen[split]:
        name = split_names(splits)[split][0]
        raise BadInput(f"--splits {splits}: {root} has no folder {name} and no list {name}.txt")
    used = {name.partition("/")[0] for name in chosen.values()}
    unused = sorted(name for name in folders - used if not is_hidden(name))
    if log and split == "val" and unused and used <= folders:
        log(f"{root}: val is {chosen[split]}; not used: {', '.join(unused)}")
    return chosen[split]


def _list_root(root: str) -> tuple[set[str], set[str]]:
    """Return the names of the folders in a folder, and of its files .txt without the ending. Raises
    OSError."""
    folders: set[str] = set()
    lists: set[str] = set()
    with os.scandir(root) as entries:
        for entry in entries:
            if entry.is_dir():
                folders.add(entry.name)
            elif entry.name.endswith(".txt"):
                lists.add(entry.name.removesuffix(".txt"))
    return folders, lists


def _choose(names: tuple[str, ...], candidates: set[str], any_capitals: bool) -> str:
    """Return the candidate that has the first of these names; "" if no candidate has one. Of several that
    differ in capitals, the one in small letters is first."""
    ranked = []
    for candidate in candidates:
        name = candidate.lower() if any_capitals else candidate
        if name in names:
            has_capitals = candidate != candidate.lower()
            ranked.append((names.index(name), has_capitals, candidate))
    if not ranked:
        return ""
    _, _, first = min(ranked)
    return first


def split_names(splits: str | None) -> dict[str, tuple[str, ...]]:
    """Return split -> the names of its folder or tar files, of which the first that exists is used: SPLITS,
    or those of --splits."""
    if splits == NO_SPLITS:
        return {"train": (), "val": ()}
    if splits:
        train, val = splits.split(",")
        return {"train": (train,), "val": (val,)}
    return SPLITS


def has_word(text: str, *words: str) -> bool:
    """Return whether one of the words is in a text between characters that are not letters, in any case. A
    word that ends in a digit is not part of a longer number."""
    patterns = []
    for word in words:
        pattern = re.escape(word.lower())
        if word[-1].isdigit():
            pattern += r"(?!\d)"
        patterns.append(pattern)
    return bool(re.search(rf"(?<![a-z])(?:{'|'.join(patterns)})(?![a-z])", text.lower()))


def is_word(text: str, word: str) -> bool:
    """Return whether a text is a word, in any case."""
    return text.lower() == word.lower()


def divide(root: str, split: str, paths: list[str], labels: np.ndarray, share: float, log: Log) -> np.ndarray:
    """Return the rows of the images of a split: int64, ascending. An image is in "val" if its hash is low.

    The hash is that of the path without its ending. So an image is in the same split on every machine, also
    after other images are added or removed. Two exceptions: a class keeps at least one image for training,
    the one with the highest hash. At least one image is for validation: the one with the lowest hash, of the
    classes with several images. Each start computes it again; nothing is stored. Raises BadInput if "val" is
    empty.
    """
    hashes = _hash_paths(paths)
    is_val = hashes < np.uint64(int(share * 2**64))
    counts = np.bincount(labels)  # images of each class
    for_training = np.bincount(labels[~is_val], minlength=len(counts))
    for label in np.flatnonzero((counts > 0) & (for_training == 0)):
        rows = np.flatnonzero(labels == label)
        highest = rows[hashes[rows].argmax()]
        is_val[highest] = False
    of_larger_classes = np.flatnonzero(counts[labels] > 1)
    if not is_val.any() and len(of_larger_classes):
        lowest = of_larger_classes[hashes[of_larger_classes].argmin()]
        is_val[lowest] = True
    val_count = int(is_val.sum())
    if split == "train":
        line = (
            f"train={len(is_val) - val_count} test={val_count} split of {root} by path, "
            f"--val_share {100 * share:g}%"
        )
        if not val_count:
            line += ": no image for validation, because each class has only one"
        log(line)
    elif not val_count:
        raise BadInput(
            f"{root} has {len(paths)} images, one in each class: none remains for validation. "
            "Add val/ next to train/, or more images"
        )
    if split == "val":
        return np.flatnonzero(is_val)
    return np.flatnonzero(~is_val)


def _hash_paths(paths: list[str]) -> np.ndarray:
    """Return the hashes of paths without their endings, uint64 [n]."""
    digests = []
    for path in paths:
        stem = os.fsencode(os.path.splitext(path)[0])
        digests.append(hashlib.blake2b(stem, digest_size=8).digest())
    return np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)
