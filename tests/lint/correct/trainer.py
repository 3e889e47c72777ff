"""A class Trainer with save() and load(), in two parts of a network with an optimizer each."""

import argparse
import glob
import os
import re

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset


class Files(Dataset):
    """The samples of a folder."""

    def __init__(self, folder):
        self.folder = folder
        self.names = sorted(os.listdir(folder))
        self.classes = sorted({name.split("_")[0] for name in self.names})

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        name = self.names[index]
        return torch.load(os.path.join(self.folder, name)), self.classes.index(name.split("_")[0])


class Trainer:
    def __init__(self, args):
        self.args = args
        self.device = torch.device("cuda")
        self.generator = torch.Generator()
        self.loader = DataLoader(Files(args.data), 8, shuffle=True, generator=self.generator, num_workers=4)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU()).to(self.device)
        self.head = nn.Linear(16, 4).to(self.device)
        self.optimizer = torch.optim.SGD(self.body.parameters(), lr=0.1, momentum=0.9)
        self.head_optimizer = torch.optim.Adam(self.head.parameters(), lr=0.1)
        self.scheduler = CosineAnnealingLR(self.optimizer, args.epochs)
        self.epoch = 0
        self.step = 0
        self.best = 0.0

    def save(self, name):
        state = {
            "body": self.body.state_dict(),
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "head_optimizer": self.head_optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "epoch": self.epoch + 1,
            "step": self.step,
            "best": self.best,
        }
        path = os.path.join(self.args.out, name)
        torch.save(state, path + ".tmp")
        os.replace(path + ".tmp", path)

    def find_newest(self):
        paths = glob.glob(os.path.join(self.args.out, "epoch_*.pt"))
        return max(paths, key=lambda path: int(re.findall(r"\d+", path)[-1]), default=None)

    def resume(self):
        path = self.find_newest()
        if path is None:
            return
        saved = torch.load(path, map_location=self.device)
        self.body.load_state_dict(saved["body"])
        self.head.load_state_dict(saved["head"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.head_optimizer.load_state_dict(saved["head_optimizer"])
        self.scheduler.load_state_dict(saved["scheduler"])
        self.epoch = saved["epoch"]
        self.step = saved["step"]
        self.best = saved["best"]

    def train_epoch(self):
        correct = 0
        for inputs, labels in self.loader:
            for group in self.head_optimizer.param_groups:
                group["lr"] = 0.1 * min(1, (self.step + 1) / 100)
            outputs = self.head(self.body(inputs.to(self.device)))
            loss = nn.functional.cross_entropy(outputs, labels.to(self.device))
            self.optimizer.zero_grad()
            self.head_optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.head_optimizer.step()
            self.step += 1
            correct += (outputs.argmax(1).cpu() == labels).sum().item()
        return correct / len(self.loader.dataset)

    def fit(self):
        self.resume()
        for epoch in range(self.epoch, self.args.epochs):
            self.epoch = epoch
            self.generator.manual_seed(epoch)
            accuracy = self.train_epoch()
            self.scheduler.step()
            if accuracy > self.best:
                self.best = accuracy
                self.save("best.pt")
            self.save(f"epoch_{epoch}.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data")
    parser.add_argument("--out", default="out")
    parser.add_argument("--epochs", type=int, default=10)
    Trainer(parser.parse_args()).fit()
