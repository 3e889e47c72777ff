"""Train a small network with Lightning. It continues with --resume."""

import sys

import lightning
import torch

from bootfile import Receipt


class Record(lightning.Callback):
    def on_train_start(self, trainer, module):
        rank, size = trainer.global_rank, trainer.world_size
        self.receipt = Receipt("out", rank=rank, world_size=size, first_step=trainer.global_step)

    def on_train_batch_start(self, trainer, module, batch, index):
        self.receipt.add(batch, trainer.current_epoch + 1)


class Network(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 16)
        )

    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


lightning.seed_everything(0)
images = torch.randn(256, 16)
samples = torch.utils.data.TensorDataset(images, images.argmax(1))
loader = torch.utils.data.DataLoader(samples, 32, shuffle=True)
save = lightning.pytorch.callbacks.ModelCheckpoint("out", "{step}", save_last=True, every_n_train_steps=5)
trainer = lightning.Trainer(
    max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[Record(), save], default_root_dir="out",
)  # fmt: skip
trainer.fit(Network(), loader, ckpt_path="out/last.ckpt" if "--resume" in sys.argv else None)
torch.save(trainer.model.state_dict(), "out/end.pt")
