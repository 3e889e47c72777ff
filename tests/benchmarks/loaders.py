"""Measure the images/s of our loaders, torchvision, DALI, FFCV, WebDataset, streaming and LitData.

    python -m tests.benchmarks.loaders                              all rows; about an hour on two cores
    python -m tests.benchmarks.pairs                    only the pairs of equal work, with what each stores
    python -m tests.benchmarks.loaders --images 128 --rounds 1 --only torchvision,threads     a short trial
    python -m tests.benchmarks.loaders --data_url IMAGENET --images 1024   JPEGs of a folder of yours
    python -m tests.benchmarks.loaders --python ffcv=.venv-ffcv/bin/python       rows ffcv-* with that Python

A row whose package is not installed is omitted, and the reason is printed. To install all packages:

    pip install nvidia-dali-cuda120 webdataset mosaicml-streaming litdata
    apt-get install libopencv-dev libturbojpeg0-dev pkg-config g++ && pip install ffcv

If a package needs another version of NumPy, install it in a virtual environment of its own, together with
torch, torchvision, psutil, tqdm and scikit-learn, and name its interpreter with --python.

The work: JPEGs cut from scikit-learn's two photographs, RandomResizedCrop(224), mirrored with a probability
of 1/2, shuffled, in batches of 64 on the CPU, by two threads or worker processes on two cores. float32
batches are normalised and have the shape [n, 3, 224, 224]; some rows deliver them as channels_last. Before
the first round each row converts the same images to its own file format. All files are in the page cache.

The method: each row runs in a process of its own. It first reads one epoch, and the batches are checked.
Then the rounds begin; the first one warms up, and is dropped. In each round the rows take turns. A turn is
as many whole epochs as take at least a second, and then a pause until the threads of the row are idle.
Batches that a row prepared during the turns of others are dropped before its clock starts. A ratio compares
two rows in the same round. The output has the median and the range of the ratios over the rounds: of
images/s, and of images a second of CPU time, of all processes and threads of the row. If other programs
run, only the second one means something; targets are compared with it.

Notes on the rows:

- "threads" and "pack" are Bootfile's.
- "pack-jpeg" is Bootfile's: JPEGs of quality 90 whose shorter side has 256 pixels. Their size is printed.
  "pack-crop" decodes such JPEGs only where the crop is, "pack-full" those in the size of the files.
- FFCV encodes its JPEGs again, so they have fewer bytes than the files that other rows read (their size is
  printed). It always resizes by averaging over areas. Its rows named "short" store the pixels of our decoded
  pack, raw or as JPEGs of quality 90; "ffcv-jpeg" stores JPEGs in the size of the files.
- "decoding" reads and decodes the files, and does nothing else: no loader that decodes whole images can be
  faster.
- "decoding-short" decodes the JPEGs of "pack-jpeg" in memory, whole, and does nothing else.
- "work" also crops, resizes and normalises each image, as our rows do, without a loader.
- "threads-tar", "tar-shards" and "webdataset" read the same JPEGs in four tar files. WebDataset shuffles the
  tars, and then the samples in a buffer; the other two draw from all images. "streaming" and "litdata" read
  them in their own files.
- DALI's own reader returns its buffers without a copy.
- In all rows, threads of OpenMP that wait sleep soon (GOMP_SPINCOUNT=1000), as in Bootfile's jobs.
- In an epoch of fewer than 2,048 images, the start of an epoch has more weight than with ImageNet. Such
  figures are a trial: with 512 images FFCV's raw images were measured at 0.7 of their speed with 2,048.
"""

import argparse
import concurrent.futures
import contextlib
import glob
import importlib.metadata
import io
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from functools import partial

import numpy as np
import psutil
import torch
from PIL import Image
from tqdm import tqdm

from bootfile.ground.errors import BadInput
from common.distributed.entry import entry
from tests.benchmarks import rounds

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SIZES = {44: (400, 325), 116: (500, 375)}  # about the kilobytes of a JPEG -> its width and height
TOLERANCE = 0.05  # of those kilobytes
CLASSES = 10
SIDE, BATCH, WORKERS = 224, 64, 2
LONG = 2048  # images of an epoch in which its start has little weight
TASK = 4  # images that a thread of "decoding" and "work" takes
SECONDS = 1.0  # least length of a turn
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels / 255
THREADS = {"OMP_NUM_THREADS": str(WORKERS), "GOMP_SPINCOUNT": "1000"}  # the environment of all rows
VERSIONS = (
    "torch", "numpy", "torchvision", "pillow", "simplejpeg", "opencv-python-headless", "pyarrow",
    "nvidia-dali-cuda120", "ffcv", "numba", "webdataset", "mosaicml-streaming", "litdata",
)  # fmt: skip


