"""A run whose validation set was changed between two starts does not compare the scores of two sets."""

import json
import random

import pytest
import torch
from PIL import Image

from tests.conftest import records, run, run_ranks
from tests.jobs.test_train_own import write_job

IMAGES = ("jobs/imagenet.py", "--arch=shufflenet_v2_x0_5", "--image_size=32", "--warmup=0", "--batch_size=8",
          "--data_backend=threads")  # fmt: skip
CHANGED = "warning: the validation set "


def draw(folder, count: int, seed: int) -> None:
    """Write images of two classes."""
    draws = random.Random(seed)
    for name in ("apple", "sky"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            colour = tuple(draws.randrange(256) for _ in range(3))
            Image.new("RGB", (40, 40), colour).save(folder / name / f"{number}.png")


@pytest.mark.thorough
def test_a_changed_folder_of_images_is_named_and_best_begins_again(tmp_path):
    draw(tmp_path / "data" / "train", 4, 1)
    draw(tmp_path / "data" / "val", 2, 2)
    job = (*IMAGES, f"--data_url={tmp_path / 'data'}", f"--output_dir={tmp_path / 'out'}")
    run(*job, "--epochs=1")
    draw(tmp_path / "data" / "val", 3, 3)
    assert run(*job, "--epochs=2").stdout.count(CHANGED) == 1
    check_best(tmp_path / "out", first=1)


def check_best(output, first: int) -> None:
    """Check that the best score of the newest checkpoint is the best since step `first`."""
    lines = [line for line in records(output) if "val_loss" in line and line["step"] >= first]
    scores = [line.get("val_acc", -line.get("val_mae", 0.0)) for line in lines]
    newest = max((output / "checkpoints").glob("*.pt"), key=lambda path: int(path.stem[5:]))
    state = torch.load(newest, weights_only=True)
    assert state["best"] == pytest.approx(max(scores[:-1]))  # saved before its own evaluation
    assert len(state["validation_data"]) == 32


DATA = """
    import functools

    from bootfile.loaders.map_style import map_style_loader

    # - train_set, test_set = image_set.load(args.dataset, args.data_url, args.custom_data)
    table = torch.arange(240.0).sin().reshape(24, 10)
    answers = torch.load({answers!r})
    train_set = torch.utils.data.TensorDataset(table, table.sum(1))
    test_set = torch.utils.data.TensorDataset(table[:8], answers)
    make_loader = functools.partial(map_style_loader, workers=args.workers, collate_fn=None)
    """


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 2])
def test_changed_labels_of_an_own_data_set_are_named_and_best_begins_again(tmp_path, ranks):
    answers = tmp_path / "answers.pt"
    torch.save(torch.zeros(8), answers)
    job = write_job(tmp_path / "job", (DATA.format(answers=str(answers)),), distributed=ranks > 1)
    command = (job, "--batch_size=12", "--lr=0.01", "--workers=0", f"--output_dir={tmp_path / 'out'}")

    def train(epochs: int) -> str:
        return run_ranks(*command, f"--epochs={epochs}", ranks=ranks)[0].stdout

    train(1)
    assert "validation set" not in train(2)
    torch.save(torch.full((8,), 9.0), answers)  # the error is larger than any before
    assert train(4).count(CHANGED) == 1
    check_best(tmp_path / "out", first=4)
    assert "validation set" not in train(5)


LISTED = """
    import functools, json

    from bootfile.loaders.map_style import map_style_loader

    class Listed(torch.utils.data.Dataset):
        # 64 of 200 items are read at the start: number 1 is none of them
        def __init__(self, labels):
            self.labels = labels
        def __len__(self):
            return len(self.labels)
        def __getitem__(self, id):
            return torch.full((10,), id / 200), torch.tensor(float(self.labels[f"{{id}}.jpg"]))

    # - train_set, test_set = image_set.load(args.dataset, args.data_url, args.custom_data)
    labels = json.load(open({labels!r}))
    train_set = Listed(labels["train"])
    test_set = Listed(labels["val"])
    make_loader = functools.partial(map_style_loader, workers=args.workers, collate_fn=None)
    """


@pytest.mark.thorough
def test_a_label_in_a_dictionary_is_seen(tmp_path):
    labels = {name: {f"{id}.jpg": "0" for id in range(200)} for name in ("train", "val")}
    path = tmp_path / "labels.json"
    path.write_text(json.dumps(labels))
    job = write_job(tmp_path / "job", (LISTED.format(labels=str(path)),), distributed=False)
    command = (job, "--batch_size=100", "--lr=0.01", "--workers=0", f"--output_dir={tmp_path / 'out'}")
    run(*command, "--epochs=1")
    labels["val"]["1.jpg"] = "9"
    path.write_text(json.dumps(labels))
    assert run(*command, "--epochs=2").stdout.count(CHANGED) == 1
    labels["train"]["1.jpg"] = "9"
    path.write_text(json.dumps(labels))
    assert "its list of training samples is" in run(*command, "--epochs=3", code=2).stderr
