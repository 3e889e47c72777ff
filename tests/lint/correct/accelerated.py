"""accelerate: save_state and load_state, an average, and a place within the epoch."""

import argparse
import os

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset


class Average:
    """The average of the weights, with a counter for its warm-up."""

    def __init__(self, model):
        self.model = model
        self.count = 0
        self.weights = {name: value.clone() for name, value in model.state_dict().items()}

    def update(self):
        self.count += 1
        for name, value in self.model.state_dict().items():
            self.weights[name].lerp_(value, 0.1)

    def state_dict(self):
        return {"count": self.count, "weights": self.weights}

    def load_state_dict(self, state):
        self.count = state["count"]
        self.weights = state["weights"]


class Progress:
    def __init__(self):
        self.epoch = 0
        self.batch = 0

    def state_dict(self):
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]
        self.batch = state["batch"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=400)
    loader = DataLoader(TensorDataset(torch.rand(96, 8), torch.randint(0, 4, (96,))), 8, shuffle=True)
    model_ema = Average(model)
    progress = Progress()
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.register_for_checkpointing(model_ema, progress)
    last = os.path.join(args.out, "last")
    if os.path.exists(last):
        accelerator.load_state(last)
    for epoch in range(progress.epoch, args.epochs):
        loader.set_epoch(epoch)
        rest = loader
        if progress.batch:
            rest = skip_first_batches(loader, progress.batch)
        for inputs, labels in rest:
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            model_ema.update()
            progress.batch += 1
            if progress.batch % 5 == 0:
                accelerator.save_state(last + ".new")
                if accelerator.is_main_process:
                    os.rename(last + ".new", last)
        progress.batch = 0
        progress.epoch = epoch + 1


if __name__ == "__main__":
    main()
