"""Lightning: 3 epochs with a custom sampler, which draws another half of the samples in each epoch.

OPTIONS: none.
"""

import lightning
import torch
from lightning_first_epoch import Module
from start import WORLD_SIZE, record, samples


class Half(torch.utils.data.Sampler):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(self.epoch))
        yield from order[: len(self)].tolist()

    def __len__(self):
        return len(samples) // 2


class Record(lightning.Callback):
    def on_train_batch_start(self, trainer, module, batch, index):
        record(batch, trainer.current_epoch + 1)


loader = torch.utils.data.DataLoader(samples, 4 // WORLD_SIZE, sampler=Half())
trainer = lightning.Trainer(
    max_epochs=3, accelerator="cpu", devices=WORLD_SIZE, logger=False, enable_progress_bar=False,
    enable_model_summary=False, enable_checkpointing=False, callbacks=[Record()],
)  # fmt: skip
trainer.fit(Module(), loader)
