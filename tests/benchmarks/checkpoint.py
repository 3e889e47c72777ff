"""Measure the time that a save and a receipt take from training, as ratios in one run.

python -m tests.benchmarks.checkpoint [--device cuda] [--rounds 7] [--parameters 100000000]
python -m tests.benchmarks.checkpoint --device cuda --networks resnet50,gpt350 --folder DISK

- Seconds for which a save of ResNet-18 with momentum blocks training: torch.save and fsync, compared with the
  copy of bootfile/exact/saver.py, whose thread then writes the same state with its checksum.
- Seconds of a receipt, compared with a training step of 128 CIFAR-sized images on this device.
- With --parameters: CPU seconds for a state with momentum: the copy that blocks, and the digest of the state
  compared with the write. Seconds until a whole save is on the disk, its digest computed meanwhile, compared
  with torch.save and fsync to a new file; and of the verified read of a resume, compared with torch.load.
- With --networks: seconds for which a step waits for a save of Exact, and until the file is on the disk,
  compared with torch.save and fsync; a line of JSON for each network.
"""

import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch.utils.data import TensorDataset

from bootfile import Exact, Job, map_style_loader
from bootfile.exact import checked_files, digest
from bootfile.exact import files as checkpoint
from bootfile.exact.background import HostCopies, in_parallel, size_of
from bootfile.ground import accelerator
from bootfile.receipt.receipt import Receipt
from bootfile.sampling.sampler import BatchSampler
from common.compute import gpt, models
from datasets.loaders.engines.memory import make_loader
from datasets.memory import cifar10
from datasets.sampling.augment import crop_flip
from tests.benchmarks.rounds import conditions, cpu_seconds, divide, make_parser, spread, take_turns, timed

Measure = Callable[[Callable[[], object]], float]  # calls a function, and returns its seconds
_SAMPLES = 64  # of which batches of 2 give more steps than there are rounds
NETWORKS: dict[str, Callable[[], torch.nn.Module]] = {
    "resnet50": torchvision.models.resnet50,  # with SGD and momentum
    "gpt350": lambda: gpt.GPT(50304, 1024, layers=24, heads=16, width=1024),  # with AdamW
    "tiny": lambda: gpt.GPT(256, 64),
}


def main():
    parser = make_parser(__doc__, 7)
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--parameters", type=int, default=0, help="measure only a state of N parameters")
    names = ", ".join(NETWORKS)
    parser.add_argument("--networks", help=f"measure only the saves of these, of {names}")
    parser.add_argument("--folder", help="where the saves are written (default: that of temporary files)")
    options = parser.parse_args()
    with conditions():
        if options.networks:
            for name in options.networks.split(","):
                with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                    saves = measure_saves(name, torch.device(options.device), options.rounds, folder)
                print(json.dumps(saves), flush=True)
        elif options.parameters:
            measure_state(options.parameters, options.rounds)
        else:
            measure(torch.device(options.device), options.rounds)


def measure_saves(name: str, device: torch.device, rounds: int, folder: str) -> dict[str, Any]:
    """Return the seconds of saves of a network in a loop of one's own, one figure for each round.

    "stall": the loop waits for Exact.save(), after the device has ended the step. "first stall": of the first
    save, which allocates the memory of the copy. "to disk": from its begin until the checkpoint has its name.
    "torch.save": the loop waits for torch.save() and fsync.
    """
    with device:  # the weights are drawn there
        model = NETWORKS[name]()
    optimizer, data = _train_text(model) if isinstance(model, gpt.GPT) else _train_images(model)
    loader = map_style_loader(data, BatchSampler(_SAMPLES, 2, 0, epochs=1), device)
    plain, stalls = os.path.join(folder, "plain.pt"), list[float]()
    run = Exact(
        folder, loader, model=model, optimizer=optimizer, save_every=1, keep=1, job=Job(say=_say_nothing)
    )
    first = run.resume()
    batches = (batch for _ in loader.epochs_from(first) for batch in loader)

    def save() -> float:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        logits = model(inputs).flatten(0, -2)
        torch.nn.functional.cross_entropy(logits, targets.flatten()).backward()
        optimizer.step()
        due = run.end_step()
        if not due.save:
            raise AssertionError("a save is due after each step")
        path = Path(folder, "checkpoints", checkpoint.name_of(loader.step))
        if device.type != "cpu":
            accelerator.of(device).synchronize()
        begin = time.perf_counter()
        run.save()
        stalls.append(time.perf_counter() - begin)
        while not path.exists():
            time.sleep(0.001)
        return time.perf_counter() - begin

    def save_plainly() -> float:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(plain)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        return timed(lambda: _save_plainly(state, plain))

    times = take_turns({"to disk": save, "torch.save": save_plainly}, rounds)
    run.close()
    size = os.path.getsize(plain) / 1e6
    return {"network": name, "MB": size, "first stall": stalls[0], "stall": stalls[1:]} | times


