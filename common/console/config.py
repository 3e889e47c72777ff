"""Read the options of a job from a TOML or a JSON file: --config FILE.toml.

    dataset = "digits"        # the option's name, with _ or -
    epochs = 12
    custom_data = false

Options on the command line override those of the file.
"""

import argparse
import functools
import importlib
import json
from collections.abc import Mapping
from typing import Any

from bootfile.ground.errors import BadInput, import_optional
from bootfile.ground.files import explained, read_file


def read(path: str) -> dict[str, Any]:
    """Return the content of a file: JSON if its name ends in .json, else TOML. Raises BadInput; its message
    does not name the file."""
    is_json = path.endswith(".json")
    of_json = functools.partial(json.loads, object_pairs_hook=_without_repetition)
    loads = of_json if is_json else _import_toml().loads
    try:
        # a file of options is small; editors of Windows write a byte order mark before it
        content = loads(read_file(path, 2**20).decode("utf-8-sig"))
    except OSError as error:
        raise BadInput(error.strerror) from error
    except UnicodeDecodeError as error:
        raise BadInput(f"is not UTF-8 at byte {error.start}") from error
    except (ValueError, RecursionError) as error:  # a syntax error, a number of 5000 digits, deep nesting
        raise BadInput(f"is not {'JSON' if is_json else 'TOML'}: {error}") from error
    if not isinstance(content, dict):
        raise BadInput("is not an object of options")
    return content


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises ValueError if it has a key twice, of which json takes the last one."""
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)} is there twice")
    return dict(pairs)


def table(text: str) -> dict[str, Any]:
    """Return an inline table of TOML, such as {betas = [0.9, 0.95]}. Raises BadInput."""
    failure = f"{text:.80} is not an inline table of TOML, {{name = value}}"
    with explained(failure, ValueError, RecursionError):
        content = _import_toml().loads(f"value = {text}")
    # dict() would take a list of pairs, too, and a second line would be lost
    if not isinstance(content["value"], dict) or len(content) > 1:
        raise BadInput(failure)
    return content["value"]


def _import_toml():
    """Return Python's tomllib (3.11 and later), or tomli, which has the same code, for 3.10."""
    try:
        return importlib.import_module("tomllib")
    except ImportError:
        return import_optional("tomli", "cannot be read: Python 3.10 has no TOML reader of its own")


def to_words(values: Mapping[str, Any], options: Mapping[str, argparse.Action]) -> list[str]:
    """Return the settings of a file as words of a command line. A key without an option also gives a word.

    options: name -> option, with _ for -. Raises BadInput if a value has a wrong type.
    """
    words = []
    given: dict[Any, str] = {}  # option -> its key
    for key, value in values.items():
        if key == "config":
            raise BadInput("config cannot be set in a file")
        # an unknown key becomes an unknown option, which the parser of the job refuses
        action = options.get(key.replace("-", "_"))
        first = given.setdefault(action or key, key)
        if first != key:  # as batch-size and batch_size
            raise BadInput(f"{first} and {key} are one option: leave one of them out")
        is_flag = action is not None and action.nargs == 0  # an option without a value
        if not isinstance(value, bool if is_flag else bool | int | float | str):
            expected = "true or false" if is_flag else "one text, number, true or false"
            raise BadInput(f"{key} = {value!r:.80}: expected {expected}, or a table as a text: '{{a = 1}}'")
        text = str(value).lower() if isinstance(value, bool) else str(value)  # as platforms write them
        if not is_flag or value:  # false: the option is left out
            words.append(f"--{key}" if is_flag else f"--{key}={text}")
    return words
