"""List the images of a split: paths and labels, and sizes and times of files on demand. No image is read.

A root folder has one of two forms, and a split the first that exists; SPLITS has its names, in any capitals:

1. a table <root>/train.txt: lines `path label` below a header that names these columns, or without a header
   (read_table()). Paths are below the root;
2. class folders: <root>/train/<class>/** of any depth. Or <root>/<class>/* without splits: the hash of its
   path decides the split of an image.

What is of neither form is refused with both (check_classes()), and a start prints the classes and their
counts. Classes are numbered in the order of their names, images in the order of their paths.
"""

import argparse
import codecs
import contextlib
import csv
import decimal
import hashlib
import io
import math
import os
import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bootfile.ground.again import is_file, is_folder, read_whole
from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained
from datasets import files
from datasets.dead_links import refuse_dead_link
from datasets.folders import images
from datasets.folders.walk import Log, is_hidden, is_image, list_folder, shown, stat_files, walk

VAL_SHARE = 0.1  # the part of a folder without splits that validates
SPLITS = {  # the names that Hugging Face's imagefolder takes, as splits; the first that exists is used
    "train": ("train", "training"),
    "val": ("val", "validation", "valid", "dev", "test", "testing", "eval", "evaluation"),
}
BY_CLASS = "share of each class"  # how divide() has chosen the images for validation; in starts.jsonl
NO_SPLITS = "none"  # --splits: every folder is a class, whatever its name is
_FORMS = (
    "expected train/CLASS/* and val/CLASS/*, for example by `ln -s FOLDER {0}/train; ln -s FOLDER {0}/val` "
    "or --splits TRAIN,VAL; or train.txt and val.txt with the columns path and label, for example by "
    "`(cd {0}; echo path,label; find . -name '*.jpg' -printf '%P,LABEL\\n') > {0}/train.txt` with your labels"
)
_TABLES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")  # next to class folders they may have the labels
# words in the names of folders that hold a split, masks or a part of one folder of images
_NO_CLASSES = re.compile(
    "(train(ing)?|trn?|val?|valid(ation)?|dev|test(ing)?|tst|ts|te|eval(uation)?|pred|holdout)"
    "(sets?|data|images?|imgs?|pics|photos|samples)?|"
    "images?|imgs?|photos|pictures|pics|jpe?gs?|pngs?|inputs?|rgb|"
    "masks?|labels?|annot(s|ated|ations?)?|gt|(ground)?truth|segs?|segment(s|ed|ations?)?|trimaps?|targets?|"
    "outputs?|"
    "parts?|batch|chunk|folds?|split|shard|subset|volume"
)
_UNCLEAR = re.compile(r".*(?:,\s|\s,|[;|]).*")  # a label that may mean several
_LONGEST = 4096  # characters of a line in a table


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
    is_list: bool = False  # whether a table names the paths

    @property
    def division(self) -> str:
        """Return how images were chosen for validation; "" if the folder has splits."""
        return BY_CLASS if self.val_share else ""

    def get_states(self, rows: np.ndarray) -> np.ndarray:
        """Return int64 [n, 3], the sizes, mtimes and ctimes (ns) of these rows. Raises BadInput if files are
        missing. A start asks, to compare the files with their index."""
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
) -> Listing:
    """Return the Listing of a split without reading an image. Arguments: those of image_folder.load(). Raises
    BadInput. image_folder.look() calls it at each start, in the process of a node that indexes the images."""
    root = os.path.abspath(files.local_folder(root))
    name = find_split(root, split, splits, log)
    # a folder with the other split only cannot be divided: its images would be in both
    name_of_other = "val" if split == "train" else "train"
    if not name and (other := find_split(root, name_of_other, splits)):
        raise BadInput(
            f"{root} has {other}, but no {' or '.join(SPLITS[split])} (a folder, or a list .txt): "
            f"--splits TRAIN,VAL names the two folders; --splits {NO_SPLITS} takes all folders as classes"
        )
    base = root
    source = os.path.join(root, f"{name}.txt")
    is_list = bool(name) and is_file(source)
    if is_list:
        paths, names = read_table(source, log)
    else:
        source = base = os.path.join(root, name) if name else root
        paths, names = _list_class_folders(base, classes, log)
    if is_list and any("," in label for label in names):
        ordered, labels = _number_sets(names, classes, source)
    else:
        ordered, labels = number_classes(names, classes, source, is_list)
    if labelled and classes is None and labels.ndim == 1:  # the other split has the classes of the training
        check_classes(ordered, root, source, paths, bool(name or splits))
    val_share = 0.0 if name else val_share  # the folder has splits
    if val_share:
        rows = divide(root, split, paths, labels, ordered, val_share, log)
        paths = [paths[row] for row in rows.tolist()]
        labels = labels[rows]
    return Listing(root, split, base, ordered, paths, labels, val_share, splits, is_list=is_list)


