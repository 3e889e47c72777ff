import pytest

from datasets.folders import image_folder
from datasets.stores import connection
from tests.support import pictures
from tests.support.redis_server import patient  # noqa: F401


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Return the index of 40 images."""
    folder = pictures.make(tmp_path_factory.mktemp("images"))
    return image_folder.load(str(folder), "train", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(connection, "_PAUSE", 0.3)
