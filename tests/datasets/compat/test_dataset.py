"""`Dataset` works with every engine: train, validate, reset."""

import hashlib
from collections import Counter

import psutil
import pytest
import torch
from PIL import Image

from bootfile.ground.errors import BadInput
from bootfile.processes import ranks
from bootfile.sampling.plan import Plan
from bootfile.sampling.sampler import WholeBatchSampler
from datasets.compat.dali_dataset import Dataset
from datasets.folders import image_folder
from datasets.loaders import backends
from datasets.sampling.augment import random_resized_crop
from datasets.stores.files import FileStore
from tests.conftest import ROOT, run

TRAIN, VAL, CLASSES = 50, 23, 5
MISSING = backends.reasons(torch.device("cpu"))["dali"]
ENGINES = [
    pytest.param({"use_dali": False}, id="torchvision"),
    pytest.param({"use_dali": True}, id="dali", marks=pytest.mark.skipif(bool(MISSING), reason=str(MISSING))),
    pytest.param({"backend": "threads"}, id="threads"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder of grey squares. The brightness identifies an image, whatever is cropped from it."""
    root = tmp_path_factory.mktemp("images")
    for split, count in (("train", TRAIN), ("val", VAL)):
        for number in range(count):
            target = root / split / f"class_{number % CLASSES}"
            target.mkdir(parents=True, exist_ok=True)
            image = Image.new("RGB", (60 + number, 70), (5 * number,) * 3)
            image.save(target / f"{number:02}.jpg", quality=100)
    return root


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


def dataset_of(folder, cache, batch_size=8, **options) -> Dataset:
    options = {"size": 32, "val_size": 40, "workers": 2, "seed": 3, "cache_dir": cache} | options
    options |= {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    return Dataset(str(folder), batch_size, **options)


def seen(loader) -> tuple[list[int], Counter]:
    """Return the sizes of the batches, and the number of times of each (image, label)."""
    sizes, images_seen = [], Counter()
    for images, labels in loader:
        assert (
            images.shape[1:] == (3, 32, 32) and images.dtype == torch.float32 and labels.dtype == torch.int64
        )
        sizes.append(len(images))
        numbers = (images.mean(dim=(1, 2, 3)) / 5).round().int().tolist()
        images_seen.update(zip(numbers, labels.tolist(), strict=True))
    return sizes, images_seen


ONCE = Counter((number, number % CLASSES) for number in range(VAL))


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ENGINES)
def test_epochs_with_everything_that_may_happen_between_them(engine, folder, cache):
    dataset = dataset_of(folder, cache, val_batch_size=9, **engine)
    try:
        assert (dataset.get_nb_train(), dataset.get_nb_val(), dataset.get_nb_classes()) == (
            TRAIN,
            VAL,
            CLASSES,
        )
        orders = []
        for batch_size, calls in (
            (8, ("reset", "prep_for_val")),
            (7, ("prep_for_val", "reset", "set")),
            (50, ("set", "reset", "reset")),
            (16, ("prep_for_val", "prep_for_val", "set")),
        ):
            for call in calls:
                if call == "set":
                    dataset.set_train_batch_size(batch_size)
                else:
                    getattr(dataset, call)()
            if "set" not in calls:
                dataset.set_train_batch_size(batch_size)
            for _ in range(2):
                loader = dataset.get_train_loader()
                sizes, images = seen(loader)
                assert sizes == [batch_size] * (TRAIN // batch_size) == [batch_size] * len(loader)
                assert max(images.values()) == 1 and all(label == n % CLASSES for n, label in images)
                orders.append(images)
                sizes, images = seen(dataset.get_val_loader())
                assert sizes == [9, 9, 5] and images == ONCE
        assert dataset.get_train_loader().epoch == 8
        assert len({tuple(sorted(order)) for order in orders if sum(order.values()) < TRAIN}) > 4, (
            "it shuffles"
        )
    finally:
        dataset.close()


@pytest.mark.parametrize("engine", ENGINES[:2])
def test_the_calls_that_the_article_prints(engine, folder, monkeypatch, tmp_path):
    """Dataset(data_dir, batch_size, val_batch_size, workers, use_dali, dali_cpu, fp16) works."""
    monkeypatch.setenv("HOME", str(tmp_path))
    data_dir, batch_size, val_batch_size, workers = str(folder), 8, 9, 2
    use_dali, dali_cpu, fp16 = engine["use_dali"], True, True
    dataset = Dataset(data_dir,
                      batch_size,
                      val_batch_size,
                      workers,
                      use_dali,
                      dali_cpu,
                      fp16)  # fmt: skip
    assert dataset.backend == ("dali" if use_dali else "pytorch")
    train_loader = dataset.get_train_loader()
    val_loader = dataset.get_val_loader()
    images, labels = next(iter(train_loader))
    assert images.shape == (8, 3, 224, 224) and images.dtype == torch.float16 and labels.shape == (8,)
    dataset.set_train_batch_size(5)
    assert [len(labels) for _, labels in train_loader] == [5] * 10
    dataset.prep_for_val()
    assert [len(labels) for _, labels in val_loader] == [9, 9, 5]
    dataset.reset()
    dataset.close()


def _receipts(dataset) -> tuple[list, list]:
    train, val = dataset.get_train_loader(), dataset.get_val_loader()
    for loader in (train, val):
        for _ in loader:
            pass
    return train.receipt.take().tolist(), val.receipt.take().tolist()


def test_every_engine_delivers_the_same(folder, cache):
    found = []
    for case in ENGINES:
        if case.id == "dali" and MISSING:
            continue
        dataset = dataset_of(folder, cache, **case.values[0])
        found.append(_receipts(dataset))
        dataset.close()
    assert len(found) >= 2 and all(receipts == found[0] for receipts in found)


def test_it_goes_on_in_the_middle_of_an_epoch(folder, cache):
    dataset = dataset_of(folder, cache, backend="threads")
    loader = dataset.get_train_loader()
    loader.set_epoch(4)
    expected = [labels.tolist() for _, labels in loader]
    for step, _ in enumerate(loader, start=1):
        if step == 2:
            break
    assert (loader.epoch, loader.step) == (5, 2)
    loader.set_epoch(4, 2)
    assert [labels.tolist() for _, labels in loader] == expected[2:]
    assert (loader.epoch, loader.step) == (4, len(loader))
    assert len(list(loader)) == len(loader) and loader.epoch == 5
    dataset.close()


def test_two_ranks_share_an_epoch(folder, cache):
    options = {"val_batch_size": 4, "backend": "threads"}
    whole = dataset_of(folder, cache, 10, **options)
    parts = [dataset_of(folder, cache, 5, world_size=2, rank=rank, **options) for rank in (0, 1)]
    steps = [[labels.tolist() for _, labels in part.get_train_loader()] for part in parts]
    assert [a + b for a, b in zip(*steps, strict=True)] == [y.tolist() for _, y in whole.get_train_loader()]
    images = [seen(part.get_val_loader())[1] for part in parts]
    assert images[0] + images[1] == ONCE
    for dataset in (whole, *parts):
        dataset.close()


def test_the_rank_is_that_of_the_process_group(folder, cache, monkeypatch):
    monkeypatch.setattr(ranks, "is_initialized", lambda: True)
    monkeypatch.setattr(ranks, "rank", lambda: 1)
    options = {"batch_size": 5, "world_size": 2, "backend": "threads"}
    found, expected = (dataset_of(folder, cache, **options, **rank) for rank in ({}, {"rank": 1}))
    assert _receipts(found) == _receipts(expected)
    found.close()
    expected.close()


def test_precision_and_the_two_scales_of_mean_and_std(folder, cache):
    expected = None
    for options in (
        {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.25, 0.3)},
        {"mean": (102.0, 127.5, 153.0), "std": (51.0, 63.75, 76.5)},
        {"mean": (102.0, 127.5, 153.0), "std": (51.0, 63.75, 76.5), "fp16": True, "pin_memory": False},
    ):
        dataset = Dataset(
            str(folder), 8, size=32, val_size=32, workers=2, backend="threads", cache_dir=cache, **options
        )
        images = torch.cat([images for images, _ in dataset.get_val_loader()])
        assert images.dtype == (torch.float16 if options.get("fp16") else torch.float32)
        expected = images if expected is None else expected
        torch.testing.assert_close(
            images.float(), expected, rtol=0, atol=4e-3 if options.get("fp16") else 1e-5
        )
        dataset.close()


def test_validation_gives_back_what_it_took(folder, cache):
    others = set(psutil.Process().children())  # of the tests before

    def workers() -> set[psutil.Process]:
        return set(psutil.Process().children(recursive=True)) - others

    dataset = dataset_of(folder, cache)
    seen(dataset.get_train_loader())
    before = workers()
    dataset.prep_for_val()
    seen(dataset.get_val_loader())
    psutil.wait_procs(workers() - before, timeout=60)
    assert workers() == before
    dataset.prep_for_val()
    dataset.close()
    psutil.wait_procs(before, timeout=60)
    assert not before & workers()


@pytest.mark.skipif(bool(MISSING), reason=str(MISSING))
def test_a_rank_may_have_no_sample_of_the_last_batch(folder, cache):
    """As with HybridTrainPipe, whose epochs have all samples. DALI cannot run an empty batch."""
    index = image_folder.load(str(folder), "val", cache)
    order = WholeBatchSampler(VAL, VAL - 1, 0, rank=1, world_size=2)
    plan = Plan(index, order, random_resized_crop, 32)
    with backends.build("dali", FileStore(index), plan, torch.device("cpu"), 2) as loader:
        for _ in range(2):
            assert [len(images) for images, _ in loader] == [11, 0]


# wrong use


def test_a_training_that_a_former_version_divided_in_another_way_is_refused(folder, tmp_path):
    """0.55.0 named its index by the folder and the share."""
    classes = str(folder / "train")
    digest = hashlib.blake2b(f"{classes}\0000.1".encode(), digest_size=6).hexdigest()
    (tmp_path / f"train-{digest}").mkdir()
    with pytest.raises(BadInput, match=f"7fefafdc.*{digest}"):
        dataset_of(classes, str(tmp_path))
    (tmp_path / f"train-{digest}").rmdir()
    dataset_of(classes, str(tmp_path)).close()


@pytest.mark.parametrize(("options", "reason"), [
    ({"batch_size": 0}, "batch_size 0 is not a number above 0"),
    ({"batch_size": 51}, r"\b51 is larger .*\(50 samples\)"),
    ({"workers": 0}, "workers 0"),
    ({"min_crop_size": 1.5}, "min_crop_size 1.5"),
    ({"size": 64, "val_size": 40}, "val_size 40 is smaller than size 64"),
    ({"world_size": 2}, "needs a rank"),
    ({"world_size": 2, "rank": 2}, r"rank 2 is not in 0\.\.1"),
    ({"backend": "fast"}, "data_backend fast"),
    ({"val_batch_size": 0}, "val_batch_size 0"),
    ({"backend": "threads", "use_dali": True}, "use_dali=True and backend='threads' contradict"),
    pytest.param(
        {"use_dali": True, "dali_cpu": False},
        "dali-gpu: it needs a GPU",
        marks=pytest.mark.skipif(torch.cuda.is_available() or bool(MISSING), reason="a GPU, or no DALI"),
    ),
])  # fmt: skip
def test_bad_arguments(options, reason, folder, cache):
    with pytest.raises(BadInput, match=reason):
        dataset_of(folder, cache, **options)


# thirty epochs

SOAK = """
import sys
sys.path.insert(0, {root!r})
import psutil
from datasets.compat.dali_dataset import Dataset

def used():
    own = psutil.Process()
    return sum(each.memory_full_info().pss for each in [own, *own.children(recursive=True)])

dataset = Dataset(
    sys.argv[1], 10, size=64, val_batch_size=9, val_size=72, workers=2, cache_dir=sys.argv[2],
    use_dali=True,
)
for epoch in range(30):
    for _ in dataset.get_train_loader():
        pass
    dataset.prep_for_val()
    for _ in dataset.get_val_loader():
        pass
    dataset.reset()
    print(used(), flush=True)
dataset.close()
"""


@pytest.mark.thorough
@pytest.mark.skipif(bool(MISSING), reason=str(MISSING))
def test_memory_of_thirty_epochs(folder, cache):
    printed = run("-c", SOAK.format(root=str(ROOT)), folder, cache, fresh=True).stdout
    used = [int(line) for line in printed.splitlines() if line[0].isdigit()]
    assert len(used) == 30
    assert max(used[-5:]) < 1.08 * max(used[1:6])  # DALI's own buffers grew by up to 4.9 % of 420 MB
