"""Find samples in shards without unpacking them; list the images in tar files as those in folders are listed.

The path of an image in a tar file is <tar>/<its first byte, 12 digits>/<its name>.
"""

import contextlib
import glob
import hashlib
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from common.ground.exits import BadInput
from common.ground.files import locked, open_atomic
from datasets import files
from datasets.folders import images
from datasets.folders.listing import SPLITS, Listing, Log, divide, map_files, number_classes, progress

_FIELDS = [("shard", "i8"), ("offset", "i8"), ("size", "i8"), ("label", "i8"), ("is_first", "?")]
Row = tuple[int, int, int, bool, bytes]  # offset, size, label, is_first, name


def find(patterns: str | Iterable[str]) -> list[str]:
    """Return the absolute paths of shards, sorted.

    patterns: with *, ?, [a-z] or {000..127}. Below a URL, all objects of the part before these are staged.
    Raises BadInput if a pattern matches no file.
    """
    paths: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        fixed, wild = split_pattern(pattern)
        folder, names = files.local_folder(fixed), [wild]
        if span := re.search(r"\{(\d+)\.\.(\d+)\}", wild):
            numbers = range(int(span[1]), int(span[2]) + 1)
            names = [wild.replace(span[0], str(number).zfill(len(span[1]))) for number in numbers]
            if not names:
                raise BadInput(f"{pattern}: {span[0]} has no number: expected the lower one first")
        for name in names:
            matches = glob.glob(os.path.join(glob.escape(folder), name), recursive=True)
            if not matches:
                raise BadInput(f"{pattern}: no file {name} in {folder}")
            paths.update(map(os.path.abspath, matches))
    if not paths:
        raise BadInput(f"shards {patterns!r}: expected at least one pattern")
    return sorted(paths)


def is_folder(path: str) -> bool:
    """Return whether a folder holds tar files and no folders: a platform passes a folder, not a pattern."""
    with os.scandir(path) as entries:
        kinds = {"folder" if each.is_dir() else os.path.splitext(each.name)[1] for each in entries}
    return ".tar" in kinds and "folder" not in kinds


def split_pattern(pattern: str) -> tuple[str, str]:
    """Return (folder, rest): the folder or URL before the first wildcard, and the pattern below it."""
    fixed, wild = re.fullmatch(r"((?:[^*?\[{]*/)?)(.*)", pattern).groups()  # type: ignore[union-attr]
    return fixed or ".", wild


