"""Weights on disk."""

import contextlib
import os
import tempfile

import torch


def save_weights(model: torch.nn.Module, output_dir: str, epoch: int) -> str:
    """Write `epoch_<epoch>.pth`, a plain state_dict on the CPU, and return its path.

    The file appears under its name only when it is whole and on the disk: a job killed while it saves leaves
    the older files as they were.
    """
    path = os.path.join(output_dir, f"epoch_{epoch}.pth")
    handle, partial = tempfile.mkstemp(prefix=f".epoch_{epoch}.", dir=output_dir)
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save({name: tensor.cpu() for name, tensor in model.state_dict().items()}, file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
    folder = os.open(output_dir, os.O_RDONLY)
    try:
        with contextlib.suppress(
            OSError
        ):  # mounts of object stores know no folders that could be synchronised
            os.fsync(folder)
    finally:
        os.close(folder)
    return path
