"""Number the classes of images, and refuse class folders that are probably splits."""

import functools
import itertools
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

import numpy as np

from bootfile.ground.errors import BadInput
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

    paths: of the images, CLASS/... name: of the split, "" if no split was found. splits: as in find_split().
    """
    if len(classes) < 2:
        inner = os.path.join(source, classes[0])
        has_folders = bool(classes[0]) and os.path.isdir(inner) and any(path.count("/") > 1 for path in paths)
        hint = f"--splits {name}/{classes[0]},VAL" if name else f"--data_url {inner}"
        reason = f"one class, {classes[0]}" if classes[0] else "images without a class folder"
        raise BadInput(f"{source}: {reason}: expected two or more: {_FORMS}" + f"; or {hint}" * has_folders)
    if len({each.casefold() for each in classes}) < len(classes):
        log(f"{source}: some of the {len(classes)} classes differ only in capitals")
    if name or splits:
        return
    counts = Counter[str]()  # class -> images in folders below it, less those that are not
    below: dict[str, dict[str, str]] = {}  # class -> name of a folder of images below it -> its parent
    for path in paths:
        first, *parts = path.split("/")[:-1]
        counts[first] += 1 if parts else -1
        if parts:
            below.setdefault(first, {}).setdefault(parts[-1], "/".join([first, *parts[:-1]]))
    is_train = {each: has_word(each, *SPLITS["train"]) for each in below}
    order = sorted(below, key=lambda each: (not is_train[each], -counts[each], each))
    for one, other in itertools.combinations([each for each in order if counts[each] >= 0][:SHOWN], 2):
        same = sorted(below[one].keys() & below[other].keys())
        if len(same) > max(1, min(len(below[one]), len(below[other])) / 2):
            reason = f"hold the same folders ({shown(same)})"
            option = f"{below[one][same[0]]},{below[other][same[0]]}"
        elif is_train[one] and has_word(other, *SPLITS["val"]):
            reason, option = "have the names of splits", f"{one},{other}"
        else:
            continue
        inner = f"; if {shown(same)} are splits, list their images in train.txt and val.txt"
        raise BadInput(
            f"{source}: {one} and {other} {reason}: if they are splits, --splits {option}; if they are "
            f"classes, --splits {NO_SPLITS}" + inner * any(has_word(each, *SPLITS["train"]) for each in same)
        )


def number_classes(
    names: list[str], classes: Sequence[str] | None, source: str, listed: bool
) -> tuple[tuple[str, ...], np.ndarray]:
    """Return (classes, labels int64 [n]).

    names: the label of each image as text.
    classes: those of the train split, if they are known.
    source: for messages.
    listed: the labels are from a list, so they may be numbers: of the train split 0..N-1 or 1..N, each of
        them used; of "val" the numbers of "train", or places in its class folders.
    Raises BadInput.
    """
    known = set(names)
    ordered = tuple(sorted(known) if classes is None else classes)
    form = functools.partial(unicodedata.normalize, "NFC")  # macOS writes é as e and an accent
    places = {form(name): place for place, name in enumerate(ordered)}
    if len(places) < len(ordered):
        twins = [ascii(name) for place, name in enumerate(ordered) if places[form(name)] != place]
        raise BadInput(f"{source}: two classes have one name in different Unicode forms: {shown(twins)}")
    labels = {name: places.get(form(name), -1) for name in known}
    are_known = classes is not None and min(labels.values()) >= 0
    if listed and not are_known and all(re.fullmatch("-?[0-9]+", name) for name in known):
        # numbers of classes, not class names that look like numbers
        numbers = {name: int(name) for name in known}
        if classes is None:
            first = int(min(numbers.values()) == 1)
            ordered = tuple(map(str, range(first, first + len({*numbers.values()}))))
        values = {int(name): place for place, name in enumerate(ordered) if name.isdecimal()}
        values = values or {place: place for place in range(len(ordered))}
        if outside := sorted({*numbers.values()} - values.keys()):
            raise BadInput(
                f"{source}: label {outside[0]} is not in {min(values)}..{max(values)} ({len(ordered)} "
                "classes): expected 0..N-1 or 1..N, all of them in train.txt, or names"
            )
        labels = {name: values[number] for name, number in numbers.items()}
    elif strange := sorted(name for name, label in labels.items() if label < 0):
        count, owner = names.count(strange[0]), f"class {strange[0]!r}" if strange[0] else "no class folder"
        raise BadInput(
            f"{source}: {count} images belong to {owner}, but the train split has {len(ordered)} classes: "
            f"{shown(ordered)}; a list with lines `path label` can name their classes"
        )
    return ordered, np.fromiter(map(labels.__getitem__, names), np.int64, len(names))


def number_sets(
    names: list[str], classes: Sequence[str] | None, source: str, listed: bool
) -> tuple[tuple[str, ...], np.ndarray]:
    """Return (classes, labels bool [n, classes]) for images with several labels, "a,b". Arguments: those of
    number_classes(). Raises BadInput."""
    sets = [[*filter(None, name.split(","))] for name in names]
    if not any(sets):
        raise BadInput(f"{source}: no image has a label")
    ordered, numbers = number_classes([*itertools.chain(*sets)], classes, source, listed)
    labels = np.zeros((len(sets), len(ordered)), bool)
    labels[np.repeat(np.arange(len(sets)), [*map(len, sets)]), numbers] = True
    return ordered, labels
