"""With compat/alias in PYTHONPATH, the imports and calls of the five works run as they are printed."""

import re

import pytest
import torch

from bootfile.ground.errors import BadInput
from datasets.compat import dali_dataset
from datasets.compat.alias import dali, kspeeddataloader
from datasets.loaders import backends
from datasets.sampling.augment import random_resized_crop
from tests.conftest import ROOT, environment, run
from tests.support import pictures

PATH = environment(PYTHONPATH=f"{ROOT}:{ROOT / 'datasets/compat/alias'}")
needs_dali = pytest.mark.skipif(backends.reasons(torch.device("cpu"))["dali"] is not None, reason="no DALI")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return pictures.make(tmp_path_factory.mktemp("images"), 20, 9)


def printed(code, folder, tmp_path):
    (tmp_path / "script.py").write_text(
        f"traindir, valdir, data = {[f'{folder}/train', f'{folder}/val', str(folder)]}\n" + code
    )
    text = run(tmp_path / "script.py", env=PATH | {"HOME": str(tmp_path)}, cwd=tmp_path, fresh=True).stdout
    return re.sub("(train|val): of .* images .*\n", "", text)  # what is changed in the images


@pytest.mark.thorough
def test_kspeed_and_dpex(folder, tmp_path):
    code = """
import kspeed.utils.data.kspeeddataset as KSpeedDataset
from torchvision import transforms
workers, kspeed_iplist, transforms_list = 2, None, [transforms.ToTensor()]
train_dataset = KSpeedDataset.KSpeedImageFolder(
    traindir, None, workers, kspeed_iplist,
    "admin", "admin", transforms.Compose(transforms_list),
)
print(len(train_dataset), len(KSpeedDataset.KSpeedFolder(traindir).getBIN(train_dataset.samples[0][0])) > 0)

from Dpex import dataloader
from Dpex.dataloader import DpexDataLoader
training_data = list(range(20))
loader = dataloader.DpexDataLoader(
    training_data, distribute_mode=False, num_workers=0, batch_size=10, shuffle=True)
print(len(list(loader)), DpexDataLoader is dataloader.DpexDataLoader)
"""
    assert printed(code, folder, tmp_path).endswith("\n20 True\n2 True\n")


