"""Mixed precision, accumulation, averaged weights, a model that returns its loss: python large.py OUT"""

import sys
import types

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from bootfile import Exact, torch_loader


class Model(torch.nn.Module):
    """A model with the interface of transformers: it takes a batch by name, and returns the loss."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 16)
        self.dropout = torch.nn.Dropout(0.1)
        self.head = torch.nn.Linear(16, 50)

    def forward(self, input_ids, attention_mask, labels):
        hidden = self.embedding(input_ids) * attention_mask[..., None]
        logits = self.head(self.dropout(hidden))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return types.SimpleNamespace(loss=loss, logits=logits)


out = sys.argv[1]
device = torch.device("cpu")  # "cuda" on a GPU
torch.manual_seed(0)
texts = torch.randint(50, (256, 8))
mask = torch.ones(8)
train_set = [{"input_ids": text, "attention_mask": mask, "labels": text} for text in texts]
loader = torch_loader(DataLoader(train_set, 8, shuffle=True), device, epochs=2)
model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * len(loader) // 4)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
run = Exact(out, loader, model=model, optimizer=optimizer, scheduler=schedule, average=average, save_every=10)
for _ in loader.epochs_from(run.resume()):
    for inputs, labels in loader:  # a dictionary without its labels, and the labels
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(**inputs, labels=labels).loss
        (loss / 4).backward()
        accepted = run.accepts(loss)  # after each backward(), on every rank
        if loader.step % 4 == 0:  # not a counter of the loop: a restart would begin it again
            if accepted:
                optimizer.step()
                average.update_parameters(model)
            optimizer.zero_grad()
            schedule.step()
        if run.end_step().save:  # a save waits for the optimizer step
            run.save()
run.close()
torch.save({"model": model.state_dict(), "average": average.state_dict()}, f"{out}/last.pt")
