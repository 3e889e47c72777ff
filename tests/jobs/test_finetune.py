"""jobs/imagenet.py fine-tunes: other classes, a frozen backbone, AdamW, clipping, early stopping."""

import hashlib
import shutil
import signal

import pytest
import torch

from bootfile.ground.errors import BadInput
from common.checkpoint import weights
from common.compute import classifiers, networks, optimizers
from datasets.folders import random_folder
from tests.conftest import interrupt, names, records, run

ARCH = "shufflenet_v2_x0_5"
JOB = ("jobs/imagenet.py", f"--arch={ARCH}", "--image_size=32", "--data_backend=threads", "--warmup=0",
       "--report_every=1", "--batch_size=64")  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a folder with three of the generated classes, 192 training images."""
    root = tmp_path_factory.mktemp("data")
    made = random_folder.make(str(root / "all"))
    for split in ("train", "val"):
        for label in (1, 4, 7):
            shutil.copytree(f"{made}/{split}/class_{label}", root / "three" / split / f"class_{label}")
    return root / "three"


def test_a_frozen_backbone_on_other_classes_restarts_exactly_and_ends_early(data, tmp_path):
    """With this small learning rate, no epoch is better than the first, so the fourth is the last."""
    torch.save(classifiers.build(ARCH, 10, 32).state_dict(), tmp_path / "ten.pth")
    arguments = (
        *JOB, f"--data_url={data}", f"--weights={tmp_path / 'ten.pth'}", "--freeze", "--optimizer=adamw",
        "--lr=1e-9", "--clip_grad=0.5", "--accumulate=2", "--early_stopping=3", "--epochs=9",
    )  # fmt: skip
    printed = run(*arguments, f"--output_dir={tmp_path / 'whole'}").stdout
    assert names(printed, "shape: fc.weight [10, 1024]", "[3, 1024]")
    assert names(printed, "stopped early: 3 evaluations")
    interrupt(*arguments, f"--output_dir={tmp_path / 'killed'}", at="^epoch=3 step=7/", by=signal.SIGTERM)
    run(*arguments, f"--output_dir={tmp_path / 'killed'}")
    assert [line["step"] for line in records(tmp_path / "killed") if "val_acc" in line] == [3, 6, 9, 12]
    one, other = (
        torch.load(tmp_path / name / "epoch_4.pth", weights_only=True) for name in ("whole", "killed")
    )
    given = torch.load(tmp_path / "ten.pth", weights_only=True)
    assert all(torch.equal(one[name], other[name]) for name in one)
    changed = {name for name in one if name in given and not torch.equal(one[name], given[name])}
    assert changed == {"fc.weight", "fc.bias"}


@pytest.mark.thorough
def test_a_run_that_ends_within_an_epoch_keeps_its_weights(data, tmp_path):
    """No second evaluation is better than the first: the run ends after step 2 of 3."""
    job = (*JOB, f"--data_url={data}", "--lr=1e-12", "--epochs=2", "--evaluate_every=1", "--early_stopping=1",
           "--epoch_weights=false", f"--output_dir={tmp_path}")  # fmt: skip
    run(*job)
    assert [path.name for path in tmp_path.glob("checkpoints/*.pt")] == ["step_2.pt"]
    assert "stopped early" in run(*job).stdout
    assert [line["step"] for line in records(tmp_path) if "val_acc" in line] == [1, 2]


def test_the_head_of_a_frozen_network_learns_and_its_statistics_stay():
    model = classifiers.build("resnet18", 3, 32)
    classifiers.freeze(model, "resnet18", 32)
    assert {name for name, each in model.named_parameters() if each.requires_grad} == {"fc.weight", "fc.bias"}
    average = torch.optim.swa_utils.AveragedModel(model)  # a deep copy
    for network in (model.train(), average.train().module):
        before = network.bn1.running_mean.clone()
        network(torch.randn(4, 3, 32, 32)).sum().backward()
        assert torch.equal(network.bn1.running_mean, before) and not network.bn1.training and network.training
    assert model.conv1.weight.grad is None and model.fc.weight.grad is not None


def test_gradients_are_clipped():
    model = torch.nn.Linear(3, 2)
    model(torch.full((4, 3), 100.0)).sum().backward()
    args = type("Args", (), {"clip_grad": 0.5})
    optimizers.clip(args, model)
    norm = torch.stack([each.grad.norm() for each in model.parameters()]).norm()
    assert float(norm) == pytest.approx(0.5, rel=1e-4)


def test_published_weights_come_from_the_cache_or_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    network = classifiers.build("resnet18", 1000, 32)
    cache = tmp_path / "hub" / "checkpoints"
    cache.mkdir(parents=True)
    torch.save(network.state_dict(), cache / "new.pth")
    digest = hashlib.sha256((cache / "new.pth").read_bytes()).hexdigest()[:8]
    (cache / "new.pth").rename(cache / f"resnet18-{digest}.pth")
    entry = type("Weights", (), {"url": f"http://127.0.0.1:9/resnet18-{digest}.pth"})
    members = type("Members", (dict,), {"__members__": {"IMAGENET1K_V1": entry}})
    monkeypatch.setattr(weights, "published_of", lambda arch: members(DEFAULT=entry, IMAGENET1K_V1=entry))
    assert torch.equal(weights.read_published("resnet18", "DEFAULT")["fc.bias"], network.fc.bias)
    assert weights.is_published("resnet18", "DEFAULT") and not weights.is_published(None, "DEFAULT")
    assert not weights.is_published("resnet18", "best.pth")
    weights.check_published("resnet18", "IMAGENET1K_V1")
    with pytest.raises(BadInput, match="--weights NONE: no such file; resnet18 has DEFAULT, IMAGENET"):
        weights.check_published("resnet18", "NONE")
    with open(cache / f"resnet18-{digest}.pth", "ab") as file:
        file.write(b"x")
    with pytest.raises(BadInput, match=rf"resnet18-{digest}\.pth .*damaged.* sha256 .*{digest}"):
        weights.read_published("resnet18", "DEFAULT")
    (cache / f"resnet18-{digest}.pth").unlink()
    with pytest.raises(
        BadInput, match=r"--weights DEFAULT .*resnet18 .*not in the cache .*cannot .*download"
    ):
        weights.read_published("resnet18", "DEFAULT")


def test_networks_of_timm():
    pytest.importorskip("timm")
    assert networks.arch("timm:resnet18") == "timm:resnet18"
    assert classifiers.build("timm:resnet18", 3, 32)(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
    assert classifiers.build("timm:vit_tiny_patch16_224", 3, 64)(torch.zeros(2, 3, 64, 64)).shape == (2, 3)
    assert classifiers.head(lambda count: classifiers.build("timm:resnet18", count, 32)) == {
        "fc.weight": 0,
        "fc.bias": 0,
    }
    with pytest.raises(Exception, match="timm:resnet19 is not a model"):
        networks.arch("timm:resnet19")
