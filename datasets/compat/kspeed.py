"""KSpeed's interface with this project's caches: the bytes of image files come from memory.

A script for KSpeed changes only its import:

    from datasets.compat.kspeed import KSpeedImageFolder

    train_set = KSpeedImageFolder(traindir, None, workers, iplist, "admin", "admin", transform)

iplist: the host of a Redis or Valkey server, "host[:port]", as text or as the only item of a list; its URL,
redis:// or rediss://; a folder of packs, "/..."; None or "": the files themselves, which the system keeps in
free memory. All return the same bytes as the files. If a server fails, the files are read.

user and password: of the server. A user in the URL and a password in the environment
(BOOTFILE_CACHE_PASSWORD, BOOTFILE_CACHE_PASSWORD_FILE) have priority. If a server refuses the user, the user
"default" is tried with the same password, so "admin", "admin" also opens a server without users. If only the
script has the password, it is put into the environment of the process for its workers, and the first one
counts. It is never in a pickle or a message.
workers: not used, only accepted for compatibility. To read many files in parallel, request a batch.
"""

import contextlib
import io
import os
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image
from torchvision.datasets import ImageFolder

from bootfile.ground.errors import BadInput
from bootfile.sampling.sampler import WholeBatchSampler
from datasets.files import CACHE_FOLDER
from datasets.folders import image_folder, images
from datasets.folders.listing import SPLITS, find_split
from datasets.stores import connection
from datasets.stores.files import Store
from datasets.stores.tiers import Stores


class KSpeedFolder:
    """The files below a folder, by path: absolute, or as joined to `root`, or relative to it.

    root: of class folders.
    mode: "active": the last process that uses the cache deletes it; "offline": the cache stays.
    cache_dir: for the index. All files are read once for it.
    max_bad_images: share of images that may be damaged; their bytes are read from the folder.
    log: called with one line of text.
    `index`: of the good images.
    Workers may get it by fork or pickle. Raises BadInput as image_folder.load() and Stores do.
    """

    def __init__(
        self,
        root: str,
        workers: int = 0,
        iplist: str | Iterable[str] | None = None,
        user: str | None = None,
        password: str | None = None,
        *,
        mode: str = "active",
        cache_dir: str | None = None,
        max_bad_images: float = 1.0,
        log: Callable[[str], None] = print,
    ):
        self.root = os.path.abspath(root)
        self._root_of_caller = os.path.join(os.fspath(root), "")  # the caller's paths may begin with it
        if not os.path.isdir(self.root):
            raise BadInput(f"{self.root} does not exist or is not a folder")
        inner_split = find_split(self.root, "train") or find_split(self.root, "val")
        if inner_split:  # train and val would be taken for classes
            raise BadInput(f"{self.root} has splits: expected one of them, such as {self.root}/{inner_split}")
        place = iplist if isinstance(iplist, str) else ",".join(map(str, iplist or ()))
        stores = _open_stores(place.strip(), user, password, mode, log)
        self._finalizer: Callable | None = weakref.finalize(self, _close, stores, os.getpid())
        # the split's name in its data set, so that the data set's pack is found
        split = "val" if os.path.basename(self.root).lower() in SPLITS["val"] else "train"

        options: Any = {"val_share": 0, "labelled": False, "log": lambda text: None}
        cache = cache_dir or CACHE_FOLDER
        self.index = image_folder.load(self.root, split, cache, max_bad_images, **options)
        self._store: Store | None = stores.open(self.index)

    def getBIN(self, path: str) -> bytes:
        """Return a file's bytes. Raises OSError if it does not exist."""
        return self.getbatch([path])[0]

    def get(self, path: str) -> np.ndarray:
        """Return a file's bytes, uint8 [n]. Raises OSError."""
        return np.frombuffer(self.getBIN(path), np.uint8)

    def getPIL(self, path: str) -> Image.Image:
        """Return the image in RGB. Raises OSError."""
        return _rgb(io.BytesIO(self.getBIN(path)))

    def getbatch(self, paths: Iterable[str]) -> list[bytes]:
        """Return the bytes of several files, requested together. Raises OSError, and BadInput if a file has
        changed since the start."""
        names = [self._absolute(path) for path in paths]
        found = {name: self.index.find(name) for name in names}
        ids = {name: id for name, id in found.items() if id is not None}
        contents: dict[str, Any] = {}
        if self._store and ids:  # one request for all of them
            contents = dict(zip(ids, self._store.read(np.array([*ids.values()])), strict=True))
        # bad images, and other files than images, are not in the index
        others = [name for name in names if name not in contents]
        contents |= {name: Path(name).read_bytes() for name in others}
        return [contents[name] for name in names]

    def size(self, path: str | None = None) -> int:
        """Return the size in bytes of a file, or of all good images. Raises OSError."""
        if path is None:
            return int(self.index.bytes.sum(dtype=np.int64))
        return os.path.getsize(self._absolute(path))

    def __len__(self) -> int:
        """Return the number of good images."""
        return len(self.index)

    def close(self) -> None:
        """Release the cache. Without this call the end of the process releases it. Files stay readable."""
        self._store = None
        if self._finalizer:
            self._finalizer()

    def __getstate__(self) -> dict:
        return vars(self) | {"_finalizer": None}

    def _absolute(self, path: str) -> str:
        """Return the absolute path of a file that a caller names. Each method that takes paths calls it."""
        path = os.fspath(path)
        if not os.path.isabs(path):  # the working directory may have changed since the start
            path = os.path.join(self.root, path.removeprefix(self._root_of_caller))
        return os.path.normpath(path)


