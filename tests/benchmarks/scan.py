"""Measure the first scan of a folder of images, compared with torchvision's ImageFolder.

    python -m tests.benchmarks.scan

The table has the images/s of image_folder.load() without an index. It lists the folder, reads and judges the
files, and writes the index. It is compared with torchvision's ImageFolder plus one read of each file, in as
many threads as the scan has, and one file after the other.

The files are in the page cache; --cold drops it before each turn (needs root).
"""

import argparse
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from torchvision.datasets import ImageFolder

from datasets.folders import image_folder
from tests.benchmarks.loaders import write_images
from tests.benchmarks.rounds import conditions, make_parser, print_ratios, take_turns, timed

SIZES = {3: ((88, 66), 20_000), 110: ((500, 375), 1000)}  # kilobytes of a file -> pixels, files
THREADS = 16  # as the scan has for files that it waits for


def scan(folder: str) -> int:
    with tempfile.TemporaryDirectory() as cache:
        return len(image_folder.load(folder, "train", cache, log=lambda line: None))


def read_with_image_folder(folder: str, threads: int) -> int:
    paths = [Path(path) for path, _ in ImageFolder(f"{folder}/train").samples]
    with ThreadPoolExecutor(threads) as pool:
        return sum(len(content) > 0 for content in pool.map(Path.read_bytes, paths))


SCANS = {
    "ImageFolder, one by one": partial(read_with_image_folder, threads=1),
    f"ImageFolder, {THREADS} threads": partial(read_with_image_folder, threads=THREADS),
    "scan": scan,
}


def rate(function, folder: str, files: int, options: argparse.Namespace) -> float:
    if options.cold:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    found = []
    seconds = timed(lambda: found.append(function(folder)))
    assert found == [files]
    return files / seconds


def main():
    parser = make_parser(__doc__, 5)
    parser.add_argument("--folder", help="for the files, which are deleted (default: the temporary folder)")
    parser.add_argument("--cold", action="store_true", help="drop the page cache before each turn")
    options = parser.parse_args()
    with conditions():
        for kilobytes, (pixels, files) in SIZES.items():
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                title = write_images(folder, pixels, kilobytes, files)
                turns = {name: partial(rate, scan, folder, files, options) for name, scan in SCANS.items()}
                print_ratios(title, take_turns(turns, options.rounds))


if __name__ == "__main__":
    main()
