"""Parse the command lines of jobs as platforms send them: "true" and "false", extra options, intervals."""

import argparse
import contextlib
import difflib
import functools
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from bootfile.ground.errors import BadInput, import_optional
from bootfile.ground.intervals import Interval
from bootfile.ground.numbers import parse_number
from common.ground.files import is_url
from common.ground.secrets import hide, is_secret, mask

BATCH_SIZE_HELP = "samples of a step over all processes; scale --lr with it (default: %(default)s)"

TIMM = "timm:"  # the name of a network of timm begins with this
_LARGEST = 8192  # pixels of a side
_MOST = 1e9  # the largest number of an option: larger ones overflow clocks, counters or floats
_UNKNOWN = "--?"  # replaces an unknown option while argparse parses the others
REMOVED = {  # former options
    "stage": "removed: data at a URL are always copied to the node",
    "scan": "removed: every file is read once, and the index is kept in --cache_dir",
    "rank_level": "removed: --rank counts nodes; to start each process yourself, use torchrun",
    "bn_weight_decay": "removed: norms and biases do not decay; change optimizers.build() in a copy",
    "sample_weights": "removed: use --class_weights FILE",
}
_OTHER_NAMES = {"learning_rate": "lr", "bs": "batch_size", "wd": "weight_decay"}  # difflib misses these
NAMELESS = "(a value without an option)"
_WORD = re.compile("[a-z]{1,5}")  # a value as --key=loss: other lines may hold the word


# Roles of options. Of others another value may change the training: its schedule must permit it.
IDENTITY = "identity"  # another value is another run, whose checkpoints are refused
OPERATION = "operation"  # it may change at a restart


