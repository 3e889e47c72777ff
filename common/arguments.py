"""Command lines as platforms send them: "true" and "false", arguments that no job defined, folders to be
checked."""

import argparse
import math
import os
import shutil
import tempfile

from common.exits import BadInput

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

BATCH_SIZE_HELP = (
    "samples of one optimizer step over all processes, so a run is the same on any number of nodes; when you "
    "multiply it by k, multiply --lr by k too, up to about 8 (linear scaling, arXiv:1706.02677; default: 128)"
)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line (BadInput) and whose options are never abbreviated."""

    def __init__(self, description: str):
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str):
        raise BadInput(message)


def parse(parser: Parser) -> argparse.Namespace:
    """Parse sys.argv. Arguments that nobody defined are printed and ignored; --output_dir becomes an absolute
    path (default: output_dir/ beside jobs/) that can be written. Only a folder that was given is resumed
    from.

    Raises BadInput; nothing is left on the disk.
    """
    from common.processes import first_on_node  # brings torch, and a second: what needs neither is quicker

    args, ignored = parser.parse_known_args()
    if ignored and first_on_node():
        print(f"ignored arguments: {' '.join(ignored)}", flush=True)
    if getattr(args, "resume", "") is None:
        args.resume = "auto" if args.output_dir else "never"
    args.output_dir = local_output(args.output_dir or os.path.join(_ROOT, "output_dir"))
    return args


def local_output(path: str) -> str:
    """The absolute path of a folder in which files can be made. Raises BadInput. The folder itself is not
    made."""
    if "://" in path:
        raise BadInput(
            f"output_dir {path} is a URL, not a folder: let the platform bring the outputs back "
            "(ModelArts: an output named train_url), and pass the folder"
        )
    path = os.path.abspath(path)
    parent = path
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    probe = None
    try:  # make the missing folders somewhere beside, write a file, and take it all away again
        probe = tempfile.mkdtemp(prefix=".probe-", dir=parent)
        target = os.path.join(probe, os.path.relpath(path, parent))
        os.makedirs(target, exist_ok=True)
        with open(os.path.join(target, "probe"), "wb") as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        raise BadInput(f"output_dir {path} cannot be written: {error.strerror} ({parent})") from error
    finally:
        if probe:
            shutil.rmtree(probe, ignore_errors=True)
    return path


def boolean(text: str) -> bool:
    """ "true" or "false" (also 1/0, yes/no), as a platform's console sends it."""
    value = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(text.lower())
    if value is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return value


def positive_int(text: str) -> int:
    """An integer >= 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def positive_float(text: str) -> float:
    """A finite number > 0."""
    value = _finite(text)
    if value is None or value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def non_negative_float(text: str) -> float:
    """A finite number >= 0."""
    value = _finite(text)
    if value is None or value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def seed(text: str) -> int:
    """An integer in 0..2^63-1 (torch.manual_seed and NumPy take more, but not the same more)."""
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number in 0..2^63-1")
    return int(text)