def _train_images(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, TensorDataset]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    labels = torch.zeros(_SAMPLES, dtype=torch.int64)
    return optimizer, TensorDataset(torch.randn(_SAMPLES, 3, 64, 64), labels)


def _train_text(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, TensorDataset]:
    tokens = torch.randint(256, (_SAMPLES, 33))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return optimizer, TensorDataset(tokens[:, :-1], tokens[:, 1:])


def _say_nothing(line: str) -> None:
    pass


def measure_state(parameters: int, rounds: int) -> None:
    """Print the costs of a state whose parameters are in tensors of 10^7 at most."""
    torch.set_num_threads(1)
    sizes = [min(10**7, parameters - first) for first in range(0, parameters, 10**7)]
    weights = {f"layer{place}.weight": torch.randn(size) for place, size in enumerate(sizes)}
    momentum = {place: {"momentum_buffer": torch.randn(size)} for place, size in enumerate(sizes)}
    state = {"step": 1, "objects": {"model": weights, "optimizer": {"state": momentum, "param_groups": []}}}
    copies = HostCopies()
    copy = copies.make(state)
    with tempfile.TemporaryDirectory() as folder:
        path, plain = os.path.join(folder, checkpoint.name_of(1)), os.path.join(folder, "plain.pt")

        def to_new_file(path: str, measure: Measure, function: Callable[[], object]) -> float:
            """Return the seconds of a write to a new file: a run never replaces a checkpoint, which costs
            more."""
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return measure(function)

        def save() -> None:
            """Save as bootfile/exact/saver.py does when the copy is made."""
            with in_parallel(lambda: digest.summarize(1, copy["objects"])) as digested:
                checkpoint.write(path, copy, digested, step=1)

        times = take_turns(
            {
                "copy": lambda: cpu_seconds(lambda: copies.make(state)),
                "digest": lambda: cpu_seconds(lambda: digest.summarize(1, copy["objects"])),
                "write": lambda: to_new_file(path, cpu_seconds, lambda: checkpoint.write(path, copy, step=1)),
                "torch.save": lambda: to_new_file(plain, timed, lambda: _save_plainly(copy, plain)),
                "whole save": lambda: to_new_file(path, timed, save),
                "torch.load": lambda: timed(lambda: torch.load(plain, weights_only=True)),
                "read": lambda: timed(lambda: checked_files.read(path)),
            },
            rounds,
        )
    print(f"{size_of(state) / 1e6:.0f} MB, n={rounds}; copy, digest, write: CPU seconds")
    for name, own in times.items():
        print(f"{name}: {spread(own, '.3f', 's')}")
    for name, other in (("digest", "write"), ("whole save", "torch.save"), ("read", "torch.load")):
        print(f"{name} / {other}: {spread(divide(times[name], times[other]), '.3f', 'x')}")


def _save_plainly(state: dict, path: str) -> None:
    """Save as with torch alone, and wait for the disk."""
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def measure(device: torch.device, rounds: int) -> None:
    model = models.resnet18(3, 10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data, _ = cifar10.load(None, True)
    sampler = BatchSampler(len(data), 128, 0)
    batches = iter(make_loader(data, sampler, device, augment=True))
    ids = sampler.batch(0)
    parameters, labels, receipt = crop_flip(data, ids, 0, 0), data.labels[ids].numpy(), Receipt()

    def step():
        images, labels = next(batches)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def count():
        receipt.add(ids, labels, parameters)
        receipt.take()

    times = take_turns({"step": lambda: timed(step), "receipt": lambda: timed(count)}, rounds)
    own, whole = (statistics.median(times[name]) for name in ("receipt", "step"))
    print(f"receipt: {own * 1e6:.0f} us a step of 128, {own / whole:.3%} of a step")

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    copies, blocked = HostCopies(), []
    with tempfile.TemporaryDirectory() as folder:
        path, plain = os.path.join(folder, checkpoint.name_of(1)), os.path.join(folder, "plain.pt")

        def copy_and_write():
            made = []
            blocked.append(timed(lambda: made.append(copies.make(state))))
            checkpoint.write(path, made[0])

        times = take_turns(
            {
                "plain": lambda: timed(lambda: _save_plainly(state, plain)),
                "ours": lambda: timed(copy_and_write),
            },
            rounds,
        )
    del blocked[0]  # the first one allocates its memory
    print(
        f"a save blocks {statistics.median(blocked) * 1e3:.1f} ms, on the disk after "
        f"{statistics.median(times['ours']) * 1e3:.1f} ms; torch.save and fsync "
        f"{statistics.median(times['plain']) * 1e3:.0f} ms (medians)"
    )
    ratios = spread(divide(times["plain"], blocked), ".1f", "x")
    print(f"{size_of(state) / 1e6:.0f} MB: blocked {ratios} less, n={rounds}")


if __name__ == "__main__":
    main()
