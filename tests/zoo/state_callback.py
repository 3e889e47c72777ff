"""SchNetPack: its callback ExponentialMovingAverage in a Lightning trainer, a checkpoint after each epoch.

OPTIONS: "average" for the callback, or "none".
"""

import glob
import os
import typing

import pytorch_lightning
import torch
from start import OPTIONS, OUT, model, optimizer, receipt, samples, write

torch.utils.data.dataloader.T_co = typing.TypeVar("T_co")  # torch 2.14 does not have this name
from schnetpack.train.callbacks import ExponentialMovingAverage  # noqa: E402


class Module(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model

    def training_step(self, batch, index):
        receipt.add(batch, self.current_epoch + 1)
        return self.model(batch)["loss"]

    def validation_step(self, batch, index):
        pass

    def configure_optimizers(self):
        return optimizer


checkpoints = sorted(glob.glob(os.path.join(OUT, "epoch=*.ckpt")))
receipt.load_state_dict({"step": 8 * len(checkpoints)})
callbacks = [pytorch_lightning.callbacks.ModelCheckpoint(OUT, "{epoch}", save_top_k=-1)]
if "average" in OPTIONS:
    callbacks.append(ExponentialMovingAverage(decay=0.9))
trainer = pytorch_lightning.Trainer(
    max_epochs=6, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
    enable_model_summary=False, num_sanity_val_steps=0, callbacks=callbacks,
)  # fmt: skip
loader = torch.utils.data.DataLoader(samples, 4)
trainer.fit(Module(), loader, loader, ckpt_path=checkpoints[-1] if checkpoints else None)
write({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": receipt.step})
