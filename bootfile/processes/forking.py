"""Whether a process that has PyTorch loaded can be forked here."""

import sys

import torch

from bootfile.ground import accelerator

_OLDEST = (2, 6)  # release of torch: a fork aborts at its end in 2.1


def why_not() -> str:
    """Return why this process cannot fork others in place of starting them; "" if it can.

    An elastic job and `bootfile prove` ask before they fork anything. A child of a process that has opened
    the GPUs cannot use them.
    """
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    if release < _OLDEST or sys.platform != "linux":
        return f"it needs torch 2.6 on Linux, this is {torch.__version__} on {sys.platform}"
    if accelerator.count():
        return "it was not run on GPUs yet (--enable_gpu=false)"
    return ""
