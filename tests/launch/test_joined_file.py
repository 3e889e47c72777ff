"""Modules of bootfile are joined in one file that imports none of them."""

import pytest

from launch.new import one_file

MODULES = {
    "bootfile/a/low.py": '"""Low."""\n\nimport os\nfrom typing import Any\n\nLIMIT = 3  # a comment\n',
    "bootfile/a/high.py": (
        '"""High."""\n\nfrom typing import NamedTuple\n\nimport numpy as np\n\n'
        "from bootfile.a.low import (\n    LIMIT,\n)\nfrom bootfile.a.middle import double\n\n\n"
        "def work():\n    return double(LIMIT), np, NamedTuple\n"
    ),
    "bootfile/a/middle.py": "from bootfile.a.low import LIMIT\n\n\ndef double(x):\n    return x * LIMIT\n",
}
JOINED = '''"""High."""

import os
from typing import Any, NamedTuple

import numpy as np


LIMIT = 3  # a comment


def double(x):
    return x * LIMIT


def work():
    return double(LIMIT), np, NamedTuple
'''


def test_modules_follow_those_that_they_import_and_stand_once():
    assert one_file.join("bootfile.a.high", MODULES.__getitem__) == JOINED


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("from bootfile.a import low\n", "line 1: .*import of names"),
        ("from bootfile.a.low import LIMIT as most\n", "line 1: .*import of names"),
        ("def f():\n    from bootfile.a.low import LIMIT\n", "line 2: .*import of names"),
        ("import bootfile.a.low\n", "line 1: expected `from bootfile"),
        ("X = 1\nimport os\n", "all imports at the beginning"),
        ("from bootfile.a.low import LIMIT\n\nLIMIT, X = 1, 2\n", "and bootfile.a.low define LIMIT"),
    ],
)
def test_what_cannot_be_joined_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        one_file.join("bootfile.a.other", (MODULES | {"bootfile/a/other.py": text}).__getitem__)
