"""Measure what decoding by crop saves: packs of JPEGs with restart markers against those decoded as a whole.

    python -m tests.benchmarks.crops                        generated images, 4:2:0 and 4:4:4
    python -m tests.benchmarks.crops --data_url FOLDER      your photographs: FOLDER/<class>/*.jpg

One thread reads the samples of a pack and decodes the boxes of RandomResizedCrop, without a resize. The packs
take turns; a round before the first one warms up. Printed are microseconds of CPU an image, and kilobytes.
"""

import os
import tempfile
import time

import numpy as np

from bootfile.sampling.plan import Plan
from bootfile.sampling.sampler import BatchSampler
from common.console import arguments
from common.distributed.entry import entry
from datasets.folders import image_folder
from datasets.loaders.engines.crops import Crops
from datasets.sampling.augment import random_resized_crop
from datasets.stores import pack
from tests.benchmarks import loaders, rounds

PAIRS = (("jpeg_crop", "jpeg"), ("jpeg_full", "encoded"))  # by crop, as a whole
QUALITY = 90


def write_images(root: str, count: int, subsampling: str) -> str:
    """Write JPEGs of 500x375 pixels to two folders below root/train, and return a description."""
    for place, picture in enumerate(loaders.pictures((500, 375), count, seed=0)):
        folder = os.path.join(root, "train", f"class{place % 2}")
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, f"{place:06}.jpg"), "wb") as file:
            file.write(loaders.encode(picture, QUALITY, subsampling))
    return f"{count} JPEGs of 500x375 pixels, quality {QUALITY}, {subsampling}"


def measure(folder: str, title: str, count: int, turns: int) -> dict[str, list[float]]:
    """Build the packs of the images in folder/images, and print and return the microseconds of each form."""
    index = image_folder.load(os.path.join(folder, "images"), "train", os.path.join(folder, "index"))
    stores = {form: pack.build(index, os.path.join(folder, form), form) for pair in PAIRS for form in pair}
    plan = Plan(index, BatchSampler(count, count, 0), random_resized_crop, loaders.SIDE)
    plan.seek(0)
    batch = next(iter(plan))
    scratch = np.empty(3 * int((index.heights * index.widths).max()), np.uint8)

    def decode(form: str) -> float:
        """Return the microseconds of CPU that an image of this form takes."""
        store = stores[form]
        crops = Crops(store)
        begin = time.thread_time()
        for row in crops.rows(batch):
            [content] = store.read(np.array([row[0]]))
            crops.cut(row, content, scratch)
        return (time.thread_time() - begin) / count * 1e6

    contestants = {form: lambda form=form: decode(form) for form in stores}
    figures = rounds.take_turns(contestants, turns)
    print(f"\n| {title} | KB | CPU us an image | by crop / whole, n={turns} |\n|---|---|---|---|")
    for form, whole in PAIRS:
        for name in (whole, form):
            size = sum(pack.described(stores[name].path)["sizes"]) / count / 1000
            ratio = "1" if name == whole else rounds.spread(rounds.divide(figures[form], figures[whole]))
            print(f"| {name} | {size:.1f} | {rounds.spread(figures[name], '.0f')} | {ratio} |", flush=True)
    return figures


@entry
def main() -> None:
    parser = rounds.make_parser(__doc__, 7)
    add = parser.add_argument
    add("--data_url", metavar="DIR", help="use JPEGs of DIR/train/<class>/ or DIR/<class>/ instead")
    add("--images", type=arguments.positive_int, default=256, help="number of images (default: 256)")
    add("--json", metavar="FILE", help="also write the figures of each round to this file")
    options = parser.parse_args()
    record = rounds.Record()
    with rounds.conditions(), tempfile.TemporaryDirectory() as temporary:
        for subsampling in ("4:2:0",) if options.data_url else ("4:2:0", "4:4:4"):
            folder = os.path.join(temporary, subsampling)
            images = os.path.join(folder, "images")
            if options.data_url:
                title = loaders.link_images(images, options.data_url, options.images)
            else:
                title = write_images(images, options.images, subsampling)
            figures = measure(folder, title, options.images, options.rounds)
            speeds = {name: [1e6 / value for value in values] for name, values in figures.items()}
            record.add(title, "images/CPU s", speeds)
    record.write(options.json)


if __name__ == "__main__":
    main()
