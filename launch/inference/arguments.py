"""The options of `launch predict` and `launch export` that choose a network. This module imports no torch."""

from common.compute.networks import arch, image_size
from common.console.arguments import Parser


def add(parser: Parser) -> None:
    """Add the options of trained.load()."""
    add = parser.add_argument
    add("weights", metavar="WEIGHTS", help="best.pth, epoch_<n>.pth, a checkpoint, or a run's folder")
    add("--arch", type=arch, help="network (default: that of starts.jsonl next to WEIGHTS)")
    add("--image_size", type=image_size, metavar="N", help="pixels (default: that of starts.jsonl)")
    help = "function of your own without arguments; it runs, and returns the network"
    add("--model", metavar="FILE.py:FUNCTION", help=help)
