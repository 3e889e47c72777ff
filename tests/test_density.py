"""Code is written one statement a line: each room has a ceiling of dense places, which may only fall.

`python -m tests.support.density ROOM` shows the places of a room. pyproject.toml has the rules of ruff.
"""

import re

import pytest

from tests.support.density import (
    KINDS,
    LAMBDA,
    MULTIPLIED,
    NAME,
    NESTED,
    ROOT,
    SKIP,
    TUPLE,
    count_comments,
    find_places,
    find_rooms,
    measure,
)

# A room that is not in CEILINGS is calm: it has no dense place, and at most this many compact expressions
# in 1,000 lines (ternaries, walruses, comprehensions and lambdas).
MOST_COMPACT = 60
# room -> the number of places of each of KINDS, and compact expressions in 1,000 lines
CEILINGS = {
    "bootfile/console": (0, 0, 0, 0, 0, 0, 15),
    "bootfile/prove": (0, 0, 0, 0, 0, 0, 27),
    "bootfile/receipt": (0, 0, 0, 0, 0, 0, 18),
    "common/console": (0, 0, 0, 0, 0, 0, 11),
    "common/platform": (0, 0, 0, 0, 0, 0, 20),
    "datasets/folders": (0, 0, 0, 0, 0, 0, 23),
    "datasets/loaders": (0, 0, 0, 0, 0, 0, 16),
    "launch/data": (0, 0, 0, 0, 0, 0, 7),
    "launch/new": (0, 0, 0, 0, 0, 0, 25),
    "launch/platforms": (0, 0, 0, 0, 0, 0, 16),
    "launch/report": (0, 0, 0, 0, 0, 0, 18),
    "launch/transfer": (0, 0, 0, 0, 0, 0, 15),
}
# files in the list "not calm yet" of pyproject.toml
MOST_EXCEPTIONS = 1


@pytest.mark.parametrize("room", find_rooms())
def test_a_room_is_within_its_ceiling(room):
    *most, most_compact = CEILINGS.get(room, (*[0] * len(KINDS), MOST_COMPACT))
    measures = measure(find_rooms()[room])
    counts = [measures.places[kind] for kind in KINDS]
    for kind, count, ceiling in zip(KINDS, counts, most, strict=True):
        assert count <= ceiling, f"{room}: {kind}: {count}, more than {ceiling}"
        assert ceiling <= count * 1.1 + 3, f"{room}: {kind}: lower the ceiling to {count}"
    assert measures.compact <= most_compact, (
        f"{room}: {measures.compact:.1f} compact expressions in 1,000 lines"
    )


def test_rooms_and_files_with_exceptions_exist():
    assert CEILINGS.keys() <= find_rooms().keys()
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    exceptions = text.partition("# not calm yet")[2].partition("\n\n")[0]
    files = re.findall(r'^"(.+?)" = ', exceptions, re.MULTILINE)
    assert 0 < len(files) <= MOST_EXCEPTIONS
    assert [name for name in files if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize(
    "kind, text",
    [
        (NESTED, "a = 1 if b else 2 if c else 3"),
        (NESTED, "a = 1 if b else f'{2 if c else 3}'"),
        (MULTIPLIED, "text = 's' * (count != 1)"),
        (MULTIPLIED, "parts += [part] * is_new"),
        (MULTIPLIED, "lines = [line] * bool(line)"),
        (MULTIPLIED, "count = count + (not is_same)"),
        (MULTIPLIED, "count += first == last"),
        (TUPLE, "a, b = 1, []"),
        (TUPLE, "self.a = self.b = None"),
        (LAMBDA, "double = lambda x: 2 * x"),
        (LAMBDA, "run(lambda: None)"),
        (NAME, "for each in lines: pass"),
        (NAME, "def f(found): pass"),
        (SKIP, "f(a,  b)  # fmt: skip"),
    ],
)
def test_a_dense_place_is_counted(kind, text):
    assert [place.kind for place in find_places(text)] == [kind]


@pytest.mark.parametrize(
    "text",
    [
        "a = 1 if b else 2",
        "rows = [[0] * width, 'x' * count, a * b]",
        "a, b = b, a",
        "a, b = find()",
        "first = self.last = make()",
        "lines.sort(key=lambda line: line.step)",
        "TABLE = [\n  1,  2,\n]  # fmt: skip",
    ],
)
def test_a_plain_place_is_not_counted(text):
    assert find_places(text) == []


def test_comments_count_inside_functions_only():
    text = '# a file\ndef f():\n    # why\n    a = "#"  # when\n    return a  # fmt: skip\n'
    assert count_comments(text) == 2
