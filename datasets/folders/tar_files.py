"""Find samples in tar files without unpacking them, and list images in them as those in folders are listed.
The path of an image in a tar file is <tar>/<its first byte, 12 digits>/<its name>."""

import contextlib
import functools
import glob
import hashlib
import itertools
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from bootfile.ground.again import refusal
from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained, open_atomic, read_again
from common.ground.shared_folders import locked, own_place
from datasets import files
from datasets.dead_links import refuse_dead_link
from datasets.folders import images
from datasets.folders.listing import (
    NO_SPLITS,
    Listing,
    check_classes,
    divide,
    has_word,
    number_classes,
    split_names,
)
from datasets.folders.walk import (
    Log,
    count_endings,
    ending,
    is_hidden,
    is_image,
    list_folder,
    map_files,
    progress,
    shown,
)

_FORMAT = 3  # increase it if scan_tar() returns other rows
_TORN = -2  # the label of a file whose sample began earlier in the tar
_FIELDS = [("file", "i8"), ("offset", "i8"), ("size", "i8"), ("label", "i8"), ("is_first", "?")]
Row = tuple[int, int, int, bool, bytes]  # offset, size, label, is_first, name


def find(patterns: str | Iterable[str]) -> list[str]:
    """Return the absolute paths of the files, sorted.

    patterns: with *, ?, [a-z] or {000..127}. Below a URL, all objects of the part before these are staged.
    look() calls it in the process of a node that indexes the images. Raises BadInput if a pattern matches no
    file.
    """
    paths: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        fixed, wild = split_pattern(pattern)
        folder = files.local_folder(fixed)
        names = [wild]
        # each number of {000..127} must be there: a shard that is missing would not be noticed otherwise
        if span := re.search(r"\{(\d+)\.\.(\d+)\}", wild):
            numbers = range(int(span[1]), int(span[2]) + 1)
            names = [wild.replace(span[0], str(number).zfill(len(span[1]))) for number in numbers]
        if not names:
            raise BadInput(f"{pattern}: it has no number: expected the lower one first")
        for name in names:
            matches = glob.glob(os.path.join(glob.escape(folder), name), recursive=True)
            # a folder that is a link to nothing is left out by glob()
            parent = os.path.dirname(name)
            while parent:
                for path in glob.iglob(os.path.join(glob.escape(folder), parent), recursive=True):
                    if os.path.islink(path):
                        refuse_dead_link(path)
                parent = os.path.dirname(parent)
            if not matches:
                raise BadInput(f"{pattern}: no file {name} in {folder}")
            paths.update(map(os.path.abspath, matches))
    if not paths:
        raise BadInput(f"files {patterns!r}: expected at least one pattern")
    return sorted(paths)


def is_folder(path: str) -> bool:
    """Return whether a folder holds tar files, and neither folders nor images: a platform passes a folder
    in place of a pattern. Raises BadInput if a link in it leads nowhere."""
    entries = list_folder(path)
    has_tar = any(os.path.splitext(entry.name)[1] == ".tar" for entry in entries)
    if not has_tar or any(entry.is_folder or is_image(entry.name) for entry in entries):
        return False
    for entry in entries:
        if entry.is_link and not is_hidden(entry.name):
            refuse_dead_link(entry.path)
    return True


def split_pattern(pattern: str) -> tuple[str, str]:
    """Return (folder, pattern below it): the folder or URL is all before the first wildcard."""
    fixed, wild = re.fullmatch(r"((?:[^*?\[{]*/)?)(.*)", pattern).groups()  # type: ignore[union-attr]
    return fixed or ".", wild


