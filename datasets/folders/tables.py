"""Find a table next to folders of images that lists them with their labels: a CSV, TSV or JSON file.

A job does not read it: train.txt and val.txt name the images and labels (datasets/folders/label_list.py). The
messages here say which table was found, and how a line of these lists looks.
"""

import csv
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from datasets.folders.label_list import LABEL_TITLE, PATH_TITLE
from datasets.folders.not_classes import may_be_a_split_or_a_part
from datasets.folders.walk import is_image

_ENDINGS = (".csv", ".tsv", ".json", ".jsonl")
_ROWS = 20_000  # rows of a table that are read
_JSON = 2**26  # bytes; a larger JSON file is not read
_LONGEST = 2**16  # characters of the first line
_LISTED = 0.5  # share of a column that must be names of images, and of the images of a folder that are listed
GUIDE = 'guides/own_data.md, "Labels in a CSV"'

_Row = dict[str, str]


class Table(NamedTuple):
    """A table that lists images.

    name: of its file. path_column, label_column: titles; label_column is "" if it is not clear.
    places: (path of an image, its row), below the folder that holds the class folders.
    """

    name: str
    path_column: str
    label_column: str
    places: list[tuple[str, _Row]]

    def advise(self) -> str:
        """Return how to use the table, as a part of a message."""
        path, row = self.places[0]
        label = " ".join(row.get(self.label_column, "").split()) or "LABEL"
        if "," in label or " " in label:
            label = f'"{label}"'
        return (
            f"{self.name} lists {len(self.places)} images in its column {self.path_column}: write train.txt "
            f"and val.txt, lines such as `{path},{label}` ({GUIDE})"
        )


def find(folders: Iterable[str], paths: list[str]) -> Table | None:
    """Return the table in one of the folders that lists the most images; None without one. paths: of the
    images. The look() of folders calls it if there are no splits; few folders have a table."""
    tables: list[tuple[str, list[_Row]]] = []
    for folder in folders:
        for name in sorted(os.listdir(folder)):
            path = os.path.join(folder, name)
            if name.lower().endswith(_ENDINGS) and name[0] != "." and os.path.isfile(path):
                tables.append((path, _read(path)))
    by_name = _find_by_name(paths, [rows for _, rows in tables])
    best: Table | None = None
    for path, rows in tables:
        table = _match(path, rows, by_name)
        if table and (best is None or len(table.places) > len(best.places)):
            best = table
    if best and _lists_a_folder(best, paths):
        return best
    return None


def _find_by_name(paths: list[str], tables: list[list[_Row]]) -> dict[str, list[str]]:
    """Return name of an image, with and without its ending -> its paths, for the names that tables have."""
    # only names that tables have: a folder may have a million images, and mostly no table
    wanted = set()
    for row in itertools.chain.from_iterable(tables):
        wanted.update(map(_last_part, row.values()))
    by_name: dict[str, list[str]] = {}
    if not wanted:
        return by_name
    for path in paths:
        name = path.rpartition("/")[2]
        for key in (name, os.path.splitext(name)[0]):
            if key in wanted:
                by_name.setdefault(key, []).append(path)
    return by_name


def describe_other_labels(table: Table, titles: list[str]) -> str:
    """Return why folders are not classes by a table: "A and B have the same labels in train.csv"; "" if they
    may be classes, because a column of the table has one value for each of the folders."""
    folders_of: dict[str, dict[str, set[str]]] = {}  # column -> value -> folders of the images that have it
    listed = set()
    for path, row in table.places:
        folder = path.partition("/")[0]
        listed.add(folder)
        for column, value in row.items():
            if column != table.path_column:
                folders_of.setdefault(column, {}).setdefault(value, set()).add(folder)
    for values in folders_of.values():
        # a column that has one value for each folder says the same as the folders
        largest = max(map(len, values.values()))
        if largest == 1 and len(values) == len(listed) > 1:
            return ""
    for folders in folders_of.get(table.label_column, {}).values():
        if len(folders) > 1:
            one, other, *_ = sorted(folders)
            return f"{one} and {other} have images of the same label in {table.name}"
    if all(map(may_be_a_split_or_a_part, titles)):
        return f"{' and '.join(sorted(listed))} hold the images of {table.name}"
    return ""


def _match(source: str, rows: list[_Row], by_name: dict[str, list[str]]) -> Table | None:
    """Return the table with the column that names the most images; None if no column names them."""
    best: Table | None = None
    words = set(re.findall("[a-z]+", os.path.basename(source).lower()))
    if not rows:
        return None
    for column in rows[0]:
        is_path_title = bool(PATH_TITLE.fullmatch(_plain(column)))
        places = []
        for row in rows:
            value = row.get(column, "")
            if not value or not (is_image(value) or is_path_title or re.search("[^0-9.]", value)):
                continue  # a number in another column than that of the names
            path = _choose(value, by_name.get(_last_part(value), []), words)
            if path:
                places.append((path, row))
        if len(places) < max(2, _LISTED * len(rows)) or (best and len(places) <= len(best.places)):
            continue
        best = Table(os.path.basename(source), column, _find_labels(rows, column), places)
    return best


