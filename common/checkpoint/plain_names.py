"""The names of weights without those of wrappers. Every job that saves loads it; weights.py only a few."""

from typing import Any

import torch

WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # in names of tensors


def plain_names(model: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a model with the names that it has without wrappers of the model or its parts: what
    another program can load. The Checkpointer calls it on the rank that writes best.pth and epoch_<n>.pth."""
    parallel = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    modules = dict(model.named_modules(remove_duplicate=False))

    def plain(name: str) -> str:
        parts = name.split(".")
        kept = []
        for place, part in enumerate(parts):
            # "module" is left out only below a parallel wrapper: a part of the user's may have this name
            is_in_parallel = isinstance(modules.get(".".join(parts[:place])), parallel)
            if part not in WRAPPERS and not is_in_parallel:
                kept.append(part)
        return ".".join(kept)

    return {plain(name): value for name, value in state.items()}
