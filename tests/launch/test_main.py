"""`python -m launch` lists its verbs, and names the replacement of what was removed."""

import re

import pytest

from common.ground.exits import BadInput
from launch.__main__ import REMOVED, VERBS, refuse_removed
from tests.conftest import run


@pytest.mark.parametrize(
    ("verb", "said"), [([], "usage: "), (["chekc"], "error: unknown command 'chekc'\nusage: ")]
)
def test_no_verb_or_an_unknown_one(verb, said):
    script = "import atexit, runpy, sys; atexit.register(lambda: print('torch' in sys.modules))\n"
    script += "runpy.run_module('launch', run_name='__main__', alter_sys=True)"
    result = run("-c", script, *verb, code=2, fresh=True)
    assert result.stderr.startswith(said)
    assert re.findall(r"^  (\w+) +\S", result.stderr, re.MULTILINE) == [*VERBS]
    assert result.stdout == "False\n", "a verb's module is imported only if the verb runs"


def test_what_was_removed_is_one_line():
    result = run("-m", "launch", "pack", "jobs/train.py", "--single_file=x", code=2)
    assert re.fullmatch(r"error: pack --single_file was removed: .*\n", result.stderr)
    for name, instead in REMOVED.items():
        verb, word = name.split(" ")
        with pytest.raises(BadInput, match=re.escape(f"{name} was removed: {instead}")):
            refuse_removed(verb, [word, "value"])
    refuse_removed("pack", ["job.py", "--", "--single_file"])
