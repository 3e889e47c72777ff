"""If a package cannot be imported, the error has the real reason and the install command."""

import functools
import importlib
import sys

import pytest

from bootfile.ground.errors import BadInput
from common.object_store.store import ObjectStore
from datasets import folders
from datasets.folders import images
from datasets.loaders.engines.dali import Dali
from datasets.loaders.ray import pool
from datasets.stores import connection, pack
from launch.platforms import service as modelarts
from tests.benchmarks import generated
from tests.conftest import run

REASON = "it was built for another NumPy"


@pytest.fixture
def broken(monkeypatch):
    """Make the import of a package fail with an error, also if it is imported already."""

    class Broken:
        error, package = None, None

        def find_spec(self, name, *_):
            if name.partition(".")[0] == self.package or name == self.package:
                raise self.error

    finder = Broken()

    def make(package, error):
        finder.package, finder.error = package, error
        for name in [*sys.modules]:
            if name == package or name.startswith(f"{package}."):
                monkeypatch.delitem(sys.modules, name)

    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    return make


def reload_images():
    """Return the module as a process has it that imports it now."""
    name = images.__name__
    del sys.modules[name]
    try:
        return importlib.import_module(name)
    finally:
        sys.modules[name] = images
        folders.images = images


USES = {
    "pyarrow": (lambda: pack._mapped("x"), "pyarrow"),
    "redis": (connection.load_redis, r"'redis\[hiredis\]'"),
    "boto3": (lambda: ObjectStore("s3://bucket"), "boto3"),
    "nvidia.dali": (lambda: Dali(None, 1), "nvidia-dali-cuda120"),
    "ray": (lambda: pool.connect("auto", 1), r'"ray>=2\.52"'),
    "huaweicloudsdkmodelarts": (lambda: modelarts.ModelArts("", "https://x", "p"), "huaweicloudsdkmodelarts"),
    "cv2": ("datasets.folders.resize", "opencv-python-headless"),
    "simplejpeg": (lambda: reload_images().inspect(b"\xff\xd8\xff"), "simplejpeg"),
    "pydantic": ("launch.platforms.config", "pydantic"),
    "jinja2": ("bootfile.console.page", "jinja2"),
    "matplotlib.figure": ("launch.report.charts", "matplotlib"),
}


@pytest.mark.parametrize("package", USES)
@pytest.mark.parametrize("kind", [ImportError, RuntimeError])
def test_the_reason_and_the_command(package, kind, broken, monkeypatch):
    broken(package, kind(f"{REASON}\n  File x"))
    use, named = USES[package]
    if isinstance(use, str):  # a module that imports it when it is imported itself
        monkeypatch.delitem(sys.modules, use, raising=False)
        use = functools.partial(importlib.import_module, use)
    with pytest.raises(BadInput, match=rf"\({kind.__name__}: {REASON} File x\): pip install {named}$"):
        use()


WITHOUT = """
import runpy, sys
sys.modules["simplejpeg"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_images_that_are_no_jpeg_files_need_no_simplejpeg(tmp_path):
    folder = generated.cifar_folder(str(tmp_path), 10)
    job = ("jobs/train.py", "--dataset=cifar10", f"--data_url={folder}", "--width=8", "--batch_size=50")
    command = ("-c", WITHOUT, *job, "--max_steps=1")
    run(*command, f"--output_dir={tmp_path / 'out'}")
