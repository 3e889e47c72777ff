"""Lightning: 2 epochs in windows of 4 samples; the arithmetic has no rounding.

OPTIONS: number of batches in a window (accumulate_grad_batches); samples in an epoch.
"""

import lightning
import torch
from start import OPTIONS, avoid_rounding, model, optimizer, samples, write

PARTS, SIZE = int(OPTIONS[0]), int(OPTIONS[1])
avoid_rounding()


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model

    def training_step(self, batch, index):
        return self.model(batch)["loss"]

    def configure_optimizers(self):
        return optimizer


trainer = lightning.Trainer(
    max_epochs=2, accumulate_grad_batches=PARTS, accelerator="cpu", devices=1, logger=False,
    enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
)  # fmt: skip
trainer.fit(Module(), torch.utils.data.DataLoader(samples[:SIZE], 4 // PARTS))
write({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": trainer.global_step})
