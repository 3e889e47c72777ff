"""--class_weights: the weight of each image, and a job that draws its images with weights."""

import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pytest

from bootfile.ground.errors import BadInput
from bootfile.receipt import receipt
from datasets.folders import image_folder, random_folder
from datasets.loaders.image_folders import read_class_weights
from launch.data import cli
from tests.conftest import interrupt, records, run, run_ranks

JOB = ("jobs/imagenet.py", "--arch=shufflenet_v2_x0_5", "--image_size=32", "--warmup=0", "--report_every=1",
       "--batch_size=16", "--epochs=2", "--lr=0.01", "--save_every=2")  # fmt: skip
INDEX = SimpleNamespace(labels=np.array([0, 0, 0, 1]), classes=("cat", "sea gull"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a folder with 40 images of one class and 8 of another."""
    root = tmp_path_factory.mktemp("data")
    made = random_folder.make(str(root / "all"))
    for label, count in ((1, 40), (4, 8)):
        shutil.copytree(f"{made}/val/class_{label}", root / "two" / "val" / f"class_{label}")
        (root / "two" / "train" / f"class_{label}").mkdir(parents=True)
        for number in range(count):
            shutil.copy(
                f"{made}/train/class_{label}/{number:03}.jpg", root / "two" / "train" / f"class_{label}"
            )
    return root / "two"


def test_balanced_weights_and_those_of_a_file_of_classes(tmp_path):
    shares = read_class_weights("balanced", INDEX)
    assert shares[:3].sum() == pytest.approx(shares[3])
    for begin in ("", "\ufeff"):  # a program of Windows writes the second one
        (tmp_path / "file").write_text(f"{begin}sea gull 3\n\ncat 0.5\n", "utf-8")
        assert read_class_weights(str(tmp_path / "file"), INDEX).tolist() == [0.5, 0.5, 0.5, 3]


@pytest.mark.thorough
def test_weights_of_images_by_their_paths(data, tmp_path):
    index = image_folder.load(str(data), "train", cache=str(tmp_path / "cache"))
    lines = [f"{index.name(id)} {id}" for id in reversed(range(len(index)))]
    (tmp_path / "file").write_text("\n".join(lines))
    assert read_class_weights(str(tmp_path / "file"), index).tolist() == list(range(48))
    (tmp_path / "file").write_text("\n".join([*lines, "other.jpg 1"]))
    with pytest.raises(BadInput, match=r"image .*: other\.jpg"):
        read_class_weights(str(tmp_path / "file"), index)


@pytest.mark.parametrize("text, named", [
    ("cat 1", "1 of 2 class .*: sea gull"),
    ("cat x\nsea gull 1", ": cat x: "),
    ("cat", ": cat: "),
    ("cat 1\nsea gull 1\ndog 1", "class .*: dog"),
    ("cat 1\nsea gull 1\ncat 2", ": cat 2: "),
])  # fmt: skip
def test_a_file_of_weights_that_is_not_complete_is_refused(text, named, tmp_path):
    (tmp_path / "file").write_text(text)
    with pytest.raises(BadInput, match=named):
        read_class_weights(str(tmp_path / "file"), INDEX)


@pytest.mark.thorough
def test_a_weighted_job_restarts_exactly_and_is_equal_on_two_processes(data, tmp_path):
    job = (*JOB, f"--data_url={data}", "--class_weights=balanced", "--best_metric=class_acc",
           "--trivial_augment", f"--cache_dir={tmp_path / 'cache'}")  # fmt: skip
    run(*job, "--data_backend=threads", f"--output_dir={tmp_path / 'whole'}")
    killed = (*job, "--data_backend=pytorch", "--workers=1", f"--output_dir={tmp_path / 'killed'}")
    interrupt(*killed, at="^epoch=2 step=4/", by=signal.SIGTERM)
    run_ranks(*killed)
    one, two = ((tmp_path / name / receipt.FILE).read_bytes() for name in ("whole", "killed"))
    assert one == two
    evaluated = [line for line in records(tmp_path / "whole") if "val_class_acc" in line]
    assert len(evaluated) == 2
    plain = [word for word in job if not word.startswith("--class_weights")]
    refused = run(*plain, "--data_backend=threads", f"--output_dir={tmp_path / 'whole'}", code=2)
    assert "its training data is" in refused.stderr
    assert "best='top5'" in run(*job, "--best_metric=top5", code=2).stderr
    with pytest.raises(BadInput, match="with weights: expected --step"):
        cli.main([str(tmp_path / "whole"), "--sample", "0"])
    assert cli.main([str(tmp_path / "killed"), "--step", "6"]) == 0
