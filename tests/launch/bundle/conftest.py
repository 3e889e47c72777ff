import pytest

from tests.support.packed import tree


@pytest.fixture
def mine(tmp_path):
    """Return a folder with a script, and with a module and a file that it needs."""
    job = "import base\nprint(base.ZERO, open('words/list.txt').read())\n"
    return tree(tmp_path / "mine", {"job.py": job, "base.py": "ZERO = 0\n", "words/list.txt": "words"})
