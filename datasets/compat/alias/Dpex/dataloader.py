from datasets.compat.dpex import DpexDataLoader

__all__ = ["DpexDataLoader"]
