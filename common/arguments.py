"""Command lines as platforms send them: "true" and "false", options that no job defined, folders to be
checked."""

import argparse
import contextlib
import difflib
import math
import os
import re
import sys
from collections.abc import Sequence

from common import output_folder, platforms
from common.exits import BadInput
from common.files import is_url
from common.interval import Interval

_SECRET = re.compile(r"key|secret|token|password|credential", re.IGNORECASE)
_CREDENTIALS = re.compile(r"://[^/@]*@")

BATCH_SIZE_HELP = (
    "samples of one optimizer step over all processes, so a run is the same on any number of nodes; when you "
    "multiply it by k, multiply --lr by k too, up to about 8 (linear scaling, arXiv:1706.02677; default: "
    "%(default)s)"
)

_MOST = 1e9  # of any number: what is larger overflows clocks, counters or floats somewhere
_UNKNOWN = "--?"  # stands for an unknown option while argparse looks at the others
_OTHER_NAMES = {"learning_rate": "lr", "bs": "batch_size", "wd": "weight_decay"}  # too unlike to be compared
NAMELESS = "(a value without an option)"

_parsed = argparse.Namespace()  # what parse() returned
_ignored: list[str] = []  # names of the options that parse() did not know
_urls: dict[str, str] = {}  # output folder -> the URL that it stands for


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line (BadInput) and show no value of an unknown option. Options
    are never abbreviated; - and _ are the same in their names. A path after an option whose value may be left
    out (nargs="?") is not its value."""

    def __init__(self, description: str):
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str):
        raise BadInput(message)

    def parse_args(self, args: Sequence[str] | None = None, namespace=None) -> argparse.Namespace:
        words = list(sys.argv[1:] if args is None else args)
        _, unknown = self._split([*words])
        if not unknown:
            found, unknown = self.parse_known_args(words, namespace)
        if unknown:
            self.error(self._unknown(names(unknown)))
        return found

    def parse_known_args(self, args: Sequence[str] | None = None, namespace=None):
        """(namespace, words that are unknown options, their values, and values that belong to no option)."""
        known, unknown = self._split(list(sys.argv[1:] if args is None else args))
        found, rest = super().parse_known_args(known, namespace)
        return found, unknown + [word for word in rest if word != _UNKNOWN]

    def _split(self, words: list[str]) -> tuple[list[str], list[str]]:
        """(words with options as they are defined, unknown options). The word after an unknown option is its
        value."""
        known, unknown = [], []
        while words:
            word = words.pop(0)
            if word == "--":
                return [*known, word, *words], unknown
            given, equals, value = word.partition("=")
            option = self._spelled(given)
            following = words[0] if words and not _is_option(words[0]) else None
            if not _is_option(word):
                if word[:1] in ("\u2013", "\u2014") and not (known and _is_option(known[-1])):
                    self.error(f"{word[0]} is a dash of a printed text: options begin with two hyphens, --")
                known.append(word)
            elif option is None:
                known.append(_UNKNOWN)
                unknown.append(word)
                if not equals and following is not None:
                    unknown.append(words.pop(0))
            elif self._option_string_actions[option].nargs == "?" and not equals:
                action = self._option_string_actions[option]
                own = following is not None and not _is_path(action, following)
                known.append(f"{option}={words.pop(0) if own else action.const}")
            else:
                known.append(f"{option}{given[len(option) :]}{equals}{value}")
        return known, unknown

    def _spelled(self, given: str) -> str | None:
        """The defined option that is meant, if there is one."""
        if given in self._option_string_actions:
            return given
        if not given.startswith("--"):
            return given[:2] if given[:2] in self._option_string_actions else None
        return self._by_name().get(_plain(given))

    def _by_name(self) -> dict[str, str]:
        options = (option for option in self._option_string_actions if option.startswith("--"))
        return {_plain(option): option for option in options}

    def resembling(self, name: str) -> str | None:
        """The option that an unknown one is close to, if there is one."""
        options, name = self._by_name(), _plain(name).lower()
        longer = [each for each in options if len(name) > 2 and each.startswith(name)]
        close = [_OTHER_NAMES.get(name), *difflib.get_close_matches(name, options, 1, 0.75), *longer]
        return next((options[each] for each in close if each in options), None)

    def _unknown(self, unknown: list[str]) -> str:
        """What an error says of unknown options."""
        said = []
        for name in unknown:
            meant = self.resembling(name)
            said.append(f"{name} (did you mean {meant}?)" if meant else name)
        return f"unknown option{'s' if len(said) > 1 else ''}: {', '.join(said)}"


def names(words: list[str]) -> list[str]:
    """The names of the options among the words, each once. Values may be secrets: NAMELESS stands for one
    that belongs to no option."""
    found = []
    for before, word in zip(["", *words], words, strict=False):
        if _is_option(word):
            found.append(re.match(r"--[\w.-]*|-.", word)[0])
        elif not _is_option(before) or "=" in before:
            found.append(NAMELESS)
    return list(dict.fromkeys(found))


def _is_option(word: str) -> bool:
    return re.match(r"-(?!\.?\d)[^\s=]", word) is not None and " " not in word.partition("=")[0]


def _is_path(action: argparse.Action, word: str) -> bool:
    """Return whether a word is a path and not a value of the option."""
    with contextlib.suppress(argparse.ArgumentTypeError, ValueError):
        action.type(word)
        return False
    return os.path.exists(word) or "/" in word


def _plain(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def parse(parser: Parser) -> argparse.Namespace:
    """Parse sys.argv. Unknown options that may pass are printed by name and ignored; --output_dir becomes an
    absolute path that can be written: for an s3:// or obs:// URL a folder on the node's scratch disk, which
    common/checkpoint/mirror.py brings there; without one a new folder (output_folder.make_default), which
    is not resumed from, and the index is in a folder that all runs share.

    Raises BadInput, also for unknown options that may not pass; nothing is left on the disk.
    """
    from common.distributed.launcher import (
        first_on_node,  # brings torch, and a second: what needs neither is quicker
    )

    parser.add_argument("--ignore_unknown", **FLAG, help="true: ignore unknown options")
    args, unknown = parser.parse_known_args()
    _ignored[:] = _passing(parser, names(unknown), args.__dict__.pop("ignore_unknown"))
    if first_on_node():
        remind(print)
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
    url = args.output_dir if is_url(args.output_dir) else None
    if url:
        from common.object_store.location import parse as parse_url  # only a job with a URL needs it
        from common.object_store.paths import scratch_folder

        if not parse_url(url).prefix:
            raise BadInput(
                f"{url} is a whole bucket: give every job a folder of its own, {url.rstrip('/')}/NAME"
            )
        args.output_dir, args.output_url = scratch_folder("outputs", url), url
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


def _passing(parser: Parser, unknown: list[str], everything: bool) -> list[str]:
    """The unknown options, all of which may pass: on a platform those that it injects and those that resemble
    none of the parser's; elsewhere none; if `everything`, all. Raises BadInput."""
    given = {_plain(name) for name in names(sys.argv[1:])}
    on_platform = platforms.recognised(os.environ) or bool(given & platforms.INJECTED - {"local_rank"})
    refused = [
        name
        for name in unknown
        if _plain(name) not in platforms.INJECTED and (not on_platform or parser.resembling(name))
    ]
    if refused and not everything:
        parser.error(f"{parser._unknown(refused)}; --ignore_unknown true lets them pass")
    return unknown


def ignored() -> list[str]:
    """The names of the options that parse() did not know and let pass."""
    return list(_ignored)


def remind(log) -> None:
    """Log the names of what was ignored, if there are any. log: takes one line."""
    if _ignored:
        log(f"ignored arguments: {' '.join(_ignored)}")


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


# An option that is true when it stands alone: parser.add_argument(name, **FLAG). default: overrides the last.
FLAG = {"type": boolean, "nargs": "?", "const": True, "default": False, "metavar": "true|false"}


def positive_int(text: str) -> int:
    """An integer in 1..1e9."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= _MOST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number of at least 1 and at most {_MOST:g}"
        )
    return value


def positive_float(text: str) -> float:
    """A number > 0, at most 1e9."""
    value = _number(text)
    if not 0 < value <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and at most {_MOST:g}")
    return value


def non_negative_float(text: str) -> float:
    """A number in 0..1e9."""
    value = _number(text)
    if not 0 <= value <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0 and at most {_MOST:g}")
    return value


def _number(text: str) -> float:
    """Return NaN for a value that is not a number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def seed(text: str) -> int:
    """An integer in 0..2^63-1 (torch.manual_seed and NumPy take more, but not the same more)."""
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number in 0..2^63-1")
    return int(text)
