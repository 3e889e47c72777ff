"""Read the words of a command line: the values of options, and those that may be secret."""

import argparse
import re
from collections.abc import Collection, Iterable

from bootfile.ground.secrets import is_secret, mask

NAMELESS = "(a value without an option)"


def is_option(word: str) -> bool:
    """Return whether a word of a command line begins with the name of an option."""
    return re.match(r"-(?!\.?\d)[^\s=]", word) is not None and " " not in word.partition("=")[0]


def name_of(word: str) -> str:
    """Return the name of the option with which a word begins."""
    return re.split(r"[^\w.-]", word, maxsplit=1)[0] if word.startswith("--") else word[:2]


def mask_words(words: Iterable[str], ignored: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Return the words of a command line with *** for the values of secret options, and the names of the
    options whose values are masked.

    ignored: names of options that the job does not know, and NAMELESS: their values may be secrets.
    """
    shown = []
    masked = []
    option = ""  # the last option before the word, or in it
    count = 1  # how many values the option has so far, the one of the word included
    for word in words:
        if is_option(word):
            option, _, value = word.partition("=")
            if name_of(word) in ignored and not word.startswith("--"):  # -pVALUE
                option = word[:2]
                value = word[2:]
            lead = word.removesuffix(value)
            count = 1 if value else 0  # without "=" the value is the next word
        else:
            value = word
            lead = ""
            count += 1
        # an option has one value: a second one, and a word before all options, may belong to no option
        is_nameless = count > 1 and NAMELESS in ignored
        is_hidden = name_of(option) in ignored or is_nameless or is_secret(option, value)
        # also a word that is not hidden by its option may be one that a store or a hub has given
        text = f"{lead}***" if value and is_hidden else mask(word)
        shown.append(text)
        if text != word:
            masked.append(option or NAMELESS)
    return shown, list(dict.fromkeys(masked))


def get_option(arguments: list[str], *names: str) -> str | None:
    """Return the last value of an option, given as `--name value` or `--name=value`. names: with _; arguments
    may have - for _."""
    value, _ = split_option(arguments, *names)
    return value


def split_option(arguments: list[str], *names: str) -> tuple[str | None, list[str]]:
    """Return (the last value of an option, the other arguments)."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    with_hyphens = (f"--{name[2:].replace('_', '-')}" for name in names)
    parser.add_argument(*{*names, *with_hyphens}, dest="value", nargs="?")
    known, others = parser.parse_known_args(arguments)
    return known.value, others
