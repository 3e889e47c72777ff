"""The loaders of KSpeed's change of NVIDIA's ConvNets, which return (loader, batches of an epoch)."""

import functools
from typing import Any

from bootfile.ground.errors import BadInput
from bootfile.processes import ranks
from datasets.compat.dali_dataset import Dataset


def _open(
    split: str,
    backend: str,
    data_path: str,
    image_size: int,
    batch_size: int,
    num_classes: int,
    one_hot: bool = False,
    interpolation: str = "bilinear",
    augmentation: str | None = None,
    start_epoch: int = 0,
    workers: int = 5,
    crop_padding: int = 32,
    **unused: Any,
) -> tuple[Any, int]:
    """Return the loader of a split of data_path. Not used: other arguments of ConvNets. Raises BadInput for
    another interpolation than "bilinear", and for an augmentation: the loaders have none."""
    if interpolation != "bilinear" or augmentation:
        raise BadInput(
            f"{interpolation=!s} {augmentation=!s}: this loader has bilinear and None; jobs/imagenet.py has "
            "--interpolation bicubic and --rand_augment"
        )
    dataset = Dataset(
        data_path,
        batch_size,
        workers=workers,
        size=image_size,
        val_size=image_size + crop_padding,
        backend=backend,
        rank=ranks.rank(),
        world_size=ranks.world_size(),
    )
    loader = dataset.get_train_loader() if split == "train" else dataset.get_val_loader()
    loader.set_epoch(start_epoch + 1)  # ConvNets counts epochs from 0
    loader.classes = num_classes if one_hot else 0
    return loader, len(loader)


def _open_dali(split: str, dali_cpu: bool = False, kspeed: bool = True) -> Any:
    """Return the function that opens the loader of a split with DALI. A script of ConvNets calls both.
    dali_cpu has an effect only without kspeed."""
    backend = "dali" if dali_cpu else "dali-gpu"
    if kspeed:
        backend = "dali-kspeed"
    return functools.partial(_open, split, backend)


get_kspeed_train_loader = functools.partial(_open, "train", "kspeed")
get_kspeed_val_loader = functools.partial(_open, "val", "kspeed")
get_dali_kspeed_train_loader = functools.partial(_open_dali, "train")
get_dali_kspeed_val_loader = functools.partial(_open_dali, "val")