# The images


def pictures(size: tuple[int, int], count: int, seed: int):
    """Yield `count` pictures of this size. Each is a random box of one of two photographs; its sides have 0.7
    to 1 of the length of the largest box of that shape."""
    from sklearn.datasets import load_sample_images

    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    random = np.random.default_rng(seed)
    for place in range(count):
        photograph = photographs[place % len(photographs)]
        scale = random.uniform(0.7, 1) * min(photograph.width / size[0], photograph.height / size[1])
        width, height = scale * size[0], scale * size[1]
        left, top = random.uniform(0, photograph.width - width), random.uniform(0, photograph.height - height)
        box = left, top, left + width, top + height
        yield photograph.resize(size, Image.Resampling.BICUBIC, box=box)


def encode(picture: Image.Image, quality: int, subsampling: str) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=quality, subsampling=subsampling)
    return buffer.getvalue()


def setting(sample: list[Image.Image], kilobytes: float) -> tuple[int, str]:
    """Return (quality, subsampling) with which these pictures have `kilobytes` on average as JPEGs."""
    for subsampling in ("4:2:0", "4:4:4"):
        means, low, high = {}, 50, 99
        while low <= high:  # more quality, more bytes
            quality = (low + high) // 2
            means[quality] = sum(len(encode(picture, quality, subsampling)) for picture in sample)
            means[quality] /= 1000 * len(sample)
            low, high = (quality + 1, high) if means[quality] < kilobytes else (low, quality - 1)
        best = min(means, key=lambda quality: abs(means[quality] - kilobytes))
        if abs(means[best] / kilobytes - 1) < TOLERANCE:
            return best, subsampling
    raise ValueError(f"no quality gives {kilobytes} KB: {means}")


