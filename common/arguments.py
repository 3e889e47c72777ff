"""Command lines as platforms send them: "true" and "false", arguments that no job defined, folders to be
checked."""

import argparse
import math
import os
import re

from common import object_store, output_folder, scratch
from common.exits import BadInput
from common.interval import Interval

_SECRET = re.compile(r"key|secret|token|password|credential", re.IGNORECASE)
_CREDENTIALS = re.compile(r"://[^/@]*@")

BATCH_SIZE_HELP = (
    "samples of one optimizer step over all processes, so a run is the same on any number of nodes; when you "
    "multiply it by k, multiply --lr by k too, up to about 8 (linear scaling, arXiv:1706.02677; default: "
    "%(default)s)"
)

_parsed = argparse.Namespace()  # what parse() returned
_urls: dict[str, str] = {}  # output folder -> the URL that it stands for


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
    path that can be written: for an s3:// or obs:// URL a folder on the node's scratch disk, which
    common/mirror.py brings there; without one a new folder (output_folder.make_default), which is not resumed
    from, and the index is in a folder that all runs share.

    Raises BadInput; nothing is left on the disk.
    """
    from common.processes import first_on_node  # brings torch, and a second: what needs neither is quicker

    args, ignored = parser.parse_known_args()
    if ignored and first_on_node():
        print(f"ignored arguments: {' '.join(ignored)}", flush=True)
    if getattr(args, "resume", "") is None:
        args.resume = "auto" if args.output_dir else "never"
    if getattr(args, "evaluate", False):
        named = args.resume not in ("auto", "never")
        if named == bool(args.weights):
            raise BadInput("--evaluate needs one of --weights FILE and --resume PATH: what to evaluate")
    if getattr(args, "resume", "") == "auto" and not args.output_dir:
        raise BadInput(
            "--resume auto without --output_dir: name the folder of the run to continue, for example "
            f"--output_dir {os.path.join(output_folder.PARENT, output_folder.LATEST)}"
        )
    url = args.output_dir if object_store.is_url(args.output_dir) else None
    if url:
        if not object_store.parse(url).prefix:
            raise BadInput(
                f"{url} is a whole bucket: give every job a folder of its own, {url.rstrip('/')}/NAME"
            )
        args.output_dir, args.output_url = scratch.folder("outputs", url), url
    if args.output_dir:
        args.output_dir = output_folder.local_output(args.output_dir)
    else:
        args.output_dir = output_folder.make_default(args)
        if getattr(args, "cache_dir", "") is None:
            args.cache_dir = os.path.join(output_folder.PARENT, "index")
    if url:
        _urls[args.output_dir] = url
    global _parsed
    _parsed = args
    return args


def settings(args: argparse.Namespace | None = None) -> dict[str, str | int | float | bool | None]:
    """What may be written down of the arguments: plain values, and nothing that looks like a credential.

    args: default: those that parse() returned, with what the job has made of them since.
    """
    plain = (str, int, float, bool, type(None))
    given = {
        name: str(value) if isinstance(value, Interval) else value
        for name, value in vars(args or _parsed).items()
        if not _SECRET.search(name)
    }
    return {
        name: _CREDENTIALS.sub("://", value) if isinstance(value, str) else value
        for name, value in given.items()
        if isinstance(value, plain)
    }


def url_of(output_dir: str) -> str | None:
    """The URL that the output folder of parse() stands for, where it does."""
    return _urls.get(output_dir)


def check_folder(option: str, path: str | None) -> None:
    """Raise BadInput unless the folder is there and can be written, or can be made."""
    if path is None:
        return
    parent = os.path.abspath(path)
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    if "://" in path or not os.path.isdir(parent) or not os.access(parent, os.W_OK | os.X_OK):
        reason = "is a URL" if "://" in path else f"cannot be written: {parent}"
        raise BadInput(f"{option} {path} {reason} (expected a folder of this machine)")


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
