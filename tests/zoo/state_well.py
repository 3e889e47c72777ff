"""The Well: its Trainer with a scheduler or with a GradScaler: 12 epochs of 2 steps, a checkpoint after each.

OPTIONS: "scheduler", "scaler" (float16), or "neither".
"""

import os
import time
from types import SimpleNamespace

import torch
from start import OPTIONS, OUT, model, optimizer, receipt, samples
from the_well.benchmark.trainer.training import Trainer
from torch.optim.lr_scheduler import CosineAnnealingLR


class OneLayer(Trainer):
    """The Trainer with a model and batches of the zoo."""

    def rollout_model(self, model, batch, formatter, train=True):
        receipt.add(batch, epoch)
        targets = batch.sum(1, keepdim=True).mul(7).floor().remainder(2) * 2 - 1  # the loss stays large
        return model.layer(batch), targets


def loss(prediction, reference, metadata):
    return (prediction - reference).float().square() * 8  # 2^16 times its gradient is not a float16


optimizer.param_groups[0]["lr"] = 0.02
names = {"artifact_folder": OUT, "viz_folder": OUT, "formatter": "none"}
numbers = dict.fromkeys(("val_frequency", "rollout_val_frequency", "short_validation_length"), 1)
numbers |= dict.fromkeys(("max_rollout_steps", "num_time_intervals", "checkpoint_frequency"), 1)
dataset = SimpleNamespace(metadata=None, use_normalization=False)
last = os.path.join(OUT, "recent.pt")
trainer = OneLayer(
    OUT, model=model, datamodule=SimpleNamespace(train_dataset=dataset), optimizer=optimizer, loss_fn=loss,
    epochs=12, enable_amp="scaler" in OPTIONS, amp_type="float16",
    device=torch.device("cpu"), make_rollout_videos=False, **names, **numbers,
    lr_scheduler=CosineAnnealingLR(optimizer, 12) if "scheduler" in OPTIONS else None,
    checkpoint_path=last if os.path.exists(last) else "",
)  # fmt: skip
trainer.formatter = None
receipt.load_state_dict({"step": 2 * (trainer.starting_epoch - 1)})
for epoch in range(trainer.starting_epoch, 13):
    trainer.train_one_epoch(epoch, samples[:8].view(2, 4, 4))
    trainer.save_model(epoch, 0.0, f"{last}.new")
    os.replace(f"{last}.new", last)
    time.sleep(0.05)  # `launch prove` counts the writes
