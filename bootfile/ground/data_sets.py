"""What a job asks of every data set: numbered samples, and the names of its classes."""

from typing import Any

import torch

from bootfile.ground.errors import BadInput


def check_map_style(data: Any) -> None:
    """Raise BadInput if a data set has no numbered samples: a stream, or an object without length."""
    name = type(data).__name__
    if isinstance(data, torch.utils.data.IterableDataset):
        raise BadInput(
            f"{name} is an IterableDataset: its samples have no numbers, so they cannot be shuffled, "
            "divided among the ranks or found again after a restart. Write __getitem__ and __len__ "
            "instead; datasets/shards.py has them for tar files (WebDataset) and Parquet files"
        )
    if isinstance(data, torch.utils.data.DataLoader):
        raise BadInput("a DataLoader is not a data set: give its dataset, or use torch_loader()")
    if not hasattr(data, "__len__"):
        raise BadInput(f"{name} needs __len__ and __getitem__, as every map-style Dataset has")


def class_names_of(data: Any) -> tuple[str, ...]:
    """Return the names of the classes in the order of labels: `class_names`, or torchvision's `classes`; ()
    if the data set has neither. For a Subset they are those of its data set."""
    while not hasattr(data, "class_names") and hasattr(data, "dataset"):
        data = data.dataset
    names = getattr(data, "class_names", getattr(data, "classes", ()))
    return tuple(map(str, names)) if isinstance(names, list | tuple) else ()
