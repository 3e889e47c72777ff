"""The names of weights without those of wrappers: what another program can load."""

from typing import Any

import torch

WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # in names of tensors


def plain_names(model: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a model with the names that it has without wrappers of the model or its parts."""
    parallel = torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel
    modules = dict(model.named_modules(remove_duplicate=False))

    def plain(name: str) -> str:
        parts = name.split(".")
        owners = (modules.get(".".join(parts[:place])) for place in range(len(parts)))
        pairs = zip(parts, owners, strict=True)
        return ".".join(each for each, own in pairs if each not in WRAPPERS and not isinstance(own, parallel))

    return {plain(name): each for name, each in state.items()}
