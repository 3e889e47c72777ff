"""Images with several labels: the lists, the loss, the score, and jobs/imagenet.py with them."""

import csv
import json
import signal

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

from bootfile.ground.errors import BadInput
from bootfile.receipt import receipt
from bootfile.receipt.recorded_run import Run
from bootfile.sampling.plan import Plan
from bootfile.sampling.sampler import BatchSampler
from common.compute.losses import BinaryCrossEntropy
from common.run.metrics import F1
from datasets.folders import image_folder, random_folder
from datasets.sampling import augment
from launch.data import samples
from launch.inference import predict, predictions, trained
from tests.conftest import interrupt, records, refused, run

NAMES = ("bright", "dark", "round")
JOB = ("jobs/imagenet.py", "--arch=shufflenet_v2_x0_5", "--image_size=32", "--warmup=0", "--print_freq=1",
       "--batch_size=64", "--lr=0.01", "--data_backend=threads", "--epochs=2", "--mixup=0.2",
       "--rand_augment=2,9")  # fmt: skip


def write_lists(root, change=lambda names: names) -> None:
    """Write lists for the generated images: image k has those labels whose bit of its class is set."""
    for split in ("train", "val"):
        lines = []
        for path in sorted((root / split).glob("*/*")):
            bits = int(path.parent.name.removeprefix("class_")) % 8
            names = change([name for place, name in enumerate(NAMES) if bits >> place & 1])
            lines.append(f"{path.relative_to(root)} {','.join(names) or ','}")
        (root / f"{split}.txt").write_text("\n".join(lines))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data") / "images"
    random_folder.make(str(root))
    write_lists(root)
    return root


def load(data, cache, split="train", **options):
    return image_folder.load(str(data), split, str(cache), log=lambda line: None, **options)


@pytest.mark.thorough
def test_a_list_gives_an_image_any_number_of_labels(data, tmp_path):
    index = load(data, tmp_path)
    assert index.classes == NAMES and index.labels.shape == (len(index), 3)
    for id in range(0, len(index), 50):
        bits = int(index.name(id).split("/")[1].removeprefix("class_")) % 8
        assert index.labels[id].tolist() == [bool(bits >> place & 1) for place in range(3)]
    assert (~index.labels.any(1)).any()
    again = load(data, tmp_path)  # from the cache
    assert np.array_equal(again.labels, index.labels) and again.fingerprint == index.fingerprint
    write_lists(data, lambda names: [str(NAMES.index(name)) for name in names])
    try:
        numbered = load(data, tmp_path)
        assert numbered.classes == ("0", "1", "2") and np.array_equal(numbered.labels, index.labels)
        write_lists(data, lambda names: [*names, "new"] if "dark" in names else names)
        with pytest.raises(BadInput, match=r"class 'new', .*train .*3 classes"):
            load(data, tmp_path, "val", classes=NAMES)
        write_lists(data, lambda names: [])
        with pytest.raises(BadInput, match="no image has a label"):
            load(data, tmp_path)
    finally:
        write_lists(data)


def test_what_such_lists_cannot_have_is_refused_before_the_first_step(data, tmp_path):
    job = (*JOB, f"--cache_dir={tmp_path}", f"--output_dir={tmp_path / 'out'}")
    assert "--best_metric acc" in refused(*job, f"--data_url={data}", "--loss=bce", "--best_metric=acc")
    for split in ("train", "val"):
        (tmp_path / split).symlink_to(data / split)
        (tmp_path / f"{split}.txt").write_text((data / f"{split}.txt").read_text())
    lines = (data / "train.txt").read_text().splitlines()
    one_each = "\n".join(f"{line.split()[0]} {NAMES[place % 3]}" for place, line in enumerate(lines))
    (tmp_path / "train.txt").write_text(one_each)
    line = refused(*job, f"--data_url={tmp_path}", "--loss=bce")
    assert f"{tmp_path}: " in line and "`path label,`" in line