class KSpeedImageFolder(ImageFolder):
    """torchvision's ImageFolder that reads its files from `folder`, a KSpeedFolder.

    loader: None for Pillow's image in RGB, or a function of a file object with the bytes. options: those of
    KSpeedFolder. A DataLoader requests a whole batch at once.
    """

    def __init__(
        self,
        root: str,
        loader: Callable[[BinaryIO], Any] | None = None,
        workers: int = 0,
        iplist: str | Iterable[str] | None = None,
        user: str | None = None,
        password: str | None = None,
        transform: Callable | None = None,
        target_transform: Callable | None = None,
        **options,
    ):
        super().__init__(root, transform, target_transform, loader or _rgb)
        self.folder = KSpeedFolder(root, workers, iplist, user, password, **options)

    def __getitem__(self, index: int) -> tuple:
        """Return (sample, target)."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Iterable[int]) -> list[tuple]:
        """Return (sample, target) of each index."""
        paths, targets = zip(*(self.samples[index] for index in indices), strict=True)
        items = []
        for content, label in zip(self.folder.getbatch(paths), targets, strict=True):
            sample = self.loader(io.BytesIO(content))
            if self.transform:
                sample = self.transform(sample)
            items.append((sample, self.target_transform(label) if self.target_transform else label))
        return items


class KSpeedCallable:
    """A source for DALI of the images of this rank, encoded: (uint8 [n], label int32 [1]).

        fn.external_source(source, num_outputs=2, batch=False, parallel=True)

    The samples are those of a WholeBatchSampler (datasets/sampling) with batches of batch_size * num_shards.
    So each sample comes at most once an epoch, and the global batches follow from the seed. The epoch ends
    after the last full batch of all ranks, because DALI takes no partial batches from such a source. The
    remaining samples, others each epoch, are skipped. Images that are not plain are passed as PNG, which DALI
    decodes to Pillow's pixels.

    root: of class folders.
    shuffle: False: the samples are in order.
    options: those of KSpeedFolder.
    Raises BadInput as image_folder.load() does, and if the pipeline has another batch size.
    """

    def __init__(
        self,
        root: str,
        batch_size: int,
        shard_id: int = 0,
        num_shards: int = 1,
        workers: int = 0,
        iplist: str | Iterable[str] | None = None,
        user: str | None = None,
        password: str | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
        max_bad_images: float = 0.0,
        **options,
    ):
        if batch_size < 1 or num_shards < 1:
            raise BadInput(f"batch_size {batch_size} and num_shards {num_shards} are not both at least 1")
        options["max_bad_images"] = max_bad_images
        self.folder = KSpeedFolder(root, workers, iplist, user, password, **options)
        self.index = self.folder.index
        self.batch_size = batch_size
        together = batch_size * num_shards
        self.sampler = WholeBatchSampler(
            len(self.index), together, seed, rank=shard_id, world_size=num_shards, shuffle=shuffle
        )
        self.full_iters = len(self.index) // together
        self._step = -1  # of _ids
        self._ids = np.zeros(0, np.int64)  # ids of this rank in a step

    def __call__(self, info: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return a sample. info: DALI's SampleInfo. Raises StopIteration at the end of the epoch.

        DALI calls it for each sample, with parallel=True in its worker processes."""
        if not hasattr(info, "idx_in_batch"):
            raise BadInput("a source of KSpeed needs fn.external_source(..., batch=False)")
        if info.iteration >= self.full_iters:
            raise StopIteration
        # the source counts the batches by its own size: with another one it would give wrong samples
        if info.idx_in_epoch - info.iteration * self.batch_size != info.idx_in_batch:
            raise BadInput(f"the pipeline has another batch_size than {self.batch_size}")
        step = info.epoch_idx * len(self.sampler) + info.iteration
        if step != self._step:  # computed once per batch
            self._ids = self.sampler.batch(step)
            self._step = step
        id = self._ids[info.idx_in_batch]
        content = self.folder.getBIN(self.index.path(id))
        if not self.index.plain[id]:
            content = images.normalised(content)
        return np.frombuffer(content, np.uint8), np.array([self.index.labels[id]], np.int32)


def _rgb(file: BinaryIO) -> Image.Image:
    """Return Pillow's image in RGB: the loader of KSpeedImageFolder without another one."""
    return Image.open(file, formats=images.KINDS).convert("RGB")


def _open_stores(
    place: str, user: str | None, password: str | None, mode: str, log: Callable[[str], None]
) -> Stores:
    """Return the stores of encoded samples in a place of KSpeedFolder, which calls it. Raises BadInput."""
    if not place:
        log("KSpeed without iplist: the files are read, and the system keeps them in free memory")
    if not place or place.startswith("/"):
        return Stores(place or None, None, mode, log, "encoded")
    if password and not os.environ.get(connection.PASSWORD_FILE):  # a pickle may be stored on a disk
        os.environ[connection.PASSWORD] = os.environ.get(connection.PASSWORD) or password
    if "://" not in place:
        place = f"redis://{place}"
    try:
        where = connection.parse(place)._replace(form="encoded")
        if where.user or not user:  # a user in the URL comes first
            return Stores(None, where, mode, log)
        with contextlib.suppress(BadInput):
            return Stores(None, where._replace(user=user), mode, log)
        stores = Stores(None, where._replace(user="default"), mode, log)
        log(f"cache {where}: it refuses the user, so the user default is used")
        return stores
    except BadInput as error:
        raise BadInput(str(error).replace("--cache", "iplist")) from None


def _close(stores: Stores, pid: int) -> None:
    """Close the stores, only in the process that opened them. It runs when a KSpeedFolder is closed or
    garbage-collected, and at the exit of a process: a forked worker must not delete the cache."""
    if os.getpid() == pid:
        stores.close()
