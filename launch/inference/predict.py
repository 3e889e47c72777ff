"""Predict the classes of the images in a folder.

    python -m launch predict OUT/best.pth FOLDER
    python -m launch predict OUT/best.pth FOLDER --to predictions.csv --batch_size 256
    python -m launch predict OUT/best.pth IMAGE            prints its classes with their probabilities
    python -m launch predict OUT/best.pth FOLDER --model model.py:build        a network of your own

WEIGHTS: a file that a job wrote. The names of the classes (classes.json), the network and the size of the
images (starts.jsonl) are read from the run's folder. FOLDER: images at any depth, or one image. Each is
cropped, resized and normalised as in the evaluation of imagenet.py with its backend `threads`, and in the
same precision. All GPUs of the machine are used. --model: the function build() in model.py returns the
network, which turns float [N, 3, size, size] into logits [N, classes].

The CSV has a line for each image: path (relative to FOLDER), error, class_1, probability_1, ..., the most
probable class first, then number_1, ...: the places of these classes in classes.json, from 0. Join tables by
them: pandas reads classes named NA, null or 007 as missing or as numbers, unless it gets
keep_default_na=False and dtype=str. After --loss bce each class has its own probability. If an image cannot
be read, `error` has the reason, and the classes are empty. The file is written atomically. An earlier CSV is
replaced; any other file only with --force.
"""

from common.compute.networks import arch, image_size
from common.console.arguments import FLAG, Parser, boolean, positive_int


def main(arguments: list[str]) -> int:
    """Write the predictions and return 0. Raises BadInput."""
    parser = Parser(__doc__, "python -m launch predict")
    add_network(parser)
    parser.add_argument("folder", metavar="FOLDER", help="images at any depth, or one image")
    add = parser.add_argument
    add("--to", metavar="FILE", help="default: predictions.csv, or none for one image")
    add("--force", **FLAG, help="replace FILE even if it holds no predictions")
    add("--batch_size", type=positive_int, default=64, help="images at a time on each GPU (default: 64)")
    add("--enable_gpu", type=boolean, help="default: true if there is a GPU")
    args = parser.parse_args(arguments)
    from launch.inference import predictions  # imports torch, which --help does not need

    return predictions.write(args)


def add_network(parser: Parser) -> None:
    """Add the options that choose a network, those of trained.load(): also `launch export` calls it."""
    add = parser.add_argument
    add("weights", metavar="WEIGHTS", help="best.pth, epoch_<n>.pth, a checkpoint, or a run's folder")
    add("--arch", type=arch, help="network (default: that of starts.jsonl next to WEIGHTS)")
    add("--image_size", type=image_size, metavar="N", help="pixels (default: that of starts.jsonl)")
    help = "function of your own without arguments; it runs, and returns the network"
    add("--model", metavar="FILE.py:FUNCTION", help=help)
