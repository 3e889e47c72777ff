"""Texts as windows of tokens for a language model.

A token is a byte of a text, or a number of nanoGPT's files train.bin and val.bin: uint16, or if their numbers
show it uint32 or int64. The header of llm.c's files is skipped.
"""

import functools
import os
import sysconfig
from typing import Any

import numpy as np
import torch

from bootfile.ground.again import is_file, mode_of, read_whole
from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained, opener, read_again
from datasets.files import local_folder

_BINS = "train.bin", "val.bin"
_TEXTS = (".txt", ".md", ".py", ".json", ".jsonl", ".html", ".xml", ".csv", ".c", ".h", ".cpp", ".js", ".rst")
_LIBRARY = sysconfig.get_path("stdlib")
_LLMC = {20240520: "<u2", 20240801: "<u4"}  # first number of a header of 1024 bytes; the third is the count
# begins of .npy, zip and torch.save, pickle, Arrow and Parquet, whose numbers may follow as they are
_OTHERS = b"\x93NUMPY", b"PK\3\4", b"\x80\4\x95", b"\x80\5\x95", b"ARROW1", b"PAR1"
_PACKED = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"BZh"  # gzip, zstd, xz, bzip2
_TYPES = "<f8", "<f4", "<f2", ">i8", ">i4", "<i8", "<i4"  # the last two are read; else it is uint16
_SAMPLE = 2**20  # numbers that show the type
_MOST_TOKENS = 2**20  # largest vocabulary
_VALIDATED = 0.1  # share of the tokens, at the end


