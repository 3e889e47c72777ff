"""Transformers: a Trainer for 2 epochs with a data set that draws its samples at random in 2 workers.

OPTIONS: none.
"""

import torch
import transformers
from start import OUT, Regression, receipt, samples


class Random(torch.utils.data.Dataset):
    def __len__(self):
        return len(samples)

    def __getitem__(self, index):
        return {"x": torch.rand(4)}


class Recorded(transformers.Trainer):
    def training_step(self, model, inputs, *args, **options):
        receipt.add(inputs, int(self.state.epoch) + 1)
        return super().training_step(model, inputs, *args, **options)


if __name__ == "__main__":
    settings = transformers.TrainingArguments(
        OUT, num_train_epochs=2, per_device_train_batch_size=2, save_strategy="no", use_cpu=True,
        report_to=[], disable_tqdm=True, dataloader_pin_memory=False, dataloader_num_workers=2,
    )  # fmt: skip
    Recorded(Regression(), settings, train_dataset=Random()).train()
