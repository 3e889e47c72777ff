"""Training that continues exactly: a step is a pure function of (seed, epoch, step).

    from bootfile import Exact, torch_loader

The names below are the public ones. Each is imported when it is first used: `import bootfile` takes no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bootfile.exact.due import Due as Due
    from bootfile.exact.due import Interval as Interval
    from bootfile.exact.loop import Exact as Exact
    from bootfile.exact.loop import Job as Job
    from bootfile.exact.nonfinite import Diverged as Diverged
    from bootfile.exact.plugins import Plugin as Plugin
    from bootfile.exact.plugins import Processes as Processes
    from bootfile.exact.preemption import Preemption as Preemption
    from bootfile.exact.protocols import TrainingLoader as TrainingLoader
    from bootfile.exact.usual import usual as usual
    from bootfile.ground.errors import BadInput as BadInput
    from bootfile.loaders.loader import Loader as Loader
    from bootfile.loaders.map_style import map_style_loader as map_style_loader
    from bootfile.loaders.torch_loader import torch_loader as torch_loader
    from bootfile.receipt.loop_receipt import Receipt as Receipt
    from bootfile.sampling.sampler import BatchSampler as BatchSampler
    from bootfile.sampling.sampler import SequentialBatchSampler as SequentialBatchSampler
    from bootfile.sampling.sampler import WholeBatchSampler as WholeBatchSampler

__version__ = "0.58.0"

_MODULES = {
    "BadInput": "bootfile.ground.errors",
    "BatchSampler": "bootfile.sampling.sampler",
    "Diverged": "bootfile.exact.nonfinite",
    "Due": "bootfile.exact.due",
    "Exact": "bootfile.exact.loop",
    "Interval": "bootfile.exact.due",
    "Job": "bootfile.exact.loop",
    "Loader": "bootfile.loaders.loader",
    "Plugin": "bootfile.exact.plugins",
    "Preemption": "bootfile.exact.preemption",
    "Processes": "bootfile.exact.plugins",
    "Receipt": "bootfile.receipt.loop_receipt",
    "SequentialBatchSampler": "bootfile.sampling.sampler",
    "TrainingLoader": "bootfile.exact.protocols",
    "WholeBatchSampler": "bootfile.sampling.sampler",
    "map_style_loader": "bootfile.loaders.map_style",
    "torch_loader": "bootfile.loaders.torch_loader",
    "usual": "bootfile.exact.usual",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module 'bootfile' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value  # the next use finds it at once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
