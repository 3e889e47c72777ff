"""Number the classes of images, and refuse class folders that are probably splits."""

import itertools
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

import numpy as np

from bootfile.ground.again import is_folder
from bootfile.ground.errors import BadInput
from datasets.folders import not_classes, tables
from datasets.folders.messages import SHOWN, Log, shown
from datasets.folders.splits import NO_SPLITS, SPLITS, has_word

_FORMS = (
    "train/CLASS/*.jpg and val/CLASS/*.jpg, or CLASS/*.jpg, or train.txt and val.txt with lines `path label` "
    "or those of a CSV"
)


def check_classes(
    classes: Sequence[str], source: str, paths: list[str], name: str, splits: str | None, log: Log
) -> None:
    """Raise BadInput if there are fewer than two classes, or if class folders may be splits.

    The look() of folders and of tar files calls it before an image is read: a wrong folder costs no scan.
    paths: of the images, CLASS/... name: of the split, "" if no split was found. splits: as in find_split().
    """
    if len(classes) < 2:
        _refuse_one_class(classes[0], source, paths, name)  # also if a CSV has the labels
    if len({title.casefold() for title in classes}) < len(classes):
        log(f"{source}: some of the {len(classes)} classes differ only in capitals")
    if not name and not splits:
        _refuse_splits(source, paths)
        _refuse_other_folders(list(classes), source, paths)


def _refuse_one_class(title: str, source: str, paths: list[str], name: str) -> None:
    """Raise BadInput for a folder with one class. The line says how to name deeper folders, if there are any.
    title: the class, "" for images without a class folder. Others: as in check_classes()."""
    reason = f"one class, {title}" if title else "images without a class folder"
    line = f"{source}: {reason}: expected two or more: {_FORMS}"
    inner = os.path.join(source, title)
    has_folders = any(path.count("/") > 1 for path in paths)
    if title and has_folders and is_folder(inner):
        if name:
            line += f"; or --splits {name}/{title},VAL"
        else:
            line += f"; or --data_url {inner}"
    elif is_folder(source):
        folders = [source]
        if name:  # the table may be next to train/
            folders.insert(0, os.path.dirname(source))
        table = tables.find(folders, paths)
        if table:
            line += f". {table.advise()}"
    raise BadInput(line)


def _refuse_other_folders(titles: list[str], source: str, paths: list[str]) -> None:
    """Raise BadInput if folders that would be classes are probably not: by their names, or by a table that
    lists their images (not_classes.py). Arguments: as in check_classes()."""
    table = tables.find([source], paths) if os.path.isdir(source) else None
    reason = not_classes.describe(titles)
    if not reason and table:
        reason = tables.describe_other_labels(table, titles)
    if reason:
        advice = table.advise() if table else ""
        raise BadInput(not_classes.advise(reason, source, paths, advice))


def _refuse_splits(source: str, paths: list[str]) -> None:
    """Raise BadInput if two of the folders that would be classes are probably splits. They have the names of
    splits, or both hold folders of the same names, which would then be the classes.

    Arguments: as in check_classes().
    """
    counts = Counter[str]()  # class -> images in folders below it, less those that are not
    below: dict[str, dict[str, str]] = {}  # class -> name of a folder of images below it -> its parent
    for path in paths:
        # an image below CLASS/FOLDER says that CLASS may be a split, and one directly in CLASS that it is
        # none
        first, *parts = path.split("/")[:-1]
        if not parts:
            counts[first] -= 1
            continue
        counts[first] += 1
        parent = "/".join([first, *parts[:-1]])
        below.setdefault(first, {}).setdefault(parts[-1], parent)
    is_train = {}
    for title in below:
        is_train[title] = has_word(title, *SPLITS["train"])

    def rank(title: str) -> tuple[bool, int, str]:
        """Return the key of a folder: training first, then the folder with the most images."""
        return not is_train[title], -counts[title], title

    order = sorted(below, key=rank)
    # those with more images in folders below them than directly in them
    candidates = [title for title in order if counts[title] >= 0]
    for one, other in itertools.combinations(candidates[:SHOWN], 2):
        same = sorted(below[one].keys() & below[other].keys())
        fewer = min(len(below[one]), len(below[other]))
        if len(same) > max(1, fewer / 2):
            reason = f"hold the same folders ({shown(same)})"
            option = f"{below[one][same[0]]},{below[other][same[0]]}"
        elif is_train[one] and has_word(other, *SPLITS["val"]):
            reason = "have the names of splits"
            option = f"{one},{other}"
        else:
            continue
        line = (
            f"{source}: {one} and {other} {reason}: if they are splits, --splits {option}; if they are "
            f"classes, --splits {NO_SPLITS}"
        )
        if any(has_word(folder, *SPLITS["train"]) for folder in same):
            line += f"; if {shown(same)} are splits, list their images in train.txt and val.txt"
        raise BadInput(line)


