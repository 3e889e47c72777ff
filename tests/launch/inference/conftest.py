"""Two trained runs for `predict` and `export`: generated images, and digits."""

import pytest

from datasets.folders import random_folder
from tests.conftest import QUICK, run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(output folder of imagenet.py, its images)."""
    root = tmp_path_factory.mktemp("trained")
    data = random_folder.make(str(root / "images"))
    run(
        "jobs/imagenet.py", "--arch=resnet18", "--image_size=32", "--data_backend=threads", "--batch_size=32",
        "--lr=0.02", "--warmup=0", "--epochs=3", f"--data_url={data}", f"--output_dir={root / 'out'}",
    )  # fmt: skip
    return root / "out", root / "images"


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The output folder of train.py."""
    output = tmp_path_factory.mktemp("digits")
    run("jobs/train.py", *QUICK, "--epochs=1", "--batch_size=240", "--lr=0.02",
        f"--output_dir={output}")  # fmt: skip
    return output
