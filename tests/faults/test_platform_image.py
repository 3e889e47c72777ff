"""pip can install the list of `pack` into an image with torch 2.1 and NumPy 1.26."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch.bundle.cli import pack
from tests.conftest import ROOT, environment, finish

LISTED = {
    "PIL", "boto3", "cv2", "hiredis", "jinja2", "psutil", "pyarrow", "redis", "simplejpeg",
    "sklearn", "tensorboard", "tqdm",
}  # fmt: skip
pytestmark = pytest.mark.thorough
IMAGE = ["torch==2.1.2", "torchvision==0.16.2", "numpy==1.26.4"]
IMPORT_ALL = """
import importlib, importlib.metadata, json, re, sys
plain = lambda name: re.sub(r"[-_.]+", "-", name).lower()
listed = {plain(re.match(r"[\\w.-]+", line)[0]) for line in open(sys.argv[1])}
for module, names in importlib.metadata.packages_distributions().items():
    if module.isidentifier() and listed & {*map(plain, names)}:
        importlib.import_module(module)
for module in sys.argv[2:]:  # Python 3.10 does not find those without a top_level.txt
    importlib.import_module(module)
import numpy, pyarrow.ipc, sklearn.datasets, torch, torch.utils.tensorboard, torchvision
assert torch.zeros(1).numpy().shape == (1,)
modules = {name.partition(".")[0] for name in sys.modules}
versions = {name: sys.modules[name].__version__ for name in ("torch", "torchvision", "numpy")}
print(json.dumps([versions, sorted(modules)]))
"""


@pytest.fixture(scope="module")
def image():
    """Return the environment with the packages of the image. `make clean` deletes it: it has 5 GB."""
    own = [sys.executable] * (sys.version_info < (3, 12))  # torch 2.1 does not support later versions
    found = next(iter(own), None) or shutil.which("python3.11") or shutil.which("python3.10")
    if not found:
        pytest.skip("torch 2.1 needs Python 3.10 or 3.11, which is not installed")
    folder = ROOT / ".venv-compat" / f"image-{Path(found).name}"
    if not (folder / "installed").exists():
        subprocess.run([found, "-m", "venv", "--clear", folder], check=True)
        result = _pip(folder / "bin" / "python", *IMAGE, TMPDIR=str(folder))  # pip unpacks 2.6 GB there
        if result.returncode:
            pytest.skip(f"the image cannot be installed here: {result.stderr.strip().splitlines()[-1]}")
        (folder / "installed").touch()
    return folder


@pytest.fixture(scope="module")
def python(image, tmp_path_factory):
    """Return the interpreter of an environment that sees the packages of the image, too."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([image / "bin" / "python", "-m", "venv", folder], check=True)
    packages = [next(place.glob("lib/python3*/site-packages")) for place in (image, folder)]
    (packages[1] / "image.pth").write_text(f"{packages[0]}\n")
    return folder / "bin" / "python"


def test_all_that_pack_lists_can_be_imported_and_a_pack_is_trained_on(python, tmp_path):
    folder = pack(str(ROOT / "jobs/imagenet.py"), str(tmp_path / "to"))
    packed = (Path(folder) / "pip-requirements.txt").read_text()
    whole = tmp_path / "all.txt"  # also what only some options need
    whole.write_text(re.sub(r"^# (.*?)  \(for: .*\)$", r"\1", packed, flags=re.MULTILINE))
    assert "#" in packed and "#" not in whole.read_text()
    result = _pip(python, "-r", whole)
    assert result.returncode == 0, result.stderr
    versions, modules = _run(python, "-c", IMPORT_ALL, whole, *sorted(LISTED))
    assert [f"{name}=={version.partition('+')[0]}" for name, version in versions.items()] == IMAGE
    assert {*modules} >= LISTED
    output = _run(
        python, f"{folder}/jobs/imagenet.py", "--custom_data=true", "--max_steps=2", "--arch=resnet18",
        "--image_size=32", "--batch_size=8", "--workers=1", f"--pack={tmp_path / 'pack'}",
        f"--output_dir={tmp_path / 'out'}", "--report_every=1",
    )  # fmt: skip
    assert " step=2/" in output and (tmp_path / "out" / "metrics.jsonl").exists()


def _pip(python, *arguments, **env):
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=900)


def _run(python, *command):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([python, *command], cwd=ROOT.parent, env=environment(), **pipes)
    output = finish(process, timeout=300).stdout
    return json.loads(output) if command[0] == "-c" else output
