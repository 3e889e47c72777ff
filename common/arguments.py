"""Command lines as platforms send them: "true" and "false", options that no job defined, intervals."""

import argparse
import contextlib
import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

from common import platforms
from common.exits import BadInput, import_optional, print_line, printable
from common.files import ROOT
from common.output import open_output

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


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows what an option expects (`true|false`, `N`, `FOLDER`) if it has no metavar of its own."""

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        if action.dest in ("data_url", "output_dir"):
            return "FOLDER|URL"
        return _METAVARS.get(action.type, super()._get_default_metavar_for_optional(action))


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line (BadInput) and show no value of an unknown option. Options
    are never abbreviated; - and _ are the same in their names. A path after an option whose value may be left
    out (nargs="?") is not its value."""

    def __init__(self, description: str | None):
        super().__init__(
            description=description,
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise BadInput(message)

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        _, unknown = self._split([*words])
        if not unknown:
            found, unknown = self.parse_known_args(words, namespace)
        if unknown:
            self.error(self._unknown(names(unknown)))
        return found

    def parse_known_args(
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Return the namespace, and the unknown words: options, their values, values without an option."""
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
            name = re.match(r"--[\w.-]*|-.", word)
            assert name is not None  # _is_option() has found a hyphen and another character
            found.append(name[0])
        elif not _is_option(before) or "=" in before:
            found.append(NAMELESS)
    return list(dict.fromkeys(found))


def _is_option(word: str) -> bool:
    return re.match(r"-(?!\.?\d)[^\s=]", word) is not None and " " not in word.partition("=")[0]


def _is_path(action: argparse.Action, word: str) -> bool:
    """Return whether a word is a path and not a value of the option."""
    assert callable(action.type)  # an option whose value may be left out has a type
    with contextlib.suppress(argparse.ArgumentTypeError, ValueError):
        action.type(word)
        return False
    return os.path.exists(word) or "/" in word


def _plain(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


class JobParser(Parser):
    """The Parser of a job. Options that a platform adds are ignored, with one printed line.

    checks: functions that take the parsed arguments, and raise BadInput or complete them before the output
    is opened.
    """

    def __init__(self, description: str | None):
        super().__init__(description)
        self.checks: list[Callable[[argparse.Namespace], object]] = []

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Parse the command line and open the output.

        Returns the arguments with `output` (an Output), `ignored` (names of options that were let pass), and
        output_dir as an absolute path that can be written. Raises BadInput, also for unknown options that may
        not pass; nothing is left on the disk then.
        """
        help = "options as NAME = VALUE; those of the command line come first"
        self.add_argument("--config", metavar="FILE.toml", default=argparse.SUPPRESS, help=help)
        self.add_argument("--ignore_unknown", **FLAG, help="true: ignore unknown options")
        if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions: print them and exit
            import_optional("argcomplete", "completion in a shell needs argcomplete").autocomplete(self)
        words = list(sys.argv[1:] if args is None else args)
        found, unknown = self.parse_known_args(words, namespace)
        if "config" in found:
            words = self._read_config(found.config) + words
            found, unknown = self.parse_known_args(words, namespace)
        found.ignored = self._let_pass(names(unknown), found.__dict__.pop("ignore_unknown"))
        if platforms.is_first_on_node():
            remind(found, print)
            print_line(printable(f"settings {self._changed(found)}"))
        for check in self.checks:
            check(found)
        found.output = open_output(found)
        return found

    def _read_config(self, path: str) -> list[str]:
        """Return the settings of a TOML file as words of a command line. Raises BadInput, also for a key that
        is not an option."""
        from common.command_line import config

        if not os.path.exists(path) and os.path.exists(os.path.join(ROOT, path)):
            path = os.path.join(ROOT, path)  # a platform may start the job in another folder than the code's
        options = {name: self._option_string_actions[option] for name, option in self._by_name().items()}
        try:
            words = config.to_words(config.read_toml(path), options)
            _, unknown = self.parse_known_args(words)
            if unknown:
                self.error(self._unknown(names(unknown)))
        except BadInput as error:
            raise BadInput(f"--config {path}: {error}") from error.__cause__
        return words

    def _changed(self, found: argparse.Namespace) -> str:
        """Return the settings that differ from their defaults, as name=value, without credentials."""
        given = settings(found).items()
        words = [f"{name}={value}" for name, value in given if str(value) != str(self.get_default(name))]
        return " ".join(words) or "defaults"

    def _let_pass(self, unknown: list[str], everything: bool) -> list[str]:
        """Return the unknown options, all of which may pass: on a platform those that it injects and those
        that resemble none of the parser's; elsewhere none; if `everything`, all. Raises BadInput."""
        given = {_plain(name) for name in names(sys.argv[1:])}
        on_platform = platforms.recognised(os.environ) or bool(given & platforms.INJECTED - {"local_rank"})
        refused = [
            name
            for name in unknown
            if _plain(name) not in platforms.INJECTED and (not on_platform or self.resembling(name))
        ]
        if refused and not everything:
            self.error(f"{self._unknown(refused)}; --ignore_unknown true lets them pass")
        return unknown


def remind(args: argparse.Namespace, log: Callable[[str], object]) -> None:
    """Log the names of the options that were ignored, if there are any. log: takes one line."""
    if args.ignored:
        log(f"ignored arguments: {' '.join(args.ignored)}")


def settings(args: argparse.Namespace) -> dict[str, str | int | float | bool | None]:
    """Return what may be written down of the arguments: plain values, and nothing that looks like a
    credential."""
    plain = (str, int, float, bool, type(None))
    given = {
        name: str(value) if isinstance(value, Interval) else value
        for name, value in vars(args).items()
        if not _SECRET.search(name)
    }
    return {
        name: _CREDENTIALS.sub("://", value) if isinstance(value, str) else value
        for name, value in given.items()
        if isinstance(value, plain)
    }


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


# An option that is true when it stands alone: parser.add_argument(name, **FLAG).
FLAG: dict[str, Any] = {
    "type": boolean,
    "nargs": "?",
    "const": True,
    "default": False,
}


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


class Interval(NamedTuple):
    """How often to save: `number` of "step", "s" (seconds) or "epoch"."""

    number: float
    unit: str

    def steps(self, steps_per_epoch: int) -> int:
        """Return how many steps it is; 0 if it counts seconds."""
        return {"step": int(self.number), "epoch": int(self.number * steps_per_epoch), "s": 0}[self.unit]

    def __str__(self) -> str:
        return f"{self.number:g}{self.unit}"


def interval(text: str) -> Interval:
    """ "200" (steps), "90s" or "1epoch"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|epochs?|steps?)?", text)
    count = float(found[1]) if found else 0
    unit = (found[2] or "step").removesuffix("s") or "s" if found else ""
    if not 0 < count <= _MOST or (unit != "s" and count % 1):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of steps (200), seconds (90s) or epochs (1epoch), at most {_MOST:g}"
        )
    return Interval(count, unit)


_METAVARS: dict[Any, str] = {
    boolean: "true|false",
    int: "N",
    positive_int: "N",
    seed: "N",
    float: "NUMBER",
    positive_float: "NUMBER",
    non_negative_float: "NUMBER",
    interval: "N|Ns|Nepochs",
}
