"""Measure how fast packs are built, next to FFCV's DatasetWriter and litdata's optimize.

    python -m tests.benchmarks.packing [--images 512] [--rounds 5] [--data_url DIR]
    python -m tests.benchmarks.packing --python ffcv=.venv-ffcv/bin/python --python litdata=...

Every row reads the same JPEGs (those of tests.benchmarks.loaders, 116 KB) with 2 threads or processes on two
cores, and writes images whose shorter side has 256 pixels. "alone" decodes and resizes as the pack does, in
as many threads, and writes nothing. Each row runs in a process of its own. It builds once to warm up, and
then once in each round, in turns. Ratios are those of two rows in one round. The pack is flushed to the disk
(fsync); FFCV and litdata leave that to the kernel.
"""

import argparse
import concurrent.futures
import datetime
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
from PIL import Image

from tests.benchmarks import loaders
from tests.benchmarks.rounds import describe, divide, make_parser, spread

SHORT_SIDE, KILOBYTES = 256, 116


def _index(folder: str):
    from datasets.folders import image_folder

    return image_folder.load(f"{folder}/images", "train", f"{folder}/index")


def alone(folder: str, _: str) -> None:
    """Decode and resize, and write nothing."""
    from datasets.stores import forms, pack
    from datasets.stores.files import FileStore

    index = _index(folder)
    make = functools.partial(
        forms.make, FileStore(index, verified=True), form="decoded", short_side=SHORT_SIDE
    )
    threads = pack.THREADS_PER_CORE * loaders.WORKERS
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(make, range(len(index))):
            pass


def packed(folder: str, to: str, form: str) -> None:
    from datasets.stores import pack

    pack.build(_index(folder), to, form, SHORT_SIDE).close()


def ffcv(folder: str, to: str, mode: str) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter
    from torchvision.datasets import ImageFolder

    images = ImageFolder(f"{folder}/images/train")
    sides = Image.open(images.samples[0][0]).size
    side = round(SHORT_SIDE * max(sides) / min(sides))  # its limit is that of the longer side
    fields = {"image": RGBImageField(write_mode=mode, max_resolution=side), "label": IntField()}
    DatasetWriter(to, fields, num_workers=loaders.WORKERS).from_indexed_dataset(images)


def litdata(folder: str, to: str) -> None:
    for name in ("DATA_OPTIMIZER_CACHE_FOLDER", "DATA_OPTIMIZER_DATA_CACHE_FOLDER"):
        os.environ[name] = f"{to}-cache"
    from litdata import optimize
    from torchvision.datasets import ImageFolder

    samples = ImageFolder(f"{folder}/images/train").samples
    optimize(_resized, inputs=samples, output_dir=to, chunk_bytes="64MB", num_workers=loaders.WORKERS)


def _resized(sample: tuple[str, int]) -> dict:
    path, label = sample
    image = Image.open(path).convert("RGB")
    scale = min(1.0, SHORT_SIDE / min(image.size))
    image = image.resize([round(side * scale) for side in image.size], Image.Resampling.BICUBIC)
    return {"image": np.asarray(image), "label": label}


ROWS = {
    "alone": alone,
    "pack": functools.partial(packed, form="decoded"),
    "pack-jpeg": functools.partial(packed, form="jpeg"),
    "ffcv-raw": functools.partial(ffcv, mode="raw"),
    "ffcv-jpeg": functools.partial(ffcv, mode="jpg"),
    "litdata": litdata,
}
FIGURES = (  # row, reference, target
    ("pack", "alone", 0.85),
    ("pack", "ffcv-raw", 1.5),
    ("pack", "litdata", 1.5),
    ("pack-jpeg", "ffcv-jpeg", 1.5),
)


def work(name: str, folder: str) -> None:
    """Build for each received line, and send the seconds."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    for number, _ in enumerate(sys.stdin):
        place = os.path.join(folder, f"{name}-{number}")
        begin = time.perf_counter()
        ROWS[name](folder, place)
        seconds = time.perf_counter() - begin
        for path in (place, f"{place}.lock", f"{place}-cache"):
            shutil.rmtree(path) if os.path.isdir(path) else os.path.exists(path) and os.remove(path)
        os.sync()  # the next turn does not pay for this one's writing
        print(json.dumps(seconds), file=channel, flush=True)


def main() -> None:
    parser = make_parser(__doc__, 5)
    add = parser.add_argument
    add("--images", type=int, default=512, help="default: %(default)s")
    add("--data_url", metavar="DIR", help="use JPEGs of DIR/train/<class>/ instead")
    add("--only", default=",".join(ROWS), help="default: %(default)s")
    add("--python", action="append", default=[], metavar="NAME=PATH", help="of rows NAME and NAME-*")
    add("--json", metavar="FILE", help="also write all figures to this file")
    add("--row", help=argparse.SUPPRESS)  # this is the process of a row
    add("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        return work(options.row, options.folder)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: loaders.WORKERS])
    load, rows = [os.getloadavg()[0]], options.only.split(",")
    pythons = dict(each.split("=", 1) for each in options.python)
    with tempfile.TemporaryDirectory() as folder:
        root = f"{folder}/images"
        if options.data_url:
            images = loaders.link_images(root, options.data_url, options.images)
        else:
            images = loaders.write_images(root, loaders.SIZES[KILOBYTES], KILOBYTES, options.images)
        print(f"{datetime.date.today()}, {describe()}\n{images}", flush=True)
        found = measure(rows, folder, options.rounds, pythons)
    load.append(os.getloadavg()[0])
    print("\n| row | images/s |\n|---|---|")
    for row, seconds in found.items():
        print(f"| {row} | {options.images / statistics.median(seconds):.0f} |")
    print("\n| ratio in one round | median (range) | n | target |\n|---|---|---|---|")
    for row, reference, target in FIGURES:
        if row in found and reference in found:
            ratio = spread(divide(found[reference], found[row]), ".2f", "x")
            print(f"| {row} / {reference} | {ratio} | {options.rounds} | >= {target}x |")
    print(f"load average {load[0]:.2f} at the beginning, {load[1]:.2f} at the end")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"images": images, "load_average": load, "seconds": found}, file, indent=1)


def measure(rows: list[str], folder: str, rounds: int, pythons: dict[str, str]) -> dict[str, list[float]]:
    """Return row -> seconds of each round. Rows that cannot start are omitted."""
    processes, found = {}, {}
    try:
        for row in rows:
            python = pythons.get(row.partition("-")[0], sys.executable)
            command = [python, "-m", "tests.benchmarks.packing", f"--row={row}", f"--folder={folder}"]
            with open(f"{folder}/{row}.log", "w") as log:
                processes[row] = subprocess.Popen(
                    command, cwd=loaders.ROOT, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                )  # fmt: skip
            if _turn(processes[row]) is None:
                with open(f"{folder}/{row}.log") as log:
                    print(f"{row} is omitted: {log.read().strip().splitlines()[-1:]}", flush=True)
            else:
                found[row] = []
        for number in range(rounds):
            for row in found:
                found[row].append(_turn(processes[row]))
            shown = ", ".join(f"{row} {seconds[-1]:.2f}" for row, seconds in found.items())
            print(f"round {number + 1} of {rounds}, seconds: {shown}", flush=True)
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
    return found


def _turn(process: subprocess.Popen) -> float | None:
    """Return the seconds of one build, or None if the process has ended."""
    try:
        process.stdin.write("\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    line = process.stdout.readline()
    return json.loads(line) if line else None


if __name__ == "__main__":
    main()
