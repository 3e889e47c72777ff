"""Find the error in a node's log, and advise on changes to a script that was not written for a platform."""

import os
import re

from launch.bundle.code_folder import CodeFolder
from launch.profiles import get_arguments

_LONGEST = 300  # characters of an error that are shown
# `error: ...` of our jobs, `main.py: error: ...` of argparse, the last line of a traceback
_ERROR = re.compile(
    r"(?:\[\w+\]: )?((?:\S+: )?error: \S.*|(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Exit): \S.*)"
)
_UNKNOWN = re.compile(r"unrecognized arguments: (.*)")
_NO_RANK = re.compile(r"environment variable (?:RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected")
_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_NO_FILE = re.compile(r"FileNotFoundError: .*No such file or directory: '([^']+)'")


def find_error(line: str) -> str | None:
    """Return the error in a line of a log; None if there is none."""
    match = _ERROR.fullmatch(line)
    return match[1][:_LONGEST] if match else None


def advise(error: str, code: CodeFolder, platform: str) -> str | None:
    """Return one line of advice; None if the cause of the error is not known."""
    if match := _UNKNOWN.search(error):
        names = {word.partition("=")[0] for word in match[1].split() if word.startswith("--")}
        own = [name for name in get_arguments(platform) if name in names]
        if own:
            return (
                f"{platform} passes {' '.join(own)} by itself: accept unknown options, "
                "`args, _ = parser.parse_known_args()`, or add these (guides/own_script.md)"
            )
    if _NO_RANK.search(error):
        return (
            f"{platform} starts the script once per node and sets other variables than torchrun: start it "
            "through torchrun (guides/own_script.md has a boot file that does), or see --platform torchrun"
        )
    if match := _NO_MODULE.search(error):
        module = match[1].partition(".")[0]
        if folder := code.find_above(module):
            return f"{module} is in {folder}, and only {code.root} is uploaded: --code_dir {folder}"
    if match := _NO_FILE.search(error):
        name = f"/{os.path.normpath(match[1])}/"  # the script may prepend the node's folder
        for path, rule, *_ in code.skipped:
            if f"/{path.rstrip('/')}/" in name:
                return (
                    f"{path} is not uploaded (rule: {rule}): pass data by --data_url, or add a line !{path} "
                    "to .jobignore in the code folder"
                )
    return None