def number_classes(
    names: list[str], classes: Sequence[str] | None, source: str, listed: bool
) -> tuple[tuple[str, ...], np.ndarray]:
    """Return (classes, labels int64 [n]).

    names: the label of each image as text.
    classes: those of the train split, if they are known.
    source: for messages.
    listed: the labels are from a list, so they may be numbers: of the train split 0..N-1 or 1..N, each of
        them used; of "val" the numbers of "train", or places in its class folders.
    The look() of folders and of tar files calls it at each start. Raises BadInput.
    """
    used = set(names)
    ordered = tuple(sorted(used))
    if classes is not None:
        ordered = tuple(classes)
    places = {_one_form(name): place for place, name in enumerate(ordered)}
    if len(places) < len(ordered):
        twins = []
        for place, name in enumerate(ordered):
            if places[_one_form(name)] != place:
                twins.append(ascii(name))
        raise BadInput(f"{source}: two classes have one name in different Unicode forms: {shown(twins)}")
    # labels of the val split are looked up among the classes of the train split
    labels = {}
    unknown = []  # names that no class has
    for name in sorted(used):
        labels[name] = places.get(_one_form(name), -1)
        if labels[name] < 0:
            unknown.append(name)
    are_known = classes is not None and not unknown
    are_numbers = all(re.fullmatch("-?[0-9]+", name) for name in used)
    if listed and are_numbers and not are_known:
        # numbers of classes, not class names that look like numbers
        if classes is None:
            ordered = _name_numbers(used)
        labels = _place_numbers(used, ordered, source)
    elif unknown:
        count = names.count(unknown[0])
        owner = f"class {unknown[0]!r}" if unknown[0] else "no class folder"
        raise BadInput(
            f"{source}: {count} images belong to {owner}, but the train split has {len(ordered)} classes: "
            f"{shown(ordered)}; a list with lines `path label` can name their classes"
        )
    return ordered, np.fromiter(map(labels.__getitem__, names), np.int64, len(names))


def _one_form(name: str) -> str:
    """Return a name in one Unicode form: macOS writes é as e and an accent."""
    return unicodedata.normalize("NFC", name)


def _name_numbers(names: set[str]) -> tuple[str, ...]:
    """Return the classes of a train split whose labels are numbers: as many as there are numbers, from 1 if
    that is the lowest one, otherwise from 0."""
    numbers = {int(name) for name in names}
    first = 1 if min(numbers) == 1 else 0
    return tuple(map(str, range(first, first + len(numbers))))


def _place_numbers(names: set[str], classes: tuple[str, ...], source: str) -> dict[str, int]:
    """Return label as text -> place of its class, for labels that are numbers. If no class is a number, a
    label is the place itself. Raises BadInput if a label has no class."""
    places = {}  # number -> place of its class
    for place, title in enumerate(classes):
        if title.isdecimal():
            places[int(title)] = place
    # classes of names: the labels count the folders
    if not places:
        places = dict(enumerate(range(len(classes))))
    outside = sorted(set(map(int, names)) - places.keys())
    if outside:
        raise BadInput(
            f"{source}: label {outside[0]} is not in {min(places)}..{max(places)} ({len(classes)} "
            "classes): expected 0..N-1 or 1..N, all of them in train.txt, or names"
        )
    return {name: places[int(name)] for name in names}


def number_sets(
    names: list[str], classes: Sequence[str] | None, source: str, listed: bool
) -> tuple[tuple[str, ...], np.ndarray]:
    """Return (classes, labels bool [n, classes]) for images with several labels, "a,b". Arguments: those of
    number_classes(). Raises BadInput."""
    sets = [[label for label in name.split(",") if label] for name in names]
    if not any(sets):
        raise BadInput(f"{source}: no image has a label")
    all_labels = list(itertools.chain.from_iterable(sets))
    ordered, numbers = number_classes(all_labels, classes, source, listed)
    rows = np.repeat(np.arange(len(sets)), [len(labels) for labels in sets])
    matrix = np.zeros((len(sets), len(ordered)), bool)
    matrix[rows, numbers] = True
    return ordered, matrix
