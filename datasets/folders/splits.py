"""The splits of a root folder: their names, a division by hashes if it has none, and the options for both."""

import argparse
import contextlib
import decimal
import functools
import hashlib
import math
import os
import re
from collections.abc import Sequence

import numpy as np

from bootfile.ground.again import is_file, is_folder
from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained, read_again
from datasets.files import refuse_dead_link
from datasets.folders.walk import Log, entry_is_folder, is_hidden, shown

VAL_SHARE = 0.1  # of the images of a folder without splits
SPLITS = {  # the names that Hugging Face's imagefolder takes, as splits; the first that exists is used
    "train": ("train", "training"),
    "val": ("val", "validation", "valid", "dev", "test", "testing", "eval", "evaluation"),
}
BY_CLASS = "share of each class"  # how divide() has chosen the images for validation; in starts.jsonl
NO_SPLITS = "none"  # --splits: every folder is a class, whatever its name is


def fraction(text: str) -> float:
    """Parse an argument: "0.1%" and "0.001" are 0.001. Raises ArgumentTypeError outside 0..1."""
    with contextlib.suppress(ArithmeticError):
        value = decimal.Decimal(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        if 0 <= value <= 1:
            return float(value)
    raise argparse.ArgumentTypeError(f"{text!r} is not a share like 0.1% or 0.001, in 0..1")


def val_share(text: str) -> float:
    """Parse an argument: "10%" and "0.1" are 0.1. Raises ArgumentTypeError unless 0 < value < 1."""
    value = fraction(text)
    if 0 < value < 1:
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a share like 10% or 0.1, above 0 and below 1")


def two_names(text: str) -> str:
    """Parse --splits: "TRAIN,VAL", two different names, or "none". Raises ArgumentTypeError."""
    names = text.split(",")
    if text == NO_SPLITS or (len({*names}) == len(names) == 2 and all(map(str.strip, names))):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is not two names of folders, TRAIN,VAL, or {NO_SPLITS}")


def find_split(root: str, split: str, splits: str | None = None, log: Log | None = None) -> str:
    """Return the name of a split's folder, or of its table without .txt; "" if the root folder has none.

    splits: the names of both, as --splits gives them. log: gets one line for "val" if other folders are left
    out. The process of a node that indexes the images calls it at each start. Raises BadInput.
    """
    with explained(f"cannot list {root}"):
        folders, tables, dead = read_again(functools.partial(_list_root, root), root)
    # --splits may name a folder, or a list, in a folder: photos/train
    deep = set()
    for name in (splits or "").split(","):
        if is_folder(os.path.join(root, name, "")) or is_file(os.path.join(root, f"{name}.txt")):
            deep.add(name)
    chosen = {}
    for key, names in split_names(splits).items():
        # the names in SPLITS may have any capitals; of several the one in small letters is first
        ranked = []
        for candidate in folders | tables | dead | deep:
            name = candidate if splits else candidate.lower()
            if name in names:
                ranked.append((names.index(name), candidate != candidate.lower(), candidate))
        chosen[key] = min(ranked)[-1] if ranked else ""
    if chosen[split]:  # another folder or table must not take the place of a disk that is not mounted
        refuse_dead_link(os.path.join(root, chosen[split]))
        refuse_dead_link(os.path.join(root, f"{chosen[split]}.txt"))
    elif splits not in (None, NO_SPLITS):
        name = split_names(splits)[split][0]
        refuse_dead_link(os.path.join(root, name))
        raise BadInput(f"--splits {splits}: {root} has no folder {name} and no list {name}.txt")
    # folders next to the splits may be a third one, such as test/ next to val/: the user is told
    used = {name.partition("/")[0] for name in chosen.values()}
    unused = sorted(name for name in folders - used if not is_hidden(name))
    if log and split == "val" and unused and used <= folders:
        log(f"{root}: val is {chosen[split]}; not used: {', '.join(unused)}")
    return chosen[split]


def _list_root(root: str) -> tuple[set[str], set[str], set[str]]:
    """Return the names of the folders in a folder, of its files .txt without the ending, and of the links
    that lead nowhere: they may be the folder of a split. Raises OSError."""
    folders: set[str] = set()
    tables: set[str] = set()
    dead: set[str] = set()
    with os.scandir(root) as entries:
        for entry in entries:
            if entry_is_folder(entry):
                folders.add(entry.name)
            elif entry.name.endswith(".txt"):
                tables.add(entry.name.removesuffix(".txt"))
            elif entry.is_symlink() and not os.path.isfile(entry.path):
                dead.add(entry.name)
    return folders, tables, dead


def split_names(splits: str | None) -> dict[str, tuple[str, ...]]:
    """Return split -> the names of its folder or tar files, of which the first that exists is used: SPLITS,
    or those of --splits."""
    if splits == NO_SPLITS:
        return {"train": (), "val": ()}
    return dict(zip(SPLITS, zip(splits.split(",")), strict=True)) if splits else SPLITS


def has_word(text: str, word: str) -> bool:
    """Return whether a word is in a text between characters that are not letters, in any case. A word that
    ends in a digit is not part of a longer number."""
    number = r"(?!\d)" if word[-1].isdigit() else ""
    return bool(re.search(rf"(?<![a-z]){re.escape(word.lower())}{number}(?![a-z])", text.lower()))


def divide(
    root: str,
    split: str,
    paths: list[str],
    labels: np.ndarray,
    classes: Sequence[str],
    share: float,
    log: Log,
) -> np.ndarray:
    """Return the rows of the images of a split: int64, ascending. A share of each class is "val".

    These are the images with the lowest hashes in their class: share * images of the class, rounded, but at
    least one, and not all. The only image of a class is for training. The hash is that of the path without
    its ending. So the split is the same on every machine and in every order of the files, and an image that
    is added or removed moves at most one other image of its class. Each start computes it again; nothing is
    stored.

    labels: int64 [n], places in `classes`. Raises BadInput if "val" is empty.
    """
    stems = [os.fsencode(os.path.splitext(path)[0]) for path in paths]
    digests = b"".join(hashlib.blake2b(stem, digest_size=8).digest() for stem in stems)
    hashes = np.frombuffer(digests, ">u8").astype(np.uint64)
    counts = np.bincount(labels, minlength=len(classes))  # images of each class
    is_val = _choose(hashes, labels, counts, share)
    val_count = int(is_val.sum())
    if split == "val":
        if not val_count:
            raise BadInput(
                f"{root} has {len(paths)} images, one in each class: none remains for validation. "
                "Add val/ next to train/, or more images"
            )
        return np.flatnonzero(is_val)
    # both splits are divided in the same way: one line about it is enough
    has_val = np.bincount(labels[is_val], minlength=len(classes)) > 0
    without = shown([classes[place] for place in np.flatnonzero((counts > 0) & ~has_val).tolist()])
    end = f"; no image for validation in classes with only one image: {without}" if without else ""
    if not val_count:
        end = ": no image for validation, because each class has only one"
    log(
        f"train={len(is_val) - val_count} test={val_count} split of {root} by path, "
        f"--val_share {100 * share:g}%{end}"
    )
    return np.flatnonzero(~is_val)


def _choose(hashes: np.ndarray, labels: np.ndarray, counts: np.ndarray, share: float) -> np.ndarray:
    """Return bool [n], whether an image is for validation: a share of each class, see divide().

    hashes, labels: uint64 and int64 [n]. counts: images of each class, int64. Images of one class that have
    the same hash, such as 1.jpg and 1.png, stay in one split if the class has others for the other split.
    """
    is_val = np.zeros(len(labels), bool)
    by_class = np.lexsort((hashes, labels))  # rows: class after class, in each by hash
    first = 0
    for count in counts.tolist():
        rows = by_class[first : first + count]
        first += count
        if count < 2:
            continue
        # at least one for each split; images of one hash stay together
        number = min(max(math.floor(share * count + 0.5), 1), count - 1)
        while number < count - 1 and hashes[rows[number]] == hashes[rows[number - 1]]:
            number += 1
        is_val[rows[:number]] = True
    return is_val