def test_the_loaders_of_kspeed_begin_at_their_epoch(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(dali_dataset, "CACHE_FOLDER", str(tmp_path))
    common = {"workers": 2, "crop_padding": 8}
    loader, steps = kspeeddataloader.get_kspeed_train_loader(str(folder), 32, 5, 3, start_epoch=1, **common)
    batches = list(loader)
    assert (loader.epoch, steps, len(batches)) == (2, 4, 4)
    assert {images.shape for images, _ in batches} == {(5, 3, 32, 32)}
    assert all(labels.shape == (5,) and labels.dtype == torch.int64 for _, labels in batches)
    assert loader.plan.index.split == "train" and loader.plan.augment.func is random_resized_crop
    loader.close()
    loader, steps = kspeeddataloader.get_kspeed_val_loader(str(folder), 32, 5, 3, True, **common)
    labels = torch.cat([labels for _, labels in loader])
    assert (loader.epoch, steps, loader.plan.index.split) == (1, 2, "val")
    assert loader.plan.augment.keywords == {"share": 32 / 40}
    assert labels.argmax(1).tolist() == loader.plan.index.labels.tolist() and (labels.sum(1) == 1).all()
    with pytest.raises(BadInput, match=r"bicubic.*--rand_augment"):
        kspeeddataloader.get_kspeed_val_loader(str(folder), 32, 5, 3, interpolation="bicubic")


@pytest.mark.parametrize(
    "options, backend",
    [({}, "dali-kspeed"), ({"kspeed": False}, "dali-gpu"), ({"kspeed": False, "dali_cpu": True}, "dali")],
)
def test_the_loaders_of_kspeed_with_dali_have_its_backend(options, backend):
    for split, get in (
        ("train", kspeeddataloader.get_dali_kspeed_train_loader),
        ("val", kspeeddataloader.get_dali_kspeed_val_loader),
    ):
        assert get(**options).args == (split, backend)


def test_the_pipelines_of_diving_into_dali_have_the_data_of_their_split(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(dali, "CACHE_FOLDER", str(tmp_path))
    common = {"num_threads": 2, "device_id": 0, "crop": 32, "local_rank": 1, "world_size": 2}
    options = {"min_crop_size": 0.5, "dali_cpu": True, "mean": (9,) * 3, "std": (9,) * 3}
    train = dali.HybridTrainPipe(8, data_dir=str(folder / "train"), **options, **common)
    val = dali.HybridValPipe(8, data_dir=str(folder / "val"), size=40, mean=(1,) * 3, std=(2,) * 3, **common)
    assert (train.plan.sampler.shuffle, val.plan.sampler.shuffle) == (True, False)
    assert (train.plan.sampler.global_batch, train.plan.sampler.rank) == (16, 1)
    assert train.plan.augment.keywords == {"scale": (0.5, 1.0)}
    assert val.plan.augment.keywords == {"share": 32 / 40}
    assert (train.backend, val.backend) == ("dali", "dali-gpu")
    # with dali_cpu the values of the iterator count
    built = []
    monkeypatch.setattr(dali.backends, "build", lambda *words, **options: built.append((words, options)))
    for pipe in (train, val):
        dali.DaliIteratorGPU(pipe, mean=(255,) * 3, std=(51,) * 3, fp16=True)._build(pipe.plan)
    assert built[0][1]["mean"] == [1] * 3 and built[0][1]["std"] == [51 / 255] * 3
    assert built[1][1]["mean"] == [1 / 255] * 3 and built[1][1]["std"] == [2 / 255] * 3
    assert {options["dtype"] for _, options in built} == {torch.float16}
    with pytest.raises(BadInput, match="size 31"):
        dali.HybridValPipe(8, data_dir=str(folder / "val"), size=31, **common)


@pytest.mark.thorough
@needs_dali
def test_the_loaders_of_kspeed(folder, tmp_path):
    code = """
from kspeeddataloader import *
get_train_loader = get_kspeed_train_loader
get_val_loader = get_kspeed_val_loader
for get in (
    get_train_loader, get_val_loader,
    get_dali_kspeed_train_loader(dali_cpu=True, kspeed=False),
    get_dali_kspeed_val_loader(dali_cpu=True, kspeed=False),
    get_dali_kspeed_train_loader(dali_cpu=True), get_dali_kspeed_val_loader(dali_cpu=True),
):
    loader, steps = get(data, 32, 5, 3, True, "bilinear", None, start_epoch=0, workers=2)
    batches = list(loader)
    assert len(batches) == len(loader) == steps and batches[0][1].shape == (5, 3)
    targets = sum(float(each.sum()) for _, each in batches)
    print(steps, sum(len(images) for images, _ in batches), targets)
"""
    assert printed(code, folder, tmp_path).splitlines() == ["4 20 20.0", "2 9 9.0"] * 3


@pytest.mark.thorough
@pytest.mark.parametrize("words", ["interpolation='bicubic'", "augmentation='autoaugment'"])
def test_what_the_loaders_of_kspeed_do_not_have(words, folder, tmp_path):
    code = f"""
from bootfile.ground.errors import BadInput
from kspeeddataloader import get_kspeed_train_loader
try:
    get_kspeed_train_loader(data, 32, 5, 3, {words})
except BadInput as error:
    print(error)
"""
    option = words.replace("'", "")
    assert option in printed(code, folder, tmp_path) and "--rand_augment" in printed(code, folder, tmp_path)


@pytest.mark.thorough
@needs_dali
def test_the_pipelines_of_diving_into_dali(folder, tmp_path):
    code = """
import importlib, dali
importlib.reload(dali)
from dali import HybridTrainPipe, HybridValPipe, DaliIteratorCPU, DaliIteratorGPU
common = {"batch_size": 8, "num_threads": 2, "device_id": 0, "crop": 32, "dali_cpu": True, "fp16": False,
          "mean": (0., 0., 0.), "std": (255., 255., 255.), "local_rank": 0, "world_size": 1}
train_pipe = HybridTrainPipe(data_dir=traindir, shuffle=True, min_crop_size=0.08, **common)
val_pipe = HybridValPipe(data_dir=valdir, size=40, shuffle=False, **common)
for pipe in (train_pipe, val_pipe):
    pipe.build()
    loader = DaliIteratorCPU(pipelines=pipe, size=20, fp16=False, mean=common["mean"], std=common["std"],
                             pin_memory=True)
    for epoch in range(2):
        batches = list(loader)
        loader.reset()
        images = batches[0][0]
        is_scaled = 0 <= images.min() < images.max() <= 1
        print(sum(len(images) for images, _ in batches), tuple(images.shape), bool(is_scaled))
"""
    code += """
common |= {"dali_cpu": False}
pipe = HybridTrainPipe(data_dir=traindir, **common)
pipe.backend = "dali"  # this machine may have no GPU
print(all(images.max() <= 1 for images, _ in DaliIteratorGPU(pipe, size=20)))
for size in ({}, {"size": 31}):
    try:
        HybridValPipe(data_dir=valdir, **common, **size)
    except ValueError as error:
        print(type(error).__name__)
"""
    *lines, is_scaled, first, second = printed(code, folder, tmp_path).splitlines()
    assert is_scaled == "True" and first == second == "BadInput"
    assert lines == [f"{count} (8, 3, 32, 32) True" for count in (20, 20, 9, 9)]
