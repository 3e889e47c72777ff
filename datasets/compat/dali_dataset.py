"""A `Dataset` that creates the training and validation loaders of a folder of images.

Interface, names and defaults are those of `Dataset` in "Diving into DALI: how to boost PyTorch data loading",
so its users change only the import. The differences: every process reads its own part. Order and crops follow
from a seed and can be resumed at any step. The validation counts every image once at any batch size. Memory
is freed without reloading a module.

    dataset = Dataset(data_dir, batch_size, val_batch_size, workers, use_dali, dali_cpu, fp16)
    for epoch in range(epochs):
        for images, labels in dataset.get_train_loader(): ...
        dataset.prep_for_val()
        for images, labels in dataset.get_val_loader(): ...
        dataset.reset()
"""

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import one_hot

from bootfile.ground.errors import BadInput
from bootfile.loaders import loader as loaders
from bootfile.processes import ranks
from bootfile.receipt.receipt import Receipt
from bootfile.sampling.plan import Plan
from bootfile.sampling.sampler import BatchSampler, SequentialBatchSampler
from datasets.files import CACHE_FOLDER
from datasets.folders import image_folder
from datasets.loaders import backends
from datasets.loaders.image_loader import MEAN, STD
from datasets.sampling.augment import center_crop, random_resized_crop
from datasets.stores.files import FileStore

# of ImageNet's pixels 0..255
_MEAN = tuple(255 * mean for mean in MEAN)
_STD = tuple(255 * deviation for deviation in STD)


