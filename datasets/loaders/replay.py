"""Read single steps of a run again, as its job did. `python -m launch data` asks, and the job answers.

`launch data` starts the job of the run with its options, and with the path of a JSON file in REQUEST:

    {"steps": [[step, world size], ...], "pixels": true, "answer": PATH}

When the job asks its training loader for the first epoch, the loader reads these steps, writes them to PATH,
and the process ends. So everything that the job does with its data is in the answer: its own Dataset,
transforms and effects. The loader computes the same sums as for the receipt.
"""

import json
import os
from typing import Any, NamedTuple

import numpy as np
import torch

from common.ground import exits
from datasets.sampling.effects import Drawn
from datasets.sampling.receipt import batch_sums
from datasets.sampling.sampler import Batch

REQUEST = "BOOTFILE_REPLAY"  # the variable with the path of the request
_CHANNELS = (1, 3)  # of an image that can be drawn
_LONGEST = 300  # characters of an item


class Step(NamedTuple):
    """A step of a run, over all ranks in their order.

    step, epoch: counted from 1.
    world_size: processes.
    sums: as in the receipt, modulo 2^64, int64 [3].
    ranks, ids, labels: int64 [n]. labels: digests of the targets if the samples are items.
    parameters: of the augmentation, name -> [n].
    names: path of each sample below its folder, or [].
    classes: name of each label, or [].
    items: the beginning of repr() of each item of a Dataset, in one line, or [].
    pixels: uint8 [H, W, C] of each sample, as the model got them before normalisation; [] without images.
    """

    step: int
    epoch: int
    world_size: int
    sums: torch.Tensor
    ranks: torch.Tensor
    ids: torch.Tensor
    labels: torch.Tensor
    parameters: dict[str, torch.Tensor]
    names: list[str]
    classes: list[str]
    items: list[str]
    pixels: list[torch.Tensor]


def ask(folder: str, steps: list[tuple[int, int]], pixels: bool) -> str:
    """Write a request to a folder, and return the value of REQUEST. steps: (step from 1, world size)."""
    path = os.path.join(folder, "request.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"steps": steps, "pixels": pixels, "answer": _answer(folder)}, file)
    return path


def read(folder: str) -> tuple[str, list[Step]] | None:
    """Return (fingerprint of the data, steps) from the answer in a folder; None if there is none."""
    if not os.path.exists(_answer(folder)):
        return None
    answer = torch.load(_answer(folder), weights_only=True)
    return answer["fingerprint"], [Step(**step) for step in answer["steps"]]


def _answer(folder: str) -> str:
    return os.path.join(folder, "answer.pt")


def answer(loader: Any) -> None:
    """Answer the request with the steps of a loader, and end the process."""
    with open(os.environ[REQUEST], encoding="utf-8") as file:
        request = json.load(file)
    steps = [_read(loader, step, size, request["pixels"])._asdict() for step, size in request["steps"]]
    torch.save({"fingerprint": loader.receipt.fingerprint, "steps": steps}, request["answer"])
    loader.close()
    exits.leave(0)


def _read(loader: Any, step: int, world_size: int, draws: bool) -> Step:
    batches, pixels = [], []
    for rank in range(world_size):
        batch, inputs, _ = loader.read_step(step - 1, rank, world_size)
        batches.append(batch)
        if draws:
            pixels += _pixels(loader, inputs)
    sizes = [len(batch.ids) for batch in batches]
    ids, labels = (np.concatenate([batch[part] for batch in batches]) for part in (0, 1))
    crops = [np.concatenate(column) for column in zip(*(batch.crops for batch in batches), strict=True)]
    index, epoch = loader.plan.index, (step - 1) // len(loader) + 1
    classes = getattr(index, "class_names", ())
    sets = [np.flatnonzero(label) for label in labels] if labels.ndim == 2 else labels[:, None]
    is_class = bool(classes) and all(0 <= label < len(classes) for own in sets for label in own)
    return Step(
        step=step,
        epoch=epoch,
        world_size=world_size,
        sums=torch.from_numpy(batch_sums(ids, labels, crops, np.array([len(ids)]))[0]),
        ranks=torch.arange(world_size).repeat_interleave(torch.tensor(sizes)),
        ids=torch.from_numpy(ids),
        labels=torch.from_numpy(labels),
        parameters=dict(zip(_parameters(loader, len(crops)), map(torch.from_numpy, crops), strict=True)),
        names=_names(index, ids),
        classes=[",".join(classes[label] for label in own) for own in sets] if is_class else [],
        items=_items(loader, batches),
        pixels=pixels,
    )


def _names(index: Any, ids: np.ndarray) -> list[str]:
    if not hasattr(index, "path"):
        return []
    return [os.path.relpath(index.path(id), index.source) for id in ids.tolist()]


def _items(loader: Any, batches: list[Batch]) -> list[str]:
    read = getattr(loader.engine, "items", None)
    if read is None:
        return []
    items = [item for batch in batches for item in read(batch.ids, batch.crops[0])]
    return [" ".join(repr(item).split())[:_LONGEST] for item in items]


def _parameters(loader: Any, count: int) -> list[str]:
    """Return the names of the columns of a batch's crops."""
    plan = loader.plan
    crops = plan.augment(plan.index, np.zeros(1, np.int64), 0, 1) if plan.augment else ()
    names = [*getattr(crops, "_fields", ()), *(Drawn._fields if loader.effects else ())]
    return names[len(names) - count :]  # an engine without data delivers no crops


def _pixels(loader: Any, inputs: Any) -> list[torch.Tensor]:
    """Return the images of a batch, uint8 [H, W, C] each, in new memory; [] if it has none.

    Floats of an own Dataset are stretched: their least value becomes 0 and their greatest 255.
    """
    if hasattr(loader.to_device, "to_pixels"):
        inputs = loader.to_device.to_pixels(inputs)
    if not isinstance(inputs, torch.Tensor) or inputs.ndim != 4 or inputs.shape[1] not in _CHANNELS:
        return []
    if inputs.dtype != torch.uint8 and len(inputs):
        values = inputs.double()
        low, high = values.min(), values.max()
        inputs = ((values - low) * 255 / (high - low).clamp(min=1e-12)).round().to(torch.uint8)
    return [image.permute(1, 2, 0).cpu().clone() for image in inputs]