def _list_class_folders(base: str, classes: Sequence[str] | None, log: Log) -> tuple[list[str], list[str]]:
    """Return (paths, class name of each path) of a tree. classes: as in number_classes(). Raises BadInput."""
    paths, others, folders = walk(base)
    if not paths:
        tars = f"; tar files: pass '{base}/**/*.tar'" if ".tar " in others else ""
        raise BadInput(f"{base} holds no image ({' '.join(images.EXTENSIONS)}): {others or 'no file'}{tars}")
    # images next to the class folders have no class: they are ignored, unless there is no class folder
    nested = [path for path in paths if "/" in path]
    ignored = [others] if others else []
    if 0 < len(nested) < len(paths):
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


def check_classes(classes: Sequence[str], root: str, source: str, paths: list[str], is_named: bool) -> None:
    """Raise BadInput if there are fewer than two classes, or if folders without splits may be none.

    The look() of folders and of tar files calls it before an image is read: a wrong folder costs no scan.
    root: the folder, "" for tar files. paths: of the images, CLASS/... is_named: whether the user, or the
    name of a split, says that these are class folders. Else they may be splits, masks or parts, which would
    be learned as classes: names of such folders are refused.
    """
    forms = _FORMS.format(root or "DATA")
    if len(classes) < 2:
        reason = f"one class, {classes[0]}" if classes[0] else "images without a class folder"
        raise BadInput(f"{source}: {reason}: {forms}")
    if is_named:
        return
    others = list(filter(_may_be_no_class, classes))
    deep = [path for path in paths if path.count("/") > 1]
    tables: list[str] = []
    if root:
        names = [entry.name for entry in list_folder(root)]
        tables = sorted(name for name in names if name.lower().endswith(_TABLES) and name[0] != ".")
    if others:
        reason = f"{shown(others)} may be splits, masks or parts"
    elif deep:
        reason = f"{deep[0]} is in a folder below a class, which may be a split"
    elif tables:
        reason = f"{shown(tables)} may have other labels than the folders"
    else:
        return
    raise BadInput(
        f"{source}: {reason}: if its {len(classes)} folders are classes, --splits {NO_SPLITS}; else {forms}"
    )


