"""Write pairs of images to one picture."""

import os

import torch
import torchvision

from bootfile.ground.errors import BadInput


def save(path: str, blurry: torch.Tensor, sharp: torch.Tensor) -> None:
    """Write four pairs a row, the sharp image to the right of the blurry one. Raises BadInput.

    blurry, sharp: float [n, 3, rows, columns] in [-1, 1].
    """
    sheet = torch.stack([blurry, sharp], dim=1).flatten(0, 1)
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        torchvision.utils.save_image(sheet, path, nrow=8, normalize=True, value_range=(-1, 1))
    except (OSError, ValueError) as error:  # ValueError: no kind of image has this ending
        raise BadInput(f"cannot write --preview {path}: {error}") from error
