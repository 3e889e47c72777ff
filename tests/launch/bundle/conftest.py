import pytest

from tests.support.packed import script_folder


@pytest.fixture
def mine(tmp_path):
    """Return a folder with a script, and with a module and a file that it needs."""
    return script_folder(tmp_path)