def load_index(
    paths: list[str], scan: Callable[[str], list[Row]], cache: str | None, log: Log = print
) -> np.memmap:
    """Return the index of the files: a memory-mapped array of the rows that scan(path) returns, with the
    fields of Row and `file`, a place in `paths`. It is made once, and again if the size or the time of a file
    changes, in the folder `cache` (None: that of the first file). Of several processes one makes it, and the
    others wait. Raises BadInput."""
    states = []
    for path in paths:
        with explained(f"cannot read {path}"):
            status = read_again(functools.partial(os.stat, path), path)
        states.append((path, status.st_size, status.st_mtime_ns))
    digest = hashlib.blake2b(repr((_FORMAT, states)).encode(), digest_size=8).hexdigest()
    folder = cache or os.path.dirname(paths[0])
    # in the folder of the files: their owner could change them anyway
    owners = [] if cache else [os.stat(paths[0]).st_uid]
    place = own_place(os.path.join(folder, f".files-{digest}.npy"), log, *owners)

    def scan_again(path: str) -> list[Row]:
        return read_again(functools.partial(scan, path), path)

    try:
        os.makedirs(folder, exist_ok=True)
        with locked(f"{place}.lock"), progress(len(paths), "indexing", unit="file") as bar:
            # another process may have made it; one that is cut is made again
            with contextlib.suppress(FileNotFoundError, ValueError, EOFError):
                return np.load(place, mmap_mode="r")
            parts = []
            for number, rows in enumerate(map_files(scan_again, paths)):
                # all names of an array of NumPy have one width
                longest = max((len(name) for *_, name in rows), default=0) or 1
                parts.append(np.array([(number, *row) for row in rows], [*_FIELDS, ("name", f"S{longest}")]))
                bar.update()
            with open_atomic(place) as file:
                np.save(file, np.concatenate(parts))
        return np.load(place, mmap_mode="r")
    except OSError as error:
        reason = f"{error.strerror or error}; cache_dir: expected a folder that can be written"
        raise refusal(f"the index {place}: {reason}", error) from error


def scan_tar(path: str) -> list[Row]:
    """Return a Row for each file of a tar, without hidden ones. Raises BadInput with the byte of a fault.

    offset, size: bytes, of its content. label: the number in a .cls; -1 if it has none, and for other files;
    -2 if its sample began earlier in the tar, before other samples. is_first: whether it begins a sample: its
    name up to the first dot differs from that of the file before.

    load_index() calls it for each tar without an index, perhaps in threads.
    """
    rows: list[Row] = []
    sample: str | None = None  # of the last file
    position = 0  # of the header of the last file, for messages
    samples: set[str] = set()
    names: set[str] = set()
    try:
        with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            while member := tar.next():
                tar.members.clear()  # type: ignore[attr-defined]  # they would stay in memory
                position = member.offset
                name = os.path.normpath(member.name)
                before = sample
                if member.issparse() or member.islnk() or member.issym():
                    raise ValueError(f"{name} is sparse or a link: expected a whole file")
                if not member.isreg() or any(map(is_hidden, re.findall("[^/]*[^/.][^/]*", name))):
                    continue
                if name in names:
                    raise ValueError(f"{name} is there twice")
                sample, _ = split_name(name)
                label = -1
                # refused only by those who read whole samples (check_samples())
                if sample != before and sample in samples:
                    label = _TORN
                elif name.lower().endswith(".cls"):
                    text = read_member(path, member.offset_data, member.size).strip()
                    if re.fullmatch(rb"\d{1,18}", text):
                        label = int(text)
                samples.add(sample)
                names.add(name)
                rows.append((member.offset_data, member.size, label, sample != before, os.fsencode(name)))
            position = tar.offset
            # a tar ends with empty blocks: without them it was cut between two files, which tarfile does not
            # see
            if os.pread(file.fileno(), tarfile.BLOCKSIZE, position) != bytes(tarfile.BLOCKSIZE):
                raise ValueError("neither a file nor the end of a tar begins here")
            if not rows:
                raise ValueError("it holds no file")
    except (OSError, ValueError, tarfile.TarError) as error:
        raise refusal(f"{path} is damaged, cut or not a tar at byte {position}: {error}", error) from error
    return rows


def split_name(name: str) -> tuple[str, str]:
    """Return (sample, kind) of a file in a tar: ("a/1", "seg.png") of a/1.seg.png."""
    folder, base = os.path.split(name)
    stem, _, kind = base.partition(".")
    return os.path.join(folder, stem), kind


def read_member(path: str, offset: int, size: int) -> bytes:
    """Return `size` bytes of a file from `offset`. Raises OSError, and BadInput if it has fewer.

    FileStore calls it for each sample, in a thread or a worker; nothing stays open between samples."""
    file = os.open(path, os.O_RDONLY)  # Python's open() takes nearly twice the CPU time for a small file
    try:
        content = read_descriptor(file, offset, size)
    finally:
        os.close(file)
    if len(content) < size:
        raise BadInput(f"{path} is cut: it has {len(content)} of {size} bytes at byte {offset}")
    return content


def read_descriptor(file: int, offset: int, size: int) -> bytes:
    """Return up to `size` bytes of an open file from `offset`. Raises OSError."""
    content = b""
    # a network file system may return less at a time, and nothing at the end of the file
    while more := os.pread(file, size - len(content), offset + len(content)):
        content += more
    return content


