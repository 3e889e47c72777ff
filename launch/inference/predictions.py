"""Predict the classes of images with a trained network."""

import argparse
import collections
import copy
import csv
import functools
import io
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bootfile.console import outputs
from bootfile.ground import accelerator
from bootfile.ground.errors import BadInput, printable
from bootfile.ground.files import opener
from common.compute import precision
from common.distributed import accelerators, devices
from datasets.files import local_folder
from datasets.folders import images
from datasets.folders.resize import BILINEAR, fit
from datasets.folders.walk import progress, walk
from datasets.loaders.backends import cores
from datasets.loaders.image_loader import ToDevice
from datasets.sampling import augment
from launch.inference import trained
from launch.inference.trained import Trained

TOP = 5  # classes of an image


def write(args: argparse.Namespace) -> int:
    """Write the predictions and return 0. args: those of the verb. Raises BadInput."""
    is_image = os.path.isfile(args.folder) and not args.to
    args.to = args.to or "predictions.csv"
    # before the network is loaded: a file that must not be replaced ends it at once
    if not is_image:
        outputs.check_replaceable(args.to, re.compile("^path,error,class_1,"), args.force)
    places = [torch.device(accelerator.kind(), gpu) for gpu in range(devices.count_gpus(args))]
    for place in places:
        accelerators.open_gpu(place)
    network = trained.load(args.weights, args.arch, args.image_size, args.model)
    root, paths = find_images(args.folder)
    top = min(TOP, len(network.classes))
    predictions = predict(network, root, paths, places or [torch.device("cpu")], args.batch_size)
    if is_image:
        [(_, reason, probabilities)] = predictions
        if reason:
            raise BadInput(f"{args.folder}: {reason}")
        values, labels = probabilities.topk(top)
        for value, label in zip(values.tolist(), labels.tolist(), strict=True):
            print(f"{value:.6f} {printable(network.classes[label])}")
        return 0
    with progress(len(paths), "predicting") as bar:
        unreadable = _write_table(args.to, predictions, network.classes, top, bar)
    bad = f", {unreadable} of them unreadable" if unreadable else ""
    print(f"{args.to}: {len(paths)} images{bad}; {network.name}, {len(network.classes)} classes")
    return 0


def _write_table(path: str, predictions: Iterator, classes: Sequence[str], top: int, bar: Any) -> int:
    """Write a row for each image to a CSV, as it is predicted. Return the number of unreadable images."""
    ranks = range(1, top + 1)
    header = [f"{column}_{rank}" for rank in ranks for column in ("class", "probability")]
    # After the earlier columns, which programs may read by position. A name can be NA, null or 007, which
    # pandas reads as missing or as a number.
    numbers = [f"number_{rank}" for rank in ranks]
    unreadable = 0
    with outputs.open_result(path) as file:
        text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="", write_through=True)
        rows = csv.writer(text)
        rows.writerow(["path", "error", *header, *numbers])
        for name, reason, probabilities in predictions:
            values, labels = [column.tolist() for column in probabilities.topk(top)]
            pairs = [(classes[label], f"{value:.6f}") for label, value in zip(labels, values, strict=True)]
            cells = [*itertools.chain.from_iterable(pairs), *labels]
            rows.writerow([name, printable(reason), *([""] * len(cells) if reason else cells)])
            unreadable += bool(reason)
            bar.update()
        text.detach()
    return unreadable


def find_images(folder: str) -> tuple[str, list[str]]:
    """Return (root, the relative paths of the images below it, in order). folder: also one image, or a URL.
    Raises BadInput."""
    if os.path.isfile(folder):
        root, name = os.path.split(folder)
        return root, [name]
    root = local_folder(folder)
    paths, others, _ = walk(root)
    if others:
        print(f"{folder}: ignored {others}")
    if not paths:
        raise BadInput(f"{folder} contains no images ({' '.join(images.EXTENSIONS)})")
    return root, sorted(paths)


@torch.no_grad()
def predict(
    network: Trained, root: str, paths: Sequence[str], places: Sequence[torch.device], batch_size: int = 64
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield (path, reason why it cannot be read or "", probabilities float [classes]) for each of the paths.

    places: the devices, which compute batches in turns, each with a copy of the network. A GPU computes while
    the images of the next batches are decoded.
    """
    copies = []  # (network, stage) of each device
    for place in places:
        model = copy.deepcopy(network.model).to(place).to(memory_format=torch.channels_last)
        copies.append((model, ToDevice(place, network.mean, network.std)))
    # trained with bce each class is a question of its own; else the classes exclude each other
    is_binary = network.settings.get("loss") == "bce"
    autocast, _ = precision.choose(places[0], network.settings.get("amp"))
    in_progress: collections.deque = collections.deque()  # batches that the devices may still compute
    traits: list[int] = []  # of the images that were read; the threads of the pool append to it
    turns = itertools.cycle(copies)
    kernel = network.settings.get("interpolation", BILINEAR)
    fill = functools.partial(_fill, share=network.share, interpolation=kernel, traits=traits)
    with ThreadPoolExecutor(cores()) as pool:
        for first, (model, deliver) in zip(range(0, len(paths), batch_size), turns, strict=False):
            part = paths[first : first + batch_size]
            memory = np.zeros((len(part), network.size, network.size, 3), np.uint8)
            # this waits for the images of the batch, while the devices compute the batches before it
            reasons = list(pool.map(fill, [os.path.join(root, path) for path in part], memory))
            pixels = torch.from_numpy(memory).permute(0, 3, 1, 2)
            if network.channels == 1:  # grey, by the weights of ITU-R BT.601
                weights = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
                pixels = (pixels * weights).sum(1, keepdim=True).round().to(torch.uint8)
            batch, _ = deliver(pixels, torch.zeros(len(part), dtype=torch.int64))
            with autocast:
                logits = model(batch).float()
            probabilities = logits.sigmoid() if is_binary else logits.softmax(1)
            in_progress.append((part, reasons, probabilities))
            # each device has one batch to compute: wait for the oldest when a further one has begun
            if len(in_progress) > len(places):
                yield from _wait_for(*in_progress.popleft())
        for last_batch in in_progress:
            yield from _wait_for(*last_batch)
    try:  # as the training data were judged
        images.judge(np.array(traits, np.int64))
    except images.BadImage as error:
        raise BadInput(f"{root}: {error}") from error


def _wait_for(paths: Sequence[str], reasons: list[str], probabilities: torch.Tensor) -> Iterator:
    """Wait until a device has computed a batch, and return the results of its images."""
    return zip(paths, reasons, probabilities.cpu(), strict=True)


def _fill(path: str, out: np.ndarray, share: float, interpolation: str, traits: list[int]) -> str:
    """Put the centred square of an image into `out`, uint8 [size, size, 3], and add its traits. Return the
    error, or "". A thread of predict() calls it."""
    try:
        with open(path, "rb", opener=opener) as file:
            images.check_bytes(os.fstat(file.fileno()).st_size)
            content = file.read()
        # as the scan of a training inspects an image: its traits tell if it is dark, or of one colour
        header = images.inspect(content)
        pixels = images.decode(content, header.plain)
        traits.append(header.traits)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except images.BadImage as error:
        return str(error)
    height, width = pixels.shape[:2]
    sizes = SimpleNamespace(widths=np.array([width]), heights=np.array([height]))
    crops = augment.center_crop(sizes, np.zeros(1, int), 0, 1, share)
    top, left, high, wide, flip = [int(values[0]) for values in crops]
    fit(pixels[top : top + high, left : left + wide], flip, out, interpolation)
    return ""