def test_a_list_with_one_class_shows_who_has_it(data, tmp_path):
    """`launch data` names the labels of a step."""
    write_lists(data, lambda names: names[:1] and ["dark"])
    try:
        index = load(data, tmp_path)
    finally:
        write_lists(data)
    plan = Plan(index, BatchSampler(len(index), 64, 0, max_steps=1), augment.random_resized_crop)
    ids, labels, crops, *_ = next(iter(plan))
    record = np.zeros(1, receipt.RECORD)
    record["step"], record["sums"] = 1, receipt.batch_sums(ids, labels, crops, np.array([64])).view("u8")
    (tmp_path / receipt.FILE).write_bytes(record.tobytes())
    sampling = {"sampler": "BatchSampler", "samples": len(index), "global batch": 64, "seed": 0, "views": 1,
                "shuffle": True}  # fmt: skip
    start = {"step": 0, "environment": {"world size": 1}, "sampling": sampling}
    start["settings"] = {"epochs": 1, "first_image_size": None, "image_size": 32}
    (tmp_path / "starts.jsonl").write_text(json.dumps(start) + "\n")
    shown = samples.read_step(Run(str(tmp_path)), 1, index, False).columns["label"]
    assert shown == ["dark" if has else "" for has in labels[:, 0]] and {*shown} == {"dark", ""}


@pytest.mark.parametrize("classes", [3, 64, 70])
def test_a_receipt_covers_every_label(classes):
    labels = np.random.default_rng(0).random((4, classes)) < 0.3
    ids, ends = np.arange(4), np.array([4])
    sums = receipt.batch_sums(ids, labels, (), ends)
    seen = {sums.tobytes()}
    for row in range(4):
        for label in range(classes):
            other = labels.copy()
            other[row, label] ^= True
            changed = receipt.batch_sums(ids, other, (), ends)
            assert (changed[0, 0], changed[0, 2]) == (sums[0, 0], sums[0, 2])
            seen.add(changed.tobytes())
    assert len(seen) == 1 + 4 * classes


def test_the_loss_is_that_of_timm():
    timm = pytest.importorskip("timm.loss")
    torch.manual_seed(0)
    logits, labels = torch.randn(8, 5), torch.randint(5, (8,))
    for smoothing in (0.0, 0.1):
        ours, theirs = BinaryCrossEntropy(smoothing), timm.BinaryCrossEntropy(smoothing)
        torch.testing.assert_close(ours(logits, labels), theirs(logits, labels))
    several = torch.rand(8, 5) < 0.4
    torch.testing.assert_close(ours(logits, several), BinaryCrossEntropy()(logits, several * 0.9 + 0.02))
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, several.float())
    assert torch.equal(BinaryCrossEntropy()(logits, several), expected)


def test_the_score_is_that_of_scikit_learn_in_any_parts():
    torch.manual_seed(0)
    logits, targets = torch.randn(40, 4), torch.rand(40, 4) < torch.tensor([0.5, 0.2, 0.9, 0.1])
    metric = F1(4)
    sums = torch.stack([metric.sums(logits[part::3], targets[part::3]) for part in range(3)]).sum(0)
    assert metric.value(sums) == pytest.approx(f1_score(targets, logits > 0, average="macro"))
    labels = torch.randint(4, (40,))
    one_hot = torch.nn.functional.one_hot(labels, 4).bool()
    assert torch.equal(metric.sums(logits, labels), metric.sums(logits, one_hot))


@pytest.mark.thorough
def test_a_run_restarts_exactly_and_predicts(data, tmp_path, capsys):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    job = (*JOB, f"--data_url={data}", "--loss=bce")
    run(*job, f"--output_dir={whole}")
    options = (f"--output_dir={killed}", "--save_every=2", "--processes_per_node=2")
    interrupt(*job, *options, at="^epoch=1 step=3/", by=signal.SIGTERM)
    run(*job, *options)
    assert (whole / receipt.FILE).read_bytes() == (killed / receipt.FILE).read_bytes()
    shown = run("-m", "launch", "data", whole, "--step=1").stdout
    assert "  bright,dark,round  " in shown
    last = records(whole)[-1]
    assert {"val_loss", "val_f1", "val_count"} <= last.keys() and "val_acc" not in last
    assert json.loads((whole / "classes.json").read_text()) == list(NAMES)
    predict.main([str(whole), str(data / "val"), "--to", str(tmp_path / "found.csv")])
    with open(tmp_path / "found.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    network = trained.load(str(whole))
    _, _, first = next(
        predictions.predict(network, str(data / "val"), [rows[0]["path"]], [torch.device("cpu")])
    )
    assert [float(rows[0][f"probability_{rank}"]) for rank in (1, 2, 3)] == pytest.approx(
        sorted(first.tolist(), reverse=True), abs=1e-4
    )
    assert sum(first.tolist()) != pytest.approx(1, abs=1e-3)  # each class has its own probability
    assert "--loss ce" in run(*JOB, f"--data_url={data}", code=2).stderr
