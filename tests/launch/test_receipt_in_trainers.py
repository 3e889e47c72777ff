"""The receipt of a loop in accelerate, transformers and Lightning, as guides/receipts.md shows it."""

import importlib.util
import os

import pytest
import torch

from datasets.sampling import loop_receipt
from datasets.sampling.loop_receipt import Receipt
from tests.conftest import environment, run

IMAGES = torch.rand(24, 4, generator=torch.Generator().manual_seed(0))


def loader():
    samples = torch.utils.data.TensorDataset(IMAGES, torch.arange(24))
    order = torch.Generator().manual_seed(0)
    return torch.utils.data.DataLoader(samples, 4, shuffle=True, generator=order)


def reference(folder, epochs=2):
    receipt, batches = Receipt(str(folder)), loader()
    for _ in range(epochs):
        for _ in receipt.watch(batches):
            pass
    return str(folder)


def test_accelerate(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    prepared = accelerate.Accelerator(cpu=True).prepare(loader())
    receipt = Receipt(str(tmp_path / "run"))
    for _ in range(2):
        for _ in receipt.watch(prepared):
            pass
    equal, lines = loop_receipt.report([reference(tmp_path / "plain", 1), str(tmp_path / "run")])
    assert not equal and "equal in the 6 steps of both" in lines[-1]  # then accelerate seeds each epoch


TRAINER = """
import sys, torch, transformers
from receipt import Receipt

class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 24)

    def forward(self, image, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.layer(image), labels)}

class Recorded(transformers.Trainer):
    def training_step(self, model, inputs, *args, **options):
        receipt.add(inputs, int(self.state.epoch) + 1)
        return super().training_step(model, inputs, *args, **options)

receipt = Receipt(sys.argv[1])
samples = [{"image": torch.full((4,), float(label)), "labels": torch.tensor(label)} for label in range(24)]
settings = transformers.TrainingArguments(
    sys.argv[1], num_train_epochs=2, per_device_train_batch_size=4, use_cpu=True, save_strategy="no",
    report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
)
Recorded(Network(), settings, train_dataset=samples).train()
"""


def test_transformers(tmp_path):
    """It runs in a project of its own: next to Bootfile, `datasets` is another package."""
    installed = importlib.util.find_spec("transformers")
    if not installed or not importlib.util.find_spec("accelerate"):
        pytest.skip("transformers or accelerate is not installed")
    run("-m", "launch", "new", "--receipt", tmp_path)
    (tmp_path / "train.py").write_text(TRAINER)
    packages = os.path.dirname(os.path.dirname(installed.origin))
    for name in ("a", "b"):
        run("train.py", name, cwd=tmp_path, env=environment(PYTHONPATH=packages))
    shown = run("receipt.py", "a", "b", cwd=tmp_path).stdout
    assert shown.endswith("data equal for 12 steps\n")


def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Record(lightning.Callback):
        def on_train_start(self, trainer, module):
            folder = trainer.default_root_dir
            self.receipt = Receipt(folder, rank=trainer.global_rank, world_size=trainer.world_size)

        def on_train_batch_start(self, trainer, module, batch, index):
            self.receipt.add(batch, trainer.current_epoch + 1)

    class Network(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 24)

        def training_step(self, batch, index):
            return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    for name in ("a", "b"):
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
            default_root_dir=str(tmp_path / name),
            enable_progress_bar=False, enable_model_summary=False, callbacks=[Record()],
        )  # fmt: skip
        trainer.fit(Network(), loader())
    equal, lines = loop_receipt.report([str(tmp_path / "a"), str(tmp_path / "b")])
    assert equal and lines[-1] == "data equal for 12 steps"
