"""Find where the CPU time of an image of a decoded pack goes, part by part.

    python -m tests.benchmarks.parts [--rounds 5] [--images 2048]

The loader of the row "pack-one" of tests.benchmarks.loaders runs whole epochs: one thread cuts and resizes,
the thread of the training normalises. Three kinds of epochs take turns:

- whole: nothing is measured inside. Its figure is the CPU time of the process by an image.
- in place: each part is measured where it runs, with memory as it finds it.
- again: each part is called a second time at once, with the same arguments, and only this second call counts.
  The difference to "in place" is what fetching the memory costs: of the pack's rows, and of the batch.

"rest" is what is in no part: Python, the hand-over from thread to thread, the receipt.
"""

import contextlib
import functools
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import cv2
import torch

from common.distributed.entry import entry
from tests.benchmarks import loaders, rounds

_SIZE = 116  # kilobytes of the JPEGs that the pack is made of


@entry
def main() -> None:
    parser = rounds.make_parser(__doc__, 5)
    parser.add_argument("--images", type=int, default=loaders.LONG, help="images of an epoch")
    options = parser.parse_args()
    torch.set_num_threads(1)  # so that the thread which is measured normalises
    with rounds.conditions(), tempfile.TemporaryDirectory() as folder:
        loaders.write_images(f"{folder}/images", loaders.SIZES[_SIZE], _SIZE, options.images)
        row = loaders.ROWS["pack-one"](folder, options.images)
        figures: dict[str, dict[str, list[float]]] = {"whole": {}, "in place": {}, "again": {}}
        for number in range(options.rounds + 1):
            for name in list(figures)[:: -1 if number % 2 else 1]:
                parts = measure_epoch(row, name)
                if number:  # the first round warms up
                    for part, value in parts.items():
                        figures[name].setdefault(part, []).append(value)
        print_parts(figures)


def measure_epoch(row: Any, name: str) -> dict[str, float]:
    """Read an epoch, and return CPU microseconds by an image: of the process, and of each part."""
    used: Counter[str] = Counter()
    times = {"whole": 0, "in place": 1, "again": 2}[name]
    count = 0
    begin = time.process_time()
    with _watched(used, times):
        for images in row.batches():
            count += len(images)
    used["whole"] = time.process_time() - begin
    return {part: value / count * 1e6 for part, value in used.items()}


@contextlib.contextmanager
def _watched(used: Counter[str], times: int) -> Iterator[None]:
    """Measure the parts within the block. times: calls of each part, of which the last one counts; 0: none
    is measured."""
    from datasets.folders import resize
    from datasets.loaders.engines.crops import Crops
    from datasets.loaders.image_loader import ToDevice
    from datasets.stores.pack import PackStore

    places: list[tuple[Any, str, str]] = [
        (PackStore, "read", "find and check the stored rows"),
        (Crops, "cut", "cut the box"),
        (cv2, "resize", "resize, bilinear"),
        (resize, "resized", "resize, antialiased"),
        (cv2, "flip", "mirror"),
        (ToDevice, "_on_host", "normalise"),
    ]
    kept = [getattr(owner, attribute) for owner, attribute, _ in places]
    try:
        for (owner, attribute, part), function in zip(places, kept, strict=True):
            if times:
                setattr(owner, attribute, _timed(function, used, part, times))
        yield
    finally:
        for (owner, attribute, _), function in zip(places, kept, strict=True):
            setattr(owner, attribute, function)


def _timed(function: Callable[..., Any], used: Counter[str], part: str, times: int) -> Callable[..., Any]:
    """Return the function with a clock. Only one thread calls each part."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        for _ in range(times - 1):
            function(*arguments, **named)
        begin = time.thread_time()
        result = function(*arguments, **named)
        used[part] += time.thread_time() - begin
        return result

    return call


def print_parts(figures: dict[str, dict[str, list[float]]]) -> None:
    """Print a row for each part: in place, and again."""
    whole = figures["whole"]["whole"]
    placed = figures["in place"]
    parts = [part for part in placed if part != "whole"]
    sums = [sum(values) for values in zip(*(placed[part] for part in parts), strict=True)]
    print("\n| part | CPU us an image | called again |\n|---|---|---|")
    for part in parts:
        again = rounds.spread(figures["again"][part], ".0f")
        print(f"| {part} | {rounds.spread(placed[part], '.0f')} | {again} |")
    rest = [all_of_it - parts_of_it for all_of_it, parts_of_it in zip(whole, sums, strict=True)]
    print(f"| rest | {rounds.spread(rest, '.0f')} | |")
    print(f"| whole | {rounds.spread(whole, '.0f')} | |")


if __name__ == "__main__":
    main()
