"""Compare containers for packs of decoded images: random reads from a plain file, Arrow and LMDB.

    python -m tests.benchmarks.containers [--megabytes 200] [--rounds 7]

The same images, uint8 of 320x256 pixels, in three containers that are in the page cache:

- plain: one mapped file with the images one after another, and an array of offsets. This is the lower limit.
- Arrow: datasets/stores/pack.py, through PackStore.
- Arrow, checked: the same, with the CRC-32 of the content on every read. That is slow, so a process checks
  each sample once. 2026-11-21, 2 cores with other load, n=5, 406 images: 93 us instead of 21 us for a copied
  image, 243 us instead of 186 us for an image that is cropped to 224 pixels.
- LMDB: read-only, without locks, values not copied, one transaction for a whole round.

One thread reads in random order, in two ways: it copies each image, or crops and resizes it to 224 pixels as
a loader does. In a round each container reads all images in the same order, repeatedly for at least 0.3 s.
The table has the medians over the rounds of its time, and of the ratio to the plain file.
"""

import argparse
import datetime
import os
import statistics
import tempfile
import time
import zlib

import numpy as np
import torch

from datasets.folders import image_folder
from datasets.folders.resize import fit
from datasets.sampling.augment import random_resized_crop
from datasets.stores import pack
from tests.benchmarks.loaders import write_images
from tests.benchmarks.machine import describe

WIDTH, HEIGHT, SIDE = 320, 256, 224
SECONDS = 0.3  # minimum of a turn


class Plain:
    def __init__(self, path: str, store: pack.PackStore):
        self.heights, self.widths = np.array(store.index.heights), np.array(store.index.widths)
        self.offsets = np.concatenate([[0], np.cumsum(3 * self.heights.astype(np.int64) * self.widths)])
        with open(path, "wb") as file:
            for id in range(len(store.index)):
                file.write(store.image(id))
        self.content = np.asarray(np.memmap(path, np.uint8, "r"))

    def image(self, id: int) -> np.ndarray:
        pixels = self.content[self.offsets[id] : self.offsets[id + 1]]
        return pixels.reshape(self.heights[id], self.widths[id], 3)


class Checked:
    def __init__(self, store: pack.PackStore):
        self.store = store

    def image(self, id: int) -> np.ndarray:
        image = self.store.image(id)
        zlib.crc32(image)
        return image


class LMDB:
    def __init__(self, path: str, store: pack.PackStore):
        import lmdb

        self.heights, self.widths = np.array(store.index.heights), np.array(store.index.widths)
        size = 2 * int(self.heights.astype(np.int64) @ self.widths) * 3 + 2**24  # at most
        with lmdb.open(path, map_size=size) as environment, environment.begin(write=True) as transaction:
            for id in range(len(store.index)):
                transaction.put(id.to_bytes(8, "big"), store.image(id).tobytes())
        self.environment = lmdb.open(path, readonly=True, lock=False, readahead=False)
        self.transaction = self.environment.begin(buffers=True)

    def image(self, id: int) -> np.ndarray:
        pixels = np.frombuffer(self.transaction.get(id.to_bytes(8, "big")), np.uint8)
        return pixels.reshape(self.heights[id], self.widths[id], 3)


def copy(container, ids: list[int], boxes: list[tuple]) -> None:
    out = np.empty((HEIGHT, WIDTH, 3), np.uint8)
    for id in ids:
        np.copyto(out, container.image(id))


def crop(container, ids: list[int], boxes: list[tuple]) -> None:
    out = np.empty((SIDE, SIDE, 3), np.uint8)
    for id, (top, left, height, width, flip) in zip(ids, boxes, strict=True):
        fit(container.image(id)[top : top + height, left : left + width], flip, out)


def seconds_an_image(way, container, ids: list[int], boxes: list[tuple]) -> float:
    passes, seconds, begin = 0, 0.0, time.perf_counter()
    while seconds < SECONDS:
        way(container, ids, boxes)
        passes += 1
        seconds = time.perf_counter() - begin
    return seconds / passes / len(ids)


WAYS = {"copied": copy, f"cut to {SIDE}": crop}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=200, help="of each container (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    options = parser.parse_args()
    count = max(1, options.megabytes * 10**6 // (3 * WIDTH * HEIGHT))
    print(f"{datetime.date.today()}, {describe()}")
    torch.set_num_threads(1)  # for fit(), too
    times = {}
    with tempfile.TemporaryDirectory() as folder:
        write_images(f"{folder}/images", (WIDTH, HEIGHT), 30, count)
        index = image_folder.load(f"{folder}/images", "train", f"{folder}/index")
        store = pack.build(index, f"{folder}/pack")
        containers = {
            "plain": Plain(f"{folder}/plain", store),
            "Arrow": store,
            "Arrow, checked": Checked(store),
        }
        try:
            containers["LMDB"] = LMDB(f"{folder}/lmdb", store)
        except ImportError:
            print("LMDB is skipped: pip install lmdb")
        for container in containers.values():  # into the page cache
            assert all(np.array_equal(container.image(id), store.image(id)) for id in range(count))
        for number in range(options.rounds):
            ids = np.random.default_rng(number).permutation(count)
            crops = random_resized_crop(index, ids, 0, number)
            boxes = [tuple(map(int, box)) for box in zip(*crops, strict=True)]
            for text, way in WAYS.items():
                for name, container in containers.items():
                    found = seconds_an_image(way, container, ids.tolist(), boxes)
                    times.setdefault((text, name), []).append(found)
            print(f"round {number + 1} of {options.rounds}", flush=True)
    print(f"\n{count} images of {WIDTH}x{HEIGHT} pixels, n={options.rounds}\n")
    print("| read and | container | us per image | ratio to the plain file (range) |\n|---|---|---|---|")
    for (way, name), seconds in times.items():
        ratios = [own / plain for own, plain in zip(seconds, times[way, "plain"], strict=True)]
        text = f"{statistics.median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})"
        print(f"| {way} | {name} | {1e6 * statistics.median(seconds):.1f} | {text} |")
    print(f"\nload average at the end {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
