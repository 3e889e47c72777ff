"""Measure what a start costs with many images, in CPU seconds, as ratios to torchvision's ImageFolder.

python -m tests.benchmarks.index [--files 1281000] [--classes 1000] [--rounds 3] [--in FOLDER]

The files are hard links of small JPEGs, made once in a temporary folder below FOLDER and deleted at the end.
Each figure is the CPU time of one call in a new process, with its threads and without the imports:

- ImageFolder: torchvision.datasets.ImageFolder
- warm, first process: image_folder.load() with the index of an earlier start
- warm, other process: image_folder.open_index(), as the other processes of a node do
- all compared: load() after a read has found a changed file; it writes the index again
- cold: load() without an index
- reading alone: of each file what cold reads and checks (CRC-32, completeness)
- cold less reading: their difference in each round
"""

import gc
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable

from PIL import Image
from torchvision.datasets import ImageFolder

from datasets.folders import image_folder
from tests.benchmarks import rounds

LINKS = 60_000  # links to one file: ext4 allows 65,000


def main() -> None:
    parser = rounds.make_parser(__doc__, 3)
    parser.add_argument("--files", type=int, default=1_281_000, help="default: %(default)s")
    parser.add_argument("--classes", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--in", dest="parent", metavar="FOLDER", help="default: the temporary folder")
    options = parser.parse_args()
    with rounds.conditions(), tempfile.TemporaryDirectory(dir=options.parent) as folder:
        root, cache = os.path.join(folder, "data"), os.path.join(folder, "index")
        make(root, options.files, options.classes)
        measure(root, cache, options.rounds)


def make(root: str, files: int, classes: int) -> None:
    """Make root/train/<class>/<name>.JPEG with names as long as those of ImageNet."""
    os.makedirs(root)
    for number in range(files):
        if number % LINKS == 0:
            source = os.path.join(root, f".{number}.jpg")
            Image.effect_noise((48, 48), 50 + number / files).convert("RGB").save(source, quality=75)
        name = f"n{number % classes:08}"
        folder = os.path.join(root, "train", name)
        if number < classes:
            os.makedirs(folder)
        os.link(source, f"{folder}/{name}_{number // classes}.JPEG")


def measure(root: str, cache: str, count: int) -> None:
    def load() -> image_folder.ImageFolderIndex:
        return image_folder.load(root, "train", cache, log=lambda line: None)

    memory = usage(load)[1]
    index = load()
    size = sum(entry.stat().st_size for entry in os.scandir(index.folder))
    paths = [index.path(id) for id in range(len(index))]

    def compare_all() -> None:
        index.report_change()
        load()

    def start_cold() -> None:
        shutil.rmtree(index.folder)
        load()

    def read_all() -> None:
        for path in paths:
            image_folder._inspect(path, None)

    contestants = {
        "ImageFolder": lambda: cpu_seconds(lambda: ImageFolder(os.path.join(root, "train"))),
        "warm, first process": lambda: cpu_seconds(load),
        "warm, other process": lambda: cpu_seconds(
            lambda: image_folder.open_index(index.folder, index.fingerprint)
        ),
        "all compared": lambda: cpu_seconds(compare_all),
        "cold": lambda: cpu_seconds(start_cold),
        "reading alone": lambda: cpu_seconds(read_all),
    }
    figures = rounds.take_turns(contestants, count)
    pairs = zip(figures["cold"], figures["reading alone"], strict=True)
    figures["cold less reading"] = [cold - reading for cold, reading in pairs]
    rounds.print_ratios(f"{len(index)} files", figures, ".2f", "CPU s")
    print(f"memory {memory / 1e9:.2f} GB; index on disk: {size / 1e6:.0f} MB")


def cpu_seconds(function: Callable[[], object]) -> float:
    """Return the CPU seconds of a call in a forked process."""
    return usage(function)[0]


def usage(function: Callable[[], object]) -> tuple[float, float]:
    """Return the CPU seconds of a call in a forked process, and by how many bytes its largest memory grew."""
    read, write = os.pipe()
    gc.freeze()  # a new process has none of these objects: no collection in the fork looks at them
    if not (child := os.fork()):
        most, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        function()
        used = time.process_time() - begin
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most
        os.write(write, f"{used!r} {grown * 1024}".encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        seconds, memory = map(float, pipe.read().split())
    os.waitpid(child, 0)
    return seconds, memory


if __name__ == "__main__":
    main()