def _may_be_no_class(title: str) -> bool:
    """Return whether a word in the name of a folder is one of a split, of masks or of a part."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\d_A-Z]+", title)
    return any(_NO_CLASSES.fullmatch(word.lower()) for word in words)


def number_classes(
    names: list[str], classes: Sequence[str] | None, source: str, listed: bool
) -> tuple[tuple[str, ...], np.ndarray]:
    """Return (classes, labels int64 [n]).

    names: the label of each image as text.
    classes: those of the train split, if they are known.
    source: for messages.
    listed: the labels are from a table, so they may be numbers: of the train split 0..N-1 or 1..N, each of
        them used; of "val" those of "train".
    The look() of folders and of tar files calls it at each start. Raises BadInput.
    """
    used = sorted(set(names))
    are_numbers = listed and all(re.fullmatch("-?[0-9]+", name) for name in used)

    def form(name: str) -> str:
        """Return a name as all its spellings have it: 001 is 1, and macOS writes é as e and an accent."""
        is_number = are_numbers and name.isdecimal()
        return str(int(name)) if is_number else unicodedata.normalize("NFC", name)

    if classes is not None:
        ordered = tuple(classes)
    elif are_numbers:
        numbers = {form(name) for name in used}
        first = 0 if "0" in numbers else 1
        ordered = tuple(map(str, range(first, first + len(numbers))))
    else:
        ordered = tuple(used)
    places = {form(name): place for place, name in enumerate(ordered)}
    if len(places) < len(ordered):
        twins = [ascii(name) for place, name in enumerate(ordered) if places[form(name)] != place]
        raise BadInput(f"{source}: two classes have one name in different spellings: {shown(twins)}")
    if unknown := [name for name in used if form(name) not in places]:
        owner = f"class {unknown[0]!r}" if unknown[0] else "no class folder"
        raise BadInput(
            f"{source}: {names.count(unknown[0])} images belong to {owner}, but the train split has "
            f"{len(ordered)} classes: {shown(ordered)}; expected their names, or numbers 0..N-1 or 1..N that "
            "the training set has, too; a table of lines `path label` may have either"
        )
    labels = {name: places[form(name)] for name in used}
    return ordered, np.fromiter(map(labels.__getitem__, names), np.int64, len(names))


def _number_sets(
    names: list[str], classes: Sequence[str] | None, source: str
) -> tuple[tuple[str, ...], np.ndarray]:
    """Return (classes, labels bool [n, classes]) for images with several labels, "a,b". Arguments: those of
    number_classes(). Raises BadInput."""
    rows = []  # the number of an image for each of its labels
    labels = []
    for row, name in enumerate(names):
        for label in filter(None, name.split(",")):
            rows.append(row)
            labels.append(label)
    if not labels:
        raise BadInput(f"{source}: no image has a label")
    ordered, numbers = number_classes(labels, classes, source, True)
    matrix = np.zeros((len(names), len(ordered)), bool)
    matrix[rows, numbers] = True
    return ordered, matrix


def read_table(source: str, log: Log) -> tuple[list[str], list[str]]:
    """Return (paths, labels as text) of a table, ordered by path. Raises BadInput with the line.

    The text is UTF-8 or UTF-16. A line is `path label`, or has the columns of a header that names a `path`
    and a `label`. Values are separated by tabs, semicolons or commas, or the last of two by a space; a value
    that has the separator in it is quoted. Several labels are `3,17`. A line that begins with "# " is a
    comment. Paths are below the folder of the table, or absolute. look() calls it at each start.
    """
    lines = _read_lines(source)
    _, first = lines[0]
    for separator in "\t;, ":
        titles = [title.lower() for title in _split(first, separator)]
        if titles.count("path") == titles.count("label") == 1:
            lines = lines[1:]
            break
    else:  # no header: the separator leaves the name of an image alone
        titles = ["path", "label"]
        row = first.removesuffix(" ,")  # a path without a label, before a space
        for separator in "\t;, ":
            values = _split(row, separator)
            if values and is_image(values[0]):
                break
    if len(titles) > 2:
        log(f"{source}: of the columns {', '.join(titles)}, path and label are read")
    expected = (
        f"expected `path{separator}label`, a label with spaces in quotes, several labels as 3,17, or the "
        "columns of a header that names path and label"
    )
    folder = os.path.join(os.path.dirname(source), "")
    rows: dict[str, tuple[str, str]] = {}  # path without ./ -> path, label
    for number, line in lines:
        values = _split(line, separator)
        path = label = ""
        if len(values) == len(titles) and "\0" not in line and len(line) <= _LONGEST:
            path = values[titles.index("path")].removeprefix(folder)
            label = values[titles.index("label")]
        # before a space a name without an ending is a path, too, unless spaces are in it
        is_path = path and (is_image(path) or (separator == " " and " " not in path))
        is_label = label and not is_image(label) and not _UNCLEAR.fullmatch(label)
        if not is_path or not is_label:
            raise BadInput(f"{source}, line {number}: {expected}; found {line[:60]!r}")
        # an index has paths below its base only
        if os.path.isabs(path) or ".." in path.split("/"):
            raise BadInput(f"{source}, line {number}: {path} is not below the folder of {source}")
        plain = os.path.normpath(path)
        if plain in rows:
            raise BadInput(f"{source} lists {path} twice, with labels {rows[plain][1]} and {label}")
        rows[plain] = path, label
    if not rows:
        raise BadInput(f"{source} lists no image")
    paths, labels = zip(*sorted(rows.values()), strict=True)
    return list(paths), list(labels)


def _read_lines(source: str) -> list[tuple[int, str]]:
    """Return (number, text) of the lines that are neither empty nor comments. Raises BadInput without one."""
    with explained(f"cannot read {source}", UnicodeError):
        content = read_whole(source)
        code = "utf-16" if content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
        text = io.StringIO(content.decode(code, "surrogateescape"), newline=None)
    numbered = enumerate(map(str.strip, text), 1)
    lines = [(number, line) for number, line in numbered if line and line != "#" and line[:2] != "# "]
    if not lines:
        raise BadInput(f"{source} lists no image")
    return lines


def _split(line: str, separator: str) -> list[str]:
    """Return the values of a line of a table, two or more; [] if it has fewer, or if only the last has text.
    A space separates only the last value from the path, which may have spaces."""
    values: list[str] = []
    with contextlib.suppress(csv.Error):
        row = next(csv.reader([line], delimiter=separator, skipinitialspace=True, strict=True))
        values = [value.strip() for value in row]
    if len(values) < 2:
        return []
    *others, last = values
    if separator == " ":
        others = [" ".join(others)]
    return [*others, last] if any(others) else []


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
    folders: set[str] = set()
    others: set[str] = set()  # tables, and links that lead nowhere, which may be the folder of a split
    for entry in list_folder(root):
        if entry.is_folder:
            folders.add(entry.name)
        elif entry.name.endswith(".txt"):
            others.add(entry.name.removesuffix(".txt"))
        elif entry.is_link and not os.path.isfile(entry.path):
            others.add(entry.name)
    # --splits may name a folder, or a table, in a folder: photos/train
    for name in (splits or "").split(","):
        if is_folder(os.path.join(root, name, "")) or is_file(os.path.join(root, f"{name}.txt")):
            others.add(name)
    chosen = {}
    for key, names in split_names(splits).items():
        chosen[key] = _choose_name(folders | others, names, any_capitals=not splits)
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


def _choose_name(candidates: set[str], names: tuple[str, ...], any_capitals: bool) -> str:
    """Return the candidate that is the first of the names; "" if none is one. any_capitals: Val is val, but
    of several the one in small letters is taken."""
    for name in names:
        if equal := [one for one in candidates if name == (one.lower() if any_capitals else one)]:
            return name if name in equal else min(equal)
    return ""


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
        # at least one for each split, if there are two; images of one hash stay together
        number = min(max(math.floor(share * count + 0.5), 1), count - 1)
        while number < count - 1 and hashes[rows[number]] == hashes[rows[number - 1]]:
            number += 1
        is_val[rows[:number]] = True
    return is_val
