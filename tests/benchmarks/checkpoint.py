"""Measure the time that a save and a receipt take from training, as ratios in one run.

python -m tests.benchmarks.checkpoint [--device cuda] [--rounds 7]

- Seconds for which a save of ResNet-18 with momentum blocks training: torch.save and fsync, compared with the
  copy of common/checkpoint/saver.py, whose thread then writes the same state with its checksum.
- Seconds of a receipt, compared with a training step of 128 CIFAR-sized images on this device.
"""

import os
import statistics
import tempfile
import time

import torch

from common.checkpoint import files as checkpoint
from common.checkpoint.saver import HostCopies, size_of
from common.compute import models
from datasets.loaders.engines.memory import make_loader
from datasets.memory import cifar10
from datasets.sampling.augment import crop_flip
from datasets.sampling.receipt import Receipt
from datasets.sampling.sampler import BatchSampler
from tests.benchmarks.rounds import conditions, make_parser, spread


def main():
    parser = make_parser(__doc__, 7)
    parser.add_argument("--device", default="cpu", help="default: cpu")
    options = parser.parse_args()
    with conditions():
        measure(torch.device(options.device), options.rounds)


def now(device: torch.device) -> float:
    """Return seconds, after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measure(device: torch.device, rounds: int) -> None:
    model = models.resnet18(3, 10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data, _ = cifar10.load(None, True)
    loader = make_loader(data, BatchSampler(len(data), 128, 0), device, augment=True)
    loss_function = torch.nn.CrossEntropyLoss()

    steps, receipts = [], []
    batches, order = iter(loader), BatchSampler(len(data), 128, 0)
    for number in range(rounds + 1):
        begin = now(device)
        images, labels = next(batches)
        optimizer.zero_grad()
        loss_function(model(images), labels).backward()
        optimizer.step()
        steps.append(now(device) - begin)
        ids = order.batch(number)
        parameters, labels = crop_flip(data, ids, 0, 0), data.labels[ids].numpy()
        receipt, begin = Receipt(), time.perf_counter()
        receipt.add(ids, labels, parameters)
        receipts.append(time.perf_counter() - begin)
    share = statistics.median(receipts[1:]) / statistics.median(steps[1:])
    print(f"receipt: {statistics.median(receipts[1:]) * 1e6:.0f} us a step of 128, {share:.3%} of a step")

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    copies, ratios, blocked, whole = HostCopies(), [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            begin = time.perf_counter()
            with open(os.path.join(folder, "plain.pt"), "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            plain = time.perf_counter() - begin
            path = os.path.join(folder, checkpoint.name_of(number))
            begin = time.perf_counter()
            copy = copies.make(state)
            blocked.append(time.perf_counter() - begin)
            checkpoint.write(path, copy)
            whole.append(time.perf_counter() - begin)
            os.unlink(path)
            if number:  # the first one allocates its memory
                ratios.append(plain / blocked[-1])
                print(
                    f"torch.save and fsync {plain * 1e3:.0f} ms, copy {blocked[-1] * 1e3:.1f} ms: "
                    f"{ratios[-1]:.1f}x (on the disk after {whole[-1] * 1e3:.0f} ms)"
                )
    print(
        f"a save blocks {statistics.median(blocked[1:]) * 1e3:.1f} ms, on the disk after "
        f"{statistics.median(whole[1:]) * 1e3:.1f} ms (medians)"
    )
    print(f"{size_of(state) / 1e6:.0f} MB: blocked {spread(ratios, '.1f', 'x')} less, n={rounds}")


if __name__ == "__main__":
    main()
