"""Measure the first scan of a folder of images, compared with torchvision's ImageFolder.

    python -m tests.benchmarks.scan

The table has the images/s of image_folder.load() without an index, with --scan whole and headers. Both
list the folder, read, judge and write the index. They are compared with torchvision's ImageFolder plus one
read of each file, in as many threads as the scan has, and one file after the other. Ratios are medians of the
ratios within rounds. Both scans read files up to image_folder.HEAD bytes as a whole.

The contestants run in turns. The files are in the page cache; --cold drops it before each turn (needs root).
"""

import argparse
import io
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from PIL import Image
from torchvision.datasets import ImageFolder

from datasets.folders import image_folder
from tests.benchmarks.rounds import conditions, divide, make_parser, spread, take_turns

SIZES = {3: 20_000, 110: 1000}  # kilobytes of a file -> files of the first table
POOL = 64  # different images
THREADS = 16  # as the scan has for files that it waits for


def make_images(kilobytes: float) -> list[bytes]:
    """Return JPEGs of at least this size, all of one shape."""
    draw, side = np.random.default_rng(0), 16
    while True:
        pixels = draw.integers(0, 256, (POOL, side, side, 3), dtype=np.uint8)
        found = [_encode(each) for each in pixels[:1]]
        if len(found[0]) >= 1000 * kilobytes:
            return found + [_encode(each) for each in pixels[1:]]
        side += max(2, side // 16)


def _encode(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


def write(folder: str, files: int, classes: int, kilobytes: float) -> None:
    """Write train/<class>/*."""
    contents = make_images(kilobytes)
    for number in range(classes):
        name = f"n{number:08}"
        os.makedirs(f"{folder}/train/{name}")
        for each in range(number, files, classes):
            with open(f"{folder}/train/{name}/{name}_{each}.JPEG", "wb", buffering=0) as file:
                file.write(contents[each % POOL])


def scan(folder: str, how: str) -> int:
    with tempfile.TemporaryDirectory() as cache:
        return len(image_folder.load(folder, "train", cache, log=lambda line: None, scan=how))


def read_with_image_folder(folder: str, threads: int) -> int:
    paths = [path for path, _ in ImageFolder(f"{folder}/train").samples]
    if threads == 1:
        return sum(_read(path) > 0 for path in paths)
    with ThreadPoolExecutor(threads) as pool:
        return sum(size > 0 for size in pool.map(_read, paths))


def _read(path: str) -> int:
    with open(path, "rb") as file:
        return len(file.read())


SCANS = {
    "ImageFolder, one by one": lambda folder: read_with_image_folder(folder, 1),
    f"ImageFolder, {THREADS} threads": lambda folder: read_with_image_folder(folder, THREADS),
    "scan whole": lambda folder: scan(folder, "whole"),
    "scan headers": lambda folder: scan(folder, "headers"),
}


def print_scans(folder: str, files: int, options: argparse.Namespace) -> None:
    """Measure the contestants in turns, and print the images/s of each and its ratio to the first."""

    def rate(function: Callable[[str], int]) -> float:
        drop(options.cold)
        begin = time.perf_counter()
        assert function(folder) == files
        return files / (time.perf_counter() - begin)

    rates = take_turns({name: partial(rate, function) for name, function in SCANS.items()}, options.rounds)
    base = next(iter(rates.values()))
    for name, own in rates.items():
        print(f"  {name:<24}{spread(own, '.0f'):>28} images/s  {spread(divide(own, base)):>18} x", flush=True)


def drop(cold: bool) -> None:
    if cold:
        os.sync()
        with open("/proc/sys/vm/drop_caches", "w") as file:
            file.write("3")


def main():
    parser = make_parser(__doc__, 5)
    parser.add_argument("--folder", help="for the files, which are deleted (default: the temporary folder)")
    parser.add_argument("--cold", action="store_true", help="drop the page cache before each turn")
    options = parser.parse_args()
    with conditions():
        for kilobytes, files in SIZES.items():
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                write(folder, files, 100, kilobytes)
                print(f"{files} files of {kilobytes} KB", flush=True)
                print_scans(folder, files, options)


if __name__ == "__main__":
    main()
