"""Load weights that torchvision and timm publish, by the names of the network and of the weights."""

import os
import re
from typing import Any

import torch

from bootfile.ground.errors import BadInput, in_one_line
from bootfile.ground.files import sha256_file
from common.compute.networks import TIMM, import_timm

DEFAULT = "DEFAULT"


def is_name(arch: str | None, text: str | None) -> bool:
    """Return whether --weights is a name of published weights (DEFAULT, IMAGENET1K_V1, a tag of timm)."""
    return bool(arch and text and re.fullmatch(r"[A-Za-z]\w*", text)) and not os.path.exists(str(text))


def check(arch: str, name: str) -> None:
    """Raise BadInput unless weights of this name are published for the network. Nothing is downloaded."""
    if arch.startswith(TIMM):
        model = arch.removeprefix(TIMM).partition(".")[0]
        tags = [name.partition(".")[2] for name in import_timm().list_pretrained(f"{model}.*")]
    else:
        tags = [*weights_of(arch).__members__]
    names = list(dict.fromkeys([DEFAULT, *tags]))
    if name not in names:
        raise BadInput(f"--weights {name}: no such file; {arch} has {', '.join(names)}")


def read(arch: str, name: str) -> dict[str, torch.Tensor]:
    """Return published weights, name -> tensor, from the library's cache (torchvision: in TORCH_HOME) or
    downloaded. Raises BadInput."""
    try:
        if arch.startswith(TIMM):
            model = arch.removeprefix(TIMM)
            tagged = model if name == DEFAULT else f"{model.partition('.')[0]}.{name}"
            return import_timm().create_model(tagged, pretrained=True).state_dict()
        url = weights_of(arch)[name].url
        path = os.path.join(torch.hub.get_dir(), "checkpoints", os.path.basename(url))
        digest = path.rpartition("-")[2].partition(".")[0]  # the first digits of the file's sha256
        if not os.path.exists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            torch.hub.download_url_to_file(url, path, digest, progress=False)
        # Also if the file was in the cache: another program may have put it there.
        if not sha256_file(path).startswith(digest):
            raise BadInput(f"{path} is damaged: its sha256 does not begin with {digest}; delete it")
        return torch.load(path, map_location="cpu", weights_only=True)
    except BadInput:
        raise
    except Exception as error:  # of the network, the disk, or timm
        raise BadInput(
            f"--weights {name} of {arch} is not in the cache and cannot be downloaded "
            f"({in_one_line(error)}): download it elsewhere, and pass the file"
        ) from error


def weights_of(arch: str) -> Any:
    """Return torchvision's enumeration of the weights of a network."""
    import torchvision

    return torchvision.models.get_model_weights(arch)