def split_path(path: str) -> tuple[str, int] | None:
    """Return (tar, offset) of the path of an image in a tar file; None for another path. FileStore calls it
    for each sample."""
    for match in re.finditer(r"\.tar(?=/(\d{12})/)", path):
        tar = path[: match.end()]
        if not os.path.isdir(tar):  # a folder may have such a name
            return tar, int(match[1])
    return None


def look(
    pattern: str,
    split: str,
    cache: str,
    classes: Sequence[str] | None,
    log: Log,
    val_share: float = 0.0,
    splits: str | None = None,
    labelled: bool = True,
) -> Listing:
    """Return the images of a split in tar files, as listing.look() does for a folder.

    A tar belongs to a split if its path has the split's name as a word, as in imagenet-train-000.tar; an
    image, if its name begins with it, as in train/cat/1.jpg. If none has, the names of the images decide, by
    val_share. If there are .cls files, the class of an image is the number in that of its sample; otherwise
    it is the first folder of its name, without the split. Raises BadInput.

    image_folder.look() calls it, in the process of a node that indexes the images. Each tar is read at the
    first start only.
    """
    paths = find(pattern)
    base = os.path.commonpath([*map(os.path.dirname, paths)])
    # first by the names of the tar files, so that those of the other split are not read
    paths, are_named = _select_tars(pattern, paths, base, split, splits, log)
    members, ignored, has_cls = _list_members(paths, base, load_index(paths, scan_tar, cache, log))
    # a second way to find the split: the names of the images
    folders = {_split_folder(member) for member in members}
    kinds = _find_splits(pattern, folders, splits, lambda folder, name: folder.lower() == name.lower())
    if any(kinds.values()):
        are_named = True
        members = _select_members(members, kinds, split, ignored)
    if splits not in (None, NO_SPLITS) and not are_named:
        raise BadInput(f"--splits {splits}: {pattern} has no file and no folder of these names")
    if others := count_endings(ignored):
        log(f"{pattern}: ignored {others}")
    if not members:
        raise BadInput(f"{pattern} holds no image ({' '.join(images.EXTENSIONS)}) of the split {split}")
    # by path, as the images of a folder: the ids do not depend on the order in the tar files
    members.sort()
    names = [member.name for member in members]
    texts = [member.number or member.name.partition("/")[0] for member in members]  # of the classes
    ordered, labels = number_classes(texts, classes, pattern, has_cls)
    if labelled and classes is None:
        check_classes(ordered, "", pattern, names, bool(are_named or has_cls or splits))
    val_share = 0.0 if are_named else val_share
    if val_share:  # last way: the hashes of the names
        kept = divide(pattern, split, names, labels, ordered, val_share, log)
        members = [members[place] for place in kept]
        labels = labels[kept]
    states = np.array([(member.size, member.mtime, 0) for member in members])  # without a ctime
    kept_paths = [member.path for member in members]
    root = os.path.abspath(pattern)
    return Listing(root, split, base, ordered, kept_paths, labels, val_share, splits, states)


def _select_tars(
    pattern: str, paths: list[str], base: str, split: str, splits: str | None, log: Log
) -> tuple[list[str], bool]:
    """Return (tar files of a split, True) by their names below `base`; or (all, False) if none has the name
    of a split. Raises BadInput if only the other split has files."""
    kinds = _find_splits(pattern, [path.removeprefix(base) for path in paths], splits, has_word)
    # the files are not named by splits: look() then asks the names of the images
    if not any(kinds.values()):
        return paths, False
    if unused := [path for path, kind in kinds.items() if not kind]:
        log(f"{pattern}: ignored {shown(unused)}")
    of_split = [path for path in paths if kinds[path.removeprefix(base)] == split]
    if not of_split:
        words = " or ".join(split_names(splits)[split])
        raise BadInput(
            f"{pattern}: no file has {words} in its name, but others have the name of a split: "
            "--splits TRAIN,VAL names the words"
        )
    return of_split, True


class _Member(NamedTuple):
    """An image in a tar file. They are sorted by path, so the order of the fields counts."""

    path: str  # below the folder of the tar files, see split_path()
    name: str  # in the tar file, and without the folder of its split
    number: str  # in the .cls of its sample, or ""
    size: int  # bytes
    mtime: int  # of the tar file, nanoseconds


