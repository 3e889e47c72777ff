"""Transformers: a Trainer for 2 epochs of 6 samples, in windows of 4: the second window of an epoch is half.

The arithmetic has no rounding: 4 batches of one sample must give the weights of one batch of 4.
OPTIONS: number of batches in a window (gradient_accumulation_steps).
"""

import torch
import transformers
from start import OPTIONS, OUT, avoid_rounding, model, optimizer, samples, write

avoid_rounding()


class InOrder(transformers.Trainer):
    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


settings = transformers.TrainingArguments(
    OUT, max_steps=4, per_device_train_batch_size=4 // int(OPTIONS[0]), max_grad_norm=0, use_cpu=True,
    gradient_accumulation_steps=int(OPTIONS[0]), save_strategy="no", report_to=[], disable_tqdm=True,
    dataloader_pin_memory=False, remove_unused_columns=False,
)  # fmt: skip
constant = torch.optim.lr_scheduler.ConstantLR(optimizer, 1)
data = [{"x": sample} for sample in samples[:6]]
trainer = InOrder(model, settings, train_dataset=data, optimizers=(optimizer, constant))
trainer.train()
write({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": trainer.state.global_step})
