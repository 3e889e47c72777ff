"""Refuse a value of an option that names a file, a folder or a run if it cannot be one."""

import argparse
import re

from bootfile.ground.errors import BadInput
from common.ground.files import is_url

_PLACES = {"FILE", "FOLDER", "DIR", "PATH", "RUN", "URL"}  # words of a metavar


def check(action: argparse.Action, value: str) -> None:
    """Raise BadInput for an empty value, as of "$WEIGHTS" if the variable of the shell is not set, and for a
    URL in place of a path of this machine. A Parser calls it for these values, before the job makes a folder.
    """
    expected = str(action.metavar or "")
    if action.dest in ("data_url", "output_dir"):
        expected = expected or "FOLDER|URL"
    is_place = not _PLACES.isdisjoint(re.findall("[A-Z]+", expected))
    if is_place and not value:
        reason = f"'' is empty: expected {expected}, or leave it out"
        raise BadInput(str(argparse.ArgumentError(action, reason)))
    # a folder `s3:` would be made
    if is_url(value) and expected.partition(".")[0] in ("FOLDER", "FILE"):
        name = action.option_strings[-1] if action.option_strings else expected.partition(".")[0]
        raise BadInput(f"{name} {value}: expected a path of this machine, got a URL")