def _list_members(paths: list[str], base: str, index: np.ndarray) -> tuple[list[_Member], Counter[str], bool]:
    """Return (the images in tar files, ending of an ignored file -> count, whether .cls files have their
    classes). index: of load_index(). Raises BadInput if an image has no class."""
    rows = [(*row, os.fsdecode(raw).lstrip("/")) for *row, raw in index.tolist()]
    # one .cls is enough: then each image needs a number, and folders are not classes
    has_cls = any(name.lower().endswith(".cls") for *_, name in rows)
    numbers: dict[int, str] = {}
    if has_cls:
        check_samples(paths, index)
        numbers = _read_labels(paths, rows)
    members: list[_Member] = []
    ignored = Counter[str]()
    times = [os.stat(path).st_mtime_ns for path in paths]
    for place, (file, offset, size, _, _, name) in enumerate(rows):
        number = numbers.get(place, "")
        if name.lower().endswith(".cls"):
            continue
        if not is_image(name) or (has_cls and not number):
            ignored[ending(name)] += 1
            continue
        if ".." in name.split("/") or not (number or "/" in name):
            raise BadInput(f"{paths[file]}: {name}: expected CLASS/NAME without .., or NAME with a NAME.cls")
        path = f"{os.path.relpath(paths[file], base)}/{offset:012}/{name}"
        members.append(_Member(path, name, number, size, times[file]))
    return members, ignored, has_cls


def _select_members(
    members: list[_Member], kinds: dict[str, str], split: str, ignored: Counter[str]
) -> list[_Member]:
    """Return the images of a split with their names below its folder, and count those of no split in
    `ignored`. kinds: _split_folder() of an image -> its split, or ""."""
    of_split = []
    for member in members:
        kind = kinds[_split_folder(member)]
        if not kind:
            ignored["images of no split"] += 1
        if kind == split:
            _, _, name = member.name.partition("/")
            of_split.append(member._replace(name=name))
    return of_split


def _split_folder(member: _Member) -> str:
    """Return the first folder of an image's name, which may be a split; "" if that folder is its class."""
    first, *others = member.name.split("/")
    fewest = 1 if member.number else 2  # train/1.jpg, whose class is in a .cls; train/cat/1.jpg
    return first if len(others) >= fewest else ""


def _find_splits(source: str, texts: Iterable[str], splits: str | None, matches: Callable) -> dict[str, str]:
    """Return text -> its split, or "". matches(text, name of a split): of the names of a split, the first one
    that matches a text counts. Raises BadInput if a text has both splits.

    look() calls it with the names of the tar files, and again with the folders in them."""
    kinds = dict.fromkeys(sorted(texts), "")
    for split, names in split_names(splits).items():
        matching: list[str] = []
        for name in names:
            matching = [text for text in kinds if matches(text, name)]
            if matching:
                break
        for text in matching:
            if kinds[text]:
                raise BadInput(f"{source}: {text} has the names of both splits: --splits TRAIN,VAL")
            kinds[text] = split
    return kinds


def check_samples(paths: list[str], index: np.ndarray) -> None:
    """Raise BadInput if the files of a sample are not next to each other in their tar. Those who read samples
    of several files call it when they open the index."""
    torn = index[index["label"] == _TORN]
    if len(torn):
        sample, field = split_name(os.fsdecode(torn["name"][0]))
        path = paths[torn["file"][0]]
        raise BadInput(f"{path}: sample {sample}: its {field} is not next to its other files")


def _read_labels(paths: list[str], rows: list[tuple]) -> dict[int, str]:
    """Return the place of each image in the rows -> the number in the .cls of its sample. A sample without an
    image and without a .cls has none. Raises BadInput with the sample of a fault.

    look() calls it at each start, with the rows of all tar files of the split."""
    numbers = {}
    firsts = [place for place, row in enumerate(rows) if row[4]]  # where samples begin
    # a sample is a row of files with one name: its image gets the number of its .cls
    for first, end in itertools.pairwise([*firsts, len(rows)]):
        fields = []  # the kinds of the files of a sample: "jpg", "cls", "seg.png"
        pictures = []  # places of its images
        labels = []
        for place in range(first, end):
            field = split_name(rows[place][-1])[1].lower()
            fields.append(field)
            if f".{field}" in images.EXTENSIONS:
                pictures.append(place)
            elif field == "cls":
                labels.append(rows[place][3])
        # samples of another kind, such as texts, may be in the same tar
        if not any(field.endswith("cls") or is_image(f".{field}") for field in fields):
            continue
        sample, _ = split_name(rows[first][-1])
        where = f"{paths[rows[first][0]]}: sample {sample}"
        if len(pictures) != 1 or len(labels) != 1:
            raise BadInput(
                f"{where} has {', '.join(fields)}: expected one .cls and one image, "
                f"{' '.join(images.EXTENSIONS)}; the first dot of a name ends the name of its sample"
            )
        if labels[0] < 0:
            raise BadInput(f"{where}: expected a number >= 0 in its .cls")
        numbers[pictures[0]] = str(labels[0])
    return numbers
