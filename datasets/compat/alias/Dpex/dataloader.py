"""The data loader of Dpex, by the printed path of its module."""

from datasets.compat.dpex import DpexDataLoader

__all__ = ["DpexDataLoader"]
