"""Measure the images/s of every loader here, and predict the share of its time that a job would wait.

    python -m launch bench loaders --data_url DIR [--pack FOLDER]

DIR: as for jobs/imagenet.py. Backends take turns of a few seconds: warm (files in the page cache) and cold
(files dropped from it before). synthetic reads no files: it is the upper limit, and has no cold rate. The
wait is predicted for a model (--arch), whose speed is also measured here. On a GPU loading and computing
overlap; on the CPU they share the cores. Compare figures of one run only. A run takes minutes: --rounds times
--seconds for each backend, the starts of their workers, and a few steps of the model. Exit codes: 0 done, 2
bad input.
"""

from common.compute.networks import arch
from common.console.arguments import Parser, boolean, positive_float, positive_int
from datasets.folders import listing


def main(arguments: list[str]) -> int:
    """Measure, print a table and the choice, and return 0. Raises BadInput."""
    parser = Parser(__doc__, "python -m launch bench")
    add = parser.add_argument
    count = positive_int
    add("benchmark", choices=["loaders"], help="what is measured")
    add("--cache_dir", default="output_dir/index", help="for indexes (default: %(default)s)")
    add("--data_url", required=True, metavar="DIR", help="folder with train/<class>/*")
    add("--splits", type=listing.two_names, metavar="TRAIN,VAL", help="those of the job")
    add("--pack", metavar="FOLDER", help="also measure decoded images, kept in this folder")
    add("--max_bad_images", type=listing.fraction, default=0.0, help="default: 0")
    add("--image_size", type=count, default=224, help="default: 224")
    add("--batch_size", type=count, default=64, help="default: 64")
    add("--workers", type=count, help="default: cores")
    add("--seconds", type=positive_float, default=2.0, help="seconds for each (default: 2)")
    add("--rounds", type=count, default=5, help="default: 5")
    add("--arch", type=arch, default="resnet50", help="default: resnet50")
    add("--enable_gpu", type=boolean, help="default: true if there is a GPU")
    args = parser.parse_args(arguments)
    from launch import loader_rates  # imports torch, which --help does not need

    return loader_rates.compare(args)
