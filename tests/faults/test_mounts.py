"""A job with data and results on a real mount is killed ten times, on each kind of mount."""

import pytest

from tests.real.mounts import KINDS
from tests.real.test_mounts import kill_and_continue, mounted, undisturbed

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("kind", KINDS)
def test_ten_kills(kind, whole, tmp_path):
    storage = mounted(kind, tmp_path / kind)
    try:
        kill_and_continue(storage, whole, 10)
    finally:
        storage.close()
