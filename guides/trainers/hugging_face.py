"""Train a small network with the Trainer of transformers. It continues with --resume."""

import glob
import os
import sys

import torch
import transformers

from bootfile import Receipt


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 16)
        )

    def forward(self, image, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.layers(image), labels)}


class Recorded(transformers.Trainer):
    def training_step(self, model, inputs, *args, **options):
        if not receipt.step:
            receipt.load_state_dict({"step": self.state.global_step})
        receipt.add(inputs, int(self.state.epoch) + 1)
        return super().training_step(model, inputs, *args, **options)


torch.manual_seed(0)
images = torch.randn(256, 16)
samples = [{"image": image, "labels": image.argmax()} for image in images]
receipt = Receipt("out")
settings = transformers.TrainingArguments(
    "out", num_train_epochs=3, per_device_train_batch_size=32, save_steps=5, use_cpu=True, report_to=[],
    disable_tqdm=True, dataloader_pin_memory=False,
)  # fmt: skip
trainer = Recorded(Network(), settings, train_dataset=samples)
whole = glob.glob("out/checkpoint-*/trainer_state.json")  # it is written last
newest = os.path.dirname(max(whole, key=os.path.getmtime)) if "--resume" in sys.argv and whole else None
trainer.train(resume_from_checkpoint=newest)
torch.save(trainer.model.state_dict(), "out/last.pt")