class TokenWindows(torch.utils.data.Dataset):
    """Windows of `context` tokens. An item is (tokens, the same places one token later), int64 [context].

    tokens: integers [n], uint8 of a text, n > 2 * context; a file of any size may be mapped. shift: a window
    begins at a random place of its part, another one in each epoch; otherwise the parts follow each other.
    vocabulary: number of different tokens. source: text for users about the origin of the tokens.
    """

    def __init__(self, tokens: np.ndarray, context: int, vocabulary: int, source: str, shift: bool):
        self.tokens = tokens
        self.context = context
        self.vocabulary = vocabulary
        self.source = source
        self.shift = shift
        self.unit = "tokens", context  # a log counts them

    def __len__(self) -> int:
        parts = (len(self.tokens) - 1) // self.context
        # a window of the last part would end behind the tokens
        return parts - 1 if self.shift else parts

    def __getitem__(self, id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a window. A worker, or the process of the training, calls it for each sample, after it has
        seeded torch for the step."""
        start = id * self.context
        if self.shift:
            start += int(torch.randint(self.context, ()))
        window = torch.from_numpy(self.tokens[start : start + self.context + 1].astype(np.int64))
        return window[:-1], window[1:]

    def text(self, tokens: torch.Tensor) -> str:
        """Return tokens as text: bytes as UTF-8, the numbers of a tokenizer as they are."""
        if self.tokens.dtype == np.uint8:
            return bytes(tokens.tolist()).decode("utf-8", errors="replace")
        return " ".join(map(str, tokens.tolist()))


def load(data_url: str | None, context: int) -> tuple[TokenWindows, TokenWindows]:
    """Return the training set and the test set.

    data_url: a text, a folder of texts, a folder with nanoGPT's train.bin and val.bin, or a folder's URL.
    None: modules of Python's standard library on this machine (4.7 MB). Of texts, the last tenth is the test
    set. Every rank calls it at the start of a job. Raises BadInput.
    """
    path = data_url if data_url is not None else _LIBRARY
    is_text = is_file(path)
    if is_text and path.endswith(".bin"):
        raise BadInput(f"{path}: expected its folder, with {' and '.join(_BINS)}")
    folder = path if is_text else local_folder(path)
    paths = [os.path.join(folder, name) for name in _BINS]
    # also a link that leads nowhere: texts must not take the place of tokens whose disk is not mounted
    if not is_text and any(mode_of(path) is not None or os.path.islink(path) for path in paths):
        train, test = [read_again(functools.partial(_map, path), path) for path in paths]
        largest = max(int(train.max()), int(test.max()))
        if largest >= _MOST_TOKENS:
            raise BadInput(
                f"{folder}: token {largest} in {train.dtype} numbers, expected below {_MOST_TOKENS}"
            )
        vocabulary = -(-(largest + 1) // 64) * 64  # a multiple of 64 is faster
        source = f"{folder} as {train.dtype} and {test.dtype}, highest token {largest}"
    else:
        paths = [folder] if is_text else _find_texts(folder)
        tokens = np.frombuffer(b"\n".join(map(_read, paths)), np.uint8)
        split = round(len(tokens) * (1 - _VALIDATED))
        train = tokens[:split]
        test = tokens[split:]
        vocabulary = 256
        source = "modules of Python's standard library" if data_url is None else folder
    for part, name in ((train, "training"), (test, "test")):
        if len(part) <= 2 * context:
            raise BadInput(
                f"{source}: {len(part)} tokens for {name}, expected more than 2 * --context {context}"
            )
    make: Any = functools.partial(TokenWindows, context=context, vocabulary=vocabulary, source=source)
    return make(train, shift=True), make(test, shift=False)


def _find_texts(folder: str) -> list[str]:
    """Return the paths of the texts in a folder and below it, in the order of their names. Of the standard
    library these are the modules at the top: the folders also hold what was installed later."""

    def refuse(error: OSError) -> None:
        raise error  # os.walk() would leave the folder out

    paths = []
    with explained(f"cannot list {folder}"):
        for parent, folders, names in os.walk(folder, onerror=refuse):
            if folder == _LIBRARY:
                folders.clear()  # os.walk() enters what remains
            else:
                folders.sort()
            paths += [os.path.join(parent, name) for name in sorted(names) if name.endswith(_TEXTS)]
    if not paths:
        raise BadInput(f"{folder}: expected texts ({', '.join(_TEXTS)}) or {' and '.join(_BINS)}")
    return paths


def _read(path: str) -> bytes:
    with explained(f"cannot read {path}"):
        content = read_whole(path, opener)
    if content.startswith((*_PACKED, *_OTHERS)):
        raise BadInput(f"{path} is not a text, but a compressed file or an archive of data: unpack it first")
    return content


def _map(path: str) -> np.ndarray:
    """Return the numbers of a file of tokens without reading it into memory. Raises BadInput if they are of
    another type than uint16, uint32 and int64."""
    # ValueError: its size is odd or 0
    with explained(f"cannot read {path}", ValueError), open(path, "rb", opener=opener) as file:
        start = file.read(1024)
        magic, _, count = np.frombuffer(start[:12].ljust(12, b"\0"), "<i4").tolist()
        if magic in _LLMC:
            tokens = np.memmap(file, _LLMC[magic], mode="r", offset=1024)
            if len(tokens) != count:
                raise BadInput(f"{path} has {len(tokens)} tokens, and its header says {count}")
            return tokens
        tokens = np.memmap(file, "<u2", mode="r")
    kind = _find_type(tokens[: min(len(tokens), _SAMPLE) // 4 * 4])
    if start.startswith(_OTHERS) or (len(start) == 1024 and not any(start[24:])):
        reason = "the header of another kind of file"
    elif b"\0" not in start and start.decode("utf-8", "replace").count("\ufffd") < 2:  # the end may be cut
        reason = "a text"
    elif kind[1:] in ("i4", "i8") and kind[0] == "<" and tokens.nbytes % int(kind[2]) == 0:
        return tokens.view(kind.replace("i", "u"))
    elif kind == "<u2":
        return tokens
    else:
        reason = f"numbers of another type or byte order ({kind}), or cut"
    raise BadInput(
        f"{path} begins with {start[:12]!r}, {reason}; expected uint16, uint32 or int64: "
        "numpy.array(tokens, 'uint16').tofile(path)"
    )


def _find_type(sample: np.ndarray) -> str:
    """Return the type of the tokens in a sample, uint16 [4n], as NumPy names it. It is the first of _TYPES as
    which all numbers are whole and small, otherwise "<u2". Of tokens, the upper bytes have fewer values: if
    the lower ones do, it is ">u2", and if both have the same, it is "u1" or compressed."""
    if not sample.any():
        return "<u2"
    has_small_pairs = sample[1::2].any() and sample.max() < 16  # as "<i4" each number is two tokens below 16
    for kind in _TYPES:
        values = sample.view(kind)
        with np.errstate(invalid="ignore", over="ignore"):
            is_small = (values > -_MOST_TOKENS) & (values < _MOST_TOKENS)
            if (is_small & (values == np.rint(values))).all():
                return "<u2" if kind == "<i4" and has_small_pairs else kind
    numbers = sample[sample > 0]  # zeros may fill lines
    # shares of the values of the two bytes
    lower = np.bincount(numbers & 255, minlength=256) / len(numbers)
    upper = np.bincount(numbers >> 8, minlength=256) / len(numbers)
    if lower.max() > 3 * upper.max():
        return ">u2"
    return "u1" if np.abs(lower - upper).sum() / 2 < 0.15 else "<u2"
