"""The pipelines and iterators of "Diving into DALI", by their printed names and arguments."""

import functools
from typing import Any

import torch

from bootfile.ground.errors import BadInput
from bootfile.sampling.plan import Plan
from bootfile.sampling.sampler import WholeBatchSampler
from datasets.compat.dali_dataset import Loader
from datasets.files import CACHE_FOLDER
from datasets.folders import image_folder
from datasets.loaders import backends
from datasets.sampling.augment import center_crop, random_resized_crop
from datasets.stores.files import FileStore


class HybridTrainPipe:
    """The random crops of the images in the class folders of data_dir, decoded by DALI.

    split: whose images. shuffle: whether they get a random order, if the caller does not say it.
    """

    split = "train"
    shuffle = True

    def __init__(
        self,
        batch_size: int,
        num_threads: int,
        device_id: int,
        data_dir: str,
        crop: int,
        mean: Any = None,
        std: Any = None,
        local_rank: int = 0,
        world_size: int = 1,
        dali_cpu: bool = False,
        shuffle: bool | None = None,
        fp16: bool = False,
        min_crop_size: float = 0.08,
        size: int = 0,
    ):
        index = image_folder.load(data_dir, self.split, CACHE_FOLDER, val_share=0)
        box: Any = functools.partial(random_resized_crop, scale=(min_crop_size, 1.0))
        if self.split == "val":
            if size < crop:
                raise BadInput(f"size {size}: expected the pixels of the short side, at least crop {crop}")
            box = functools.partial(center_crop, share=crop / size)
        order = {"rank": local_rank, "world_size": world_size}
        is_shuffled = self.shuffle if shuffle is None else shuffle
        sampler = WholeBatchSampler(len(index), batch_size * world_size, 0, **order, shuffle=is_shuffled)
        self.plan = Plan(index, sampler, box, crop)
        self.store = FileStore(index)
        self.threads = num_threads
        has_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", device_id) if has_gpu else torch.device("cpu")
        self.backend = "dali" if dali_cpu else "dali-gpu"
        # None: that of the iterator
        self.normalisation: Any = None if dali_cpu or mean is None else (mean, std)

    def build(self) -> None:
        """Do nothing: the first batch builds the pipeline."""


class HybridValPipe(HybridTrainPipe):
    """The centres of the images, whose short side is scaled to `size` pixels."""

    split = "val"
    shuffle = False


class DaliIteratorGPU(Loader):
    """The normalised batches (images, labels) of a pipeline. mean, std: of pixels 0..255, for a pipeline with
    dali_cpu; others normalise by their own."""

    def __init__(
        self,
        pipelines: HybridTrainPipe,
        size: int = 0,
        fp16: bool = False,
        mean: Any = (0.0, 0.0, 0.0),
        std: Any = (1.0, 1.0, 1.0),
        pin_memory: bool = True,
        **unused: Any,
    ):
        pipe = pipelines  # there is one
        if pipe.normalisation:
            mean, std = pipe.normalisation
        dtype = torch.float16 if fp16 else None
        build: Any = functools.partial(
            backends.build,
            pipe.backend,
            pipe.store,
            device=pipe.device,
            workers=pipe.threads,
            mean=[value / 255 for value in mean],
            std=[value / 255 for value in std],
            dtype=dtype,
        )
        super().__init__(pipe.plan, build, stays_open=True)

    def reset(self) -> None:
        """Do nothing: each iteration is the next epoch."""


DaliIteratorCPU = DaliIteratorGPU
