"""Read a list of images and their labels, such as train.txt, with any separator and columns."""

import codecs
import contextlib
import csv
import io
import os
import re
from typing import NamedTuple

from bootfile.ground.again import read_whole
from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained
from datasets.folders.messages import Log
from datasets.folders.walk import is_image

_LONGEST = 4096  # characters of a line in a list
PATH_TITLE = re.compile("(file|image|img)?(path|file|image|img|name|id)s?")  # titles of columns, letters only
LABEL_TITLE = re.compile("(class|label|category|target)(id|name|label|s|es)?|y")
_UNCLEAR = re.compile(r".*(?:,\s|\s,|[;|]).*")  # a label that may mean several


class _Columns(NamedTuple):
    """How the lines of a list are read.

    path, label: the numbers of these columns, from 0, of `total` columns.
    titles: how many of the two have a title in the first line that names them.
    """

    separator: str
    total: int
    path: int
    label: int
    titles: int


def read_list(source: str, log: Log) -> tuple[list[str], list[str]]:
    """Return (paths, labels as text) of a list. Raises BadInput with the line.

    A path and a label are separated by a tab, a semicolon, a comma or spaces. A value that has the separator
    in it is quoted, except for a path before spaces. Of columns, the path is the one whose values end as
    images do; of more than two, a header names the label. Lines that begin with "# " are comments. Paths are
    below the folder of the list, or absolute; backslashes separate folders if no line has a slash.
    listing.look() calls it at each start, in the process of a node that indexes the images.
    """
    lines = _read_lines(source)
    separator = _find_separator(lines[-1][1])
    expected = (
        f"expected `path{separator}label`, a label with spaces in quotes, several labels as 3,17, or of "
        "columns, a header that names the path and one label"
    )
    first_number, first_line = lines[0]
    columns = _find_columns(first_line, lines[-1][1], separator)
    if columns is None:
        raise BadInput(f"{source}, line {first_number}: {expected}; found {first_line[:60]!r}")
    # the columns were found by names and titles: the user should see which ones
    if columns.path > 0 or columns.total > 2:
        log(
            f"{source}: the path is column {columns.path + 1} and the label column {columns.label + 1} of "
            f"{columns.total}"
        )
    if _has_header(first_line, columns):
        lines = lines[1:]
    folder = os.path.join(os.path.dirname(source), "")
    rows: dict[str, tuple[str, str]] = {}  # path without ./ -> path, label
    for number, line in lines:
        row = _read_row(line, columns)
        if row is None:
            raise BadInput(f"{source}, line {number}: {expected}; found {line[:60]!r}")
        path, label = row
        path = path.removeprefix(folder)
        # an index has paths below its base only
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


def _find_separator(last: str) -> str:
    """Return the separator of a list from its last line, which is not a header: the first one that leaves the
    name of an image alone, otherwise a space."""
    line = last.removesuffix(" ,")  # a path without a label, before spaces
    for separator in "\t;,":
        if any(map(is_image, _split(line, separator))):
            return separator
    return " "


def _find_columns(first: str, last: str, separator: str) -> _Columns | None:
    """Return the columns of a list, from its first line, which may be a header, and its last line. None if
    the path or the label is not clear."""
    head = _split(first, separator)
    values = _split(last, separator)
    total = len(values)
    if separator == " ":  # the last word is the label, and all before it the path
        total = 2
    titles = [""] * total
    if len(head) == total:
        titles = [re.sub("[^a-z]", "", title.lower()) for title in head]
    paths = []
    if separator == " ":
        paths.append(0)
    else:
        for column, value in enumerate(values):
            if is_image(value):
                paths.append(column)
    if len(paths) != 1:  # several columns name images: one has the title of a path
        candidates = paths
        paths = [column for column in candidates if PATH_TITLE.fullmatch(titles[column])]
    # and one column for the label, which only a title can name if there are more than two
    labels = []
    for column in range(total):
        # of two columns, the other one has the labels, whatever its title is
        may_be_label = total == 2 or LABEL_TITLE.fullmatch(titles[column])
        if column not in paths and may_be_label:
            labels.append(column)
    if len(paths) != 1 or len(labels) != 1:
        return None
    title_count = 0
    if PATH_TITLE.fullmatch(titles[paths[0]]):
        title_count += 1
    if LABEL_TITLE.fullmatch(titles[labels[0]]):
        title_count += 1
    return _Columns(separator, total, paths[0], labels[0], title_count)


def _has_header(first: str, columns: _Columns) -> bool:
    """Return whether the first line is a header. Before spaces any two words look like a row, so both must be
    titles."""
    needed = 2 if columns.separator == " " else 1
    has_image = any(map(is_image, _split(first, columns.separator)))
    return columns.titles >= needed and not has_image


def _read_row(line: str, columns: _Columns) -> tuple[str, str] | None:
    """Return (path, label) of a line; None if it has another form."""
    values = _split(line, columns.separator)
    if len(values) != columns.total or "\0" in line or len(line) > _LONGEST:
        return None
    path = values[columns.path]
    label = values[columns.label]
    # before spaces a name without an ending is a path, too, unless spaces are in it
    is_path = is_image(path) or (columns.separator == " " and " " not in path)
    # several labels are written as 3,17: another form is refused, not guessed
    is_label = not is_image(label) and not _UNCLEAR.fullmatch(label)
    if not path or not label or not is_path or not is_label:
        return None
    return path, label


def _read_lines(source: str) -> list[tuple[int, str]]:
    """Return (number, text) of the lines that are neither empty nor comments. Raises BadInput without one."""
    with explained(f"cannot read {source}"):
        content = read_whole(source)
    code = "utf-16" if content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
    try:
        text = io.StringIO(content.decode(code, "surrogateescape"), newline=None)
    except UnicodeError as error:
        raise BadInput(f"cannot read {source}: {error}") from error
    lines = []
    for number, raw in enumerate(text, 1):
        line = raw.strip()
        is_comment = line == "#" or line.startswith("# ")
        if line and not is_comment:
            lines.append((number, line))
    if not lines:
        raise BadInput(f"{source} lists no image")
    has_slash = any("/" in line for _, line in lines)
    if has_slash:
        return lines
    with_slashes = []  # a list that was written on Windows
    for number, line in lines:
        with_slashes.append((number, line.replace("\\", "/")))
    return with_slashes


def _split(line: str, separator: str) -> list[str]:
    """Return the values of a line of a list; two, of which the path may have spaces, if the separator is a
    space. [] if there is only one."""
    values: list[str] = []
    with contextlib.suppress(csv.Error):
        row = next(csv.reader([line], delimiter=separator, skipinitialspace=True, strict=True))
        values = [value.strip() for value in row]
    if separator == " ":
        values = [" ".join(values[:-1]), *values[-1:]]
    if len(values) < 2 or not any(values[:-1]):
        return []
    return values
