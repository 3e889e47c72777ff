"""Transformers: a Trainer for 4 epochs, continued from a checkpoint with resume_from_checkpoint.

OPTIONS: step of the checkpoint; size of the random noise that the data set adds to a sample, as augmentation
does; "ids": the receipt knows samples by their ids.
"""

import os

import torch
import transformers
from start import OPTIONS, OUT, Regression, receipt, samples, stop

SAVE, NOISE = int(OPTIONS[0]), float(OPTIONS[1])
CHECKPOINT = os.path.join(OUT, f"checkpoint-{SAVE}")


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return len(samples)

    def __getitem__(self, index):
        return {"x": samples[index] + NOISE * torch.rand(4), "id": index}


class Recorded(transformers.Trainer):
    def training_step(self, model, inputs, *args, **options):
        stop()
        receipt.add(inputs, int(self.state.epoch) + 1)
        return super().training_step(model, inputs, *args, **options)


settings = transformers.TrainingArguments(
    OUT, num_train_epochs=4, per_device_train_batch_size=4, save_steps=SAVE, use_cpu=True,
    report_to=[], disable_tqdm=True, dataloader_pin_memory=False, remove_unused_columns=False,
)  # fmt: skip
resume = CHECKPOINT if os.path.exists(CHECKPOINT) else None
if resume:
    receipt.load_state_dict({"step": SAVE})
Recorded(Regression(), settings, train_dataset=Noisy()).train(resume_from_checkpoint=resume)
