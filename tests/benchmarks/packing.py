"""Measure how fast packs are built, next to FFCV's DatasetWriter.

    python -m tests.benchmarks.packing [--images 512] [--rounds 5] [--data_url DIR]
    python -m tests.benchmarks.packing --python ffcv=.venv-ffcv/bin/python

Every row reads the same JPEGs (those of tests.benchmarks.loaders, 116 KB) with 2 threads or processes on two
cores, and writes images whose shorter side has 256 pixels. "alone" decodes and resizes as the pack does, in
as many threads, and writes nothing. Each row runs in a process of its own. It builds once to warm up, and
then once in each round, in turns. Ratios are those of two rows in one round. The pack is flushed to the disk
(fsync); FFCV leaves that to the kernel.
"""

import concurrent.futures
import functools
import itertools
import json
import os
import shutil
import sys
import tempfile
import time

from common.distributed.entry import entry
from tests.benchmarks import loaders
from tests.benchmarks.rounds import conditions, make_parser

KILOBYTES = 116


def _index(folder: str):
    from datasets.folders import image_folder

    return image_folder.load(f"{folder}/images", "train", f"{folder}/index")


def alone(folder: str, _: str) -> None:
    """Decode and resize, and write nothing."""
    from datasets.stores import forms, pack
    from datasets.stores.files import FileStore

    index = _index(folder)
    make = functools.partial(forms.make, FileStore(index, verified=True), form="decoded")
    threads = pack.THREADS_PER_CORE * loaders.WORKERS
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(make, range(len(index))):
            pass


def packed(folder: str, to: str, form: str) -> None:
    from datasets.stores import pack

    pack.build(_index(folder), to, form).close()


def ffcv(folder: str, to: str, mode: str) -> None:
    loaders.write_beton(f"{folder}/images/train", to, mode, None)


ROWS = {
    "alone": alone,
    "pack": functools.partial(packed, form="decoded"),
    "pack-jpeg": functools.partial(packed, form="jpeg"),
    "ffcv-raw": functools.partial(ffcv, mode="raw"),
    "ffcv-jpeg": functools.partial(ffcv, mode="jpg"),
}
FIGURES = (  # row, reference, target
    ("pack", "alone", 0.85),
    ("pack", "ffcv-raw", 1.5),
    ("pack-jpeg", "ffcv-jpeg", 1.5),
)


def work(name: str, folder: str, images: int) -> None:
    """Build once, and then once for each received line, and send the seconds of each."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    for number, _ in enumerate(itertools.chain([""], sys.stdin)):
        place = os.path.join(folder, f"{name}-{number}")
        begin = time.perf_counter()
        ROWS[name](folder, place)
        seconds = time.perf_counter() - begin
        for path in (place, f"{place}.lock"):
            shutil.rmtree(path) if os.path.isdir(path) else os.path.exists(path) and os.remove(path)
        os.sync()  # the next turn does not pay for this one's writing
        print(
            json.dumps({"delivers": f"{images} images", "seconds": seconds, "images": images}),
            file=channel,
            flush=True,
        )


@entry
def main() -> None:
    options = loaders.parse_rows(make_parser(__doc__, 5), list(ROWS))
    if options.row:
        return work(options.row, options.folder, options.images)
    with conditions(), tempfile.TemporaryDirectory() as folder:
        title = loaders.make_images(f"{folder}/images", KILOBYTES, options)
        rates = loaders.measure("tests.benchmarks.packing", title, options.only, folder, options)
        loaders.print_figures(rates, FIGURES)


if __name__ == "__main__":
    main()
