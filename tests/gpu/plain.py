"""Train without Bootfile, as a user of PyTorch alone does, for comparisons. Images and texts run until the
process is killed.

    python -m tests.gpu.plain cuda images FOLDER --output_dir OUT    ResNet-50, from the JPEGs of FOLDER/train
    python -m tests.gpu.plain cuda text FOLDER --output_dir OUT      a GPT, from FOLDER/train.bin
    python -m tests.gpu.plain cuda memory               the largest batch of ResNet-50; the last line is JSON

OUT/metrics.jsonl gets a line for each report, as that of a job. All compute in bfloat16; images and texts are
compiled. cpu: a rehearsal, tiny.
"""

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
import torchvision
from torchvision.datasets import ImageFolder

from bootfile.machine.cores import available_cores
from common.compute import gpt
from common.run.log import peak_memory
from tests.benchmarks import loaders, rounds
from tests.benchmarks.batch_size import NO_ROOM, find_largest

VOCABULARY = 50304  # GPT-2's 50,257 tokens, and some up to a multiple of 64
MEMORY = 0.9  # share of the GPU's memory that the largest batch may take
_MOST = 4096  # images of the largest batch


def text_shape(is_small: bool) -> dict[str, int]:
    """Return the options of train_text.py for GPT-2 of 124 million parameters."""
    if is_small:
        return {"layers": 1, "heads": 2, "width": 16, "context": 16, "batch_size": 4}
    return {"layers": 12, "heads": 12, "width": 768, "context": 1024, "batch_size": 32}


def image_shape(is_small: bool) -> tuple[str, int]:
    """Return the network and the size of its images."""
    return ("shufflenet_v2_x0_5", 32) if is_small else ("resnet50", 224)


def main() -> None:
    parser = rounds.make_parser(__doc__)
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("what", choices=("images", "text", "memory"))
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--output_dir")
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--report_every", type=int, default=5)
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.what == "memory":
        print(json.dumps(measure_largest_batch(device)))
    elif args.what == "images":
        train_on_images(args, device)
    else:
        train_on_text(args, device)


def train_on_images(args: argparse.Namespace, device: torch.device) -> None:
    """Train from JPEG files with Pillow and torchvision's transforms, in a worker for each core."""
    arch, side = image_shape(device.type == "cpu")
    data = ImageFolder(os.path.join(args.folder, "train"), loaders.transforms(side))
    options = {"num_workers": available_cores(), "pin_memory": device.type != "cpu"}
    loader = loaders.data_loader(data, args.batch_size, **options)
    step = image_step(torchvision.models.get_model(arch), device)

    def epochs() -> Iterator[list[torch.Tensor]]:
        while True:
            yield from loader

    def train(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
        return step(images, labels.to(device, non_blocking=True))

    _train(args, epochs(), train, "images", args.batch_size)


def train_on_text(args: argparse.Namespace, device: torch.device) -> None:
    """Train a GPT on windows at random places of a file of uint16 tokens."""
    shape = text_shape(device.type == "cpu")
    batch, context = shape["batch_size"], shape["context"]
    tokens = np.memmap(Path(args.folder, "train.bin"), np.uint16, mode="r")
    model = gpt.GPT(VOCABULARY, context, shape["layers"], shape["heads"], shape["width"]).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), 1e-4, betas=(0.9, 0.99), weight_decay=0.1, fused=device.type != "cpu"
    )
    forward = _compiled(model, device)

    def windows() -> Iterator[list[torch.Tensor]]:
        while True:
            starts = torch.randint(len(tokens) - context - 1, (batch,)).tolist()
            rows = [
                torch.from_numpy(tokens[start : start + context + 1].astype(np.int64)) for start in starts
            ]
            whole = torch.stack(rows)
            if device.type != "cpu":
                whole = whole.pin_memory()
            whole = whole.to(device, non_blocking=True)
            yield [whole[:, :-1], whole[:, 1:]]

    def train(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = forward(inputs)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    _train(args, windows(), train, "tokens", batch * context)


def image_step(
    model: torch.nn.Module, device: torch.device, compiles: bool = True
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a function that trains a network with a batch, and returns the loss."""
    torch.backends.cudnn.benchmark = True
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=device.type != "cpu")
    forward = _compiled(model, device) if compiles else model

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(forward(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    return step


def make_images(batch: int, side: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of random images in memory, and its labels."""
    images = torch.randn(batch, 3, side, side, device=device).to(memory_format=torch.channels_last)
    return images, torch.zeros(batch, dtype=torch.int64, device=device)


def measure_largest_batch(device: torch.device) -> dict[str, float]:
    """Return the largest batch that fits into MEMORY, not compiled, and the memory that torch allocates."""
    is_small = device.type == "cpu"
    arch, side = image_shape(is_small)
    if not is_small:
        torch.cuda.set_per_process_memory_fraction(MEMORY)
    step = image_step(torchvision.models.get_model(arch), device, compiles=False)

    def fits(batch: int) -> bool:
        fits_here = True
        try:
            for _ in range(2):
                step(*make_images(batch, side, device))
        except RuntimeError as error:  # of torch or of cuDNN
            if not any(sign in str(error).lower() for sign in NO_ROOM):
                raise
            fits_here = False
        if not is_small:  # after the handler: the traceback holds tensors
            torch.cuda.empty_cache()
        return fits_here

    largest = find_largest(fits, 16, 8) if is_small else find_largest(fits, _MOST, 64)
    if not is_small:
        torch.cuda.reset_peak_memory_stats()
    fits(largest)
    return {"images": largest, "memory_gb": peak_memory() / 1000}


def _compiled(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Return the module compiled; a rehearsal compiles nothing."""
    if device.type == "cpu":
        return model
    compiled: torch.nn.Module = torch.compile(model, dynamic=False)
    return compiled


def _train(
    args: argparse.Namespace,
    batches: Iterable[list[torch.Tensor]],
    train: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    unit: str,
    count: int,
) -> None:
    """Train without an end, and write a report each --report_every steps. count: units of a batch."""
    os.makedirs(args.output_dir)
    source = iter(batches)
    with open(Path(args.output_dir, "metrics.jsonl"), "w") as file:
        since = time.monotonic()
        waited = 0.0
        for number in itertools.count(1):
            begin = time.monotonic()
            inputs, targets = next(source)
            waited += time.monotonic() - begin
            loss = train(inputs, targets)
            if number % args.report_every:
                continue
            figures = {"loss": loss.item()}  # the host waits for the device
            elapsed = time.monotonic() - since
            figures |= {f"{unit}_per_s": count * args.report_every / elapsed, "data_time": waited}
            figures |= {"compute_time": elapsed - waited, "memory_mb": peak_memory()}
            file.write(json.dumps(figures) + "\n")
            file.flush()
            since = time.monotonic()
            waited = 0.0


if __name__ == "__main__":
    main()
