"""List folders of images: paths and labels, and sizes and times of files on demand, without reading an image.

A split of a root folder is the first of these that exists. Its name is one of SPLITS, with any capitals:

1. <root>/train.txt: a list of lines `path label` (read_list()). Paths are below the root, or else below
   <root>/train. The label is a class name or a number, or several of them: `path 3,17`. Then `path ,` is an
   image without a label;
2. <root>/train/<class>/**: class folders of any depth;
3. <root>/<class>/**: no folders of splits. The hash of its path decides the split of an image.

Classes are numbered in the order of their names, images in the order of their paths. Links are followed.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bootfile.ground.again import is_file, is_folder, mode_of
from bootfile.ground.errors import BadInput
from datasets import files, links
from datasets.folders import images
from datasets.folders.classes import check_classes, number_classes, number_sets
from datasets.folders.label_list import read_list
from datasets.folders.map_files import stat_files
from datasets.folders.messages import Log, shown
from datasets.folders.splits import BY_CLASS, BY_PATH, NO_SPLITS, SPLITS, divide, find_split
from datasets.folders.walk import walk


class Listing(NamedTuple):
    """The present files of a split, in the order of the paths."""

    root: str
    split: str
    base: str  # paths are relative to it
    classes: tuple[str, ...]
    paths: list[str]
    labels: np.ndarray  # int64; bool [n, classes] if images have several labels
    val_share: float = 0.0  # if the path of an image decides its split, otherwise 0
    splits: str | None = None  # --splits
    states: np.ndarray | None = None  # as get_states() returns; None if the images are not in tar files
    is_list: bool = False  # whether a list names the paths
    by_class: bool = True  # how images are chosen for validation, see divide()

    @property
    def division(self) -> str:
        """Return how images were chosen for validation, BY_CLASS or BY_PATH; "" if the folder has splits."""
        if not self.val_share:
            return ""
        if self.by_class:
            return BY_CLASS
        return BY_PATH

    def get_states(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Return int64 [n, 3], the sizes, mtimes and ctimes (ns) of these rows, or of all rows. Raises
        BadInput if files are missing. A start asks, to compare the files with their index."""
        if rows is None:
            rows = np.arange(len(self.paths))
        if self.states is not None:
            return self.states[rows]
        return stat_files(self.base, [self.paths[row] for row in rows.tolist()])


def look(
    root: str,
    split: str,
    classes: Sequence[str] | None,
    log: Log,
    val_share: float = 0.0,
    splits: str | None = None,
    labelled: bool = True,
    by_class: bool = True,
) -> Listing:
    """Return the Listing of a split without reading an image. Arguments: those of image_folder.load().
    Raises BadInput.

    image_folder.look() calls it at each start, in the process of a node that indexes the images."""
    root = os.path.abspath(files.local_folder(root))
    name = find_split(root, split, splits, log)
    if not name:
        # a folder with one split only: if it were divided by hashes, images of that split would be in both
        other_split = "val" if split == "train" else "train"
        other = find_split(root, other_split, splits)
        if other:
            raise BadInput(
                f"{root} has {other}, but no {' or '.join(SPLITS[split])} (a folder, or a list .txt): "
                f"--splits TRAIN,VAL names the two folders; --splits {NO_SPLITS} takes all folders as classes"
            )
    base = os.path.join(root, name) if name else root
    source = f"{base}.txt"
    is_list = bool(name) and is_file(source)
    if is_list:
        paths, names = read_list(source, log)
        # the first path decides whether those of the list are below the root or below the folder of the split
        first = os.path.join(root, paths[0])
        if mode_of(first) is not None or links.describe(first) or not is_folder(base):
            base = root
    else:
        source = base
        paths, names = _list_class_folders(base, classes, log)
    if is_list and any("," in label for label in names):
        ordered, labels = number_sets(names, classes, source, is_list)
    else:
        ordered, labels = number_classes(names, classes, source, is_list)
    # only for the training split: the other one has its classes
    has_one_label = labels.ndim == 1
    if labelled and classes is None and has_one_label:
        check_classes(ordered, source, paths, name, splits, log)
    elif is_list and has_one_label and labels.min() > 0 and names[0] not in ordered:
        log(f"{source}: no image has the label 0, which is the class {ordered[0]}")
    if name:
        val_share = 0.0  # the folder has splits
    if val_share:
        rows = divide(root, split, paths, labels, ordered, val_share, log, by_class)
        paths = [paths[row] for row in rows.tolist()]
        labels = labels[rows]
    return Listing(
        root,
        split,
        base,
        ordered,
        paths,
        labels,
        val_share,
        splits,
        is_list=is_list,
        by_class=by_class,
    )


def _list_class_folders(base: str, classes: Sequence[str] | None, log: Log) -> tuple[list[str], list[str]]:
    """Return (paths, class name of each path) of a tree. classes: as in number_classes(). Raises BadInput."""
    paths, others, folders = walk(base)
    if not paths:
        line = f"{base} holds no image ({' '.join(images.EXTENSIONS)}): {others or 'no file'}"
        if ".tar " in others:
            line += f"; tar files: pass '{base}/**/*.tar'"
        raise BadInput(line)
    # images next to the class folders have no class: they are ignored, unless there is no class folder
    nested = [path for path in paths if "/" in path]
    ignored = []
    if others:
        ignored.append(others)
    if nested and len(nested) < len(paths):
        ignored.append(f"{len(paths) - len(nested)} images outside class folders")
    if ignored:
        log(f"{base}: ignored {', '.join(ignored)}")
    if not nested:
        return sorted(paths), [""] * len(paths)
    paths = sorted(nested)
    names = [path.partition("/")[0] for path in paths]
    empty = sorted(folders - set(names))
    if empty and classes is None:  # skipping them would change the numbers of the other classes
        raise BadInput(
            f"{base}: {len(empty)} class folders hold no image: {shown(empty)}: move them, or name them .NAME"
        )
    return paths, names
