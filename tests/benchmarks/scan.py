"""Measure the first start on a folder of images: the scan, and the seconds to the first batch.

    python -m tests.benchmarks.scan                                  the scan and torchvision's ImageFolder
    python -m tests.benchmarks.scan --files 1280000 --rounds 3       the seconds to the first batch, too

The first table has the images/s of image_folder.load() without an index, with --scan whole and headers. Both
list the folder, read, judge and write the index. They are compared with torchvision's ImageFolder plus one
read of each file, in as many threads as the scan has, and one file after the other. Ratios are medians of the
ratios within rounds.

The second table has the seconds from the start of jobs/imagenet.py (--training_only) to the report of its
first step, without an index ("first") and with it ("second"). "no images" is the job with the backend
`synthetic`: the part that is not the data's. Both scans read files up to image_folder.HEAD bytes as a whole.

The contestants run in turns. The files are in the page cache; --cold drops it before each turn (needs root).
"""

import argparse
import io
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from PIL import Image
from torchvision.datasets import ImageFolder

from common.run import starts
from datasets.folders import image_folder
from tests.benchmarks import jobs
from tests.benchmarks.rounds import conditions, divide, make_parser, spread, take_turns

SIZES = {3: 20_000, 110: 1000}  # kilobytes of a file -> files of the first table
POOL = 64  # different images
TIMEOUT = 3600  # seconds of a start
THREADS = 16  # as the scan has for files that it waits for
BLOCK = 4096  # bytes of a disk's block
JOB = (
    "jobs/imagenet.py", "--arch=shufflenet_v2_x0_5", "--image_size=32", "--batch_size=64", "--warmup=0",
    "--max_steps=1", "--training_only", "--report_every=1", "--save_every=1epoch", "--enable_gpu=false",
)  # fmt: skip


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
    """Write train/<class>/* and check the room first: every file has its own inode and blocks."""
    contents = make_images(kilobytes)
    room = os.statvfs(folder)
    need = files * -(-len(contents[0]) // BLOCK + 1) * BLOCK
    if room.f_bavail * room.f_frsize < need or 0 < room.f_favail < files:
        raise SystemExit(f"{folder}: {files} files need {need / 1e9:.1f} GB and {files} inodes")
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


def measure_starts(folder: str, options: argparse.Namespace) -> dict:
    """Return {"first, headers" and so on: [{"seconds", "laps"}, ...]}, an entry for each round."""
    found: dict = {"no images": []}
    for number in range(options.rounds):
        found["no images"].append(start("--data_backend=synthetic"))
        for how in image_folder.SCANS[:: 1 if number % 2 else -1]:
            with tempfile.TemporaryDirectory() as cache:
                for turn in ("first", "second"):
                    drop(options.cold)
                    arguments = (f"--data_url={folder}", f"--cache_dir={cache}", f"--scan={how}")
                    row = start(*arguments, "--data_backend=threads")
                    found.setdefault(f"{turn}, {how}", []).append(row)
        shown = ", ".join(f"{name} {rows[-1]['seconds']:.1f}" for name, rows in found.items())
        print(f"  round {number + 1} of {options.rounds}, seconds: {shown}", flush=True)
    return found


def start(*arguments: str) -> dict:
    """Run the job. Return the seconds to the report of its first step, and the laps that it reports."""
    with tempfile.TemporaryDirectory() as output:
        command = [sys.executable, *JOB, *arguments, f"--output_dir={output}"]
        began = jobs.run(command, lambda: bool(jobs.read_metrics(output)), TIMEOUT)
        first, begun = jobs.read_metrics(output)[0], starts.read(output)[-1]
        return {"seconds": first["time"] - began, "laps": begun["laps"]}


def drop(cold: bool) -> None:
    if cold:
        os.sync()
        with open("/proc/sys/vm/drop_caches", "w") as file:
            file.write("3")


def main():
    parser = make_parser(__doc__, 5)
    parser.add_argument("--files", type=int, help="measure the seconds to the first batch with N files")
    parser.add_argument("--classes", type=int, default=1000, help="of --files (default: %(default)s)")
    parser.add_argument("--kilobytes", type=float, default=2, help="of a file (default: %(default)s)")
    parser.add_argument("--folder", help="for the files, which are deleted (default: the temporary folder)")
    parser.add_argument("--cold", action="store_true", help="drop the page cache before each turn")
    options = parser.parse_args()
    with conditions():
        measure(options)


def measure(options: argparse.Namespace) -> None:
    for kilobytes, files in SIZES.items():
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            write(folder, files, min(files, 100), kilobytes)
            print(f"{files} files of {kilobytes} KB", flush=True)
            print_scans(folder, files, options)
    if options.files:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            write(folder, options.files, min(options.files, options.classes), options.kilobytes)
            print(
                f"{options.files} files of {options.kilobytes:g} KB: seconds to the first batch", flush=True
            )
            for name, rows in measure_starts(folder, options).items():
                lap = spread([row["laps"].get("data loading", 0) for row in rows], ".1f")
                seconds = spread([row["seconds"] for row in rows], ".1f")
                print(f"  {name:<18}{seconds:>24} s, of them for the data {lap} s", flush=True)


if __name__ == "__main__":
    main()
