"""Map-style Datasets of the samples in tar and Parquet files, which are read by number.

train_set = TarShards("shards/train-{000..127}.tar", transform=decode)
train_set = ParquetRows("rows/*.parquet", columns=["text", "label"])
"""

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from bootfile.ground.errors import BadInput, import_optional
from bootfile.ground.files import explained, read_again
from common.ground.files import is_url
from datasets.files import CACHE_FOLDER
from datasets.folders import tar_files

_GROUPS = 8  # row groups that a process keeps in memory


class TarShards(Dataset):
    """The samples of tar files: consecutive files with one name up to the first dot, as WebDataset has them.

    A sample is a dictionary: "__key__": that name; and for each file the rest of its name, for example "jpg":
    its bytes, which are read from their place in the tar.

    files: a pattern with *, ?, [a-z] or {000..127}, or several. Below a URL they are staged.
    transform: a function of a sample that returns an item (default: the sample is the item).
    cache_dir: folder of the index (default: that of the files; ~/.cache/bootfile for a URL). It is made
        once, and again if the size or the time of a file changes.
    Raises BadInput, with the byte if a tar is damaged or cut. A pickle has the path of the index.
    """

    def __init__(
        self,
        files: str | Iterable[str],
        transform: Callable[[dict[str, Any]], Any] | None = None,
        cache_dir: str | None = None,
    ):
        self.paths, self.index = _open(files, tar_files.scan_tar, cache_dir)
        self.transform = transform
        tar_files.check_samples(self.paths, self.index)
        self._number()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"index": str(self.index.filename), "_first": None, "_sizes": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        place = state["index"]
        try:
            index = np.load(place, mmap_mode="r")
        except FileNotFoundError:  # a worker on another node, which does not share the folder
            index = tar_files.load_index(state["paths"], tar_files.scan_tar, os.path.dirname(place))
        vars(self).update(state | {"index": index})
        self._number()

    def _number(self) -> None:
        """Number the samples, in the process that makes the data set and in those that unpickle it."""
        self._first = np.append(np.flatnonzero(self.index["is_first"]), len(self.index))  # its row
        self._sizes = np.array(self.index["size"])  # arrays of numbers are part of the data's fingerprint

    def __len__(self) -> int:
        return len(self._first) - 1

    def __getitem__(self, id: int) -> Any:
        """Return a sample."""
        id = range(len(self))[id]
        sample: dict[str, Any] = {}
        for place, offset, size, _, _, name in self.index[self._first[id] : self._first[id + 1]].tolist():
            sample["__key__"], kind = tar_files.split_name(os.fsdecode(name))
            path = self.paths[place]
            with explained(f"cannot read {path}"):
                sample[kind] = read_again(functools.partial(tar_files.read_member, path, offset, size), path)
        return self.transform(sample) if self.transform else sample


class ParquetRows(Dataset):
    """The rows of Parquet files: a dictionary each. columns: names of the columns to read (default: all).
    Others: as for TarShards. A read loads a row group, and a process keeps the last ones: write small groups,
    for example pyarrow.parquet.write_table(table, path, row_group_size=1000)."""

    def __init__(
        self,
        files: str | Iterable[str],
        columns: Sequence[str] | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        cache_dir: str | None = None,
    ):
        self.paths, self.index = _open(files, _scan_parquet, cache_dir)
        self.columns = None if columns is None else tuple(columns)
        self.transform = transform
        self._first = np.append(0, np.cumsum(self.index["size"]))  # rows of the groups
        # now, and not in a worker at some sample of the first epoch
        for path in self.paths if self.columns else []:
            with explained(f"cannot read {path}", ValueError):
                known = read_again(functools.partial(_parquet().read_schema, path), path).names
            if missing := set(self.columns or ()).difference(known):
                raise BadInput(f"{path} has no column {min(missing)}; it has {', '.join(known)}")

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, id: int) -> Any:
        """Return a row."""
        id = range(len(self))[id]
        group = int(np.searchsorted(self._first, id, "right")) - 1
        place, number, *_ = self.index[group].tolist()
        path = self.paths[place]
        table = read_again(functools.partial(_read_group, path, number, self.columns), path)
        row = table.slice(id - int(self._first[group]), 1).to_pylist()[0]
        return self.transform(row) if self.transform else row


def _open(
    files: str | Iterable[str], scan: Callable[[str], list[tar_files.Row]], cache_dir: str | None
) -> tuple[list[str], np.memmap]:
    """Return (paths, index) of the files. The data sets call it when they are made, on every rank: of the
    processes that share the folder of the index one scans the files."""
    patterns = [files] if isinstance(files, str) else list(files)
    if cache_dir is None and any(map(is_url, patterns)):
        cache_dir = CACHE_FOLDER
    paths = tar_files.find(patterns)
    return paths, tar_files.load_index(paths, scan, cache_dir)


def _scan_parquet(path: str) -> list[tar_files.Row]:
    """Return a Row for each row group: offset: its number, size: its rows. load_index() calls it for each
    file without an index. Raises BadInput."""
    with explained(f"{path} is damaged, cut or not a Parquet file", ValueError):
        meta = _parquet().read_metadata(path)
    return [(number, meta.row_group(number).num_rows, -1, True, b"") for number in range(meta.num_row_groups)]


@functools.lru_cache(_GROUPS)
def _read_group(path: str, number: int, columns: tuple[str, ...] | None) -> Any:
    """Return a row group as a table of Arrow. Each process keeps the last ones. Raises BadInput."""
    failure = f"cannot read row group {number} of {path}"
    with explained(failure, ValueError), _parquet().ParquetFile(path) as file:
        return file.read_row_group(number, columns)


def _parquet() -> Any:
    return import_optional("pyarrow.parquet", "ParquetRows needs Arrow", "pyarrow")
