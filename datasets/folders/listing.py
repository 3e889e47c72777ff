"""List folders of images: paths and labels, and sizes and times of files on demand, without reading an image.

A split of a root folder is the first of these that exists. Its name is one of SPLITS, with any capitals:

1. <root>/train.txt: a list of lines `path label` (_read_list()). Paths are below the root, or else below
   <root>/train. The label is a class name or a number, or several of them: `path 3,17`. Then `path ,` is an
   image without a label;
2. <root>/train/<class>/**: class folders of any depth;
3. <root>/<class>/**: no folders of splits. The hash of its path decides the split of an image.

Classes are numbered in the order of their names, images in the order of their paths. Links are followed.
"""

import codecs
import contextlib
import csv
import functools
import hashlib
import io
import itertools
import os
import re
import resource
import stat
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
from tqdm import tqdm

from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained
from datasets import files
from datasets.folders import images

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
Log = Callable[[str], object]  # called with one line of text
_THREADS = 16  # more than cores: on a network file system most threads wait
_TURN = 64  # tasks that threads do before the waiting is measured again, for the first time
FILES_PER_TASK = 64  # files per task
_LONGEST = 4096  # characters of a line in a list
_SHOWN = 10  # entries of a long list in a message
VAL_SHARE = 0.1  # of the images of a folder without splits
SPLITS = {  # the names that Hugging Face's imagefolder takes, as splits; the first that exists is used
    "train": ("train", "training"),
    "val": ("val", "validation", "valid", "dev", "test", "testing", "eval", "evaluation"),
}
NO_SPLITS = "none"  # --splits: every folder is a class, whatever its name is
_FORMS = (
    "train/CLASS/*.jpg and val/CLASS/*.jpg, or CLASS/*.jpg, or train.txt and val.txt with lines `path label` "
    "or those of a CSV"
)
_SYSTEM = {"__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "lost+found"}  # folders that systems add
_PATH = re.compile("(file|image|img)?(path|file|image|img|name|id)s?")  # titles of columns, letters only
_LABEL = re.compile("(class|label|category|target)(id|name|label|s|es)?|y")
_UNCLEAR = re.compile(r".*(?:,\s|\s,|[;|]).*")  # a label that may mean several


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

    def get_states(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Return int64 [n, 2], the sizes and modification times (ns) of these rows, or of all rows. Raises
        BadInput if files are missing."""
        rows = np.arange(len(self.paths)) if rows is None else rows
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
    """Return the Listing of a split without reading an image. Arguments: those of image_folder.load().
    Raises BadInput."""
    root = os.path.abspath(files.local_folder(root))
    name = find_split(root, split, splits, log)
    if not name and (other := find_split(root, "val" if split == "train" else "train", splits)):
        raise BadInput(
            f"{root} has {other}, but no {' or '.join(SPLITS[split])} (a folder, or a list .txt): --splits "
            f"TRAIN,VAL names the two folders; --splits {NO_SPLITS} takes all folders as classes"
        )
    base = os.path.join(root, name) if name else root
    source = f"{base}.txt"
    if listed := bool(name) and os.path.isfile(source):
        paths, names = _read_list(source, log)
        if os.path.exists(os.path.join(root, paths[0])) or not os.path.isdir(base):
            base = root
    else:
        source = base
        paths, names = _by_class(base, classes, log)
    number = number_sets if listed and any("," in each for each in names) else number_classes
    ordered, labels = number(names, classes, source, listed)
    if labelled and classes is None and labels.ndim == 1:
        check_classes(ordered, source, paths, name, splits, log)
    elif listed and labels.ndim == 1 and labels.min() > 0 and names[0] not in ordered:
        log(f"{source}: no image has the label 0, which is the class {ordered[0]}")
    val_share = 0.0 if name else val_share
    if val_share:
        rows = divide(root, split, paths, labels, val_share, log)
        paths, labels = [paths[row] for row in rows.tolist()], labels[rows]
    return Listing(root, split, base, ordered, paths, labels, val_share, splits, is_list=listed)


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
    for one, other in itertools.combinations([each for each in order if counts[each] >= 0][:_SHOWN], 2):
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


def has_word(text: str, *words: str) -> bool:
    """Return whether one of the words is in a text between characters that are not letters, in any case. A
    word that ends in a digit is not part of a longer number."""
    ends = [re.escape(word.lower()) + r"(?!\d)" * word[-1].isdigit() for word in words]
    return bool(re.search(rf"(?<![a-z])(?:{'|'.join(ends)})(?![a-z])", text.lower()))


def is_word(text: str, word: str) -> bool:
    """Return whether a text is a word, in any case."""
    return text.lower() == word.lower()


def shown(texts: Sequence[str]) -> str:
    """Return the first texts of a long list, and the number of the others."""
    more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return "; ".join(texts[:_SHOWN]) + more


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


def _by_class(base: str, classes: Sequence[str] | None, log: Log) -> tuple[list[str], list[str]]:
    """Return (paths, class name of each path) of a tree. classes: as in number_classes(). Raises BadInput."""
    paths, others, class_folders = walk(base)
    nested = [path for path in paths if "/" in path]
    if not paths:
        tars = f"; tar files: pass '{base}/**/*.tar'" if ".tar " in others else ""
        raise BadInput(f"{base} holds no image ({' '.join(images.EXTENSIONS)}): {others or 'no file'}{tars}")
    if nested and len(nested) < len(paths):
        others += ", " * bool(others) + f"{len(paths) - len(nested)} images outside class folders"
    if others:
        log(f"{base}: ignored {others}")
    paths = sorted(nested or paths)
    names = [path.partition("/")[0] if nested else "" for path in paths]
    empty = sorted(class_folders - set(names)) if nested and classes is None else []
    if empty:  # skipping them would change the numbers of the other classes
        raise BadInput(
            f"{base}: {len(empty)} class folders hold no image: {shown(empty)}: move them, or name them .NAME"
        )
    return paths, names


def _read_list(source: str, log: Log) -> tuple[list[str], list[str]]:
    """Return (paths, labels as text) of a list. Raises BadInput with the line.

    A path and a label are separated by a tab, a semicolon, a comma or spaces. A value that has the separator
    in it is quoted, except for a path before spaces. Of columns, the path is the one whose values end as
    images do; of more than two, a header names the label. Lines that begin with "# " are comments. Paths are
    below the folder of the list, or absolute; backslashes separate folders if no line has a slash.
    """
    lines = _read_lines(source)
    last = lines[-1][1].removesuffix(" ,")  # a path without a label, before spaces
    separator = next((each for each in "\t;," if any(map(is_image, _split(last, each)))), " ")
    head, values = (_split(lines[place][1], separator) for place in (0, -1))
    count = 2 if separator == " " else len(values)
    titles = [re.sub("[^a-z]", "", title.lower()) for title in head] if len(head) == count else [""] * count
    paths = [column for column in range(count) if is_image(values[column])] if separator != " " else [0]
    paths = paths if len(paths) == 1 else [column for column in paths if _PATH.fullmatch(titles[column])]
    others = [column for column in range(count) if column not in paths]
    others = others if count == 2 else [column for column in others if _LABEL.fullmatch(titles[column])]
    expected = (
        f"expected `path{separator}label`, a label with spaces in quotes, several labels as 3,17, or of "
        "columns, a header that names the path and one label"
    )
    if len(paths) != 1 or len(others) != 1:
        raise BadInput(f"{source}, line {lines[0][0]}: {expected}; found {lines[0][1][:60]!r}")
    [at], [of] = paths, others
    if at or count > 2:
        log(f"{source}: the path is column {at + 1} and the label column {of + 1} of {count}")
    named = bool(_PATH.fullmatch(titles[at])) + bool(_LABEL.fullmatch(titles[of]))
    if named > (separator == " ") and not any(map(is_image, head)):
        lines = lines[1:]
    folder = os.path.join(os.path.dirname(source), "")
    rows: dict[str, tuple[str, str]] = {}  # path without ./ -> path, label
    for number, line in lines:
        values = _split(line, separator)
        path, label = (values[at], values[of]) if len(values) == count else ("", "")
        is_path = is_image(path) or (separator == " " and " " not in path)
        is_label = label and not is_image(label) and not _UNCLEAR.fullmatch(label)
        if not (path and is_path and is_label) or "\0" in line or len(line) > _LONGEST:
            raise BadInput(f"{source}, line {number}: {expected}; found {line[:60]!r}")
        path = path.removeprefix(folder)
        if os.path.isabs(path) or ".." in path.split("/"):
            raise BadInput(f"{source}, line {number}: {path} is not below the folder of {source}")
        plain = os.path.normpath(path) if "./" in path or "//" in path else path
        if plain in rows:
            raise BadInput(f"{source} lists {path} twice, with labels {rows[plain][1]} and {label}")
        rows[plain] = path, label
    if not rows:
        raise BadInput(f"{source} lists no image")
    ordered = sorted(rows.values())
    return [path for path, _ in ordered], [label for _, label in ordered]


def _read_lines(source: str) -> list[tuple[int, str]]:
    """Return (number, text) of the lines that are neither empty nor comments. Raises BadInput without one."""
    with explained(f"cannot read {source}"), open(source, "rb") as file:
        content = file.read()
    code = "utf-16" if content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
    try:
        text = io.StringIO(content.decode(code, "surrogateescape"), newline=None)
    except UnicodeError as error:
        raise BadInput(f"cannot read {source}: {error}") from error
    lines = [(number, line) for number, each in enumerate(text, 1) if (line := each.strip())]
    lines = [(number, line) for number, line in lines if not f"{line} ".startswith("# ")]
    if not lines:
        raise BadInput(f"{source} lists no image")
    if not any("/" in line for _, line in lines):
        lines = [(number, line.replace("\\", "/")) for number, line in lines]
    return lines


def _split(line: str, separator: str) -> list[str]:
    """Return the values of a line of a list; two, of which the path may have spaces, if the separator is a
    space. [] if there is only one."""
    values: list[str] = []
    with contextlib.suppress(csv.Error):
        row = next(csv.reader([line], delimiter=separator, skipinitialspace=True, strict=True))
        values = [value.strip() for value in row]
    if separator == " ":
        values = [" ".join(values[:-1]), *values[-1:]]
    return values if len(values) > 1 and any(values[:-1]) else []


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


def stat_files(base: str, paths: list[str]) -> np.ndarray:
    """Return int64 [n, 2], the sizes and mtimes (ns) of files. Raises BadInput if some are missing."""

    def states(first: int) -> np.ndarray:
        part = []
        for path in paths[first : first + FILES_PER_TASK]:
            state = -1, -1
            try:
                status = os.stat(prefix + path)
            except OSError:
                pass
            else:
                if stat.S_ISREG(status.st_mode):
                    state = status.st_size, status.st_mtime_ns
            part.append(state)
        return np.array(part, np.int64)

    parts, prefix = [], os.path.join(base, "")
    with progress(len(paths), f"looking through {base}") as bar:
        for part in map_files(states, range(0, len(paths), FILES_PER_TASK)):
            parts.append(part)
            bar.update(len(part))
    known = np.concatenate(parts)
    missing = np.flatnonzero(known[:, 0] < 0)
    if len(missing):
        which = shown([paths[row] for row in missing])
        raise BadInput(f"{len(missing)} of {len(paths)} files are missing in {base}: {which}")
    return known


def map_files(task: Callable[[_Task], _Result], tasks: Iterable[_Task]) -> Iterator[_Result]:
    """Yield task(each) in order, for tasks that read files.

    This thread does the tasks until one takes more than twice its CPU time and has waited for a disk or a
    network (not for a busy processor: _count_waits()). _THREADS threads do the next ones then, in turns that
    become longer. For files in the page cache they would take five times as long, because they wait for
    Python's lock at each call.
    """
    waiting, turn = iter(tasks), _TURN
    with ThreadPoolExecutor(_THREADS) as pool:
        for each in waiting:
            begin, used, gave_up = time.perf_counter(), time.thread_time(), _count_waits()
            result = task(each)
            waits = time.perf_counter() - begin > 2 * (time.thread_time() - used) and _count_waits() > gave_up
            yield result
            if waits:
                yield from pool.map(task, itertools.islice(waiting, turn))
            turn = 2 * turn if waits else _TURN


def _count_waits() -> int:
    """Return how often this thread has waited for something other than a processor."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def progress(total: int | None, text: str, done: int = 0, unit: str = "image") -> tqdm:
    """Return a progress bar that counts images. done: those that were ready before."""
    # not a terminal: print every 10 s, so that a long scan does not look like a hang
    interval = 10 * (not os.isatty(2)) or 0.1
    return tqdm(total=total, initial=done, desc=text, unit=unit, delay=2, mininterval=interval)