class Arguments(argparse.Namespace):
    """The options of a job, and nothing else. They are read only once the parser has returned them."""

    __slots__ = ("ignored", "roles")  # not in vars()

    def finish(self, roles: Mapping[str, str], ignored: Sequence[str] = ()) -> "Arguments":
        """Set the role of each option, and the names of options that the job does not know. From now on the
        options are read only."""
        self.ignored, self.roles = ignored, roles
        return self

    def replaced(self, values: Mapping[str, Any]) -> "Arguments":
        """Return the options with other values."""
        return Arguments(**{**vars(self), **values}).finish(self.roles, self.ignored)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, "roles"):
            raise AttributeError(f"args.{name} = {value!r}: the options are read only; use a variable")
        super().__setattr__(name, value)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the expected value of an option (`true|false`, `N`, `FOLDER`) if it has no metavar of its own."""

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        if action.dest in ("data_url", "output_dir"):
            return "FOLDER|URL"
        return _METAVARS.get(action.type, super()._get_default_metavar_for_optional(action))


class _Group(argparse._ArgumentGroup):
    """A group of options that have the same role, unless an option names its own."""

    def __init__(self, parser: "Parser", *arguments: Any, role: str = "", **options: Any):
        super().__init__(parser, *arguments, **options)
        self._roles, self._role = parser.roles, role

    def add_argument(self, *names: str, role: str | None = None, **options: Any) -> argparse.Action:  # type: ignore[override]
        action = super().add_argument(*names, **options)
        self._roles[action.dest] = self._role if role is None else role
        return action


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line (BadInput) and show no value of an unknown option.

    Options cannot be abbreviated; - and _ are the same in their names. A path may begin with ~, the home
    folder. If the value of an option is optional (nargs="?") and has a type, a path after the option is not
    taken as its value.

    An option or a group may have a role, IDENTITY or OPERATION: add_argument("--seed", role=IDENTITY).

    other_names: name -> the option with the same meaning. hints: name -> what to use in place of it. Both
    are names of other programs' options, with _ for -.
    """

    other_names: Mapping[str, str] = MappingProxyType({})
    hints: Mapping[str, str] = MappingProxyType(REMOVED)

    def __init__(self, description: str | None, prog: str | None = None):
        self.roles: dict[str, str] = {}  # option -> IDENTITY, OPERATION or ""
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
        )
        for kind in (int, float):
            self.register("type", kind, functools.partial(parse_number, kind=kind))

    def add_argument(self, *names: str, role: str = "", **options: Any) -> argparse.Action:  # type: ignore[override]
        action = super().add_argument(*names, **options)
        self.roles[action.dest] = role
        return action

    def add_argument_group(self, *arguments: Any, **options: Any) -> _Group:
        group = _Group(self, *arguments, **options)
        self._action_groups.append(group)
        return group

    def error(self, message: str) -> NoReturn:
        raise BadInput(message)

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        _, unknown = self._split([*words])
        if not unknown:
            parsed, unknown = self.parse_known_args(words, namespace)
        if unknown:
            self.error(self.unknown(unknown))
        return parsed

    def parse_known_args(
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Return the namespace and the names of the unknown options, each once.

        Values may be secrets: NAMELESS stands for those without an option.
        """
        words = list(sys.argv[1:] if args is None else args)
        self._hide_secrets(words)
        known, unknown = self._split(words)
        for action in self._actions:  # one that a job takes from the environment
            if isinstance(action.default, str) and action.default != argparse.SUPPRESS:
                action.default = expand_home(action.default)
        parsed, rest = super().parse_known_args([*map(expand_home, known)], namespace)
        for action in self._actions:
            kind, value = str(action.metavar).partition(".")[0], getattr(parsed, action.dest, None)
            if kind in ("FOLDER", "FILE") and is_url(value):  # a folder `s3:` would be made
                name = action.option_strings[-1] if action.option_strings else kind
                self.error(f"{name} {value}: expected a path of this machine, got a URL")
        unknown += [NAMELESS for word in rest if word != _UNKNOWN]
        return parsed, list(dict.fromkeys(unknown))

    def _split(self, words: list[str]) -> tuple[list[str], list[str]]:
        """Return (words with the defined names of options, names of unknown options). The word after an
        unknown option is taken as its value."""
        known, unknown = [], []
        while words:
            word = words.pop(0)
            if word == "--":
                return [*known, word, *words], unknown
            given, equals, value = word.partition("=")
            option = self._spelled(given)
            following = words[0] if words and not _is_option(words[0]) else None
            if not _is_option(word):
                known.append(word)
            elif option is None:
                known.append(_UNKNOWN)
                unknown.append(_name(word))
                if not equals and following is not None:
                    words.pop(0)
            elif self._option_string_actions[option].nargs == "?" and not equals:
                action = self._option_string_actions[option]
                own = following is not None and not _is_path(action, following)
                known.append(f"{option}={words.pop(0) if own else action.const}")
            else:
                attached = "" if given.startswith("--") else given[len(option) :]  # -j5
                known.append(f"{option}{attached}{equals}{value}")
        return known, unknown

    def _hide_secrets(self, words: list[str]) -> None:
        """Hide the values of options with a secret name: errors may quote them."""
        action: argparse.Action | None = None
        for word in words:
            value = word
            if _is_option(word):
                given, _, value = word.partition("=")
                action = self._option_string_actions.get(self._spelled(given) or "")
                if action and not word.startswith("--") and given not in self._option_string_actions:
                    value = word[2:]  # -pVALUE
            names = action.option_strings if action and action.nargs != 0 and action.type != boolean else ()
            if value and any(is_secret(name, value) for name in names) and not _WORD.fullmatch(value):
                hide(value)
            if value and action and action.nargs in (None, "?"):
                action = None

    def _spelled(self, given: str) -> str | None:
        """Return the defined name of an option; None if it is unknown."""
        if given in self._option_string_actions:
            return given
        if not given.startswith("--"):
            return given[:2] if given[:2] in self._option_string_actions else None
        return self.by_name().get(self.other_names.get(plain(given), plain(given)))

    def by_name(self) -> dict[str, str]:
        """Return the options by their name without hyphens, with _ for -."""
        options = (option for option in self._option_string_actions if option.startswith("--"))
        return {plain(option): option for option in options}

    def resembling(self, name: str) -> str | None:
        """Return the defined option whose name is similar to an unknown one; None if there is none."""
        options, name = self.by_name(), plain(name).lower()
        longer = [each for each in options if len(name) > 2 and each.startswith(name)]
        close = [_OTHER_NAMES.get(name), *difflib.get_close_matches(name, options, 1, 0.75), *longer]
        return next((options[each] for each in close if each in options), None)

    def unknown(self, unknown: list[str]) -> str:
        """Return the error message for unknown options."""
        said = []
        for name in unknown:
            meant = self.resembling(name)
            hint = self.hints.get(plain(name)) or (meant and f"did you mean {meant}?")
            said.append(f"{name} ({hint})" if hint else name)
        return f"unknown option{'s' if len(said) > 1 else ''}: {', '.join(said)}"


def expand_home(word: str) -> str:
    """Return a word of a command line with the home folder for a ~ at the beginning of a path: "~/data" or
    "--data_url=~/data", which a shell leaves as it is. Raises BadInput if there is no such home folder."""
    option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    path = os.path.expanduser(value) if value.startswith("~") else value
    if path.startswith("~") and (path == "~" or "/" in path):
        user = path.partition("/")[0]
        raise BadInput(f"{user} is not the home folder of a user: write ./{user} for a folder of this name")
    return option + equals + path


def _is_option(word: str) -> bool:
    return re.match(r"-(?!\.?\d)[^\s=]", word) is not None and " " not in word.partition("=")[0]


def _name(word: str) -> str:
    """Return the name of the unknown option with which a word begins."""
    return re.split(r"[^\w.-]", word)[0] if word.startswith("--") else word[:2]


def _is_path(action: argparse.Action, word: str) -> bool:
    """Return whether a word is a path and not a value of the option."""
    if not callable(action.type):  # any word is a value of the option
        return False
    with contextlib.suppress(argparse.ArgumentTypeError, ValueError):
        action.type(word)
        return False
    return os.path.exists(word) or "/" in word


def plain(option: str) -> str:
    """Return the name of an option without leading hyphens, with _ for -."""
    return option.lstrip("-").replace("-", "_")


class secret(str):
    """A value that no log, record or report shows: parser.add_argument("--name", type=secret)."""

    def __new__(cls, text: str) -> "secret":
        hide(text)
        return super().__new__(cls, text)


def mask_words(words: Iterable[str], ignored: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Return the words of a command line with *** for the values of secret options, and the names of the
    options whose values are masked.

    ignored: names of options that the job does not know, and NAMELESS: their values may be secrets.
    """
    shown, masked = [], []
    option, place = "", 1  # place: the number of values that the option has
    for word in words:
        lead, value, place = "", word, place + 1
        if _is_option(word):
            option, _, value = word.partition("=")
            if _name(word) in ignored and not word.startswith("--"):
                option, value = word[:2], word[2:]
            lead, place = word.removesuffix(value), int(bool(value))
        is_hidden = _name(option) in ignored or (place > 1 and NAMELESS in ignored)
        is_hidden = is_hidden or is_secret(option, value)
        shown.append(f"{lead}***" if value and is_hidden else mask(word))
        if shown[-1] != word:
            masked.append(option or NAMELESS)
    return shown, list(dict.fromkeys(masked))


def settings(args: argparse.Namespace) -> dict[str, str | int | float | bool | None]:
    """Return the arguments that may be logged: plain values, without any that looks like a credential."""
    values = {
        name: str(value) if isinstance(value, Interval) else value for name, value in vars(args).items()
    }
    return {
        name: mask(value) if isinstance(value, str) else value
        for name, value in values.items()
        if isinstance(value, str | int | float | bool | None)
        and not (isinstance(value, secret) or is_secret(name, value))
    }


def identity(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options with the role IDENTITY, --name -> plain value, without credentials."""
    shown = settings(args)
    kept = {name: each for name, each in vars(args).items() if _role(args, name) == IDENTITY}
    return {
        f"--{name}": shown[name] if name in shown else each if isinstance(each, list | tuple) else str(each)
        for name, each in kept.items()
        if not (isinstance(each, secret) or is_secret(name, each))
    }


def without_operation(args: argparse.Namespace, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of options that may change the training."""
    return {name: each for name, each in values.items() if _role(args, name) != OPERATION}


def _role(args: argparse.Namespace, name: str) -> str:
    return getattr(args, "roles", {}).get(name, "")


def boolean(text: str) -> bool:
    """Parse "true" or "false" (also 1/0, yes/no), as a platform's console sends it."""
    value = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(text.lower())
    if value is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return value


# An option whose value may be left out for true: parser.add_argument(name, **FLAG).
FLAG: dict[str, Any] = {
    "type": boolean,
    "nargs": "?",
    "const": True,
    "default": False,
}


def _number(expected: str, fits: Callable[[Any], bool], kind: Callable[[str], Any], text: str) -> Any:
    with contextlib.suppress(ValueError):
        value = parse_number(text, kind)
        if fits(value) and value <= _MOST:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not {expected} and at most {_MOST:g}")


positive_int = functools.partial(_number, "a whole number of at least 1", lambda value: value >= 1, int)
non_negative_int = functools.partial(_number, "a whole number of at least 0", lambda value: value >= 0, int)
positive_float = functools.partial(_number, "a number above 0", lambda value: value > 0, float)
non_negative_float = functools.partial(_number, "a number of at least 0", lambda value: value >= 0, float)


def seed(text: str) -> int:
    """Parse an integer in 0..2^63-1, the range that both torch.manual_seed and NumPy accept."""
    if not re.fullmatch("[0-9]{1,19}", text) or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number in 0..2^63-1")
    return int(text)


def interval(text: str) -> Interval:
    """Parse "200" (steps), "90s" or "1epoch"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|epochs?|steps?)?", text, re.ASCII)
    count = float(match[1]) if match else 0
    unit = (match[2] or "step").removesuffix("s") or "s" if match else ""
    if not 0 < count <= _MOST or (unit != "s" and count % 1):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of steps (200), seconds (90s) or epochs (1epoch), at most {_MOST:g}"
        )
    return Interval(count, unit)


_METAVARS: dict[Any, str] = {
    boolean: "true|false",
    int: "N",
    positive_int: "N",
    non_negative_int: "N",
    seed: "N",
    float: "NUMBER",
    positive_float: "NUMBER",
    non_negative_float: "NUMBER",
    interval: "N|Ns|Nepochs",
}


def arch(text: str) -> str:
    """Check an argument that names a classifier of torchvision, or timm:NAME, and no model of a hub. Raises
    ArgumentTypeError, and MissingPackage without timm."""
    if text.startswith(TIMM):
        timm, name = import_timm(), text.removeprefix(TIMM)
        if re.fullmatch(r"[\w.-]+", name) and timm.is_model(name):
            return text
        raise argparse.ArgumentTypeError(f"{text} is not a model of timm {timm.__version__}")
    import torchvision

    if text not in torchvision.models.list_models(module=torchvision.models):
        raise argparse.ArgumentTypeError(
            f"{text} is not a torchvision classifier ({torchvision.__version__})"
        )
    return text


def image_size(text: str) -> int:
    """Parse an argument: the side of a square image, at most 8192 pixels."""
    if (value := positive_int(text)) > _LARGEST:
        raise argparse.ArgumentTypeError(f"{text} is more than {_LARGEST} pixels")
    return value


def import_timm() -> Any:
    """Return the package timm. Raises MissingPackage."""
    return import_optional("timm", "--arch timm:NAME needs timm")
