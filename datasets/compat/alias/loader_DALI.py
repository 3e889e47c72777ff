"""The iterator and the pipeline of Pytorch-speedup's loader_DALI.py, by their printed names and arguments."""

import importlib
import os
from typing import Any

import numpy as np
import torch

from datasets.folders import paired_images
from datasets.loaders.engines.dali import load_dali
from datasets.sampling.sampler import WholeBatchSampler
from datasets.stores.files import PairFiles


class ExternalInputIterator:
    """The encoded files of the pairs of <data_source>/train, in batches ([images], [partners])."""

    def __init__(self, data_source: str, batch_size: int, shuffle: bool):
        cache = os.path.expanduser(os.path.join("~", ".cache", "bootfile"))
        self.store = PairFiles(paired_images.load(data_source, "train", cache))
        self.sampler = WholeBatchSampler(len(self), batch_size, 0, shuffle=shuffle)
        self.step = 0

    def __iter__(self) -> "ExternalInputIterator":
        return self

    def __next__(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        epoch, place = divmod(self.step, len(self.sampler) + 1)
        self.step += 1
        if place == len(self.sampler):
            raise StopIteration
        ids = self.sampler.batch(epoch * len(self.sampler) + place)
        both = self.store.read(np.concatenate([ids, ids + len(self)]))
        files = [np.frombuffer(file, np.uint8) for file in both]
        return files[: len(ids)], files[len(ids) :]

    def __len__(self) -> int:
        return len(self.store.index)


def externalSourcePipeline(
    external_data: Any, resize: int, crop: int, device_id: int | None = 0, **options: Any
) -> Any:
    """Return DALI's pipeline of the pairs in [-1, 1]: same crop and flips for both images of a pair.

    options: batch_size, num_threads and seed. Without a GPU it runs on the CPU.
    """
    fn, _ = load_dali()
    has_gpu = torch.cuda.is_available()

    def graph() -> tuple:
        random = [fn.random.uniform(range=(0.0, 1.0)) for _ in range(2)]
        flips = [fn.random.coin_flip() for _ in range(2)]
        outputs = []
        for files in fn.external_source(source=external_data, num_outputs=2):
            images = fn.resize(
                fn.decoders.image(files, device="mixed" if has_gpu else "cpu"), resize_y=resize
            )
            images = fn.crop(images, crop=(crop, crop), crop_pos_x=random[0], crop_pos_y=random[1])
            images = fn.flip(images, horizontal=flips[0], vertical=flips[1])
            outputs.append(fn.transpose(images, perm=[2, 0, 1]) / 127.5 - 1)
        return tuple(outputs)

    define = importlib.import_module("nvidia.dali").pipeline_def
    return define(graph)(device_id=device_id if has_gpu else None, **options)
