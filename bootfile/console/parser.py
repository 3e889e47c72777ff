"""Parse the options of a command. An error is one line, which has no value of an unknown option."""

import argparse
import contextlib
import difflib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from bootfile.console.words import NAMELESS, is_option, name_of
from bootfile.ground.errors import BadInput
from bootfile.ground.numbers import parse_number
from bootfile.ground.secrets import hide, is_secret

LARGEST = 1e9  # the largest number of an option: larger ones overflow clocks, counters or floats
_UNKNOWN = "--?"  # replaces an unknown option while argparse parses the others
_WORD = re.compile("[a-z]{1,5}")  # a value as --key=loss: other lines may hold the word


def boolean(text: str) -> bool:
    """Parse "true" or "false" (also 1/0, yes/no), as a platform's console sends it."""
    value = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(text.lower())
    if value is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return value


def _number(expected: str, fits: Callable[[Any], bool], kind: Callable[[str], Any], text: str) -> Any:
    """Parse the value of an option. Raises an error of argparse with what is expected, if it does not fit."""
    with contextlib.suppress(ValueError):
        value = parse_number(text, kind)
        if fits(value) and value <= LARGEST:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not {expected} and at most {LARGEST:g}")


positive_int = functools.partial(_number, "a whole number of at least 1", lambda value: value >= 1, int)
non_negative_int = functools.partial(_number, "a whole number of at least 0", lambda value: value >= 0, int)
positive_float = functools.partial(_number, "a number above 0", lambda value: value > 0, float)
non_negative_float = functools.partial(_number, "a number of at least 0", lambda value: value >= 0, float)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the expected value of an option (`true|false`, `N`) if it has no metavar of its own."""

    metavars: Mapping[Any, str] = MappingProxyType(
        {
            boolean: "true|false",
            int: "N",
            positive_int: "N",
            non_negative_int: "N",
            float: "NUMBER",
            positive_float: "NUMBER",
            non_negative_float: "NUMBER",
        }
    )

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return self.metavars.get(action.type, super()._get_default_metavar_for_optional(action))


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line (BadInput) and show no value of an unknown option.

    Options cannot be abbreviated; - and _ are the same in their names. A path may begin with ~, the home
    folder. If the value of an option is optional (nargs="?") and has a type, a path after the option is not
    taken as its value.

    formatter: class of the text of --help.
    other_names: name -> the option with the same meaning.
    short_names: name -> the short name of the option that is probably meant.
    hints: name -> what to use in place of it.
    The names are those of other programs' options, with _ for -.
    """

    formatter: type[HelpFormatter] = HelpFormatter
    other_names: Mapping[str, str] = MappingProxyType({})
    short_names: Mapping[str, str] = MappingProxyType({})
    hints: Mapping[str, str] = MappingProxyType({})

    def __init__(self, description: str | None, prog: str | None = None):
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=self.formatter,
            allow_abbrev=False,
        )
        for kind in (int, float):
            self.register("type", kind, functools.partial(parse_number, kind=kind))

    def set_defaults(self, **defaults: Any) -> None:
        """Set the defaults of options by their names, as argparse does. Other spellings of an option get
        none: argparse would parse a default of text with the type of the other spelling."""
        has_default = {action.dest for action in self._actions if action.default != argparse.SUPPRESS}
        without = [action for action in self._actions if action.default == argparse.SUPPRESS]
        super().set_defaults(**defaults)
        for action in without:
            if action.dest in has_default:
                action.default = argparse.SUPPRESS

    def error(self, message: str) -> NoReturn:
        raise BadInput(message)

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else [*args]
        # before any value is parsed: an unknown option may make the next word look like a wrong value
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
        words = sys.argv[1:] if args is None else [*args]
        self._hide_secrets(words)
        known, unknown = self._split(words)
        for action in self._actions:  # one that a job takes from the environment
            if isinstance(action.default, str) and action.default != argparse.SUPPRESS:
                action.default = expand_home(action.default)
        parsed, rest = super().parse_known_args([*map(expand_home, known)], namespace)
        # the text of a word may be a secret, for example a password after a space
        unknown += [NAMELESS for word in rest if word != _UNKNOWN]
        return parsed, list(dict.fromkeys(unknown))

    def _split(self, words: list[str]) -> tuple[list[str], list[str]]:
        """Return (words with the defined names of options, names of unknown options). The word after an
        unknown option is taken as its value."""
        known = []
        unknown = []
        while words:
            word = words.pop(0)
            if word == "--":  # the options of a job follow, which it reads itself
                return [*known, word, *words], unknown
            given, equals, value = word.partition("=")
            option = self._spelled(given)
            # argparse knows whether it is a value or an argument without an option
            if not is_option(word):
                known.append(word)
            elif option is None:
                # a placeholder: argparse would quote the option with its value, which may be a secret
                known.append(_UNKNOWN)
                unknown.append(name_of(word))
                if not equals and words and not is_option(words[0]):
                    words.pop(0)
            elif self._option_string_actions[option].nargs == "?" and not equals:
                # `--amp PATH`: a path that does not fit the type is not the value of the option
                action = self._option_string_actions[option]
                has_value = words and not is_option(words[0]) and not _is_path(action, words[0])
                known.append(f"{option}={words.pop(0) if has_value else action.const}")
            else:
                # the defined spelling, which argparse knows, with the value as it was given: -j5
                attached = "" if given.startswith("--") else given[len(option) :]
                known.append(f"{option}{attached}{equals}{value}")
        return known, unknown

    def _hide_secrets(self, words: list[str]) -> None:
        """Hide the values of options with a secret name: errors may quote them."""
        action: argparse.Action | None = None
        for word in words:
            value = word
            if is_option(word):
                given, _, value = word.partition("=")
                action = self._option_string_actions.get(self._spelled(given) or "")
                if action and not word.startswith("--") and given not in self._option_string_actions:
                    value = word[2:]  # -pVALUE
            if not value or action is None:
                continue
            # a switch has no value, and true or false are not secrets
            has_text = action.nargs != 0 and action.type != boolean
            may_be_secret = has_text and any(is_secret(name, value) for name in action.option_strings)
            if may_be_secret and not _WORD.fullmatch(value):
                hide(value)
            if action.nargs in (None, "?"):  # it has one value: the next word is not its
                action = None

    def _spelled(self, given: str) -> str | None:
        """Return the defined name of an option; None if it is unknown."""
        if given in self._option_string_actions:
            return given
        if not given.startswith("--"):
            short = given[:2]  # "-j" in "-j5"
            return short if short in self._option_string_actions else None
        name = plain(given)
        return self.by_name().get(self.other_names.get(name, name))

    def by_name(self) -> dict[str, str]:
        """Return the options by their name without hyphens, with _ for -."""
        options = (option for option in self._option_string_actions if option.startswith("--"))
        return {plain(option): option for option in options}

    def resembling(self, name: str) -> str | None:
        """Return the defined option whose name is similar to an unknown one; None if there is none."""
        options = self.by_name()
        # the names that other programs use come first, then misspelled ones, then the beginnings of names
        name = plain(name).lower()
        similar = [self.short_names.get(name), *difflib.get_close_matches(name, options, 1, 0.75)]
        similar += [option for option in options if len(name) > 2 and option.startswith(name)]
        return next((options[candidate] for candidate in similar if candidate in options), None)

    def unknown(self, unknown: list[str]) -> str:
        """Return the error message for unknown options."""
        shown = []
        for name in unknown:
            meant = self.resembling(name)
            hint = self.hints.get(plain(name)) or (f"did you mean {meant}?" if meant else "")
            shown.append(f"{name} ({hint})" if hint else name)
        return f"unknown option{'s' if len(shown) > 1 else ''}: {', '.join(shown)}"


def _is_path(action: argparse.Action, word: str) -> bool:
    """Return whether a word is a path and not a value of the option."""
    if not callable(action.type):  # any word is a value of the option
        return False
    with contextlib.suppress(argparse.ArgumentTypeError, ValueError):
        action.type(word)
        return False
    return os.path.exists(word) or "/" in word


def expand_home(word: str) -> str:
    """Return a word of a command line with the home folder for a ~ at the beginning of a path: "~/data" or
    "--data_url=~/data", which a shell leaves as it is. Raises BadInput if there is no such home folder."""
    option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    path = os.path.expanduser(value) if value.startswith("~") else value
    # expanduser() leaves the name of an unknown user as it is; "~" alone needs $HOME
    if path.startswith("~") and (path == "~" or "/" in path):
        user = path.partition("/")[0]
        raise BadInput(f"{user} is not the home folder of a user: write ./{user} for a folder of this name")
    return option + equals + path


def plain(option: str) -> str:
    """Return the name of an option without leading hyphens, with _ for -."""
    return option.lstrip("-").replace("-", "_")
