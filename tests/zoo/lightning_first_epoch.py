"""Lightning: a run of 4 epochs, killed in epoch 3, continued from the end of epoch 2.

OPTIONS: number of workers of the loader; "random" for shuffle=True (default: a DistributedSampler).
"""

import os

import lightning
import torch
from start import OPTIONS, OUT, Regression, receipt, record, samples, stop


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Regression()

    def training_step(self, batch, index):
        return self.model(batch)["loss"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Record(lightning.Callback):
    def on_train_batch_start(self, trainer, module, batch, index):
        stop()
        record(batch, trainer.current_epoch + 1)


if __name__ == "__main__":
    lightning.seed_everything(0)
    order = torch.utils.data.DistributedSampler(samples, num_replicas=1, rank=0, shuffle=True)
    if "random" in OPTIONS:
        order = torch.utils.data.RandomSampler(samples)
    loader = torch.utils.data.DataLoader(samples, 4, sampler=order, num_workers=int(OPTIONS[0]))
    last = os.path.join(OUT, "last.ckpt")
    checkpoints = lightning.pytorch.callbacks.ModelCheckpoint(OUT, "last", every_n_epochs=2)
    trainer = lightning.Trainer(
        max_epochs=4, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Record(), checkpoints],
    )  # fmt: skip
    resume = last if os.path.exists(last) else None
    if resume:
        receipt.load_state_dict({"step": torch.load(resume, weights_only=False)["global_step"]})
    trainer.fit(Module(), loader, ckpt_path=resume)
