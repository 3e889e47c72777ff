"""What the options of imagenet.py open: the splits, the plans of both loaders, the backend of the run."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bootfile.ground.errors import BadInput
from datasets.folders import image_folder
from datasets.loaders import image_folders
from datasets.sampling import augment
from datasets.stores import tiers
from tests.support import pictures

CPU = torch.device("cpu")
OPTIONS = {
    "data_url": "data", "val_share": 0.1, "splits": None, "custom_data": False, "data_backend": "threads",
    "workers": 2, "ray_address": "auto", "pack": None, "pack_form": "decoded", "cache": None,
    "cache_mode": "active", "cache_dir": None, "max_bad_images": 0.25, "class_weights": None, "mean": None,
    "std": None, "crop_share": None, "interpolation": None, "image_size": 32, "val_image_size": None,
    "first_image_size": None, "batch_size": 8, "seed": 3, "epochs": 4, "max_steps": None,
    "epoch_steps": None, "exact_shards": None, "evaluate": False, "training_only": False, "weights": None,
    "resume": "auto", "from_run": None, "arch": "resnet18",
}  # fmt: skip


def make_args(**given) -> SimpleNamespace:
    return SimpleNamespace(**OPTIONS | given)


@pytest.fixture
def log(tmp_path):
    output = SimpleNamespace(index_folder=str(tmp_path / "index"), folder=str(tmp_path), url=None)
    lines = []
    return SimpleNamespace(
        output=output, lines=lines, info=lines.append, print_data=lambda *sets: lines.append(sets)
    )


def _index(split: str, division: str = "", labels=None):
    labels = np.zeros(4, np.int64) if labels is None else labels
    return SimpleNamespace(
        split=split, classes=("a", "b"), division=division, labels=labels, describe=lambda: f"of {split}"
    )


@pytest.mark.parametrize(
    "given, splits",
    [({}, ["train", "val"]), ({"training_only": True}, ["train"]), ({"evaluate": True}, ["val"])],
)
def test_the_splits_that_a_job_needs(monkeypatch, log, given, splits):
    calls = {}

    def load(folder, split, **options):
        calls[split] = options
        return _index(split)

    monkeypatch.setattr(image_folder, "load", load)
    monkeypatch.setattr(image_folders, "_class_names", lambda *words: ("of the run",))
    indexes = image_folders._scan_splits(make_args(**given), "data", "cache", log, [], True)
    assert [index.split for index in indexes] == [*calls] == splits
    for options in calls.values():
        assert (options["val_share"], options["max_bad"], options["cache"]) == (0.1, 0.25, "cache")
    assert calls.get("train", {"least": 8})["least"] == 8 and "least" not in calls.get("val", {})
    if "val" in calls:
        assert calls["val"]["classes"] == (("of the run",) if "evaluate" in given else ("a", "b"))
    assert log.lines == [f"{split}: of {split}" for split in splits]


def test_splits_that_do_not_fit_are_refused(monkeypatch, log):
    sets = np.zeros((4, 2), bool)
    monkeypatch.setattr(
        image_folder,
        "load",
        lambda folder, split, **options: _index(split, labels=sets if split == "val" else None),
    )
    with pytest.raises(BadInput, match="those of train have one"):
        image_folders._scan_splits(make_args(), "data", "cache", log, [], True)
    monkeypatch.setattr(image_folder, "load", lambda folder, split, **options: _index(split, "by class"))
    with pytest.raises(BadInput, match=r"in the way of version 0\.31"):
        image_folders._scan_splits(make_args(), "data", "cache", log, [{}], True)
    image_folders._scan_splits(make_args(), "data", "cache", log, [{"division": "by class"}], True)


def test_the_run_whose_classes_count(monkeypatch, tmp_path):
    weights, checkpoint = tmp_path / "old/best.pth", tmp_path / "other/step_1.pt"
    for path in (weights, checkpoint):
        path.parent.mkdir()
        path.touch()
    known = {str(weights.parent): ["old"], str(checkpoint.parent): ["other"], "begun": ["from"]}
    monkeypatch.setattr(image_folders.records, "read_starts", lambda folder: known.get(folder, []))
    own: list = []
    monkeypatch.setattr(image_folders.starts, "read_output", lambda output: own)

    def read(**given):
        return image_folders._read_run(make_args(**given), None)

    assert read() == ([], True)
    assert read(weights=str(weights)) == (["old"], True), "fine-tuned"
    assert read(weights="published") == ([], True)
    assert read(resume=str(checkpoint)) == (["other"], False)
    assert read(from_run="begun") == ([], False)
    own.append("own")
    assert read() == (["own"], False) and read(resume="never") == ([], True)
    assert read(weights=str(weights)) == (["own"], False)
    assert read(weights=str(weights), evaluate=True) == (["old"], False)


@pytest.mark.parametrize(
    "name, given, backend, is_warned",
    [
        ("threads", {}, "threads", False), ("threads", {"resume": "never"}, "", False),
        ("threads", {"evaluate": True}, "", False), ("", {}, "", False), ("gone", {}, "", True),
    ],
)  # fmt: skip
def test_a_restart_has_the_backend_of_the_run(monkeypatch, log, capsys, name, given, backend, is_warned):
    monkeypatch.setattr(
        image_folders.starts,
        "read_output",
        lambda output: [{"data backend": "pytorch"}, {"data backend": name}],
    )
    monkeypatch.setattr(image_folders.backends, "rates", lambda *words, **options: {"pytorch": 9.0})
    monkeypatch.setattr(image_folders.backends, "choose", lambda rates: "measured")
    monkeypatch.setattr(image_folders.backends, "text", str)
    args = make_args(data_backend="auto", **given)
    assert image_folders._choose_backend(args, CPU, log, None, None) == (backend or "measured")
    assert ("warning: the run used --data_backend gone" in capsys.readouterr().out) == is_warned


@pytest.mark.parametrize(
    "given, message",
    [
        ({"data_backend": "kspeed"}, "--data_backend kspeed needs --cache URL or --pack"),
        ({"pack": "p", "cache": "redis://host"}, "--pack and --cache contradict"),
        ({"pack_form": "jpeg"}, "--pack_form jpeg: there is no pack"),
        ({"class_weights": "nowhere"}, "--class_weights nowhere: no such file"),
    ],
)
def test_options_of_stores_that_do_not_fit(log, tmp_path, monkeypatch, given, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=message):
        image_folders.open_stores(make_args(**given), CPU, log)


class _Named(SimpleNamespace):
    """The parts of an index with the names of its images."""

    def __len__(self) -> int:
        return len(self.labels)


def test_weights_of_images_are_those_of_their_names(tmp_path):
    names = ["b/2.jpg", "a/1.jpg", "a/x y.jpg"]
    bad = [("a/bad.jpg", 0, 0, "cut")]  # it is skipped, and may have a weight
    index = _Named(labels=np.zeros(3, np.int64), classes=("a", "b"), bad=bad, name=names.__getitem__)
    (tmp_path / "file").write_text("a/x y.jpg 3\na/bad.jpg 9\na/1.jpg 2\nb/2.jpg 1\n")
    assert image_folders.read_class_weights(str(tmp_path / "file"), index).tolist() == [1, 2, 3]
    (tmp_path / "file").write_text("a/x y.jpg 3\na/1.jpg 2\nb/2.jpg 1\nother.jpg 1\n")
    with pytest.raises(BadInput, match=r"image .*: other\.jpg"):
        image_folders.read_class_weights(str(tmp_path / "file"), index)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return pictures.make(tmp_path_factory.mktemp("images"), 20, 9)


@pytest.fixture
def open_loaders(folder, log, monkeypatch):
    """A function of options that opens the loaders of a folder, which are closed at the end."""
    opened = []
    monkeypatch.setattr(image_folders.endings, "at_success", lambda place, close: opened.append(close))

    def call(**given):
        args = make_args(data_url=str(folder), **given)
        stores = tiers.Stores(None, None, "active", log.info)
        indexes = image_folders.open_indexes(args, CPU, log)
        return indexes, image_folders.open_loaders(args, CPU, log, stores, indexes, eval_batch=4)

    yield call
    for close in opened:
        close()


def test_the_loaders_have_the_images_of_their_split(open_loaders, log):
    (train_index, val_index), (train, val) = open_loaders(val_image_size=40, exact_shards=2, max_steps=3)
    assert (len(train_index), len(val_index)) == (20, 9)
    assert train.plan.index is train_index and val.plan.index is val_index
    sampler = train.plan.sampler
    assert (sampler.global_batch, sampler.seed, sampler.total_steps, sampler.shards) == (8, 3, 3, 2)
    assert (train.plan.size, val.plan.size, val.plan.sampler.largest) == (32, 40, 4)
    assert train.plan.augment is augment.random_resized_crop
    assert isinstance(val.plan.augment, functools.partial) and val.plan.augment.func is augment.center_crop
    labels = torch.cat([labels for _, labels in val])
    assert labels.tolist() == val_index.labels.tolist(), "each image once, in its order"
    assert {len(images) for images, _ in train} == {4} and train.backend == "threads"
    assert log.lines[-1] == (train_index, val_index)


def test_the_loaders_of_an_evaluation_and_of_a_training_alone(open_loaders, log, tmp_path):
    (first, second), (train, val) = open_loaders(evaluate=True, weights=str(tmp_path / "none"))
    assert first is second is val.plan.index and len(first) == 9
    assert train.plan.sampler.global_batch == 1 and "data test=9" in log.lines[-1]
    (first, second), (train, val) = open_loaders(training_only=True)
    assert first is second is train.plan.index and len(first) == 20
    assert log.lines[-1] == (first, [])


def test_classes_are_drawn_equally_often(open_loaders):
    (index, _), (train, _) = open_loaders(class_weights="balanced")
    shares = np.diff(train.plan.sampler.shares, prepend=0)
    per_class = [shares[index.labels == label].sum() for label in range(3)]
    assert per_class == pytest.approx([1, 1, 1])