def write_images(root: str, size: tuple[int, int], kilobytes: float, count: int) -> str:
    """Write `count` JPEGs to 10 folders in train/, and an eighth of that to val/. Return a description."""
    quality, subsampling = setting(list(pictures(size, min(count, 128), seed=0)), kilobytes)
    sizes = []
    for seed, (split, number) in enumerate((("train", count), ("val", max(CLASSES, count // 8)))):
        for place, picture in enumerate(pictures(size, number, seed)):
            folder = os.path.join(root, split, f"class{place % CLASSES}")
            os.makedirs(folder, exist_ok=True)
            with open(os.path.join(folder, f"{place:06}.jpg"), "wb") as file:
                sizes.append(file.write(encode(picture, quality, subsampling)))
    mean = statistics.mean(sizes[:count]) / 1000
    if abs(mean / kilobytes - 1) > TOLERANCE:
        raise ValueError(f"the images have {mean:.1f} KB on average, expected {kilobytes}")
    return f"{count} images of {size[0]}x{size[1]} pixels and {mean:.1f} KB, quality {quality}, {subsampling}"


def link_images(root: str, source: str, count: int) -> str:
    """Link JPEGs of own_images() into the same folders below `root`, and return a description. If there are
    fewer than `count`, each is linked several times."""
    jpegs = own_images(source)
    paths = list(itertools.islice(itertools.cycle(jpegs), count))
    for number, path in enumerate(paths):
        folder = os.path.join(root, "train", path.parent.name)
        os.makedirs(folder, exist_ok=True)
        os.symlink(path.resolve(), os.path.join(folder, f"{number // len(jpegs)}-{path.name}"))
    several = f", {len(jpegs)} of them different" if len(jpegs) < count else ""
    return f"{count} images of {source}{several}, {mean_kilobytes(paths):.1f} KB"


def own_images(source: str) -> list[pathlib.Path]:
    """Return the JPEGs of a folder of classes, those of the classes in turns. Raises BadInput."""
    root = pathlib.Path(source, "train")
    if not root.is_dir():
        root = pathlib.Path(source)
    if not root.is_dir():
        raise BadInput(f"--data_url {source}: no such folder")
    classes = [sorted(folder.iterdir()) for folder in sorted(root.iterdir()) if folder.is_dir()]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*classes))
    paths = [path for path in turns if path and path.suffix.lower() in (".jpg", ".jpeg")]
    if len({path.parent for path in paths}) < 2:
        raise BadInput(f"--data_url {source}: expected JPEGs in at least two folders of {root}/<class>/")
    return paths


def write_short(folder: str) -> None:
    """Write the pixels of our decoded pack, short side 256, as a folder of images: folder/short/train."""
    from datasets.folders import image_folder
    from datasets.stores import forms
    from datasets.stores.files import FileStore

    index = image_folder.load(os.path.join(folder, "images"), "train", os.path.join(folder, "index"))
    files = FileStore(index)
    for id in range(len(index)):
        pixels = forms.make(files, id, "decoded").value("decoded")
        path = pathlib.Path(folder, "short", "train", index.classes[int(index.labels[id])], f"{id:06}.ppm")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)


def mean_kilobytes(paths: list[pathlib.Path]) -> float:
    return statistics.mean(path.stat().st_size for path in paths) / 1000


# The rows. batches() runs an epoch and yields tensors of images


class Row:
    kernel = "bilinear, antialiased"

    def __init__(self, folder: str, count: int):
        self.folder, self.count = folder, count  # images that an epoch delivers
        self.images = os.path.join(folder, "images", "train")
        self.reads = None  # bytes of an image, if the row does not read the JPEG files
        self.stores = "files"

    def drop_ahead(self) -> None:
        """Drop the batches that were prepared before the turn began."""

    def labelled(self) -> list[tuple[str, int]]:
        """Return (path, label) of every image, in random order."""
        from torchvision.datasets import ImageFolder

        samples = ImageFolder(self.images).samples
        return [samples[place] for place in np.random.default_rng(0).permutation(len(samples))]


def transforms(side: int = SIDE):
    """Return the transforms of a DataLoader's worker."""
    from torchvision import transforms

    return transforms.Compose(
        [
            transforms.RandomResizedCrop(side, antialias=True),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )


def data_loader(dataset, batch: int = BATCH, **options):
    """Return PyTorch's loader. options: further ones of a DataLoader."""
    options = {"num_workers": WORKERS, "persistent_workers": True} | options
    return torch.utils.data.DataLoader(dataset, batch, shuffle=True, drop_last=True, **options)


class Torchvision(Row):
    """PyTorch's ImageNet example: Pillow, and torchvision's transforms in worker processes."""

    def __init__(self, *data):
        from torchvision.datasets import ImageFolder

        super().__init__(*data)
        self.loader = data_loader(ImageFolder(self.images, transforms()))

    def batches(self):
        for images, _ in self.loader:
            yield images


def write_tars(folder: str) -> str:
    """Write the images of a row into tar files of WebDataset's layout, once, and return their pattern."""
    from tests.support import tars

    shards = pathlib.Path(folder, "shards")
    if not shards.is_dir():
        tars.from_folder(pathlib.Path(folder, "images"), shards, 4, with_cls=True)
    return str(shards / "images-train-*.tar")


def decode_sample(sample: dict) -> tuple[torch.Tensor, int]:
    """Return (image, label) of a sample of a tar. Its image is a .jpg, .jpeg or .JPEG (ImageNet's)."""
    (kind,) = (kind for kind in sample if kind.lower() in ("jpg", "jpeg"))
    return decode_image(sample[kind]), int(sample["cls"])


def decode_image(content: bytes) -> torch.Tensor:
    return transforms()(Image.open(io.BytesIO(content)).convert("RGB"))


class Tars(Row):
    """Bootfile's TarShards, with Pillow and torchvision's transforms in worker processes."""

    def __init__(self, *data):
        from bootfile.loaders.map_style import map_style_loader
        from bootfile.sampling.sampler import BatchSampler
        from datasets.shards import TarShards

        super().__init__(*data)
        shards = TarShards(write_tars(self.folder), transform=decode_sample)
        sampler = BatchSampler(len(shards), BATCH, 0)
        self.loader = map_style_loader(shards, sampler, torch.device("cpu"), workers=WORKERS)
        self.epoch = 0

    def batches(self):
        self.loader.seek(self.epoch * len(self.loader))
        self.epoch += 1
        for images, _ in self.loader:
            yield images


class WebDataset(Row):
    """WebDataset: each worker reads its tars in order, and shuffles in a buffer of 1,000 samples."""

    def __init__(self, *data):
        import webdataset

        super().__init__(*data)
        stream = webdataset.WebDataset(glob.glob(write_tars(self.folder)), shardshuffle=4)
        stream = stream.shuffle(1000).map(decode_sample).batched(BATCH, partial=False)
        self.loader = torch.utils.data.DataLoader(
            stream, batch_size=None, num_workers=WORKERS, persistent_workers=True
        )

    def batches(self):
        for images, _ in self.loader:
            yield torch.as_tensor(images)


def labelled_files(images: str):
    """Yield {"image": content, "label": class} of every JPEG of a folder."""
    from torchvision.datasets import ImageFolder

    for path, label in ImageFolder(images).samples:
        yield {"image": pathlib.Path(path).read_bytes(), "label": label}


class Streaming(Row):
    """MosaicML's streaming: its own files of JPEGs, which are on this disk, and torchvision's transforms."""

    def __init__(self, *data):
        import streaming

        class Images(streaming.StreamingDataset):
            def __getitem__(self, place):
                sample = super().__getitem__(place)
                return decode_image(sample["image"]), sample["label"]

        super().__init__(*data)
        path = os.path.join(self.folder, "streaming")
        columns = {"image": "bytes", "label": "int"}
        if not os.path.isdir(path):
            with streaming.MDSWriter(columns=columns, out=path) as writer:
                for sample in labelled_files(self.images):
                    writer.write(sample)
        images = Images(local=path, shuffle=True, batch_size=BATCH, num_canonical_nodes=1)
        self.loader = torch.utils.data.DataLoader(
            images, BATCH, num_workers=WORKERS, persistent_workers=True, drop_last=True
        )

    def batches(self):
        for images, _ in self.loader:
            yield images


def decode_item(item: dict) -> tuple[torch.Tensor, int]:
    return decode_image(item["image"]), item["label"]


class LitData(Row):
    """LitData: its own chunks of JPEGs, which are on this disk, and torchvision's transforms."""

    def __init__(self, *data):
        import litdata

        super().__init__(*data)
        path = os.path.join(self.folder, "litdata")
        if not os.path.isdir(path):
            cache = litdata.streaming.Cache(path, chunk_bytes="64MB")
            for place, sample in enumerate(labelled_files(self.images)):
                cache[place] = sample
            cache.done()
            cache.merge()
        images = litdata.StreamingDataset(path, shuffle=True, drop_last=True, transform=decode_item)
        self.loader = litdata.StreamingDataLoader(
            images, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True, drop_last=True
        )

    def batches(self):
        for images, _ in self.loader:
            yield images


class Ours(Row):
    """A loader of Bootfile. form: that of a pack; None: the files are read. tars: tar files of them are read.
    uint8: deliver the batches of the engine, which are not normalised."""

    def __init__(
        self,
        *data,
        backend: str,
        form: str | None = None,
        uint8: bool = False,
        workers: int = WORKERS,
        tars: bool = False,
    ):
        from bootfile.sampling.plan import Plan
        from bootfile.sampling.sampler import BatchSampler
        from datasets.folders import image_folder
        from datasets.loaders import backends
        from datasets.sampling.augment import random_resized_crop
        from datasets.stores import pack
        from datasets.stores.files import FileStore

        super().__init__(*data)
        cache = os.path.join(self.folder, "index")
        source = write_tars(self.folder) if tars else os.path.join(self.folder, "images")
        index = image_folder.load(source, "train", cache)
        path = os.path.join(self.folder, f"{form}.pack")
        store = pack.build(index, path, form) if form else FileStore(index)
        if form:
            self.reads = sum(pack.described(store.path)["sizes"]) / len(index)
            self.stores = "short side 256" if pack.described(store.path)["short_side"] else "as the files"
        self.kernel = "bilinear, antialiased above a reduction of 1.08"
        plan = Plan(index, BatchSampler(len(index), BATCH, 0), random_resized_crop, SIDE)
        self.loader = backends.build(backend, store, plan, torch.device("cpu"), workers)
        self.epoch, self.uint8 = 0, uint8

    def batches(self):
        self.loader.seek(self.epoch * len(self.loader))
        self.epoch += 1
        if self.uint8:
            for _, images in self.loader.engine.run(self.loader.plan):
                yield images.permute(0, 3, 1, 2)  # a view: channels_last
        else:
            for images, _ in self.loader:
                yield images


class Decoding(Row):
    """Reading and decoding alone, in as many threads: the upper limit of a loader that reads the files."""

    def __init__(self, *data):
        super().__init__(*data)
        self.paths = [path for path, _ in self.labelled()]
        self.pool, self.own = concurrent.futures.ThreadPoolExecutor(WORKERS), threading.local()

    def batches(self):
        firsts = range(0, len(self.paths), TASK)
        for first, image in zip(firsts, self.pool.map(self.decode, firsts), strict=True):
            if (first + TASK) % BATCH == 0:
                yield self.batch(image)

    def batch(self, image: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(image[:SIDE, :SIDE].copy()).expand(BATCH, SIDE, SIDE, 3)

    def decode(self, first: int) -> np.ndarray:
        import simplejpeg

        if not hasattr(self.own, "memory"):
            torch.set_num_threads(1)
            self.own.memory = np.empty(3 * 2**24, np.uint8)
        contents = []
        for path in self.paths[first : first + TASK]:
            with open(path, "rb", buffering=0) as file:
                contents.append(file.read())
        for place, content in enumerate(contents, first):
            image = simplejpeg.decode_jpeg(content, "RGB", buffer=self.own.memory)
            self.use(place % BATCH, image)
        return image

    def use(self, place: int, image: np.ndarray) -> None:
        """Do the rest of the work with an image. place: in its batch."""


class DecodingShort(Row):
    """simplejpeg alone, in as many threads: it decodes the JPEGs of "pack-jpeg", which are in memory."""

    kernel = "none"

    def __init__(self, *data):
        from datasets.folders import image_folder
        from datasets.stores import pack

        super().__init__(*data)
        images, cache = os.path.join(self.folder, "images"), os.path.join(self.folder, "index")
        index = image_folder.load(images, "train", cache)
        store = pack.build(index, os.path.join(self.folder, "jpeg.pack"), "jpeg")
        self.reads = sum(pack.described(store.path)["sizes"]) / len(index)
        self.contents = list(map(bytes, store.read(np.arange(len(index)))))
        self.stores = "short side 256"
        self.pool, self.own = concurrent.futures.ThreadPoolExecutor(WORKERS), threading.local()

    def batches(self):
        firsts = range(0, len(self.contents), TASK)
        for first, image in zip(firsts, self.pool.map(self.decode, firsts), strict=True):
            if (first + TASK) % BATCH == 0:
                yield torch.from_numpy(image[:SIDE, :SIDE].copy()).expand(BATCH, SIDE, SIDE, 3)

    def decode(self, first: int) -> np.ndarray:
        import simplejpeg

        if not hasattr(self.own, "memory"):
            self.own.memory = np.empty(3 * 2**20, np.uint8)
        for content in self.contents[first : first + TASK]:
            image = simplejpeg.decode_jpeg(content, "RGB", buffer=self.own.memory)
        return image


class Work(Decoding):
    """Reading, decoding, cropping, resizing and normalising, in as many threads: what a loader has to do."""

    def __init__(self, *data):
        super().__init__(*data)
        self.results = torch.from_numpy(np.empty((BATCH, SIDE, SIDE * 3), np.float32))
        self.mean, self.scale = (
            255 * torch.tensor(MEAN).repeat(SIDE),
            1 / (255 * torch.tensor(STD).repeat(SIDE)),
        )
        self.random = np.random.default_rng(0)

    def use(self, place: int, image: np.ndarray) -> None:
        from datasets.folders.resize import fit

        rows, columns, _ = image.shape
        area, shape = rows * columns * self.random.uniform(0.08, 1), self.random.uniform(0.75, 1.33)
        height = min(rows, round((area / shape) ** 0.5))
        width = min(columns, round((area * shape) ** 0.5))
        top, left = self.random.integers(rows - height + 1), self.random.integers(columns - width + 1)
        pixels = np.empty((SIDE, SIDE, 3), np.uint8)
        fit(image[top : top + height, left : left + width], self.random.integers(2), pixels)
        numbers = torch.from_numpy(pixels).view(SIDE, -1).float().sub_(self.mean)
        torch.mul(numbers, self.scale, out=self.results[place])  # the batch may be read meanwhile

    def batch(self, image: np.ndarray) -> torch.Tensor:
        return self.results.view(BATCH, SIDE, SIDE, 3).permute(0, 3, 1, 2)


class DaliReader(Row):
    """DALI with its own file reader, order and boxes."""

    AHEAD = 2

    def __init__(self, *data):
        from nvidia.dali import Pipeline, fn, types

        super().__init__(*data)
        self.pipeline = Pipeline(BATCH, WORKERS, device_id=None, seed=0, prefetch_queue_depth=self.AHEAD)
        with self.pipeline:
            contents, _ = fn.readers.file(file_root=self.images, random_shuffle=True)
            images = fn.decoders.image_random_crop(contents, output_type=types.RGB)
            images = fn.resize(images, size=[SIDE, SIDE], interp_type=types.INTERP_LINEAR, antialias=True)
            images = fn.crop_mirror_normalize(
                images, mirror=fn.random.coin_flip(), dtype=types.FLOAT, output_layout="CHW",
                mean=[255 * value for value in MEAN], std=[255 * value for value in STD],
            )  # fmt: skip
            self.pipeline.set_outputs(images)
        self.pipeline.build()

    def batches(self, count: int | None = None):
        for _ in range(count or self.count // BATCH):
            (images,) = self.pipeline.run()
            yield torch.from_dlpack(images.as_tensor())

    def drop_ahead(self) -> None:
        for _ in self.batches(self.AHEAD):
            pass


def write_beton(images: str, path: str, mode: str) -> None:
    """Write FFCV's file of a folder of images. mode: "jpg" (encoded again with quality 90) or "raw"."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter
    from torchvision.datasets import ImageFolder

    field = RGBImageField(write_mode=mode, max_resolution=None, jpeg_quality=90)
    fields = {"image": field, "label": IntField()}
    DatasetWriter(path, fields, num_workers=WORKERS).from_indexed_dataset(ImageFolder(images))


class FFCV(Row):
    """FFCV with its own file. On the CPU its NormalizeImage must come before ToTensor; the result is the
    same. is_short: the file has the pixels of write_short(), not those of the images."""

    kernel = "INTER_AREA"

    def __init__(self, *data, mode: str, is_short: bool, uint8: bool = False):
        from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
        from ffcv.loader import Loader, OrderOption
        from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, ToTensor, ToTorchImage

        super().__init__(*data)
        source = self.images
        self.stores = "as the files"
        if is_short:
            source = os.path.join(self.folder, "short", "train")
            self.stores = "short side 256"
        path = os.path.join(self.folder, f"{mode}-{self.stores.replace(' ', '-')}.beton")
        if not os.path.exists(path):
            write_beton(source, f"{path}.partial", mode)
            os.rename(f"{path}.partial", path)
        mean, std = 255 * np.array(MEAN), 255 * np.array(STD)
        steps = [RandomResizedCropRGBImageDecoder((SIDE, SIDE)), RandomHorizontalFlip()]
        steps += [] if uint8 else [NormalizeImage(mean, std, np.float32)]
        steps += [ToTensor(), ToTorchImage()]
        self.loader = Loader(
            path, batch_size=BATCH, num_workers=WORKERS, os_cache=True, order=OrderOption.RANDOM, seed=0,
            pipelines={"image": steps},
        )  # fmt: skip
        self.reads = float(self.loader.reader.alloc_table["size"].mean())

    def batches(self):
        for images, _ in self.loader:
            yield images


ROWS = {
    "torchvision": Torchvision,
    "dali-reader": DaliReader,
    "decoding": Decoding,
    "decoding-short": DecodingShort,
    "work": Work,
    "threads": partial(Ours, backend="threads"),
    "threads-tar": partial(Ours, backend="threads", tars=True),
    "tar-shards": Tars,
    "webdataset": WebDataset,
    "streaming": Streaming,
    "litdata": LitData,
    "pack-jpeg": partial(Ours, backend="threads", form="jpeg"),
    "pack-crop": partial(Ours, backend="threads", form="jpeg_crop"),
    "pack-full": partial(Ours, backend="threads", form="jpeg_full"),
    "pack": partial(Ours, backend="threads", form="decoded"),
    "pack-uint8": partial(Ours, backend="threads", form="decoded", uint8=True),
    "pack-one": partial(Ours, backend="threads", form="decoded", workers=1),
    "pack-uint8-one": partial(Ours, backend="threads", form="decoded", uint8=True, workers=1),
    "dali": partial(Ours, backend="dali"),
    "pytorch": partial(Ours, backend="pytorch"),
    "ffcv-jpeg": partial(FFCV, mode="jpg", is_short=False),
    "ffcv-jpeg-short": partial(FFCV, mode="jpg", is_short=True),
    "ffcv-raw-short": partial(FFCV, mode="raw", is_short=True),
    "ffcv-raw-short-uint8": partial(FFCV, mode="raw", is_short=True, uint8=True),
}
FIGURES = (  # row, reference, target or None
    ("threads", "torchvision", 2.4),
    ("threads", "decoding", None),
    ("threads", "work", 0.95),
    ("threads", "dali-reader", None),
    ("pack-uint8", "dali-reader", None),
    ("threads", "ffcv-jpeg", None),
    ("pack-jpeg", "threads", 2.3),
    ("pack-crop", "pack-jpeg", None),
    ("pack-full", "threads", None),
    ("pack-full", "torchvision", 3.0),
    ("pack-full", "ffcv-jpeg", None),
    ("pack-jpeg", "ffcv-jpeg-short", None),
    ("pack-crop", "ffcv-jpeg-short", 2.0),
    ("pack-uint8", "ffcv-raw-short-uint8", 3.0),
    ("decoding-short", "ffcv-jpeg-short", None),
    ("pack", "ffcv-raw-short", None),
    ("pack-uint8", "pack-uint8-one", 1.7),
    ("pack", "pack-one", 1.7),
    ("dali", "dali-reader", 1.0),
)


# In the process of a row


def work(name: str, folder: str, count: int) -> None:
    """Make a row, send a description of its batches, then measure a turn for each received line."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log

    def send(answer: dict) -> None:
        print(json.dumps(answer), file=channel, flush=True)

    try:
        row = ROWS[name](folder, count)
        kinds = [describe_batch(images) for images in row.batches()]
        delivered = sum(number for number, _ in kinds)
        if delivered != row.count:
            raise ValueError(f"an epoch has {delivered} images, expected {row.count}")
    except Exception as error:
        traceback.print_exc()
        send({"skipped": f"{type(error).__name__}: {error}"})
        return
    reads = f", {row.reads / 1000:.1f} KB an image" if row.reads else ""
    side = {"stores": f"{row.stores}{reads}", "output": kinds[0][1], "kernel": row.kernel}
    send({"delivers": f"{kinds[0][1]}{reads}; {row.kernel}; {versions()}", "side": side, "bytes": row.reads})
    for _ in sys.stdin:
        row.drop_ahead()
        images, seconds, begin = 0, 0.0, time.perf_counter()
        while seconds < SECONDS:
            for batch in row.batches():
                images += len(batch)
            seconds = time.perf_counter() - begin
        send({"seconds": seconds, "images": images})


def describe_batch(images: torch.Tensor) -> tuple[int, str]:
    """Return (images, "float32 NCHW") of a batch. Raises ValueError if type, shape or pixels are wrong."""
    shape, values = tuple(images.shape[1:]), images.float()
    mean, std = float(values.mean()), float(values.std())
    if images.dtype == torch.float32:
        good = shape == (3, SIDE, SIDE) and abs(mean) < 1.5 and 0.3 < std < 3
    else:
        good = images.dtype == torch.uint8 and shape in {(3, SIDE, SIDE), (SIDE, SIDE, 3)}
        good = good and 30 < mean < 225 and std > 20
    if not good:
        raise ValueError(f"it delivers {images.dtype} {list(images.shape)}, mean {mean:.2f}, std {std:.2f}")
    layout = "NHWC" if shape[-1] == 3 else "NCHW" + ", channels_last" * (not images.is_contiguous())
    return len(images), f"{str(images.dtype).removeprefix('torch.')} {layout}"


def versions() -> str:
    found = []
    for package in VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(found)


# In the process that the user starts


class Process:
    """The process of a row. `answer`: its description, or {"skipped": reason}."""

    def __init__(self, name: str, folder: str, options: argparse.Namespace):
        self.name, self.log = name, os.path.join(folder, f"{name}.log")
        temporary = os.path.join(folder, "tmp")
        os.makedirs(temporary, exist_ok=True)
        command = [options.python.get(name, sys.executable), "-m", "tests.benchmarks.loaders"]
        command += [f"--row={name}", f"--folder={folder}", f"--images={options.images}"]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env=os.environ | {"TMPDIR": temporary} | THREADS,
            )  # fmt: skip
        try:
            self.answer = self._receive()
        except ChildProcessError as error:
            self.answer = {"skipped": str(error)}
        except BaseException:
            self.close()
            raise

    def measure(self) -> tuple[float, float]:
        """Return the images/s and the images a CPU second of one turn, and wait until the row is idle."""
        start = self._cpu_seconds()
        with contextlib.suppress(BrokenPipeError):  # _receive() knows why
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        answer = self._receive()
        before = None
        while before is None or self._cpu_seconds() - before > 0.02:
            before = self._cpu_seconds()
            time.sleep(0.1)
        return answer["images"] / answer["seconds"], answer["images"] / (before - start)

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            for process in self._tree():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait()
        self.process.stdout.close()

    def _receive(self) -> dict:
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        with open(self.log) as file:
            last = [text.strip() for text in file if text.strip()][-1:]
        raise ChildProcessError(f"{self.name} ended with {self.process.wait()}: {' '.join(last)}")

    def _tree(self) -> list[psutil.Process]:
        process = psutil.Process(self.process.pid)
        return [*process.children(recursive=True), process]

    def _cpu_seconds(self) -> float:
        total = 0.0
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += sum(process.cpu_times()[:2])
        return total


def measure(
    title: str, folder: str, options: argparse.Namespace, sides: dict[str, dict] | None = None
) -> list[dict[str, list[float]]]:
    """Start the rows, let them take turns, and print their images/s and images a CPU second.

    Return these two: row -> figure of each round. Rows that cannot start are left out. sides: it gets the
    answer of the process of each row.
    """
    processes, rates, cpu_rates = [], {}, {}
    try:
        names = [name for name in ROWS if name in options.only]
        if any(name.startswith("ffcv-") and "-short" in name for name in names):
            write_short(folder)
        bar = tqdm(names, desc=f"{title}: preparing", unit="row", leave=False)
        for name in bar:
            bar.set_postfix_str(name)
            processes.append(Process(name, folder, options))
            if sides is not None:
                sides[name] = processes[-1].answer
        for process in processes:
            if "skipped" in process.answer:
                print(f"{process.name} is omitted: {process.answer['skipped']}", flush=True)
            else:
                print(f"{process.name} delivers {process.answer['delivers']}", flush=True)
                rates[process.name], cpu_rates[process.name] = [], []
        for number in range(options.rounds + 1):
            for process in processes:
                if process.name in rates:
                    both = process.measure()
                    if number:  # the first round warms up
                        rates[process.name].append(both[0])
                        cpu_rates[process.name].append(both[1])
    except ChildProcessError as error:
        sys.exit(str(error))
    finally:
        for process in processes:
            process.close()
    for figures, unit in ((rates, "images/s"), (cpu_rates, "images/CPU s")) if rates else ():
        rounds.print_ratios(title, figures, unit=unit)
    return [rates, cpu_rates]


def print_figures(rates: dict[str, list[float]], cpu_rates: dict[str, list[float]]) -> None:
    """Print the ratios of two rows in one round, their targets, and whether the CPU time meets them."""
    print("\n| ratio in one round | by time | by CPU time | target | |\n|---|---|---|---|---|")
    for row, reference, target in FIGURES:
        if {row, reference} <= rates.keys():
            both = [rounds.divide(each[row], each[reference]) for each in (rates, cpu_rates)]
            spreads = " | ".join(rounds.spread(values, ".2f", "x") for values in both)
            met = "met" if target and statistics.median(both[1]) >= target else "missed" if target else ""
            print(f"| {row} / {reference} | {spreads} | {target or '-'} | {met} |")


def parse_args(description: str | None = __doc__, known: tuple[str, ...] = ()) -> argparse.Namespace:
    """Parse the options, and let all rows use the same cores. known: rows of the program (default: all)."""
    parser = rounds.make_parser(description, 5)
    known = known or tuple(ROWS)
    add = parser.add_argument
    add("--sizes", default="44,116", help="kilobytes of an image (default: %(default)s)")
    add("--data_url", metavar="DIR", help="use JPEGs of DIR/train/<class>/ or DIR/<class>/ instead")
    add("--json", metavar="FILE", help="also write the figures of each round to this file")
    add("--images", type=int, default=LONG, help="number of images (default: %(default)s)")
    add("--only", metavar="NAME,NAME", help=f"rows (default: all): {', '.join(known)}")
    add("--python", action="append", default=[], metavar="NAME=PATH", help="of rows NAME and NAME-*")
    add("--row", help=argparse.SUPPRESS)  # this is the process of a row
    add("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.only = options.only.split(",") if options.only else known
    if unknown := set(options.only) - set(known):
        parser.error(f"--only {', '.join(unknown)}: expected some of {', '.join(known)}")
    options.python = parse_pythons(parser, options.python)
    options.sizes = [int(size) for size in options.sizes.split(",")]
    if options.data_url:
        options.sizes = [round(mean_kilobytes(own_images(options.data_url)))]
    elif unknown := set(options.sizes) - set(SIZES):
        parser.error(f"--sizes {unknown}: expected some of {list(SIZES)}")
    if options.images % (BATCH * WORKERS):
        parser.error(f"--images {options.images} is not divisible by {BATCH * WORKERS}")
    if not options.row and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:WORKERS])
    return options


def parse_pythons(parser: argparse.ArgumentParser, given: list[str]) -> dict[str, str]:
    """Return row -> interpreter. given: texts NAME=PATH, each for the rows NAME and NAME-*."""
    pythons = {}
    for argument in given:
        prefix, _, path = argument.partition("=")
        names = [name for name in ROWS if name == prefix or name.startswith(f"{prefix}-")]
        if not names or not os.access(path, os.X_OK):
            parser.error(f"--python {argument}: no row {prefix} or no interpreter {path}")
        pythons |= dict.fromkeys(names, os.path.abspath(path))
    return pythons


@entry
def main():
    options = parse_args()
    if options.row:
        return work(options.row, options.folder, options.images)
    record = rounds.Record()
    with rounds.conditions(), tempfile.TemporaryDirectory() as temporary:
        for title, folder in make_images(temporary, options):
            rates, cpu_rates = measure(title, folder, options)
            print_figures(rates, cpu_rates)
            record.add(title, "images/CPU s", cpu_rates)
    record.write(options.json)


def make_images(temporary: str, options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield (title, folder) of each size of images, made when asked for, or links to the user's own."""
    if options.images < LONG:
        print(f"epochs of {options.images} images are short: a trial, no figures to publish", flush=True)
    for kilobytes in options.sizes:
        folder = f"{temporary}/{kilobytes}"
        if options.data_url:
            yield link_images(f"{folder}/images", options.data_url, options.images), folder
        else:
            yield write_images(f"{folder}/images", SIZES[kilobytes], kilobytes, options.images), folder


if __name__ == "__main__":
    main()