class Loader:
    """The loader of a split. Each iteration is the next epoch.

    It yields (images [n, 3, size, size] normalised and channels_last, labels int64 [n]) on the device.
    `epoch`, `step`: the current epoch, from 1, and its number of yielded batches. set_epoch() takes both to
    resume there. `receipt`: the digest of the yielded batches. `plan`: may be replaced between two epochs.
    `classes`: 0, or their number: labels are then float one-hot vectors [n, classes].
    """

    def __init__(self, plan: Plan, build: Callable[[Plan], loaders.Loader], stays_open: bool):
        self.plan = plan
        self._build = build
        self._stays_open = stays_open  # whether the loader stays open after an epoch
        self._loader: loaders.Loader | None = None  # None until it is needed
        self.receipt = Receipt()
        self._next = (1, 0)  # epoch and step of the next iteration
        self.epoch = 0
        self.step = 0
        self.classes = 0

    def __len__(self) -> int:
        """Return the number of batches of this process in a whole epoch."""
        return len(self.plan)

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        """Set the epoch and the step at which the next iteration starts."""
        self._next = epoch, start_step

    def prepare(self) -> loaders.Loader:
        """Return the loader. Start its threads, processes or pipeline if they are not running."""
        if self._loader is None:
            self._loader = self._build(self.plan)
            self._loader.receipt = self.receipt
        return self._loader

    def close(self) -> None:
        """Stop the threads, processes or pipeline and free their memory. The next iteration restarts them."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        loader = self.prepare()
        loader.plan = self.plan
        self.epoch, self.step = self._next
        self._next = (self.epoch + 1, 0)
        # the training loader is open for all epochs: its plan is moved; the other one begins again
        if self._stays_open:
            self.plan.seek((self.epoch - 1) * len(self) + self.step)
        try:
            for batch in loader:
                self.step += 1
                images, labels = batch
                if self.classes:
                    labels = one_hot(labels, self.classes).float()
                yield images, labels
        finally:
            if not self._stays_open:
                self.close()


class Dataset:
    """Loaders for <data_dir>/train/<class>/* and <data_dir>/val/<class>/*, or for <data_dir>/<class>/*.

    batch_size, val_batch_size: images per batch of one process (default of the second: batch_size). The
        training skips its incomplete last batch.
    workers: threads or processes.
    use_dali: DALI instead of torch's DataLoader.
    dali_cpu: DALI works only on the CPU; the GPU only converts and normalises.
    fp16: float16 images.
    size: pixels of the square images.
    val_size: pixels of the short side of validation images; their centre of `size` pixels is used.
    min_crop_size: minimum share of an image's area in a training crop.
    world_size: number of processes that share an epoch.
    cuda: use a GPU if one is available.
    mean, std: of pixels 0..255, or of pixels / 255 if every std is below 1.
    pin_memory: not used; a GPU is always copied to from pinned memory.
    backend: one of backends.BACKENDS instead of use_dali and dali_cpu.
    rank: default that of torch.distributed.
    cache_dir: folder of the index.
    Only the arguments in the article are positional. Raises BadInput.
    """

    def __init__(
        self,
        data_dir: str,
        batch_size: int,
        val_batch_size: int | None = None,
        workers: int = 4,
        use_dali: bool = False,
        dali_cpu: bool = True,
        fp16: bool = False,
        *,
        size: int = 224,
        val_size: int = 256,
        min_crop_size: float = 0.08,
        world_size: int = 1,
        cuda: bool = True,
        mean: tuple[float, ...] = _MEAN,
        std: tuple[float, ...] = _STD,
        pin_memory: bool = True,
        backend: str | None = None,
        rank: int | None = None,
        seed: int = 0,
        cache_dir: str | None = None,
    ):
        val_batch_size = batch_size if val_batch_size is None else val_batch_size
        counts = {"batch_size": batch_size, "val_batch_size": val_batch_size, "size": size}
        counts |= {"workers": workers, "world_size": world_size}
        for name, value in counts.items():
            _check_count(name, value)
        if use_dali and backend and not backend.startswith("dali"):
            raise BadInput(f"use_dali=True and backend={backend!r} contradict each other")
        if not 0 < min_crop_size <= 1:
            raise BadInput(f"min_crop_size {min_crop_size} is not a share of an image: above 0, at most 1")
        if val_size < size:
            raise BadInput(f"val_size {val_size} is smaller than size {size}, which is cut out of it")
        has_gpu = cuda and torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
        default = "pytorch"
        if use_dali:
            default = "dali" if dali_cpu else "dali-gpu"
        self.backend = backends.resolve(backend or default, self.device)
        if rank is None and world_size > 1 and not ranks.is_initialized():
            raise BadInput(f"world_size {world_size} needs a rank: join the process group, or pass rank=")
        if rank is None:
            rank = ranks.rank() if world_size > 1 else 0
        self._place = {"rank": rank, "world_size": world_size}
        self._size = size
        self._scale = (min_crop_size, 1.0)
        self._seed = seed
        cache = cache_dir or CACHE_FOLDER
        load = functools.partial(image_folder.load, data_dir, cache=cache)
        self._train_index = load("train")
        former = image_folder.name_former(self._train_index.root, cache)
        # such a program has no starts.jsonl: only this index tells that it trained with other images
        if self._train_index.division and os.path.exists(former):
            raise BadInput(
                f"version 0.55.0 (commit 7fefafdc) divided {data_dir} in another way: images of a training "
                f"with it would validate it. Continue it with that version; for a new one delete {former}"
            )
        self._val_index = load("val", classes=self._train_index.classes)

        # they are of pixels / 255 already
        unit = 1 if max(std) < 1 else 255
        build: Any = functools.partial(
            backends.build,
            self.backend,
            device=self.device,
            workers=workers,
            mean=tuple(value / unit for value in mean),
            std=tuple(value / unit for value in std),
            dtype=torch.float16 if fp16 else None,
        )
        build_train = functools.partial(build, FileStore(self._train_index))
        self._train = Loader(self._train_plan(batch_size), build_train, stays_open=True)
        order = SequentialBatchSampler(len(self._val_index), val_batch_size, **self._place)
        crop = functools.partial(center_crop, share=size / val_size)
        val_plan = Plan(self._val_index, order, crop, size)
        build_val = functools.partial(build, FileStore(self._val_index))
        self._val = Loader(val_plan, build_val, stays_open=False)

    def get_train_loader(self) -> Loader:
        return self._train

    def get_val_loader(self) -> Loader:
        return self._val

    def get_nb_train(self) -> int:
        """Return the number of training images of all processes."""
        return len(self._train_index)

    def get_nb_val(self) -> int:
        return len(self._val_index)

    def get_nb_classes(self) -> int:
        return len(self._train_index.classes)

    def set_train_batch_size(self, n: int) -> None:
        """Set the batch size of the next epochs. Raises BadInput."""
        self._train.plan = self._train_plan(n)

    def prep_for_val(self) -> None:
        """Prepare a validation: free memory on the GPU (dali-gpu only) and start the loader."""
        if self.backend == "dali-gpu":
            self._train.close()
        self._val.prepare()

    def reset(self) -> None:
        """Close the validation loader, if no validation has used it since prep_for_val()."""
        self._val.close()

    def close(self) -> None:
        """End all threads, processes and pipelines."""
        self._train.close()
        self._val.close()

    def _train_plan(self, batch_size: int) -> Plan:
        """Return the plan of this process for the training. Raises BadInput."""
        _check_count("batch_size", batch_size)
        together = batch_size * self._place["world_size"]
        order = BatchSampler(len(self._train_index), together, self._seed, **self._place)
        crop = functools.partial(random_resized_crop, scale=self._scale)
        return Plan(self._train_index, order, crop, self._size)


def _check_count(name: str, value: int) -> None:
    """Raise BadInput if an argument of Dataset is not a positive number."""
    if value < 1:
        raise BadInput(f"{name} {value} is not a number above 0")
