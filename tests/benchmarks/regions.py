"""Measure whether a part of an ordinary JPEG, without restart markers, is decoded sooner than the whole.

    pip install nvidia-nvimgcodec-cu12
    python -m tests.benchmarks.regions [--images 64] [--rounds 7]

nvImageCodec decodes a region on the CPU with libjpeg-turbo's functions that skip rows and cut columns; DALI
uses it. The whole is decoded by simplejpeg, which `--data_backend threads` uses. Both decode the boxes of
RandomResizedCrop of generated JPEGs of 500x375; boxes with other pixels are counted.
"""

import time

import numpy as np

from bootfile.ground.errors import import_optional
from bootfile.sampling.sampler import BatchSampler
from common.console import arguments
from common.distributed.entry import entry
from datasets.sampling.augment import random_resized_crop
from tests.benchmarks import loaders, rounds

nvimgcodec = import_optional("nvidia.nvimgcodec", "this benchmark needs nvidia-nvimgcodec-cu12")
simplejpeg = import_optional("simplejpeg", "this benchmark needs simplejpeg")

_WIDTH, _HEIGHT = 500, 375


class _Sizes:
    """An index of images of one size, as random_resized_crop() needs it."""

    def __init__(self, count):
        self.widths = np.full(count, _WIDTH)
        self.heights = np.full(count, _HEIGHT)


@entry
def main() -> None:
    parser = rounds.make_parser(__doc__, 7)
    help = "number of images (default: %(default)s)"
    parser.add_argument("--images", type=arguments.positive_int, default=64, help=help)
    parser.add_argument("--json", metavar="FILE", help="also write the figures of each round to this file")
    options = parser.parse_args()
    count = options.images
    pictures = loaders.pictures((_WIDTH, _HEIGHT), count, seed=0)
    contents = [loaders.encode(picture, 90, "4:2:0") for picture in pictures]
    [ids, _] = next(iter(BatchSampler(count, count, 0).draws()))
    crops = random_resized_crop(_Sizes(count), ids, 0, 1)
    boxes = list(zip(crops.top, crops.left, crops.height, crops.width, strict=True))
    decoder = nvimgcodec.Decoder(
        device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
        backends=[nvimgcodec.Backend(nvimgcodec.CPU_ONLY)],
        max_num_cpu_threads=1,
    )
    parameters = nvimgcodec.DecodeParams(allow_any_depth=False, color_spec=nvimgcodec.ColorSpec.SRGB)

    def decode_region(content, box):
        top, left, height, width = map(int, box)
        region = nvimgcodec.Region(top, left, top + height, left + width)
        part = nvimgcodec.CodeStream(content).get_sub_code_stream(region=region)
        return np.asarray(decoder.decode(part, params=parameters))

    def decode_whole(content, box):
        top, left, height, width = box
        return simplejpeg.decode_jpeg(content, "RGB")[top : top + height, left : left + width]

    def measure(decode):
        """Return the microseconds of CPU of an image, of all threads."""
        begin = time.process_time()
        for content, box in zip(contents, boxes, strict=True):
            decode(content, box)
        return (time.process_time() - begin) / count * 1e6

    differing = 0
    for content, box in zip(contents, boxes, strict=True):
        differing += not np.array_equal(decode_region(content, box), decode_whole(content, box))
    share = np.mean([height * width for _, _, height, width in boxes]) / (_WIDTH * _HEIGHT)
    record = rounds.Record()
    with rounds.conditions():
        contestants = {"whole": lambda: measure(decode_whole), "region": lambda: measure(decode_region)}
        figures = rounds.take_turns(contestants, options.rounds)
        rounds.print_ratios("JPEGs of 500x375, 4:2:0", figures, unit="CPU us an image")
        print(f"boxes: {share:.2f} of the area; with other pixels: {differing} of {count}")
    speeds = {name: [1e6 / value for value in values] for name, values in figures.items()}
    record.add("regions", "images/CPU s", speeds)
    record.write(options.json)


if __name__ == "__main__":
    main()
