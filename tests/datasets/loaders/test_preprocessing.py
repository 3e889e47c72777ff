"""Mean, std, crop and interpolation are the model's own, in training, evaluation and prediction alike."""

import argparse
import json
import types

import numpy as np
import pytest
import torch
from PIL import Image

from bootfile.ground.errors import BadInput
from bootfile.sampling.plan import Plan
from bootfile.sampling.sampler import SequentialBatchSampler
from common.compute import classifiers
from datasets.folders import image_folder, random_folder, resize
from datasets.loaders import backends, image_folders, preprocessing
from datasets.sampling.augment import center_crop
from datasets.stores.files import FileStore
from launch.inference import trained
from tests.conftest import names, records, refused, run
from tests.support import pictures

CPU = torch.device("cpu")
NONE = dict.fromkeys(("mean", "std", "crop_share", "interpolation"))


def complete(arch, weights=None, **given):
    others = {"arch": arch, "weights": weights, "evaluate": False}
    return preprocessing.complete(argparse.Namespace(**NONE | others | given))


def test_a_network_without_weights_has_the_defaults():
    assert complete("resnet50") == NONE
    assert complete("resnet50", interpolation="bilinear", mean="0.485,0.456,0.406", crop_share=0.875) == NONE
    mean, std, share, interpolation = preprocessing.values(NONE)
    assert (mean[0], std[0], share, interpolation) == (0.485, 0.229, 0.875, "bilinear")


def test_published_weights_bring_their_own():
    assert complete("resnet50", "IMAGENET1K_V1") == NONE
    theirs = NONE | {"crop_share": 300 / 320, "interpolation": "bicubic"}
    assert complete("efficientnet_b3", "DEFAULT") == theirs
    assert complete("efficientnet_b3", "DEFAULT", crop_share=1.0)["crop_share"] == 1


def test_a_network_of_timm_brings_its_own():
    pytest.importorskip("timm")
    own = complete("timm:vit_tiny_patch16_224")
    assert own == {"mean": "0.5,0.5,0.5", "std": "0.5,0.5,0.5", "crop_share": 0.9, "interpolation": "bicubic"}
    assert preprocessing.values(own) == ((0.5,) * 3, (0.5,) * 3, 0.9, "bicubic")
    assert preprocessing.mean(complete("timm:mobilevit_s")["mean"]) == "0,0,0"
    assert complete("timm:volo_d5_448")["crop_share"] == 1


@pytest.mark.thorough
def test_weights_without_their_run_have_the_values_of_the_network(tmp_path):
    pytest.importorskip("timm")
    model = classifiers.build("timm:vit_tiny_patch16_224", 3, 32)
    torch.save(model.state_dict(), tmp_path / "best.pth")
    network = trained.load(str(tmp_path / "best.pth"), "timm:vit_tiny_patch16_224", 32)
    assert (network.mean[0], network.share, network.settings["interpolation"]) == (0.5, 0.9, resize.BICUBIC)


@pytest.mark.thorough
def test_bicubic_is_that_of_pillow_in_every_backend(tmp_path):
    index = image_folder.load(
        random_folder.make(str(tmp_path / "images")), "val", cache=str(tmp_path / "cache")
    )
    plan = Plan(index, SequentialBatchSampler(8, 8), center_crop, 40)
    sides = center_crop(index, np.arange(8), 0, 1)
    for backend in [
        name for name, why in backends.reasons(CPU).items() if why is None and name != "synthetic"
    ]:
        with backends.build(backend, FileStore(index), plan, CPU, 2, resize.BICUBIC) as loader:
            [(images, _)] = list(loader)
        pixels = pictures.to_pixels(images)
        for id in range(8):
            top, left, side = (int(each[id]) for each in sides[:3])
            box = Image.open(index.path(id)).crop((left, top, left + side, top + side))
            expected = torch.from_numpy(np.array(box.resize((40, 40), Image.Resampling.BICUBIC))).permute(
                2, 0, 1
            )
            assert (pixels[id].int() - expected.int()).abs().float().mean() < 2, backend


@pytest.mark.thorough
def test_evaluation_prediction_and_a_resume_use_those_of_the_run(tmp_path):
    job = ("jobs/imagenet.py", "--custom_data=true", "--arch=shufflenet_v2_x0_5", "--image_size=32",
           "--epochs=1", "--warmup=0", "--batch_size=64", "--max_steps=2", "--data_backend=threads",
           f"--cache_dir={tmp_path / 'cache'}")  # fmt: skip
    given = ("--mean=0.5,0.5,0.5", "--std=0.5,0.5,0.5", "--crop_share=0.95", "--interpolation=bicubic")
    run(*job, *given, f"--output_dir={tmp_path / 'run'}")
    [result] = [line for line in records(tmp_path / "run") if "val_loss" in line]
    weights = tmp_path / "run" / "best.pth"
    printed = run(*job, "--evaluate", f"--weights={weights}").stdout
    assert f"val_loss={result['val_loss']:g}" in printed
    error = refused(*job, "--evaluate", f"--weights={weights}", "--mean=0.4,0.5,0.5")
    assert "--mean 0.4,0.5,0.5: the weights were trained with 0.5,0.5,0.5" in error
    network = trained.load(str(weights))
    assert network.mean == network.std == (0.5, 0.5, 0.5) and network.share == 0.95
    assert network.settings["interpolation"] == resize.BICUBIC
    assert "interpolation" in refused(*job, *given[:3], f"--output_dir={tmp_path / 'run'}")


def test_a_pack_of_smaller_images_is_refused(tmp_path):
    for place in ("train/a/1", "train/b/2", "val/a/3", "val/b/4"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (300, 260)).save(tmp_path / f"{place}.png")
    job = ("jobs/imagenet.py", f"--data_url={tmp_path}", "--arch=shufflenet_v2_x0_5", "--image_size=288",
           "--batch_size=2", "--warmup=0", "--epochs=1", "--data_backend=threads",
           f"--pack={tmp_path / 'packs'}", f"--output_dir={tmp_path / 'out'}")  # fmt: skip
    assert names(refused(*job), "--image_size 288", "at most 256")


@pytest.mark.parametrize(
    "name, text", [("mean", "0.5,0.5"), ("std", "0,1,1"), ("mean", "2,1,1"), ("crop_share", "0")]
)
def test_values_that_cannot_be_are_refused(name, text):
    with pytest.raises(argparse.ArgumentTypeError):
        preprocessing.KINDS[name](text)


def test_those_of_a_file_of_weights_are_checked(tmp_path):
    start = {"step": 0, "settings": {"mean": "a,b,c"}, "environment": {}}
    (tmp_path / "starts.jsonl").write_text(json.dumps(start) + "\n")
    with pytest.raises(BadInput, match=r"starts\.jsonl: mean: 'a' is not a number"):
        complete("resnet18", str(tmp_path / "best.pth"))


def test_images_of_a_pack_that_would_be_enlarged_are_named_with_their_option():
    large = types.SimpleNamespace(widths=np.array([400, 300]), heights=np.array([400, 500]))
    image_folders._check_size("--image_size", 224, large, "pixels")
    with pytest.raises(BadInput, match=r"--val_image_size 288: pixels images .* at most 256 pixels"):
        image_folders._check_size("--val_image_size", 288, large, "pixels")
    small = types.SimpleNamespace(widths=np.array([40]), heights=np.array([500]))
    image_folders._check_size("--image_size", 288, small, "pixels")  # as small as its file