def _find_labels(rows: list[_Row], path_column: str) -> str:
    """Return the title of the column of the labels; "" if it is not clear: several have such a title, or none
    and there are more than two columns, or each value of the other column is different."""
    others = []
    labels = []
    for title in rows[0]:
        if title == path_column:
            continue
        others.append(title)
        if LABEL_TITLE.fullmatch(_plain(title)):
            labels.append(title)
    if len(labels) == 1:
        return labels[0]
    # a column whose values all differ numbers the images: it has no labels
    if len(others) == 1 and len({row.get(others[0]) for row in rows}) < len(rows):
        return others[0]
    return ""


def _choose(value: str, paths: list[str], words: set[str]) -> str:
    """Return the image that a value names, of those with its name; "" if that is not clear. words: of the
    name of the table: train.csv may list the images of train_images."""
    of_path = []
    of_table = []
    for path in paths:
        if value.replace("\\", "/").endswith(path):
            of_path.append(path)
        if words & set(re.findall("[a-z]+", path.partition("/")[0].lower())):
            of_table.append(path)
    for chosen in (paths, of_path, of_table):
        if len(chosen) == 1:
            return chosen[0]
    return ""


def _lists_a_folder(table: Table, paths: list[str]) -> bool:
    """Return whether a table lists at least half of the images of a folder, as far as it was read."""
    listed = Counter[str]()
    for path, _ in table.places:
        listed[path.rpartition("/")[0]] += 1
    counts = Counter[str]()
    for path in paths:
        counts[path.rpartition("/")[0]] += 1
    return any(count >= min(_LISTED * counts[folder], _ROWS / 20) for folder, count in listed.items())


def _last_part(value: str) -> str:
    """Return the name of a file at the end of a path."""
    return re.split(r"[/\\]", value)[-1]


def _plain(title: str) -> str:
    """Return the letters of a title, small."""
    return re.sub("[^a-z]", "", title.lower())


def _read(path: str) -> list[_Row]:
    """Return the first rows of a table, column -> value; [] if it is not one that can be read."""
    try:
        if path.lower().endswith((".json", ".jsonl")):
            return _read_json(path)
        with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            # the separator that the first line has most often
            first = file.readline(_LONGEST)
            if len(first) == _LONGEST:  # not a table
                return []
            separator = max("\t;,", key=first.count)
            file.seek(0)
            lines = list(itertools.islice(csv.reader(file, delimiter=separator), _ROWS + 1))
    except (OSError, ValueError, csv.Error, RecursionError):
        return []
    if not lines:
        return []
    titles = [title.strip() for title in lines[0]]
    if any(map(is_image, titles)):  # no header
        titles = [str(number) for number in range(1, len(titles) + 1)]
    else:
        lines = lines[1:]
    rows = []
    for line in lines:
        if line:
            values = map(str.strip, line)
            rows.append(dict(zip(titles, values, strict=False)))  # a line may be shorter than the header
    return rows


def _read_json(path: str) -> list[_Row]:
    """Return the first rows of a JSON file: a list of objects, also inside of an object (COCO), one of names
    and labels, or an object on each line. Raises OSError and ValueError."""
    if os.path.getsize(path) > _JSON:
        return []
    with open(path, encoding="utf-8-sig") as file:
        content: Any = []
        if path.lower().endswith("l"):  # an object on each line
            for line in itertools.islice(file, _ROWS):
                if line.strip():
                    content.append(json.loads(line))
        else:
            content = json.load(file)
    # COCO and others have their list inside of an object
    if isinstance(content, dict):
        content = _find_entries(content)
    if not isinstance(content, list):
        return []
    rows = []
    for entry in content[:_ROWS]:
        if not isinstance(entry, dict):
            continue
        row = {}
        for key, value in entry.items():
            if _is_plain(value):  # not the boxes of COCO, which are lists
                row[str(key)] = str(value)
        rows.append(row)
    return rows


def _find_entries(content: dict[str, Any]) -> list[Any]:
    """Return the entries in a JSON object: those of its list that names images, the last one if there are
    several; if it has no list, its names and labels. [] if no list names images."""
    lists = [value for value in content.values() if isinstance(value, list)]
    entries: list[Any] = []
    if not lists:
        for name, label in content.items():
            entries.append({"file": name, "label": label})
    for values in lists:
        if any(map(_names_image, values)):
            entries = values
    return entries


def _names_image(entry: Any) -> bool:
    """Return whether an entry of a list is an object with the name of an image."""
    return isinstance(entry, dict) and any(map(_is_image_name, entry.values()))


def _is_image_name(value: Any) -> bool:
    return isinstance(value, str) and is_image(value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float)
