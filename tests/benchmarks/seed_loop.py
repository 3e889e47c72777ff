"""The loop of ModelArts' published ResNet-18 sample, written again from its description, as a baseline.

    python -m tests.benchmarks.seed_loop --dataset digits --epochs 40 --output_dir DIR

float32 in torch's default layout, Adam at 0.01 times the number of GPUs, batches of 128 per GPU from a
DataLoader over float tensors on the host, in the same order in every epoch, without augmentation, one loss
read back from the device in every step, deterministic cuDNN, validation on the host with scikit-learn. The
network is ours: the same layers and parameters. Source: Huawei Cloud, ModelArts documentation, "adaptation of
distributed debugging and code example" (ResNet-18 on CIFAR-10, 100 epochs).

Reports are written to metrics.jsonl in the output folder, and the start of training to starts.jsonl, under
the names that the jobs use.
"""

import argparse
import json
import os
import random
import time

import numpy as np
import torch
from sklearn.metrics import accuracy_score
from torch.utils.data import DataLoader, TensorDataset

from common.compute import models
from common.console import arguments
from common.run import environment, log, starts
from datasets.memory import image_set

_BATCH_PER_GPU = 128


def main():
    args = _parsed()
    _set_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() and args.enable_gpu is not False else "cpu")
    gpus = torch.cuda.device_count() if device.type == "cuda" else 1
    batch = args.batch_size or _BATCH_PER_GPU * gpus
    train_set, test_set = image_set.load(args.dataset, args.data_url, args.custom_data)
    train_loader = DataLoader(_tensors(train_set), batch_size=batch, shuffle=False)
    test_loader = DataLoader(_tensors(test_set), batch_size=batch, shuffle=False)
    model = models.resnet18(train_set.channels, train_set.classes).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr * gpus)
    loss_function = torch.nn.CrossEntropyLoss()
    os.makedirs(args.output_dir, exist_ok=True)
    with open(os.path.join(args.output_dir, "metrics.jsonl"), "w", buffering=1) as file:
        report = _Report(file, args.report_every)
        facts = environment.facts()
        starts.write(args.output_dir, args, facts, time=round(report.begin, 3), step=0, laps={})
        for epoch in range(1, args.epochs + 1):
            model.train()
            for images, labels in report.timed(train_loader):
                images, labels = images.to(device), labels.to(device)
                loss = loss_function(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                report.step(epoch, loss.item(), len(labels))
            loss, accuracy = _validated(model, test_loader, loss_function, device)
            torch.save(model.state_dict(), os.path.join(args.output_dir, "weights.pth"))
            report.write(epoch=epoch, val_loss=loss, val_acc=accuracy)


def _parsed() -> argparse.Namespace:
    parser = arguments.Parser(__doc__)
    parser.prog = "python -m tests.benchmarks.seed_loop"
    parser.add_argument("--dataset", choices=image_set.NAMES, default="cifar10", help="default: cifar10")
    parser.add_argument("--data_url", help="folder with the data set")
    parser.add_argument("--custom_data", type=arguments.boolean, default=False, help="generated images")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--enable_gpu", type=arguments.boolean, help="default: true if there is a GPU")
    parser.add_argument("--lr", type=arguments.positive_float, default=0.01, help="default: 0.01")
    parser.add_argument("--epochs", type=arguments.positive_int, default=100, help="default: 100")
    parser.add_argument("--batch_size", type=arguments.positive_int, help="default: 128 per GPU")
    parser.add_argument("--seed", type=arguments.seed, default=0, help="default: 0")
    parser.add_argument("--report_every", type=arguments.positive_int, default=50, help="steps (default: 50)")
    return parser.parse_args()


def _set_seed(seed: int) -> None:
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)
    np.random.seed(seed)
    random.seed(seed)
    torch.backends.cudnn.deterministic = True


def _tensors(data) -> TensorDataset:
    """Return float32 images, normalised once, as the sample keeps them in memory."""
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (data.mean, data.std))
    return TensorDataset((data.images.float() / 255 - mean) / std, data.labels)


@torch.no_grad()
def _validated(model, loader, loss_function, device) -> tuple[float, float]:
    model.eval()
    predicted, real, loss = [], [], 0.0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        logits = model(images)
        predicted += list(np.argmax(logits.cpu().numpy(), axis=1))
        real += list(labels.cpu().numpy())
        loss += loss_function(logits, labels).item()
    return loss / len(loader), accuracy_score(real, predicted)


class _Report:
    """The reports of this loop, with the names of the jobs. The sample itself measures no time."""

    def __init__(self, file, every: int):
        self.file, self.every, self.steps = file, every, 0
        self._restart()

    def timed(self, batches):
        """Yield the batches, and count the time to get them as waiting."""
        begin = time.perf_counter()
        for batch in batches:
            self.waited += time.perf_counter() - begin
            yield batch
            begin = time.perf_counter()

    def step(self, epoch: int, loss: float, count: int) -> None:
        self.steps += 1
        self.losses.append(loss)
        self.count += count
        if self.steps % self.every == 0:
            elapsed = time.time() - self.begin
            self.write(
                epoch=epoch, loss=sum(self.losses) / len(self.losses), images_per_s=self.count / elapsed,
                data_time=self.waited, compute_time=elapsed - self.waited, memory_mb=log.peak_memory(),
            )  # fmt: skip

    def write(self, **figures) -> None:
        figures["step"] = self.steps
        self.file.write(json.dumps(figures | {"time": round(time.time(), 3)}) + "\n")
        print(" ".join(f"{name}={value:.6g}" for name, value in figures.items()), flush=True)
        self._restart()

    def _restart(self) -> None:
        self.begin, self.waited, self.count, self.losses = time.time(), 0.0, 0, []


if __name__ == "__main__":
    main()
