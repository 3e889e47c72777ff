"""The splits of a root folder: their names, and a division by hashes if it has none."""

import hashlib
import os
import re

import numpy as np

from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained
from datasets.folders.messages import Log
from datasets.folders.walk import is_hidden

VAL_SHARE = 0.1  # of the images of a folder without splits
SPLITS = {  # the names that Hugging Face's imagefolder takes, as splits; the first that exists is used
    "train": ("train", "training"),
    "val": ("val", "validation", "valid", "dev", "test", "testing", "eval", "evaluation"),
}
NO_SPLITS = "none"  # --splits: every folder is a class, whatever its name is


def find_split(root: str, split: str, splits: str | None = None, log: Log = lambda line: None) -> str:
    """Return the name of a split's folder, or of its list without .txt; "" if the root folder has none.

    splits: the names of both, as --splits gives them. log: gets one line for "val" if other folders are left
    out. Raises BadInput.
    """
    with explained(f"cannot list {root}"), os.scandir(root) as entries:
        kinds = {each.name: each.is_dir() for each in entries}
    folders = {name for name, is_folder in kinds.items() if is_folder}
    lists = {name[:-4] for name, is_folder in kinds.items() if name.endswith(".txt") and not is_folder}
    deeper = {name for name in (splits or "").split(",") if os.path.isdir(os.path.join(root, name, ""))}
    chosen, spell = {}, str if splits else str.lower
    for each, order in split_names(splits).items():
        found = [(order.index(spell(name)), name != name.lower(), name)
                 for name in folders | lists | deeper if spell(name) in order]  # fmt: skip
        chosen[each] = min(found)[-1] if found else ""
    if splits not in (None, NO_SPLITS) and not chosen[split]:
        name = split_names(splits)[split][0]
        raise BadInput(f"--splits {splits}: {root} has no folder {name} and no list {name}.txt")
    used = {name.partition("/")[0] for name in chosen.values()}
    left = sorted(name for name in folders - used if not is_hidden(name))
    if split == "val" and left and used <= folders:
        log(f"{root}: val is {chosen[split]}; not used: {', '.join(left)}")
    return chosen[split]


def split_names(splits: str | None) -> dict[str, tuple[str, ...]]:
    """Return split -> the names of its folder or tar files, of which the first that exists is used: SPLITS,
    or those of --splits."""
    if splits == NO_SPLITS:
        return dict.fromkeys(SPLITS, ())
    return dict(zip(SPLITS, ((each,) for each in splits.split(",")), strict=True)) if splits else SPLITS


def has_word(text: str, *words: str) -> bool:
    """Return whether one of the words is in a text between characters that are not letters, in any case. A
    word that ends in a digit is not part of a longer number."""
    ends = [re.escape(word.lower()) + r"(?!\d)" * word[-1].isdigit() for word in words]
    return bool(re.search(rf"(?<![a-z])(?:{'|'.join(ends)})(?![a-z])", text.lower()))


def is_word(text: str, word: str) -> bool:
    """Return whether a text is a word, in any case."""
    return text.lower() == word.lower()


def divide(root: str, split: str, paths: list[str], labels: np.ndarray, share: float, log: Log) -> np.ndarray:
    """Return the rows of the images of a split: int64, ascending. An image is in "val" if its hash is low.

    The hash is that of the path without its ending. So an image is in the same split on every machine, also
    after other images are added or removed. Two exceptions: a class keeps at least one image for training,
    the one with the highest hash. At least one image is for validation: the one with the lowest hash, of the
    classes with several images. Raises BadInput if "val" is empty.
    """
    stems = (os.fsencode(os.path.splitext(path)[0]) for path in paths)
    digests = b"".join(hashlib.blake2b(stem, digest_size=8).digest() for stem in stems)
    hashes = np.frombuffer(digests, ">u8").astype(np.uint64)
    val = hashes < np.uint64(int(share * 2**64))
    counts = np.bincount(labels)
    kept = np.bincount(labels[~val], minlength=len(counts))
    for label in np.flatnonzero((counts > 0) & (kept == 0)):
        rows = np.flatnonzero(labels == label)
        val[rows[hashes[rows].argmax()]] = False
    several = np.flatnonzero(counts[labels] > 1)
    if not val.any() and len(several):
        val[several[hashes[several].argmin()]] = True
    many = int(val.sum())
    if split == "train":
        log(
            f"train={len(val) - many} test={many} split of {root} by path, --val_share {100 * share:g}%"
            + ": no image for validation, because each class has only one" * (not many)
        )
    elif not many:
        raise BadInput(
            f"{root} has {len(paths)} images, one in each class: none remains for validation. "
            "Add val/ next to train/, or more images"
        )
    return np.flatnonzero(val if split == "val" else ~val)