def load_index(paths: list[str], scan: Callable[[str], list[Row]], cache: str | None) -> np.ndarray:
    """Return the index of shards: a memory-mapped array of the rows that scan(path) returns, with the fields
    of Row and `shard`, a place in `paths`.

    It is made once, and again if the size or the time of a shard changes, in the folder `cache` (None: that
    of the first shard). Of several processes one makes it, and the others wait. Raises BadInput.
    """
    try:
        states = [(path, os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in paths]
    except OSError as error:
        raise BadInput(f"cannot read {error.filename}: {error.strerror}") from error
    digest = hashlib.blake2b(repr(states).encode(), digest_size=8).hexdigest()
    folder, parts = cache or os.path.dirname(paths[0]), []
    place = os.path.join(folder, f".shards-{digest}.npy")
    try:
        os.makedirs(folder, exist_ok=True)
        with locked(f"{place}.lock"), progress(len(paths), "indexing", unit="shard") as bar:
            # one that is cut is made again
            with contextlib.suppress(FileNotFoundError, ValueError, EOFError):
                return np.load(place, mmap_mode="r")
            for number, rows in enumerate(map_files(scan, paths)):
                longest = max((len(name) for *_, name in rows), default=0) or 1
                parts.append(np.array([(number, *row) for row in rows], [*_FIELDS, ("name", f"S{longest}")]))
                bar.update()
            with open_atomic(place) as file:
                np.save(file, np.concatenate(parts))
        return np.load(place, mmap_mode="r")
    except OSError as error:
        reason = f"{error.strerror or error}; cache_dir: expected a folder that can be written"
        raise BadInput(f"the index of shards {place}: {reason}") from error


def scan_tar(path: str) -> list[Row]:
    """Return a Row for each file of a tar, without hidden ones. Raises BadInput with the byte of a fault.

    offset, size: bytes, of its content. label: the number in a .cls; -1 if it has none, and for other files.
    is_first: whether it begins a sample: its name up to the first dot differs from that of the file before.
    """
    rows: list[Row] = []
    sample, position = None, 0
    try:
        with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            while member := tar.next():
                tar.members.clear()  # type: ignore[attr-defined]  # they would stay in memory
                position, name, before = member.offset, os.path.normpath(member.name), sample
                if member.issparse() or member.islnk() or member.issym():
                    raise ValueError(f"{name} is sparse or a link: expected a whole file")
                if not member.isreg() or os.path.basename(name).startswith("."):
                    continue
                sample, label = split_name(name)[0], -1
                if name.endswith(".cls"):
                    text = read_member(path, member.offset_data, member.size).strip()
                    label = int(text) if re.fullmatch(rb"\d{1,18}", text) else -1
                rows.append((member.offset_data, member.size, label, sample != before, os.fsencode(name)))
            position = tar.offset
            if os.pread(file.fileno(), tarfile.BLOCKSIZE, position) != bytes(tarfile.BLOCKSIZE):
                raise ValueError("neither a file nor the end of a tar begins here")
            if not rows:
                raise ValueError("it holds no file")
    except (OSError, ValueError, tarfile.TarError) as error:
        raise BadInput(f"{path} is damaged, cut or not a tar at byte {position}: {error}") from error
    return rows


def split_name(name: str) -> tuple[str, str]:
    """Return (sample, kind) of a file: ("a/1", "seg.png") of a/1.seg.png."""
    folder, base = os.path.split(name)
    stem, _, kind = base.partition(".")
    return os.path.join(folder, stem), kind


def read_member(path: str, offset: int, size: int) -> bytes:
    """Return `size` bytes of a file from `offset`. Raises OSError, and BadInput if it has fewer."""
    content = read_bytes(path, offset, size)
    if len(content) < size:
        raise BadInput(f"{path} is cut: it has {len(content)} of {size} bytes at byte {offset}")
    return content


def read_bytes(path: str, offset: int, size: int) -> bytes:
    """Return up to `size` bytes of a file from `offset`. Raises OSError."""
    # Python's open() and read() take nearly twice the CPU time for a small file
    file, content = os.open(path, os.O_RDONLY), b""
    try:
        # a network file system may return less at a time
        while len(content) < size and (more := os.pread(file, size - len(content), offset + len(content))):
            content += more
        return content
    finally:
        os.close(file)


def split_path(path: str) -> tuple[str, int] | None:
    """Return (tar, offset) of the path of an image in a tar file; None for another path."""
    for match in re.finditer(r"\.tar(?=/(\d{12})/)", path):
        if not os.path.isdir(tar := path[: match.end()]):  # a folder may have such a name
            return tar, int(match[1])
    return None


def look(
    pattern: str, split: str, cache: str, classes: Sequence[str] | None, log: Log, val_share: float
) -> Listing:
    """Return the images of a split in tar files, as listing.look() does for a folder.

    A tar belongs to a split if its path has the split's name as a word, as in imagenet-train-000.tar; an
    image, if its name begins with it, as in train/cat/1.jpg. If none has, the names of the images decide, by
    val_share. The class of an image is the number in the .cls of its sample, or else the first folder of its
    name, without the split. Raises BadInput.
    """
    paths = find(pattern)
    base = os.path.commonpath([*map(os.path.dirname, paths)])
    words = {path: {*re.findall("[a-z]+", path.removeprefix(base).lower())} for path in paths}
    all_words = {*SPLITS["train"], *SPLITS["val"]}
    if any(words[path] & all_words for path in paths):
        paths, val_share = [path for path in paths if words[path] & {*SPLITS[split]}], 0.0
    if not paths:
        raise BadInput(f"{pattern}: no file has {' or '.join(SPLITS[split])} in its name, but others have")
    index = load_index(paths, scan_tar, cache)
    numbers = np.maximum.reduceat(index["label"], np.flatnonzero(index["is_first"]))[
        index["is_first"].cumsum() - 1
    ]
    found: list[tuple[str, str, str, int, int, str]] = []  # path, name, class, size, time, split in the name
    times = [os.stat(path).st_mtime_ns for path in paths]
    for (shard, offset, size, label, _, raw), number in zip(index.tolist(), numbers.tolist(), strict=True):
        name = os.fsdecode(raw).lstrip("/")
        if ".." in name.split("/") or (name.endswith(".cls") and label < 0):
            raise BadInput(f"{paths[shard]}: {name}: expected a name without .., and a number >= 0 in a .cls")
        if name.lower().endswith(images.EXTENSIONS):
            path = f"{os.path.relpath(paths[shard], base)}/{offset:012}/{name}"
            word, _, rest = name.partition("/")
            if word in all_words and (number >= 0 or "/" in rest):
                name = rest
            else:
                word = ""
            if number < 0 and "/" not in name:
                raise BadInput(
                    f"{base}/{path} has no class: expected a number in a .cls next to it, or a folder"
                )
            text = name.split("/")[0] if number < 0 else str(number)
            found.append((path, name, text, size, times[shard], word))
    if any(row[-1] for row in found):
        found, val_share = [row for row in found if row[-1] in SPLITS[split]], 0.0
    if not found:
        raise BadInput(f"{pattern} holds no image ({' '.join(images.EXTENSIONS)}) of the split {split}")
    names, members, texts, sizes, mtimes, _ = map(list, zip(*sorted(found), strict=True))
    are_numbers = bool((numbers >= 0).any())
    if classes is None and not are_numbers and len(set(texts)) == 1:
        raise BadInput(f"{pattern}: all images are in the folder {texts[0]}: expected CLASS/NAME")
    classes, labels = number_classes(texts, classes, pattern, are_numbers)
    kept = divide(pattern, split, members, labels, val_share, log) if val_share else np.arange(len(names))
    columns = labels[kept], np.array(sizes)[kept], np.array(mtimes)[kept]
    names = [names[place] for place in kept]
    return Listing(os.path.abspath(pattern), split, base, classes, names, *columns, val_share)
