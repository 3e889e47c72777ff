"""Open a GPU, and name it. A job of one process on the CPU does not load this module."""

import os
import socket
import warnings

import torch

from bootfile.ground import accelerator
from bootfile.ground.errors import BadInput


def open_gpu(device: torch.device) -> None:
    """Make a GPU the current device. Raises BadInput if the driver is too old for this torch, or if this
    torch has no code for the GPU: otherwise the first kernel would fail, after the set-up."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the same problem in many lines
        try:
            module = accelerator.of(device)
            if hasattr(module, "set_device"):  # MPS has one GPU
                module.set_device(device)
            torch.zeros(1, device=device).add_(1)  # a kernel: it fails if torch has no code for the GPU
        except RuntimeError as error:
            reason = next(iter(str(error).splitlines()), "no reason given")
            raise BadInput(
                f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use the GPU on "
                f"{socket.gethostname()}: {reason}; install a torch that fits the driver and the GPU, or add "
                "--enable_gpu=false"
            ) from error


def identify_gpu() -> str:
    """Return a name of the current GPU: its UUID, or, before torch 2.4, the host and its entry in
    CUDA_VISIBLE_DEVICES. Processes with the same name may share a GPU: each tells its name when they meet."""
    module = accelerator.of(accelerator.kind())
    index = module.current_device()
    uuid = getattr(module.get_device_properties(index), "uuid", None)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    place = visible[index] if index < len(visible) and visible[index] else str(index)
    return str(uuid or f"{socket.gethostname()} {place.strip()}")
