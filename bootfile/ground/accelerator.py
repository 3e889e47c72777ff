"""The accelerator of this machine, whatever its vendor: one place knows its type and what it lacks.

torch.cuda, torch.npu and torch.xpu have the same functions, so most callers need only of(device). torch.mps
has no streams. torch.accelerator exists only since torch 2.6.
"""

import contextlib
import functools
import importlib
import importlib.util
from typing import Any

import torch

from bootfile.ground.errors import BadInput, in_one_line


@functools.cache
def kind() -> str:
    """Return the device type of the accelerator that torch was built or extended for, such as "cuda", "npu",
    "xpu" or "mps"; "cuda" if there is none. torch_npu is imported if it is installed. Raises BadInput."""
    # an extension of torch: torch does not know its device before it is imported
    if importlib.util.find_spec("torch_npu"):
        try:
            importlib.import_module("torch_npu")  # adds the device npu and the backend hccl
        except Exception as error:  # without CANN: ImportError, OSError and others
            reason = in_one_line(error, 1000)
            raise BadInput(
                f"torch_npu cannot be imported: {reason}; uninstall it, or install CANN"
            ) from error
        return "npu"
    if hasattr(torch, "accelerator"):
        with contextlib.suppress(RuntimeError):  # torch 2.6 raises it if there is none
            device = torch.accelerator.current_accelerator()
            if device is not None:
                return device.type
    return "cuda"


def of(device: torch.device | str) -> Any:
    """Return the module of torch with the functions of a device: torch.cuda, torch.npu, ..., or torch.cpu."""
    return getattr(torch, torch.device(device).type)


def device_of(model: torch.nn.Module) -> torch.device:
    """Return the device of a model's first parameter; the CPU without one."""
    return next(model.parameters(), torch.empty(0)).device


def count() -> int:
    """Return the number of accelerators, without touching them."""
    return int(of(kind()).device_count())


def in_use() -> Any:
    """Return the module of the accelerator if this process uses it, else None."""
    module = of(kind())
    is_initialized = getattr(module, "is_initialized", lambda: True)  # torch.mps has no such function
    return module if module.is_available() and is_initialized() else None


def has_streams(device: torch.device) -> bool:
    """Return whether a device has streams and events, and reads pinned memory. The CPU and MPS do not."""
    return device.type != "cpu" and hasattr(of(device), "Stream")


def new_event(device: torch.device) -> Any:
    """Return a new event. A host thread that waits for it sleeps if the device can wake it."""
    return of(device).Event(**({"blocking": True} if device.type in ("cuda", "npu") else {}))


@functools.cache
def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64: MPS and some GPUs of Intel do not."""
    if device.type in ("cpu", "cuda"):
        return True
    try:
        torch.zeros(1, dtype=torch.float64, device=device).add_(1)
    except (TypeError, RuntimeError):
        return False
    return True


def home_of_sums(device: torch.device) -> torch.device:
    """Return where sums in float64 are kept: the device, or the CPU if the device has no float64."""
    return device if has_float64(device) else torch.device("cpu")


def double(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in float64 at home_of_sums(). The host waits for a device without float64."""
    return tensor.to(home_of_sums(tensor.device)).double()


def backend() -> str:
    """Return the backend of torch.distributed if each process has an accelerator: nccl, hccl, xccl, ... If
    the device has no float64, gloo is added for the sums, which are on the CPU then."""
    name = torch.distributed.Backend.default_device_backend_map.get(kind(), "gloo")
    return name if has_float64(torch.device(kind())) else f"cpu:gloo,{kind()}:{name}"
