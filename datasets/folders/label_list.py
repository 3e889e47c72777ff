"""Read a list of images and their labels, such as train.txt, with any separator and columns."""

import codecs
import contextlib
import csv
import io
import os
import re

from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained
from datasets.folders.messages import Log
from datasets.folders.walk import is_image

_LONGEST = 4096  # characters of a line in a list
_PATH = re.compile("(file|image|img)?(path|file|image|img|name|id)s?")  # titles of columns, letters only
_LABEL = re.compile("(class|label|category|target)(id|name|label|s|es)?|y")
_UNCLEAR = re.compile(r".*(?:,\s|\s,|[;|]).*")  # a label that may mean several


def read_list(source: str, log: Log) -> tuple[list[str], list[str]]:
    """Return (paths, labels as text) of a list. Raises BadInput with the line.

    A path and a label are separated by a tab, a semicolon, a comma or spaces. A value that has the separator
    in it is quoted, except for a path before spaces. Of columns, the path is the one whose values end as
    images do; of more than two, a header names the label. Lines that begin with "# " are comments. Paths are
    below the folder of the list, or absolute; backslashes separate folders if no line has a slash.
    """
    lines = _read_lines(source)
    last = lines[-1][1].removesuffix(" ,")  # a path without a label, before spaces
    separator = next((each for each in "\t;," if any(map(is_image, _split(last, each)))), " ")
    head, values = (_split(lines[place][1], separator) for place in (0, -1))
    count = 2 if separator == " " else len(values)
    titles = [re.sub("[^a-z]", "", title.lower()) for title in head] if len(head) == count else [""] * count
    paths = [column for column in range(count) if is_image(values[column])] if separator != " " else [0]
    paths = paths if len(paths) == 1 else [column for column in paths if _PATH.fullmatch(titles[column])]
    others = [column for column in range(count) if column not in paths]
    others = others if count == 2 else [column for column in others if _LABEL.fullmatch(titles[column])]
    expected = (
        f"expected `path{separator}label`, a label with spaces in quotes, several labels as 3,17, or of "
        "columns, a header that names the path and one label"
    )
    if len(paths) != 1 or len(others) != 1:
        raise BadInput(f"{source}, line {lines[0][0]}: {expected}; found {lines[0][1][:60]!r}")
    [at], [of] = paths, others
    if at or count > 2:
        log(f"{source}: the path is column {at + 1} and the label column {of + 1} of {count}")
    named = bool(_PATH.fullmatch(titles[at])) + bool(_LABEL.fullmatch(titles[of]))
    if named > (separator == " ") and not any(map(is_image, head)):
        lines = lines[1:]
    folder = os.path.join(os.path.dirname(source), "")
    rows: dict[str, tuple[str, str]] = {}  # path without ./ -> path, label
    for number, line in lines:
        values = _split(line, separator)
        path, label = (values[at], values[of]) if len(values) == count else ("", "")
        is_path = is_image(path) or (separator == " " and " " not in path)
        is_label = label and not is_image(label) and not _UNCLEAR.fullmatch(label)
        if not (path and is_path and is_label) or "\0" in line or len(line) > _LONGEST:
            raise BadInput(f"{source}, line {number}: {expected}; found {line[:60]!r}")
        path = path.removeprefix(folder)
        if os.path.isabs(path) or ".." in path.split("/"):
            raise BadInput(f"{source}, line {number}: {path} is not below the folder of {source}")
        plain = os.path.normpath(path) if "./" in path or "//" in path else path
        if plain in rows:
            raise BadInput(f"{source} lists {path} twice, with labels {rows[plain][1]} and {label}")
        rows[plain] = path, label
    if not rows:
        raise BadInput(f"{source} lists no image")
    ordered = sorted(rows.values())
    return [path for path, _ in ordered], [label for _, label in ordered]


def _read_lines(source: str) -> list[tuple[int, str]]:
    """Return (number, text) of the lines that are neither empty nor comments. Raises BadInput without one."""
    with explained(f"cannot read {source}"), open(source, "rb") as file:
        content = file.read()
    code = "utf-16" if content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
    try:
        text = io.StringIO(content.decode(code, "surrogateescape"), newline=None)
    except UnicodeError as error:
        raise BadInput(f"cannot read {source}: {error}") from error
    lines = [(number, line) for number, each in enumerate(text, 1) if (line := each.strip())]
    lines = [(number, line) for number, line in lines if not f"{line} ".startswith("# ")]
    if not lines:
        raise BadInput(f"{source} lists no image")
    if not any("/" in line for _, line in lines):
        lines = [(number, line.replace("\\", "/")) for number, line in lines]
    return lines


def _split(line: str, separator: str) -> list[str]:
    """Return the values of a line of a list; two, of which the path may have spaces, if the separator is a
    space. [] if there is only one."""
    values: list[str] = []
    with contextlib.suppress(csv.Error):
        row = next(csv.reader([line], delimiter=separator, skipinitialspace=True, strict=True))
        values = [value.strip() for value in row]
    if separator == " ":
        values = [" ".join(values[:-1]), *values[-1:]]
    return values if len(values) > 1 and any(values[:-1]) else []
